"""What a layer keeps of the tokens that it has read, so that the next ones need not read them again."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(eq=False, repr=False)
class KeyValueCache:
    """The keys and values of the tokens so far, for one `MultiHeadAttention` and one batch. Start with an empty one.

    `keys` (…, kv_heads, m, head_dim) and `values` (…, kv_heads, m, value_dim) are the layer's projections, before any
    kernel has encoded them: token j stands at position j, and a kernel that reads positions reads them again at each
    call. None while empty. `len(cache)` is m. Each layer needs a cache of its own, and refuses one that another has
    filled.

    Cost: kv_heads · (head_dim + value_dim) numbers for each token of each sequence, in the layer's dtype: with 2
    kv_heads in the place of 8, a quarter. Adding tokens makes new tensors, one copy of all that is held, and never
    writes to the old ones; so `KeyValueCache(cache.keys, cache.values)` branches for nothing, and
    `KeyValueCache(cache.keys[..., :m, :], cache.values[..., :m, :])` goes back to the first m tokens.
    With gradients on, it holds their graph too: decode under `torch.no_grad()`.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    layer: nn.Module | None = field(default=None, repr=False)
    """The one that filled it."""

    def __len__(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]

    def __repr__(self) -> str:
        shapes = [None if x is None else tuple(x.shape) for x in (self.keys, self.values)]
        return f"KeyValueCache(keys={shapes[0]}, values={shapes[1]})"

    def joined(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What is held and then these, (…, m + n, ·); the cache itself stays as it is.

        ValueError or TypeError for tokens of another batch, width, number of heads, dtype or device.
        """
        return _append("keys", self.keys, keys), _append("values", self.values, values)


def _append(name: str, held: Tensor | None, new: Tensor) -> Tensor:
    if held is None:
        return new
    if held.dtype != new.dtype:
        raise TypeError(f"cache holds {name} of dtype {held.dtype}, and the new ones have {new.dtype}: expected one")
    if held.device != new.device:
        raise ValueError(f"cache holds {name} on {held.device}, and the new ones are on {new.device}: expected one")
    if (held.shape[:-2], held.shape[-1]) != (new.shape[:-2], new.shape[-1]):
        raise ValueError(
            f"cache holds {name} of shape {tuple(held.shape)}, and the new ones have {tuple(new.shape)}: "
            "expected the same batch, heads and width; only the tokens, at dimension -2, may differ"
        )
    return torch.cat([held, new], dim=-2)
