"""What one chunk of tokens does to a state, in matrix products: no loop over tokens, no exponent above 0.

The state S (…, f, d_v) is what all tokens before the chunk have written. q, k (…, c, f) are features, v (…, c, d_v)
the values, and log gates (…, c, 1 | f), at most 0, say what is left of the state when a token comes; −inf forgets all.
Gates between two tokens are summed from the one to the other: as a difference of sums from the start, strong ones would
cost the digits of the weak ones after them, and e^{+sum} would overflow. A chunk of one token is the recurrence.
"""

from __future__ import annotations

import torch
from torch import Tensor


def between(gate: Tensor) -> Tensor:
    """Σ_{t=j+1..i} gate_t for all pairs of tokens: (…, c, 1) → (…, c, c), −inf where j comes after i."""
    c = gate.shape[-2]
    below = torch.ones(c, c, dtype=torch.bool, device=gate.device).tril(-1)
    sums = torch.where(below, gate, 0.0).cumsum(-2)
    return torch.where(below.mT, float("-inf"), sums)


def scalar_chunk(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = e^{g_t} S_{t−1} + k_tᵀ v_t, o_t = q_t S_t, with one gate for each token: outputs and the state after them.

    O = (Q Kᵀ ⊙ D) V + e^G ⊙ Q S, with D_ij = e^{Σ_{t=j+1..i} g_t} and G the sums from the start of the chunk.
    """
    decay = between(gate).exp()
    since = gate.cumsum(-2).exp()
    out = (q @ k.mT * decay) @ v + since * (q @ state)
    return out, since[..., -1:, :] * state + (k * decay[..., -1:, :].mT).mT @ v


def feature_chunk(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a gate for each token and feature, S_t = diag(e^{g_t}) S_{t−1} + k_tᵀ v_t.

    A pair's weight Σ_c q_ic k_jc e^{Σ_{t=j+1..i} g_tc} is a product of matrices only if the exponent is cut in two, and
    both parts are at most 0 where the cut lies between j and i. So the chunk is halved: queries of the second half meet
    the keys of the first one over the cut between them, and each half is halved again, all of one size at a time.
    """
    c = q.shape[-2]
    out = (q * k).sum(-1, keepdim=True) * v + (q * gate.cumsum(-2).exp()) @ state
    half = 1 << (c - 1).bit_length() >> 1
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 2 * half - c)) for x in (q, k, v, gate)] if c > 1 else []
    while half:
        (_, late), (early, _), (value, _), gates = (_halves(x, half) for x in padded)
        met = (late * gates[1].cumsum(-2).exp()) @ (early * _after(gates[0]).exp()).mT @ value
        met = torch.stack((torch.zeros_like(met), met), dim=-3)
        out = out + met.reshape(*met.shape[:-4], -1, met.shape[-1])[..., :c, :]
        half >>= 1
    kept = gate.sum(-2, keepdim=True).exp().mT
    return out, kept * state + (k * _after(gate).exp()).mT @ v


def delta_chunk(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = e^{g_t} (I − β_t k_tᵀ k_t) S_{t−1} + β_t k_tᵀ v_t, o_t = q_t S_t; beta (…, c, 1).

    Each token adds k_tᵀ u_t, where u_t = β_t (v_t − e^{g_t} k_t S_{t−1}) is what the memory had wrong. With S_{t−1}
    written out, that is one triangular system for the chunk, (I + tril(β ⊙ K Kᵀ ⊙ D, −1)) U = β ⊙ (V − e^G ⊙ K S), and
    then the chunk of a plain sum with U in the place of V.
    """
    system = (beta * (k @ k.mT) * between(gate).exp()).tril(-1)
    missing = beta * (v - gate.cumsum(-2).exp() * (k @ state))
    error: Tensor = torch.linalg.solve_triangular(system, missing, upper=False, unitriangular=True)
    return scalar_chunk(q, k, error, gate, state)


def _after(gate: Tensor) -> Tensor:
    """Σ_{t=j+1..} gate_t, what is still to come after each token."""
    later = torch.nn.functional.pad(gate[..., 1:, :], (0, 0, 0, 1))
    return later.flip(-2).cumsum(-2).flip(-2)


def _halves(x: Tensor, half: int) -> tuple[Tensor, ...]:
    """x (…, c, w) cut into blocks of two halves: (…, c / 2·half, half, w), the first halves and the second."""
    return x.reshape(*x.shape[:-2], -1, 2, half, x.shape[-1]).unbind(-3)
