"""Block patterns: which blocks of queries may meet which blocks of keys, as data that can be checked and drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


class BlockPattern:
    """Which blocks of keys each block of queries may meet.

    pair (i, j) is in the pattern  ⟺  table[⌊i / block⌋, ⌊j / block⌋]

    table: bool, (query blocks, key blocks), or (heads, query blocks, key blocks) for a pattern per head; it is copied.
    block: tokens in a block, at least 1. The last block of a sequence may be short.

    Patterns of one block size and shape combine: `a | b` holds the pairs of either, `a & b` those of both. They say
    nothing about order: with `causal=True`, `attend` keeps of them what causal order permits. The constructors take
    the number of tokens n and make square tables. Widths, distances and steps are counted in blocks.

    Raises: TypeError, ValueError naming the argument, its shape and what was expected.
    Cost: one byte for each pair of blocks, so n²/block² of them.
    Source: Child et al. 2019 and Zaheer et al. 2020, for patterns as unions of simple ones.
    """

    def __init__(self, table: Tensor, block: int) -> None:
        if not isinstance(table, Tensor) or table.dtype != torch.bool:
            kind = f"a tensor of {table.dtype}" if isinstance(table, Tensor) else type(table).__name__
            raise TypeError(f"table: expected a tensor of bool, True = may meet, got {kind}")
        if table.dim() not in (2, 3) or 0 in table.shape:
            raise ValueError(
                f"table has shape {tuple(table.shape)}: expected (query blocks, key blocks) or "
                "(heads, query blocks, key blocks), none of them 0"
            )
        self.table = table.clone()
        self.block = _count("block", block, least=1)

    @classmethod
    def causal(cls, n: int, block: int) -> BlockPattern:
        """Each block meets itself and all before it; token by token order is the call's `causal=True`."""
        distance = _distances(n, block)
        return cls(distance >= 0, block)

    @classmethod
    def window(cls, n: int, block: int, left: int, right: int = 0) -> BlockPattern:
        """Each block meets itself, `left` blocks before it and `right` after it."""
        distance = _distances(n, block)
        left, right = _count("left", left), _count("right", right)
        return cls((distance <= left) & (-distance <= right), block)

    @classmethod
    def dilated(cls, n: int, block: int, steps: int, step: int) -> BlockPattern:
        """Each block meets those at distances 0, step, … steps · step, on both sides.

        Source: Beltagy, Peters & Cohan 2020 (Longformer), section 3.1.
        """
        distance = _distances(n, block).abs()
        steps, step = _count("steps", steps), _count("step", step, least=1)
        return cls((distance % step == 0) & (distance <= steps * step), block)

    @classmethod
    def strided(cls, n: int, block: int, stride: int) -> BlockPattern:
        """Each block meets those fewer than `stride` before or after it, and every stride-th from there on.

        With stride ≈ √(blocks), two layers join any two tokens in a causal order.
        Source: Child et al. 2019 (Sparse Transformers), section 4.2.
        """
        distance = _distances(n, block).abs()
        stride = _count("stride", stride, least=1)
        return cls((distance < stride) | (distance % stride == 0), block)

    @classmethod
    def global_blocks(cls, n: int, block: int, blocks: Iterable[int] = (0,)) -> BlockPattern:
        """The blocks of these numbers meet all, and all meet them."""
        size = _size(n, block)
        chosen = torch.zeros(size, dtype=torch.bool)
        for number in blocks:
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < size:
                raise ValueError(f"blocks: expected numbers from 0 to {size - 1}, got {number!r}")
            chosen[number] = True
        return cls(chosen[:, None] | chosen[None, :], block)

    @classmethod
    def random(
        cls, n: int, block: int, count: int, *, generator: torch.Generator, besides: BlockPattern | None = None
    ) -> BlockPattern:
        """Each block meets `count` others drawn without repetition, or as many as there are.

        besides: a pattern, (query blocks, key blocks), whose pairs are not drawn. generator: draws; none is made here,
        so that a pattern can be had again.
        """
        size, count = _size(n, block), _count("count", count)
        lots = torch.rand(size, size, generator=generator, device=generator.device).cpu()
        if besides is not None:
            if besides.block != block or besides.table.shape != (size, size):
                raise ValueError(f"besides: expected a pattern of {size} × {size} blocks of {block}, got {besides!r}")
            lots = torch.where(besides.table.cpu(), -1.0, lots)
        drawn = lots.topk(min(count, size), dim=-1)
        table = torch.zeros(size, size, dtype=torch.bool)
        return cls(table.scatter(1, drawn.indices, drawn.values >= 0.0), block)

    @classmethod
    def bigbird(
        cls,
        n: int,
        block: int,
        *,
        generator: torch.Generator,
        window: int = 3,
        global_blocks: int = 2,
        random: int = 3,
    ) -> BlockPattern:
        """A window of `window` blocks (an odd number) around each, the first blocks seen by and seeing all, and random
        ones that are neither.

        The defaults are the paper's for its base model, with block = 64.
        Source: Zaheer et al. 2020 (BigBird), section 2 and appendix.
        """
        if _count("window", window, least=1) % 2 == 0:
            raise ValueError(f"window={window}: expected an odd number, the block itself and as many on either side")
        kept = cls.window(n, block, window // 2, window // 2)
        kept |= cls.global_blocks(n, block, range(_count("global_blocks", global_blocks)))
        return kept | cls.random(n, block, random, generator=generator, besides=kept)

    @property
    def density(self) -> float:
        """The share of block pairs that are in the pattern."""
        return self.table.double().mean().item()

    def mask(self, n: int, m: int | None = None) -> Tensor:
        """The pairs of n queries and m keys (default n): bool (n, m) or (heads, n, m), True = in the pattern.

        ValueError where the table is for another number of blocks. This is the n × m table that `Blocks` never forms.
        """
        m = n if m is None else m
        if (why := self.misfit(n, m)) is not None:
            raise ValueError(why)
        rows = self.table.repeat_interleave(self.block, dim=-2)[..., :n, :]
        return rows.repeat_interleave(self.block, dim=-1)[..., :m]

    def misfit(self, n: int, m: int) -> str | None:
        """Why the table does not fit n queries and m keys, or None where it does."""
        needed = (math.ceil(n / self.block), math.ceil(m / self.block))
        if tuple(self.table.shape[-2:]) == needed:
            return None
        return (
            f"{self!r} does not fit {n} queries and {m} keys, which make {needed[0]} × {needed[1]} blocks of "
            f"{self.block}"
        )

    def __or__(self, other: object) -> BlockPattern:
        if not isinstance(other, BlockPattern):
            return NotImplemented
        return BlockPattern(self.table | self._fitting(other, "|"), self.block)

    def __and__(self, other: object) -> BlockPattern:
        if not isinstance(other, BlockPattern):
            return NotImplemented
        return BlockPattern(self.table & self._fitting(other, "&"), self.block)

    def _fitting(self, other: BlockPattern, sign: str) -> Tensor:
        alike = self.block == other.block and self.table.shape[-2:] == other.table.shape[-2:]
        heads = {table.shape[0] for table in (self.table, other.table) if table.dim() == 3} - {1}
        if not alike or len(heads) > 1:
            raise ValueError(f"{self!r} {sign} {other!r}: expected one block size and one shape")
        return other.table.to(self.table.device)

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.table.shape[-2:]))
        heads = f"{self.table.shape[0]} heads, " if self.table.dim() == 3 else ""
        return f"BlockPattern({heads}{shape} blocks of {self.block}, density {self.density:.3g})"


def _count(name: str, value: object, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: expected an integer of at least {least}")
    return value


def _size(n: int, block: int) -> int:
    return math.ceil(_count("n", n, least=1) / _count("block", block, least=1))


def _distances(n: int, block: int) -> Tensor:
    """How many blocks before each query block each key block stands, negative for those after it."""
    places = torch.arange(_size(n, block))
    return places[:, None] - places[None, :]
