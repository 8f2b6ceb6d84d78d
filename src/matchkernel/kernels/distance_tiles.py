"""Distances of a tile: sums of absolute differences, and functions of the squared distance."""

from __future__ import annotations

import torch
from torch import Tensor

from .._opaque import products, settled
from .chunks import chunks
from .encoding import Encoding
from .lanes import from_panels, in_panels
from .tiles import TileForm


class AbsoluteForm(TileForm):
    """−Σ_c |q_ic − k_jc|."""

    def scores(self, query: Encoding, key: Encoding) -> Tensor:
        assert isinstance(query, Tensor) and isinstance(key, Tensor)
        if not torch.compiler.is_compiling():
            return -torch.cdist(query, key, p=1.0)
        return -from_panels((query[:, :, None, :, None] - in_panels(key)).abs().sum(-2), key.shape[-2])

    def pull(self, query: Encoding, key: Encoding, grad: Tensor) -> tuple[Encoding, Encoding]:
        assert isinstance(query, Tensor) and isinstance(key, Tensor)
        return _signs(query, key, settled(-grad)), _signs(key, query, settled(-grad.mT))


def _signs(x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    """Σ_j g_ij sign(x_ic − y_jc), (g, i, c); the sign of 0 is 0."""
    if torch.compiler.is_compiling():
        # As exact as sign(), and takes half its time in a vector register.
        difference = x.unsqueeze(-2) - y.unsqueeze(-3)
        sign = difference / (difference.abs() + torch.finfo(x.dtype).tiny)
        return (grad.unsqueeze(-1) * sign).sum(-2)
    total = x.new_empty(grad.shape[0], *x.shape[1:])
    for rows, sign in chunks(x, y):
        torch.sub(x[:, rows].unsqueeze(-2), y.unsqueeze(-3), out=sign).sign_()
        total[:, rows] = (grad[:, rows].unsqueeze(-2) @ sign).squeeze(-2)
    return total


class LogarithmForm(TileForm):
    """−α_i log(1 + c_i |q_i − k_j|²): a matrix product, and a function of each entry.

    The query's tile holds q, |q|² (g, i, 1) and, unless α and c are numbers, a column for each; the key's k and |k|².
    """

    def __init__(self, alpha: float | None, c: float | None) -> None:
        self.alpha, self.c = alpha, c

    def __repr__(self) -> str:
        return f"LogarithmForm({self.alpha!r}, {self.c!r})"

    def scores(self, query: Encoding, key: Encoding) -> Tensor:
        alpha, c = self._values(query)
        return -alpha * torch.log(1.0 + c * _squared(query, key))

    def pull(self, query: Encoding, key: Encoding, grad: Tensor) -> tuple[Encoding, Encoding]:
        alpha, c = self._values(query)
        q, k = query[0], key[0]
        assert isinstance(q, Tensor) and isinstance(k, Tensor)
        distance = _squared(query, key)
        steep = grad / (1.0 + c * distance)
        slope = settled(-(alpha * c) * steep)
        of_query = (-2.0 * products(slope, k.mT), slope.sum(-1, keepdim=True))
        of_key = (-2.0 * products(q.mT, slope.mT).mT, slope.sum(-2).unsqueeze(-1))
        if self.alpha is not None:
            return of_query, of_key
        of_alpha = -(grad * torch.log(1.0 + c * distance)).sum(-1, keepdim=True)
        of_c = -(alpha * steep * distance).sum(-1, keepdim=True)
        return (*of_query, of_alpha, of_c), of_key

    def _values(self, query: Encoding) -> tuple[Tensor | float, Tensor | float]:
        if self.alpha is not None and self.c is not None:
            return self.alpha, self.c
        alpha, c = query[2], query[3]
        assert isinstance(alpha, Tensor) and isinstance(c, Tensor)
        return alpha, c


def _squared(query: Encoding, key: Encoding) -> Tensor:
    """|q − k|², not below 0."""
    q, of_query, k, of_key = query[0], query[1], key[0], key[1]
    assert isinstance(q, Tensor) and isinstance(k, Tensor)
    assert isinstance(of_query, Tensor) and isinstance(of_key, Tensor)
    return (of_query + of_key.mT - 2.0 * products(q, k)).clamp_min(0.0)
