"""A sequence cut into segments, and the means over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..lazy import lazy
from ..shapes import broadcast, split


@dataclass(frozen=True)
class Segments:
    """`tokens` tokens in `count` segments, in order, whose lengths differ by one at most; the longer ones come first.

    keep (…, tokens), bool or None for all: only tokens that are kept count, and the segments are cut among those alone,
    so that padding anywhere changes nothing. Where fewer are kept than there are segments, the last ones are empty.
    """

    tokens: int
    count: int
    keep: Tensor | None

    @lazy
    def kept(self) -> Tensor:
        """How many tokens are kept, (…, 1)."""
        assert self.keep is not None
        return self.keep.sum(-1, keepdim=True)

    @lazy
    def index(self) -> Tensor:
        """The segment of each kept token, (…, tokens); some segment for the others."""
        assert self.keep is not None
        rank = self.keep.cumsum(-1) - 1
        length, longer = self.kept // self.count, self.kept % self.count
        in_longer = rank // (length + 1)
        behind = longer + (rank - longer * (length + 1)) // length.clamp_min(1)
        return torch.where(rank < longer * (length + 1), in_longer, behind).clamp(0, self.count - 1)

    def lengths(self, device: torch.device) -> Tensor:
        """How many tokens each segment has, (…, count)."""
        place = torch.arange(self.count, device=device)
        if self.keep is None:
            return self.tokens // self.count + (place < self.tokens % self.count).long()
        return self.kept // self.count + (place < self.kept % self.count).long()

    def mean(self, x: Tensor) -> Tensor:
        """The means over the segments, x (…, tokens, width) → (…, count, width); 0 for an empty one.

        Where a token is not kept, x must be finite.
        """
        if self.keep is None:
            length, longer = self.tokens // self.count, self.tokens % self.count
            head, tail = torch.split(x, [longer * (length + 1), (self.count - longer) * length], dim=-2)
            means = [split(tail, -2, (self.count - longer, length)).mean(-2)]
            if longer:
                means.insert(0, split(head, -2, (longer, length + 1)).mean(-2))
            return torch.cat(means, dim=-2) if longer else means[0]
        lead = broadcast(x.shape[:-2], self.keep.shape[:-1])
        assert lead is not None
        x = torch.where(self.keep.unsqueeze(-1), x, 0.0).expand(*lead, *x.shape[-2:])
        total = x.new_zeros(*lead, self.count, x.shape[-1])
        total = total.scatter_add(-2, self.index.unsqueeze(-1).expand_as(x), x)
        return total / self.lengths(x.device).clamp_min(1).unsqueeze(-1)

    def spread(self, x: Tensor) -> Tensor:
        """Each token's share of x (…, count, width): what stands at its segment, (…, tokens, width)."""
        index = self.index.unsqueeze(-1)
        lead = broadcast(x.shape[:-2], index.shape[:-2])
        assert lead is not None
        index = index.expand(*lead, self.tokens, x.shape[-1])
        return x.expand(*lead, *x.shape[-2:]).gather(-2, index)
