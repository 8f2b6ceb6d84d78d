"""Associative memory: pairs of keys and values written into one matrix that answers a query by multiplication.

Tokens are rows. A memory S (d, d_v) answers the query q (d,) with q S. Three rules write S, and each of them solves, or
begins to solve, a regression of the values on the keys. All three leave S = Kᵀ U and differ in U alone:

    sum rule         U = V                                   the Gram matrix K Kᵀ taken for the identity
    delta rule       (I + B tril(K Kᵀ, −1)) U = B V           … seen by each pair as far as its predecessors; B = diag β
    least squares    (K Kᵀ + λ I) U = V                      … seen whole
"""

from __future__ import annotations

import torch
from torch import Tensor

from matchkernel.shapes import broadcast

Beta = float | Tensor
"""A delta rule's step: one number, or a tensor of shape (…, m), one per pair."""


def sum_rule(k: Tensor, v: Tensor) -> Tensor:
    """Add every pair's outer product: S = Kᵀ V = Σ_j k_jᵀ v_j.

    k (…, m, d), v (…, m, d_v) → S (…, d, d_v), in key units times value units. It is one step of gradient descent, of
    length 1 and from S = 0, on ½ Σ_j |v_j − k_j S|². It recalls exactly where keys are orthonormal. Raises TypeError
    and ValueError for shapes or dtypes that do not fit. Cost: 2·m·d·d_v operations.
    Source: Kohonen 1972, "Correlation matrix memories".
    """
    _require_pairs(k, v)
    return k.mT @ v


def sum_states(k: Tensor, v: Tensor) -> Tensor:
    """The sum rule written pair by pair: S_t = S_{t−1} + k_tᵀ v_t, from S = 0.

    k (…, m, d), v (…, m, d_v) → (…, m, d, d_v): entry t is the memory after pairs 0 … t, and the last is `sum_rule`.
    Holds m memories: for people who look. Raises as `sum_rule` does.
    """
    _require_pairs(k, v)
    return (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(-3)


def delta_rule(k: Tensor, v: Tensor, beta: Beta = 1.0, *, unstable: bool = False) -> Tensor:
    """Write each pair's *error*: S_t = S_{t−1} + β_t k_tᵀ (v_t − k_t S_{t−1}), from S = 0.

    k (…, m, d), v (…, m, d_v), `beta` a number or (…, m) → S (…, d, d_v) after all m pairs. One step of stochastic
    gradient descent on ½|v_t − k_t S|² per pair, of length β_t. With β_t |k_t|² = 1 the pair just written is recalled
    exactly, whatever the key held before. Each step multiplies S by `transition`, which enlarges nothing exactly when
    0 ≤ β_t |k_t|² ≤ 2; β = 1 therefore asks for keys of unit length.

    Raises TypeError and ValueError for shapes or dtypes that do not fit, and ValueError outside that interval unless
    `unstable` is True. Computed by one triangular system over the pairs, U in this module's head: m²·(d + d_v)
    operations instead of m steps that wait for one another.
    Source: Widrow & Hoff 1960; Schlag, Irie & Schmidhuber 2021, section 4.2; Yang et al. 2024 for the triangular form.
    """
    step = _require_step(k, v, beta, unstable)
    gram = (step.unsqueeze(-1) * (k @ k.mT)).tril(-1)
    error: Tensor = torch.linalg.solve_triangular(gram, step.unsqueeze(-1) * v, upper=False, unitriangular=True)
    return k.mT @ error


def delta_states(
    k: Tensor, v: Tensor, beta: Beta = 1.0, *, initial: Tensor | None = None, unstable: bool = False
) -> Tensor:
    """The delta rule pair by pair, as one would run it on a stream.

    As `delta_rule`, from the memory `initial` (…, d, d_v), by default zeros → (…, m, d, d_v): entry t is the memory
    after pairs 0 … t. Holds m memories: for people who look. Raises as `delta_rule` does.
    """
    step = _require_step(k, v, beta, unstable)
    lead = _lead(k.shape[:-2], v.shape[:-2], step.shape[:-1])
    state = k.new_zeros(*lead, k.shape[-1], v.shape[-1]) if initial is None else initial
    if state.shape[-2:] != (k.shape[-1], v.shape[-1]):
        raise ValueError(f"initial must have shape (…, {k.shape[-1]}, {v.shape[-1]}), got {tuple(state.shape)}")
    states = []
    for t in range(k.shape[-2]):
        key, value = k[..., t : t + 1, :], v[..., t : t + 1, :]
        state = state + step[..., t, None, None] * (key.mT @ (value - key @ state))
        states.append(state)
    return torch.stack(states, dim=-3) if states else k.new_zeros(*lead, 0, *state.shape[-2:])


def transition(k: Tensor, beta: Beta = 1.0) -> Tensor:
    """What a delta step does to what is there already: I − β kᵀ k, one matrix per key.

    k (…, m, d), `beta` a number or (…, m) → (…, m, d, d), to be multiplied from the left: S_t = (I − β_t k_tᵀ k_t)
    S_{t−1} + β_t k_tᵀ v_t. Symmetric, with eigenvalue 1 − β|k|² along the key and 1 across it, d − 1 times. At
    β|k|² = 1 it erases what lies along the key, at 2 it is a Householder reflection, beyond 2 it enlarges.
    Source: Yang et al. 2024, section 3.
    """
    _require_floating("k", k)
    if k.ndim < 2:
        raise ValueError(f"k must have shape (…, m, d), got {tuple(k.shape)}")
    outer = k.unsqueeze(-1) * k.unsqueeze(-2)
    return torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) - _step(k, beta)[..., None, None] * outer


