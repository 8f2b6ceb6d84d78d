"""Attention within buckets: blocks of queries in the order of their buckets, with the keys of the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks import Visibility
from ..shapes import split
from ._fused_backward import at_once
from ._fused_function import dense, private

BLOCK = 64
"""Queries that meet the same keys in one product."""

SCORES = 2**20
"""Scores in one call of the fused operator, where a block alone does not have more."""

NARROW = 64
"""With fewer keys the operator's guard against NaN looks at every score."""


class Group(NamedTuple):
    """Blocks that are computed in one call: their numbers (g,), key tokens (g, s), and who meets whom (g, block, s)."""

    blocks: Tensor
    keys: Tensor
    allowed: Tensor


@dataclass(frozen=True)
class Round:
    """One round's buckets: query (heads, n) and key (key heads, m), and the pairs of `before` that have met already.

    Heads and batch are one dimension; `groups` heads of queries share one of keys. A query does not meet the key at its
    own position in causal order, which is left to others, nor a later one; `mask` (heads, m) permits keys.
    """

    query: Tensor
    key: Tensor
    before: tuple[tuple[Tensor, Tensor], ...]
    place: Visibility
    mask: Tensor | None
    groups: int

    @property
    def blocks(self) -> int:
        """How many blocks of queries a head has."""
        return -(-self.query.shape[1] // BLOCK)

    def order(self) -> Tensor:
        """The queries (heads, blocks · block) in the order of their buckets, the last one repeated to fill a block."""
        order = self.query.argsort(dim=-1, stable=True)
        short = self.blocks * BLOCK - order.shape[1]
        return torch.cat([order, order[:, -1:].expand(-1, short)], 1) if short else order

    def met(self) -> Iterator[Group]:
        """All blocks that meet a key, those with many keys first."""
        m = self.key.shape[1]
        order, key_order = split(self.order(), 1, (self.blocks, BLOCK)), self.key.argsort(dim=-1, stable=True)
        buckets, sorted_keys = self.query.gather(1, order.flatten(1)).view_as(order), self.key.gather(1, key_order)
        sorted_keys = sorted_keys.repeat_interleave(self.groups, 0)
        first = torch.searchsorted(sorted_keys, buckets[..., 0].contiguous())
        end = torch.searchsorted(sorted_keys, buckets[..., -1].contiguous(), right=True)
        first, length = first.flatten(), (end - first).flatten()
        length, blocks = length.sort(descending=True)
        sizes, at = length.tolist(), 0
        while at < len(sizes) and sizes[at]:
            span = max(NARROW, sizes[at])
            many = max(1, SCORES // (BLOCK * span))
            mine = blocks[at : at + many]
            mine, size = mine[length[at : at + many] > 0], length[at : at + many]
            size = size[size > 0]
            head, within = mine // self.blocks, torch.arange(span, device=mine.device)
            place = (first[mine].unsqueeze(-1) + torch.minimum(within, size.unsqueeze(-1) - 1)).clamp_max(m - 1)
            keys = key_order[(head // self.groups).unsqueeze(-1), place]
            rows = order.flatten(0, 1)[mine]
            # What fills a head's last block repeats its last query, and is never put back.
            allowed = (within < size.unsqueeze(-1)).unsqueeze(-2)
            yield Group(mine, keys, self._permitted(allowed, head.unsqueeze(-1), rows, keys))
            at += many

    def _permitted(self, allowed: Tensor, head: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        """Of the pairs `allowed`, those in one bucket, not met before, and permitted by order, window and mask."""

        def together(query: Tensor, key: Tensor) -> Tensor:
            return query[head, rows].unsqueeze(-1) == key[head // self.groups, keys].unsqueeze(-2)

        allowed = allowed & together(self.query, self.key)
        for pair in self.before:
            allowed = allowed & ~together(*pair)
        place = self.place
        left, right = place.sides
        ahead = place.key_position[keys].unsqueeze(-2) - place.query_position[rows].unsqueeze(-1)
        if left is not None:
            allowed = allowed & (ahead >= -left)
        if right is not None:
            allowed = allowed & (ahead <= right)
        if place.causal:
            # Its own key a query sees in any case, and once.
            allowed = allowed & (ahead != 0)
        if self.mask is not None:
            allowed = allowed & self.mask[head, keys].unsqueeze(-2)
        return allowed

    def census(self) -> tuple[Tensor, Tensor]:
        """How many keys each query meets (heads, n), and which keys are met (heads, m)."""
        heads, m = self.query.shape[0], self.key.shape[1]
        counts = torch.zeros(heads * self.blocks, BLOCK, dtype=torch.long, device=self.query.device)
        seen = torch.zeros(heads * m, dtype=torch.int32, device=self.query.device)
        for group in self.met():
            counts[group.blocks] = group.allowed.sum(-1)
            numbers = group.keys + (group.blocks // self.blocks * m).unsqueeze(-1)
            seen.index_add_(0, numbers.flatten(), group.allowed.any(-2).flatten().to(seen.dtype))
        return self.put_back(counts), seen.view(heads, m) > 0

    def put_back(self, x: Tensor) -> Tensor:
        """x (heads · blocks, block, …), in the order of buckets, as (heads, n, …) in the order of tokens."""
        heads, n = self.query.shape
        inverse = self.query.argsort(dim=-1, stable=True).argsort(dim=-1)
        inverse = inverse + (torch.arange(heads, device=x.device) * (self.blocks * BLOCK)).unsqueeze(-1)
        return split(x.flatten(0, 1).index_select(0, inverse.flatten()), 0, (heads, n))

    def take(self, x: Tensor) -> Tensor:
        """x (heads, n, width) in the order of buckets, (heads · blocks, block, width)."""
        order = self.order() + (torch.arange(len(x), device=x.device) * x.shape[1]).unsqueeze(-1)
        return split(x.flatten(0, 1).index_select(0, order.flatten()), 0, (-1, BLOCK))


def attend_round(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, round: Round, scale: float
) -> tuple[Tensor, Tensor]:
    """Output (heads, n, d_v) and log-sum-exp (heads, n), 0 for queries that meet nothing; bias (heads, m)."""
    out, logsumexp = BucketAttention.apply(round.take(q), k, v, bias, round, scale)  # type: ignore[no-untyped-call]
    return round.put_back(out), round.put_back(logsumexp)


class BucketAttention(torch.autograd.Function):
    """For (q in blocks, k, v, bias, round, scale): keys and values are fetched group by group, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, round: Round, scale: float
    ) -> tuple[Tensor, Tensor]:
        out = q.new_zeros(*q.shape[:2], v.shape[-1])
        logsumexp = q.new_zeros(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for group in round.met():
            found = private(*_fetched(q, k, v, group, round), _bias(bias, group, round, q.dtype), False, scale)
            out[group.blocks], logsumexp[group.blocks] = found[0][:, 0], found[1][:, 0]
        ctx.round, ctx.scale = round, scale
        ctx.save_for_backward(q, k, v, bias, out, logsumexp)
        ctx.set_materialize_grads(False)
        return out, logsumexp

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, logsumexp = ctx.saved_tensors
        if grad is None and grad_logsumexp is None:
            return (None,) * 6
        grad = torch.zeros_like(out) if grad is None else grad
        more = torch.zeros_like(logsumexp) if grad_logsumexp is None else grad_logsumexp
        if torch.is_grad_enabled():
            return *_again(grad, more, q, k, v, bias, ctx.round, ctx.scale), None, None, None
        dq = torch.zeros_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=logsumexp.dtype, device=x.device).flatten(0, 1) for x in (k, v))
        for group in ctx.round.met():
            rows = group.blocks
            x, y, z = at_once(
                grad[rows][:, None], more[rows][:, None], *_fetched(q, k, v, group, ctx.round), out[rows][:, None],
                logsumexp[rows][:, None], _bias(bias, group, ctx.round, q.dtype), False, ctx.scale,
            )  # fmt: skip
            dq[rows] = x[:, 0]
            numbers = _numbers(group, ctx.round).flatten()
            dk.index_add_(0, numbers, y.flatten(0, 2).to(dk.dtype))
            dv.index_add_(0, numbers, z.flatten(0, 2).to(dv.dtype))
        return dq, dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype), None, None, None


def _again(
    grad: Tensor,
    grad_logsumexp: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    round: Round,
    scale: float,
) -> tuple[Tensor, ...]:
    """The gradients in operations that can be differentiated again."""
    given = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in (q, k, v)]
    outs, sums, blocks = [], [], []
    for group in round.met():
        x, y, z = _fetched(given[0], given[1], given[2], group, round)
        weights, logsumexp, _, z = dense(x, y, z, _bias(bias, group, round, q.dtype), False, scale)
        outs.append((weights @ z)[:, 0])
        sums.append(logsumexp[:, 0])
        blocks.append(group.blocks)
    if not outs:
        return tuple(torch.zeros_like(x) for x in (q, k, v))
    where = torch.cat(blocks)
    grads = [grad.index_select(0, where), grad_logsumexp.index_select(0, where)]
    return torch.autograd.grad([torch.cat(outs), torch.cat(sums)], given, grads, create_graph=True)


def _fetched(q: Tensor, k: Tensor, v: Tensor, group: Group, round: Round) -> tuple[Tensor, Tensor, Tensor]:
    """A group's queries (g, 1, block, d), and the keys and values that they are given (g, 1, s, ·)."""
    numbers = _numbers(group, round)
    key, value = (split(x.flatten(0, 1).index_select(0, numbers.flatten()), 0, numbers.shape) for x in (k, v))  # type: ignore[arg-type]
    return q.index_select(0, group.blocks).unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)


def _numbers(group: Group, round: Round) -> Tensor:
    """Which rows of (key heads · m, ·) a group's keys are."""
    head = group.blocks // round.blocks // round.groups
    return group.keys + (head * round.key.shape[1]).unsqueeze(-1)


def _bias(bias: Tensor | None, group: Group, round: Round, dtype: torch.dtype) -> Tensor:
    """(g, 1, block, s): what the mask adds to a key where it may be attended to, −inf elsewhere."""
    added = torch.zeros((), dtype=dtype, device=group.keys.device)
    if bias is not None:
        added = bias[(group.blocks // round.blocks).unsqueeze(-1), group.keys].unsqueeze(-2).to(dtype)
    return torch.where(group.allowed, added, float("-inf")).unsqueeze(1)
