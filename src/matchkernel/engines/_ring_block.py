"""One block of keys: its partial result and log-sum-exp, and its share of the gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..shapes import split
from . import _torch_private
from ._fused_backward import fused_backward
from ._fused_function import dense, private
from ._ring_plan import Piece

Gradients = tuple[Tensor, Tensor, Tensor]


def partial(q: Tensor, k: Tensor, v: Tensor, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ) v over the keys of one piece, and its log-sum-exp: −inf for a row that meets none.

    q (b, h, n, d), k (b, h_kv, m, d), v (b, h_kv, m, d_v), the whole shard and the whole block.
    """
    q, k, v = q[..., piece.rows, :], k[..., piece.keys, :], v[..., piece.keys, :]
    bias = _bias(piece, q.dtype)
    if _torch_private.available(q.device):
        out, logsumexp = private(q, k, v, bias, piece.causal, scale)
    else:
        weights, logsumexp, _, v = dense(q, k, v, bias, piece.causal, scale)
        out = weights @ v
    if piece.mask is not None:
        logsumexp = torch.where(piece.mask.any(-1), logsumexp, float("-inf"))
    return out, logsumexp


def absorb(out: Tensor, logsumexp: Tensor, rows: slice, more: Tensor, more_logsumexp: Tensor) -> None:
    """Merge one more partial result into the rows it belongs to, in place: each weighs by its exponentials' sum."""
    before = logsumexp[..., rows]
    # Two empty parts would give −inf − (−inf); what is empty has no share.
    share = torch.where(more_logsumexp == float("-inf"), 0.0, torch.sigmoid(more_logsumexp - before))
    out[..., rows, :].lerp_(more.to(out.dtype), share.unsqueeze(-1).to(out.dtype))
    logsumexp[..., rows] = torch.logaddexp(before, more_logsumexp)


def gradients(
    grad: Tensor,
    grad_logsumexp: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    piece: Piece,
    scale: float,
) -> Gradients:
    """A piece's share of the gradients of its rows of q and its keys of k and v, from the finished row.

    `out` and `logsumexp` are those over all keys: e^(s − logsumexp) is then the final weight, wherever the key lives.
    """
    rows, keys = piece.rows, piece.keys
    grad, q, out, logsumexp = grad[..., rows, :], q[..., rows, :], out[..., rows, :], logsumexp[..., rows]
    grad_logsumexp = None if grad_logsumexp is None else grad_logsumexp[..., rows]
    k, v, bias = k[..., keys, :], v[..., keys, :], _bias(piece, q.dtype)
    if _torch_private.available(q.device):
        return fused_backward(grad, grad_logsumexp, q, k, v, out, logsumexp, bias, piece.causal, scale)
    heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = scale * (q @ k.mT)
    if bias is not None:
        scores = scores + bias
    if piece.causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    weights = (scores - logsumexp.unsqueeze(-1).to(scores.dtype)).exp()
    row = (grad * out).sum(-1, keepdim=True)
    if grad_logsumexp is not None:
        row = row - grad_logsumexp.unsqueeze(-1)
    d_scores = weights * (grad @ v.mT - row) * scale
    dk, dv = (split(x, 1, (heads, -1)).sum(2) for x in (d_scores.mT @ q, weights.mT @ grad))
    return d_scores @ k, dk, dv


def _bias(piece: Piece, dtype: torch.dtype) -> Tensor | None:
    if piece.mask is None:
        return None
    zeros = torch.zeros((), dtype=dtype, device=piece.mask.device)
    return torch.where(piece.mask, zeros, float("-inf"))[None, None]
