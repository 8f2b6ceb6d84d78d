"""What a match kernel is: encode each token once, then score every query against every key."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..shapes import broadcast
from .dot_tiles import ProductForm
from .encoding import Encoding
from .tiles import Tiles

Fact = bool | None
ScoreFact = bool | None | Literal["conditionally"]


class MatchKernel(nn.Module):
    """A rule that scores a query against a key.

    s_ij = match(encode_query(q_i, position_i), encode_key(k_j, position_j))

    Subclass it and write `match(q, k)`, from (…, n, d) and (…, m, d) to scores (…, n, m). The encoders run once per
    token and are the only place that sees positions; by default they return the token unchanged. Whatever is written
    here in differentiable torch operations runs, trains and is tested: see `matchkernel.testing.check`.

    A kernel declares facts, and the tests hold it to them. None is the honest answer where nothing is proven.
      symmetric                s(x, y) = s(y, x)
      translation_invariant    s(x + c, y + c) = s(x, y), in the content
      position_invariant       s depends on positions only through i − j
      score_positive_definite  s is a positive definite kernel; "conditionally" for weights that sum to zero
      positive_definite        the weight κ = eˢ is a positive definite kernel
    """

    symmetric: Fact = None
    translation_invariant: Fact = None
    position_invariant: Fact = None
    score_positive_definite: ScoreFact = None
    positive_definite: Fact = None

    def encode_query(self, q: Tensor, position: Tensor) -> Encoding:
        """What the kernel keeps of each query: (…, n, d) and positions (…, n) → an encoding with n tokens."""
        return q

    def encode_key(self, k: Tensor, position: Tensor) -> Encoding:
        """What the kernel keeps of each key: (…, m, d) and positions (…, m) → an encoding with m tokens."""
        return k

    def match(self, q: Encoding, k: Encoding) -> Tensor:
        """Scores (…, n, m) of all encoded queries against all encoded keys."""
        raise NotImplementedError(f"{type(self).__name__} must define match(q, k) -> scores of shape (…, n, m)")

    def encode(
        self, q: Tensor, k: Tensor, query_position: Tensor, key_position: Tensor, *, up_to_row_shift: bool = False
    ) -> tuple[Encoding, Encoding]:
        """Both encodings. With `up_to_row_shift`, terms that depend on the query alone may be left out of the score."""
        return self.encode_query(q, query_position), self.encode_key(k, key_position)

    def under_causal_order(self) -> MatchKernel:
        """A kernel with the same scores wherever no key is later than its query; itself unless it knows a better."""
        return self

    def tiles(self, q: Encoding, k: Encoding) -> Tiles | None:
        """This kernel's own arithmetic for tiles of these encodings; None to have `match` used and differentiated.

        An engine that streams asks with all encodings, (…, n, ·) and (…, m, ·), and cuts what it gets along the tokens.
        """
        return None

    def flops_per_pair(self, query_width: int, key_width: int) -> int | None:
        """Operations to score one pair, given the widths of q and k; None when nobody has counted them."""
        return None

    def forward(
        self, q: Tensor, k: Tensor, query_position: Tensor | None = None, key_position: Tensor | None = None
    ) -> Tensor:
        """The full scores (…, n, m) of q (…, n, d) against k (…, m, d).

        Positions default to 0 … m−1 for the keys and the last n of them for the queries.
        """
        n, m = q.shape[-2], k.shape[-2]
        if query_position is None:
            query_position = torch.arange(m - n, m, device=q.device)
        if key_position is None:
            key_position = torch.arange(m, device=k.device)
        return self.match(*self.encode(q, k, query_position, key_position))

    def kappa(
        self, q: Tensor, k: Tensor, query_position: Tensor | None = None, key_position: Tensor | None = None
    ) -> Tensor:
        """The kernel's weights κ = eˢ (…, n, m), before any normaliser; arguments as in `forward`.

        Infinite where the score is beyond the logarithm of what the type holds.
        """
        return self(q, k, query_position, key_position).exp()  # type: ignore[no-any-return]

    def __add__(self, other: object) -> MatchKernel:
        """Scores add, so weights multiply."""
        if not isinstance(other, MatchKernel):
            return NotImplemented
        return algebra.add(self, other)

    def __mul__(self, factor: object) -> MatchKernel:
        """The score times a number, a tensor with one entry per head, or a parameter."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float, Tensor)):
            return NotImplemented
        return algebra.scale(self, factor)

    __rmul__ = __mul__

    def __neg__(self) -> MatchKernel:
        return -1.0 * self

    def __sub__(self, other: object) -> MatchKernel:
        """Scores subtract, so weights divide."""
        return self + -other if isinstance(other, MatchKernel) else NotImplemented

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


