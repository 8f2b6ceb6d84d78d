"""Functions of all pairs, for kernels that are written by hand."""

from __future__ import annotations

import torch
from torch import Tensor


def squared_distance(q: Tensor, k: Tensor) -> Tensor:
    """|q_i − k_j|² for all pairs.

    q (…, n, d), k (…, m, d) → (…, n, m), never below zero. One matrix product, 2nmd operations, and twice
    differentiable everywhere, which `torch.cdist` is not. Both are first moved by one detached point, the first key:
    distances do not change, and the cancellation in |q|² + |k|² − 2q·k stays small when the data lie far from the
    origin. A mean over the keys would do as well, but would let a later key reach the last digit of an earlier row.
    """
    if k.shape[-2]:
        anchor = k[..., :1, :].detach()
        anchor = torch.where(anchor.isfinite(), anchor, 0.0)
        q, k = q - anchor, k - anchor
    square = q.square().sum(-1).unsqueeze(-1) + k.square().sum(-1).unsqueeze(-2) - 2.0 * (q @ k.mT)
    # Rounding can leave a hair below zero at q = k. Lift the value, not the derivatives: they are right as they are.
    return square + (square.clamp_min(0.0) - square).detach()
