"""The Nyström engine: attention through a few landmarks, in time that grows with the length."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.base import DotKernel
from ..kernels.feature_base import why_no_score
from ..kernels.values import HeadValue
from ..masks import Visibility
from ..normalizers import SoftmaxFamily
from ._padding import run_within, why_not_padding
from ._segments import Segments
from .problem import NOTHING_TO_COMPUTE, Cost, Problem, traffic, zero_where_not
from .reference import Reference

_REFERENCE = Reference()


@dataclass(frozen=True)
class Nystrom:
    """Attention through landmarks: approximate, O((n + m) · landmarks) time, never an n × m table.

    softmax(S) v ≈ F A⁺ (B v),  F = softmax(s(q, k̃)),  A = softmax(s(q̃, k̃)),  B = softmax(s(q̃, k))
    A⁺ b = the x that makes |A x − b|² + ridge² |x|² least

    q̃ and k̃ are the means of q and of k, as they are given and before the kernel encodes them, over `landmarks` segments
    whose lengths differ by one at most. s is the kernel's score, scaled as the normaliser says; a landmark stands at
    the mean of its tokens' positions. F and A weigh a key landmark by how many keys it stands for, which changes
    nothing where the segments are equally long, as they are in the paper. F and B are never formed where the fused
    engine takes them: A⁺ (B v) are the values of attention from the queries to the landmarks.

    Args:
        landmarks: how many on either side (default 64, as in the paper's models).
        ridge: a singular value σ of A is inverted as σ / (σ² + ridge²); the largest is at least 1. On tokens that do
            not change smoothly along the sequence A is close to singular, and its exact inverse enlarges what F and B
            miss, often beyond all bounds. The default, 0.03, errs about as much as the paper's six steps of an
            iteration, which stop short of the inverse too; its price is an error of that size where all is smooth. 0
            for the pseudo-inverse, without the singular values below landmarks · eps of the largest.

    Exact, and the whole table computed, where there are no more keys or no more queries than landmarks. At ridge 0 also
    exact where the queries, or the keys, are constant over each segment and A has full rank. Rows of F A⁺ B sum to 1,
    or nearly, but may hold negative weights: the output is no average of values.

    Masks over the keys: a key that nobody may attend to leaves the means, and the segments are cut among the others,
    so that padding changes nothing. In self-attention hide padded queries too, with a mask that is
    real[…, :, None] & real[…, None, :]: a query that sees nothing leaves the means, any other is part of them.
    Refused: causal order and windows, since a landmark mixes the future in; masks that differ from query to query;
    dropout; normalisers that are not a softmax, or need the sum of a row (a sink); signed feature kernels.

    Derivatives are those of the formula (at ridge 0 while the rank of A stays). Half types are computed in float32, A⁺
    in float64.
    Cost: three tables of n · landmarks, landmarks² and landmarks · m pairs, and about 3 · landmarks³ operations for A⁺,
    23 · landmarks³ at ridge 0. ValueError for counts below 1 and a ridge that is negative or not finite.
    Source: Xiong et al. 2021 (Nyströmformer), without its convolution; Williams & Seeger 2001 for Nyström's method.
    """

    landmarks: int = 64
    ridge: float = 0.03

    name = "nystrom"
    exact = False

    def __post_init__(self) -> None:
        count, ridge = self.landmarks, self.ridge
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"Nystrom(landmarks={count!r}): expected an integer of at least 1")
        number = isinstance(ridge, (int, float)) and not isinstance(ridge, bool)
        if not number or not 0.0 <= ridge < math.inf:
            raise ValueError(f"Nystrom(ridge={ridge!r}): expected a finite number of at least 0")

    def refuse(self, problem: Problem) -> str | None:
        normalizer = problem.normalizer
        if (reason := why_not_padding(problem, "a landmark")) is not None:
            return reason
        if (reason := why_no_score(problem.kernel)) is not None:
            return f"{reason}, and landmarks are matched by their scores"
        if not isinstance(normalizer, SoftmaxFamily):
            return f"{type(normalizer).__name__} is not a softmax"
        if normalizer.has_remainder:
            return f"{type(normalizer).__name__} needs the sum of each row over all keys, which landmarks do not give"
        if problem.dropout:
            return "dropout needs a table of weights to drop from"
        if 0 in (problem.pairs, problem.q.shape[-1], problem.v.shape[-1]):
            return NOTHING_TO_COMPUTE
        return None

    def declines(self, problem: Problem) -> str | None:
        return "it approximates"

    def compiles(self, problem: Problem) -> bool:
        return False

    def run(self, problem: Problem) -> Tensor:
        if self._all(problem):
            return run_within(problem)
        sees, seen = problem.visibility.query_sees, problem.visibility.key_seen
        q, k, v = (x.to(problem.wide) for x in problem.hide())
        whole = self._whole(problem, q, k, v)
        place = whole.visibility
        queries = Segments(place.queries, self.landmarks, None if sees is None else _each(sees, place.queries))
        keys = Segments(place.keys, self.landmarks, None if seen is None else _each(seen, place.keys))
        q_mark, k_mark = queries.mean(whole.q), keys.mean(whole.k)
        at_query, at_key = (
            _mean_position(*pair) for pair in ((place.query_position, queries), (place.key_position, keys))
        )
        bias = self._bias(keys, place.bias, whole)
        here = replace(place, keys=self.landmarks, key_position=at_key, mask=bias)
        there = replace(place, queries=self.landmarks, query_position=at_query)
        among = replace(here, queries=self.landmarks, query_position=at_query)
        summary = run_within(replace(whole, q=q_mark, visibility=there))
        table = _REFERENCE.weights(replace(whole, q=q_mark, k=k_mark, v=k_mark, visibility=among))
        values = self._solve(table, summary)
        if keys.keep is not None:
            # With fewer keys than landmarks each key is one, and F is the table itself.
            values = torch.where(keys.kept.unsqueeze(-1) <= self.landmarks, keys.mean(whole.v), values)
        out = run_within(replace(whole, k=k_mark, v=values, visibility=here))
        if queries.keep is not None:
            # With fewer queries than landmarks each query is one, and has read the keys itself.
            out = torch.where(queries.kept.unsqueeze(-1) <= self.landmarks, queries.spread(summary), out)
        out = out.to(problem.q.dtype)
        return out if sees is None else zero_where_not(sees, out)

    def _all(self, problem: Problem) -> bool:
        return min(problem.visibility.queries, problem.visibility.keys) <= self.landmarks

    def _whole(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Problem:
        """The problem as wide as its sums, with no mask but one over the keys, and a head of keys for each of q."""
        place, groups = problem.visibility, problem.groups
        mask, positions = place.mask, place.key_position
        if groups > 1:
            k, v = (x.repeat_interleave(groups, dim=-3) for x in (k, v))
        if mask is not None and not place.by_key:
            assert place.key_seen is not None
            mask = place.key_seen.unsqueeze(-2)
        normalizer = problem.normalizer
        if normalizer.counts_keys:
            # Landmarks are fewer than keys, but the scores are those of the whole sequence.
            visible = place.visible.amax(-2, keepdim=True)
            normalizer = _Factor(normalizer.factor(visible, q))
        place = Visibility(place.queries, place.keys, mask, False, None, place.query_position, positions, place.aligned)
        return replace(problem, q=q, k=k, v=v, normalizer=normalizer, visibility=place, groups=1)

    def _bias(self, keys: Segments, bias: Tensor | None, whole: Problem) -> Tensor | None:
        """What is added to a key landmark's scores (…, 1, landmarks): the mean of the mask, log of how many it is."""
        counts = None
        if keys.keep is not None or keys.tokens % keys.count:
            counts = keys.lengths(whole.q.device).to(whole.q.dtype).log().unsqueeze(-2)
        if bias is None:
            return counts
        mean = keys.mean(bias.expand(*bias.shape[:-1], keys.tokens).to(whole.q.dtype).mT).mT
        return mean if counts is None else mean + counts

    def _solve(self, table: Tensor, summary: Tensor) -> Tensor:
        """A⁺ b (…, landmarks, d_v)."""
        # A NaN, which a decomposition would raise for, is in b as well, and so in the result.
        finite = table.detach().isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
        # Few numbers, and squared: in float32 the ridge would drown in rounding.
        A, b = torch.where(finite, table, 0.0).double(), summary.double()
        if self.ridge:
            damped = A.mT @ A + self.ridge**2 * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
            x: Tensor = torch.linalg.solve(damped, A.mT @ b)
        else:
            x = torch.linalg.pinv(A, rtol=self.landmarks * torch.finfo(table.dtype).eps) @ b
        return x.to(summary.dtype)

    def cost(self, problem: Problem) -> Cost:
        place, size = problem.visibility, torch.finfo(problem.wide).bits // 8
        batch, marks = problem.batch.numel(), self.landmarks
        per_pair = problem.kernel.flops_per_pair(problem.q.shape[-1], problem.k.shape[-1])
        width = problem.v.shape[-1]
        if self._all(problem):
            held = 3 * problem.pairs * size
            flops = None if per_pair is None else problem.pairs * (per_pair + 2 * width)
            return Cost(flops, traffic(problem), held)
        both = place.queries + place.keys
        flops = None
        if per_pair is not None:
            scores = (both + marks) * marks * per_pair
            flops = batch * (scores + (both + marks) * marks * 2 * width + (3 if self.ridge else 23) * marks**3)
        rows = batch * (place.queries * (width + 1) + marks * (2 * problem.q.shape[-1] + 2 * width + 3 * marks))
        # A kernel that is no inner product has each of its two long tables formed, one after the other.
        streams = isinstance(problem.kernel, DotKernel)
        tables = 0 if streams else 3 * batch * max(place.queries, place.keys) * marks
        return Cost(flops, 2 * traffic(problem), (rows + tables) * size)

    def reason(self, problem: Problem) -> str:
        if self._all(problem):
            return f"no more queries or keys than landmarks ({self.landmarks}): the whole table"
        return f"{self.landmarks} landmarks, the means of segments, stand between queries and keys"


class _Factor(SoftmaxFamily):
    """A softmax of scores times what another normaliser made of the number of keys."""

    shift_invariant = True

    def __init__(self, value: HeadValue) -> None:
        super().__init__()
        self.value = value

    def factor(self, visible: Tensor | None, like: Tensor) -> HeadValue:
        return self.value


def _each(keep: Tensor, tokens: int) -> Tensor:
    return keep.expand(*keep.shape[:-1], tokens)


def _mean_position(position: Tensor, segments: Segments) -> Tensor:
    return segments.mean(position.to(torch.float64).unsqueeze(-1)).squeeze(-1)
