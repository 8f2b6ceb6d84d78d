"""The ring engine: exact attention over a sequence whose shards lie in several processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.base import DotKernel
from ..kernels.feature_base import FeatureKernel
from ..normalizers import SoftmaxFamily
from . import _ring_features, _torch_private
from ._dot_softmax import form
from ._ring_circle import Circle, alike, valid_timeout
from ._ring_function import Job, RingAttention, forward
from .problem import Cost, Problem, product_flops, traffic, zero_where_not

TIMEOUT = 300.0
"""Seconds: long enough for a rank that compiles or saves, short against a night of waiting."""

_FREE = ("queries", "keys", "latest", "in line")
"""What may differ from rank to rank."""


class Ring:
    """Exact attention over a sequence that several processes of torch.distributed hold in shards.

    out_i = Σ_j α_ij v_j over the keys j of all ranks, for the queries i of this one.

    q (…, n_r, d), k (…, m_r, d), v (…, m_r, d_v) are this rank's shard → (…, n_r, d_v). Every rank makes the same call,
    forward and backward; lengths may differ from rank to rank, and one may have none. A `DotKernel` under a softmax,
    with or without sink, temperature or length scaling: keys and values travel once round the ring while each rank
    computes on what it has, partial results are merged by their log-sum-exp, and in the backward pass gradients of keys
    and values travel with them and come home. A `FeatureKernel` under `Softmax()` or `SinkSoftmax`: only the state
    Σ φ(k) vᵀ travels, whose size does not know the length.

    Shards follow one another in the order of the ranks unless query_position and key_position (both, of shape (n_r,)
    and (m_r,)) say where this rank's tokens stand. Under a causal order shards that follow one another leave the first
    rank little to do: `matchkernel.distributed.deal` and `positions` give every rank the same. A feature kernel in
    causal order needs shards that follow one another.

    Gradients of a kernel's or normaliser's parameters are this rank's part: sum them over the ranks, as data-parallel
    training does. A second derivative gathers all keys on each rank and goes through the table, (n_r × m).

    group: a process group, None for all processes. timeout: seconds, 300 by default, that one wait for another rank may
    take on CPU before `matchkernel.distributed.RingError` says for whom; on a GPU that bound is the process group's.
    `sent` counts the bytes that this rank has sent through this object.
    Errors: ValueError on all ranks where shapes, dtypes or the call differ between them; RingError where a rank died or
    does not answer: then on every other rank, within the timeout.
    Cost: n_r m operations per rank; P − 1 messages of one shard's keys and values forward, backward as many and P of
    their gradients. Memory: three shards of keys and values beside this rank's own.
    Source: Liu, Zaharia & Abbeel 2023 (Ring Attention); Milakov & Gimelshein 2018 for the merge.
    """

    name = "ring"
    exact = True

    def __init__(self, group: Any = None, timeout: float = TIMEOUT) -> None:
        self.group, self.timeout, self.sent = group, valid_timeout(timeout), 0

    def __repr__(self) -> str:
        return f"Ring(timeout={self.timeout:g})" if self.group is None else f"Ring(<group>, timeout={self.timeout:g})"

    def refuse(self, problem: Problem) -> str | None:
        place, kernel, normalizer = problem.visibility, problem.kernel, problem.normalizer
        if isinstance(kernel, FeatureKernel):
            if not normalizer.proportional:
                return f"a feature kernel's state knows κ alone, and {normalizer!r} needs a score"
            if place.causal and place.queries != place.keys:
                return "a feature kernel in causal order needs as many queries as keys on each rank"
        elif not isinstance(form(problem), DotKernel):
            return f"{kernel!r} is neither a DotKernel nor a FeatureKernel"
        if not isinstance(normalizer, SoftmaxFamily):
            return f"{type(normalizer).__name__} is not a softmax"
        if problem.dropout:
            return "dropout would have to draw the same weights again in the backward pass"
        if place.mask is not None:
            return "a mask speaks of this rank's keys alone; leave padding out: shards may have different lengths"
        if place.window is not None:
            return "a window needs its neighbours' keys and not a ring"
        if any(x.dim() > 1 and x.shape[:-1].numel() > 1 for x in (place.query_position, place.key_position)):
            return "positions must be the same for every batch entry and head: (n,) and (m,)"
        if torch.compiler.is_compiling() or _torch_private.transforming():
            return "messages between processes are not for torch.compile, vmap or jvp to trace"
        if 0 in (problem.batch.numel(), problem.q.shape[-1], problem.v.shape[-1]):
            return "there is nothing to compute: a batch or a width is 0"
        return _no_group(self.group)

    def declines(self, problem: Problem) -> str | None:
        return None

    def compiles(self, problem: Problem) -> bool:
        return False

    def run(self, problem: Problem) -> Tensor:
        circle = Circle(self.group, self.timeout, problem.q.device, self._count)
        place = problem.visibility
        described = circle.describe(_description(problem))
        alike([{x: y for x, y in one.items() if x not in _FREE} for one in described])
        queries, keys = ([one[side] for one in described] for side in ("queries", "keys"))
        if place.aligned:
            key_positions = [torch.arange(sum(keys[:r]), sum(keys[: r + 1])) for r in range(circle.world)]
            key_positions = [x.to(problem.q.device) for x in key_positions]
            first = sum(keys) - sum(queries) + sum(queries[: circle.rank])
            query_position = torch.arange(first, first + place.queries, device=problem.q.device)
        else:
            query_position = place.query_position.reshape(-1)
            own = place.key_position.reshape(-1)
            padded = torch.nn.functional.pad(own, (0, max(keys) - len(own)))
            key_positions = [x[:m] for x, m in zip(circle.gather(padded), keys, strict=True)]
        if isinstance(problem.kernel, FeatureKernel):
            if place.causal:
                _in_line(described, key_positions)
            out = _ring_features.run(circle, problem, query_position, key_positions[circle.rank], place.causal)
            return out.to(problem.q.dtype)
        return self._by_blocks(circle, problem, query_position, key_positions, described)

    def _count(self, sent: int) -> None:
        self.sent += sent

    def _by_blocks(
        self,
        circle: Circle,
        problem: Problem,
        query_position: Tensor,
        key_positions: list[Tensor],
        described: list[dict[str, Any]],
    ) -> Tensor:
        place, normalizer, kernel = problem.visibility, problem.normalizer, form(problem)
        assert isinstance(kernel, DotKernel)
        q, k, v = problem.q, problem.k, problem.v
        everywhere = torch.cat(key_positions)
        visible = torch.tensor([[len(everywhere)]], device=q.device)
        sees = torch.full((1,), len(everywhere) > 0, device=q.device)
        if place.causal:
            order = everywhere.sort().values
            visible = torch.searchsorted(order, query_position, right=True).unsqueeze(-1)
            sees = visible.squeeze(-1) > 0
            latest = max((one["latest"] for one in described if one["latest"] is not None), default=float("-inf"))
            latest = len(everywhere) - 1 if place.aligned else latest
            seen = key_positions[circle.rank] <= latest
            k, v = zero_where_not(seen, k), zero_where_not(seen, v)
        q = zero_where_not(sees, q)
        factor = normalizer.factor(visible if normalizer.counts_keys else None, q)
        number, tensor = (1.0, factor) if isinstance(factor, Tensor) else (factor, None)
        job = Job(circle, problem, kernel, place.causal, query_position, key_positions, number)
        parameters = [x for x in kernel.parameters() if x.requires_grad]
        if described[0]["gradients"]:
            out, logsumexp = RingAttention.apply(job, q, k, v, tensor, *parameters)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                out, logsumexp = forward(job, q, k, v, tensor)
        remainder = normalizer.remainder(torch.where(sees, logsumexp, 0.0))
        if remainder is not None:
            out = out * remainder.unsqueeze(-1)
        return out.to(problem.q.dtype)  # type: ignore[no-any-return]

    def cost(self, problem: Problem) -> Cost:
        """As if every rank's shard were as long as this one's, and dealt."""
        world = _world(self.group)
        size, wide = problem.q.element_size(), torch.finfo(problem.wide).bits // 8
        if isinstance(problem.kernel, FeatureKernel):
            state = _ring_features.message(problem.kernel, problem)
            count = problem.kernel.feature_count(problem.k.shape[-1])
            tokens = problem.batch.numel() * (problem.visibility.queries + problem.visibility.keys)
            flops = None if count is None else 2 * tokens * count * (problem.v.shape[-1] + 1)
            return Cost(flops, traffic(problem), (state or 0) * (world + 2) + (count or 0) * tokens * wide)
        pairs = problem.pairs * world
        pairs = (pairs + problem.pairs) // 2 if problem.visibility.causal else pairs
        parcel = (problem.k.numel() + problem.v.numel()) * size
        rows = problem.batch.numel() * problem.visibility.queries
        held = 3 * parcel + 2 * rows * (problem.v.shape[-1] + 1) * wide
        return Cost(product_flops(problem, pairs), traffic(problem) + (world - 1) * parcel, held)

    def reason(self, problem: Problem) -> str:
        world = _world(self.group)
        if isinstance(problem.kernel, FeatureKernel):
            order = ", and have to follow one another" if problem.visibility.causal else ""
            return f"the shards of {world} processes, whose states alone travel{order}"
        return f"the shards of {world} processes, whose keys and values travel round"


def _description(problem: Problem) -> dict[str, Any]:
    """What the other ranks must know, or agree about."""
    place, kernel = problem.visibility, problem.kernel
    tensors = {"q": problem.q, "k": problem.k, "v": problem.v}
    positions = place.query_position, place.key_position
    parameters = [*kernel.parameters(), *problem.normalizer.parameters()]
    return {
        **{f"{name}'s shape, its tokens aside": [*x.shape[:-2], x.shape[-1]] for name, x in tensors.items()},
        "the dtype": str(problem.q.dtype),
        "the kernel": repr(kernel)[:300],
        "the normalizer": repr(problem.normalizer)[:300],
        "causal": place.causal,
        "whose positions are given": None if place.aligned else [str(x.dtype) for x in positions],
        "gradients": torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors.values(), *parameters)),
        "queries": place.queries,
        "keys": place.keys,
        "latest": positions[0].max().item() if place.queries and not place.aligned else None,
        "in line": torch.equal(*(x.reshape(-1) for x in positions)),
    }  # fmt: skip


def _in_line(described: list[dict[str, Any]], key_positions: list[Tensor]) -> None:
    """Raise unless queries stand on their keys, and the shards follow one another: on all ranks, or on none."""
    everywhere = torch.cat(key_positions)
    if not (all(one["in line"] for one in described) and bool((everywhere[1:] > everywhere[:-1]).all())):
        raise ValueError(
            "a feature kernel in causal order passes its state from rank to rank: query_position must be key_position, "
            "and all of them ascend in the order of the ranks; every rank has the same work without dealing"
        )


def _no_group(group: Any) -> str | None:
    """Why there are no processes to work with, or None."""
    import torch.distributed as dist

    if not dist.is_available():
        return "this build of torch has no torch.distributed"
    if not dist.is_initialized():
        return "torch.distributed is not initialised: start with torchrun and call torch.distributed.init_process_group"
    return "this process is not in the group" if dist.get_rank(group) < 0 else None


def _world(group: Any) -> int:
    import torch.distributed as dist

    return dist.get_world_size(group)