def least_squares(k: Tensor, v: Tensor, ridge: float = 0.0) -> Tensor:
    """The memory that recalls best: S = argmin Σ_j |v_j − k_j S|² + λ |S|².

    k (…, m, d), v (…, m, d_v), `ridge` λ ≥ 0 → S = (Kᵀ K + λ I)⁻¹ Kᵀ V, of shape (…, d, d_v); at λ = 0 (the default)
    S = K⁺ V, of all the best ones the smallest. Exact recall as long as keys are linearly independent, so for m ≤ d
    keys at most. Raises TypeError and ValueError for shapes or dtypes that do not fit, ValueError for λ < 0.
    Cost: m·d² + d³ operations.
    Source: Penrose 1955 for K⁺; Kohonen & Ruohonen 1973 for its use as a memory; Hoerl & Kennard 1970 for λ.
    """
    _require_pairs(k, v)
    if not ridge >= 0:
        raise ValueError(f"ridge must be at least 0, got {ridge}")
    if ridge == 0:
        inverse: Tensor = torch.linalg.pinv(k)
        return inverse @ v
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    state: Tensor = torch.linalg.solve(k.mT @ k + ridge * eye, k.mT @ v)
    return state


def ridge_states(k: Tensor, v: Tensor, ridge: float) -> Tensor:
    """Ridge regression pair by pair, without looking back: recursive least squares.

    g = P k_tᵀ / (1 + k_t P k_tᵀ);  S_t = S_{t−1} + g (v_t − k_t S_{t−1});  P_t = P_{t−1} − g k_t P_{t−1}; from S = 0
    and P = I/λ. A delta step whose direction is turned by P = (Σ kᵀk + λ I)⁻¹, at the price of that d × d matrix.
    k (…, m, d), v (…, m, d_v), λ > 0 → (…, m, d, d_v): entry t is `least_squares` of pairs 0 … t. Raises ValueError
    unless λ > 0, else as `sum_rule`. Cost: m·d·(d + d_v) operations.
    Source: Plackett 1950; Sherman & Morrison 1950 for the update of an inverse.
    """
    _require_pairs(k, v)
    if not ridge > 0:
        raise ValueError(f"ridge must be above 0, got {ridge}: the recursion begins at the inverse of λ I")
    d = k.shape[-1]
    lead = _lead(k.shape[:-2], v.shape[:-2])
    state = k.new_zeros(*lead, d, v.shape[-1])
    inverse = torch.eye(d, dtype=k.dtype, device=k.device).expand(*lead, d, d) / ridge
    states = [state[..., None, :, :][..., :0, :, :]]
    for t in range(k.shape[-2]):
        key, value = k[..., t : t + 1, :], v[..., t : t + 1, :]
        seen = inverse @ key.mT
        gain = seen / (1.0 + key @ seen)
        state = state + gain @ (value - key @ state)
        inverse = inverse - gain @ seen.mT
        states.append(state.unsqueeze(-3))
    return torch.cat(states, dim=-3)


def recall_error(recalled: Tensor, v: Tensor) -> Tensor:
    """Σ_j |r_j − v_j|² / Σ_j |v_j|²: the share of the values that is lost. 0 is perfect, 1 what zeros would give.

    recalled r, v (…, m, d_v) → (…). Raises ValueError when the shapes differ or m = 0.
    """
    if recalled.shape != v.shape or v.ndim < 2 or v.shape[-2] == 0:
        raise ValueError(
            "recalled and v must have the same shape (…, m, d_v) with m ≥ 1, "
            f"got {tuple(recalled.shape)} and {tuple(v.shape)}"
        )
    return (recalled - v).square().sum((-2, -1)) / v.square().sum((-2, -1))


