"""Block patterns on CUDA: torch's FlexAttention, which skips the blocks that a pattern leaves out."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..normalizers import SoftmaxFamily
from ..shapes import widened
from . import _gathered_fused
from ._dot_softmax import refuse
from ._gather import Plan
from .problem import Problem

MULTIPLE = 128
"""Of how many tokens FlexAttention's kernels take blocks; others are fetched by plain operations."""


def takes(problem: Problem, block: int) -> bool:
    """Whether FlexAttention runs this problem: on CUDA, in blocks of a size that its kernels have."""
    return problem.q.is_cuda and block % MULTIPLE == 0 and fits(problem)


def fits(problem: Problem) -> bool:
    """Whether its arithmetic is this problem's, on any device: an inner product, a plain softmax, no mask."""
    normalizer = problem.normalizer
    plain = isinstance(normalizer, SoftmaxFamily) and not normalizer.has_remainder
    return plain and problem.visibility.mask is None and refuse(problem) is None


def attend(problem: Problem, plan: Plan, table: Tensor, visible: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output (batch, heads, n, d_v); table (query blocks, key blocks), or behind heads, is the pattern's."""
    scale, *tensors = _gathered_fused.operands(problem, plan, visible, q, k, v)
    block_mask = _block_mask(plan, table.to(q.device))
    out: Tensor = Flex.apply(plan, block_mask, scale, *tensors)  # type: ignore[no-untyped-call]
    return out[:, :, : problem.visibility.queries]


class Flex(torch.autograd.Function):
    """The output for (plan, block mask, scale, q, k, v), each (batch, heads, whole blocks, ·).

    The inner graph gives FlexAttention's own backward; a second derivative takes the fetched blocks.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, block_mask: Any, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.plan, ctx.scale = plan, scale
        ctx.save_for_backward(q, k, v)
        differentiated = any(ctx.needs_input_grad)
        with torch.set_grad_enabled(differentiated):
            ctx.inner = tuple(x.detach().requires_grad_(differentiated) for x in (q, k, v))
            width = max(16, q.shape[-1])
            query, key = (widened(x, width) for x in ctx.inner[:2])
            ctx.out = _function(q.is_cuda)(query, key, ctx.inner[2], block_mask=block_mask, scale=scale)
        out: Tensor = ctx.out.detach()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            q, k, v = ctx.saved_tensors
            return None, None, None, *_gathered_fused.densely(ctx.plan, ctx.scale, q, k, v, grad, None)
        return None, None, None, *torch.autograd.grad(ctx.out, ctx.inner, grad, retain_graph=True)


@functools.cache
def _function(compiled: bool) -> Any:
    """torch's call; built where there is a GPU, since as it stands it forms the whole table."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention


def _block_mask(plan: Plan, table: Tensor) -> Any:
    """The pattern as FlexAttention takes it: the blocks of each row by number, and who may meet whom within them."""
    from torch.nn.attention.flex_attention import BlockMask

    table = table[None] if table.dim() == 2 else table
    order = table.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
    block, n, m = plan.block, plan.place.queries, plan.place.keys
    # One position more for each token of a short last block: no index may leave the table, and no key is there.
    query, key = (
        torch.nn.functional.pad(x, (0, -tokens % block))
        for x, tokens in ((plan.query_position, n), (plan.key_position, m))
    )
    left, right = (None, None) if plan.place.window is None else plan.place.window
    right = 0 if plan.place.causal and (right is None or right > 0) else right

    def may_meet(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        met = table[h if len(table) > 1 else 0, i // block, j // block] & (j < m)
        own = query[b if len(query) > 1 else 0, h if query.shape[1] > 1 else 0, i]
        other = key[b if len(key) > 1 else 0, h if key.shape[1] > 1 else 0, j]
        if left is not None:
            met = met & (other >= own - left)
        if right is not None:
            met = met & (other <= own + right)
        return met

    return BlockMask.from_kv_blocks(
        table.sum(-1, dtype=torch.int32)[None], order.to(torch.int32)[None], BLOCK_SIZE=(block, block),
        mask_mod=may_meet, seq_lengths=(table.shape[-2] * block, table.shape[-1] * block),
    )  # fmt: skip
