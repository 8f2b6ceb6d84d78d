"""Hashes that put vectors in similar directions into one bucket, and how often they do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 2**20
"""Projections held at a time."""

NEAR = 0.04
"""Radians below which the quadrature would be too coarse, and the law is all but straight."""


@dataclass(frozen=True)
class CrossPolytopeHash:
    """Which of random directions, taken with either sign, a vector lies nearest to.

    h(x) = argmax [x R; −x R],  R (d, buckets / 2) with standard normal entries

    buckets: an even number of at least 2. Only the direction of x matters; the zero vector falls into bucket 0.
    Cost: d · buckets / 2 products a vector.
    Source: Andoni et al. 2015, section 3, with R of normal entries as in Kitaev et al. 2020 (Reformer), section 2.
    """

    buckets: int

    def __post_init__(self) -> None:
        _check_buckets(self.buckets)
        if self.buckets % 2:
            raise ValueError(
                f"CrossPolytopeHash(buckets={self.buckets}): expected an even number, two signs a direction"
            )

    def draw(self, dim: int, generator: torch.Generator | None = None) -> Tensor:
        """The random directions (dim, buckets / 2), in float64."""
        return torch.randn(dim, self.buckets // 2, generator=generator, dtype=torch.float64)

    def __call__(self, x: Tensor, directions: Tensor) -> Tensor:
        """The buckets, integers (…, n), of x (…, n, dim)."""

        def nearest(part: Tensor) -> Tensor:
            along = part @ directions
            return torch.cat([along, -along], -1).argmax(-1)

        return _in_chunks(x, nearest, self.buckets)

    def collision_probability(self, angle: float) -> float:
        """How often two vectors at `angle` (radians, 0 … π) share a bucket; for every dimension from 2 on.

        buckets ∫∫ φ_ρ(a, b) P(|X| < a, |Y| < b)^(buckets/2 − 1) da db over a, b > 0, with ρ = cos θ: one direction has
        the projections a and b, both the largest, and the pairs (X, Y) of the others are independent normal ones of
        correlation ρ. By the midpoint rule, to about 1e-4; below 0.04, along the straight line to 1 at 0. With two
        buckets it is 1 − θ/π.
        """
        _check_angle(angle)
        if angle == 0.0:
            return 1.0
        if self.buckets == 2 or angle == math.pi:
            return 1.0 - angle / math.pi
        if angle < NEAR:
            return 1.0 - (1.0 - self.collision_probability(NEAR)) * angle / NEAR
        rho, others = math.cos(angle), self.buckets // 2 - 1
        spread = math.sqrt(1.0 - rho * rho)
        step = 0.01
        half = torch.arange(step / 2, 7.0, step, dtype=torch.float64)
        # Y given X = x is normal around ρ x.
        density = torch.exp(-0.5 * half.square()) / math.sqrt(2.0 * math.pi) * step
        within = torch.zeros(len(half), len(half), dtype=torch.float64)
        for sign in (1.0, -1.0):
            at = (sign * rho * half).unsqueeze(-1)
            within += torch.special.ndtr((half - at) / spread) - torch.special.ndtr((-half - at) / spread)
        # Up to the middle of each step in x: half of the last one.
        parts = within * density.unsqueeze(-1)
        both = parts.cumsum(0) - 0.5 * parts
        given = torch.exp(-0.5 * ((half - rho * half.unsqueeze(-1)) / spread).square()) / (
            math.sqrt(2.0 * math.pi) * spread
        )
        joint = density.unsqueeze(-1) * given * step
        return float(self.buckets * (joint * both.clamp(0.0, 1.0) ** others).sum())


@dataclass(frozen=True)
class SignHash:
    """On which side of random hyperplanes a vector lies, one bit for each.

    h(x) = Σ_b 2ᵇ [x · r_b > 0],  b < log₂ buckets

    buckets: a power of two of at least 2. Only the direction of x matters.
    Cost: d log₂ buckets products a vector.
    Source: Charikar 2002, section 3.
    """

    buckets: int

    def __post_init__(self) -> None:
        _check_buckets(self.buckets)
        if self.buckets & (self.buckets - 1):
            raise ValueError(f"SignHash(buckets={self.buckets}): expected a power of two, a bit for each hyperplane")

    @property
    def bits(self) -> int:
        return self.buckets.bit_length() - 1

    def draw(self, dim: int, generator: torch.Generator | None = None) -> Tensor:
        """The normals of the hyperplanes (dim, bits), in float64."""
        return torch.randn(dim, self.bits, generator=generator, dtype=torch.float64)

    def __call__(self, x: Tensor, directions: Tensor) -> Tensor:
        """The buckets, integers (…, n), of x (…, n, dim)."""
        values = 2 ** torch.arange(self.bits, device=x.device)
        return _in_chunks(x, lambda part: ((part @ directions > 0) * values).sum(-1), self.bits)

    def collision_probability(self, angle: float) -> float:
        """How often two vectors at `angle` (radians, 0 … π) share a bucket: (1 − θ/π)^bits, for every dimension."""
        _check_angle(angle)
        return (1.0 - angle / math.pi) ** self.bits


Hash = CrossPolytopeHash | SignHash
HASHES: dict[str, type[CrossPolytopeHash] | type[SignHash]] = {"cross-polytope": CrossPolytopeHash, "sign": SignHash}
"""By the name that `LSH(hash=…)` takes."""


def collision_probability(angle: float, buckets: int, hash: str = "cross-polytope", rounds: int = 1) -> float:
    """How often two vectors at `angle` (radians) share a bucket in at least one of `rounds` independent rounds.

    1 − (1 − p)^rounds, p as the hash of that name says.
    """
    if hash not in HASHES:
        raise ValueError(f"hash={hash!r}: expected one of {', '.join(map(repr, HASHES))}")
    once = HASHES[hash](buckets).collision_probability(angle)
    return 1.0 - (1.0 - once) ** rounds


def _in_chunks(x: Tensor, buckets_of: Callable[[Tensor], Tensor], width: int) -> Tensor:
    """`buckets_of` some vectors at a time: the projections of all of them would outweigh the vectors."""
    flat = x.reshape(-1, x.shape[-1])
    parts = [buckets_of(part) for part in torch.split(flat, max(1, CHUNK // width))]
    return torch.cat(parts).reshape(x.shape[:-1])


def _check_buckets(buckets: int) -> None:
    if isinstance(buckets, bool) or not isinstance(buckets, int) or buckets < 2:
        raise ValueError(f"buckets={buckets!r}: expected an integer of at least 2")


def _check_angle(angle: float) -> None:
    if not 0.0 <= angle <= math.pi:
        raise ValueError(f"angle={angle}: expected radians from 0 to π")
