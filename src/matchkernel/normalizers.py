"""How scores become weights: the softmax family."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .kernels.values import HeadValue, as_factor, hold, show


class Normalizer(nn.Module):
    """Turns a row of scores into a row of weights.

    weights = weigh(factor · score + float mask), with score = −inf where a query may not attend

    `factor(visible)` is what multiplies the score before a float mask is added; `visible` holds how many keys each
    query may attend to. A member of the softmax family also says what is left of a plain softmax once its log-sum-exp
    is known, so that an engine can compute it without forming the table:

    weights = softmax(factor · score + float mask) · remainder(logsumexp)
    """

    shift_invariant: bool = False
    """Whether a constant added to a whole row of scores leaves the weights as they are."""

    counts_keys: bool = False
    """Whether `factor` needs the number of visible keys."""

    def factor(self, visible: Tensor | None, like: Tensor) -> HeadValue | Tensor:
        """The multiplier of the scores (…, n, m): a number or a tensor (…, n | 1, 1) in the dtype of `like`."""
        return 1.0

    def weigh(self, scores: Tensor) -> Tensor:
        """Weights (…, n, m) from scores that already carry factor and mask; a row of −inf gives zeros."""
        raise NotImplementedError(f"{type(self).__name__} must define weigh(scores)")

    def remainder(self, logsumexp: Tensor) -> Tensor | None:
        """What multiplies a plain softmax's row, given its log-sum-exp (…, n); None for nothing."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


class SoftmaxFamily(Normalizer):
    """A softmax of scaled scores, times at most one number per row."""

    def weigh(self, scores: Tensor) -> Tensor:
        if scores.shape[-1] == 0:
            return scores
        # A row of −inf has no finite maximum, and its softmax is 0/0 with NaN gradients. Give it finite scores first.
        empty = scores.detach().amax(dim=-1, keepdim=True) == float("-inf")
        finite = torch.where(empty, torch.zeros_like(scores), scores)
        weights = torch.where(empty, torch.zeros_like(scores), finite.softmax(dim=-1))
        remainder = self.remainder(finite.logsumexp(dim=-1))
        return weights if remainder is None else weights * remainder.unsqueeze(-1)


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
