"""The attention step of a trained model, open: what stands in it, layer by layer and head by head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypedDict, TypeVar

import torch
from torch import Tensor

from .. import attention
from ..kernels import Dot, MatchKernel
from ..normalizers import Normalizer
from .architecture import Architecture
from .head import Head
from .tokens import Tokens

Place: TypeAlias = int | tuple[int, int]
"""A layer, or one head of it: (layer, head)."""
Intervene: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
Mask: TypeAlias = Tensor | Callable[[Tokens], Tensor]
Position: TypeAlias = Tensor | Callable[[Tokens], Tensor]
Window: TypeAlias = int | tuple[int | None, int | None] | None
Part = TypeVar("Part", MatchKernel, Normalizer)


class Around(NamedTuple):
    """What is the same in every layer, for texts of equal length."""

    mask: Tensor | None
    """Broadcasts to (b, heads, n, n)."""
    position: Tensor
    """Broadcasts to (b, heads, n): where each token stands, for a rotation."""


@dataclass(frozen=True, eq=False)
class Step:
    """What happens between the projections and the output of attention, in a model of some size.

    kernel, normalizer: one for every head of every layer, or a dict whose keys are layers or (layer, head); where both
        name a head the latter wins, and what the dict does not name stays as trained.
    heads: (layer, head) -> the `Head` whose W_Q, W_K, b_Q, b_K, scale and rotation score there.
    intervene: (layer, q, k, v) -> (q, k, v), called for one text at a time; each is (heads, n, d_head), and stays so.
    mask, causal, window: as in `matchkernel.attend`, in every layer. A mask is a tensor that broadcasts to
        (heads, n, n), or a function from a text's `Tokens` to one.
    position: (n,), or a function from a text's `Tokens` to it: the places a rotation uses, 0 … n−1 by default.
    """

    size: Architecture
    kernel: MatchKernel | Mapping[Place, MatchKernel] | None = None
    normalizer: Normalizer | Mapping[Place, Normalizer] | None = None
    heads: Mapping[tuple[int, int], Head] | None = None
    intervene: Intervene | None = None
    mask: Mask | None = None
    causal: bool = False
    window: Window = None
    position: Position | None = None

    def __post_init__(self) -> None:
        for name, given in (("kernel", self.kernel), ("normalizer", self.normalizer)):
            if isinstance(given, Mapping):
                for place in given:
                    self._check_place(name, place)
        if not isinstance(self.heads or {}, Mapping):
            raise TypeError(f"heads: expected a dict {{(layer, head): Head}}, got {type(self.heads).__name__}")
        for at, head in (self.heads or {}).items():
            self._check_head(at, head)
        for name, made in (("mask", self.mask), ("position", self.position)):
            if not (made is None or isinstance(made, Tensor) or callable(made)):
                raise TypeError(f"{name}: expected a tensor or a function of Tokens, got {type(made).__name__}")
        if not (self.intervene is None or callable(self.intervene)):
            raise TypeError(f"intervene: expected a function, got {type(self.intervene).__name__}")
        for place in getattr(self.intervene, "places", None) or ():
            layer = place if isinstance(place, int) else place[0]
            if layer >= self.size.layers:
                raise IndexError(f"intervene: there is no layer {layer}; layers are 0…{self.size.layers - 1}")

    def _check_place(self, name: str, place: object) -> None:
        layers, heads = self.size.layers, self.size.heads
        match place:
            case int(layer) if 0 <= layer < layers:
                return
            case (int(layer), int(head)) if 0 <= layer < layers and 0 <= head < heads:
                return
        raise ValueError(
            f"{name} has the key {place!r}; a key is a layer 0…{layers - 1}, or a (layer, head) with head 0…{heads - 1}"
        )

    def _check_head(self, place: object, head: Head) -> None:
        match place:
            case (int(layer), int(index)) if 0 <= layer < self.size.layers and 0 <= index < self.size.heads:
                pass
            case _:
                raise ValueError(
                    f"heads has the key {place!r}; a key is a (layer, head) "
                    f"with layer 0…{self.size.layers - 1} and head 0…{self.size.heads - 1}"
                )
        if not isinstance(head, Head):
            raise TypeError(f"heads[{place!r}]: expected a Head, got {type(head).__name__}")
        shapes = [tuple(part.shape) for part in (head.W_Q, head.W_K, head.b_Q, head.b_K)]
        width = head.W_Q.shape[-1]
        if shapes != [(self.size.d_model, width)] * 2 + [(width,)] * 2:
            raise ValueError(
                f"heads[{place!r}]: W_Q, W_K, b_Q, b_K have shapes {shapes}; expected ({self.size.d_model}, r) twice "
                "and (r,) twice, with one width r"
            )
        if _pick(self.kernel, layer, index) is not None:
            raise ValueError(f"heads[{place!r}]: a kernel is given for the same head; take one of the two away")

    def _replaced(self, layer: int) -> list[int]:
        return [index for index in range(self.size.heads) if self.heads and (layer, index) in self.heads]

    def intervened(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (b, heads, n, d_head) as the hook leaves them; it sees one text at a time."""
        if self.intervene is None:
            return q, k, v
        replaced = self._replaced(layer)
        # Copies, since a hook may write to what it is given.
        met = torch.stack([q[:, replaced], k[:, replaced]])
        changed = [self.intervene(layer, *text) for text in zip(q, k, v, strict=True)]
        for text in changed:
            if not isinstance(text, (tuple, list)) or not all(isinstance(part, Tensor) for part in text):
                raise TypeError(f"intervene returned a {type(text).__name__} in layer {layer}; expected q, k, v")
            shapes, dtypes = [tuple(part.shape) for part in text], {part.dtype for part in text}
            if shapes != [tuple(q.shape[1:])] * 3 or dtypes != {q.dtype}:
                raise ValueError(
                    f"intervene returned shapes {shapes} of {', '.join(sorted(map(str, dtypes)))} in layer {layer}; "
                    f"expected q, k, v, each of shape {tuple(q.shape[1:])} and {q.dtype}"
                )
        queries, keys, values = (torch.stack(part) for part in zip(*changed, strict=True))
        for at, index in enumerate(replaced):
            if not (torch.equal(queries[:, index], met[0, :, at]) and torch.equal(keys[:, index], met[1, :, at])):
                raise ValueError(
                    f"intervene changed q or k of head ({layer}, {index}), "
                    "which heads replaces: they would score nothing there"
                )
        return queries, keys, values

    def around(self, texts: list[Tokens], device: torch.device) -> Around:
        """The masks and positions of texts of equal length."""
        return Around(self._masks(texts, device), self._positions(texts, device))

    def _masks(self, texts: list[Tokens], device: torch.device) -> Tensor | None:
        if self.mask is None:
            return None
        if isinstance(self.mask, Tensor):
            return self.mask.to(device)
        made = [self.mask(tokens) for tokens in texts]
        for mask in made:
            if not isinstance(mask, Tensor) or mask.ndim > 3:
                shown = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
                raise ValueError(f"mask returned {shown}; expected a tensor that broadcasts to (heads, n, n)")
        return torch.stack([mask.expand(*(1,) * (3 - mask.ndim), *mask.shape) for mask in made]).to(device)

    def _positions(self, texts: list[Tokens], device: torch.device) -> Tensor:
        if self.position is None:
            return torch.arange(len(texts[0]), device=device)
        made = [self.position if isinstance(self.position, Tensor) else self.position(tokens) for tokens in texts]
        for tokens, position in zip(texts, made, strict=True):
            if not isinstance(position, Tensor):
                raise TypeError(f"position returned a {type(position).__name__}; expected a tensor")
            if position.shape != (len(tokens),):
                raise ValueError(
                    f"position has shape {tuple(position.shape)}; expected ({len(tokens)},), one for each token"
                )
            if not position.isfinite().all():
                raise ValueError("position holds NaN or infinity: no rotation is by such an angle")
        return torch.stack(made).unsqueeze(1).to(device)

    def attend(self, layer: int, inputs: Tensor, q: Tensor, k: Tensor, v: Tensor, around: Around) -> Tensor:
        """What each head hands on: (b, heads, n, d_head)."""
        return _join([
            (s.heads, attention.attend(s.q, s.k, v[:, s.heads], s.kernel, normalizer=s.normalizer, **s.permitted))
            for s in self._shares(layer, inputs, q, k, around)
        ])  # fmt: skip

    def scores(self, layer: int, inputs: Tensor, q: Tensor, k: Tensor, around: Around) -> Tensor:
        """(b, heads, n, n), before the normaliser; -inf where not permitted."""
        return _join([
            (s.heads, attention.scores(s.q, s.k, s.kernel, **s.permitted))
            for s in self._shares(layer, inputs, q, k, around)
        ])  # fmt: skip

    def weights(self, layer: int, inputs: Tensor, q: Tensor, k: Tensor, around: Around) -> Tensor:
        """(b, heads, n, n), after the normaliser."""
        return _join([
            (s.heads, attention.weights(s.q, s.k, s.kernel, normalizer=s.normalizer, **s.permitted))
            for s in self._shares(layer, inputs, q, k, around)
        ])  # fmt: skip

    def shown(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k (b, heads, n, d_head) as a reading keeps them: NaN where another head scored."""
        replaced = self._replaced(layer)
        if not replaced:
            return q, k
        other = torch.zeros(self.size.heads, dtype=torch.bool, device=q.device)
        other[replaced] = True
        other = other[:, None, None]
        return q.masked_fill(other, torch.nan), k.masked_fill(other, torch.nan)

    def _shares(self, layer: int, inputs: Tensor, q: Tensor, k: Tensor, around: Around) -> Iterator[_Share]:
        """The layer's heads, those that score and normalise alike together."""
        together: dict[tuple[object, ...], list[int]] = {}
        given = self.heads or {}
        for index in range(self.size.heads):
            kernel, normalizer = _pick(self.kernel, layer, index), _pick(self.normalizer, layer, index)
            head = given.get((layer, index))
            kind = None if head is None else (head.W_Q.shape[1], head.scale, id(head.rotation))
            together.setdefault((id(kernel), id(normalizer), kind), []).append(index)
        mask = around.mask
        per_head = mask is not None and mask.ndim >= 3 and mask.shape[-3] == self.size.heads
        for at in together.values():
            seen = mask[..., at, :, :] if mask is not None and per_head else mask
            permitted = _Permitted(mask=seen, causal=self.causal, window=self.window)
            normalizer = _pick(self.normalizer, layer, at[0])
            if (layer, at[0]) in given:
                others = [given[layer, index] for index in at]
                for index, other in zip(at, others, strict=True):
                    if other.W_Q.dtype != inputs.dtype or other.W_Q.device != inputs.device:
                        raise TypeError(
                            f"heads[{(layer, index)}] is of {other.W_Q.dtype} on {other.W_Q.device}; "
                            f"expected the model's {inputs.dtype} on {inputs.device}"
                        )
                queries = torch.stack([other.query(inputs) for other in others], dim=1)
                keys = torch.stack([other.key(inputs) for other in others], dim=1)
                first = others[0]
                queries, keys = first.rotate(queries, around.position), first.rotate(keys, around.position)
                # Autocast multiplies in a smaller type and adds a bias in the wider one.
                yield _Share(at, queries.to(q.dtype), keys.to(k.dtype), first.scale * Dot(), normalizer, permitted)
            else:
                yield _Share(at, q[:, at], k[:, at], _pick(self.kernel, layer, at[0]), normalizer, permitted)


class _Permitted(TypedDict):
    mask: Tensor | None
    causal: bool
    window: Window


class _Share(NamedTuple):
    """Some heads of a layer: what they have in common, and their queries and keys."""

    heads: list[int]
    q: Tensor
    k: Tensor
    kernel: MatchKernel | None
    normalizer: Normalizer | None
    permitted: _Permitted


def _join(parts: list[tuple[list[int], Tensor]]) -> Tensor:
    """Put the results, each with the heads it is for, back in the heads' order."""
    order = [head for heads, _ in parts for head in heads]
    return torch.cat([result for _, result in parts], dim=1)[:, [order.index(head) for head in range(len(order))]]


def _pick(given: Part | Mapping[Place, Part] | None, layer: int, head: int) -> Part | None:
    if isinstance(given, Mapping):
        return given.get((layer, head), given.get(layer))
    return given
