"""Attention within a plan, for any kernel and normaliser: query blocks with the keys they meet, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.base import MatchKernel
from ..kernels.encoding import Encoding, leaves
from ..masks import Visibility
from ..normalizers import Normalizer
from ._encoding import four, rebuild
from ._gather import Plan, put, take, whole_blocks
from .problem import Problem
from .reference import Reference


@dataclass(frozen=True)
class Job:
    """Everything of which no derivative is taken."""

    plan: Plan
    part: Part
    query_tree: Encoding
    key_tree: Encoding
    query_leaves: int
    key_leaves: int


def attend_gathered(problem: Problem, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output (batch, heads, n, d_v), of q, k and v with a head of keys for each of the queries."""
    place, kernel, normalizer = problem.visibility, problem.kernel, problem.normalizer
    n, m = place.queries, place.keys
    query, key = kernel.encode(
        q.to(problem.wide), k.to(problem.wide), place.query_position, place.key_position,
        up_to_row_shift=normalizer.shift_invariant,
    )  # fmt: skip
    part = Part(kernel, normalizer)
    of_query, of_key = leaves(query), leaves(key)
    job = Job(plan, part, _bare(query), _bare(key), len(of_query), len(of_key))
    tensors = [
        None if plan.mask is None else plan.mask,
        *(whole_blocks(four(x, problem.batch), m, plan.block) for x in (v.to(problem.wide), *of_key)),
        *(whole_blocks(four(x, problem.batch), n, plan.block) for x in of_query),
        *part.parameters(),
    ]
    out: Tensor = Gathered.apply(job, *tensors)  # type: ignore[no-untyped-call]
    return out[:, :, :n]


class Part(Reference, nn.Module):
    """The reference on what has been encoded and fetched already, with the parameters of kernel and normaliser."""

    def __init__(self, kernel: MatchKernel, normalizer: Normalizer) -> None:
        nn.Module.__init__(self)
        self.kernel, self.normalizer = kernel, normalizer
        self.encodings: tuple[Encoding, Encoding, Tensor] | None = None

    def forward(self, query: Encoding, key: Encoding, v: Tensor, place: Visibility, batch: torch.Size) -> Tensor:
        """(*batch, t, d_v), for encodings and values behind the dimensions `batch`."""
        # Of q, k and v the reference reads dtypes and shapes alone.
        problem = Problem(v, v, v, self.kernel, self.normalizer, place, 0.0, batch, 1)
        self.encodings = query, key, v
        weights, v = self._weights(problem)
        self.encodings = None
        return (weights @ v.to(weights.dtype)).to(v.dtype).expand(*batch, place.queries, v.shape[-1])

    def _encoded(self, problem: Problem) -> tuple[Encoding, Encoding, Tensor]:
        assert self.encodings is not None
        return self.encodings


