"""Attention within a plan through torch's fused kernel: an inner product under a softmax, block rows as its batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.base import DotKernel
from . import _torch_private
from ._dot_softmax import form, refuse
from ._encoding import four
from ._fused_backward import fused_backward
from ._fused_function import dense, private
from ._gather import Chunk, Plan, put, take, whole_blocks
from ._gathered import assembled
from .problem import Problem


def takes(problem: Problem) -> bool:
    """Whether the problem is an inner product under a softmax, on a device with the private operators."""
    return _torch_private.available(problem.q.device) and refuse(problem) is None


def attend(problem: Problem, plan: Plan, visible: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output (batch, heads, n, d_v); visible (batch | 1, heads | 1, n) counts the keys that each query sees."""
    n = problem.visibility.queries
    scale, *tensors = operands(problem, plan, visible, q, k, v)
    out, logsumexp = GatheredFused.apply(plan, scale, *tensors)  # type: ignore[no-untyped-call]
    remainder = problem.normalizer.remainder(logsumexp[:, :, :n].reshape(*problem.batch, n))
    out = out[:, :, :n]
    if remainder is not None:
        out = out * remainder.reshape(*out.shape[:3], 1)
    return out  # type: ignore[no-any-return]


def operands(
    problem: Problem, plan: Plan, visible: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[float, Tensor, Tensor, Tensor]:
    """The scale and, in whole blocks, queries and keys whose inner product it makes the factored score; the values."""
    q, k, scale = _encoded(problem, visible, q, k)
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    n, m = problem.visibility.queries, problem.visibility.keys
    q, k, v = (
        whole_blocks(_all(four(x.to(dtype), problem.batch), plan), tokens, plan.block)
        for x, tokens in ((q, n), (k, m), (v, m))
    )
    return scale, q, k, v


def _encoded(problem: Problem, visible: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
    kernel, normalizer, place = form(problem), problem.normalizer, problem.visibility
    assert isinstance(kernel, DotKernel)
    q, k = kernel.encode(q, k, place.query_position, place.key_position, up_to_row_shift=normalizer.shift_invariant)
    scale = kernel.scale(q.shape[-1])
    counts = visible.expand(-1, problem.batch[-1] if problem.batch else 1, -1)
    counts = counts.expand(problem.batch[:-1].numel(), -1, -1).reshape(*problem.batch, -1, 1)
    factor = normalizer.factor(counts if normalizer.counts_keys else None, q)
    if isinstance(factor, Tensor):
        return (q * factor).to(q.dtype), k, scale
    return q, k, scale * factor


def _all(x: Tensor, plan: Plan) -> Tensor:
    return x.expand(plan.batch, plan.heads, *x.shape[2:])


class GatheredFused(torch.autograd.Function):
    """Output and log-sum-exp for (plan, scale, q, k, v), each (batch, heads, whole blocks, ·).

    Keys and values are fetched chunk by chunk, forward and backward, and the shares of their gradients put back.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, scale: float, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.scale = plan, scale
        out = q.new_zeros(*q.shape[:3], v.shape[-1])
        logsumexp = q.new_zeros(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for chunk in plan.chunks:
            part, log = private(*_folded(chunk, plan, q, k, v), _bias(chunk, plan, q.dtype), False, scale)
            # Each query block belongs to one chunk.
            _blocks(out, plan)[:, :, chunk.rows] = part.view(plan.batch, plan.heads, *part.shape[1:])
            _blocks(logsumexp, plan)[:, :, chunk.rows] = log.view(plan.batch, plan.heads, *log.shape[1:])
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.set_materialize_grads(False)
        return out, logsumexp

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
        plan, scale = ctx.plan, ctx.scale
        q, k, v, out, logsumexp = ctx.saved_tensors
        if grad is None and grad_logsumexp is None:
            return (None,) * 5
        grad = torch.zeros_like(out) if grad is None else grad
        if torch.is_grad_enabled():
            return None, None, *densely(plan, scale, q, k, v, grad, grad_logsumexp)
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        for chunk in plan.chunks:
            rows = chunk.rows.view(1, 1, -1, 1)
            upstream, own = (take(x, rows, plan.block).flatten(0, 1) for x in (grad.contiguous(), out))
            logs = [
                None if x is None else _blocks(x.contiguous(), plan)[:, :, chunk.rows].flatten(0, 1)
                for x in (grad_logsumexp, logsumexp)
            ]
            assert logs[1] is not None
            shares = fused_backward(
                upstream, logs[0], *_folded(chunk, plan, q, k, v), own, logs[1],
                _bias(chunk, plan, q.dtype), False, scale,
            )  # fmt: skip
            for total, share, where in zip((dq, dk, dv), shares, (rows, chunk.keys, chunk.keys), strict=True):
                put(total, share.reshape(plan.batch, plan.heads, *share.shape[1:]), where, plan.block)
        return None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def densely(
    plan: Plan, scale: float, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, grad_logsumexp: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients in operations that can be differentiated again."""
    outs, logs = [], []
    for chunk in plan.chunks:
        query, key, value = _folded(chunk, plan, q, k, v)
        weights, logsumexp, _, _ = dense(query, key, value, _bias(chunk, plan, q.dtype), False, scale)
        lead = (plan.batch, plan.heads)
        outs.append((weights @ value).view(*lead, *query.shape[1:3], -1))
        logs.append(logsumexp.view(*lead, *query.shape[1:3], 1))
    out = assembled(plan, outs.__getitem__, v)
    outputs, upstream = [out], [grad]
    if grad_logsumexp is not None:
        outputs.append(assembled(plan, logs.__getitem__, v[..., :1]).squeeze(-1))
        upstream.append(grad_logsumexp)
    asked = [x for x in (q, k, v) if x.requires_grad]
    found = iter(torch.autograd.grad(outputs, asked, upstream, create_graph=True, allow_unused=True))
    return tuple(next(found) if x.requires_grad else None for x in (q, k, v))


def _folded(chunk: Chunk, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk's operands with its query blocks in the place of heads: (batch · heads, r, tokens, ·)."""
    query = take(q, chunk.rows.view(1, 1, -1, 1), plan.block)
    key, value = (take(x, chunk.keys, plan.block) for x in (k, v))
    return query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)


def _bias(chunk: Chunk, plan: Plan, dtype: torch.dtype) -> Tensor | None:
    """0 or a float mask where a chunk's query may attend to a key, −inf elsewhere: (batch · heads | 1, r, t, s)."""
    place = plan.meet(chunk, plan.mask)
    allowed = place.allowed
    if allowed is None:
        return None
    bias = torch.zeros((), dtype=dtype, device=allowed.device) if place.bias is None else place.bias.detach().to(dtype)
    bias = torch.where(allowed, bias, float("-inf")).transpose(1, 2)
    b, h = bias.shape[:2]
    lead = (1, 1) if b * h == 1 else (plan.batch, plan.heads)
    return bias.expand(*lead, len(chunk.rows), place.queries, place.keys).flatten(0, 1)


def _blocks(x: Tensor, plan: Plan) -> Tensor:
    """x (batch, heads, whole blocks, …) with its blocks apart: (batch, heads, blocks, block, …)."""
    return x.view(*x.shape[:2], -1, plan.block, *x.shape[3:])