def expected_sum_error(pairs: int, width: int) -> float:
    """E `recall_error` of the sum rule = (m − 1)/d.

    For `pairs` m keys drawn uniformly from the unit sphere in `width` d dimensions, and values of mean 0 that are
    independent of the keys and of one another: each of the m − 1 others adds E (k_i · k_j)² = 1/d.
    """
    _require_counts(pairs, width)
    return (pairs - 1) / width


def expected_least_squares_error(pairs: int, width: int) -> float:
    """E `recall_error` of least squares = max(0, 1 − d/m), for keys and values as in `expected_sum_error`.

    Of m independent values, a projection of rank min(m, d) keeps that share. Any keys in general position give it.
    """
    _require_counts(pairs, width)
    return max(0.0, 1.0 - width / pairs)


def expected_delta_error(pairs: int, width: int) -> float:
    """E `recall_error` of the delta rule at β = 1, for keys and values as in `expected_sum_error`.

    A pair with a successors is recalled as c_a v + noise. With r = 1 − 1/d and E c_a = rᵃ, the second moment obeys
    s_0 = 1, s_{a+1} = s_a (1 − 2/d + 2/(d(d+2))) + rᵃ/(d(d+2)), and the error, its own loss and the noise of later and
    of earlier pairs, is (1 − 2rᵃ + s_a) + (1 − rᵃ) + (rᵃ − s_a)(1 − r^{m−1−a}). The mean over a = 0 … m − 1 is
    returned. As m grows it tends to 2: the oldest pairs are lost, and the noise stays bounded.
    """
    _require_counts(pairs, width)
    r, fourth = 1.0 - 1.0 / width, 1.0 / (width * (width + 2))
    second, total = 1.0, 0.0
    for after in range(pairs):
        kept = r**after
        total += (1.0 - 2.0 * kept + second) + (1.0 - kept) + (kept - second) * (1.0 - r ** (pairs - 1 - after))
        second = second * (1.0 - 2.0 / width + 2.0 * fourth) + kept * fourth
    return total / pairs


def _lead(*shapes: torch.Size) -> torch.Size:
    lead = broadcast(*shapes)
    if lead is None:
        raise ValueError(f"the leading dimensions of k, v and beta do not broadcast: {[tuple(s) for s in shapes]}")
    return lead


def _require_counts(pairs: int, width: int) -> None:
    if pairs < 1 or width < 1:
        raise ValueError(f"pairs and width must be at least 1, got {pairs} and {width}")


def _require_floating(name: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{name} must be real and floating point, got {x.dtype}")


def _require_pairs(k: Tensor, v: Tensor) -> None:
    _require_floating("k", k)
    _require_floating("v", v)
    if k.dtype != v.dtype:
        raise TypeError(f"k and v must share one dtype, got {k.dtype} and {v.dtype}")
    if k.ndim < 2 or v.ndim < 2 or k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"k (…, m, d) and v (…, m, d_v) must hold as many pairs, got shapes {tuple(k.shape)} and {tuple(v.shape)}"
        )
    _lead(k.shape[:-2], v.shape[:-2])


def _step(k: Tensor, beta: Beta) -> Tensor:
    """β per pair, (…, m), or a ValueError when its last dimension is neither 1 nor the number of pairs."""
    step = torch.as_tensor(beta, dtype=k.dtype, device=k.device)
    if step.ndim and step.shape[-1] not in (1, k.shape[-2]):
        raise ValueError(f"beta must be a number or have shape (…, {k.shape[-2]}), got {tuple(step.shape)}")
    return step.expand(*step.shape[:-1], k.shape[-2])


def _require_step(k: Tensor, v: Tensor, beta: Beta, unstable: bool) -> Tensor:
    _require_pairs(k, v)
    step = _step(k, beta)
    factor = (step * k.square().sum(-1)).detach()
    slack = 16 * torch.finfo(k.dtype).eps  # a key of unit length is one up to rounding
    if not unstable and not ((factor >= -slack) & (factor <= 2.0 + 2.0 * slack)).all():
        raise ValueError(
            "the delta rule needs 0 ≤ β|k|² ≤ 2 for every pair, or old errors grow at each step; got β|k|² from "
            f"{factor.min().item():.3g} to {factor.max().item():.3g}. Give the keys unit length and beta in [0, 2], or "
            "pass unstable=True to watch"
        )
    return step