class Gathered(torch.autograd.Function):
    """The output for (job, mask, v, *key leaves, *query leaves, *parameters), whose rows count whole blocks.

    Nothing is kept but the operands: a chunk is computed again when its gradient is asked for, and all of them in
    differentiable operations when that is differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, job: Job, *tensors: Tensor | None) -> Tensor:
        ctx.job = job
        ctx.save_for_backward(*tensors)
        return _run(job, tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        job, tensors, needed = ctx.job, ctx.saved_tensors, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            out = _run(job, tensors)
            asked = [x for x, need in zip(tensors, needed, strict=True) if need]
            found = iter(torch.autograd.grad(out, asked, grad, create_graph=True, allow_unused=True))
            return None, *(next(found) if need else None for need in needed)
        totals = [
            None if not need else torch.zeros(x.shape, dtype=x.dtype, device=x.device)
            for x, need in zip(tensors, needed, strict=True)
        ]
        plan = job.plan
        for number, chunk in enumerate(plan.chunks):
            with torch.enable_grad():
                fetched = [
                    None if x is None else x.detach().requires_grad_(need)
                    for x, need in zip(_fetched(job, number, tensors), needed, strict=True)
                ]
                part = _output(job, number, fetched)
            upstream = take(grad, chunk.rows.view(1, 1, -1, 1), plan.block)
            asked = [x for x, need in zip(fetched, needed, strict=True) if x is not None and need]
            found = iter(torch.autograd.grad(part, asked, upstream, allow_unused=True))
            shares = [next(found) if need else None for need in needed]
            for slot, (total, share) in enumerate(zip(totals, shares, strict=True)):
                if total is None or share is None:
                    continue
                where = _where(job, slot, number)
                if where is None:
                    total += share
                else:
                    put(total, share, where, plan.block)
        return None, *totals


def _run(job: Job, tensors: Sequence[Tensor | None]) -> Tensor:
    v = tensors[1]
    assert v is not None
    return assembled(job.plan, lambda number: _output(job, number, _fetched(job, number, tensors)), v)


def _where(job: Job, slot: int, number: int) -> Tensor | None:
    """The blocks that a chunk reads of the operand in this slot; None where it reads the whole."""
    chunk = job.plan.chunks[number]
    if 1 <= slot < 2 + job.key_leaves:
        return chunk.keys
    if slot and slot < 2 + job.key_leaves + job.query_leaves:
        return chunk.rows.view(1, 1, -1, 1)
    return None


def _fetched(job: Job, number: int, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The operands of one chunk: tokens (b | 1, h | 1, r, t, ·), and what is not of tokens as it is."""
    places = [_where(job, slot, number) for slot in range(len(tensors))]
    return [
        x if x is None or where is None else take(x, where, job.plan.block)
        for x, where in zip(tensors, places, strict=True)
    ]


def _output(job: Job, number: int, fetched: Sequence[Tensor | None]) -> Tensor:
    """A chunk's output (batch, heads, r, block, d_v)."""
    plan = job.plan
    mask, rest = fetched[0], [x for x in fetched[1:] if x is not None]
    # Heads stand in front of the last two, where kernels and normalisers look for them.
    v, *others = (x.transpose(1, 2) for x in rest[: 1 + job.key_leaves + job.query_leaves])
    key = rebuild(job.key_tree, others[: job.key_leaves])
    query = rebuild(job.query_tree, others[job.key_leaves :])
    names = [name for name, _ in job.part.named_parameters()]
    bound = dict(zip(names, rest[1 + job.key_leaves + job.query_leaves :], strict=True))
    chunk = plan.chunks[number]
    batch = torch.Size((plan.batch, len(chunk.rows), plan.heads))
    out: Tensor = torch.func.functional_call(job.part, bound, (query, key, v, plan.meet(chunk, mask), batch))
    return out.transpose(1, 2)


def assembled(plan: Plan, output: Callable[[int], Tensor], like: Tensor) -> Tensor:
    """The chunks' outputs in the order of the queries (batch, heads, whole blocks, d_v); zeros for what is in none."""
    parts, rows = [], []
    for number, chunk in enumerate(plan.chunks):
        parts.append(output(number))
        rows.append(chunk.rows)
    blocks = -(-plan.place.queries // plan.block)
    first = parts[0] if parts else like.new_zeros(plan.batch, plan.heads, 0, plan.block, like.shape[-1])
    order = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.long)
    if len(order) < blocks:
        missing = torch.ones(blocks, dtype=torch.bool).index_fill(0, order.cpu(), False).nonzero().flatten()
        parts.append(first.new_zeros(*first.shape[:2], len(missing), *first.shape[3:]))
        order = torch.cat([order, missing.to(order.device)])
    whole = torch.cat(parts, dim=2).index_select(2, order.argsort())
    return whole.flatten(2, 3)


def _bare(encoding: Encoding) -> Encoding:
    return rebuild(encoding, [x.detach() for x in leaves(encoding)])
