"""The additive score of a tile, by exponentials that are taken once per token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._opaque import settled
from .chunks import chunks
from .encoding import Encoding
from .lanes import from_panels, in_panels
from .tiles import TileForm, Tiles


def lift(a: Tensor, v: Tensor, b: Tensor) -> Tiles | None:
    """Σ_c v_c tanh(a_ic + b_jc) in exponential form, or None where the exponentials would leave the dtype's range.

    tanh(a + b) = 1 − 2 / (1 + e^{2a} e^{2b}). A sum that has passed `saturation` in size changes tanh no more, so a can
    be cut off where that holds for every b; before, both are moved by one number per channel so that b lies around 0.
    """
    eps, largest = torch.finfo(a.dtype).eps, torch.finfo(a.dtype).max
    saturation = math.log(8.0 / eps) / 2.0 + 0.1
    lowest, highest = b.amin(-2, keepdim=True), b.amax(-2, keepdim=True)
    middle, half = (highest + lowest) / 2.0, (highest - lowest) / 2.0
    # A NaN fails every comparison, and takes the direct form with it.
    if not bool((half + saturation <= math.log(largest) / 2.0 - 1.0).all()):
        return None
    a = torch.clamp(a + middle, -half - saturation, half + saturation)
    reach = (a.abs().amax(-2, keepdim=True) + half).amax()
    paired = a.shape[-1] % 2 == 0 and bool(2.0 * (2.0 * reach + 1.0) < math.log(largest))
    return Tiles(ExponentialForm(paired), ((2.0 * a).exp(), v), (2.0 * (b - middle)).exp())


class ExponentialForm(TileForm):
    """Σ_c v_c (1 − 2 r_c), r_c = 1 / (1 + x_c y_c), for x = e^{2a} beside v, and y = e^{2b}.

    `paired`: two channels share one division, v₁/t₁ + v₂/t₂ = (v₁t₂ + v₂t₁) / t₁t₂, where the product stays in range.
    """

    def __init__(self, paired: bool) -> None:
        self.paired = paired

    def __repr__(self) -> str:
        return f"ExponentialForm(paired={self.paired})"

    def scores(self, query: Encoding, key: Encoding) -> Tensor:
        x, v, y = _parts(query, key)
        if torch.compiler.is_compiling():
            total = _in_lanes(x, v, y, self.paired)
        else:
            total = _in_chunks(x, v, y)
        return v.sum(-1, keepdim=True) - 2.0 * total

    def pull(self, query: Encoding, key: Encoding, grad: Tensor) -> tuple[Encoding, Encoding]:
        x, v, y = _parts(query, key)
        # d tanh = 4 r (1 − r), and d score / d v = 1 − 2r.
        grad = settled(grad)
        first, second = _sums(x, y, grad)
        of_a = 4.0 * v * (first - second)
        of_v = grad.sum(-1, keepdim=True) - 2.0 * first
        first, second = _sums(y, x, settled(grad.mT))
        return (of_a, of_v), 4.0 * v * (first - second)


def _parts(query: Encoding, key: Encoding) -> tuple[Tensor, Tensor, Tensor]:
    assert isinstance(query, tuple) and isinstance(key, Tensor)
    x, v = query
    assert isinstance(x, Tensor) and isinstance(v, Tensor)
    return x, v[:, :1], key


def _in_lanes(x: Tensor, v: Tensor, y: Tensor, paired: bool) -> Tensor:
    """Σ_c v_c / (1 + x_ic y_jc)."""
    keys, y = y.shape[-2], in_panels(y)
    x, v = x[:, :, None, :, None], v[:, :, None, :, None]
    if not paired:
        return from_panels((v / (1.0 + x * y)).sum(-2), keys)
    half = x.shape[3] // 2
    t, u = 1.0 + x[..., :half, :] * y[..., :half, :], 1.0 + x[..., half:, :] * y[..., half:, :]
    return from_panels(((v[..., :half, :] * u + v[..., half:, :] * t) / (t * u)).sum(-2), keys)


def _in_chunks(x: Tensor, v: Tensor, y: Tensor) -> Tensor:
    total = x.new_empty(x.shape[0], x.shape[1], y.shape[-2])
    for rows, r in chunks(x, y):
        torch.mul(x[:, rows].unsqueeze(-2), y.unsqueeze(-3), out=r).add_(1.0).reciprocal_()
        total[:, rows] = (r.flatten(1, 2) @ v.mT).reshape(r.shape[:3])
    return total


def _sums(x: Tensor, y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_j g_ij r_ijc and Σ_j g_ij r_ijc², each (g, i, c)."""
    if torch.compiler.is_compiling():
        r = 1.0 / (1.0 + x.unsqueeze(-2) * y.unsqueeze(-3))
        weighted = grad.unsqueeze(-1) * r
        return weighted.sum(-2), (weighted * r).sum(-2)
    first, second = (x.new_empty(grad.shape[0], *x.shape[1:]) for _ in range(2))
    for rows, r in chunks(x, y):
        torch.mul(x[:, rows].unsqueeze(-2), y.unsqueeze(-3), out=r).add_(1.0).reciprocal_()
        row = grad[:, rows].unsqueeze(-2)
        first[:, rows] = (row @ r).squeeze(-2)
        second[:, rows] = (row @ r.square_()).squeeze(-2)
    return first, second
