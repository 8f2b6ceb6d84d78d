"""Each weight on its own: the sigmoid."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.values import HeadValue, as_factor, hold, show
from .base import Normalizer, State


class Sigmoid(Normalizer):
    """The logistic function of each score by itself: keys do not compete, and rows do not sum to 1.

    α_ij = σ(s_ij + b) = 1 / (1 + exp(−s_ij − b)),  b = −log m_i by default, m_i = how many keys query i may attend to

    `bias` b is None for −log m_i, a number, a tensor with one entry per head, or an `nn.Parameter`. With scores near
    zero the default makes a row sum to m / (m + 1), near the 1 of a softmax; without it the sum grows with the number
    of keys. m_i counts permitted keys, so that padding and one-by-one decoding change nothing; the paper subtracts the
    logarithm of the full length instead. Not shift-invariant: a row of scores far below −b has no weight left.
    Source: Ramapuram et al. 2024 (arXiv 2409.04431), section 2, with the bias −log n that it recommends.
    """

    online = True
    bias: HeadValue | None

    def __init__(self, bias: HeadValue | None = None) -> None:
        super().__init__()
        self.counts_keys = bias is None
        if bias is None:
            self.bias = None
        else:
            hold(self, "bias", bias)

    def shift(self, visible: Tensor | None, like: Tensor) -> HeadValue | Tensor:
        if self.bias is not None:
            return as_factor(self.bias, like)
        if visible is None:
            raise ValueError("Sigmoid() needs the number of visible keys of each query")
        # A query without keys gets zeros whatever the shift; −log 0 must not reach it.
        return -visible.clamp_min(1).to(like.dtype).log()

    def weigh(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores)

    def start(self, rows: Tensor) -> State:
        return ()

    def absorb(self, state: State, scores: Tensor) -> tuple[State, Tensor, Tensor | None]:
        return state, torch.sigmoid(scores), None

    def close(self, state: State, accumulated: Tensor) -> tuple[Tensor, Tensor]:
        return accumulated, accumulated.new_zeros(accumulated.shape[:-1])

    def again(self, scores: Tensor, statistic: Tensor) -> Tensor:
        return torch.sigmoid(scores)

    def score_gradient(self, weights: Tensor, grad_weights: Tensor, row: Tensor) -> Tensor:
        return weights * (1.0 - weights) * grad_weights

    def extra_repr(self) -> str:
        return "" if self.bias is None else f"bias={show(self.bias)}"
