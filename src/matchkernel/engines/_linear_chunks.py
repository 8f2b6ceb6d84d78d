"""Sums over features, a segment of tokens at a time: what is worked on fits beside its operands in a core's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..shapes import split

Pull = Callable[[Tensor, Callable[[], Tensor] | None], None]
"""Takes the gradients of a segment's features and, asked for if somebody needs it, of their log scales back to what
they were made of. The features are overwritten: nobody reads them any more."""


@dataclass
class Head:
    """All heads of one batch entry: where its segments come from, and where their results go.

    Every map takes a span of tokens. Features come as (h, tokens, f) and log scales as (h, tokens, 1) or None for 0,
    keys' with the mask added, values as (h, tokens, d_v). The gradients leave through the pulls.
    """

    query: Callable[[slice], tuple[Tensor, Tensor | None]]
    """Features, and the logarithm of what stands beside the keys in the row's sum, if anything does."""
    key: Callable[[slice], tuple[Tensor, Tensor | None]]
    value: Callable[[slice], Tensor]
    out: Tensor
    """(h, n, d_v)"""
    share: Tensor
    """(h, n, 1): what a row's sums are multiplied with to become its output; 0 for a row whose sum is 0."""
    beside: Tensor | None
    """(h, n, 1): the share of the row that no key has."""


@dataclass(frozen=True)
class Layout:
    """Which tokens meet how: first keys that all rows see, then a square of the last rows and keys in causal order."""

    queries: int
    keys: int
    causal: bool
    chunk: int
    segment: int

    @property
    def square(self) -> int:
        return min(self.queries, self.keys) if self.causal else 0

    @property
    def past(self) -> int:
        """Keys that every row sees which sees any."""
        return self.keys - self.square

    def segments(self, first: int, last: int) -> list[slice]:
        """Spans of whole chunks, and what is left as a last one."""
        ends = list(range(first, last, self.segment))
        spans: list[slice] = []
        for start in ends:
            stop = min(start + self.segment, last)
            whole = start + (stop - start) // self.chunk * self.chunk
            spans += [slice(a, b) for a, b in ((start, whole), (whole, stop)) if a < b]
        return spans

    def pairs(self) -> Iterator[tuple[slice, slice]]:
        """Rows and keys of each segment of the square."""
        rows, keys = self.queries - self.square, self.keys - self.square
        for span in self.segments(0, self.square):
            yield slice(rows + span.start, rows + span.stop), slice(keys + span.start, keys + span.stop)


class Unit(NamedTuple):
    """The log scale (h, 1, 1) that sums are measured from, and whether it is known to be 0."""

    value: Tensor
    at_zero: bool


@dataclass
class Sums:
    """The state: Σ_j φ(k_j)ᵀ [v_j, 1] e^(s_j − unit) (h, f, d_v + 1), its unit (h, 1, 1) and the least log scale s."""

    total: Tensor
    unit: Tensor
    least: Tensor | None
    """Followed only where somebody asks."""
    keep: bool = False
    fresh: bool = True
    """Whether no key has come yet."""
    at_zero: bool = False
    """Whether it is known, without a look at it, that the unit is 0."""
    past: Unit | None = None
    """The unit when the square begins."""
    saved: list[tuple[Tensor, Unit]] = field(default_factory=list)
    """If they are to be kept: the sums before each segment of the square, and the unit in which it was computed."""

    @staticmethod
    def empty(like: Tensor, heads: int, features: int, width: int, *, keep: bool, least: bool) -> Sums:
        unit = like.new_full((heads, 1, 1), -torch.inf)
        return Sums(like.new_zeros(heads, features, width + 1), unit, -unit if least else None, keep)

    def measured_in(self) -> Unit:
        """The unit as it is now."""
        return Unit(self.unit, self.at_zero)

    def meet(self, scale: Tensor | None) -> Tensor | None:
        """e^(scale − unit) for new log scales (h, tokens, 1), the largest so far being the unit from now on.

        None stands for scales of 0, and for weights of 1.
        """
        if scale is None and self.fresh:
            self.unit, self.at_zero = torch.zeros_like(self.unit), True
            self.least = None if self.least is None else self.unit
        self.fresh = False
        if scale is None:
            if self.at_zero:
                return None
            scale = torch.zeros_like(self.unit)
        self.at_zero = False
        unit = torch.maximum(self.unit, scale.amax(dim=-2, keepdim=True))
        base = finite(unit)
        self.total = self.total * (self.unit - base).exp_()
        self.unit = unit
        if self.least is not None:
            least = scale.masked_fill(scale == -torch.inf, torch.inf).amin(dim=-2, keepdim=True)
            self.least = torch.minimum(self.least, least)
        return (scale - base).exp_()


