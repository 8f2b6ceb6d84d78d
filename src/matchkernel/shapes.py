"""Torch's shape helpers, with types."""

from __future__ import annotations

import torch
from torch import Tensor


def broadcast(*shapes: torch.Size) -> torch.Size | None:
    """The shape that all of them broadcast to, or None when there is none."""
    if all(shape == shapes[0] for shape in shapes):
        return torch.Size(shapes[0])
    # Not by torch.broadcast_shapes: it takes twenty microseconds, and what it raises ends a compiled graph.
    out = [1] * max(map(len, shapes))
    for shape in shapes:
        for dim in range(-len(shape), 0):
            if shape[dim] != 1 and out[dim] not in (1, shape[dim]):
                return None
            out[dim] = out[dim] if shape[dim] == 1 else shape[dim]
    return torch.Size(out)


def split(x: Tensor, dim: int, sizes: tuple[int, int]) -> Tensor:
    """x with dimension `dim` as two dimensions of `sizes`, one of which may be −1."""
    parts: Tensor = x.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return parts


def widened(x: Tensor, width: int) -> Tensor:
    """x with zeros appended to its rows up to `width`."""
    return x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def narrowed(x: Tensor, width: int) -> Tensor:
    """x without what its rows have beyond `width`; x itself where that is nothing."""
    return x if x.shape[-1] == width else x[..., :width]
