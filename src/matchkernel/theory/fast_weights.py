"""Linear attention and the memory it writes: one sum, bracketed in three ways.

`by_table` first asks every key, (Q Kᵀ) V; `by_state` first writes the memory, Q (Kᵀ V), and when causal it writes pair
by pair; `by_chunks` does the one inside a chunk and the other between chunks. Here q and k are what the scores are dot
products of: features φ(q), φ(k), if a feature map comes before them. This is the dense derivation, for people who look.
"""

from __future__ import annotations

import torch
from torch import Tensor

from matchkernel.shapes import broadcast


def by_table(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, normalized: bool = False) -> Tensor:
    """o_i = Σ_j (q_i · k_j) v_j, by the table of all scores.

    q (…, n, d), k (…, m, d), v (…, m, d_v) → (…, n, d_v). `causal` lets query i see keys 0 … i and needs n = m.
    `normalized` divides by Σ_j q_i · k_j, which wants features whose products are positive; a row whose sum is 0 gives
    zeros. No default scale: q and k carry it. Raises TypeError and ValueError for shapes or dtypes that do not fit.
    Cost: 2·n·m·(d + d_v) operations, an n × m table.
    Source: Katharopoulos et al. 2020, eq. 4–5.
    """
    _require(q, k, v, causal)
    scores = q @ k.mT
    if causal:
        scores = scores.tril()
    out = scores @ v
    return _divided(out, scores.sum(-1, keepdim=True)) if normalized else out


def by_state(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, normalized: bool = False) -> Tensor:
    """The same outputs from a memory: o_i = q_i S with S = Σ_j k_jᵀ v_j, divided by q_i · Σ_j k_j if `normalized`.

    Arguments and errors as `by_table`. When causal, S and Σ k grow pair by pair, a recurrent network with a d × d_v
    state. Cost: 2·(n + m)·d·d_v operations, no table.
    Source: Katharopoulos et al. 2020, eq. 6 and 16–20; Schlag, Irie & Schmidhuber 2021, section 3.2 (fast weights).
    """
    _require(q, k, v, causal)
    if not causal:
        out = q @ (k.mT @ v)
        return _divided(out, q @ k.sum(-2).unsqueeze(-1)) if normalized else out
    lead = _lead(q, k, v)
    memory = k.new_zeros(*lead, k.shape[-1], v.shape[-1])
    total = k.new_zeros(*lead, k.shape[-1], 1)
    rows = [memory[..., :0, :]]
    for t in range(q.shape[-2]):
        key = k[..., t : t + 1, :].mT
        memory = memory + key @ v[..., t : t + 1, :]
        total = total + key
        query = q[..., t : t + 1, :]
        rows.append(_divided(query @ memory, query @ total) if normalized else query @ memory)
    return torch.cat(rows, dim=-2)


def by_chunks(q: Tensor, k: Tensor, v: Tensor, size: int, *, normalized: bool = False) -> Tensor:
    """The causal outputs, `size` pairs at a time: the table inside a chunk, the memory for all chunks before it.

    Arguments and errors as `by_table` with causal=True; ValueError for a size below 1. Size 1 is the recurrence and
    size n the masked table. Cost: 2·n·size·(d + d_v) + 4·n·d·d_v operations, a size × size table.
    Source: Hua et al. 2022 (mixed chunk attention).
    """
    _require(q, k, v, causal=True)
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    lead = _lead(q, k, v)
    memory = k.new_zeros(*lead, k.shape[-1], v.shape[-1])
    total = k.new_zeros(*lead, k.shape[-1], 1)
    rows = [memory[..., :0, :]]
    for start in range(0, q.shape[-2], size):
        query, key, value = (x[..., start : start + size, :] for x in (q, k, v))
        scores = (query @ key.mT).tril()
        out = scores @ value + query @ memory
        rows.append(_divided(out, scores.sum(-1, keepdim=True) + query @ total) if normalized else out)
        memory = memory + key.mT @ value
        total = total + key.sum(-2).unsqueeze(-1)
    return torch.cat(rows, dim=-2)


def _lead(*tensors: Tensor) -> torch.Size:
    lead = broadcast(*(x.shape[:-2] for x in tensors))
    if lead is None:
        raise ValueError(f"the leading dimensions of q, k and v do not broadcast: {[tuple(x.shape) for x in tensors]}")
    return lead


def _divided(out: Tensor, total: Tensor) -> Tensor:
    empty = total == 0
    return torch.where(empty, 0.0, out / torch.where(empty, 1.0, total))


def _require(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    for name, x in {"q": q, "k": k, "v": v}.items():
        if not x.is_floating_point():
            raise TypeError(f"{name} must be real and floating point, got {x.dtype}")
        if x.ndim < 2:
            raise ValueError(f"{name} must have two dimensions or more, got shape {tuple(x.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must share one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(
            "q (…, n, d), k (…, m, d) and v (…, m, d_v) do not fit together: "
            f"got shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    _lead(q, k, v)
    if causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"causal needs as many queries as keys, got {q.shape[-2]} and {k.shape[-2]}")
