"""The inner product of a tile, for kernels that are one."""

from __future__ import annotations

from torch import Tensor

from .._opaque import products
from .encoding import Encoding
from .tiles import TileForm


class ProductForm(TileForm):
    """scale · q kᵀ, by one matrix product forward and two backward."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __repr__(self) -> str:
        return f"ProductForm({self.scale!r})"

    def scores(self, query: Encoding, key: Encoding) -> Tensor:
        assert isinstance(query, Tensor) and isinstance(key, Tensor)
        return self.scale * products(query, key)

    def pull(self, query: Encoding, key: Encoding, grad: Tensor) -> tuple[Encoding, Encoding]:
        assert isinstance(query, Tensor) and isinstance(key, Tensor)
        return self.scale * products(grad, key.mT), self.scale * products(query.mT, grad.mT).mT
