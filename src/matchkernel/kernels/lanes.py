"""Keys side by side, as a vector register takes them."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from .._opaque import settled

LANES = 16
"""A vector register of float32 holds as many on most machines."""


def in_panels(k: Tensor) -> Tensor:
    """k (g, j, c) in panels of `LANES` keys, (g, 1, ⌈j / LANES⌉, c, LANES), zeros behind the last key.

    A loop over the panels reads memory in order, and adds up each channel for all lanes at once.
    """
    panels = (k.shape[-2] + LANES - 1) // LANES
    k = pad(k, (0, 0, 0, panels * LANES - k.shape[-2]))
    return settled(k.reshape(k.shape[0], panels, LANES, k.shape[-1]).mT).unsqueeze(1)


def from_panels(total: Tensor, keys: int) -> Tensor:
    """(g, i, panels, LANES) → (g, i, j), without what stands behind the last key."""
    return total.reshape(*total.shape[:2], total.shape[2] * LANES)[..., :keys]
