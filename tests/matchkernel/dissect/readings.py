"""Readings made by hand: tables of scores and weights over pieces whose ids are chosen."""

import torch

from matchkernel.dissect import Reading, Tokens
from tests.matchkernel.oracle import draw


def tokens(words, marks=("[CLS]", "[SEP]")):
    """Words apart by spaces; equal words have equal ids, and a word in `marks` is a mark."""
    pieces = words.split()
    ids = torch.tensor([1000 + sorted(set(pieces)).index(piece) for piece in pieces])
    source, spans = "", []
    for piece in pieces:
        if piece in marks:
            spans.append((0, 0))
        else:
            source += " " * bool(source)
            spans.append((len(source), len(source) + len(piece)))
            source += piece
    return Tokens(source, ids, pieces, spans)


def reading(words, scores=None, *, layers=2, heads=3, allowed=None, seed=0, weights=None):
    """A reading of the words with these scores, drawn where none are given; weights are their softmax where allowed."""
    text = tokens(words)
    n = len(text)
    if scores is None:
        scores = 2 * draw(layers, heads, n, n, seed=seed)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if weights is None:
        weights = scores.softmax(-1).nan_to_num()
    nothing = scores.new_zeros(*scores.shape[:2], n, 1)
    hidden = scores.new_zeros(scores.shape[0] + 1, n, 1)
    return Reading(
        text, hidden=hidden, inputs=hidden[1:], queries=nothing, keys=nothing, values=nothing, scores=scores,
        weights=weights, mixed=nothing,
    )  # fmt: skip


def causal(n):
    return torch.ones(n, n, dtype=torch.bool).tril()
