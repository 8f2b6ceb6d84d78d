"""Scores that know where a token stands: ALiBi, Rotary, RelativeBias. All depend on positions only through i − j."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .base import DotKernel, Fact, MatchKernel, Parts, ScoreFact
from .encoding import Encoding
from .values import HeadValue, as_factor, hold, show


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slopes of ALiBi as its authors' code has them, for every number of heads.

    A power of two p: 2^(−8h/p) for h = 1 … p. Any other number: those of the power of two below it, then every second
    one of the power above. ValueError for fewer heads than one.
    Source: Press, Smith & Lewis 2022, section 3, and the authors' `get_slopes`.
    """
    if heads < 1:
        raise ValueError(f"heads={heads}: expected at least 1")
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * h / below) for h in range(1, below + 1)]
    between = [2.0 ** (-8.0 * h / (2 * below)) for h in range(1, 2 * below + 1, 2)]
    return (*slopes, *between[: heads - below])


DIGITS = 6
"""Binary digits of a number whose product with a position is exact."""


class ALiBi(MatchKernel):
    """A penalty that grows with distance, each head at its own rate. Add it to a kernel that reads the content.

    s_ij = −slope_h |i − j|

    q (…, heads, n, d), k (…, heads, m, d) → scores (…, heads, n, m); the contents are not looked at. Slopes, in score
    per token: the authors' for `heads` (`alibi_slopes`), or `slopes`, above zero: a number, a tensor with one entry per
    head, or an `nn.Parameter`. No parameters otherwise. Three operations per pair.
    Under a causal order |i − j| is i − j, and the score an inner product of positions: `ScaledDot() + ALiBi(8)` is then
    computed by a fused kernel. Positions are exact to 2²⁴, and fused in bfloat16 those within 2¹⁶ of the last key.
    There a learned slope's gradient is noisy: it is a sum of rounded numbers times long positions; float32 is not.
    −|i − j| is conditionally positive definite (the variogram of Brownian motion), so e^{−slope |i − j|} is positive
    definite as long as the slope stays above zero.
    ValueError for heads that are not those of q, and for slopes that are not above zero.
    Source: Press, Smith & Lewis 2022, section 3.
    """

    symmetric: Fact = True
    translation_invariant: Fact = True
    position_invariant: Fact = True
    score_positive_definite: ScoreFact = "conditionally"
    positive_definite: Fact = True

    slopes: HeadValue

    def __init__(self, heads: int | None = None, *, slopes: HeadValue | None = None) -> None:
        super().__init__()
        if (heads is None) == (slopes is None):
            raise ValueError(f"ALiBi(heads={heads}, slopes={slopes}): expected one of the two")
        self.heads = heads
        # Plain numbers for the authors' slopes: a model cast to half precision must not round them.
        self._fixed = None if heads is None else alibi_slopes(heads)
        if slopes is not None:
            hold(self, "slopes", slopes, positive=True)

    @property
    def _short(self) -> bool:
        """Whether every slope is a plain number of few binary digits, as those of up to 8 heads are."""
        numbers = self._fixed or ((self.slopes,) if isinstance(self.slopes, float) else ())
        return bool(numbers) and all((math.frexp(x)[0] * 2.0**DIGITS).is_integer() for x in numbers)

    def slope_column(self, q: Tensor) -> Tensor:
        """The slope of each query, (…, n, 1), in float32 or wider."""
        wide = _wide(q)
        slopes = self.slopes if self._fixed is None else torch.tensor(self._fixed, dtype=wide, device=q.device)
        return _nothing(q).to(wide) + as_factor(slopes, q)

    def encode_query(self, q: Tensor, position: Tensor) -> Encoding:
        return _column(q, position), self.slope_column(q)

    def encode_key(self, k: Tensor, position: Tensor) -> Encoding:
        return _column(k, position), _nothing(k)

    def match(self, q: Encoding, k: Encoding) -> Tensor:
        (query_position, slope), (key_position, nothing) = q, k
        assert isinstance(query_position, Tensor) and isinstance(slope, Tensor)
        assert isinstance(key_position, Tensor) and isinstance(nothing, Tensor)
        return (-(slope + nothing.sum()) * (query_position - key_position.mT).abs()).to(nothing.dtype)

    def under_causal_order(self) -> MatchKernel:
        """slope (j − i), the same score where no key is later than its query: an inner product."""
        return _CausalALiBi(self)

    def flops_per_pair(self, query_width: int, key_width: int) -> int:
        """A difference, an absolute value, a product."""
        return 3

    def extra_repr(self) -> str:
        return f"heads={self.heads}" if self.heads is not None else f"slopes={show(self.slopes)}"


