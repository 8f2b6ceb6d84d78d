"""A plan of which blocks of keys each block of queries is given, and how their tokens are fetched and put back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..masks import Visibility
from ._encoding import four
from .problem import Problem


@dataclass(frozen=True)
class Chunk:
    """Query blocks that are computed together, and the key blocks that each of them is given.

    rows (r,) are numbers of query blocks; keys (batch | 1, heads | 1, r, s) numbers of key blocks. Where `valid`, of
    the same shape, is False, the key block only fills the place.
    """

    rows: Tensor
    keys: Tensor
    valid: Tensor


@dataclass(frozen=True)
class Plan:
    """A problem's chunks, with what its call permits in the shapes that `four` gives.

    Tokens are numbered from 0; the last block of a sequence may be short, and what it lacks is seen by nobody.
    """

    place: Visibility
    mask: Tensor | None
    query_position: Tensor
    key_position: Tensor
    batch: int
    heads: int
    block: int
    chunks: list[Chunk]

    @classmethod
    def of(cls, problem: Problem, block: int, chunks: list[Chunk]) -> Plan:
        place, batch = problem.visibility, problem.batch
        mask = None if place.mask is None else four(place.mask, batch)
        query, key = (four(x, batch, trailing=1) for x in (place.query_position, place.key_position))
        return cls(place, mask, query, key, *sizes(batch), block, chunks)

    def tokens(self, blocks: Tensor) -> Tensor:
        """The numbers of the tokens of blocks (…, s): (…, s · block)."""
        within = torch.arange(self.block, device=blocks.device)
        return (blocks.unsqueeze(-1) * self.block + within).flatten(-2)

    def meet(self, chunk: Chunk, mask: Tensor | None) -> Visibility:
        """Who may meet whom within a chunk: t = block queries and s · block keys, behind (batch | 1, r, heads | 1).

        `mask` is the plan's own, or the tensor that stands for it while gradients are taken.
        """
        n, m = self.place.queries, self.place.keys
        query, key = self.tokens(chunk.rows.unsqueeze(-1)), self.tokens(chunk.keys)
        valid = chunk.valid.repeat_interleave(self.block, dim=-1) & (key < m)
        query, key = query.clamp_max(n - 1), key.clamp_max(m - 1)
        own = _pick(self.query_position, query[None, None]).transpose(1, 2)
        theirs = _pick(self.key_position, key).transpose(1, 2)
        permitted = None if bool(valid.all()) else valid.unsqueeze(-2).transpose(1, 2)
        if mask is not None:
            picked = _pick_pairs(mask, query, key).transpose(1, 2)
            if permitted is None:
                permitted = picked
            elif mask.dtype == torch.bool:
                permitted = permitted & picked
            else:
                permitted = torch.where(permitted, picked, float("-inf"))
        return Visibility(
            query.shape[-1], key.shape[-1], permitted, self.place.causal, self.place.window, own, theirs, aligned=False
        )

    def census(self) -> tuple[Tensor, Tensor]:
        """How many keys each query sees (batch | 1, heads | 1, n), and which keys somebody does (batch | 1, heads | 1,
        m)."""
        n, m, block = self.place.queries, self.place.keys, self.block
        lead = _lead(*(c.keys.shape[:2] for c in self.chunks), *self._leads())
        blocks = [-(-length // block) for length in (n, m)]
        visible = torch.zeros(*lead, blocks[0], block, dtype=torch.long, device=self.query_position.device)
        seen = torch.zeros(*lead, blocks[1], block, dtype=torch.int32, device=visible.device)
        for chunk in self.chunks:
            place = self.meet(chunk, None if self.mask is None else self.mask.detach())
            size = (lead[0], len(chunk.rows), lead[1], place.queries, place.keys)
            allowed = torch.ones((), dtype=torch.bool) if place.allowed is None else place.allowed
            allowed = allowed.to(visible.device).expand(size)
            visible[:, :, chunk.rows] = allowed.sum(-1).transpose(1, 2)
            # Places after the last query repeat it, and see what it sees.
            met = allowed.any(-2).transpose(1, 2)
            put(seen, met.reshape(*lead, len(chunk.rows), -1, 1).to(seen.dtype), chunk.keys, block)
        return visible.flatten(-2)[..., :n], seen.flatten(-2)[..., :m] > 0

    def _leads(self) -> Iterator[torch.Size]:
        for x in (self.mask, self.query_position, self.key_position):
            if x is not None:
                yield x.shape[:2]


def sizes(batch: torch.Size) -> tuple[int, int]:
    """Everything in front of the heads as one number, and the heads."""
    return batch[:-1].numel(), batch[-1] if batch else 1


def whole_blocks(x: Tensor, tokens: int, block: int) -> Tensor:
    """x (batch | 1, heads | 1, tokens | 1, width), its last token repeated up to whole blocks, its rows in one piece.

    Not zeros: an encoding may carry what its kernel divides by.
    """
    x = x.expand(*x.shape[:2], tokens, x.shape[-1])
    short = -tokens % block
    return torch.cat([x, x[:, :, -1:].expand(-1, -1, short, -1)], dim=2) if short else x.contiguous()


def take(x: Tensor, blocks: Tensor, block: int) -> Tensor:
    """The tokens of key blocks (b | 1, h | 1, r, s), of x (b | 1, h | 1, tokens, width): (b | 1, h | 1, r, s · block,
    width)."""
    rows = _numbered(x, blocks, block)
    got = x.reshape(-1, block * x.shape[-1]).index_select(0, rows.flatten())
    return got.view(*rows.shape[:-1], -1, x.shape[-1])


def put(into: Tensor, share: Tensor, blocks: Tensor, block: int) -> None:
    """Add to `into`, shaped as what `take` was given and in one piece, a share shaped as what it returned."""
    rows = _numbered(into.view(*into.shape[:2], -1, share.shape[-1]), blocks, block)
    share = share.sum_to_size(*rows.shape[:2], *share.shape[2:])
    width = block * share.shape[-1]
    into.view(-1, width).index_add_(0, rows.flatten(), share.reshape(-1, width).to(into.dtype))


def _numbered(x: Tensor, blocks: Tensor, block: int) -> Tensor:
    """Which rows of x, as a list of blocks, the blocks (b | 1, h | 1, r, s) are for each of its heads."""
    batch, heads, tokens = x.shape[:3]
    entry = torch.arange(batch * heads, device=x.device).view(batch, heads, 1, 1)
    return entry * (tokens // block) + blocks


def _lead(*shapes: torch.Size) -> tuple[int, int]:
    return max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)


def _pick(x: Tensor, tokens: Tensor) -> Tensor:
    """x (b | 1, h | 1, tokens) at tokens (b | 1, h | 1, r, t): (b | 1, h | 1, r, t)."""
    b, h = _lead(x.shape[:2], tokens.shape[:2])
    flat = tokens.expand(b, h, *tokens.shape[2:])
    return x.expand(b, h, -1).gather(-1, flat.flatten(-2)).view(flat.shape)


def _pick_pairs(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """mask (b | 1, h | 1, n | 1, m | 1) at queries (r, t), keys (b | 1, h | 1, r, s): (b | 1, h | 1, r, t | 1, s)."""
    b, h = _lead(mask.shape[:2], key.shape[:2])
    at = [torch.arange(size, device=mask.device) for size in (b, h)]
    if mask.shape[0] == 1:
        at[0] = torch.zeros_like(at[0])
    if mask.shape[1] == 1:
        at[1] = torch.zeros_like(at[1])
    rows = query[None, None, :, :, None] if mask.shape[2] > 1 else query.new_zeros(1, 1, len(query), 1, 1)
    columns = key[:, :, :, None] if mask.shape[3] > 1 else torch.zeros_like(key[:, :, :, None])
    return mask[at[0].view(-1, 1, 1, 1, 1), at[1].view(1, -1, 1, 1, 1), rows, columns]
