"""SentencePiece's unigram cut: of all ways to cut a text into known pieces, the one of the highest total score."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unicodedata import combining, normalize

import torch

from .tokens import Tokens

SPACE = "▁"
"""What stands for a space inside a piece (U+2581, not an underscore)."""


class Unigram:
    """Cuts a text as multilingual models of the XLM-R family do (Kudo 2018, subword regularization, section 3.2).

    1. Characters are folded by a table (NFKC with exceptions: ， → `,` and control characters go away), after a letter
       and the accents that follow it have been joined.
    2. Runs of spaces become one, those at the ends go, a text begins with one, and each is written ▁. Where that first
       one is a piece of its own it has the span (0, 0), like a mark: the text has no such character.
    3. The pieces with the highest sum of scores are found (Viterbi); what no piece covers becomes one <unk>.

    Args:
        tokenizers: the library of that name; its model does step 3.
        pieces: (piece, score) in the order of the vocabulary; a score is a natural logarithm of a probability.
        fold: a character → what replaces it; a character that is not a key stays.
        start, end: the marks around a text. unknown: the piece for what is not covered.
    """

    def __init__(
        self,
        tokenizers: Any,
        pieces: Sequence[tuple[str, float]],
        fold: Mapping[str, str],
        *,
        start: str = "<s>",
        end: str = "</s>",
        unknown: str = "<unk>",
    ) -> None:
        names = [piece for piece, _ in pieces]
        self._marks = [(mark, names.index(mark)) for mark in (start, end)]
        model = tokenizers.models.Unigram(list(pieces), unk_id=names.index(unknown), byte_fallback=False)
        self._tokenizer = tokenizers.Tokenizer(model)
        self._fold = fold

    def __call__(self, text: str) -> Tokens:
        written, origins = self._write(text)
        cut = self._tokenizer.encode(written)
        (start, start_id), (end, end_id) = self._marks
        spans = [_span(written, origins, *place) for place in cut.offsets]
        ids = torch.tensor([start_id, *cut.ids, end_id])
        return Tokens(text, ids, [start, *cut.tokens, end], [(0, 0), *spans, (0, 0)])

    def _write(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Steps 1 and 2: the text as the model reads it, and where in `text` each of its characters comes from."""
        written, origins = [SPACE], [(0, 0)]
        for start, end in _letters(text):
            for character in normalize("NFC", text[start:end]):
                for folded in self._fold.get(character, character):
                    if folded != " " or written[-1] != SPACE:
                        written.append(SPACE if folded == " " else folded)
                        origins.append((start, end))
        if written[-1] == SPACE:
            del written[-1], origins[-1]
        return "".join(written), origins


def _letters(text: str) -> Iterator[tuple[int, int]]:
    """Each character of a text together with what is written onto it (accents; parts of a Korean syllable)."""
    start = 0
    for at in range(1, len(text) + 1):
        if at == len(text) or not (combining(text[at]) or "\u1160" <= text[at] <= "\u11ff"):
            yield start, at
            start = at


def _span(written: str, origins: list[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """Where in the source a piece comes from; the space before a word is no part of it."""
    if written[start] == SPACE and end - start > 1:
        start += 1
    return origins[start][0], origins[end - 1][1]
