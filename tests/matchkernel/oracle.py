"""What the tests hold the library against: pairs, rows and keys walked one by one, in plain Python."""

import math
from collections.abc import Callable

import torch

Tensor = torch.Tensor


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal entries, drawn in float64 and rounded once."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def inputs(
    *lead: int, n: int = 5, m: int = 7, d: int = 4, width: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """q (*lead, n, d), k (*lead, m, d), v (*lead, m, width)."""
    return (
        draw(*lead, n, d, seed=1, dtype=dtype),
        draw(*lead, m, d, seed=2, dtype=dtype),
        draw(*lead, m, width, seed=3, dtype=dtype),
    )


def scaled_dot(q: list[float], k: list[float]) -> float:
    return sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q))


def by_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Callable[[list[float], list[float]], float] = scaled_dot,
    *,
    allowed: Callable[[int, int], bool] = lambda i, j: True,
    bias: Callable[[int, int], float] = lambda i, j: 0.0,
    factor: Callable[[int], float] = lambda keys: 1.0,
    sink: float | None = None,
) -> Tensor:
    """Attention for q (n, d), k (m, d), v (m, width), pair by pair; `factor` is given the row's count of keys."""
    queries, keys, values = q.tolist(), k.tolist(), v.tolist()
    out = []
    for i, query in enumerate(queries):
        seen = [j for j in range(len(keys)) if allowed(i, j)]
        logits = [factor(len(seen)) * score(query, keys[j]) + bias(i, j) for j in seen]
        top = max([*logits, *([] if sink is None else [sink])], default=0.0)
        weights = [math.exp(logit - top) for logit in logits]
        total = sum(weights) + (0.0 if sink is None else math.exp(sink - top))
        row = [0.0] * v.shape[-1]
        for j, weight in zip(seen, weights, strict=True):
            row = [old + weight / total * new for old, new in zip(row, values[j], strict=True)]
        out.append(row)
    return torch.tensor(out, dtype=torch.float64).reshape(len(queries), v.shape[-1])
