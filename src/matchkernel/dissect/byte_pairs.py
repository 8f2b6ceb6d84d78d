"""Cut a text into byte pairs, as GPT-2 and its followers do."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from types import ModuleType

import torch

from .tokens import Tokens


class BytePairs:
    """A vocabulary of byte sequences, and the merges that lead to them.

    The pieces' bytes put together are the text again. No mark is added at either end.

    Args:
        tokenizers: the package of that name.
        pieces: the vocabulary in order, in GPT-2's spelling: one printable character for each byte.
        merges: "left right", the most frequent first.
        marks: numbers of the pieces that are no text, such as ``<|im_end|>``. Written in a text they are recognised.
    """

    def __init__(
        self, tokenizers: ModuleType, pieces: Sequence[str], merges: Iterable[str], marks: Iterable[int]
    ) -> None:
        self.marks = frozenset(marks)
        byte = _bytes()
        self._bytes = [
            piece.encode() if index in self.marks else bytes(byte[character] for character in piece)
            for index, piece in enumerate(pieces)
        ]
        self._known = frozenset(single[0] for single in self._bytes if len(single) == 1)
        model = tokenizers.models.BPE(
            {piece: index for index, piece in enumerate(pieces)}, [tuple(merge.split(" ")) for merge in merges]
        )
        self._tokenizer = tokenizers.Tokenizer(model)
        # SmolLM's rule: every digit stands alone, then GPT-2's expression for words with the space before them.
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ])  # fmt: skip
        self._tokenizer.add_special_tokens([pieces[index] for index in sorted(self.marks)])

    def __call__(self, text: str) -> Tokens:
        """Cut a text. ValueError for a character that no pieces spell: a vocabulary need not have all 256 bytes."""
        unknown = sorted(character for character in set(text) if not self._known.issuperset(character.encode()))
        if unknown:
            raise ValueError(f"the text has characters that no pieces of the vocabulary spell: {unknown}")
        return self._tokens(self._tokenizer.encode(text).ids, text)

    def join(self, ids: Iterable[int]) -> str:
        """The text of some pieces; a character whose bytes are not all there becomes U+FFFD."""
        return b"".join(self._bytes[index] for index in ids).decode(errors="replace")

    def from_ids(self, ids: Sequence[int]) -> Tokens:
        """The text of these pieces, cut as they are: not always as the text itself would be cut."""
        return self._tokens(ids, self.join(ids))

    def _tokens(self, ids: Sequence[int], text: str) -> Tokens:
        pieces = [self._bytes[index] for index in ids]
        return Tokens(text, torch.tensor(ids, dtype=torch.long), [_show(piece) for piece in pieces], _spans(pieces))


def _spans(pieces: Iterable[bytes]) -> list[tuple[int, int]]:
    """The characters that each piece has bytes of."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    done, spans = 0, []
    for piece in pieces:
        start = done
        done += len(decoder.decode(piece))
        unfinished = bool(decoder.getstate()[0])
        spans.append((start, done + unfinished))
    return spans


def _show(piece: bytes) -> str:
    """A piece for people: a space as ▁, other white space and lone bytes by their escapes."""
    text = piece.decode(errors="backslashreplace").replace(" ", "▁")
    return "".join(repr(character)[1:-1] if character.isspace() else character for character in text)


def _bytes() -> dict[str, int]:
    """GPT-2's spelling: a byte that Latin-1 can print stands for itself, the others take characters from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    other = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(other)}
