"""What an engine is given, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..kernels.base import MatchKernel
from ..masks import Visibility
from ..normalizers import Normalizer
from ..shapes import broadcast, split
from . import _torch_private


@dataclass(frozen=True)
class Problem:
    """One call of attention, checked: shapes agree, masks broadcast, dtypes are one.

    q (…, n, d), k (…, m, d_k), v (…, m, d_v). Leading dimensions broadcast; with `groups` > 1 the query has that many
    heads at dimension −3 for each head of key and value. `batch` is the shape in front of (n, d_v) in the output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    kernel: MatchKernel
    normalizer: Normalizer
    visibility: Visibility
    dropout: float
    batch: torch.Size
    groups: int

    @property
    def pairs(self) -> int:
        """How many scores the whole table would hold."""
        return self.batch.numel() * self.visibility.queries * self.visibility.keys

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which sums are taken: the inputs', but float32 at least."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def hide(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v with zeros where a query sees nothing or a key is seen by nobody: no NaN can come from there."""
        sees, seen = self.visibility.query_sees, self.visibility.key_seen
        q = self.q if sees is None else zero_where_not(sees, self.q)
        if seen is None:
            return q, self.k, self.v
        if self.groups > 1 and seen.dim() >= 2 and seen.shape[-2] > 1:
            seen = split(seen, -2, (-1, self.groups)).any(-2)
        return q, zero_where_not(seen, self.k), zero_where_not(seen, self.v)


@dataclass(frozen=True)
class Cost:
    """What a run costs, counted and not measured. `flops` is None when the kernel does not say what a pair costs."""

    flops: int | None
    bytes: int
    peak_bytes: int


@runtime_checkable
class Engine(Protocol):
    """One way to compute attention."""

    @property
    def name(self) -> str:
        """What `engine=` calls it."""

    @property
    def exact(self) -> bool:
        """Whether it computes what the reference does, to rounding."""

    def refuse(self, problem: Problem) -> str | None:
        """Why this engine cannot run the problem, or None when it can."""

    def declines(self, problem: Problem) -> str | None:
        """Why "auto" should pass it over though it could run the problem, or None."""

    def compiles(self, problem: Problem) -> bool:
        """Whether it builds code for the problem with torch.compile."""

    def run(self, problem: Problem) -> Tensor:
        """The output (…, n, d_v)."""

    def cost(self, problem: Problem) -> Cost:
        """Operations, bytes read and written, and the most memory held beside the inputs."""

    def reason(self, problem: Problem) -> str:
        """Why this engine is the right one here, in a sentence."""


NOTHING_TO_COMPUTE = "there is nothing to compute: a length or a width is 0"


def why_not_by_hand(problem: Problem) -> str | None:
    """Why an engine that goes through its work in loops and has a backward of its own cannot run here, or None."""
    if torch.compiler.is_compiling():
        return "its loops are not for torch.compile to unroll"
    if _torch_private.transforming():
        return "vmap, jvp and the other function transforms need plain operations"
    return NOTHING_TO_COMPUTE if 0 in (problem.pairs, problem.v.shape[-1]) else None


def zero_where_not(keep: Tensor, x: Tensor) -> Tensor:
    """x (…, tokens, width), with zeros for the tokens where keep (…, tokens | 1) is False."""
    return torch.where(keep.unsqueeze(-1), x, torch.zeros((), dtype=x.dtype, device=x.device))


def traffic(problem: Problem) -> int:
    """Bytes of q, k, v read once and of the output written once."""
    out = problem.batch.numel() * problem.visibility.queries * problem.v.shape[-1]
    return (problem.q.numel() + problem.k.numel() + problem.v.numel() + out) * problem.q.element_size()


def product_flops(problem: Problem, pairs: int) -> int | None:
    """Two operations per pair and coordinate, for the scores and for the weighted sum."""
    per_pair = problem.kernel.flops_per_pair(problem.q.shape[-1], problem.k.shape[-1])
    return None if per_pair is None else pairs * (per_pair + 2 * problem.v.shape[-1])


def check_scores(scores: object, kernel: MatchKernel, expected: tuple[int, ...]) -> None:
    """What a kernel's match returned is a floating-point table with a row per query and a column per key."""
    owner = f"{type(kernel).__name__}.match"
    if not isinstance(scores, Tensor):
        raise TypeError(f"{owner} returned {type(scores).__name__}, expected a tensor of scores")
    if not scores.is_floating_point():
        raise TypeError(f"{owner} returned scores of {scores.dtype}, expected floating point")
    if scores.shape[-2:] != expected[-2:] or broadcast(scores.shape, torch.Size(expected)) != expected:
        raise ValueError(f"{owner} returned shape {tuple(scores.shape)}, expected {expected}")
