"""Tiles of kernels made from kernels: a sum, a multiple, a limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .encoding import Encoding
from .tiles import TileForm, Tiles
from .values import HeadValue, as_column

if TYPE_CHECKING:
    from .base import MatchKernel


def added(a: Tiles | None, b: Tiles | None) -> Tiles | None:
    """The tiles of a sum; None where either part has none."""
    if a is None or b is None or a.form.beside or b.form.beside:
        return None
    return Tiles(SumForm(a.form, b.form), (a.query, b.query), (a.key, b.key))


class SumForm(TileForm):
    """s = s_a + s_b."""

    def __init__(self, a: TileForm, b: TileForm) -> None:
        self.a, self.b = a, b

    def __repr__(self) -> str:
        return f"SumForm({self.a!r}, {self.b!r})"

    def scores(self, query: Encoding, key: Encoding) -> Tensor:
        return self.a.scores(query[0], key[0]) + self.b.scores(query[1], key[1])

    def pull(self, query: Encoding, key: Encoding, grad: Tensor) -> tuple[Encoding, Encoding]:
        (q_a, k_a), (q_b, k_b) = self.a.pull(query[0], key[0], grad), self.b.pull(query[1], key[1], grad)
        return (q_a, q_b), (k_a, k_b)


class TimesForm(TileForm):
    """s = c · s_a; c is a number, or a column (g, i, 1) beside the query."""

    def __init__(self, inner: TileForm, factor: float | None) -> None:
        self.inner, self.factor = inner, factor

    def __repr__(self) -> str:
        return f"TimesForm({self.inner!r}, {self.factor!r})"

    def scores(self, query: Encoding, key: Encoding) -> Tensor:
        own, factor = beside(query, self.factor)
        return factor * self.inner.scores(own, key)

    def pull(self, query: Encoding, key: Encoding, grad: Tensor) -> tuple[Encoding, Encoding]:
        own, factor = beside(query, self.factor)
        of_query, of_key = self.inner.pull(own, key, factor * grad)
        if self.factor is not None:
            return of_query, of_key
        return (of_query, (grad * self.inner.scores(own, key)).sum(-1, keepdim=True)), of_key


class LimitForm(TileForm):
    """s = c · tanh(s_a / c); c is a number, or a column (g, i, 1) beside the query."""

    def __init__(self, inner: TileForm, limit: float | None) -> None:
        self.inner, self.limit = inner, limit

    def __repr__(self) -> str:
        return f"LimitForm({self.inner!r}, {self.limit!r})"

    def scores(self, query: Encoding, key: Encoding) -> Tensor:
        own, limit = beside(query, self.limit)
        return limit * torch.tanh(self.inner.scores(own, key) / limit)

    def pull(self, query: Encoding, key: Encoding, grad: Tensor) -> tuple[Encoding, Encoding]:
        own, limit = beside(query, self.limit)
        ratio = self.inner.scores(own, key) / limit
        bent = torch.tanh(ratio)
        steep = 1.0 - bent * bent
        of_query, of_key = self.inner.pull(own, key, grad * steep)
        if self.limit is not None:
            return of_query, of_key
        return (of_query, (grad * (bent - ratio * steep)).sum(-1, keepdim=True)), of_key


def carrying(query: Encoding, value: HeadValue, q: Tensor) -> Encoding:
    """A query's encoding, with a column for `value` beside it unless that is a number; `beside` takes it apart."""
    return (query, as_column(value, q)) if isinstance(value, Tensor) else query


def around(
    kernel: MatchKernel,
    q: Encoding,
    k: Encoding,
    number: float | None,
    form: Callable[[TileForm, float | None], TileForm],
) -> Tiles | None:
    """The tiles of a kernel made from one other and a value; None where that other has none."""
    inner = kernel.tiles(beside(q, number)[0], k)
    if inner is None or inner.form.beside:
        return None
    query = inner.query if number is not None else (inner.query, q[1])
    return Tiles(form(inner.form, number), query, inner.key)


def beside(query: Encoding, number: float | None) -> tuple[Encoding, Tensor | float]:
    """A query's encoding and the value that applies to it: a number, or the column that rides beside it."""
    if number is not None:
        return query, number
    own, column = query
    assert isinstance(column, Tensor)
    return own, column
