"""Encodings as flat lists of tensors, and tiles cut out of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..kernels.encoding import Encoding


def rebuild(like: Encoding, tensors: Sequence[Tensor]) -> Encoding:
    """An encoding of the same structure as `like`, with other tensors."""
    return _rebuild(like, iter(tensors))


def _rebuild(like: Encoding, tensors: Iterator[Tensor]) -> Encoding:
    if isinstance(like, Tensor):
        return next(tensors)
    return tuple(_rebuild(part, tensors) for part in like)


def four(x: Tensor, batch: torch.Size, trailing: int = 2) -> Tensor:
    """x (…, a, b) as (batch | 1, heads | 1, a, b): leading dimensions flattened, and left at 1 where x has none.

    `trailing` = 1 for x (…, a), which gives (batch | 1, heads | 1, a).
    """
    lead = x.shape[: x.dim() - trailing]
    lead = torch.Size((1,) * (len(batch) - len(lead)) + tuple(lead))
    heads = lead[-1] if lead else 1
    rest = lead[:-1]
    size = batch[:-1].numel()
    if rest.numel() != 1 and rest.numel() != size:
        x = x.expand(*batch[:-1], heads, *x.shape[x.dim() - trailing :])
        rest = batch[:-1]
    return x.reshape(rest.numel(), heads, *x.shape[x.dim() - trailing :])


def cut(x: Tensor, b: int, heads: slice, tokens: slice, total: int) -> Tensor:
    """The tile (g | 1, tokens, width) of x (batch | 1, heads | 1, tokens | 1, width); `heads` are of `total` heads.

    x may have fewer heads than that, each for a group of them.
    """
    x = _tokens(x[b if x.shape[0] > 1 else 0], tokens)
    own = _owners(x, heads, total)
    return x[own] if isinstance(own, slice) else x.index_select(0, own)


def put(into: Tensor, part: Tensor, b: int, heads: slice, tokens: slice, total: int) -> None:
    """Add a tile's share to `into`, whose shape is that of what `cut` was given."""
    into = _tokens(into[b if into.shape[0] > 1 else 0], tokens)
    own = _owners(into, heads, total)
    if isinstance(own, slice):
        into[own] += part.sum_to_size(into[own].shape)
    else:
        into.index_add_(0, own, part)


def _tokens(x: Tensor, tokens: slice) -> Tensor:
    return x[:, tokens] if x.shape[1] > 1 else x


def _owners(x: Tensor, heads: slice, total: int) -> slice | Tensor:
    """The heads of x (heads | 1, …) that `heads` read, one for each or one for all; a tile may end inside a group."""
    groups = total // x.shape[0]
    first, last = heads.start // groups, (heads.stop - 1) // groups
    if groups == 1 or first == last:
        return slice(first, last + 1)
    return torch.arange(heads.start, heads.stop, device=x.device) // groups
