"""Sums over features in units of their own: differentiable to any order, and safe for log scales of any size."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

NOTHING = float("-inf")


class Operands(NamedTuple):
    """Features of queries and keys, and what is summed; leading dimensions (b | 1, h | 1), all in one dtype.

    κ_ij = (query_i · key_j) · e^log_scale_j, in units of each query's own scale. `rest` is the logarithm of what stands
    beside the keys in a row's sum, in the same units, or None.
    """

    query: Tensor
    """(…, n, f)."""
    key: Tensor
    """(…, m, f), zeros where a key is hidden."""
    log_scale: Tensor
    """(…, m, 1), −inf where a key is hidden."""
    value: Tensor
    """(…, m, d_v)."""
    rest: Tensor | None
    """(…, n, 1)."""

    @staticmethod
    def of(
        query: Tensor,
        of_query: Tensor,
        key: Tensor,
        of_key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        one: Tensor | None,
    ) -> Operands:  # fmt: skip
        """From features and their log scales, what is added to those of the keys, and the logarithm of what stands
        beside the keys; all (b | 1, h | 1, tokens | 1, ·)."""
        if bias is not None:
            hidden = bias.detach() == NOTHING
            of_key = torch.where(hidden, NOTHING, of_key + torch.where(hidden, 0.0, bias))
            key = torch.where(hidden, 0.0, key)
        rest = None if one is None else one - of_query
        dtype = value.dtype
        for x in (query, key, of_key, *([] if rest is None else [rest])):
            dtype = torch.promote_types(dtype, x.dtype)
        return Operands(
            query.to(dtype), key.to(dtype), of_key.to(dtype), value.to(dtype), None if rest is None else rest.to(dtype)
        )

    def rows(self, tokens: slice) -> Operands:
        """The same for some of the queries."""
        rest = None if self.rest is None else self.rest[..., tokens, :]
        return self._replace(query=self.query[..., tokens, :], rest=rest)

    def keys(self, tokens: slice) -> Operands:
        """The same for some of the keys."""
        return self._replace(
            key=self.key[..., tokens, :], log_scale=self.log_scale[..., tokens, :], value=self.value[..., tokens, :]
        )


class State(NamedTuple):
    """What is kept of all keys so far: Σ_j key_jf e^(log_scale_j − unit_f) [v_j, 1], for each feature f.

    A feature's unit is the largest logarithm of what it has summed, so that a key far above all others does not drown
    the features that it does not have. No key sets it before it is summed.
    """

    unit: Tensor
    """(…, f, 1), −inf before any key."""
    total: Tensor
    """(…, f, d_v + 1)."""


def attend(operands: Operands, *, causal: bool, chunk: int, positive: bool) -> Tensor:
    """Σ_j κ_ij v_j / Σ_j κ_ij (…, n, d_v), zeros where the sum is 0; causal order is aligned to the end.

    `positive`: a row whose products have all left the range of their type is weighed by log_scale alone, as scores are.
    """
    n, m = operands.query.shape[-2], operands.key.shape[-2]
    pieces: list[Tensor] = []
    if causal:
        blind = max(0, n - m)
        if blind:
            pieces.append(_close(operands.rows(slice(0, blind)), None, None))
        state = _absorb(None, operands.keys(slice(0, m - n))) if m > n else None
        for first in range(0, min(n, m), chunk):
            size = min(chunk, min(n, m) - first)
            here = operands.rows(slice(n - min(n, m) + first, n - min(n, m) + first + size))
            here = here.keys(slice(max(0, m - n) + first, max(0, m - n) + first + size))
            pieces.append(_close(here, state, _products(here)))
            if first + size < min(n, m):
                state = _absorb(state, here)
    else:
        state = _absorb(None, operands)
        pieces = [_close(operands.rows(slice(i, i + 1024)), state, None) for i in range(0, n, 1024)]
    sums = torch.cat(pieces, dim=-2)
    total = sums[..., -1:]
    empty = total == 0.0
    out = torch.where(empty, 0.0, sums[..., :-1] / torch.where(empty, 1.0, total))
    if positive and operands.rest is None and bool(empty.any()):
        alike = operands._replace(query=_ones(operands.query), key=_ones(operands.key))
        out = torch.where(empty, attend(alike, causal=causal, chunk=chunk, positive=False), out)
    return out


def _products(here: Operands) -> tuple[Tensor, Tensor]:
    """Products and scales of a square of queries and keys, 0 and −inf above the diagonal."""
    product = here.query @ here.key.mT
    below = torch.ones(product.shape[-2:], dtype=torch.bool, device=product.device).tril()
    return torch.where(below, product, 0.0), torch.where(below, here.log_scale.mT, NOTHING)


def _close(here: Operands, state: State | None, square: tuple[Tensor, Tensor] | None) -> Tensor:
    """Numerators and sum (…, n, d_v + 1) of some rows, in units of their own, from earlier keys and a square of new."""
    tops = [here.query.new_full((*here.query.shape[:-1], 1), NOTHING)]
    with torch.no_grad():
        if state is not None:
            tops.append((here.query.abs().log() + state.unit.mT).amax(dim=-1, keepdim=True))
        if square is not None:
            tops.append((square[0].abs().log() + square[1]).amax(dim=-1, keepdim=True))
        if here.rest is not None:
            tops.append(here.rest)
        top = _finite(_largest(tops))
    width = here.value.shape[-1]
    sums = here.value.new_zeros(*top.shape[:-1], width + 1)
    if state is not None:
        sums = sums + (here.query * _power(state.unit.mT - top)) @ state.total
    if square is not None:
        sums = sums + (square[0] * _power(square[1] - top)) @ _with_one(here.value)
    if here.rest is not None:
        sums = sums + torch.nn.functional.pad((here.rest - top).exp(), (width, 0))
    return sums


def _absorb(before: State | None, here: Operands) -> State:
    """The state after some more keys."""
    with torch.no_grad():
        unit = (here.key.abs().log() + here.log_scale).amax(dim=-2, keepdim=True).mT
        if before is not None:
            unit = torch.maximum(before.unit, unit)
        base = _finite(unit)
    total = (here.key * _power(here.log_scale - base.mT)).mT @ _with_one(here.value)
    if before is not None:
        total = total + before.total * (before.unit - base).exp()
    return State(unit, total)


def _power(exponent: Tensor) -> Tensor:
    """e^exponent, finite: only what multiplies a 0 is so far above its unit, and must not be 0 · ∞."""
    return exponent.clamp_max(-math.log(torch.finfo(exponent.dtype).tiny)).exp()


def _finite(unit: Tensor) -> Tensor:
    return torch.where(unit == NOTHING, 0.0, unit)


def _largest(tops: list[Tensor]) -> Tensor:
    largest = tops[0]
    for top in tops[1:]:
        largest = torch.maximum(largest, top)
    return largest


def _with_one(value: Tensor) -> Tensor:
    return torch.cat([value, value.new_ones(()).expand(*value.shape[:-1], 1)], dim=-1)


def _ones(features: Tensor) -> Tensor:
    return features.new_ones(()).expand(*features.shape[:-1], 1)
