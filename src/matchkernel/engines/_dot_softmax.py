"""Inner products under a softmax: what the engines that hand them to a fused kernel have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.base import DotKernel, MatchKernel
from ..normalizers import SoftmaxFamily
from . import _torch_private
from .problem import NOTHING_TO_COMPUTE, Problem, zero_where_not


def form(problem: Problem) -> MatchKernel:
    """The kernel, or what it is where no query may attend to a later key."""
    place = problem.visibility
    no_later = place.causal or (place.window is not None and place.window[1] == 0)
    return problem.kernel.under_causal_order() if no_later else problem.kernel


def refuse(problem: Problem) -> str | None:
    """Why a fused kernel cannot take the problem, whatever its mask permits; None when it can."""
    q, v, normalizer = problem.q, problem.v, problem.normalizer
    if not isinstance(form(problem), DotKernel):
        return f"{problem.kernel!r} is not a DotKernel: its score is not an inner product of encodings"
    if not isinstance(normalizer, SoftmaxFamily):
        return f"{type(normalizer).__name__} is not a softmax"
    if problem.dropout:
        return "dropout leaves torch's fused kernel"
    bias = problem.visibility.bias
    if bias is not None and bias.requires_grad:
        return "a mask that needs a gradient leaves torch's fused kernel"
    if 0 in (problem.pairs, q.shape[-1], v.shape[-1]):
        return NOTHING_TO_COMPUTE
    if not with_logsumexp(q.device) and normalizer.has_remainder:
        return f"{type(normalizer).__name__} needs each row's log-sum-exp, which only torch's private CPU call returns"
    return None


def with_logsumexp(device: torch.device) -> bool:
    """Whether the operators that return it are used, for tensors on `device`."""
    return _torch_private.available(device) and not torch.compiler.is_compiling()


def encoded(problem: Problem, positions: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor, float]:
    """q, k, v (batch, heads, tokens, width) of one dtype, and what multiplies q kᵀ, factor and temperature included.

    `positions` of queries and keys are for a kernel's encoders; those of the problem by default.
    """
    kernel, normalizer, place = form(problem), problem.normalizer, problem.visibility
    assert isinstance(kernel, DotKernel)
    q, k, v = problem.hide()
    query, key = (place.query_position, place.key_position) if positions is None else positions
    q, k = kernel.encode(q, k, query, key, up_to_row_shift=normalizer.shift_invariant)
    scale = kernel.scale(q.shape[-1])
    factor = normalizer.factor(place.visible if normalizer.counts_keys else None, q)
    if isinstance(factor, Tensor):
        q = (q * factor).to(q.dtype)
    else:
        scale = scale * factor
    if scale <= 0.0:
        # torch multiplies the −inf of its causal mask by the scale: a negative or zero one makes it +inf or NaN.
        q, scale = q * scale, 1.0
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    q, k, v = (fold(x.to(dtype), problem) for x in (q, k, v))
    return q, k, v, scale


def finished(out: Tensor, logsumexp: Tensor | None, problem: Problem) -> Tensor:
    """The output as `attend` gives it, from folded rows and their log-sum-exp."""
    remainder = problem.normalizer.remainder(unfold(logsumexp, problem, 1)) if logsumexp is not None else None
    out = unfold(out, problem, 2)
    if remainder is not None:
        out = out * remainder.unsqueeze(-1)
    out = out.to(problem.q.dtype)
    sees = problem.visibility.query_sees
    return out if sees is None else zero_where_not(sees, out)


def additive(mask: Tensor, problem: Problem, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add to the scores, in the shape that fused kernels take."""
    if mask.dtype != torch.bool:
        return four(mask.detach().to(dtype), problem)
    zeros = torch.zeros((), dtype=dtype, device=mask.device)
    return four(torch.where(mask, zeros, float("-inf")), problem)


def four(bias: Tensor, problem: Problem) -> Tensor:
    """The mask (…, n | 1, m) with exactly two leading dimensions, as the folded tensors have."""
    bias = (
        bias.expand(*bias.shape[:-1], problem.visibility.keys) if bias.dim() else bias.expand(problem.visibility.keys)
    )
    bias = bias[(None,) * max(0, 4 - bias.dim())]
    lead = bias.shape[:-3]
    target = problem.batch[:-1]
    return (bias if lead.numel() == 1 else bias.expand(*target, *bias.shape[-3:])).reshape(-1, *bias.shape[-3:])


def merged(out: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp over the keys of two parts, from those of each; finite, for a part without keys too.

    Source: Milakov & Gimelshein 2018, eq. 4.
    """
    share = torch.sigmoid(other_logsumexp - logsumexp).unsqueeze(-1)
    both = share * other + (1.0 - share) * out
    # Not by logaddexp: where the two are far apart, the derivative of its derivative is ∞/∞.
    return both.to(out.dtype), torch.stack((other_logsumexp, logsumexp)).logsumexp(0)


def fold(x: Tensor, problem: Problem) -> Tensor:
    """(…, heads, tokens, width) → (batch, heads, tokens, width), rows contiguous."""
    batch = problem.batch
    heads = batch[-1] if batch else 1
    if problem.groups > 1 and x.dim() >= 3 and x.shape[-3] == heads // problem.groups:
        heads = x.shape[-3]
    x = x.expand(*batch[:-1], heads, *x.shape[-2:])
    x = x[None] if x.dim() == 3 else x.flatten(0, -4)
    return x if x.stride(-1) == 1 else x.contiguous()


def unfold(x: Tensor, problem: Problem, trailing: int) -> Tensor:
    return x.reshape(*problem.batch, *x.shape[x.dim() - trailing :])
