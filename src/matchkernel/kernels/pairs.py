"""Functions of all pairs, for kernels that are written by hand."""

from __future__ import annotations

import torch
from torch import Tensor


def anchored(q: Tensor, k: Tensor, beyond: float | Tensor = 0.0) -> tuple[Tensor, Tensor]:
    """q and k moved by one detached point, the first key, so that data far from the origin lie near it.

    q (…, n, d), k (…, m, d); q may have a multiple of k's heads at dimension −3. What depends on q − k alone does not
    change, and cancels less. A coordinate of the key moves nothing if it is not finite, so that it spoils no other
    token, or not `beyond` a size, where to subtract would round more than it saves. A mean over the keys would do as
    well, but would let a later key reach the last digit of an earlier row, and would move with every decoded token.
    """
    if not k.shape[-2]:
        return q, k
    anchor = k[..., :1, :].detach()
    anchor = torch.where(anchor.isfinite() & (anchor.abs() > beyond), anchor, 0.0)
    groups = _groups(q, k)
    return q - (anchor if groups == 1 else anchor.repeat_interleave(groups, dim=-3)), k - anchor


def squared_distance(q: Tensor, k: Tensor) -> Tensor:
    """|q_i − k_j|² for all pairs.

    q (…, n, d), k (…, m, d) → (…, n, m), never below zero. One matrix product, 2nmd operations, and twice
    differentiable everywhere, which `torch.cdist` is not. Both are first `anchored`: distances do not change, and the
    cancellation in |q|² + |k|² − 2q·k stays small when the data lie far from the origin.
    """
    q, k = anchored(q, k)
    square = q.square().sum(-1).unsqueeze(-1) + k.square().sum(-1).unsqueeze(-2) - 2.0 * (q @ k.mT)
    return lifted(square)


def lifted(square: Tensor) -> Tensor:
    """Squares that rounding left a hair below zero, as at q = k, at zero: the values, not the derivatives, which are
    right as they are."""
    return square + (square.clamp_min(0.0) - square).detach()


def _groups(q: Tensor, k: Tensor) -> int:
    """How many heads of q share one of k: 1 where they broadcast."""
    if q.dim() < 3 or k.dim() < 3 or k.shape[-3] in (0, 1, q.shape[-3]) or q.shape[-3] % k.shape[-3]:
        return 1
    return q.shape[-3] // k.shape[-3]