class Parts(NamedTuple):
    """What a dot kernel makes of all queries and keys together, before each is one tensor.

    s_ij = scale · (⟨q_i, k_j⟩ + ⟨fine_q_i, fine_k_j⟩) + query_term_i

    q (…, n, w), k (…, m, w), query_term (…, n) or None. The fine coordinates, (…, n, f) and (…, m, f) or None for both,
    are those whose products are large and cancel, such as norms and positions. They stay in float32 or wider through
    sums and multiples; `DotKernel.encode` rounds them last, into high and low parts where q and k are in a half type.
    `scale` is what `DotKernel.scale` says for the width w.
    """

    q: Tensor
    k: Tensor
    query_term: Tensor | None = None
    fine_q: Tensor | None = None
    fine_k: Tensor | None = None


class DotKernel(MatchKernel):
    """A kernel whose score is an inner product of encodings, so that a fused attention kernel computes it.

    s_ij = scale · ⟨encode_query(q_i), encode_key(k_j)⟩ + query_term(q_i)

    The whole kernel is in the encoders. `scale(width)` returns a plain number, which fused kernels apply for nothing.
    `query_term` holds what depends on the query alone: a softmax over the keys cannot see it, so it is added only where
    it is seen.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if not callable(cls.__dict__.get("scale", cls.scale)):
            raise TypeError(f"{cls.__name__}.scale: expected a method scale(width) that returns a number")
        if "match" in cls.__dict__:
            # A fused kernel never calls it, so the scores would depend on who computes them.
            raise TypeError(
                f"{cls.__name__} is a DotKernel, whose match is the inner product of its encodings: "
                "override the encoders, or subclass MatchKernel to write another match"
            )

    def scale(self, width: int) -> float:
        """The number that multiplies the inner product, given the width of the encodings."""
        return 1.0

    def query_term(self, q: Tensor, position: Tensor) -> Tensor | None:
        """A term (…, n) of the score that no key changes, or None."""
        return None

    def flops_per_pair(self, query_width: int, key_width: int) -> int | None:
        """A multiplication and an addition for each coordinate of the key's encoding."""
        return 2 * key_width

    def match(self, q: Encoding, k: Encoding) -> Tensor:
        """scale · q kᵀ, shape (…, n, m)."""
        q, k = as_tensor(q, self), as_tensor(k, self)
        return self.scale(q.shape[-1]) * (q @ k.mT)

    def tiles(self, q: Encoding, k: Encoding) -> Tiles | None:
        return Tiles(ProductForm(self.scale(as_tensor(q, self).shape[-1])), q, k)

    def encode_pair(
        self, q: Tensor, k: Tensor, query_position: Tensor, key_position: Tensor, *, up_to_row_shift: bool = False
    ) -> Parts:
        """All of the above in one call, for a kernel that must see queries and keys together or has fine coordinates.

        `encode`, sums and multiples ask for this alone, so a kernel that overrides it need not define the others.
        """
        return Parts(
            as_tensor(self.encode_query(q, query_position), self),
            as_tensor(self.encode_key(k, key_position), self),
            None if up_to_row_shift else self.query_term(q, query_position),
        )

    def encode(
        self, q: Tensor, k: Tensor, query_position: Tensor, key_position: Tensor, *, up_to_row_shift: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Both encodings; what is fine, and a query term that matters, become coordinates: still an inner product."""
        parts = self.encode_pair(q, k, query_position, key_position, up_to_row_shift=up_to_row_shift)
        self._check_encodings(q, k, parts.q, parts.k)
        dtype = torch.promote_types(parts.q.dtype, parts.k.dtype)
        width = parts.q.shape[-1]
        fine = (0 if parts.fine_q is None else parts.fine_q.shape[-1]) + (parts.query_term is not None)
        before, after = self.scale(width), self.scale(width + fine * columns_of_fine(dtype))
        of_query, of_key = [parts.q if before == after else parts.q * (before / after)], [parts.k]
        if parts.fine_q is not None and parts.fine_k is not None:
            fine_q, fine_k = as_columns(parts.fine_q * (before / after), parts.fine_k, dtype)
            # In front: sums run from left to right, and what cancels must be gone before the small terms come.
            of_query.insert(0, fine_q)
            of_key.insert(0, fine_k)
        if parts.query_term is not None:
            term = parts.query_term.unsqueeze(-1) / after
            # A norm may leave the range of float16 where its sixteenth does not.
            term, one = as_columns(term / 16.0, term.new_full((1, 1), 16.0), dtype)
            of_query.append(term)
            of_key.append(one.expand(*parts.k.shape[:-1], -1))
        return concatenate(*of_query), concatenate(*of_key)

    def _check_encodings(self, q: Tensor, k: Tensor, encoded_q: Tensor, encoded_k: Tensor) -> None:
        """Equal widths, and one row per token: torch's fused kernel reads past the end of what is shorter."""
        if encoded_q.shape[-1] != encoded_k.shape[-1]:
            raise ValueError(
                f"q has shape {tuple(q.shape)} and k has shape {tuple(k.shape)}: {self!r} encodes them with widths "
                f"{encoded_q.shape[-1]} and {encoded_k.shape[-1]}, expected equal ones"
            )
        for name, x, encoded in (("q", q, encoded_q), ("k", k, encoded_k)):
            if not 2 <= encoded.dim() <= max(q.dim(), k.dim()) or encoded.shape[-2] != x.shape[-2]:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: {self!r} encodes it as {tuple(encoded.shape)}, "
                    f"expected (…, {x.shape[-2]}, width)"
                )


