"""Attention tile by tile: an output and one number per row forward, everything else again backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.base import MatchKernel
from ..kernels.encoding import Encoding, leaves
from ..kernels.tiles import TileForm
from ..normalizers import Normalizer
from . import _tile
from ._encoding import cut, put, rebuild
from ._match_form import match
from ._schedule import Limits, Rows
from ._tile import Extras


@dataclass(frozen=True)
class Job:
    """Everything about a problem that no derivative is taken of. All tensors have the shapes that `four` gives."""

    kernel: MatchKernel
    normalizer: Normalizer
    batch: int
    heads: int
    queries: int
    keys: int
    plan: list[Rows]
    limits: Limits | None
    allowed: Tensor | None
    factor: float
    shift: float
    query_tree: Encoding
    key_tree: Encoding
    query_leaves: int
    key_leaves: int
    together: int
    """How many heads go into one tile."""
    forward: Callable[..., Any]
    backward: Callable[..., Any]


@dataclass
class Operands:
    """The differentiable tensors of a job."""

    v: Tensor
    bias: Tensor | None
    factor: Tensor | None
    shift: Tensor | None
    query: list[Tensor]
    key: list[Tensor]
    parameters: list[Tensor]

    @classmethod
    def of(cls, job: Job, tensors: tuple[Tensor | None, ...]) -> Operands:
        v, bias, factor, shift = tensors[:4]
        assert v is not None
        rest = [x for x in tensors[4:] if x is not None]
        n, m = job.query_leaves, job.query_leaves + job.key_leaves
        return cls(v, bias, factor, shift, rest[:n], rest[n:m], rest[m:])


@dataclass
class Prepared:
    """A form, and the encodings as it wants them."""

    form: TileForm
    query: list[Tensor]
    key: list[Tensor]
    query_like: Encoding
    key_like: Encoding
    parameters: list[Tensor] | None
    """What rides beside each tile of queries, for a form that asks for it; None for the others."""


Prepare = Callable[[Job, Operands], Prepared]


class TiledAttention(torch.autograd.Function):
    """(out, statistic) for (job, prepare, v, bias, factor, shift, *encodings, *parameters)."""

    @staticmethod
    def forward(job: Job, prepare: Prepare, *tensors: Any) -> tuple[Tensor, Tensor]:
        return run(job, prepare, Operands.of(job, _detached(tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.job, ctx.prepare = inputs[:2]
        ctx.save_for_backward(*inputs[2:], *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, out, statistic = ctx.saved_tensors
        grad, grad_statistic = grads
        if grad is None and grad_statistic is None:
            return (None,) * (2 + len(tensors))
        grad = torch.zeros_like(out) if grad is None else grad
        needed = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            result = again_densely(ctx.job, tuple(tensors), grad, grad_statistic, needed)
        else:
            operands = Operands.of(ctx.job, _detached(tuple(tensors)))
            out, statistic = out.detach(), statistic.detach()
            result = pull_back(ctx.job, ctx.prepare, operands, out, statistic, grad, grad_statistic, needed)
        return None, None, *result


def _detached(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """No derivative is recorded here, and a compiler would build once more for tensors that ask for one."""
    return tuple(None if x is None else x.detach() for x in tensors)


def run(job: Job, prepare: Prepare, operands: Operands) -> tuple[Tensor, Tensor]:
    """The output (batch, heads, n, d_v) and the statistic (batch, heads, n)."""
    ready = prepare(job, operands)
    v, normalizer = operands.v, job.normalizer
    out = v.new_zeros(job.batch, job.heads, job.queries, v.shape[-1])
    statistic = v.new_zeros(job.batch, job.heads, job.queries)
    for b, heads, rows in blocks(job):
        if not rows.spans:
            continue
        tokens = slice(rows.start, rows.stop)
        query = _query(ready, b, heads, tokens, job.heads)
        state = normalizer.start(statistic[b, heads, tokens])
        accumulated = None
        for span in rows.spans:
            keys = slice(span.start, span.stop)
            key = rebuild(ready.key_like, [cut(x, b, heads, keys, job.heads) for x in ready.key])
            state, accumulated = job.forward(
                ready.form, normalizer, query, key, cut(v, b, heads, keys, job.heads),
                extras_of(job, operands, b, heads, tokens, keys, span.partial), state, accumulated,
            )  # fmt: skip
        assert accumulated is not None
        out[b, heads, tokens], statistic[b, heads, tokens] = normalizer.close(state, accumulated)
    return out, statistic


def pull_back(
    job: Job,
    prepare: Prepare,
    operands: Operands,
    out: Tensor,
    statistic: Tensor,
    grad: Tensor,
    grad_statistic: Tensor | None,
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """The gradient of every operand, in the order of `Operands`."""
    ready = prepare(job, operands)
    v, bias, factor, shift = operands.v, operands.bias, operands.factor, operands.shift
    wanted = tuple(x is not None and need for x, need in zip((factor, shift, bias), _reorder(needed), strict=True))
    row = (grad * out).sum(-1, keepdim=True)
    if grad_statistic is not None:
        row = row - grad_statistic.unsqueeze(-1)
    of_v = v.new_zeros(v.shape).mT.contiguous()
    # An encoding may hold integers, such as places in a table: nothing is differentiated by them.
    of_query, of_key = (
        [x.new_zeros(x.shape) if x.is_floating_point() else None for x in given]
        for given in (operands.query, operands.key)
    )
    of_parameters = [torch.zeros_like(x) for x in operands.parameters]
    of_bias, of_factor, of_shift = (
        None if x is None else x.new_zeros(x.shape) for x in (bias, factor, shift)
    )  # fmt: skip
    for b, heads, rows in blocks(job):
        tokens = slice(rows.start, rows.stop)
        query = _query(ready, b, heads, tokens, job.heads)
        upstream = grad[b, heads, tokens]
        for span in rows.spans:
            keys = slice(span.start, span.stop)
            key = rebuild(ready.key_like, [cut(x, b, heads, keys, job.heads) for x in ready.key])
            part = job.backward(
                ready.form, job.normalizer, query, key, cut(v, b, heads, keys, job.heads),
                extras_of(job, operands, b, heads, tokens, keys, span.partial),
                statistic[b, heads, tokens], row[b, heads, tokens], upstream, wanted,
            )  # fmt: skip
            own = leaves(part.query)
            for into, share in zip(of_query, own, strict=False):
                if into is not None:
                    put(into, share, b, heads, tokens, job.heads)
            if ready.parameters is not None:
                for total, share in zip(of_parameters, own[len(of_query) :], strict=True):
                    total += share
            for into, share in zip(of_key, leaves(part.key), strict=True):
                if into is not None:
                    put(into, share, b, heads, keys, job.heads)
            put(of_v.mT, part.v.mT, b, heads, keys, job.heads)
            if part.factor is not None and of_factor is not None:
                put(of_factor, part.factor, b, heads, tokens, job.heads)
            if part.shift is not None and of_shift is not None:
                put(of_shift, part.shift, b, heads, tokens, job.heads)
            if part.bias is not None and of_bias is not None:
                _put_bias(of_bias, part.bias, b, heads, tokens, keys)
    return [of_v.mT, of_bias, of_factor, of_shift, *of_query, *of_key, *of_parameters]


def _reorder(needed: tuple[bool, ...]) -> tuple[bool, bool, bool]:
    """Of v, bias, factor, shift, …: factor, shift and bias."""
    return needed[2], needed[3], needed[1]


def again_densely(
    job: Job,
    tensors: tuple[Tensor | None, ...],
    grad: Tensor,
    grad_statistic: Tensor | None,
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """The same gradients in operations that can be differentiated again, with the whole table in memory."""
    out, statistic = dense(job, Operands.of(job, tensors))
    asked = [x for x, need in zip(tensors, needed, strict=True) if x is not None and need]
    outputs, upstream = [out], [grad]
    if grad_statistic is not None:
        outputs.append(statistic)
        upstream.append(grad_statistic)
    found = iter(torch.autograd.grad(outputs, asked, upstream, create_graph=True, allow_unused=True))
    return [next(found) if x is not None and need else None for x, need in zip(tensors, needed, strict=True)]


def dense(job: Job, operands: Operands) -> tuple[Tensor, Tensor]:
    """Output and statistic as one tile, through the kernel's `match`, to be differentiated again."""
    query = rebuild(job.query_tree, operands.query)
    key = rebuild(job.key_tree, [repeated(x, job) for x in operands.key])
    if operands.parameters:
        # Those of this pass, which need not be the ones that the kernel holds by now.
        raw = match(job.kernel, operands.parameters, query, key)
    else:
        raw = job.kernel.match(query, key)
    raw = raw.to(operands.v.dtype).expand(job.batch, job.heads, job.queries, job.keys)
    scores = _tile.adjust(raw, whole(job, operands))
    state = job.normalizer.start(scores.detach()[..., 0])
    state, weights, _ = job.normalizer.absorb(state, scores)
    return job.normalizer.close(state, weights @ repeated(operands.v, job))


