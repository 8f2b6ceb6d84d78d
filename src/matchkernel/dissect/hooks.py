"""What to hand to `intervene=` and `mask=`: values silenced, heads ablated, keys forbidden.

    model.embed(texts, intervene=silence(0))                        # what [CLS] says, nobody hears
    model.embed(texts, mask=forbid(0))                              # nobody may look at it
    decoder.losses(texts, intervene=ablate({(18, 6), (17, 3)}))     # two heads hand on nothing
    decoder.losses(texts, mask=window_with_first(64, first=1))
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import torch
from torch import Tensor

from .model import Model
from .step import Intervene, Mask, Place
from .tokens import Tokens

Positions = int | Sequence[int] | Callable[[Tokens], Sequence[int]]


def silence(*positions: int, places: Collection[Place] | None = None) -> Intervene:
    """A hook that sets the values of some tokens to zero: they are looked at as before, and say nothing.

    Args:
        positions: places in the text, from 0; negative ones count from its end.
        places: layers or (layer, head) where it is done; everywhere unless given.

    Raises:
        IndexError: when it runs, if the text has no such position.
    """

    def silenced(v: Tensor) -> Tensor:
        v = v.clone()
        v[:, _within(positions, v.shape[1])] = 0.0
        return v

    return _on_values(silenced, places)


def silence_to_mean(*positions: int, places: Collection[Place] | None = None) -> Intervene:
    """A hook that sets the values of some tokens to the mean of all tokens' values, head by head.

    Arguments and errors as in `silence`. The mean is over the whole text: in a causal model it tells earlier tokens
    something about later ones.
    """

    def silenced(v: Tensor) -> Tensor:
        mean = v.mean(dim=1, keepdim=True)
        v = v.clone()
        v[:, _within(positions, v.shape[1])] = mean
        return v

    return _on_values(silenced, places)


def ablate(places: Collection[Place]) -> Intervene:
    """A hook that makes some heads hand on nothing: their values are zero at every token.

    Args:
        places: layers or (layer, head). The bias of the output map stays; it is not a head's.

    Raises:
        TypeError, ValueError: for what is no place.
        IndexError: when it is used on a model that has no such layer, or no such head.
    """
    return _on_values(torch.zeros_like, places)


def ablate_to_mean(places: Collection[Place], means: Tensor) -> Intervene:
    """A hook that makes some heads hand on the same at every token of every text: their mean elsewhere.

    Removal to zero also takes away what a head always adds, and what follows has never seen that missing. Here a head
    keeps what it says on average and loses what it says about this text.

    Args:
        places: layers or (layer, head).
        means: (layers, heads, d_head), from `mean_mixed` over other texts. Exact where a row of weights sums to 1.
    """

    def averaged(v: Tensor, layer: int) -> Tensor:
        return means[layer].to(v).unsqueeze(1).expand_as(v)

    return _OnValues(averaged, _checked(places))


def mean_mixed(model: Model, texts: Sequence[str | Tokens]) -> Tensor:
    """What each head hands on, averaged over all tokens of the texts: (layers, heads, d_head).

    Cost: one `read` for each text. ValueError when there is no text.
    """
    if not texts:
        raise ValueError("texts is empty: a mean needs at least one text")
    total, count = None, 0
    for text in texts:
        mixed = model.read(text).mixed
        total = mixed.sum(dim=2) if total is None else total + mixed.sum(dim=2)
        count += mixed.shape[2]
    assert total is not None
    return total / count


def compose(*hooks: Intervene) -> Intervene:
    """One hook that runs several, in the order given."""
    return _Composed(hooks)


def forbid(keys: Positions) -> Mask:
    """A mask under which no query may look at some keys.

    A query that then sees nothing hands on zeros, as everywhere in this library: in a causal model this is the first
    token when it is itself forbidden. Nobody else sees its stream then; only its own next token is told worse.

    Args:
        keys: a position, several, or a function from the text's `Tokens` to them, such as
            ``lambda tokens: tokens.find("[SEP]")``. Negative ones count from the end.

    Raises:
        IndexError: when it runs, if the text has no such position.
    """

    def mask(tokens: Tokens) -> Tensor:
        found = keys(tokens) if callable(keys) else keys
        allowed = torch.ones(len(tokens), dtype=torch.bool)
        allowed[_within([found] if isinstance(found, int) else found, len(tokens))] = False
        return allowed.expand(len(tokens), -1)

    return mask


def window_with_first(window: int, first: int = 1) -> Mask:
    """A mask under which a query sees the keys of a window and, wherever it stands, the first few tokens.

    |i − j| < window or j < first; where the model is causal, of these only j ≤ i, so `window` keys and the first ones.
    Positions stay those in the text; Xiao et al. number them anew inside the window.
    Source: Xiao et al. 2024 (StreamingLLM), section 3.

    Raises:
        ValueError: window or first is below 0, or both are 0.
    """
    if window < 0 or first < 0 or not (window or first):
        raise ValueError(f"window is {window} and first {first}: expected both at least 0, and one above")

    def mask(tokens: Tokens) -> Tensor:
        at = torch.arange(len(tokens))
        return ((at[:, None] - at).abs() < window) | (at < first)

    return mask


@dataclass(frozen=True, eq=False)
class _OnValues:
    """A hook that puts change(v, layer) in place of v in the heads that `places` names; in all of them for None."""

    change: Callable[[Tensor, int], Tensor]
    places: frozenset[Place] | None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.places is None or layer in self.places:
            return q, k, self.change(v, layer)
        for place in self.places:
            if isinstance(place, tuple) and place[0] == layer and place[1] >= len(v):
                raise IndexError(f"there is no head {place}: layer {layer} has heads 0…{len(v) - 1}")
        chosen = torch.tensor([(layer, head) in self.places for head in range(len(v))], device=v.device)
        return q, k, torch.where(chosen[:, None, None], self.change(v, layer), v) if chosen.any() else v


@dataclass(frozen=True, eq=False)
class _Composed:
    """Several hooks, one after the other."""

    hooks: tuple[Intervene, ...]

    @property
    def places(self) -> frozenset[Place]:
        """All that the hooks name, so that a model can check them before it runs."""
        return frozenset().union(*(getattr(hook, "places", None) or () for hook in self.hooks))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for hook in self.hooks:
            q, k, v = hook(layer, q, k, v)
        return q, k, v


def _on_values(change: Callable[[Tensor], Tensor], places: Collection[Place] | None) -> Intervene:
    return _OnValues(lambda v, _: change(v), _checked(places))


def _checked(places: Collection[Place] | None) -> frozenset[Place] | None:
    """The places; an error for what is none, and for (0, 2) in the place of {(0, 2)}, which would be two layers."""
    if places is None:
        return None
    if isinstance(places, (tuple, str)) or not isinstance(places, Collection):
        raise TypeError(f"places: expected a set or list of layers and (layer, head), like {{(0, 2)}}, got {places!r}")
    for place in places:
        match place:
            case int(layer) if layer >= 0:
                continue
            case (int(layer), int(head)) if layer >= 0 and head >= 0:
                continue
        raise ValueError(f"places has {place!r}: expected a layer or a (layer, head), both counted from 0")
    return frozenset(places)


def _within(positions: Sequence[int], n: int) -> list[int]:
    """The positions counted from 0; an IndexError for one that the text does not have."""
    for position in positions:
        if not isinstance(position, SupportsIndex):
            raise TypeError(f"a position is an integer, got {position!r}")
        if not -n <= position < n:
            raise IndexError(f"there is no position {position} in a text of {n} tokens")
    return [position % n for position in positions]
