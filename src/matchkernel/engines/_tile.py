"""The arithmetic of one tile, forward and backward, which a compiler builds and which runs as well as it stands."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._opaque import products
from ..kernels.encoding import Encoding
from ..kernels.tiles import TileForm
from ..normalizers import Normalizer
from ..normalizers.base import State
from ._schedule import Limits


class Extras(NamedTuple):
    """What happens to a tile's scores before they are weighed: factor · score + bias + shift, −inf where forbidden.

    factor and shift (g | 1, i | 1, 1) or numbers, bias (g | 1, i | 1, j | 1), allowed the same with booleans.
    """

    factor: Tensor | float
    shift: Tensor | float
    bias: Tensor | None
    allowed: Tensor | None
    limits: Limits | None


def adjust(scores: Tensor, extras: Extras) -> Tensor:
    """The scores that a normaliser is given."""
    if isinstance(extras.factor, Tensor) or extras.factor != 1.0:
        scores = scores * extras.factor
    if extras.bias is not None:
        # A score that is not finite must not come back from where a mask of numbers forbids it.
        scores = torch.where(extras.bias == float("-inf"), float("-inf"), scores + extras.bias)
    if isinstance(extras.shift, Tensor) or extras.shift != 0.0:
        scores = scores + extras.shift
    if extras.allowed is not None:
        scores = torch.where(extras.allowed, scores, float("-inf"))
    if extras.limits is not None:
        first, last, position = extras.limits
        if first is not None:
            scores = torch.where(position >= first, scores, float("-inf"))
        if last is not None:
            scores = torch.where(position <= last, scores, float("-inf"))
    return scores


def forward(
    form: TileForm,
    normalizer: Normalizer,
    query: Encoding,
    key: Encoding,
    v: Tensor,
    extras: Extras,
    state: State,
    accumulated: Tensor | None,
) -> tuple[State, Tensor]:
    """One more tile of keys: the rows' state, and the sum of weights times values."""
    state, weights, carry = normalizer.absorb(state, adjust(form.scores(query, key).to(v.dtype), extras))
    new = products(weights, v.mT)
    if accumulated is None:
        return state, new
    return state, new + (accumulated if carry is None else accumulated * carry.unsqueeze(-1))


class Gradients(NamedTuple):
    """A tile's share of every gradient; `v` is transposed, (g, d_v, j)."""

    query: Encoding
    key: Encoding
    v: Tensor
    factor: Tensor | None
    shift: Tensor | None
    bias: Tensor | None


def backward(
    form: TileForm,
    normalizer: Normalizer,
    query: Encoding,
    key: Encoding,
    v: Tensor,
    extras: Extras,
    statistic: Tensor,
    row: Tensor,
    grad: Tensor,
    wanted: tuple[bool, bool, bool],
) -> Gradients:
    """The gradients of one tile, whose weights come again from the rows' statistic.

    row (g, i, 1) is what the normaliser's `score_gradient` asks for; `wanted` says whether factor, shift and bias need
    a gradient.
    """
    raw = form.scores(query, key).to(v.dtype)
    weights = normalizer.again(adjust(raw, extras), statistic)
    of_scores = normalizer.score_gradient(weights, products(grad, v), row)
    of_v = products(grad.mT, weights.mT)
    factor, shift, bias = wanted
    of_factor = (of_scores * torch.where(weights > 0, raw, 0.0)).sum(-1, keepdim=True) if factor else None
    of_shift = of_scores.sum(-1, keepdim=True) if shift else None
    of_bias = of_scores.sum_to_size(extras.bias.shape) if bias and extras.bias is not None else None
    if isinstance(extras.factor, Tensor) or extras.factor != 1.0:
        of_scores = of_scores * extras.factor
    of_query, of_key = form.pull(query, key, of_scores)
    return Gradients(of_query, of_key, of_v, of_factor, of_shift, of_bias)
