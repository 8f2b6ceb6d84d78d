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


def softmax(logits: list[float], sink: float | None = None) -> list[float]:
    top = max([*logits, *([] if sink is None else [sink])], default=0.0)
    weights = [math.exp(logit - top) for logit in logits]
    total = sum(weights) + (0.0 if sink is None else math.exp(sink - top))
    return [weight / total for weight in weights]


def sigmoid(bias: float | None = None) -> Callable[[list[float]], list[float]]:
    """The logistic function of each logit plus `bias`, or less the logarithm of how many there are."""

    def normalize(logits: list[float]) -> list[float]:
        less = math.log(max(len(logits), 1)) if bias is None else -bias
        return [1.0 / (1.0 + math.exp(less - logit)) for logit in logits]

    return normalize


def entmax(alpha: float) -> Callable[[list[float]], list[float]]:
    """The threshold at which weights sum to 1, by halving, in plain Python; the sum is put right at the end."""

    def weights(logits: list[float], threshold: float) -> list[float]:
        return [max((alpha - 1.0) * logit - threshold, 0.0) ** (1.0 / (alpha - 1.0)) for logit in logits]

    def normalize(logits: list[float]) -> list[float]:
        high = (alpha - 1.0) * max(logits, default=0.0)
        low = high - 1.0
        for _ in range(100):
            middle = (low + high) / 2.0
            low, high = (middle, high) if sum(weights(logits, middle)) >= 1.0 else (low, middle)
        total = sum(weights(logits, low))
        return [weight / total for weight in weights(logits, low)]

    return normalize


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
    normalize: Callable[[list[float]], list[float]] | None = None,
) -> Tensor:
    """Attention for q (n, d), k (m, d), v (m, width), pair by pair; `factor` is given the row's count of keys.

    `normalize` takes a row's permitted logits to weights: a softmax, with `sink` beside the keys, if there is none.
    """
    queries, keys, values = q.tolist(), k.tolist(), v.tolist()
    out = []
    for i, query in enumerate(queries):
        seen = [j for j in range(len(keys)) if allowed(i, j)]
        logits = [factor(len(seen)) * score(query, keys[j]) + bias(i, j) for j in seen]
        weights = softmax(logits, sink) if normalize is None else normalize(logits)
        row = [0.0] * v.shape[-1]
        for j, weight in zip(seen, weights, strict=True):
            row = [old + weight * new for old, new in zip(row, values[j], strict=True)]
        out.append(row)
    return torch.tensor(out, dtype=torch.float64).reshape(len(queries), v.shape[-1])
