"""Two operations that a compiler takes as they stand: a product of tiles, and a tile that has to be in memory.

They are for code that writes its own derivative: none is recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_library: Any = torch.library.Library("matchkernel", "DEF")  # type: ignore[no-untyped-call]
_library.define("products(Tensor a, Tensor b) -> Tensor")
_library.define("settled(Tensor x) -> Tensor")
_mkldnn: Any = torch.backends.mkldnn
_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if _mkldnn.is_available() else None


def products(a: Tensor, b: Tensor) -> Tensor:
    """a (g, i, c), b (g, j, c) → a bᵀ (g, i, j): the inner product of each row of a with each row of b.

    For float32 on a CPU this is oneDNN's product, twice as fast as the other on some machines and as fast on the rest.
    The first argument is read by rows, so put a small transposed one there rather than a large one.
    """
    result: Tensor = torch.ops.matchkernel.products(a, b)
    return result


def settled(x: Tensor) -> Tensor:
    """A contiguous copy of x, which a compiler may not fold into the loops that read it.

    Left to itself it would compute x again, exponentials and all, in each of the many places where a tile is read.
    """
    result: Tensor = torch.ops.matchkernel.settled(x)
    return result


def product(a: Tensor, b: Tensor, beside: Tensor | None = None) -> Tensor:
    """a (i, c), b (j, c) → a bᵀ (i, j), plus `beside` (j,) in every row: the same for one pair, as a plain function."""
    if _linear is None or a.dtype != torch.float32 or a.device.type != "cpu" or 0 in (*a.shape, *b.shape):
        return a @ b.mT if beside is None else torch.addmm(beside, a, b.mT)
    result: Tensor = _linear(a.contiguous(), b, beside, "none", [], "")
    return result


def _products(a: Tensor, b: Tensor) -> Tensor:
    return product(a[0], b[0]).unsqueeze(0) if len(a) == len(b) == 1 else a @ b.mT


def _shape(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(max(a.shape[0], b.shape[0]), a.shape[1], b.shape[1])


_library.impl("settled", lambda x: x.clone(memory_format=torch.contiguous_format), "CompositeExplicitAutograd")
_library.impl("settled", lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device), "Meta")
_library.impl("products", _products, "CompositeExplicitAutograd")
_library.impl("products", _shape, "Meta")
