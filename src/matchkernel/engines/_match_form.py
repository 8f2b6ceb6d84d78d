"""The form of a kernel that ships none: its own `match`, differentiated automatically."""

from __future__ import annotations

from collections.abc import Sequence
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


def match(kernel: MatchKernel, parameters: Sequence[Tensor], query: Encoding, key: Encoding) -> Tensor:
    """The kernel's scores with `parameters` in the place of its own, in their order."""
    module = _Match(kernel)
    names = [name for name, _ in module.named_parameters()]
    bound = dict(zip(names, parameters, strict=True))
    return torch.func.functional_call(module, bound, (query, key))  # type: ignore[no-any-return]


class MatchForm(TileForm):
    """`match` as it stands. It may hold parameters for each head, so it is given all heads; the kernel's parameters
    ride beside the query's tile and get their gradients there."""

    beside = True

    def __init__(self, kernel: MatchKernel) -> None:
        self.match = _Match(kernel)
        self.names = tuple(name for name, _ in self.match.named_parameters())

    def scores(self, query: Encoding, key: Encoding) -> Tensor:
        tile, parameters = query
        bound = dict(zip(self.names, parameters, strict=True))
        scores: Tensor = torch.func.functional_call(self.match, bound, (tile, key))
        # A parameter with dimensions of its own in front leaves ones there.
        return scores.reshape(-1, *scores.shape[-2:])

    def pull(self, query: Encoding, key: Encoding, grad: Tensor) -> tuple[Encoding, Encoding]:
        both = (query, key)
        tensors = leaves(both)

        def run(*floats: Tensor) -> Tensor:
            given = iter(floats)
            own = rebuild(both, [next(given) if x.is_floating_point() else x for x in tensors])
            return self.scores(own[0], own[1])

        vjp: Any = torch.func.vjp
        scores, pull = vjp(run, *[x for x in tensors if x.is_floating_point()])
        # A match may return fewer heads than there are: its one row of scores stands for all of them.
        grads = iter(pull(grad.sum_to_size(scores.shape).to(scores.dtype)))
        result = rebuild(both, [next(grads) if x.is_floating_point() else x for x in tensors])
        return result[0], result[1]
