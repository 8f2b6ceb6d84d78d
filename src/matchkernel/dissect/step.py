"""The attention step of a trained model, open: what stands in it, layer by layer and head by head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypedDict, TypeVar

import torch
from torch import Tensor

from .. import attention
from ..kernels import MatchKernel
from ..normalizers import Normalizer
from .tokens import Tokens

Place: TypeAlias = int | tuple[int, int]
"""A layer, or one head of it: (layer, head)."""
Intervene: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
Mask: TypeAlias = Tensor | Callable[[Tokens], Tensor]
Window: TypeAlias = int | tuple[int | None, int | None] | None
Part = TypeVar("Part", MatchKernel, Normalizer)


@dataclass(frozen=True, eq=False)
class Step:
    """What happens between the projections and the output of attention, in a model of `layers` × `heads`.

    kernel, normalizer: one for every head of every layer, or a dict whose keys are layers or (layer, head); where both
        name a head the latter wins, and what the dict does not name stays as trained.
    intervene: (layer, q, k, v) -> (q, k, v), called for one text at a time; each is (heads, n, d_head), and stays so.
    mask, causal, window: as in `matchkernel.attend`, in every layer. A mask is a tensor that broadcasts to
        (heads, n, n), or a function from a text's `Tokens` to one.
    """

    layers: int
    heads: int
    kernel: MatchKernel | Mapping[Place, MatchKernel] | None = None
    normalizer: Normalizer | Mapping[Place, Normalizer] | None = None
    intervene: Intervene | None = None
    mask: Mask | None = None
    causal: bool = False
    window: Window = None

    def __post_init__(self) -> None:
        for name, given in (("kernel", self.kernel), ("normalizer", self.normalizer)):
            if isinstance(given, Mapping):
                for place in given:
                    self._check_place(name, place)

    def _check_place(self, name: str, place: object) -> None:
        match place:
            case int(layer) if 0 <= layer < self.layers:
                return
            case (int(layer), int(head)) if 0 <= layer < self.layers and 0 <= head < self.heads:
                return
        raise ValueError(
            f"{name} has the key {place!r}; a key is a layer 0…{self.layers - 1}, "
            f"or a (layer, head) with head 0…{self.heads - 1}"
        )

    def intervened(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (b, heads, n, d_head) as the hook leaves them; it sees one text at a time."""
        if self.intervene is None:
            return q, k, v
        changed = [self.intervene(layer, *text) for text in zip(q, k, v, strict=True)]
        for text in changed:
            shapes = [tuple(part.shape) for part in text]
            if shapes != [tuple(q.shape[1:])] * 3:
                raise ValueError(
                    f"intervene returned shapes {shapes} in layer {layer}; "
                    f"expected q, k, v, each of shape {tuple(q.shape[1:])}"
                )
        queries, keys, values = zip(*changed, strict=True)
        return torch.stack(queries), torch.stack(keys), torch.stack(values)

    def masks(self, texts: list[Tokens], device: torch.device) -> Tensor | None:
        """One mask for texts of equal length, broadcasting to (b, heads, n, n)."""
        if self.mask is None:
            return None
        if isinstance(self.mask, Tensor):
            return self.mask.to(device)
        made = [self.mask(tokens).to(device) for tokens in texts]
        return torch.stack([mask.expand(*(1,) * (3 - mask.ndim), *mask.shape) for mask in made])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """What each head hands on: (b, heads, n, d_head)."""
        return _join([
            (at, attention.attend(q[:, at], k[:, at], v[:, at], kernel, normalizer=normalizer, **permitted))
            for at, kernel, normalizer, permitted in self._shares(layer, mask)
        ])  # fmt: skip

    def scores(self, layer: int, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """(b, heads, n, n), before the normaliser; -inf where not permitted."""
        return _join([
            (at, attention.scores(q[:, at], k[:, at], kernel, **permitted))
            for at, kernel, _, permitted in self._shares(layer, mask)
        ])  # fmt: skip

    def weights(self, layer: int, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """(b, heads, n, n), after the normaliser."""
        return _join([
            (at, attention.weights(q[:, at], k[:, at], kernel, normalizer=normalizer, **permitted))
            for at, kernel, normalizer, permitted in self._shares(layer, mask)
        ])  # fmt: skip

    def _shares(self, layer: int, mask: Tensor | None) -> Iterator[_Share]:
        """The layer's heads, those with the same kernel and normaliser together."""
        together: dict[tuple[int, int], list[int]] = {}
        for head in range(self.heads):
            kernel, normalizer = _pick(self.kernel, layer, head), _pick(self.normalizer, layer, head)
            together.setdefault((id(kernel), id(normalizer)), []).append(head)
        per_head = mask is not None and mask.ndim >= 3 and mask.shape[-3] == self.heads
        for heads in together.values():
            seen = mask[..., heads, :, :] if mask is not None and per_head else mask
            permitted = _Permitted(mask=seen, causal=self.causal, window=self.window)
            yield heads, _pick(self.kernel, layer, heads[0]), _pick(self.normalizer, layer, heads[0]), permitted


class _Permitted(TypedDict):
    mask: Tensor | None
    causal: bool
    window: Window


_Share: TypeAlias = tuple[list[int], MatchKernel | None, Normalizer | None, _Permitted]
"""Some heads of a layer, and what they have in common."""


def _join(parts: list[tuple[list[int], Tensor]]) -> Tensor:
    """Put the results, each with the heads it is for, back in the heads' order."""
    order = [head for heads, _ in parts for head in heads]
    return torch.cat([result for _, result in parts], dim=1)[:, [order.index(head) for head in range(len(order))]]


def _pick(given: Part | Mapping[Place, Part] | None, layer: int, head: int) -> Part | None:
    if isinstance(given, Mapping):
        return given.get((layer, head), given.get(layer))
    return given
