"""What to hand to `intervene=` and `mask=`: values silenced, heads ablated, keys forbidden.

    model.embed(texts, intervene=silence(0))                        # what [CLS] says, nobody hears
    model.embed(texts, mask=forbid(0))                              # nobody may look at it
    decoder.losses(texts, intervene=ablate({(18, 6), (17, 3)}))     # two heads hand on nothing
    decoder.losses(texts, mask=window_with_first(64, first=1))
"""

from collections.abc import Callable, Collection, Sequence
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
        IndexError: when it runs, if a layer has no such head. A layer that the model has not is never reached.
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

    return _on_values_of_layer(averaged, places)


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

    def composed(layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for hook in hooks:
            q, k, v = hook(layer, q, k, v)
        return q, k, v

    return composed


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


def _on_values(change: Callable[[Tensor], Tensor], places: Collection[Place] | None) -> Intervene:
    return _on_values_of_layer(lambda v, _: change(v), places)


def _on_values_of_layer(change: Callable[[Tensor, int], Tensor], places: Collection[Place] | None) -> Intervene:
    """A hook that puts change(v, layer) in place of v in the heads that `places` names."""

    def hook(layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if places is None or layer in places:
            return q, k, change(v, layer)
        for place in places:
            if isinstance(place, tuple) and place[0] == layer and not 0 <= place[1] < len(v):
                raise IndexError(f"there is no head {place}: layer {layer} has heads 0…{len(v) - 1}")
        chosen = torch.tensor([(layer, head) in places for head in range(len(v))], device=v.device)
        return q, k, torch.where(chosen[:, None, None], change(v, layer), v) if chosen.any() else v

    return hook


def _within(positions: Sequence[int], n: int) -> list[int]:
    """The positions counted from 0; an IndexError for one that the text does not have."""
    for position in positions:
        if not isinstance(position, SupportsIndex):
            raise TypeError(f"a position is an integer, got {position!r}")
        if not -n <= position < n:
            raise IndexError(f"there is no position {position} in a text of {n} tokens")
    return [position % n for position in positions]
