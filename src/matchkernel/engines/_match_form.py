"""The form of a kernel that ships none: its own `match`, differentiated automatically."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.base import MatchKernel
from ..kernels.encoding import Encoding, leaves
from ..kernels.tiles import TileForm
from ._encoding import rebuild


class _Match(nn.Module):
    def __init__(self, kernel: MatchKernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, query: Encoding, key: Encoding) -> Tensor:
        return self.kernel.match(query, key)


class MatchForm(TileForm):
    """`match` as it stands. It may hold parameters for each head, so it is given all heads; the kernel's parameters
    ride beside the query's tile and get their gradients there."""

    def __init__(self, kernel: MatchKernel) -> None:
        self.match = _Match(kernel)
        self.names = tuple(name for name, _ in self.match.named_parameters())

    def scores(self, query: Encoding, key: Encoding) -> Tensor:
        tile, parameters = query
        bound = dict(zip(self.names, parameters, strict=True))
        return torch.func.functional_call(self.match, bound, (tile, key))  # type: ignore[no-any-return]

    def pull(self, query: Encoding, key: Encoding, grad: Tensor) -> tuple[Encoding, Encoding]:
        of_query, of_key = leaves(query), leaves(key)

        def run(*tensors: Tensor) -> Tensor:
            return self.scores(rebuild(query, tensors[: len(of_query)]), rebuild(key, tensors[len(of_query) :]))

        vjp: Any = torch.func.vjp
        scores, pull = vjp(run, *of_query, *of_key)
        # A match may return fewer heads than there are: its one row of scores stands for all of them.
        grads = pull(grad.sum_to_size(scores.shape).to(scores.dtype))
        return rebuild(query, grads[: len(of_query)]), rebuild(key, grads[len(of_query) :])
