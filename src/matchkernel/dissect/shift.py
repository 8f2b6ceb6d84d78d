"""How far a change carries a model from what it was: sentence vectors, and the loss of the next token."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .decoder import Decoder
from .encoder import Encoder
from .tokens import Tokens


class EmbeddingShift(NamedTuple):
    """What a change does to the sentence vectors of some texts."""

    cosines: Tensor
    """(texts,): of each text's vector after the change with its vector before; 1 where nothing happened."""
    mean: float
    """Their mean."""
    rank_correlation: float
    """Spearman's, between the similarities of all pairs of texts before and after: 1 if no pair changes its rank. NaN
    for fewer than three texts, which have no two pairs to rank."""


class LossShift(NamedTuple):
    """What a change does to the loss of the next token, in nats per token."""

    before: float
    """Mean over all predicted tokens of all texts."""
    after: float
    """The same under the change."""
    per_text: Tensor
    """(texts,): after − before, the mean over each text's own tokens."""
    standard_error: float
    """Of after − before, taking the texts as the sample (tokens of one text are not independent); NaN for one text."""


def embedding_shift(
    encoder: Encoder, texts: Sequence[str | Tokens], *, before: Tensor | None = None, **change: Any
) -> EmbeddingShift:
    """Compare sentence vectors with and without a change.

    A model whose vectors all lie in a narrow cone keeps high cosines whatever is done to it: there the rank correlation
    of the similarities tells more.

    Args:
        texts: as in `Encoder.embed`.
        before: the unchanged vectors ``encoder.embed(texts)``, for those who try many changes; computed unless given.
        change: what `Encoder.embed` takes: kernel, normalizer, heads, intervene, mask, causal, window.

    Raises:
        TypeError: a decoder, for which there is `loss_shift`.
        ValueError: no text; `before` is not (texts, d_model).
    """
    if not isinstance(encoder, Encoder):
        raise TypeError(f"encoder: {type(encoder).__name__} has no sentence vectors: expected an Encoder")
    if not texts:
        raise ValueError("texts is empty: there is nothing to compare")
    before = encoder.embed(texts) if before is None else before
    if before.shape != (len(texts), encoder.size.d_model):
        raise ValueError(
            f"before has shape {tuple(before.shape)}; {len(texts)} texts have vectors of shape "
            f"({len(texts)}, {encoder.size.d_model})"
        )
    after = encoder.embed(texts, **change)
    cosines = (before * after).sum(-1)
    return EmbeddingShift(cosines, float(cosines.mean()), spearman(_similarities(before), _similarities(after)))


def loss_shift(
    decoder: Decoder, texts: Sequence[str | Tokens], *, before: Sequence[Tensor] | None = None, **change: Any
) -> LossShift:
    """Compare the loss of the next token with and without a change.

    Args:
        texts: as in `Decoder.losses`.
        before: the unchanged losses ``decoder.losses(texts)``, for those who try many changes; computed unless given.
        change: what `Decoder.losses` takes: kernel, normalizer, heads, intervene, mask, window, position.

    Raises:
        TypeError: an encoder, for which there is `embedding_shift`.
        ValueError: no text; a text of one token, which predicts nothing; `before` does not have the texts' lengths.
    """
    if not isinstance(decoder, Decoder):
        raise TypeError(f"decoder: {type(decoder).__name__} predicts no next token: expected a Decoder")
    if not texts:
        raise ValueError("texts is empty: there is nothing to compare")
    old = list(decoder.losses(texts) if before is None else before)
    new = decoder.losses(texts, **change)
    lengths = [len(losses) for losses in new]
    if [len(losses) for losses in old] != lengths:
        raise ValueError(f"before has {[len(losses) for losses in old]} losses; the texts have {lengths}")
    if min(lengths) < 1:
        raise ValueError("a text has one token only: there is no next token to predict")
    # Sums in float64: a shift is a small difference of long sums.
    differences = [(b - a).double() for a, b in zip(old, new, strict=True)]
    per_text = torch.stack([difference.mean() for difference in differences])
    return LossShift(_mean(old), _mean(new), per_text, _standard_error(per_text, torch.tensor(lengths).to(per_text)))


def spearman(a: Tensor, b: Tensor) -> float:
    """Spearman's rank correlation of two lists of numbers (n,): Pearson's, of their ranks; ties share their mean rank.

    NaN where it is not defined: one of the lists is constant or holds NaN, or they are shorter than two. ValueError for
    lists of different lengths.
    """
    if a.shape != b.shape or a.dim() != 1:
        raise ValueError(f"a and b have shapes {tuple(a.shape)} and {tuple(b.shape)}: expected two lists of one length")
    if len(a) < 2 or a.isnan().any() or b.isnan().any():
        return math.nan
    ranks = torch.stack([_ranks(a), _ranks(b)])
    centred = ranks - ranks.mean(-1, keepdim=True)
    x, y = centred / centred.norm(dim=-1, keepdim=True)
    return float(x @ y)


def _ranks(x: Tensor) -> Tensor:
    """(n,) → (n,) from 1, equal numbers sharing the mean of the places they take."""
    in_order = x.sort().values
    below, up_to = torch.searchsorted(in_order, x), torch.searchsorted(in_order, x, right=True)
    return (below + up_to + 1).double() / 2


def _similarities(vectors: Tensor) -> Tensor:
    """The inner products of all pairs of rows, each pair once."""
    row, column = torch.triu_indices(len(vectors), len(vectors), offset=1, device=vectors.device)
    return (vectors @ vectors.mT)[row, column]


def _mean(losses: Sequence[Tensor]) -> float:
    return float(torch.cat(list(losses)).double().mean())


def _standard_error(per_text: Tensor, lengths: Tensor) -> float:
    """Of the mean over all tokens when texts are drawn, each with all its tokens (a ratio of two sums over texts)."""
    share = lengths / lengths.sum()
    texts = len(per_text)
    if texts < 2:
        return math.nan
    square = ((share * (per_text - (share * per_text).sum())) ** 2).sum()
    return float((square * texts / (texts - 1)).sqrt())
