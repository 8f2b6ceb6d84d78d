"""The tiled engine: any kernel, streamed through tiles of queries and keys, exact, with O(n) memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.encoding import Encoding, leaves
from ..kernels.feature_base import may_be_zero, why_no_score
from ..kernels.tiles import Tiles
from . import _compiled, _tile
from ._encoding import four, rebuild
from ._match_form import MatchForm, heads_alike
from ._schedule import Limits, limits, schedule
from ._tiled_function import Job, Operands, Prepared, TiledAttention, run
from ._tiled_rows import Row, RowAttention
from .problem import Cost, Problem, product_flops, traffic, why_not_by_hand, zero_where_not

QUERIES, KEYS = 256, 1024
"""The largest tile of one head. Its scores, a megabyte in float32, fit beside its operands in a core's own cache."""

FEW, MANY = 2**16, 2**19
"""Scores of one batch entry, and of all, up to which "auto" leaves a problem to the reference: small tables cost less
than the bookkeeping of tiles, and a few of them fit into memory even where a kernel holds many numbers for a pair."""

ENOUGH = 2**21
"""Scores from which the seconds of compiling are soon paid back."""


@dataclass(frozen=True)
class Tiled:
    """Streams the keys past each tile of queries; nothing larger than a tile is held, forward or backward.

    queries, keys: the largest tile, in tokens; the defaults suit a core with a megabyte of cache.
    compile: True to build the tile's arithmetic with torch.compile, False to run it as it stands, None (default) to
    build it where a compiler exists and the problem is large enough to pay for it.

    The backward computes every tile's scores again, from the output and one number per row. A kernel that ships its own
    arithmetic (`MatchKernel.tiles`) has it used; any other has its `match` used and differentiated. A normaliser
    without an online form is given whole rows, a few queries at a time. Half-precision inputs are computed in float32.
    A second derivative recomputes densely.
    """

    queries: int = QUERIES
    keys: int = KEYS
    compile: bool | None = None

    name = "tiled"
    exact = True

    def __post_init__(self) -> None:
        for name in ("queries", "keys"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"Tiled({name}={size!r}): expected an integer of at least 1")
        if self.compile is True and (why := _compiled.missing()) is not None:
            raise ValueError(f"Tiled(compile=True): {why}")

    def refuse(self, problem: Problem) -> str | None:
        if (reason := why_no_score(problem.kernel)) is not None:
            return f"{reason}, and tiles are made of scores"
        if may_be_zero(problem.kernel):
            return f"{problem.kernel!r} may have κ = 0, whose score −inf tiles keep for what is forbidden"
        if problem.dropout:
            return "dropout would have to draw the same weights again in the backward pass"
        return why_not_by_hand(problem)

    def declines(self, problem: Problem) -> str | None:
        entries = max(1, problem.batch[:-1].numel())
        if problem.pairs <= FEW * entries and problem.pairs <= MANY:
            return f"the whole table has only {problem.pairs} scores"
        return None

    def run(self, problem: Problem) -> Tensor:
        normalizer, place = problem.normalizer, problem.visibility
        job, prepare, tensors = self._job(problem)
        differentiated = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        if not normalizer.online:
            out = RowAttention.apply(job, *tensors)  # type: ignore[no-untyped-call]
            statistic = None
        elif differentiated:
            out, statistic = TiledAttention.apply(job, prepare, *tensors)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                out, statistic = run(job, prepare, Operands.of(job, tensors))
        out = out.reshape(*problem.batch, *out.shape[-2:])
        if statistic is not None:
            remainder = normalizer.remainder(statistic.reshape(*problem.batch, -1))
            out = out if remainder is None else out * remainder.unsqueeze(-1)
        out = out.to(problem.q.dtype)
        sees = place.query_sees
        return out if sees is None else zero_where_not(sees, out)

    def _job(self, problem: Problem) -> tuple[Job, Callable[[Job, Operands], Prepared], tuple[Tensor | None, ...]]:
        normalizer, place, kernel, batch = problem.normalizer, problem.visibility, problem.kernel, problem.batch
        q, k, v = (x.to(problem.wide) for x in problem.hide())
        if problem.groups > 1:
            # A kernel may hold something for each head of the queries, and meets as many heads of keys.
            k = k.repeat_interleave(problem.groups, dim=-3)
        query, key = kernel.encode(
            q, k, place.query_position, place.key_position, up_to_row_shift=normalizer.shift_invariant
        )
        heads = batch[-1] if batch else 1
        wide = _widest(v.dtype, *leaves(query), *leaves(key))
        # Both with all heads, so that no tile of one has to be stretched to the other's; this copies nothing.
        query, key = (
            rebuild(encoding, [four(_widened(x, wide), batch).expand(-1, heads, -1, -1) for x in leaves(encoding)])
            for encoding in (query, key)
        )
        visible = place.visible if normalizer.counts_keys else None
        # Only the shape and dtype of the second are read; q may have fewer heads than a value for each asks for.
        like = q.new_empty(()).expand(*batch, place.queries, 1)
        factor, shift = normalizer.factor(visible, like), normalizer.shift(visible, like)
        with torch.no_grad():
            own = kernel.tiles(_bare(query), _bare(key))
        parameters = list(kernel.parameters()) if own is None or own.form.beside else []
        if not normalizer.online:
            own, parameters = None, list(Row(kernel, normalizer).parameters())
        bounds = limits(place)
        compiles = self.compiles(problem)
        with torch.no_grad():
            alike = own is not None or (heads_alike(kernel, query, key, heads) and normalizer.online)
        rows, keys, together = self._sizes(problem, alike, heads)
        # A parameter in a wider type makes the scores, and with them all that follows, as wide.
        wide = _widest(wide, *parameters)
        v, bias = v.to(wide), place.bias
        operands: tuple[Tensor | None, ...] = (
            four(v, batch),
            None if bias is None else _pairs(bias.to(wide), batch),
            _pairs(factor.to(wide), batch) if isinstance(factor, Tensor) else None,
            _pairs(shift.to(wide), batch) if isinstance(shift, Tensor) else None,
            *leaves(query), *leaves(key), *parameters,
        )  # fmt: skip
        forward, backward = _tile.forward, _tile.backward
        if compiles:
            kind = repr(own.form) if own is not None else repr(kernel)
            name = f"the tiles of {kind} under {normalizer!r}"
            forward, backward = (_compiled.built(function, name) for function in (forward, backward))
        job = Job(
            kernel=kernel, normalizer=normalizer,
            batch=batch[:-1].numel(), heads=heads, queries=place.queries, keys=place.keys,
            plan=schedule(place, bounds, rows, keys),
            limits=None if bounds is None else _placed(bounds, batch),
            allowed=_pairs(place.mask, batch) if place.mask is not None and bias is None else None,
            factor=1.0 if isinstance(factor, Tensor) else factor,
            shift=0.0 if isinstance(shift, Tensor) else shift,
            query_tree=_bare(query), key_tree=_bare(key), query_leaves=len(leaves(query)), key_leaves=len(leaves(key)),
            together=together, forward=forward, backward=backward,
        )  # fmt: skip
        return job, (_from_match if own is None else _FromForm(own)), operands

    def compiles(self, problem: Problem) -> bool:
        """Whether torch.compile builds the arithmetic of the tiles."""
        if not problem.normalizer.online or self.compile is False or _compiled.missing() is not None:
            return False
        return self.compile is True or problem.pairs >= ENOUGH

    def _sizes(self, problem: Problem, alike: bool, heads: int) -> tuple[int, int, int]:
        """The most queries, keys and heads that go into one tile."""
        place, budget = problem.visibility, self.queries * self.keys
        if not problem.normalizer.online:
            together = 1 if alike else heads
            return max(1, min(self.queries, budget // (max(1, place.keys) * together))), max(1, place.keys), together
        if not alike:
            # All heads at once, so fewer tokens of each.
            keys = min(self.keys, max(1, math.isqrt(8 * budget // heads)))
            return max(1, min(self.queries, budget // (keys * heads))), keys, heads
        rows, keys = min(self.queries, place.queries), min(self.keys, place.keys)
        return rows, keys, max(1, min(heads, budget // (rows * keys)))

    def cost(self, problem: Problem) -> Cost:
        place, size = problem.visibility, torch.finfo(problem.wide).bits // 8
        share = 1.0
        bounds = limits(place)
        if bounds is not None:
            plan = schedule(place, bounds, self.queries, self.keys)
            met = sum((rows.stop - rows.start) * (span.stop - span.start) for rows in plan for span in rows.spans)
            share = met / max(1, place.queries * place.keys)
        # Encodings and output in the wider type, the rows' statistic, and three tables of one tile.
        rows = problem.batch.numel() * place.queries
        held = problem.q.numel() + problem.k.numel() + problem.v.numel() + rows * (problem.v.shape[-1] + 1)
        tile = min(self.queries * self.keys, max(1, problem.pairs))
        return Cost(product_flops(problem, int(problem.pairs * share)), traffic(problem), (held + 3 * tile) * size)

    def reason(self, problem: Problem) -> str:
        how = "compiled" if self.compiles(problem) else "as plain operations"
        why = _compiled.missing()
        if not problem.normalizer.online:
            return f"whole rows, a few queries at a time: {type(problem.normalizer).__name__} needs its row"
        if why is not None and self.compile is None and problem.pairs >= ENOUGH:
            how += f" ({why})"
        return f"keys stream past tiles of queries, {how}"


def _widest(dtype: torch.dtype, *tensors: Tensor) -> torch.dtype:
    return functools.reduce(torch.promote_types, [x.dtype for x in tensors if x.is_floating_point()], dtype)


def _widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _bare(encoding: Encoding) -> Encoding:
    return rebuild(encoding, [x.detach() for x in leaves(encoding)])


def _pairs(x: Tensor, batch: torch.Size) -> Tensor:
    """x, broadcastable to (…, n, m), as (batch | 1, heads | 1, n | 1, m | 1)."""
    return four(x[(None,) * max(0, 2 - x.dim())], batch)


def _placed(bounds: Limits, batch: torch.Size) -> Limits:
    first, last, position = (None if x is None else four(x, batch) for x in bounds)
    assert position is not None
    return Limits(first, last, position)


def _from_match(job: Job, operands: Operands) -> Prepared:
    return Prepared(
        MatchForm(job.kernel), operands.query, operands.key, job.query_tree, job.key_tree, operands.parameters
    )


class _FromForm:
    """Asks a kernel for its form once more when its encodings are no longer at hand; the first time it has it already.

    Nothing is kept in between: a backward pass may come much later.
    """

    def __init__(self, own: Tiles) -> None:
        self.own: Tiles | None = own

    def __call__(self, job: Job, operands: Operands) -> Prepared:
        own, self.own = self.own, None
        if own is None:
            own = job.kernel.tiles(rebuild(job.query_tree, operands.query), rebuild(job.key_tree, operands.key))
            assert own is not None
        beside = operands.parameters if own.form.beside else None
        return Prepared(own.form, leaves(own.query), leaves(own.key), own.query, own.key, beside)