def _split(slope: Tensor) -> tuple[Tensor, Tensor]:
    """The slope as a number of few binary digits, which has its derivative, and the rest.

    Veltkamp's split leaves `DIGITS` of 24 in float32, for positions to 2¹⁸.
    """
    shifted = slope * (2.0 ** (24 - DIGITS) + 1.0)
    high = slope + (shifted - (shifted - slope) - slope).detach()
    return high, (slope - high).detach()


class _CausalALiBi(DotKernel):
    """slope (j − i) = slope · j − slope · i, written so that a fused kernel's sums lose nothing.

    A softmax over the keys could do without −slope · i. But slope · j alone is thousands for a long text, and the
    digits of a content score would be lost beside it.
    """

    translation_invariant: Fact = True
    position_invariant: Fact = True

    def __init__(self, kernel: ALiBi) -> None:
        super().__init__()
        self.kernel = kernel

    def encode_pair(
        self, q: Tensor, k: Tensor, query_position: Tensor, key_position: Tensor, *, up_to_row_shift: bool = False
    ) -> Parts:
        # Distances do not change when all positions move, and those near the last key are the ones that decoding needs.
        last = key_position[..., -1:]
        here = _column(q, query_position - last if last.shape[-1] else query_position)
        there = _column(k, key_position - last)
        slope = self.kernel.slope_column(q).to(_wide(q))
        # A position may leave the range of float16 where its sixteenth does not.
        one = torch.full_like(there, 16.0)
        if q.dtype != slope.dtype:
            return Parts(
                q[..., :0],
                k[..., :0],
                fine_q=torch.cat([16.0 * slope, -slope * here / 16.0], -1),
                fine_k=torch.cat([there / 16.0, one], -1),
            )
        # With few binary digits of the slope its product with a position is exact, and what is exact cancels.
        high, low = (slope, None) if self.kernel._short else _split(slope)
        zero = torch.zeros_like(high)
        # Some matrix products keep a sum of the even coordinates and one of the odd: with a 0 between them, the two
        # that cancel follow each other in those too. A last 0 makes the width even, which takes less time.
        query, key = [16.0 * high, zero, -high * here / 16.0], [there / 16.0, one, one]
        query += [zero] if low is None else [16.0 * low, zero, -low * here / 16.0]
        key += [one] if low is None else [there / 16.0, one, one]
        return Parts(q[..., :0], k[..., :0], fine_q=torch.cat(query, -1), fine_k=torch.cat(key, -1))

    def flops_per_pair(self, query_width: int, key_width: int) -> int:
        """A product and a sum for each of four coordinates, or six."""
        return 8 if self.kernel._short else 12

    def extra_repr(self) -> str:
        return repr(self.kernel)