def finite(unit: Tensor) -> Tensor:
    """A unit that may be subtracted from −∞."""
    return unit.clamp_min(torch.finfo(unit.dtype).min)


def with_one(value: Tensor, weight: Tensor | None) -> Tensor:
    """[v, 1] times a weight for each token, None for 1."""
    out = value.new_empty(*value.shape[:-1], value.shape[-1] + 1)
    if weight is None:
        out[..., :-1] = value
        out[..., -1] = 1.0
    else:
        torch.mul(value, weight, out=out[..., :-1])
        out[..., -1:] = weight
    return out


def chunked(x: Tensor, chunk: int) -> Tensor:
    """(h, tokens, w) as (h · chunks, chunk, w)."""
    return x.reshape(-1, min(chunk, x.shape[-2]), x.shape[-1])


def below(size: int, like: Tensor) -> Tensor:
    return torch.ones(size, size, dtype=like.dtype, device=like.device).tril_()


def before(parts: Tensor, first: Tensor) -> Tensor:
    """Sums before each chunk, (h, chunks, f, w), from those of the chunks and before them all, (h, f, w).

    By a product with a triangle of ones: adding one after another is a call for each chunk, and takes longer.
    """
    return _sums(parts, first, below(parts.shape[1], parts).tril_(-1))


def after(parts: Tensor, last: Tensor) -> Tensor:
    """The same from behind."""
    return _sums(parts, last, below(parts.shape[1], parts).tril_(-1).mT)


def _sums(parts: Tensor, one: Tensor, triangle: Tensor) -> Tensor:
    flat = parts.flatten(2)
    return torch.baddbmm(one.flatten(1).unsqueeze(1), triangle.expand(len(flat), -1, -1), flat).view_as(parts)


def forward(head: Head, layout: Layout, sums: Sums) -> None:
    """Fill `out`, `share` and `beside` of a head; `sums` ends with all keys, or before the last segment's."""
    for span in layout.segments(0, layout.past):
        key, scale = head.key(span)
        weighed = with_one(head.value(span), sums.meet(scale))
        sums.total.baddbmm_(key.mT, weighed)
    sums.past = sums.measured_in()
    if not layout.causal:
        for span in layout.segments(0, layout.queries):
            query, rest = head.query(span)
            _close(head, span, torch.bmm(query, sums.total), sums.unit, rest)
        return
    blind = layout.queries - layout.square
    for span in layout.segments(0, blind):
        head.out[:, span] = 0.0
        head.share[:, span] = 0.0
        if head.beside is not None:
            head.beside[:, span] = 0.0
    triangle = below(layout.chunk, head.out)
    for rows, keys in layout.pairs():
        query, rest = head.query(rows)
        key, scale = head.key(keys)
        weighed = with_one(head.value(keys), sums.meet(scale))
        if sums.keep:
            sums.saved.append((sums.total, sums.measured_in()))
        q, k, v = (chunked(x, layout.chunk) for x in (query, key, weighed))
        table = torch.bmm(q, k.mT)
        size = table.shape[-1]
        table.mul_(triangle[:size, :size])
        result = torch.bmm(table, v)
        parts = split(torch.bmm(k.mT, v), 0, (query.shape[0], -1))
        earlier = before(parts, sums.total)
        result.baddbmm_(q, earlier.flatten(0, 1))
        sums.total = earlier[:, -1] + parts[:, -1]
        _close(head, rows, result.view(*query.shape[:-1], -1), sums.unit, rest)


def _close(head: Head, rows: slice, sums: Tensor, unit: Tensor, rest: Tensor | None) -> None:
    """A segment's output from its numerators and sum (h, tokens, d_v + 1) in `unit`."""
    total = sums[..., -1:]
    if rest is None:
        share = _reciprocal(total)
    else:
        top = finite(torch.maximum(unit, rest))
        ours, theirs = (unit - top).exp(), (rest - top).exp()
        whole = _reciprocal(total * ours + theirs)
        share = ours * whole
        assert head.beside is not None
        head.beside[:, rows] = theirs * whole
    torch.mul(sums[..., :-1], share, out=head.out[:, rows])
    head.share[:, rows] = share


def _reciprocal(total: Tensor) -> Tensor:
    """1 / total, and 0 for 0."""
    return total.reciprocal().nan_to_num_(nan=torch.nan, posinf=0.0, neginf=0.0)


@dataclass
class Backward:
    """A head's pulls, its incoming gradient and where the gradient of the values goes."""

    query: Callable[[slice], tuple[Tensor, Pull]]
    key: Callable[[slice], tuple[Tensor, Tensor | None, Pull]]
    grad: Callable[[slice], Tensor]
    """(h, tokens, d_v)"""
    put_value: Callable[[slice, Tensor], None]


