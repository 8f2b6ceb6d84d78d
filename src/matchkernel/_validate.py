"""Checks what a caller hands in, and names the argument, its shape and what was expected."""

from __future__ import annotations

import torch
from torch import Tensor

from .engines import Problem
from .kernels.base import MatchKernel
from .kernels.dot import ScaledDot
from .masks import Visibility, check_mask, check_window
from .normalizers import Normalizer, Softmax
from .shapes import broadcast

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The defaults hold nothing, and making a module at each call would cost more than checking it.
_SCALED_DOT, _SOFTMAX = ScaledDot(), Softmax()


def build_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: MatchKernel | None,
    *,
    mask: Tensor | None,
    causal: bool,
    window: int | tuple[int | None, int | None] | None,
    normalizer: Normalizer | None,
    query_position: Tensor | None,
    key_position: Tensor | None,
    dropout: float = 0.0,
) -> Problem:
    """One checked call; raises TypeError or ValueError for what does not fit."""
    check_tensors(q, k, v)
    kernel = _SCALED_DOT if kernel is None else kernel
    if not isinstance(kernel, MatchKernel):
        hint = "; it is a class, so add parentheses" if isinstance(kernel, type) else ""
        raise TypeError(f"kernel: expected a MatchKernel, got {kernel!r}{hint}")
    normalizer = _SOFTMAX if normalizer is None else normalizer
    if not isinstance(normalizer, Normalizer):
        hint = "; it is a class, so add parentheses" if isinstance(normalizer, type) else ""
        raise TypeError(f"normalizer: expected a Normalizer, got {normalizer!r}{hint}")
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected True or False, got {causal!r}")
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout={dropout}: expected a probability from 0 up to, not including, 1")
    batch, groups = leading(q, k, v)
    n, m = q.shape[-2], k.shape[-2]
    if mask is not None:
        check_mask(mask, torch.Size((*batch, n, m)))
        mask = mask[(None,) * max(0, 2 - mask.dim())]
    default_query = torch.arange(m - n, m, device=q.device)
    default_key = torch.arange(m, device=q.device)
    visibility = Visibility(
        queries=n,
        keys=m,
        mask=mask,
        causal=causal,
        window=check_window(window),
        query_position=_position("query_position", query_position, default_query, torch.Size((*batch, n))),
        key_position=_position("key_position", key_position, default_key, torch.Size((*batch, m))),
        aligned=query_position is None and key_position is None,
    )
    return Problem(q, k, v, kernel, normalizer, visibility, dropout, batch, groups)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k and v are floating-point tensors of tokens, of one dtype, on one device, with a value for each key."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}: expected float16, bfloat16, float32 or float64")
        if x.dim() < 2:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: expected (…, tokens, width)")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must share one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}: expected as many values as keys at dimension -2"
        )


def leading(q: Tensor, k: Tensor, v: Tensor) -> tuple[torch.Size, int]:
    """The leading shape of the output, and how many query heads share one key head."""
    query_lead, key_lead = q.shape[:-2], broadcast(k.shape[:-2], v.shape[:-2])
    if key_lead is None:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}: their leading dimensions do not broadcast"
        )
    lead = broadcast(query_lead, key_lead)
    if lead is not None:
        return lead, 1
    if query_lead and key_lead and key_lead[-1] and query_lead[-1] % key_lead[-1] == 0:
        lead = broadcast(query_lead[:-1], key_lead[:-1])
        if lead is not None:
            return torch.Size((*lead, query_lead[-1])), query_lead[-1] // key_lead[-1]
    raise ValueError(
        f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: leading dimensions must broadcast, "
        "or q must have a multiple of k's heads at dimension -3"
    )


def _position(name: str, position: Tensor | None, default: Tensor, shape: torch.Size) -> Tensor:
    if position is None:
        return default
    if not isinstance(position, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(position).__name__}")
    if position.dtype == torch.bool or position.is_complex():
        raise TypeError(f"{name} has dtype {position.dtype}: expected integers or real numbers")
    if position.dim() == 0 or position.shape[-1] != shape[-1] or broadcast(position.shape, shape) != shape:
        raise ValueError(
            f"{name} has shape {tuple(position.shape)}, expected {tuple(shape)} or leading dimensions of 1"
        )
    # NaN compares as neither before nor after: it would hide keys without a word.
    if position.is_floating_point() and not torch.compiler.is_compiling() and bool(position.isnan().any()):
        raise ValueError(f"{name} of shape {tuple(position.shape)} holds NaN, expected real numbers")
    return position
