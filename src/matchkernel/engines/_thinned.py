"""A window that sees every r-th key, and the first keys beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..lazy import lazy
from ..masks import Visibility
from ..shapes import broadcast
from ._windows import Band


@dataclass(frozen=True)
class Thinned(Visibility):
    """Keys at distances 0, r, 2r, … within the window, which counts them, and the first `sinks` keys for every query.

    Causal order and a mask hold for all of them. Positions are the default ones, and both sides of the window are
    limited. Counts and what is seen are found class by class, without a table.
    """

    dilation: int = 1
    sinks: int = 0

    @staticmethod
    def of(place: Visibility, dilation: int, sinks: int) -> Thinned:
        return Thinned(
            place.queries, place.keys, place.mask, place.causal, place.window, place.query_position, place.key_position,
            place.aligned, dilation, min(sinks, place.keys),
        )  # fmt: skip

    @lazy
    def by_position(self) -> Tensor | None:
        query, key = self.query_position.unsqueeze(-1), self.key_position.unsqueeze(-2)
        left, right = self.sides
        assert left is not None and right is not None
        ahead = key - query
        near = (ahead >= -left * self.dilation) & (ahead <= right * self.dilation) & (ahead % self.dilation == 0)
        first = key < self.sinks
        return near | (first & (ahead <= 0) if self.causal else first)

    @lazy
    def visible(self) -> Tensor:
        near = self._near.unsqueeze(-1)
        return near + self.of_sinks.visible if self.sinks else near

    @lazy
    def query_sees(self) -> Tensor | None:
        if self.mask is None and self.queries <= self.keys:
            return None
        return self.visible.squeeze(-1) > 0

    @lazy
    def sees_near(self) -> Tensor | None:
        """Queries with a permitted key in the window, the first keys left out, (…, n | 1); None for all of them."""
        if self.mask is None and self.queries <= self.keys - self.sinks:
            return None
        return self._near > 0

    @lazy
    def _near(self) -> Tensor:
        """How many keys of its window each query may attend to, without the first, (…, n)."""
        return self._assembled([place.visible.squeeze(-1) for place in self._classes], self.queries, queries=True)

    @lazy
    def key_seen(self) -> Tensor | None:
        near: list[Tensor] = []
        for place in self._classes:
            seen = place.key_seen
            near.append(torch.ones_like(place.key_position, dtype=torch.bool) if seen is None else seen)
        seen = self._assembled(near, self.beside.keys, queries=False)
        if not self.sinks:
            return seen
        # The last query comes after all of them.
        first = seen.new_ones(self.sinks)
        if self.by_mask is not None:
            first = self._cut(self.by_mask, slice(0, self.sinks)).squeeze(-2) & first
        lead = broadcast(first.shape[:-1], seen.shape[:-1])
        assert lead is not None
        return torch.cat([first.expand(*lead, -1), seen.expand(*lead, -1)], -1)

    @lazy
    def of_sinks(self) -> Visibility:
        """Who may attend to the first keys alone."""
        keys = slice(0, self.sinks)
        return Visibility(
            self.queries, self.sinks, None if self.mask is None else self._cut(self.mask, keys), self.causal, None,
            self.query_position, self.key_position[keys], aligned=False,
        )  # fmt: skip

    @lazy
    def beside(self) -> Visibility:
        """Who may attend to the keys after the first, as far as window and order go: distances stay what they are."""
        keys = slice(self.sinks, None)
        return Visibility(
            self.queries, self.keys - self.sinks, None if self.mask is None else self._cut(self.mask, keys),
            self.causal, self.window, self.query_position - self.sinks, self.key_position[: self.keys - self.sinks],
            self.aligned,
        )  # fmt: skip

    @property
    def band(self) -> Band:
        """The band of the keys after the first."""
        left, right = self.sides
        assert left is not None and right is not None
        return Band(self.queries, self.keys - self.sinks, left, right, self.dilation)

    @lazy
    def _classes(self) -> list[Visibility]:
        """Queries and keys that leave the same remainder: within a class, a plain window."""
        place, found = self.beside, []
        for queries, keys in self.band.classes():
            n, m = len(range(place.queries)[queries]), len(range(place.keys)[keys])
            key = place.key_position[:m]
            query = torch.arange(m - n, m, device=key.device)
            mask = None if place.mask is None else self._cut(place.mask, keys)
            found.append(Visibility(n, m, mask, self.causal, self.window, query, key, aligned=True))
        return found

    def _assembled(self, parts: list[Tensor], size: int, *, queries: bool) -> Tensor:
        """What each class has per token, (…, tokens | 1), in the order of the tokens."""
        at = [pair[0 if queries else 1] for pair in self.band.classes()]
        everything = torch.arange(size, device=self.key_position.device)
        places = [everything[where] for where in at]
        lead = broadcast(*(part.shape[:-1] for part in parts))
        assert lead is not None
        whole = torch.zeros(*lead, size, dtype=parts[0].dtype, device=everything.device)
        for where, part in zip(places, parts, strict=True):
            whole[..., where] = part.expand(*lead, len(where))
        return whole

    @staticmethod
    def _cut(mask: Tensor, keys: slice) -> Tensor:
        return mask if mask.shape[-1] == 1 else mask[..., keys]
