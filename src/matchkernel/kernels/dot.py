"""Scores that are inner products: dot, scaled dot, cosine, bilinear."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .base import DotKernel, Fact, ScoreFact
from .values import HeadValue, as_factor, hold, show


class Dot(DotKernel):
    """The dot product.

    s_ij = q_i · k_j

    q (…, n, d), k (…, m, d) → scores (…, n, m), in the square of the inputs' unit. No parameters. 2nmd operations.
    eˢ is positive definite: its power series in q·k has only positive coefficients (Schölkopf & Smola 2002, prop.
    13.4).
    Source: Luong, Pham & Manning 2015, eq. 8 ("dot").
    """

    symmetric: Fact = True
    translation_invariant: Fact = False
    position_invariant: Fact = True
    score_positive_definite: ScoreFact = True
    positive_definite: Fact = True


class ScaledDot(Dot):
    """The dot product over the square root of its width.

    s_ij = q_i · k_j / √d

    q (…, n, d), k (…, m, d) → scores (…, n, m). For independent entries of mean 0 and variance 1 the score has
    variance 1 whatever d is. No parameters. 2nmd operations. Positive definite as `Dot` is.
    Source: Vaswani et al. 2017, eq. 1.
    """

    def scale(self, width: int) -> float:
        # An encoding of width 0 is an empty sum: every score is 0, whatever it is divided by.
        return 1.0 / math.sqrt(width) if width else 1.0


class Cosine(DotKernel):
    """The cosine of the angle between query and key, over a temperature.

    s_ij = q_i · k_j / (|q_i| |k_j| τ)

    q (…, n, d), k (…, m, d) → scores (…, n, m) in [−1/τ, 1/τ]. `temperature` τ > 0 is a number (default 1), a tensor
    with one entry per head, or an `nn.Parameter`. A zero vector has no direction: its cosine is 0, and so is its
    gradient. Norms are taken in float32 or wider and without overflow. Cost: a dot product, and a few passes over q, k.
    Positive definite: it is `Dot` after a map of each input. ValueError for a temperature that is not above zero.
    Source: Henry et al. 2020 (QKNorm), eq. 5; Radford et al. 2021 (CLIP) for a learned temperature.
    """

    symmetric: Fact = True
    translation_invariant: Fact = False
    position_invariant: Fact = True
    score_positive_definite: ScoreFact = True
    positive_definite: Fact = True

    temperature: HeadValue

    def __init__(self, temperature: HeadValue = 1.0) -> None:
        super().__init__()
        hold(self, "temperature", temperature, positive=True)

    def scale(self, width: int) -> float:
        return 1.0 if isinstance(self.temperature, Tensor) else 1.0 / self.temperature

    def encode_query(self, q: Tensor, position: Tensor) -> Tensor:
        if not isinstance(self.temperature, Tensor):
            return direction(q).to(q.dtype)
        return (direction(q) / as_factor(self.temperature, q)).to(q.dtype)

    def encode_key(self, k: Tensor, position: Tensor) -> Tensor:
        return direction(k).to(k.dtype)

    def extra_repr(self) -> str:
        return f"temperature={show(self.temperature)}"


class Bilinear(DotKernel):
    """A learned matrix between query and key.

    s_ij = q_iᵀ W k_j,  W of shape (query_dim, key_dim), or W = A Bᵀ with A (query_dim, rank) and B (key_dim, rank)

    q (…, n, query_dim), k (…, m, key_dim) → scores (…, n, m). `key_dim` defaults to `query_dim`. Entries start normal
    with standard deviation 1/√(query_dim · key_dim), so that inputs of unit variance give scores of unit variance;
    draw others with `reset_parameters(generator)`. query_dim · key_dim parameters, or rank · (query_dim + key_dim).
    The score is not symmetric in general, since W is not: W = [[0, 1], [0, 0]] scores (e₁, e₂) 1 and (e₂, e₁) 0, which
    also rules out positive definiteness. ValueError for a dimension below 1 or an input of another width.
    Source: Luong, Pham & Manning 2015, eq. 8 ("general").
    """

    symmetric: Fact = False
    translation_invariant: Fact = False
    position_invariant: Fact = True
    score_positive_definite: ScoreFact = False
    positive_definite: Fact = False

    def __init__(
        self,
        query_dim: int,
        key_dim: int | None = None,
        rank: int | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        key_dim = query_dim if key_dim is None else key_dim
        for name, value in {"query_dim": query_dim, "key_dim": key_dim, "rank": 1 if rank is None else rank}.items():
            if value < 1:
                raise ValueError(f"Bilinear({name}=…): expected at least 1, got {value}")
        self.query_dim, self.key_dim, self.rank = query_dim, key_dim, rank
        if rank is None:
            self.weight = nn.Parameter(torch.empty(query_dim, key_dim))
        else:
            self.query_weight = nn.Parameter(torch.empty(query_dim, rank))
            self.key_weight = nn.Parameter(torch.empty(key_dim, rank))
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the parameters anew, from `generator` or torch's own."""
        with torch.no_grad():
            if self.rank is None:
                self.weight.normal_(0.0, 1.0 / math.sqrt(self.query_dim * self.key_dim), generator=generator)
                return
            self.query_weight.normal_(0.0, 1.0 / math.sqrt(self.query_dim), generator=generator)
            self.key_weight.normal_(0.0, 1.0 / math.sqrt(self.key_dim * self.rank), generator=generator)

    def encode_query(self, q: Tensor, position: Tensor) -> Tensor:
        _expect_width("q", q, self.query_dim)
        return _project(q, self.weight if self.rank is None else self.query_weight)

    def encode_key(self, k: Tensor, position: Tensor) -> Tensor:
        _expect_width("k", k, self.key_dim)
        return k if self.rank is None else _project(k, self.key_weight)

    def flops_per_pair(self, query_width: int, key_width: int) -> int:
        """The product runs over the width that the encodings have: the key's, or the rank."""
        return 2 * (self.key_dim if self.rank is None else self.rank)

    def extra_repr(self) -> str:
        shape = f"{self.query_dim}, {self.key_dim}"
        return shape if self.rank is None else f"{shape}, rank={self.rank}"


def direction(x: Tensor) -> Tensor:
    """x / |x| along the last dimension, and 0 where x is 0, in float32 or wider; large and tiny entries are safe.

    The inputs are first divided by their largest entry, which changes no direction and keeps the squares in range.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if x.shape[-1] == 0:
        return wide
    largest = wide.detach().abs().amax(dim=-1, keepdim=True)
    wide = wide / torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    square = (wide * wide).sum(dim=-1, keepdim=True)
    # The square root's slope at 0 is infinite; a zero vector takes the branch that never meets it. A NaN stays one.
    zero = square == 0
    return wide * torch.where(zero, 0.0, torch.where(zero, 1.0, square).rsqrt())


def _project(x: Tensor, weight: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, weight.dtype)
    return (x.to(wide) @ weight.to(wide)).to(x.dtype)


def _expect_width(name: str, x: Tensor, width: int) -> None:
    if x.shape[-1] != width:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, but this Bilinear expects a last dimension of {width}")
