"""softmax(scale · q kᵀ + bias) v and its log-sum-exp, fused, with derivatives of every order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..shapes import narrowed, split, widened
from . import _torch_private
from ._fused_backward import fused_backward

Arguments = tuple[Tensor, Tensor, Tensor, Tensor | None, bool, float]


def dense(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights, log-sum-exp, and k and v with one head per query head, in operations that differentiate to any order."""
    groups = q.shape[-3] // k.shape[-3]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=-3), v.repeat_interleave(groups, dim=-3)
    scores = scale * (q @ k.mT)
    if bias is not None:
        scores = scores + bias
    if causal:
        below = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = torch.where(below, scores, float("-inf"))
    empty = (scores.detach() == float("-inf")).all(-1, keepdim=True)
    logsumexp = torch.where(empty, 0.0, scores).logsumexp(-1, keepdim=True)
    return torch.where(empty, 0.0, (scores - logsumexp).exp()), logsumexp.squeeze(-1), k, v


class FusedAttention(torch.autograd.Function):
    """The private fused operators for the value and the first derivative; dense formulas where more is asked.

    A backward runs with grad mode on exactly when somebody will differentiate it again, and then recomputes densely.
    """

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        out, logsumexp = private(*arguments)
        # What leaves a Function is no view: autograd would let nobody write to it, and give it no tangent.
        padded = arguments[0].shape[-1] > arguments[2].shape[-1]
        return out.clone() if padded else out, logsumexp

    @staticmethod
    def setup_context(ctx: Any, inputs: Arguments, output: tuple[Tensor, Tensor]) -> None:
        q, k, v, bias, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(q, k, v, bias, *output)
        ctx.save_for_forward(q, k, v, bias)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, logsumexp = ctx.saved_tensors
        grad_out, grad_logsumexp = grads
        if grad_out is None and grad_logsumexp is None:
            return (None,) * 6
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if torch.is_grad_enabled():
            result = _dense_backward(grad_out, grad_logsumexp, q, k, v, bias, ctx.causal, ctx.scale)
        else:
            result = fused_backward(grad_out, grad_logsumexp, q, k, v, out, logsumexp, bias, ctx.causal, ctx.scale)
        return *result, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, Tensor]:
        q, k, v, bias = ctx.saved_tensors
        groups = q.shape[-3] // k.shape[-3]
        weights, _, k, v = dense(q, k, v, bias, ctx.causal, ctx.scale)
        dq, dk, dv = (
            torch.zeros_like(x) if t is None else t if x is q else t.repeat_interleave(groups, dim=-3)
            for x, t in zip((q, k, v), tangents[:3], strict=True)
        )
        change = ctx.scale * (dq @ k.mT + q @ dk.mT)
        d_logsumexp = (weights * change).sum(-1)
        return weights * (change - d_logsumexp.unsqueeze(-1)) @ v + weights @ dv, d_logsumexp

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *arguments: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        q, k, v, bias = (
            _fold(x, dim, info.batch_size) if isinstance(x, Tensor) else x
            for x, dim in zip(arguments[:4], in_dims[:4], strict=True)
        )
        out, logsumexp = FusedAttention.apply(q, k, v, bias, *arguments[4:])  # type: ignore[no-untyped-call]
        return (split(out, 0, (info.batch_size, -1)), split(logsumexp, 0, (info.batch_size, -1))), (0, 0)


def _fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    """The mapped dimension in front of the batch, and then part of it."""
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _dense_backward(
    grad: Tensor,
    grad_logsumexp: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    heads = k.shape[-3]
    weights, _, k, v = dense(q, k, v, bias, causal, scale)
    row = (grad * (weights @ v)).sum(-1, keepdim=True)
    if grad_logsumexp is not None:
        row = row - grad_logsumexp.unsqueeze(-1)
    d_scores = weights * (grad @ v.mT - row) * scale
    dq, dk, dv = d_scores @ k, d_scores.mT @ q, weights.mT @ grad
    return dq, split(dk, -3, (heads, -1)).sum(-3), split(dv, -3, (heads, -1)).sum(-3)


class PublicFusedAttention(torch.autograd.Function):
    """The same through torch's public call, for devices where the private operators are not used; no log-sum-exp.

    The inner graph gives torch's own fused backward; a second derivative takes the dense formulas.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, bias)
        ctx.causal, ctx.scale = causal, scale
        with torch.enable_grad():
            ctx.inner = tuple(x.detach().requires_grad_() for x in (q, k, v))
            ctx.out = public(ctx.inner[0], ctx.inner[1], ctx.inner[2], bias, causal, scale)
        out: Tensor = ctx.out.detach()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            q, k, v, bias = ctx.saved_tensors
            return *_dense_backward(grad, None, q, k, v, bias, ctx.causal, ctx.scale), None, None, None
        return *torch.autograd.grad(ctx.out, ctx.inner, grad, retain_graph=True), None, None, None


def private(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by torch's private operator, for a q and a v of any widths."""
    width = v.shape[-1]
    out, logsumexp = _torch_private.forward(*_same_width(q, k, v), bias, causal, scale)
    return narrowed(out, width), logsumexp


def public(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """torch's own call, with its default scale never left to chance, for a q and a v of any widths."""
    width = v.shape[-1]
    q, k, v = _same_width(q, k, v)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=causal, scale=scale, enable_gqa=q.shape[-3] != k.shape[-3]
    )
    return narrowed(out, width)


def _same_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros appended until all three are equally wide: unequal widths drop torch's fused kernel silently."""
    width = max(q.shape[-1], v.shape[-1])
    return widened(q, width), widened(k, width), widened(v, width)
