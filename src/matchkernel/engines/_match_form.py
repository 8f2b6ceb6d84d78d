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
from .problem import check_scores


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
    """Try `match` on a few tokens of either; whether it may be handed one head at a time.

    query and key are encodings (batch, heads, tokens, ·). It may when it holds no parameter or buffer, and the sample
    agrees: a match that tells heads apart without holding anything, by counting them, gives other scores for one.
    Raises what `check_scores` does, and ValueError where a gradient would be lost on the way.
    """
    # Unequal numbers, where there are as many: a table that lies on its side shows.
    ends = [rebuild(x, [_few(leaf, most) for leaf in leaves(x)]) for x, most in ((query, 2), (key, 3))]
    together = _sampled(kernel, ends)
    check_scores(together, kernel, (1, heads, *(leaves(x)[0].shape[-2] for x in ends)))
    if heads == 1:
        return True
    if together.dim() != 3 or any(True for _ in kernel.parameters()) or any(True for _ in kernel.buffers()):
        return False
    for head in range(heads):
        alone = kernel.match(*(rebuild(x, [leaf[head : head + 1] for leaf in leaves(x)]) for x in ends))
        if alone.shape != (1, *together.shape[-2:]):
            return False
        whole = together if together.shape[0] == 1 else together[head : head + 1]
        if not torch.allclose(alone, whole, rtol=1e-3, atol=1e-5, equal_nan=True):
            return False
    return True


def _sampled(kernel: MatchKernel, ends: list[Encoding]) -> Tensor:
    with torch.enable_grad():
        scores = match(kernel, [x.detach() for x in kernel.parameters()], *ends)
    if isinstance(scores, Tensor) and scores.requires_grad:
        raise ValueError(
            f"{type(kernel).__name__}.match uses a tensor that needs a gradient and is no parameter of the kernel, so "
            'the gradient would be lost: make it an nn.Parameter of the kernel, or ask for engine="reference"'
        )
    return scores.detach() if isinstance(scores, Tensor) else scores


def _few(x: Tensor, most: int) -> Tensor:
    """`most` tokens of x (batch, heads, tokens, ·) from its first batch, the first and the last among them, or one."""
    tokens = x.shape[2]
    chosen = [i * (tokens - 1) // (most - 1) for i in range(most)] if tokens >= most else [0]
    return x[0][:, chosen].detach()
