"""Kernels around kernels: a limit on the score, and a sum of weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .base import Fact, MatchKernel
from .encoding import Encoding
from .tiles import Tiles
from .values import HeadValue, as_number, hold, show
from .wrap_tiles import LimitForm, around, beside, carrying


class Softcap(MatchKernel):
    """Any kernel, with its scores bent into (−limit, limit).

    s_ij = limit · tanh(s'_ij / limit),  s' the score of `kernel`

    Shapes are the kernel's. `limit` > 0, in the unit of the score, is a number, a tensor with one entry per head, or an
    `nn.Parameter`. A tanh per pair on top of the kernel; no longer an inner product, so it streams.
    What is symmetric or invariant stays so. Positive definiteness is lost in general: a function f of q·k is positive
    definite in every dimension just when its Taylor coefficients are ≥ 0, and those of tanh alternate; at any finite
    limit some set of points shows it.
    ValueError for a limit that is not above zero.
    Source: Gemma Team 2024 (Gemma 2), section 2 (50 for attention scores); Bello et al. 2017 for the idea.
    """

    limit: HeadValue

    def __init__(self, kernel: MatchKernel, limit: HeadValue) -> None:
        super().__init__()
        _expect_kernel("Softcap", kernel)
        self.kernel = kernel
        hold(self, "limit", limit, positive=True)
        # tanh is one to one: scores that differ still differ.
        self.symmetric = kernel.symmetric
        self.translation_invariant = kernel.translation_invariant
        self.position_invariant = kernel.position_invariant

    def encode(
        self, q: Tensor, k: Tensor, query_position: Tensor, key_position: Tensor, *, up_to_row_shift: bool = False
    ) -> tuple[Encoding, Encoding]:
        # tanh sees what a softmax would not: a term of the query alone counts.
        query, key = self.kernel.encode(q, k, query_position, key_position, up_to_row_shift=False)
        return carrying(query, self.limit, q), key

    def match(self, q: Encoding, k: Encoding) -> Tensor:
        own, limit = beside(q, as_number(self.limit))
        return limit * torch.tanh(self.kernel.match(own, k) / limit)

    def tiles(self, q: Encoding, k: Encoding) -> Tiles | None:
        return around(self.kernel, q, k, as_number(self.limit), LimitForm)

    def flops_per_pair(self, query_width: int, key_width: int) -> int | None:
        """A quotient, a tanh and a product on top of the kernel's."""
        inner = self.kernel.flops_per_pair(query_width, key_width)
        return None if inner is None else inner + 3

    def __repr__(self) -> str:
        return f"Softcap({self.kernel!r}, limit={show(self.limit)})"


class Mixture(MatchKernel):
    """A kernel whose weight is a weighted sum of others' weights; made by `mixture`."""

    log_weights: Tensor | None

    def __init__(self, kernels: Sequence[MatchKernel], log_weights: Tensor | None = None) -> None:
        super().__init__()
        self.kernels = nn.ModuleList(kernels)
        if isinstance(log_weights, nn.Parameter):
            self.log_weights = log_weights
        else:
            self.register_buffer("log_weights", log_weights)
        self.symmetric = _all_of([kernel.symmetric for kernel in kernels])
        self.translation_invariant = _all_of([kernel.translation_invariant for kernel in kernels])
        self.position_invariant = _all_of([kernel.position_invariant for kernel in kernels])
        self.positive_definite = _all_of([kernel.positive_definite for kernel in kernels])

    def _parts(self) -> list[MatchKernel]:
        return [kernel for kernel in self.kernels if isinstance(kernel, MatchKernel)]

    def encode(
        self, q: Tensor, k: Tensor, query_position: Tensor, key_position: Tensor, *, up_to_row_shift: bool = False
    ) -> tuple[Encoding, Encoding]:
        # What one part leaves out of a whole row, the others would not: every part gives its full score.
        encoded = [kernel.encode(q, k, query_position, key_position) for kernel in self._parts()]
        return tuple(pair[0] for pair in encoded), tuple(pair[1] for pair in encoded)

    def match(self, q: Encoding, k: Encoding) -> Tensor:
        scores = [kernel.match(*pair) for kernel, *pair in zip(self._parts(), q, k, strict=True)]
        if self.log_weights is not None:
            scores = [score + shift for score, shift in zip(scores, self.log_weights.unbind(), strict=True)]
        total = scores[0]
        for score in scores[1:]:
            total = torch.logaddexp(total, score)
        return total

    def flops_per_pair(self, query_width: int, key_width: int) -> int | None:
        """The parts', and for each sum of two: a difference, an exponential, a logarithm, a sum."""
        parts = [kernel.flops_per_pair(query_width, key_width) for kernel in self._parts()]
        counted = [part for part in parts if part is not None]
        return sum(counted) + 4 * (len(parts) - 1) if len(counted) == len(parts) else None

    def __repr__(self) -> str:
        inner = ", ".join(map(repr, self._parts()))
        if self.log_weights is None:
            return f"mixture({inner})"
        if isinstance(self.log_weights, nn.Parameter):
            return f"mixture({inner}, log_weights=<learned>)"
        return f"mixture({inner}, weights=({', '.join(f'{w:.4g}' for w in self.log_weights.exp().tolist())}))"


def mixture(
    *kernels: MatchKernel, weights: Sequence[float] | None = None, log_weights: nn.Parameter | None = None
) -> Mixture:
    """A kernel whose weight is a sum of weights, so that a key counts if any part wants it.

    κ_ij = Σ_c w_c exp(s_ij,c), that is s_ij = log Σ_c exp(log w_c + s_ij,c)

    `a + b` multiplies weights (both must want the key), this adds them. `weights` w_c are numbers above zero, 1 each by
    default; they need not sum to one, since a softmax does not see a common factor. To learn them, give `log_weights`,
    a parameter of shape (components,) that holds log w_c, free to take any value. Parts give their full scores.
    An exponential and a logarithm per part and pair on top of theirs; O(nm) work, and it streams.
    A sum of positive definite weights is positive definite.
    ValueError for no kernels, other counts of weights, or a weight that is not above zero.
    """
    if not kernels:
        raise ValueError("mixture(): expected at least one kernel")
    for kernel in kernels:
        _expect_kernel("mixture", kernel)
    if weights is not None and log_weights is not None:
        raise ValueError("mixture(weights=…, log_weights=…): expected one of the two")
    if log_weights is not None:
        if not isinstance(log_weights, nn.Parameter):
            raise TypeError(f"mixture(log_weights=…): expected an nn.Parameter, got {type(log_weights).__name__}")
        if log_weights.shape != (len(kernels),):
            raise ValueError(
                f"mixture(log_weights=…): expected shape ({len(kernels)},), one entry per kernel, "
                f"got {tuple(log_weights.shape)}"
            )
        return Mixture(kernels, log_weights)
    if weights is None:
        return Mixture(kernels)
    numbers = [float(weight) for weight in weights]
    if len(numbers) != len(kernels) or not all(0 < weight < math.inf for weight in numbers):
        raise ValueError(f"mixture(weights={numbers}): expected {len(kernels)} finite numbers above 0, one per kernel")
    return Mixture(kernels, torch.tensor(numbers).log())


def _all_of(facts: Sequence[Fact]) -> Fact:
    return True if all(fact is True for fact in facts) else None


def _expect_kernel(owner: str, kernel: object) -> None:
    if not isinstance(kernel, MatchKernel):
        raise TypeError(f"{owner}(…): expected match kernels, got {type(kernel).__name__}")
