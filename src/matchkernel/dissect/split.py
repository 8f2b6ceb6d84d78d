"""The scores of an encoder's first layer, split into what words and what positions have to say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .encoder import Encoder
from .rows import content
from .tokens import Tokens

PARTS = ("content", "position", "rest")
"""What an input of the first layer is the sum of, in the order in which `Split` has them."""


@dataclass(frozen=True, eq=False)
class Split:
    """The scores of layer 0 as the sum of nine terms: each part of the query with each part of the key.

    The first layer reads x_i = LayerNorm(w_i + p_i + t): word, position and segment vector. Taking the mean away is
    linear, and dividing by the standard deviation σ_i of the sum is linear too once σ_i is held at what it is, so

        x_i = γ (w_i − w̄_i)/σ_i  +  γ (p_i − p̄_i)/σ_i  +  γ (t − t̄)/σ_i + β
              content               position               rest

    exactly. Queries and keys are linear in x; their biases go to the rest. Only σ_i still ties the parts together: it
    is one number per token, known to all three.

    Attributes:
        tokens: the text.
        queries, keys: (3, h, n, d_head), the parts' shares of q and k, in the order of `PARTS`.
        scale: what q·k is multiplied by, 1/√d_head.
    """

    tokens: Tokens
    queries: Tensor
    keys: Tensor
    scale: float

    def __repr__(self) -> str:
        return f"Split({self.queries.shape[1]} heads, {len(self.tokens)} tokens: {' '.join(self.tokens.text)})"

    def term(self, query: str, key: str) -> Tensor:
        """(h, n, n): the term of one part of the query with one part of the key, such as ("position", "position").

        Raises:
            ValueError: a name that is not in `PARTS`.
        """
        for name in (query, key):
            if name not in PARTS:
                raise ValueError(f"no part is called {name!r}; the parts are {', '.join(PARTS)}")
        return self.scale * (self.queries[PARTS.index(query)] @ self.keys[PARTS.index(key)].mT)

    @property
    def total(self) -> Tensor:
        """(h, n, n): the scores, the sum of all nine terms."""
        return self.scale * (self.queries.sum(0) @ self.keys.sum(0).mT)

    def shares(self, *, marks: bool = False) -> Tensor:
        """Each term's share of the variance of the scores within rows: (3, 3, h), query's part first; they sum to 1.

        share = Σ_ij (t_ij − t̄_i)(s_ij − s̄_i) / Σ_ij (s_ij − s̄_i)², the covariance of term and score. Terms covary, so
        their own variances would not sum to that of the score; a covariance share can be negative, where a term works
        against the sum of the others, or above 1. Means are within rows, since softmax does not see what a whole row
        has in common.

        Args:
            marks: True counts [CLS] and [SEP] as rows and keys too; without, pairs of content tokens only.

        Raises:
            ValueError: fewer than two tokens that count.
        """
        counted = content(self.tokens).to(self.queries.device) | marks
        if int(counted.sum()) < 2:
            raise ValueError(f"the text has {int(counted.sum())} tokens that count; expected at least 2")
        queries, keys = self.queries[:, :, counted].double(), self.keys[:, :, counted].double()
        # Centring a row of scores is centring the keys, and the sum over pairs is taken in d_head dimensions.
        keys = keys - keys.mean(-2, keepdim=True)
        score = queries.sum(0) @ keys.sum(0).mT
        with_score = torch.einsum("phid,hij,khjd->pkh", queries, score, keys)
        return with_score / score.square().sum((-2, -1))


def split(model: Encoder, text: str | Tokens, layer: int = 0) -> Split:
    """Split the scores of an encoder's first layer into content and position terms, exactly.

    Args:
        model: an `Encoder`, whose input is a sum of word, position and segment vectors.
        text: a text or the result of `tokenize`.
        layer: 0. Further up every input already mixes words and positions, and no such split exists.

    Returns:
        A `Split`; `.term(query, key)` is one of its nine tables, `.shares()` says what each contributes.

    Raises:
        TypeError: a model that is not an `Encoder`: a decoder adds no positions to its input, it rotates.
        ValueError: another layer than 0.

    Source: Ke, He & Liu 2021, section 3.1, who leave the LayerNorm out.
    """
    if not isinstance(model, Encoder):
        raise TypeError(
            f"model: expected an Encoder, got a {type(model).__name__}; "
            "only an encoder's input is the sum of a word and a position vector"
        )
    if layer != 0:
        raise ValueError(f"layer={layer}: the inputs of layers above 0 are not sums of a word and a position part")
    tokens = model._given(text)
    norm = model.embedding_norm
    position = model.positions.weight[: len(tokens)]
    word = model.words(tokens.ids.to(position.device)[None])[0]
    segment = model.segments.weight[0].expand_as(word)
    sd = ((word + position + segment).var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    parts = torch.stack([norm.weight * (part - part.mean(-1, keepdim=True)) / sd for part in (word, position, segment)])
    heads = [model.head(0, index) for index in range(model.size.heads)]
    queries = torch.stack([parts @ head.W_Q for head in heads], 1)
    keys = torch.stack([parts @ head.W_K for head in heads], 1)
    # What is neither word nor position nor divided by σ: LayerNorm's own shift, and the biases of the head.
    queries[2] += torch.stack([norm.bias @ head.W_Q + head.b_Q for head in heads])[:, None]
    keys[2] += torch.stack([norm.bias @ head.W_K + head.b_K for head in heads])[:, None]
    return Split(tokens, queries, keys, heads[0].scale)
