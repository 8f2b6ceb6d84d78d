"""Feature maps without parameters: elu + 1, Taylor, polynomial, DPFP, and cosFormer's with its positions."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter

import torch
from torch import Tensor

from .base import Fact
from .feature_base import FeatureKernel, Features
from .feature_maps import EluMap, FeatureMap


class EluFeatures(FeatureKernel):
    """elu + 1, coordinate by coordinate: a straight line above 0, an exponential below.

    κ_ij = φ(q_i) · φ(k_j),  φ(x)_c = x_c + 1 for x_c > 0, e^{x_c} otherwise

    q (…, n, d), k (…, m, d) → κ (…, n, m) > 0, from d features. No parameters. The exponential is taken as it is:
    `elu(x) + 1` is 0 in bfloat16 from x = −8 on, and no longer positive. A token keeps its largest feature as a scale
    of its own, so that one below 0 in all coordinates does not fade before e^x does, and a long one does not overflow.
    Positive definite: an inner product of one map. The sum of a row is never 0, but few directions can be told apart:
    d features, so that a memory of more than d keys mixes them.
    Source: Katharopoulos et al. 2020, eq. 7.
    """

    positive = True
    symmetric: Fact = True
    translation_invariant: Fact = False
    position_invariant: Fact = True
    positive_definite: Fact = True

    def features(self, x: Tensor, position: Tensor) -> Features:
        largest = _largest(x)
        top, size = largest.clamp_max(0.0), largest.clamp_min(0.0) + 1.0
        # Above 0 the exponential is 1 and moves nothing. A choice by torch.where takes ten times as long as the sum.
        above = x.relu()
        # In place where autograd keeps nothing of what is overwritten: fresh memory costs as much as the arithmetic.
        values = ((x - above).sub_(top).exp_() + above).div_(size)
        return Features(values, (top + size.log()).squeeze(-1))

    def feature_map(self, dtype: torch.dtype) -> FeatureMap | None:
        return EluMap() if self._maps_as(EluFeatures) else None

    def feature_count(self, width: int) -> int:
        return width


class TaylorFeatures(FeatureKernel):
    """The exponential of the scaled dot product, to second order.

    κ_ij = 1 + x + x²/2,  x = q_i · k_j / √d

    q (…, n, d), k (…, m, d) → κ (…, n, m) ≥ 1/2, from 1 + d + d(d + 1)/2 features: 1, the coordinates, and their
    products in pairs, each pair once. No parameters. Near e^x while |x| is below 1, and for large negative x it grows
    where e^x falls: κ = ((1 + x)² + 1)/2 has its least value at x = −1. What is left of it there after summing
    products of the size of |q|²|k|²/d is rounding, beyond |q||k| ≈ 10³√d in float32.
    Positive definite: an inner product of one map.
    Source: Arora et al. 2024 (Based); Zhang et al. 2024 (The Hedgehog & the Porcupine), which weighs it against others.
    """

    positive = True
    symmetric: Fact = True
    translation_invariant: Fact = False
    position_invariant: Fact = True
    positive_definite: Fact = True

    def features(self, x: Tensor, position: Tensor) -> Features:
        width = x.shape[-1]
        x = x * _fourth_root(width)
        size = _size(x).clamp_min(1.0)
        y = x / size
        first, second = torch.triu_indices(width, width, device=x.device)
        pairs = y[..., first] * y[..., second]
        # q_a q_b k_a k_b is there twice in (q·k)²/2 for a ≠ b, and once for a = b.
        pairs = pairs * torch.where(first == second, x.new_tensor(0.5), 1.0).sqrt()
        return Features(torch.cat([size**-2, y / size, pairs], dim=-1), 2.0 * size.log().squeeze(-1))

    def feature_count(self, width: int) -> int:
        return 1 + width + width * (width + 1) // 2


class PolynomialFeatures(FeatureKernel):
    """A power of the dot product plus a constant.

    κ_ij = (q_i · k_j + c)^p

    q (…, n, d), k (…, m, d) → κ (…, n, m), in the 2p-th power of the inputs' unit for c = 0. `degree` p is an integer
    of at least 1 (default 2), `offset` c a number of at least 0 (default 1): below 0 there is no real map. One feature
    for each monomial of degree p in the coordinates and √c, with the square root of its multinomial coefficient:
    C(d + p, p) of them, or C(d + p − 1, p) for c = 0, which grows fast. No parameters.
    κ ≥ 0 for an even degree; for an odd one it has the sign of q·k + c, and no logarithm. Positive definite: an inner
    product of one map. ValueError for a degree or an offset out of range.
    Source: Schölkopf & Smola 2002, prop. 2.1; as attention, Kacham, Mirrokni & Zhong 2024 (PolySketchFormer).
    """

    symmetric: Fact = True
    translation_invariant: Fact = False
    position_invariant: Fact = True
    positive_definite: Fact = True

    def __init__(self, degree: int = 2, offset: float = 1.0) -> None:
        super().__init__()
        self.degree = _count("PolynomialFeatures(degree=…)", degree)
        if isinstance(offset, bool) or not isinstance(offset, (int, float)) or not 0.0 <= offset < math.inf:
            raise ValueError(f"PolynomialFeatures(offset=…): expected a finite number of at least 0, got {offset!r}")
        self.offset = float(offset)
        self.nonnegative = self.degree % 2 == 0

    def features(self, x: Tensor, position: Tensor) -> Features:
        if self.offset:
            x = torch.cat([x, x.new_full((*x.shape[:-1], 1), math.sqrt(self.offset))], dim=-1)
        size = _size(x)
        y = x / size
        factors, root = _monomials(x.shape[-1], self.degree)
        values = root.to(y).expand(*x.shape[:-1], -1)
        for factor in factors.to(x.device).unbind(-1):
            values = values * y[..., factor]
        return Features(values, self.degree * size.log().squeeze(-1))

    def feature_count(self, width: int) -> int:
        return math.comb(width + (self.offset > 0.0) + self.degree - 1, self.degree)

    def extra_repr(self) -> str:
        return f"{self.degree}, offset={self.offset:g}"


class DPFPFeatures(FeatureKernel):
    """Products of rectified coordinates with their neighbours: most are 0, and keys fall into bins of their own.

    κ_ij = φ(q_i) · φ(k_j),  φ(x) has r_c r_{c+a} for c = 1 … 2d and a = 1 … ν,  r = relu([x, −x]), c + a modulo 2d

    q (…, n, d), k (…, m, d) → κ (…, n, m) ≥ 0, from 2dν features. `nu` ν is an integer from 1 (default) to 2d − 1. No
    parameters. κ is exactly 0 where query and key share no pair of signs, and a query that shares none with any key
    gets zeros. Positive definite: an inner product of one map.
    ValueError for a ν out of range.
    Source: Schlag, Irie & Schmidhuber 2021, section 5.3 (deterministic parameter-free projection).
    """

    nonnegative = True
    symmetric: Fact = True
    translation_invariant: Fact = False
    position_invariant: Fact = True
    positive_definite: Fact = True

    def __init__(self, nu: int = 1) -> None:
        super().__init__()
        self.nu = _count("DPFPFeatures(nu=…)", nu)

    def features(self, x: Tensor, position: Tensor) -> Features:
        if self.nu > 2 * x.shape[-1] - 1:
            raise ValueError(
                f"DPFPFeatures(nu={self.nu}) of tokens of shape {tuple(x.shape)}: "
                f"expected ν at most twice the width less one, {2 * x.shape[-1] - 1}"
            )
        size = _size(x)
        r = torch.cat([x, -x], dim=-1).relu() / size
        values = torch.cat([r * r.roll(-shift, dims=-1) for shift in range(1, self.nu + 1)], dim=-1)
        return Features(values, 2.0 * size.log().squeeze(-1))

    def feature_count(self, width: int) -> int:
        return 2 * width * self.nu

    def extra_repr(self) -> str:
        return f"nu={self.nu}"


class CosFeatures(FeatureKernel):
    """Rectified coordinates, weighed by a cosine of how far apart the two positions are.

    κ_ij = relu(q_i) · relu(k_j) cos(π (i − j) / 2M)

    q (…, n, d), k (…, m, d) → κ (…, n, m) ≥ 0, from 2d features, since cos(a − b) = cos a cos b + sin a sin b. `length`
    M, in positions, is an integer of at least 1: as many as the longest sequence has. No parameters. κ is exactly 0
    where query and key share no coordinate above 0, and a query that shares none with any key gets zeros.
    Positive definite, as a kernel of tokens with their positions: an inner product of one map.
    ValueError for positions more than M apart, whose cosine would be negative.
    Source: Qin et al. 2022 (cosFormer), section 3.
    """

    nonnegative = True
    symmetric: Fact = True
    translation_invariant: Fact = False
    position_invariant: Fact = True
    positive_definite: Fact = True

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = _count("CosFeatures(length=…)", length)

    def check_positions(self, query_position: Tensor, key_position: Tensor) -> None:
        if query_position.numel() and key_position.numel() and not torch.compiler.is_compiling():
            first = torch.minimum(query_position.min(), key_position.min())
            last = torch.maximum(query_position.max(), key_position.max())
            if bool(last - first > self.length):
                raise ValueError(
                    f"{self!r}: positions from {first.item():g} to {last.item():g} are more than {self.length} apart; "
                    "make length at least as long as the sequence"
                )

    def features(self, x: Tensor, position: Tensor) -> Features:
        angle = (position.to(x.dtype) * (math.pi / (2 * self.length))).unsqueeze(-1)
        size = _size(x)
        r = x.relu() / size
        return Features(torch.cat([r * angle.cos(), r * angle.sin()], dim=-1), size.log().squeeze(-1))

    def feature_count(self, width: int) -> int:
        return 2 * width

    def extra_repr(self) -> str:
        return f"{self.length}"


def _count(owner: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}: expected an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{owner}: expected at least 1, got {value}")
    return value


def _fourth_root(width: int) -> float:
    """What both q and k are multiplied with, so that q·k becomes q·k/√d."""
    return width**-0.25 if width else 1.0


def _largest(x: Tensor) -> Tensor:
    """The largest entry of each token (…, n, 1), detached; 0 where it is not finite."""
    if x.shape[-1] == 0:
        return x.new_zeros(*x.shape[:-1], 1)
    return x.detach().amax(dim=-1, keepdim=True).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _size(x: Tensor) -> Tensor:
    """The largest absolute entry of each token (…, n, 1), detached; 1 where that is 0."""
    size = _largest(x.abs())
    return torch.where(size > 0.0, size, 1.0)


def _monomials(width: int, degree: int) -> tuple[Tensor, Tensor]:
    """The monomials of exactly this degree, by their factors (f, degree), and the roots (f,) of their coefficients."""
    which, ways = _counted(width, degree)
    factors = torch.tensor(which, dtype=torch.long).reshape(-1, degree)
    return factors, torch.tensor(ways, dtype=torch.float64).sqrt()


# What torch.compiler.assume_constant_result does; but that imports the compiler, a second and sympy, to do it.
_monomials.__dict__["_dynamo_marked_constant"] = True


# Numbers are kept and no tensors: one made under inference mode would fail a later backward pass.
@functools.cache
def _counted(width: int, degree: int) -> tuple[list[tuple[int, ...]], list[int]]:
    which = list(itertools.combinations_with_replacement(range(width), degree))
    return which, [math.factorial(degree) // math.prod(map(math.factorial, Counter(one).values())) for one in which]
