"""Who may meet whom: causal order, windows, masks, and what follows from them for rows and columns."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor

from .lazy import lazy
from .shapes import broadcast

Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class Visibility:
    """Which of m keys each of n queries may attend to, and what is added to the scores.

    Every answer is None where it would permit everything, so that nothing is built that is not needed. `query_position`
    (…, n) and `key_position` (…, m) decide causal order and windows; `aligned` says that they are the default ones, 0
    … m−1 for the keys and the last n of them for the queries.
    """

    queries: int
    keys: int
    mask: Tensor | None
    causal: bool
    window: Window | None
    query_position: Tensor
    key_position: Tensor
    aligned: bool

    @property
    def ordered(self) -> bool:
        """Whether positions decide anything."""
        return self.causal or self.window is not None

    @property
    def sides(self) -> Window:
        """How far before and after its own position a query may attend, causal order included; None for no limit."""
        left, right = (None, None) if self.window is None else self.window
        return left, 0 if self.causal and (right is None or right > 0) else right

    @lazy
    def by_position(self) -> Tensor | None:
        """Permitted by causal order and window, (…, n, m)."""
        if not self.ordered:
            return None
        query, key = self.query_position.unsqueeze(-1), self.key_position.unsqueeze(-2)
        left, right = self.sides
        # Compared as they are: a table of differences would be eight times as large as the answer.
        not_too_early = None if left is None else key >= query - left
        if right is None:
            return not_too_early
        not_too_late = key <= query + right
        return not_too_late if not_too_early is None else not_too_early & not_too_late

    @lazy
    def by_mask(self) -> Tensor | None:
        """Permitted by the mask alone, in the mask's own shape."""
        if self.mask is None:
            return None
        return self.mask if self.mask.dtype == torch.bool else self.mask.detach() != float("-inf")

    @property
    def bias(self) -> Tensor | None:
        """A float mask, to be added to the scores; None for a bool mask."""
        return None if self.mask is None or self.mask.dtype == torch.bool else self.mask

    @lazy
    def allowed(self) -> Tensor | None:
        """Permitted at all, broadcastable to (…, n, m)."""
        if self.by_position is None or self.by_mask is None:
            return self.by_position if self.by_mask is None else self.by_mask
        return self.by_position & self.by_mask

    @property
    def plain_causal(self) -> bool:
        """Causal order aligned to the end, no window: what fused kernels know by themselves."""
        return self.causal and self.aligned and self.window is None

    @property
    def by_key(self) -> bool:
        """Whether the mask, if any, treats all queries alike."""
        return self.mask is None or self.mask.shape[-2] == 1

    @lazy
    def visible(self) -> Tensor:
        """How many keys each query may attend to, (…, n | 1, 1), as integers."""
        if self.aligned and self.ordered and self.by_key:
            left, right = self.sides
            first = 0 if left is None else (self.query_position - left).clamp_min(0)
            last = self.keys - 1 if right is None else (self.query_position + right).clamp_max(self.keys - 1)
            if self.by_mask is None:
                return torch.as_tensor(last - first + 1).clamp_min(0).expand(self.queries).unsqueeze(-1)
            # Counted along the keys, so that no n × m table is formed.
            counts = self.by_mask.expand(*self.by_mask.shape[:-1], self.keys).cumsum(-1).squeeze(-2)
            before = torch.nn.functional.pad(counts, (1, 0))
            first, end = (torch.as_tensor(x).expand(self.queries) for x in (first, last + 1))
            return (before.index_select(-1, end.clamp_min(0)) - before.index_select(-1, first)).unsqueeze(-1)
        if self.allowed is None:
            return torch.tensor([[self.keys]], device=self.query_position.device)
        return self.allowed.expand(*self.allowed.shape[:-1], self.keys).sum(-1, keepdim=True)

    @lazy
    def query_sees(self) -> Tensor | None:
        """Queries with at least one permitted key, (…, n | 1); None when that is all of them."""
        if self.keys == 0:
            return torch.zeros(1, dtype=torch.bool, device=self.query_position.device)
        if self.mask is None and (not self.ordered or (self.aligned and self.queries <= self.keys)):
            # In line with the keys, each query stands on one, which no window and no order forbids it.
            return None
        return self.visible.squeeze(-1) > 0

    @lazy
    def key_seen(self) -> Tensor | None:
        """Keys that at least one query may attend to, (…, m | 1); None when that is all of them."""
        if self.queries == 0:
            return torch.zeros(1, dtype=torch.bool, device=self.query_position.device)
        by_mask = self.by_mask.squeeze(-2) if self.by_mask is not None and self.by_key else None
        if self.by_key and (self.plain_causal or not self.ordered):
            # The last query sees every key that the mask permits, causal or not.
            return by_mask
        if self.by_key and self.aligned:
            # Every position up to the last key's has a query, from the first one's on: out of sight is only what lies
            # further back than the window of that one.
            left, _ = self.sides
            hidden = 0 if left is None else self.keys - self.queries - left
            if hidden <= 0:
                return by_mask
            near = self.key_position >= hidden
            return near if by_mask is None else near & by_mask
        return None if self.allowed is None else self.allowed.any(-2)


