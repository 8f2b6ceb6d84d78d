"""Modern Hopfield retrieval: softmax attention as one step down an energy.

Patterns are rows, X (N, d), and the state ξ is a row too. One update, ξ ← softmax(β ξ Xᵀ) X, is the attention of one
query over keys X that are their own values, at temperature 1/β.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from matchkernel.shapes import broadcast


def energy(state: Tensor, patterns: Tensor, beta: float) -> Tensor:
    """E(ξ) = −β⁻¹ log Σ_i exp(β x_i · ξ) + ½|ξ|² + β⁻¹ log N + ½ M²,  M = max_i |x_i|.

    state ξ (…, n, d), patterns X (…, N, d), `beta` β > 0 in units of 1/score → (…, n), in score units. The constants
    keep it between 0 and 2M² for states in the patterns' convex hull. `retrieve` never raises it. Raises TypeError and
    ValueError for arguments that do not fit. Cost: one table of scores.
    Source: Ramsauer et al. 2021, eq. 2.
    """
    _require(state, patterns, beta)
    pull = torch.logsumexp(beta * state @ patterns.mT, dim=-1) / beta
    constant = math.log(patterns.shape[-2]) / beta + patterns.square().sum(-1).amax(-1, keepdim=True) / 2
    return -pull + state.square().sum(-1) / 2 + constant


def retrieve(state: Tensor, patterns: Tensor, beta: float, steps: int = 1) -> Tensor:
    """The state after `steps` updates ξ ← softmax(β ξ Xᵀ) X.

    state (…, n, d), patterns (…, N, d) → (…, n, d). One step (the default) is what an attention layer does. Raises
    TypeError and ValueError for arguments that do not fit, ValueError for steps < 0. Cost: an attention per step.
    Source: Ramsauer et al. 2021, eq. 3.
    """
    return trajectory(state, patterns, beta, steps)[-1]


def trajectory(state: Tensor, patterns: Tensor, beta: float, steps: int) -> Tensor:
    """Every state on the way: (steps + 1, …, n, d), from the given one to the last. Otherwise as `retrieve`."""
    _require(state, patterns, beta)
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")
    lead = broadcast(state.shape[:-2], patterns.shape[:-2])
    if lead is None:
        raise ValueError(
            "the leading dimensions of state and patterns do not broadcast: "
            f"got shapes {tuple(state.shape)} and {tuple(patterns.shape)}"
        )
    states = [state.expand(*lead, *state.shape[-2:])]
    for _ in range(steps):
        states.append((beta * states[-1] @ patterns.mT).softmax(-1) @ patterns)
    return torch.stack(states)


def fixed_point(
    state: Tensor, patterns: Tensor, beta: float, tolerance: float = 1e-10, limit: int = 10_000
) -> tuple[Tensor, int]:
    """Update until no state moves by more than `tolerance`: the resting states and the number of steps.

    state (…, n, d), patterns (…, N, d) → (…, n, d). `tolerance` is a length, in pattern units, and its default asks for
    float64. Raises RuntimeError after `limit` steps without rest, else as `retrieve`. Near a change from one kind of
    resting state to another the steps become small long before the end.
    Source: Ramsauer et al. 2021, theorem 1 and 2 (the energy converges, and the states' limits are stationary points).
    """
    for step in range(1, limit + 1):
        after = retrieve(state, patterns, beta)
        moved = (after - state).norm(dim=-1).amax() if after.numel() else torch.zeros(())
        state = after
        if moved <= tolerance:
            return state, step
    raise RuntimeError(f"no rest after {limit} steps: the last one moved a state by {moved.item():.3g} > {tolerance}")


def separation(patterns: Tensor) -> Tensor:
    """Δ_i = x_i · x_i − max_{j ≠ i} x_i · x_j: by how much a pattern prefers itself. It may be negative.

    patterns (…, N, d), N ≥ 2 → (…, N), in score units. Raises ValueError for fewer than two.
    Source: Ramsauer et al. 2021, definition 2.
    """
    _require(patterns, patterns, 1.0)
    if patterns.shape[-2] < 2:
        raise ValueError(f"patterns must hold at least two rows, got shape {tuple(patterns.shape)}")
    scores = patterns @ patterns.mT
    itself = torch.eye(patterns.shape[-2], dtype=torch.bool, device=patterns.device)
    return scores.diagonal(dim1=-2, dim2=-1) - scores.masked_fill(itself, -math.inf).amax(-1)


def retrieval_bound(patterns: Tensor, beta: float) -> Tensor:
    """|ξ_new − x_i| ≤ 2 M (N − 1) exp(−β Δ_i), for one update that starts at the pattern x_i itself.

    patterns (…, N, d) → (…, N), a length. Each of the other N − 1 weights is at most exp(−β Δ_i), and no pattern is
    further than 2M from another. Exponentially small in the separation; above 2M it says nothing.
    Source: a special case of Ramsauer et al. 2021, theorem 5, which starts from states near a pattern.
    """
    _require(patterns, patterns, beta)
    furthest = 2 * patterns.norm(dim=-1).amax(-1, keepdim=True)
    bound: Tensor = furthest * (patterns.shape[-2] - 1) * torch.exp(-beta * separation(patterns))
    return bound


def _require(state: Tensor, patterns: Tensor, beta: float) -> None:
    for name, x in {"state": state, "patterns": patterns}.items():
        if not x.is_floating_point():
            raise TypeError(f"{name} must be real and floating point, got {x.dtype}")
    if state.ndim < 2 or patterns.ndim < 2 or state.shape[-1] != patterns.shape[-1] or patterns.shape[-2] == 0:
        raise ValueError(
            "state (…, n, d) and patterns (…, N, d) must have the same width and at least one pattern, "
            f"got shapes {tuple(state.shape)} and {tuple(patterns.shape)}"
        )
    if state.dtype != patterns.dtype:
        raise TypeError(f"state and patterns must share one dtype, got {state.dtype} and {patterns.dtype}")
    if not 0 < beta < math.inf:
        raise ValueError(f"beta must be above 0 and finite, got {beta}")
