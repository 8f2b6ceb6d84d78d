"""The softmax family: exponentials of the scores, over their sum."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kernels.values import HeadValue, as_factor, hold, show
from .base import Normalizer, State


class SoftmaxFamily(Normalizer):
    """A softmax of scaled scores, times at most one number per row.

    Online, a row's state is its largest score so far and the sum of the exponentials below it, and its statistic is
    the log-sum-exp; `remainder` is applied by the engine, to the finished row.
    Source: Milakov & Gimelshein 2018, algorithm 3, for the online form.
    """

    online = True

    @property
    def has_remainder(self) -> bool:
        """Whether rows are multiplied by a number of their own, which needs their log-sum-exp."""
        return type(self).remainder is not SoftmaxFamily.remainder

    def weigh(self, scores: Tensor) -> Tensor:
        if scores.shape[-1] == 0:
            return scores
        # A row of −inf has no finite maximum, and its softmax is 0/0 with NaN gradients. Give it finite scores first.
        empty = scores.detach().amax(dim=-1, keepdim=True) == float("-inf")
        finite = torch.where(empty, 0.0, scores)
        remainder = self.remainder(finite.logsumexp(dim=-1)) if self.has_remainder else None
        # Under the same name, so that no more than three tables are held at a time.
        finite = finite.softmax(dim=-1)
        weights = torch.where(empty, 0.0, finite)
        return weights if remainder is None else weights * remainder.unsqueeze(-1)

    def share(self, product: Tensor, log_scale: Tensor) -> Tensor:
        if not self.proportional:
            return super().share(product, log_scale)
        if product.shape[-1] == 0:
            return product
        # In units of the row's largest weight, which the future cannot have set: it is at −inf there.
        one = self.beside(log_scale)
        top = (log_scale.detach() + product.detach().abs().log()).amax(dim=-1, keepdim=True)
        if one is not None:
            top = torch.maximum(top, one.detach())
        top = torch.where(top == float("-inf"), 0.0, top)
        # Only a product that is 0 has a scale so far above the top: its weight is 0, and must not be 0 · ∞.
        most = -math.log(torch.finfo(product.dtype).tiny)
        kappa = product * (log_scale - top).clamp_max(most).exp()
        total = kappa.sum(dim=-1, keepdim=True)
        if one is not None:
            total = total + (one - top).exp()
        empty = total == 0.0
        return torch.where(empty, 0.0, kappa / torch.where(empty, 1.0, total))

    def beside(self, like: Tensor) -> Tensor | None:
        """The logarithm of what stands beside the keys in the row's sum, broadcastable to `like` (…, n, m)."""
        return None

    def start(self, rows: Tensor) -> State:
        return torch.full_like(rows, float("-inf")), torch.zeros_like(rows)

    def absorb(self, state: State, scores: Tensor) -> tuple[State, Tensor, Tensor | None]:
        before, total = state
        top = torch.maximum(before, scores.amax(dim=-1))
        # −inf − (−inf) is NaN: a row that has seen nothing yet is measured from 0.
        base = torch.where(top == float("-inf"), 0.0, top)
        weights = (scores - base.unsqueeze(-1)).exp()
        carry = (before - base).exp()
        return (top, total * carry + weights.sum(dim=-1)), weights, carry

    def close(self, state: State, accumulated: Tensor) -> tuple[Tensor, Tensor]:
        top, total = state
        # The largest score adds 1 to the sum, so that only a row without keys has less.
        empty = total == 0.0
        total = torch.where(empty, 1.0, total)
        return accumulated / total.unsqueeze(-1), torch.where(empty, 0.0, top) + total.log()

    def again(self, scores: Tensor, statistic: Tensor) -> Tensor:
        return (scores - statistic.unsqueeze(-1)).exp()

    def score_gradient(self, weights: Tensor, grad_weights: Tensor, row: Tensor) -> Tensor:
        return weights * (grad_weights - row)