def backward(head: Head, layout: Layout, sums: Sums, pulls: Backward) -> None:
    """Gradients of a head's features and values, from the last segment to the first.

    The sums of the rows, R = Σ_i φ(q_i)ᵀ G_i with G_i the gradient of a row's numerators and sum, are to the keys
    what the state is to the queries. They are kept in the unit of the segment's keys, which only falls on the way.
    """
    after_all = torch.zeros_like(sums.total)
    if not layout.causal:
        for span in layout.segments(0, layout.queries):
            query, pull = pulls.query(span)
            grad, rest = _grad_rows(head, pulls, span)
            after_all.baddbmm_(query.mT, grad)
            pull(torch.bmm(grad, sums.total.mT), rest)
    else:
        blind = layout.queries - layout.square
        for span in layout.segments(0, blind):
            query, pull = pulls.query(span)
            pull(torch.zeros_like(query), None)
    unit = sums.unit
    triangle = below(layout.chunk, head.out)
    for (rows, keys), (earlier, here) in zip(reversed(list(layout.pairs())), reversed(sums.saved), strict=True):
        after_all = _down(after_all, here.value, unit)
        unit = here.value
        query, pull_query = pulls.query(rows)
        key, scale, pull_key = pulls.key(keys)
        weight = _weight(scale, here)
        weighed = with_one(head.value(keys), weight)
        grad, rest = _grad_rows(head, pulls, rows)
        q, k, v, g = (chunked(x, layout.chunk) for x in (query, key, weighed, grad))
        heads, size = query.shape[0], q.shape[-2]
        mask = triangle[:size, :size]
        table, slope = torch.bmm(q, k.mT).mul_(mask), torch.bmm(g, v.mT).mul_(mask)
        parts = split(torch.bmm(k.mT, v), 0, (heads, -1))
        ahead = split(torch.bmm(q.mT, g), 0, (heads, -1))
        state, behind = before(parts, earlier).flatten(0, 1), after(ahead, after_all)
        after_all = behind[:, 0] + ahead[:, 0]
        behind = behind.flatten(0, 1)
        d_query = torch.bmm(slope, k).baddbmm_(g, state.mT).view_as(query)
        d_weighed = torch.bmm(table.mT, g).baddbmm_(k, behind).view_as(weighed)
        d_key = torch.bmm(slope.mT, q).baddbmm_(v, behind.mT).view_as(key)
        pull_query(d_query, rest)
        _give(pulls, keys, weight, weighed, d_weighed, d_key, pull_key)
    past = layout.segments(0, layout.past)
    if past:
        first = sums.past
        assert first is not None
        after_all = _down(after_all, first.value, unit)
        for span in past:
            key, scale, pull_key = pulls.key(span)
            weight = _weight(scale, first)
            weighed = with_one(head.value(span), weight)
            d_weighed, d_key = torch.bmm(key, after_all), torch.bmm(weighed, after_all.mT)
            _give(pulls, span, weight, weighed, d_weighed, d_key, pull_key)


def _give(
    pulls: Backward, keys: slice, weight: Tensor | None, weighed: Tensor, d_weighed: Tensor, d_key: Tensor, pull: Pull
) -> None:
    d_value = d_weighed[..., :-1]
    pulls.put_value(keys, d_value if weight is None else d_value * weight)
    pull(d_key, lambda: (d_weighed * weighed).sum(dim=-1, keepdim=True))


def _grad_rows(head: Head, pulls: Backward, rows: slice) -> tuple[Tensor, Callable[[], Tensor] | None]:
    """The gradient of the numerators and sum of some rows, and that of the logarithm of what stands beside the keys."""
    grad, share = pulls.grad(rows), head.share[:, rows]
    row = (grad * head.out[:, rows]).sum(dim=-1, keepdim=True).neg_()
    both = grad.new_empty(*grad.shape[:-1], grad.shape[-1] + 1)
    torch.mul(grad, share, out=both[..., :-1])
    torch.mul(row, share, out=both[..., -1:])
    beside = head.beside
    return both, None if beside is None else lambda: row * beside[:, rows]


def _weight(scale: Tensor | None, unit: Unit) -> Tensor | None:
    if scale is None:
        return None if unit.at_zero else finite(unit.value).neg().exp_()
    return (scale - finite(unit.value)).exp_()


def _down(sums: Tensor, to: Tensor, unit: Tensor) -> Tensor:
    """Sums of rows in the unit of earlier keys, which is no larger."""
    return sums * (to - finite(unit)).exp_()
