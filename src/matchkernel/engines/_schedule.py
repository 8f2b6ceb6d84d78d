"""Which tiles a problem has: those that nobody may meet in are left out, those that everybody may need no check."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import Visibility


class Limits(NamedTuple):
    """The positions that each query may attend to, first and last, and where each key stands: (…, n, 1), (…, 1, m)."""

    first: Tensor | None
    last: Tensor | None
    position: Tensor


class Span(NamedTuple):
    """Keys start … stop − 1 of one tile, and whether positions forbid any of its pairs."""

    start: int
    stop: int
    partial: bool


@dataclass(frozen=True)
class Rows:
    """Queries start … stop − 1, and the tiles of keys that they meet."""

    start: int
    stop: int
    spans: tuple[Span, ...]


def even(start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """start … stop in the fewest pieces of at most `most`, as equal as can be: one compiled size fits nearly all."""
    pieces = math.ceil((stop - start) / most)
    for piece in range(pieces):
        yield (
            start + (stop - start) * piece // pieces,
            start + (stop - start) * (piece + 1) // pieces,
        )


def limits(place: Visibility) -> Limits | None:
    """What positions permit, as numbers that compare fast; None when they permit everything."""
    if not place.ordered:
        return None
    query, key = place.query_position, place.key_position
    left, right = (None, None) if place.window is None else place.window
    right = 0 if place.causal and (right is None or right > 0) else right
    dtype = _exact(query, key)
    if dtype == torch.float32 and not query.is_floating_point() and key.numel():
        # Counted from the first key, so that float32 holds every one of them.
        query, key = query - key.flatten()[0], key - key.flatten()[0]
    query, key = query.to(dtype).unsqueeze(-1), key.to(dtype).unsqueeze(-2)
    return Limits(None if left is None else query - left, None if right is None else query + right, key)


def _exact(query: Tensor, key: Tensor) -> torch.dtype:
    """float32 where it holds every position and difference exactly, float64 elsewhere."""
    if query.is_floating_point() or key.is_floating_point() or not query.numel() or not key.numel():
        return torch.float64
    lowest = min(int(query.min()), int(key.min()))
    return torch.float32 if max(int(query.max()), int(key.max())) - lowest < 2**23 else torch.float64


def schedule(place: Visibility, bounds: Limits | None, rows: int, keys: int) -> list[Rows]:
    """The tiles, of at most `rows` queries and `keys` keys."""
    queries = list(even(0, place.queries, rows))
    if bounds is None:
        spans = tuple(Span(start, stop, False) for start, stop in even(0, place.keys, keys))
        return [Rows(start, stop, spans) for start, stop in queries]
    position = bounds.position.squeeze(-2).cpu()
    nearest, furthest = (_over_batch(position, least) for least in (True, False))
    first = None if bounds.first is None else bounds.first.squeeze(-1).cpu()
    last = None if bounds.last is None else bounds.last.squeeze(-1).cpu()
    plan = []
    for start, stop in queries:
        lows = None if first is None else first[..., start:stop]
        highs = None if last is None else last[..., start:stop]
        met = torch.ones(place.keys, dtype=torch.bool)
        sure = torch.ones(place.keys, dtype=torch.bool)
        if lows is not None:
            met &= furthest >= lows.min()
            sure &= nearest >= lows.max()
        if highs is not None:
            met &= nearest <= highs.max()
            sure &= furthest <= highs.min()
        plan.append(Rows(start, stop, tuple(_spans(met, sure, keys))))
    return plan


def _over_batch(position: Tensor, least: bool) -> Tensor:
    """The earliest, or latest, position of each key over everything in front of it."""
    flat = position.reshape(-1, position.shape[-1])
    return flat.amin(0) if least else flat.amax(0)


def _spans(met: Tensor, sure: Tensor, most: int) -> Iterator[Span]:
    if not bool(met.any()):
        return
    where = met.nonzero().flatten()
    for start, stop in even(int(where[0]), int(where[-1]) + 1, most):
        if bool(met[start:stop].any()):
            yield Span(start, stop, not bool(sure[start:stop].all()))
