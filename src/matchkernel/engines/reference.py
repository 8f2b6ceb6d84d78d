"""The dense engine: the whole table, in plain differentiable operations. Every other engine is held against it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.encoding import Encoding
from ..kernels.feature_base import FeatureKernel, may_be_zero, why_no_score
from .problem import Cost, Problem, check_scores, product_flops, traffic


class Reference:
    """Forms the n × m table. Any kernel, normaliser and mask; any order of derivative; O(nm) time and memory.

    Of a feature kernel that may be 0 or negative the weights are shares of κ itself, under a normaliser that allows
    it. Under any other its score is log κ, and a signed one is refused.
    Half-precision inputs are computed in float32 and rounded once, at the end.
    """

    name = "reference"
    exact = True

    def refuse(self, problem: Problem) -> str | None:
        reason = None if _by_kappa(problem) else why_no_score(problem.kernel)
        if reason is None:
            return None
        alone = isinstance(problem.kernel, FeatureKernel)
        why = f"{problem.normalizer!r} needs a score" if alone else "kernels are put together by their scores"
        return f"{reason}, and {why}"

    def scores(self, problem: Problem) -> Tensor:
        """The kernel's scores (…, n, m), before factor, mask and softmax."""
        return self._scores(problem)[0]

    def _scores(self, problem: Problem) -> tuple[Tensor, Tensor]:
        query, key, v = self._encoded(problem)
        place = problem.visibility
        scores = problem.kernel.match(query, key)
        check_scores(scores, problem.kernel, (*problem.batch, place.queries, place.keys))
        return scores, v

    def _encoded(self, problem: Problem) -> tuple[Encoding, Encoding, Tensor]:
        """What the kernel makes of q and of k, and v."""
        q, k, v = self._inputs(problem)
        place = problem.visibility
        return *problem.kernel.encode(q, k, place.query_position, place.key_position), v

    def _inputs(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as wide as sums are taken, with a head of keys for each of the queries."""
        q, k, v = (x.to(problem.wide) for x in problem.hide())
        if problem.groups > 1:
            k, v = (x.repeat_interleave(problem.groups, dim=-3) for x in (k, v))
        return q, k, v

    def masked_scores(self, problem: Problem) -> Tensor:
        """The scores with the float mask added, and −inf where a query may not attend, in the inputs' dtype."""
        return self._permit(problem, self._scores(problem)[0]).to(problem.q.dtype)

    def _permit(self, problem: Problem, scores: Tensor) -> Tensor:
        bias, allowed = problem.visibility.bias, problem.visibility.allowed
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        return scores if allowed is None else torch.where(allowed, scores, float("-inf"))

    def _weights(self, problem: Problem) -> tuple[Tensor, Tensor]:
        if _by_kappa(problem):
            return self._shares(problem)
        scores, v = self._scores(problem)
        normalizer = problem.normalizer
        visible = problem.visibility.visible if normalizer.counts_keys else None
        none = scores.detach() == float("-inf") if may_be_zero(problem.kernel) else None
        if none is not None:
            # κ = 0 has no weight whatever multiplies its logarithm, and 0 · (−inf) is NaN.
            scores = torch.where(none, 0.0, scores)
        scores = self._permit(problem, normalizer.factor(visible, scores) * scores)
        if none is not None:
            scores = torch.where(none, float("-inf"), scores)
        shift = normalizer.shift(visible, scores)
        # Adding a plain 0 would be one more pass over the table.
        if isinstance(shift, Tensor) or shift != 0.0:
            scores = scores + shift
        return normalizer.weigh(scores), v

    def _shares(self, problem: Problem) -> tuple[Tensor, Tensor]:
        query, key, v = self._encoded(problem)
        kernel, place = problem.kernel, problem.visibility
        assert isinstance(kernel, FeatureKernel)
        product, log_scale = kernel.products(query, key)
        check_scores(product, kernel, (*problem.batch, place.queries, place.keys))
        if place.allowed is not None:
            product = torch.where(place.allowed, product, 0.0)
        return problem.normalizer.share(product, self._permit(problem, log_scale)), v

    def weights(self, problem: Problem) -> Tensor:
        """The table of weights (…, n, m), in the inputs' dtype."""
        weights = self._weights(problem)[0].to(problem.q.dtype)
        return weights.expand(*problem.batch, *weights.shape[-2:])

    def declines(self, problem: Problem) -> str | None:
        return None

    def compiles(self, problem: Problem) -> bool:
        return False

    def run(self, problem: Problem) -> Tensor:
        weights, v = self._weights(problem)
        if problem.dropout:
            weights = torch.nn.functional.dropout(weights, problem.dropout)
        # A parameter in a wider type than the inputs makes the weights that wide.
        out = (weights @ v.to(weights.dtype)).to(problem.q.dtype)
        return out.expand(*problem.batch, *out.shape[-2:])

    def cost(self, problem: Problem) -> Cost:
        held = problem.pairs * torch.finfo(problem.wide).bits // 8
        # Scores, weights and the softmax between them live at once.
        return Cost(product_flops(problem, problem.pairs), traffic(problem) + 4 * held, 3 * held)

    def reason(self, problem: Problem) -> str:
        how = ", as shares of κ" if _by_kappa(problem) else ""
        return f"the whole n × m table, in plain operations{how}"


def _by_kappa(problem: Problem) -> bool:
    """Whether κ itself is weighed, and no score is needed; what is positive has one as good."""
    kernel = problem.kernel
    return isinstance(kernel, FeatureKernel) and not kernel.positive and problem.normalizer.proportional
