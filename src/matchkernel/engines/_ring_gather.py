"""Two collectives that can be differentiated to any order: each is the other's transpose, or its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..shapes import narrowed, widened
from ._ring_circle import Circle


class Gathered(torch.autograd.Function):
    """x (…, n_r) of every rank, one after the other along the last dimension: (…, N) on each. `lengths` are all n_r."""

    @staticmethod
    def forward(ctx: Any, circle: Circle, lengths: list[int], x: Tensor) -> Tensor:
        ctx.circle, ctx.lengths = circle, lengths
        shards = circle.gather(widened(x, max(lengths)))
        return torch.cat([narrowed(shard, length) for shard, length in zip(shards, lengths, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, Scattered.apply(ctx.circle, ctx.lengths, grad)  # type: ignore[no-untyped-call]


class Scattered(torch.autograd.Function):
    """The sum over the ranks of x (…, N), of which each rank keeps its own n_r."""

    @staticmethod
    def forward(ctx: Any, circle: Circle, lengths: list[int], x: Tensor) -> Tensor:
        ctx.circle, ctx.lengths = circle, lengths
        start = sum(lengths[: circle.rank])
        return circle.total(x)[..., start : start + lengths[circle.rank]].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, Gathered.apply(ctx.circle, ctx.lengths, grad)  # type: ignore[no-untyped-call]


class Total(torch.autograd.Function):
    """The sum of x over the ranks, on each of them; its transpose is itself."""

    @staticmethod
    def forward(ctx: Any, circle: Circle, x: Tensor) -> Tensor:
        ctx.circle = circle
        return circle.total(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, Total.apply(ctx.circle, grad)  # type: ignore[no-untyped-call]


def gathered(circle: Circle, lengths: list[int], x: Tensor) -> Tensor:
    """x (…, n_r, width) of every rank, one after the other: (…, N, width) on each."""
    out: Tensor = Gathered.apply(circle, lengths, x.mT)  # type: ignore[no-untyped-call]
    return out.mT