class Softmax(SoftmaxFamily):
    """The exponential of each score over the sum of the exponentials.

    α_ij = exp(s_ij / τ) / Σ_j' exp(s_ij' / τ)

    `temperature` τ > 0 is a number (default 1), a tensor with one entry per head, or an `nn.Parameter`. Rows sum to 1;
    a row with no permitted key is zero. ValueError for a temperature that is not above zero.
    Source: Vaswani et al. 2017, eq. 1 (τ = 1).
    """

    shift_invariant = True
    temperature: HeadValue

    def __init__(self, temperature: HeadValue = 1.0) -> None:
        super().__init__()
        hold(self, "temperature", temperature, positive=True)

    def factor(self, visible: Tensor | None, like: Tensor) -> HeadValue | Tensor:
        return 1.0 / as_factor(self.temperature, like)

    @property
    def proportional(self) -> bool:
        """At temperature 1, as a number: κ to a power has no finite features."""
        return not isinstance(self.temperature, Tensor) and self.temperature == 1.0

    def extra_repr(self) -> str:
        plain = not isinstance(self.temperature, Tensor) and self.temperature == 1.0
        return "" if plain else f"temperature={show(self.temperature)}"


class SinkSoftmax(SoftmaxFamily):
    """A softmax with one more logit, which takes weight and gives no value.

    α_ij = exp(s_ij) / (exp(b) + Σ_j' exp(s_ij'))

    `logit` b is a number (default 0, "softmax one"), a tensor with one entry per head, or an `nn.Parameter`. Rows sum
    to less than 1, so a head can attend to nothing. Not shift-invariant: a row of scores far below b has no weight
    left.
    Source: Xiao et al. 2024 (StreamingLLM), eq. 2 for b = 0; OpenAI 2025 (gpt-oss) for a learned b per head.
    """

    logit: HeadValue

    def __init__(self, logit: HeadValue = 0.0) -> None:
        super().__init__()
        hold(self, "logit", logit)

    @property
    def proportional(self) -> bool:
        return True

    def beside(self, like: Tensor) -> Tensor:
        logit = as_factor(self.logit, like)
        return logit if isinstance(logit, Tensor) else like.new_tensor(logit)

    def remainder(self, logsumexp: Tensor) -> Tensor | None:
        # Σ / (e^b + Σ) = sigmoid(log Σ − b): no exponential that could overflow.
        logit = as_factor(self.logit, logsumexp.unsqueeze(-1))
        shift = logit.reshape(-1, 1) if isinstance(logit, Tensor) and logit.dim() else logit
        return torch.sigmoid(logsumexp - shift)

    def extra_repr(self) -> str:
        return f"logit={show(self.logit)}"


class ScalableSoftmax(SoftmaxFamily):
    """A softmax whose scores grow with the logarithm of the number of keys.

    α_ij = exp(s · log m_i · s_ij) / Σ_j' exp(s · log m_i · s_ij'),  m_i = how many keys query i may attend to

    With plain scores the largest weight fades as keys are added; multiplied by log m it does not. `s` > 0 is a number
    (default 1), a tensor with one entry per head, or an `nn.Parameter` (the paper learns it). m_i counts permitted
    keys, so that padding and one-by-one decoding change nothing. With one key the weight is 1.
    Source: Nakanishi 2025 (Scalable-Softmax), eq. 4.
    """

    shift_invariant = True
    counts_keys = True
    s: HeadValue

    def __init__(self, s: HeadValue = 1.0) -> None:
        super().__init__()
        hold(self, "s", s, positive=True)

    def factor(self, visible: Tensor | None, like: Tensor) -> HeadValue | Tensor:
        if visible is None:
            raise ValueError("ScalableSoftmax needs the number of visible keys of each query")
        # A query without keys gets zeros whatever the factor; log 0 must not reach it.
        return as_factor(self.s, like) * visible.clamp_min(1).to(like.dtype).log()

    def extra_repr(self) -> str:
        return f"s={show(self.s)}"
