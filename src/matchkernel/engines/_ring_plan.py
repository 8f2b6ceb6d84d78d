"""Which rows of a shard meet which keys of a visiting block, as rectangles and triangles of the table."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST = 8
"""Pieces up to which a staircase is cut up; beyond it one table with a mask costs less than the calls."""


class Piece(NamedTuple):
    """Rows and keys that meet: all, or in causal order along a square's diagonal, or as `mask` (rows, keys) says."""

    rows: slice
    keys: slice
    causal: bool = False
    mask: Tensor | None = None

    @property
    def pairs(self) -> int:
        """How many scores are computed; half of a square, with its diagonal, where it is causal."""
        rows: int = self.rows.stop - self.rows.start
        keys: int = self.keys.stop - self.keys.start
        return rows * (rows + 1) // 2 if self.causal else rows * keys


def pieces(query_position: Tensor, key_position: Tensor, causal: bool) -> list[Piece]:
    """The parts of the table (n, m) that are visible, together and each pair once.

    query_position (n,), key_position (m,). Where both ascend, each query sees the keys up to some column, and that
    column never falls: rectangles where it stands still, squares in causal order where it moves on by one with each
    row. Contiguous and dealt shards give one or two pieces.
    """
    n, m = len(query_position), len(key_position)
    if n == 0 or m == 0:
        return []
    whole = Piece(slice(0, n), slice(0, m))
    if not causal:
        return [whole]
    if not (_ascending(query_position) and _ascending(key_position)):
        mask = key_position <= query_position.unsqueeze(-1)
        return [whole._replace(mask=mask)] if bool(mask.any()) else []
    seen = torch.searchsorted(key_position, query_position, right=True)
    found = _staircase(seen.tolist())
    if found is None:
        return [whole._replace(mask=torch.arange(m, device=seen.device) < seen.unsqueeze(-1))]
    return found


def _ascending(position: Tensor) -> bool:
    return bool((position[1:] > position[:-1]).all())


def _staircase(seen: list[int]) -> list[Piece] | None:
    """Pieces for rows that see the first `seen` keys; None where they would be too many."""
    found: list[Piece] = []
    row = 0
    while row < len(seen):
        step = seen[row + 1] - seen[row] if row + 1 < len(seen) else 0
        if step == 1 and seen[row] == 0:
            step = 0
        end = row + 1
        while end < len(seen) and step in (0, 1) and seen[end] - seen[end - 1] == step:
            end += 1
        # A row by itself is a rectangle.
        before = seen[row] - 1 if step == 1 else seen[row]
        if before > 0:
            found.append(Piece(slice(row, end), slice(0, before)))
        if step == 1:
            found.append(Piece(slice(row, end), slice(before, before + end - row), causal=True))
        if len(found) > MOST:
            return None
        row = end
    return found
