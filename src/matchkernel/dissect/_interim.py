"""Stands in for matchkernel.attention until that module lands."""

import math
from typing import Any

import torch
from torch import Tensor


def scores(
    q: Tensor, k: Tensor, kernel: Any = None, *, mask: Tensor | None = None, causal: bool = False, window: Any = None
) -> Tensor:
    s = q @ k.mT / math.sqrt(q.shape[-1]) if kernel is None else kernel(q, k)
    i = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    if causal:
        s = s.masked_fill(i < 0, -math.inf)
    if window is not None:
        s = s.masked_fill(i.abs() >= window, -math.inf)
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else s + mask
    return s


def weights(q: Tensor, k: Tensor, kernel: Any = None, *, normalizer: Any = None, **options: Any) -> Tensor:
    if normalizer is not None:
        raise NotImplementedError("normalizer: not yet")
    return scores(q, k, kernel, **options).softmax(-1).nan_to_num(0.0)


def attend(q: Tensor, k: Tensor, v: Tensor, kernel: Any = None, **options: Any) -> Tensor:
    return weights(q, k, kernel, **options) @ v
