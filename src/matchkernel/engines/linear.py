"""The linear engine: any FeatureKernel in time and memory that grow with n, by sums over features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.encoding import leaves
from ..kernels.feature_base import FeatureKernel
from ..kernels.feature_maps import MOST, FeatureMap
from ..normalizers import SoftmaxFamily
from . import _linear_exact, _linear_plain
from ._encoding import four
from ._linear_chunks import Layout
from ._linear_exact import Operands
from ._linear_function import Job, LinearAttention, Maps, bare, run, uncast
from .problem import NOTHING_TO_COMPUTE, Cost, Problem, traffic, why_not_by_hand, zero_where_not

FEW, MANY = 2**16, 2**19
"""Scores of one batch entry, and of all, up to which "auto" leaves a problem to the reference, as `tiled` does."""

TOKENS = 2048
"""How many tokens, over all heads, are worked on at a time: their features lie in a core's own cache."""


@dataclass(frozen=True)
class Linear:
    """Sums keys and values over features once, and lets every query read the sums: no table, forward or backward.

    out_i = φ(q_i) S_i / φ(q_i) z_i,  S_i = Σ_j φ(k_j)ᵀ v_j,  z_i = Σ_j φ(k_j), over the keys j that query i may see

    chunk: the most tokens of a causal call that meet each other as a small table, the rest coming from the sums, 128
    by default. Not more than there are features (but 64), where both cost alike.

    Exact. Sums are float32 for half-precision inputs. A kernel's log scales are measured from the largest so far, of
    keys that a query may see, so that no later key changes an earlier row and none overflows. One that is not a number,
    though, spoils its whole segment: the sums before it are told apart by products with 0.
    Cost: O((n + m) f d_v) time and O((n + m)(f + d_v)) memory for f features.
    Source: Katharopoulos et al. 2020, eq. 6 and 9; the chunks are those of Hua et al. 2022 (FLASH), section 3.2.
    """

    chunk: int = 128

    name = "linear"
    exact = True

    def __post_init__(self) -> None:
        if isinstance(self.chunk, bool) or not isinstance(self.chunk, int) or self.chunk < 1:
            raise ValueError(f"Linear(chunk={self.chunk!r}): expected an integer of at least 1")

    def concerns(self, problem: Problem) -> bool:
        """Whether "auto" asks at all."""
        return isinstance(problem.kernel, FeatureKernel)

    def refuse(self, problem: Problem) -> str | None:
        place, normalizer = problem.visibility, problem.normalizer
        if not isinstance(problem.kernel, FeatureKernel):
            return f"{problem.kernel!r} is not a FeatureKernel: its weight is no inner product of finite features"
        if not (isinstance(normalizer, SoftmaxFamily) and normalizer.proportional):
            return f"the weights of {normalizer!r} are not proportional to κ"
        if problem.dropout:
            return "dropout draws for each weight, and no table of them is formed"
        if place.window is not None:
            return "a window takes keys out of the sums again"
        if not place.by_key:
            return "the mask has a row per query, and the sums are the same for all"
        if place.causal and not place.aligned:
            return "causal order by positions of one's own is no order of the rows"
        if 0 in (problem.q.shape[-1], problem.k.shape[-1]):
            return NOTHING_TO_COMPUTE
        return why_not_by_hand(problem)

    def declines(self, problem: Problem) -> str | None:
        entries = max(1, problem.batch[:-1].numel())
        if problem.pairs <= FEW * entries and problem.pairs <= MANY:
            return f"the whole table has only {problem.pairs} scores"
        features = _features(problem)
        if features is not None and self._flops(problem, features) > _table_flops(problem, features):
            return f"sums over {features} features cost more operations than the table"
        return None

    def compiles(self, problem: Problem) -> bool:
        return False

    def run(self, problem: Problem) -> Tensor:
        with uncast(problem.q):
            return self._run(problem)

    def _run(self, problem: Problem) -> Tensor:
        place, batch = problem.visibility, problem.batch
        job, tensors = self._job(problem)
        if job is None:
            out = self._by_whole(problem)
        else:
            recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
            by_map = _linear_plain.attend(job, tensors, recorded)
            if by_map is not None:
                out = by_map
            elif recorded:
                out = LinearAttention.apply(job, *tensors)  # type: ignore[no-untyped-call]
            else:
                out = run(job, tensors, keep=False)[0]
        out = out.reshape(*batch, *out.shape[-2:]).to(problem.q.dtype)
        sees = place.query_sees
        return out if sees is None or job is not None else zero_where_not(sees, out)

    def _job(self, problem: Problem) -> tuple[Job | None, tuple[Tensor | None, ...]]:
        """What `LinearAttention` takes; None for a kernel whose maps are not to be called with a few tokens."""
        kernel, place, batch = problem.kernel, problem.visibility, problem.batch
        assert isinstance(kernel, FeatureKernel)
        if type(kernel).encode is not FeatureKernel.encode:
            return None, ()
        kernel.check_positions(place.query_position, place.key_position)
        q, k, v = (four(x, batch) for x in problem.hide())
        bias, one = _beside_features(problem)
        maps = Maps(kernel)
        learned = dict(maps.named_parameters())
        heads = batch[-1] if batch else 1
        layout = Layout(place.queries, place.keys, place.causal, self.chunk, self.chunk)
        job = Job(
            maps=maps, names=tuple(learned), buffers=tuple(maps.named_buffers()), positive=kernel.positive,
            layout=layout, batch=batch[:-1].numel(), heads=heads, width=v.shape[-1], features=0, wide=problem.wide,
            query_position=four(place.query_position, batch, trailing=1),
            key_position=four(place.key_position, batch, trailing=1),
            mapping=None, exactly=_exactly,
        )  # fmt: skip
        tensors = (q, k, v, bias, one, *learned.values())
        sampled = job.sample(tensors)
        if sampled is None:
            return None, ()
        features, wide = sampled
        # A segment's features of all heads, and the sums that are kept for it, each about as large as its tokens.
        tokens = max(TOKENS // heads, features * (v.shape[-1] + 1) // 64)
        chunk = self._chunk(features)
        layout = replace(layout, chunk=chunk, segment=max(1, tokens // chunk) * chunk)
        mapping = _mapping(kernel, job, v, wide)
        return replace(job, features=features, wide=wide, layout=layout, mapping=mapping), tensors

    def _by_whole(self, problem: Problem) -> Tensor:
        kernel, place, batch = problem.kernel, problem.visibility, problem.batch
        assert isinstance(kernel, FeatureKernel)
        q, k, v = (x.to(problem.wide) for x in problem.hide())
        if problem.groups > 1:
            k, v = (x.repeat_interleave(problem.groups, dim=-3) for x in (k, v))
        query, key = kernel.encode(q, k, place.query_position, place.key_position)
        (x, of_query), (y, of_key) = ([four(x, batch) for x in leaves(side)] for side in (query, key))
        bias, one = _beside_features(problem)
        operands = Operands.of(x, of_query, y, of_key, four(v, batch), bias, one)
        kernel.check_features(operands.query, operands.key)
        out = _linear_exact.attend(operands, causal=place.causal, chunk=self.chunk, positive=kernel.positive)
        return out.expand(batch[:-1].numel(), batch[-1] if batch else 1, *out.shape[-2:])

    def _chunk(self, features: int) -> int:
        return min(self.chunk, max(64, features))

    def _flops(self, problem: Problem, features: int) -> int:
        """Two operations for each number of the state and token that is summed or read, and those of the squares."""
        place, heads, width = problem.visibility, problem.batch.numel(), problem.v.shape[-1] + 1
        n, m = place.queries, place.keys
        flops = 2 * (n + m) * features * width
        if place.causal:
            flops += 2 * min(n, m) * min(self._chunk(features), n, m) * (features + width)
        return heads * flops

    def cost(self, problem: Problem) -> Cost:
        features = _features(problem)
        flops = None if features is None else self._flops(problem, features)
        held = (
            problem.batch.numel()
            * (problem.visibility.queries + problem.visibility.keys)
            * ((features or problem.q.shape[-1]) + problem.v.shape[-1] + 1)
        )
        return Cost(flops, traffic(problem), held * torch.finfo(problem.wide).bits // 8)

    def reason(self, problem: Problem) -> str:
        how = f"in chunks of {self.chunk}" if problem.visibility.causal else "once for all queries"
        return f"{problem.kernel!r} has finite features, so keys and values are summed over them, {how}"


def _mapping(kernel: FeatureKernel, job: Job, v: Tensor, wide: torch.dtype) -> FeatureMap | None:
    """The map that the kernel ships, where it may stand for `features`.

    Not beside parameters: a subclass may learn what the map is made of, and the map has no derivative by it. Nor for
    values above `MOST`: they are summed with products of two features as large, which would overflow.
    """
    if job.names or v.device.type != "cpu" or not bool((v.amax() < MOST) & (v.amin() > -MOST)):
        return None
    return kernel.feature_map(wide)


def _beside_features(problem: Problem) -> tuple[Tensor | None, Tensor | None]:
    """What is added to the keys' log scales, (batch | 1, heads | 1, m, 1), −inf where one is hidden, and the logarithm
    of what stands beside the keys in a row's sum, (1, heads | 1, 1, 1); None for nothing."""
    place, batch = problem.visibility, problem.batch
    bias = place.bias
    if bias is None and place.by_mask is not None:
        bias = torch.zeros(place.by_mask.shape, dtype=problem.wide, device=problem.q.device)
        bias = bias.masked_fill_(~place.by_mask, -torch.inf)
    if bias is not None:
        bias = four(bias.expand(*bias.shape[:-1], place.keys).mT.to(problem.wide), batch)
    assert isinstance(problem.normalizer, SoftmaxFamily)
    one = problem.normalizer.beside(problem.q.new_empty((), dtype=problem.wide).expand(*batch, place.queries, 1))
    return bias, None if one is None else one.reshape(1, -1, 1, 1)


def _exactly(job: Job, tensors: Sequence[Tensor | None]) -> Tensor:
    """What `LinearAttention` computes, with all features at once and in differentiable operations."""
    q, k, v, bias, one, *parameters = tensors
    assert q is not None and k is not None and v is not None
    shape = (job.batch, job.heads)
    k, v = (x if x.shape[1] in (1, job.heads) else x.repeat_interleave(job.heads // x.shape[1], dim=1) for x in (k, v))
    given = [x for x in parameters if x is not None]
    query = job.call(True, q.expand(*shape, -1, -1), bare(job.query_position), given)
    key = job.call(False, k.expand(*shape, -1, -1), bare(job.key_position), given)
    operands = Operands.of(*query, *key, v.to(job.wide), bias, one)
    layout = job.layout
    out = _linear_exact.attend(operands, causal=layout.causal, chunk=layout.chunk, positive=job.positive)
    return out.expand(*shape, -1, -1).contiguous()


def _features(problem: Problem) -> int | None:
    assert isinstance(problem.kernel, FeatureKernel)
    return problem.kernel.feature_count(problem.k.shape[-1])


def _table_flops(problem: Problem, features: int) -> int:
    return 2 * problem.pairs * (features + problem.v.shape[-1])
