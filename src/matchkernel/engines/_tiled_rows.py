"""Attention a few queries at a time, each with its whole row: for normalisers that need one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.base import MatchKernel
from ..kernels.encoding import Encoding
from ..normalizers import Normalizer
from . import _tile
from ._encoding import cut, rebuild
from ._tile import Extras
from ._tiled_function import Job, Operands, blocks, extras_of, repeated, whole


class RowAttention(torch.autograd.Function):
    """The output for (job, v, bias, factor, shift, *encodings, *parameters); rows are computed again backward."""

    @staticmethod
    def forward(ctx: Any, job: Job, *tensors: Any) -> Tensor:
        ctx.job = job
        ctx.save_for_backward(*tensors)
        operands = Operands.of(job, tensors)
        out = operands.v.new_zeros(job.batch, job.heads, job.queries, operands.v.shape[-1])
        for (b, heads, tokens), row in _rows(job, operands):
            out[b, heads, tokens] = row
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        job, saved, needed = ctx.job, ctx.saved_tensors, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            asked = [x for x, need in zip(saved, needed, strict=True) if need]
            out = _dense(job, Operands.of(job, saved))
            found = iter(torch.autograd.grad(out, asked, grad, create_graph=True, allow_unused=True))
            return None, *(next(found) if need else None for need in needed)
        fresh = [None if x is None else x.detach().requires_grad_(need) for x, need in zip(saved, needed, strict=True)]
        asked = [x for x, need in zip(fresh, needed, strict=True) if x is not None and need]
        totals = [torch.zeros_like(x) for x in asked]
        with torch.enable_grad():
            for (b, heads, tokens), row in _rows(job, Operands.of(job, tuple(fresh))):
                shares = torch.autograd.grad(row, asked, grad[b, heads, tokens], allow_unused=True)
                for total, share in zip(totals, shares, strict=True):
                    if share is not None:
                        total += share
        result = iter(totals)
        return None, *(next(result) if need else None for need in needed)


class Row(nn.Module):
    """Weights from encodings: the match, what masks add, and the normaliser, with the parameters of both."""

    def __init__(self, kernel: MatchKernel, normalizer: Normalizer) -> None:
        super().__init__()
        self.kernel, self.normalizer = kernel, normalizer

    def forward(self, query: Encoding, key: Encoding, extras: Extras) -> Tensor:
        return self.normalizer.weigh(_tile.adjust(self.kernel.match(query, key), extras))


def _weigh(job: Job, operands: Operands, query: Encoding, key: Encoding, extras: Extras) -> Tensor:
    module = Row(job.kernel, job.normalizer)
    names = [name for name, _ in module.named_parameters()]
    bound = dict(zip(names, operands.parameters, strict=True))
    weights: Tensor = torch.func.functional_call(module, bound, (query, key, extras))
    return weights.to(operands.v.dtype)


def _rows(job: Job, operands: Operands) -> Iterator[tuple[tuple[int, slice, slice], Tensor]]:
    """Where each block of rows belongs, and its output."""
    for b, heads, rows in blocks(job):
        if not rows.spans:
            continue
        tokens, keys = slice(rows.start, rows.stop), slice(rows.spans[0].start, rows.spans[-1].stop)
        query, key = (
            rebuild(tree, [cut(x, b, heads, own, job.heads) for x in given])
            for tree, given, own in (
                (job.query_tree, operands.query, tokens),
                (job.key_tree, operands.key, keys),
            )
        )
        extras = extras_of(job, operands, b, heads, tokens, keys, partial=True)
        weights = _weigh(job, operands, query, key, extras)
        weights = weights.reshape(-1, *weights.shape[-2:])
        yield (b, heads, tokens), weights @ cut(operands.v, b, heads, keys, job.heads)


def _dense(job: Job, operands: Operands) -> Tensor:
    query = rebuild(job.query_tree, operands.query)
    key = rebuild(job.key_tree, [repeated(x, job) for x in operands.key])
    weights = _weigh(job, operands, query, key, whole(job, operands))
    out = weights @ repeated(operands.v, job)
    return out.expand(job.batch, job.heads, *out.shape[-2:])