class Rotary(DotKernel):
    """The scaled dot product after turning pairs of coordinates by an angle that grows with the position.

    s_ij = (R_i q_i) · (R_j k_j) / √d = q_iᵀ R_{j−i} k_j / √d,  R_p turns pair t by p · base^(−2t/dim)

    q (…, n, d), k (…, m, d) → scores (…, n, m). The first `dim` ≤ d coordinates turn, the others stay as they are; d is
    the full width. Pair t is made of coordinates t and t + dim/2 (Llama, and the library that most models are shared
    in), or of 2t and 2t + 1 with `interleaved` (the paper, GPT-J). `base` sets the slowest turn, 2π · base^(1−2/dim)
    tokens; 10000 is the paper's. No parameters. A pass over q and k, then 2nmd operations.
    Angles are reduced in float64, cosines and sines are float32 (float64 for float64 inputs) whatever the inputs' type.
    Positive definite, and eˢ too: it is `ScaledDot` after a map of each token.
    ValueError for a dim that is odd or below 2, a base that is not above zero, an input narrower than dim.
    Source: Su et al. 2021 (RoFormer), eq. 15, 16 and 34.
    """

    symmetric: Fact = True
    translation_invariant: Fact = False
    position_invariant: Fact = True
    score_positive_definite: ScoreFact = True
    positive_definite: Fact = True

    def __init__(self, dim: int, base: float = 10000.0, interleaved: bool = False) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"Rotary(dim={dim}): expected an even number, at least 2: coordinates turn in pairs")
        if not (base > 0 and math.isfinite(base)):
            raise ValueError(f"Rotary(base={base}): expected a finite number above 0")
        self.dim, self.base, self.interleaved = dim, float(base), interleaved

    def scale(self, width: int) -> float:
        return 1.0 / math.sqrt(width)

    def encode_query(self, q: Tensor, position: Tensor) -> Tensor:
        return self._turn("q", q, position)

    def encode_key(self, k: Tensor, position: Tensor) -> Tensor:
        return self._turn("k", k, position)

    def _turn(self, name: str, x: Tensor, position: Tensor) -> Tensor:
        if x.shape[-1] < self.dim:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: {self!r} turns {self.dim} coordinates, "
                f"expected a last dimension of at least {self.dim}"
            )
        cos, sin = self._table(position, _wide(x))
        turning = x[..., : self.dim].to(cos.dtype)
        if self.interleaved:
            a, b = turning[..., 0::2], turning[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = turning.chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        turned = turned.to(x.dtype)
        return turned if x.shape[-1] == self.dim else torch.cat([turned, x[..., self.dim :]], -1)

    def _table(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines (…, tokens, dim/2) of the angles."""
        pair = torch.arange(self.dim // 2, dtype=torch.float64, device=position.device)
        angle = position.to(torch.float64).unsqueeze(-1) * self.base ** (-2.0 * pair / self.dim)
        # A float32 angle of a million radians is off by a sixteenth; once the full turns are gone, by 2e-7.
        angle = (angle - 2.0 * math.pi * torch.round(angle / (2.0 * math.pi))).to(dtype)
        return angle.cos(), angle.sin()

    def extra_repr(self) -> str:
        base = "" if self.base == 10000.0 else f", base={self.base:g}"
        return f"{self.dim}{base}{', interleaved=True' if self.interleaved else ''}"


class RelativeBias(MatchKernel):
    """A learned number for each head and each range of distances. Add it to a kernel that reads the content.

    s_ij = weight[bucket(j − i), h]

    q (…, heads, n, d), k (…, heads, m, d) → scores (…, heads, n, m); the contents are not looked at. Half of the
    buckets hold one distance each, the other half ranges that widen logarithmically up to `max_distance`; the last
    holds everything beyond. With `bidirectional` one half of all buckets is for later keys; without it, all later keys
    share the bucket of distance 0, which suits a causal order. Defaults are T5's. `weight` has shape (buckets, heads)
    as in T5, and starts normal with standard deviation 0.02; draw another with `reset_parameters(generator)`. One
    gather per pair.
    Nothing ties the entries together, so it is neither symmetric nor positive definite in general.
    ValueError for counts that leave a bucket empty or unreachable, and for heads that are not those of q.
    Source: Raffel et al. 2020 (T5), section 2.1, and the authors' code for the buckets.
    """

    translation_invariant: Fact = True
    position_invariant: Fact = True

    offset_bucket: Tensor

    def __init__(
        self,
        heads: int,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"RelativeBias(heads={heads}): expected at least 1")
        each = buckets // 2 if bidirectional else buckets
        if each < 2 or (bidirectional and buckets % 2):
            least = "an even number of at least 4" if bidirectional else "at least 2"
            raise ValueError(f"RelativeBias(buckets={buckets}, bidirectional={bidirectional}): expected {least}")
        if max_distance <= each // 2:
            raise ValueError(
                f"RelativeBias(max_distance={max_distance}): expected more than {each // 2}, "
                "the distances that have a bucket of their own"
            )
        self.heads, self.buckets, self.max_distance, self.bidirectional = heads, buckets, max_distance, bidirectional
        self.weight = nn.Parameter(torch.empty(buckets, heads))
        self.register_buffer("offset_bucket", self._buckets(), persistent=False)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the table anew, from `generator` or torch's own."""
        with torch.no_grad():
            self.weight.normal_(0.0, 0.02, generator=generator)

    def _buckets(self) -> Tensor:
        """The bucket of each offset j − i from −max_distance to max_distance; beyond them nothing changes."""
        each = self.buckets // 2 if self.bidirectional else self.buckets
        exact = each // 2
        offset = torch.arange(-self.max_distance, self.max_distance + 1)
        distance = offset.abs() if self.bidirectional else (-offset).clamp_min(0)
        # In float32, as T5 has it: where a logarithm falls on the border of two buckets, rounding decides.
        ratio = torch.log(distance.clamp_min(1).float() / exact) / math.log(self.max_distance / exact)
        ranged = (exact + (ratio * (each - exact)).long()).clamp_max(each - 1)
        bucket = torch.where(distance < exact, distance, ranged)
        return bucket + each * (offset > 0) if self.bidirectional else bucket

    def encode_query(self, q: Tensor, position: Tensor) -> Encoding:
        if self.heads > 1 and (q.dim() < 3 or q.shape[-3] != self.heads):
            raise ValueError(
                f"q has shape {tuple(q.shape)}: {self!r} holds a bias for each of {self.heads} heads, "
                f"expected {self.heads} at dimension -3"
            )
        head = torch.arange(self.heads, device=q.device, dtype=_wide(q))[:, None, None]
        nothing = _nothing(q)
        return _column(q, position), nothing.detach().to(head.dtype) + (head if self.heads > 1 else 0.0), nothing

    def encode_key(self, k: Tensor, position: Tensor) -> Encoding:
        return _column(k, position), _nothing(k)

    def match(self, q: Encoding, k: Encoding) -> Tensor:
        (query_position, head, no_query), (key_position, no_key) = q, k
        assert isinstance(query_position, Tensor) and isinstance(head, Tensor) and isinstance(no_query, Tensor)
        assert isinstance(key_position, Tensor) and isinstance(no_key, Tensor)
        # One row of biases per head, from the farthest key before to the farthest after, laid end to end.
        bias = self.weight[self.offset_bucket].mT.flatten() + (no_query.sum() + no_key.sum())
        start = head * (2 * self.max_distance + 1) + self.max_distance
        offset = (key_position.mT - query_position).clamp(-self.max_distance, self.max_distance)
        # index_select takes 32-bit indices as they are; bias[…] would copy them to 64, and is slower.
        at = (offset + start).int()
        return bias.index_select(0, at.flatten()).reshape(at.shape)

    def flops_per_pair(self, query_width: int, key_width: int) -> int:
        """A difference, two bounds, the start of the head's row."""
        return 4

    def extra_repr(self) -> str:
        buckets = "" if self.buckets == 32 else f", buckets={self.buckets}"
        distance = "" if self.max_distance == 128 else f", max_distance={self.max_distance}"
        return f"heads={self.heads}{buckets}{distance}{'' if self.bidirectional else ', bidirectional=False'}"


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _column(x: Tensor, position: Tensor) -> Tensor:
    """The positions as a column beside each token of x (…, tokens, width), in float32 or wider."""
    return position.to(_wide(x)).unsqueeze(-1) + _nothing(x).detach().to(_wide(x))


def _nothing(x: Tensor) -> Tensor:
    """A zero for each token of x, (…, tokens, 1): a score that looks at no content still hands it a gradient, zero."""
    return x[..., :0].sum(-1, keepdim=True)
