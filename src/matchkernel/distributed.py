"""A sequence in shards: how tokens are dealt to the processes of a ring, and put together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .engines._ring_circle import RingError

__all__ = ["RingError", "deal", "positions", "undeal"]


def positions(tokens: int, rank: int, world: int) -> Tensor:
    """Which tokens of a sequence `deal` hands to a rank: their positions, ascending, (n_r,) int64.

    The sequence is cut into 2·world chunks whose lengths differ by at most one; rank r holds chunk r and chunk
    2·world − 1 − r, an early one and a late one. Under a causal order token i meets i + 1 keys, so every rank then has
    the same work. Hand them to `attend` as query_position and key_position. ValueError for a rank outside the world.
    Source: Grattafiori et al. 2024 (Llama 3), section 3.3.2; Brandon et al. 2023 (Striped Attention) deal
    single tokens.
    """
    _check(rank, world)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise ValueError(f"tokens={tokens!r}: expected how many there are, an integer of at least 0")
    return torch.cat([torch.arange(*_chunk(tokens, which, world)) for which in (rank, 2 * world - 1 - rank)])


def deal(x: Tensor, rank: int, world: int, dim: int = -2) -> Tensor:
    """This rank's tokens of a whole sequence: those at `positions(x.shape[dim], rank, world)`, as a copy.

    x (…, n, d) → (…, n_r, d). `dim` is where the tokens lie, −2 by default. Differentiable.
    """
    return x.index_select(dim, positions(x.shape[dim], rank, world).to(x.device))


def undeal(shards: Sequence[Tensor], dim: int = -2) -> Tensor:
    """The whole sequence from every rank's shard, in the order of the ranks: what `deal` took apart.

    ValueError where the lengths are not those that `deal` gives. Differentiable.
    """
    world = len(shards)
    if world == 0:
        raise ValueError("shards: expected one tensor for each rank, got none")
    lengths = [shard.shape[dim] for shard in shards]
    places = [positions(sum(lengths), rank, world) for rank in range(world)]
    if lengths != [len(place) for place in places]:
        raise ValueError(f"shards have {lengths} tokens, where deal() gives {[len(place) for place in places]}")
    order = torch.cat(places).argsort()
    return torch.cat(list(shards), dim).index_select(dim, order.to(shards[0].device))


def _chunk(tokens: int, which: int, world: int) -> tuple[int, int]:
    return tokens * which // (2 * world), tokens * (which + 1) // (2 * world)


def _check(rank: int, world: int) -> None:
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"rank={rank}, world={world}: expected 0 ≤ rank < world")
