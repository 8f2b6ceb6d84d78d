"""The one place that touches torch's private operators: its fused attention on CPU, with the log-sum-exp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_aten: Any = torch.ops.aten
_forward = getattr(_aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_backward = getattr(_aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
MOST_LANES = 64
"""Numbers in the widest vector register that any CPU has: 512 bits, and a reserve."""
_transforming: Any = getattr(torch._C, "_are_functorch_transforms_active", None)


def available(device: torch.device) -> bool:
    """Whether this version of torch has the operators, for tensors on `device`."""
    return device.type == "cpu" and _forward is not None and _backward is not None


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output (b, h, n, d) and log-sum-exp (b, h, n) of softmax(scale · q kᵀ + bias) v; 0 and 0 for a row of −inf."""
    assert _forward is not None
    out, logsumexp = _forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    if k.shape[-2] < MOST_LANES and bool((logsumexp == 0).any()):
        # With fewer keys than a register has lanes, torch takes a row of NaN for a row of −inf. The table is narrow.
        unknown = _unknown(q, k, bias, causal)
        out = out.masked_fill(unknown.unsqueeze(-1), torch.nan)
        logsumexp = logsumexp.masked_fill(unknown, torch.nan)
    return out, logsumexp


def _unknown(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """(b, h, n) bool: where a row has a score that is NaN, of those that are not forbidden."""
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT
    if bias is not None:
        scores = torch.where(bias == -torch.inf, bias, scores + bias)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores.isnan().any(-1)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given the gradient of the output."""
    assert _backward is not None
    dq, dk, dv = _backward(grad, q, k, v, out, logsumexp, 0.0, causal, attn_mask=bias, scale=scale)
    return dq, dk, dv


def differentiated(*inputs: Tensor) -> bool:
    """Whether anybody may ask for a derivative, or a transform such as vmap or forward mode is at work."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return True
    return transforming()


def transforming() -> bool:
    """Whether vmap, jvp or another function transform is at work, or may be."""
    return _transforming is None or bool(_transforming()) or forward_ad._current_level >= 0


def chosen_backend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> int:
    """Which kernel torch's public call would run: 0 is the dense one, anything above is fused."""
    return int(torch._fused_sdp_choice(q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]))
