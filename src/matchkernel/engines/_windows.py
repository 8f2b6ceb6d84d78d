"""Attention within a band of the table, block by block, in the operators of a fused kernel; by hand in the backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..shapes import split
from ._fused_backward import at_once
from ._fused_function import private

Index = tuple[slice, slice]

ENOUGH = 2**19
"""Bytes of keys in one call of the operator: beside their work, a call and its slices cost nothing."""

MOST = 2**22
"""Bytes of keys in one call, so that what a call holds does not grow with the tokens."""


class Piece(NamedTuple):
    """`blocks` blocks of `rows` queries from `query` on. The first meets the `span` keys from `key` on, the next the
    same number `rows` further; `shift` columns of the table that all blocks share stand before `key`."""

    query: int
    key: int
    blocks: int
    rows: int
    span: int
    shift: int


@dataclass(frozen=True)
class Band:
    """Query i, at position p = m − n + i, meets the keys p − left·r … p + right·r in steps of r = `dilation`."""

    queries: int
    keys: int
    left: int
    right: int
    dilation: int = 1

    @property
    def block(self) -> int:
        """Queries in a block, for w keys in a window: 32 up to w = 191, then 64; from 1024 on w / 8, but at most 256.

        A block of B queries computes B − 1 scores more per query than it needs, and adds each key's gradient in
        w / B + 1 parts. Measured on two processors, at 4,096 and 8,192 queries of width 64; a half or the double
        costs a tenth more.
        """
        width = self.left + self.right + 1
        if width < 192:
            return 32
        return min(256, max(64, 1 << (width.bit_length() - 4)))

    @property
    def span(self) -> int:
        """Keys that a block of queries meets."""
        return self.block + self.left + self.right

    def classes(self) -> list[tuple[slice, slice]]:
        """Which queries and which keys meet: those whose positions leave the same remainder when divided by r.

        Within such a class distances are counted in steps of r, and its queries end with its keys. One without queries
        is left out; one without keys is not.
        """
        offset, r = self.keys - self.queries, self.dilation
        starts = [((c - offset) % r, c) for c in range(r)]
        return [(slice(query, None, r), slice(key, None, r)) for query, key in starts if query < self.queries]

    def pieces(self, n: int, m: int) -> list[Piece]:
        """The blocks of n queries and m keys that meet in steps of 1; those at the edges one by one."""
        block, left, right = self.block, self.left, self.right
        first = max(0, -(-(left - (m - n)) // block))
        end = max(first, (n - right) // block)
        found = [self._edge(s, n, m) for s in range(0, min(first * block, n), block)]
        if end > first:
            found.append(Piece(first * block, m - n + first * block - left, end - first, block, self.span, 0))
        found += [self._edge(s, n, m) for s in range(end * block, n, block)]
        return found

    def _edge(self, query: int, n: int, m: int) -> Piece:
        rows = min(self.block, n - query)
        start = m - n + query - self.left
        first, end = max(0, start), min(m, start + rows + self.left + self.right)
        return Piece(query, first, 1, rows, max(0, end - first), first - start)

    def table(self, like: Tensor) -> Tensor:
        """(block, span): 0 where a query of a block may attend to a key of those it meets, −inf elsewhere."""
        row = torch.arange(self.block, device=like.device).unsqueeze(-1)
        ahead = torch.arange(self.span, device=like.device) - row
        within = (ahead >= 0) & (ahead <= self.left + self.right)
        return torch.where(within, torch.zeros((), dtype=like.dtype, device=like.device), float("-inf"))

    def scores(self) -> int:
        """How many are computed for one head."""
        found = 0
        for queries, keys in self.classes():
            n, m = (len(range(size)[at]) for size, at in ((self.queries, queries), (self.keys, keys)))
            found += sum(piece.blocks * piece.rows * piece.span for piece in self.pieces(n, m))
        return found


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, for q (b, h, n, d), k and v (b, h / groups, m, ·), and a bias (b | 1, h | 1, m)."""
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    logsumexp = torch.zeros(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    table = band.table(q)
    for of_queries, of_keys in band.classes():
        # Views of one class; with a dilation of 1, of everything.
        rows, sums = out[:, :, of_queries], logsumexp[:, :, of_queries]
        q_, k_, v_ = q[:, :, of_queries], k[:, :, of_keys], v[:, :, of_keys]
        added = None if bias is None else bias[..., of_keys]
        for at_q, at_k, piece in _calls(band, q_, k_):
            x, y, z = _queries(q_[at_q], piece), _keys(k_[at_k], piece), _keys(v_[at_k], piece)
            found = private(x, y, z, _bias(added, table, at_q, piece), False, scale)
            _queries(rows[at_q], piece).copy_(found[0])
            _queries(sums[at_q].unsqueeze(-1), piece).copy_(found[1].unsqueeze(-1))
    return out, logsumexp


def backward(
    grad: Tensor,
    grad_logsumexp: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    bias: Tensor | None,
    band: Band,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: the operator's own for each block, and keys add up what the blocks they are in say."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    table = band.table(q)
    for of_queries, of_keys in band.classes():
        tokens = [x[:, :, of_queries] for x in (grad, q, out, dq)]
        others = [x[:, :, of_keys] for x in (k, v, dk, dv)]
        sums = logsumexp[:, :, of_queries].unsqueeze(-1)
        more = None if grad_logsumexp is None else grad_logsumexp[:, :, of_queries].unsqueeze(-1)
        added = None if bias is None else bias[..., of_keys]
        for at_q, at_k, piece in _calls(band, tokens[1], others[0]):
            given, x, given_out, to_x = (_queries(t[at_q], piece) for t in tokens)
            found = at_once(
                given,
                None if more is None else _queries(more[at_q], piece).squeeze(-1),
                x,
                _keys(others[0][at_k], piece),
                _keys(others[1][at_k], piece),
                given_out,
                _queries(sums[at_q], piece).squeeze(-1),
                _bias(added, table, at_q, piece),
                False,
                scale,
            )
            to_x.copy_(found[0])
            for whole, part in zip(others[2:], found[1:], strict=True):
                _add_to_keys(whole[at_k], part, piece)
            # Before the next call, which would otherwise hold both.
            del found
    return dq, dk, dv


def _calls(band: Band, q: Tensor, k: Tensor) -> Iterator[tuple[Index, Index, Piece]]:
    """The pieces, and for each a few heads of one batch entry at a time, each with tokens enough for one call.

    Edges are small: every head of the batch is in one call.
    """
    n, m = q.shape[2], k.shape[2]
    batch, heads = k.shape[:2]
    groups = q.shape[1] // max(1, heads)
    everything = slice(None), slice(None)
    for piece in band.pieces(n, m):
        if not piece.span:
            continue
        if piece.blocks == 1:
            # The batch in front, as the operator wants it: there is no dimension of blocks.
            yield everything, everything, piece
            continue
        block_bytes = piece.rows * k.shape[3] * k.element_size()
        step = max(1, ENOUGH // (piece.blocks * block_bytes))
        blocks = max(1, MOST // block_bytes)
        for b in range(batch):
            for h in range(0, heads, step):
                for start in range(0, piece.blocks, blocks):
                    moved = start * piece.rows
                    part = piece._replace(
                        query=piece.query + moved, key=piece.key + moved, blocks=min(blocks, piece.blocks - start)
                    )
                    one = slice(b, b + 1)
                    yield (one, slice(h * groups, (h + step) * groups)), (one, slice(h, h + step)), part


def _queries(x: Tensor, piece: Piece) -> Tensor:
    """(b, h, n, width) → its blocks (b · blocks, h, rows, width), of which one of the two is 1; a view."""
    x = x[:, :, piece.query : piece.query + piece.blocks * piece.rows]
    return x if piece.blocks == 1 else split(x[0], -2, (piece.blocks, piece.rows)).transpose(0, 1)


def _keys(x: Tensor, piece: Piece) -> Tensor:
    """(b, h, m, width) → what each block meets (b · blocks, h, span, width); a view whose blocks overlap."""
    x = x[:, :, piece.key : piece.key + (piece.blocks - 1) * piece.rows + piece.span]
    return x if piece.blocks == 1 else overlapping(x[0], piece.span, piece.rows).transpose(0, 1)


def overlapping(x: Tensor, span: int, step: int) -> Tensor:
    """(…, m, width) → (…, blocks, span, width): `span` tokens from each `step`th on; a view."""
    return x.unfold(-2, span, step).mT


def _add_to_keys(whole: Tensor, part: Tensor, piece: Piece) -> None:
    """Adds each block's part (b · blocks, h, span, width) to the keys it speaks of.

    `rows` keys at a time: so many of each block overlap with no other's.
    """
    for at in range(0, piece.span, piece.rows) if piece.blocks > 1 else (0,):
        size = min(piece.rows, piece.span - at) if piece.blocks > 1 else piece.span
        place = piece._replace(key=piece.key + at, span=size)
        _keys(whole, place).add_(part[:, :, at : at + size])


def _bias(bias: Tensor | None, table: Tensor, at: Index, piece: Piece) -> Tensor:
    """What is added to the scores of a call: the table that all blocks share, and what the mask adds to the keys."""
    table = table[: piece.rows, piece.shift : piece.shift + piece.span][None, None]
    if bias is None:
        return table
    batch, heads = at
    bias = bias[batch if bias.shape[0] > 1 else slice(None), heads if bias.shape[1] > 1 else slice(None)]
    return table + _keys(bias.unsqueeze(-1), piece).mT
