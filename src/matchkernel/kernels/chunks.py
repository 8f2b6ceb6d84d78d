"""A few rows of a tile at a time, in one buffer that stays near the core: for operations that no compiler has fused."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

NUMBERS = 2**18
"""How many numbers the buffer holds: a megabyte in float32."""


def chunks(x: Tensor, y: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of x (g, i, c) against all of y (g, j, c): which rows, and an uninitialised buffer (g, rows, j, c)."""
    (g, rows, _), (keys, width) = x.shape, y.shape[-2:]
    g = max(g, y.shape[0])
    most = min(rows, max(1, NUMBERS // max(1, g * keys * width)))
    buffer = x.new_empty(g, most, keys, width)
    for start in range(0, rows, most):
        stop = min(start + most, rows)
        yield slice(start, stop), buffer[:, : stop - start]
