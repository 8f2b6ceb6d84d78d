"""Feature kernels across processes: only the state travels, the sum of φ(k) vᵀ, which no length makes larger."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kernels.base import MatchKernel
from ..kernels.encoding import leaves
from ..normalizers import SoftmaxFamily
from ._ring_circle import Circle
from ._ring_gather import Total, gathered
from .problem import Problem

CHUNK = 128
"""Tokens whose pairs are looked at one by one; what lies before them is in the state."""

State = tuple[Tensor, Tensor]
"""Σ_j φ(k_j) e^(l_j − top) [v_j, 1], (…, f, d_v + 1), and the largest l_j so far, `top` (…, 1, 1), detached."""


def run(circle: Circle, problem: Problem, query_position: Tensor, key_position: Tensor, causal: bool) -> Tensor:
    """Output (…, n, d_v) in float32 or wider, from plain operations that differentiate to any order."""
    q, k, v = (x.to(problem.wide) for x in (problem.q, problem.k, problem.v))
    if problem.groups > 1:
        k, v = (x.repeat_interleave(problem.groups, dim=-3) for x in (k, v))
    (x, of_query), (y, of_key) = (leaves(side) for side in problem.kernel.encode(q, k, query_position, key_position))
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    lead = problem.batch
    x, y, v = (z.expand(*lead, *z.shape[-2:]) for z in (x, y, v))
    of_query, of_key = (z.expand(*lead, z.shape[-2], 1) for z in (of_query, of_key))
    start = _elsewhere(circle, _state(y, of_key, v), causal)
    if causal:
        sums, top = _in_chunks(x, y, of_key, v, start)
    else:
        sums, top = x @ start[0], start[1]
    return _close(sums, top + of_query, problem)


def _state(y: Tensor, of_key: Tensor, v: Tensor) -> State:
    """Of this rank's own tokens."""
    if not y.shape[-2]:
        nothing = of_key.new_full((*of_key.shape[:-2], 1, 1), float("-inf"))
        return y.mT @ v, nothing
    top = of_key.detach().amax(-2, keepdim=True)
    return (y * (of_key - top).exp()).mT @ v, top


def _elsewhere(circle: Circle, state: State, causal: bool) -> State:
    """The state of all ranks together or, where order matters, of those before this one."""
    own, top = state
    tops = torch.stack(circle.gather(top))
    counts = torch.arange(circle.world, device=top.device) < (circle.rank if causal else circle.world)
    counts = counts.reshape(-1, *(1 for _ in top.shape))
    highest = torch.where(counts, tops, float("-inf")).amax(0)
    # Exact zeros and not a shorter sum: every rank's result depends on every state, so that all ranks meet again
    # in the backward pass.
    share = torch.where(counts & (tops > float("-inf")), (tops - _finite(highest)).exp(), 0.0)
    share = torch.where(counts, share, 0.0)
    if not causal:
        return Total.apply(circle, own * share[circle.rank]), _finite(highest)  # type: ignore[no-untyped-call]
    width = own.shape[-1]
    everyone = gathered(circle, [width] * circle.world, own.mT).mT
    parts = everyone.unflatten(-1, (circle.world, width)).movedim(-2, 0)  # type: ignore[no-untyped-call]
    return (parts * share).sum(0), highest


def _in_chunks(x: Tensor, y: Tensor, of_key: Tensor, v: Tensor, start: State) -> tuple[Tensor, Tensor]:
    """Sums over all keys up to each query, (…, n, d_v + 1), and the logarithm of their unit, (…, n, 1).

    The unit is the largest scale up to the query itself: one taken over later keys would let the future be seen.
    """
    state, top = start
    sums, tops = [x[..., :0, :] @ state], [of_key[..., :0, :]]
    for begin in range(0, x.shape[-2], CHUNK):
        rows = slice(begin, begin + CHUNK)
        phi, psi, scale, value = x[..., rows, :], y[..., rows, :], of_key[..., rows, :], v[..., rows, :]
        unit = torch.maximum(scale.detach().cummax(-2).values, top)
        earlier = torch.ones(phi.shape[-2], phi.shape[-2], dtype=torch.bool, device=x.device).tril()
        # For what is later the exponent may be large, and is not looked at.
        table = torch.where(earlier, (phi @ psi.mT) * (scale.mT - unit).clamp_max(0.0).exp(), 0.0)
        sums.append(table @ value + (phi @ state) * (top - unit).exp())
        tops.append(unit)
        last = unit[..., -1:, :]
        state = state * (top - last).exp() + (psi * (scale - last).exp()).mT @ value
        top = last
    return torch.cat(sums, -2), torch.cat(tops, -2)


def _close(sums: Tensor, unit: Tensor, problem: Problem) -> Tensor:
    """Weighted values over the sum of weights; zeros where that is 0."""
    out, total = sums[..., :-1], sums[..., -1:]
    normalizer = problem.normalizer
    assert isinstance(normalizer, SoftmaxFamily)
    beside = normalizer.beside(unit)
    if beside is not None:
        most = math.log(torch.finfo(unit.dtype).max) - 1.0
        total = total + (beside - unit).clamp_max(most).exp()
    empty = total == 0.0
    return torch.where(empty, 0.0, out / torch.where(empty, 1.0, total))


def _finite(top: Tensor) -> Tensor:
    return torch.where(top == float("-inf"), 0.0, top)


def message(kernel: MatchKernel, problem: Problem) -> int | None:
    """Bytes of one rank's state; None where the kernel does not say how many features it has."""
    count = getattr(kernel, "feature_count", lambda width: None)(problem.k.shape[-1])
    size = torch.finfo(problem.wide).bits // 8
    return None if count is None else problem.batch.numel() * count * (problem.v.shape[-1] + 1) * size