def check_mask(mask: Tensor, shape: torch.Size) -> None:
    """Raise unless `mask` is a tensor, bool or floating, and broadcasts to the scores' shape (…, n, m)."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: expected a tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"mask has dtype {mask.dtype}: expected bool (True = may attend) or floating point (added to the score); "
            "for zeros and ones pass mask.bool()"
        )
    if broadcast(mask.shape, shape) != shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, which does not broadcast to the scores' {tuple(shape)}")


def check_window(window: int | tuple[int | None, int | None] | None) -> Window | None:
    """A window as (left, right): how many keys before and after a query's position it may attend to, None for all.

    An integer w means |i − j| < w: w keys when causal, 2w − 1 when not. A pair is taken as flash-attention does, with
    −1 or None for no limit.
    """
    if window is None:
        return None
    if not isinstance(window, (tuple, bool)) and hasattr(window, "__index__") and not isinstance(window, Tensor):
        width = operator.index(window)
        if width < 1:
            raise ValueError(f"window={width}: expected at least 1, which is the query's own position")
        return width - 1, width - 1
    if not isinstance(window, tuple) or len(window) != 2:
        raise TypeError(f"window={window!r}: expected an integer or a pair (left, right)")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < -1):
            raise ValueError(f"window={window}: each side must be an integer of at least −1, or None")
    left, right = (None if side is None or side == -1 else side for side in window)
    return None if left is None and right is None else (left, right)


def from_key_padding(padding: Tensor) -> Tensor:
    """A mask from torch.nn.MultiheadAttention's `key_padding_mask`.

    padding (batch, m), bool with True = padding, not to be attended to → (batch, 1, 1, m), bool with True = may attend.
    """
    if padding.dtype != torch.bool or padding.dim() != 2:
        raise TypeError(f"padding: expected bool of shape (batch, m), got {padding.dtype} of {tuple(padding.shape)}")
    return ~padding[:, None, None, :]


def from_attention_mask(attention_mask: Tensor) -> Tensor:
    """A mask from transformers' `attention_mask`.

    attention_mask (batch, m), 1 = token, 0 = padding → (batch, 1, 1, m), bool with True = may attend.
    """
    if attention_mask.dim() != 2 or not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ValueError(
            f"attention_mask: expected zeros and ones of shape (batch, m), got {tuple(attention_mask.shape)}"
        )
    return attention_mask.bool()[:, None, None, :]


def from_lengths(lengths: Tensor, keys: int) -> Tensor:
    """A mask from each sequence's length: lengths (batch,) → (batch, 1, 1, keys), True for the first `length` keys."""
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise TypeError(f"lengths: expected integers of shape (batch,), got {lengths.dtype} of {tuple(lengths.shape)}")
    return (torch.arange(keys, device=lengths.device) < lengths[:, None])[:, None, None, :]


def from_documents(query_document: Tensor, key_document: Tensor | None = None) -> Tensor:
    """A mask for packed sequences: a query meets the keys of its own document.

    query_document (…, n), key_document (…, m; default the same), integers → (…, n, m), bool.
    """
    key_document = query_document if key_document is None else key_document
    return query_document.unsqueeze(-1) == key_document.unsqueeze(-2)
