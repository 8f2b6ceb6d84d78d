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
    """`match` as it stands; the kernel's parameters ride beside the query's tile and get their gradients there.

    It may hold something for each head, so it is given all heads unless `heads_alike` finds that they are alike.
    """

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


def heads_alike(kernel: MatchKernel, query: Encoding, key: Encoding, heads: int) -> bool:
    """Whether `match` may be handed one head at a time: it holds no parameter or buffer, and a sample agrees.

    query and key are encodings (batch, heads | 1, tokens, ·). The sample is the first and the last token of either:
    a match that tells heads apart without holding anything, by counting them, gives other scores for one than for all.
    """
    if heads == 1:
        return True
    if any(True for _ in kernel.parameters()) or any(True for _ in kernel.buffers()):
        return False
    ends = [rebuild(x, [_ends(leaf) for leaf in leaves(x)]) for x in (query, key)]
    together = kernel.match(*ends)
    for head in range(heads):
        one = [rebuild(x, [leaf if leaf.shape[0] == 1 else leaf[head : head + 1] for leaf in leaves(x)]) for x in ends]
        alone = kernel.match(*one)
        if alone.shape != (1, *together.shape[-2:]):
            return False
        whole = together if together.shape[0] == 1 else together[head : head + 1]
        if not torch.allclose(alone, whole, rtol=1e-3, atol=1e-5, equal_nan=True):
            return False
    return True


def _ends(x: Tensor) -> Tensor:
    """The first and the last token of x (batch, heads | 1, tokens, ·), of its first batch."""
    return x[0, :, :: max(1, x.shape[2] - 1)]