def as_tensor(encoding: Encoding, kernel: MatchKernel) -> Tensor:
    """The encoding of a kernel that takes one tensor, as dot kernels do."""
    if not isinstance(encoding, Tensor):
        raise TypeError(
            f"{type(kernel).__name__}: its encoders must return one tensor each, got a {type(encoding).__name__}"
        )
    return encoding


def concatenate(*encodings: Tensor) -> Tensor:
    """Encodings side by side."""
    if len(encodings) == 1:
        return encodings[0]
    leading = broadcast(*(x.shape[:-1] for x in encodings))
    if leading is None:
        shapes = " and ".join(str(tuple(x.shape)) for x in encodings)
        raise ValueError(f"encodings of shape {shapes} do not broadcast")
    return torch.cat([x.expand(*leading, -1) for x in encodings], dim=-1)


def columns_of_fine(dtype: torch.dtype) -> int:
    """How many columns of `dtype` one fine coordinate takes."""
    return 1 if torch.finfo(dtype).bits >= 32 else 3


def as_columns(q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Fine coordinates (…, n, f) and (…, m, f) in `dtype`, with the same inner product.

    A half type keeps two or three digits of a number, so each is the sum of a high and a low part; the product of the
    low parts is lost. The derivative passes through the high part, and cancels in the low one.
    """
    if columns_of_fine(dtype) == 1:
        return q.to(dtype), k.to(dtype)
    (high_q, low_q), (high_k, low_k) = _high_and_low(q, dtype), _high_and_low(k, dtype)
    return torch.cat([high_q, low_q, high_q], dim=-1), torch.cat([high_k, high_k, low_k], dim=-1)


def _high_and_low(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    high = x.to(dtype)
    return high, (x - high).to(dtype)


# The algebra is made of the classes above, and they speak it: a + b, c * a.
from . import algebra  # noqa: E402
