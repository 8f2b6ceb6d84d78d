"""The first derivative of fused attention, a few heads at a time."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

import torch
from torch import Tensor

from ..shapes import narrowed, widened
from . import _torch_private

Index = tuple[slice, slice]

ENOUGH = 2**19
"""Bytes of keys in one call of the operator: beside their work, a call and its slices cost nothing."""


def fused_backward(
    grad: Tensor,
    grad_logsumexp: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. What is padded, and what the operator lays out anew, is held for a few heads alone."""
    portions = list(_portions(k))
    if len(portions) == 1:
        return at_once(grad, grad_logsumexp, q, k, v, out, logsumexp, bias, causal, scale)
    groups = q.shape[1] // k.shape[1]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for batch, heads in portions:
        of_k = batch, heads
        of_q = batch, slice(heads.start * groups, heads.stop * groups)
        found = at_once(
            grad[of_q],
            None if grad_logsumexp is None else grad_logsumexp[of_q],
            q[of_q],
            k[of_k],
            v[of_k],
            out[of_q],
            logsumexp[of_q],
            None if bias is None else bias[_where_it_has(bias, of_q)],
            causal,
            scale,
        )
        dq[of_q], dk[of_k], dv[of_k] = found
        # Before the next call, which would otherwise hold both.
        del found
    return dq, dk, dv


def _portions(k: Tensor) -> Iterator[Index]:
    """The batch and the heads of k (batch, heads, m, width), cut so that no thread waits for want of a head."""
    batch, heads = k.shape[:2]
    size = k.shape[2] * k.shape[3] * k.element_size()
    least = torch.get_num_threads() * max(1, ENOUGH // size)
    step = least if heads % least == 0 else heads
    rows = lcm(heads, least) // heads
    for b in range(0, batch, rows):
        for h in range(0, heads, step):
            yield slice(b, b + rows), slice(h, h + step)


def _where_it_has(bias: Tensor, at: Index) -> Index:
    """`at`, or everything along a dimension of 1."""
    batch, heads = at
    return batch if bias.shape[0] > 1 else slice(None), heads if bias.shape[1] > 1 else slice(None)


def at_once(
    grad: Tensor,
    grad_logsumexp: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    of_q, of_v = q.shape[-1], v.shape[-1]
    width = max(of_q, of_v) + (grad_logsumexp is not None)
    q, k, v, grad, out = (widened(x, width) for x in (q, k, v, grad, out))
    if grad_logsumexp is not None:
        # The gradient of a score is P ∘ (dP − rowsum(dO ∘ O) + dL). The operator takes that row sum itself, so one more
        # coordinate, 1 in dO and −dL in O, carries dL in; zeros in q, k and v keep it out of everything else.
        grad[..., -1] = 1.0
        out[..., -1] = -grad_logsumexp
    # The operator reads rows; a gradient expanded from a sum has none.
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    dq, dk, dv = _torch_private.backward(grad, q, k, v, out, logsumexp, bias, causal, scale)
    return narrowed(dq, of_q), narrowed(dk, of_q), narrowed(dv, of_v)