def whole(job: Job, operands: Operands) -> Extras:
    """What happens to the scores of the whole table."""
    return Extras(
        job.factor if operands.factor is None else operands.factor,
        job.shift if operands.shift is None else operands.shift,
        operands.bias,
        job.allowed,
        job.limits,
    )


def repeated(x: Tensor, job: Job) -> Tensor:
    """x with as many heads as the queries have, or with one."""
    return x if x.shape[1] in (1, job.heads) else x.repeat_interleave(job.heads // x.shape[1], dim=1)


def blocks(job: Job) -> Iterator[tuple[int, slice, Rows]]:
    """Every block of queries: its batch entry, its heads, its rows."""
    for b in range(job.batch):
        for first in range(0, job.heads, job.together):
            heads = slice(first, min(first + job.together, job.heads))
            for rows in job.plan:
                yield b, heads, rows


def _query(ready: Prepared, b: int, heads: slice, tokens: slice, total: int) -> Encoding:
    tile = rebuild(ready.query_like, [cut(x, b, heads, tokens, total) for x in ready.query])
    return tile if ready.parameters is None else (tile, tuple(ready.parameters))


def extras_of(
    job: Job, operands: Operands, b: int, heads: slice, tokens: slice, keys: slice, partial: bool
) -> Extras:
    """What happens to the scores of one tile; `partial` says whether positions forbid any of its pairs."""

    def rows(x: Tensor) -> Tensor:
        return cut(x, b, heads, tokens, job.heads)

    bounds = job.limits if partial else None
    return Extras(
        job.factor if operands.factor is None else rows(operands.factor),
        job.shift if operands.shift is None else rows(operands.shift),
        None if operands.bias is None else _pairs(operands.bias, b, heads, tokens, keys),
        None if job.allowed is None else _pairs(job.allowed, b, heads, tokens, keys),
        None if bounds is None else Limits(
            None if bounds.first is None else rows(bounds.first),
            None if bounds.last is None else rows(bounds.last),
            cut(bounds.position.mT, b, heads, keys, job.heads).mT,
        ),
    )  # fmt: skip


def _pairs(x: Tensor, b: int, heads: slice, tokens: slice, keys: slice) -> Tensor:
    """The tile of x (batch | 1, heads | 1, n | 1, m | 1)."""
    x = x[b if x.shape[0] > 1 else 0]
    x = x[heads] if x.shape[0] > 1 else x
    x = x[:, tokens] if x.shape[1] > 1 else x
    return x[:, :, keys] if x.shape[2] > 1 else x


def _put_bias(total: Tensor, part: Tensor, b: int, heads: slice, tokens: slice, keys: slice) -> None:
    tile = _pairs(total, b, heads, tokens, keys)
    tile += part.sum_to_size(tile.shape)
