"""A function of each entry of a matrix product, on a tile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._opaque import products
from .encoding import Encoding, leaves
from .tiles import TileForm


class _Combine(nn.Module):
    def __init__(self, kernel: nn.Module) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, *entries: Tensor) -> Tensor:
        combine: Any = self.kernel.combine
        scores: Tensor = combine(*entries)
        return scores


class CombineForm(TileForm):
    """combine(q·k, |q|², |k|²) by one product forward and two backward; only the function of an entry is differentiated
    automatically."""

    beside = True

    def __init__(self, kernel: nn.Module) -> None:
        self.combine = _Combine(kernel)
        self.names = tuple(name for name, _ in self.combine.named_parameters())

    def __repr__(self) -> str:
        return f"CombineForm({self.combine.kernel!r})"

    def scores(self, query: Encoding, key: Encoding) -> Tensor:
        (q, of_query), (k, of_key), parameters = _parts(query, key)
        return self._run(products(q, k), of_query, of_key.mT, *parameters)

    def pull(self, query: Encoding, key: Encoding, grad: Tensor) -> tuple[Encoding, Encoding]:
        (q, of_query), (k, of_key), parameters = _parts(query, key)
        vjp: Any = torch.func.vjp
        _, pull = vjp(self._run, products(q, k), of_query, of_key.mT, *parameters)
        of_product, rows, columns, *rest = pull(grad)
        of_q, of_k = products(of_product, k.mT), products(q.mT, of_product.mT).mT
        return ((of_q, rows), tuple(rest)), (of_k, columns.mT)

    def _run(self, product: Tensor, of_query: Tensor, of_key: Tensor, *parameters: Tensor) -> Tensor:
        bound = dict(zip(self.names, parameters, strict=True))
        scores: Tensor = torch.func.functional_call(self.combine, bound, (product, of_query, of_key))
        if scores.shape != product.shape:
            raise ValueError(
                f"{type(self.combine.kernel).__name__}.combine returned shape {tuple(scores.shape)} for a product of "
                f"shape {tuple(product.shape)}, expected the same: what it learns must be numbers that all heads share"
            )
        return scores


def _parts(query: Encoding, key: Encoding) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    own, parameters = query
    q, of_query = leaves(own)
    k, of_key = leaves(key)
    return (q, of_query), (k, of_key), tuple(leaves(parameters))
