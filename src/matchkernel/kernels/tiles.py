"""A kernel's own arithmetic for tiles: what it may ship beside `match`, so that streaming it costs less."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .encoding import Encoding


class TileForm:
    """How to score one tile, and how to take the gradient of its scores back to the encodings.

    A form holds no tensor: it is given tiles of what `MatchKernel.tiles` prepared, shaped (g, i, ·) for the queries and
    (g, j, ·) for the keys, with g heads. Nothing differs from head to head but what rides on the queries or keys, so
    an engine may hand it any number of heads. Entries with one head or one token stand for all. Nothing here needs a
    derivative of its own, and a compiler traces it whole.
    """

    beside: bool = False
    """Whether the kernel's parameters ride beside the query's tile, as a pair, and get their gradients there."""

    def scores(self, query: Encoding, key: Encoding) -> Tensor:
        """The tile's scores (g, i, j)."""
        raise NotImplementedError(f"{type(self).__name__} must define scores(query, key)")

    def pull(self, query: Encoding, key: Encoding, grad: Tensor) -> tuple[Encoding, Encoding]:
        """From the gradient of the scores (g, i, j) to those of the two encodings that `tiles` was given, this tile's
        share."""
        raise NotImplementedError(f"{type(self).__name__} must define pull(query, key, grad)")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Tiles(NamedTuple):
    """A form, and the encodings as it wants them: (…, n, ·) and (…, m, ·)."""

    form: TileForm
    query: Encoding
    key: Encoding
