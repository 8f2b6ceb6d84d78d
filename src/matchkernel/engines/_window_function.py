"""Attention within a band, with derivatives of every order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..shapes import split
from . import _torch_private, _windows
from ._windows import Band, overlapping
from .fused import call


def attend_within(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, band: Band, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Output and, where the private operators run, log-sum-exp, for folded tensors and a bias (b | 1, h | 1, m)."""
    if torch.compiler.is_compiling() or _torch_private.transforming() or not _torch_private.available(q.device):
        return _in_blocks(q, k, v, bias, band, scale)
    if not _torch_private.differentiated(q, k, v):
        return _windows.forward(q, k, v, bias, band, scale)
    out, logsumexp = WindowAttention.apply(q, k, v, bias, band, scale)  # type: ignore[no-untyped-call]
    return out, logsumexp


class WindowAttention(torch.autograd.Function):
    """Blocks as views in the fused operators for the value and the first derivative; as copies where more is asked."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return _windows.forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, bias, ctx.band, ctx.scale = inputs
        ctx.save_for_backward(q, k, v, bias, *output)
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
            found = _again(grad_out, grad_logsumexp, q, k, v, bias, ctx.band, ctx.scale)
        else:
            found = _windows.backward(
                grad_out, grad_logsumexp, q, k, v, out, logsumexp, bias, ctx.band, ctx.scale
            )  # fmt: skip
        return *found, None, None, None


def _again(
    grad: Tensor,
    grad_logsumexp: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    band: Band,
    scale: float,
) -> tuple[Tensor, ...]:
    """The gradients as functions that can be differentiated again."""
    # Other tensors of the same numbers: k may be a function of q, whose gradient is not asked for here.
    given = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in (q, k, v)]
    out, logsumexp = _in_blocks(given[0], given[1], given[2], bias, band, scale)
    outputs, grads = [out], [grad]
    if grad_logsumexp is not None:
        assert logsumexp is not None
        outputs, grads = [out, logsumexp], [grad, grad_logsumexp]
    return torch.autograd.grad(outputs, given, grads, create_graph=True)


def _in_blocks(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, band: Band, scale: float
) -> tuple[Tensor, Tensor | None]:
    """The same with each block's keys copied, in operations that differentiate, vectorise and compile."""
    outs, sums, order = [], [], []
    everything = torch.arange(band.queries, device=q.device)
    for of_queries, of_keys in band.classes():
        order.append(everything[of_queries])
        added = k.new_zeros(1, 1, len(range(band.keys)[of_keys])) if bias is None else bias[..., of_keys]
        out, logsumexp = _class(q[:, :, of_queries], k[:, :, of_keys], v[:, :, of_keys], added, band, scale)
        outs.append(out)
        sums.append(logsumexp)
    if len(outs) == 1:
        return outs[0], sums[0]
    back = torch.cat(order).argsort()
    out = torch.cat(outs, 2).index_select(2, back)
    found = [x for x in sums if x is not None]
    return out, torch.cat(found, 2).index_select(2, back) if found else None


def _class(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor | None]:
    """One class of the band: every block in one call, those at the edges filled up with keys that are forbidden."""
    n, m, block = q.shape[2], k.shape[2], band.block
    blocks = -(-n // block)
    # Tokens before the first key and after the last one; fewer than none where keys are out of every window's reach.
    before, after = band.left - (m - n), blocks * block - n + band.right
    x = split(pad(q, (0, 0, 0, blocks * block - n)), 2, (blocks, block))
    y, z = (overlapping(pad(t, (0, 0, before, after)), band.span, block) for t in (k, v))
    added = pad(bias, (before, after), value=float("-inf")).unfold(-1, band.span, block).unsqueeze(-2)
    added = band.table(q) + added
    batch = q.shape[0]
    # The blocks in front of the heads, and part of the batch.
    x, y, z = (t.transpose(1, 2).flatten(0, 1) for t in (x, y, z))
    added = added.transpose(1, 2).expand(batch, -1, -1, -1, -1).flatten(0, 1)
    out, logsumexp = call(x, y, z, added, False, scale)
    out = split(out, 0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :n]
    if logsumexp is None:
        return out, None
    return out, split(logsumexp, 0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :n]
