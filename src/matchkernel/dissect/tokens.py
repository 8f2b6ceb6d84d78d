"""A text cut into the pieces that a model reads."""

import re
from dataclasses import dataclass

from torch import Tensor

# Thai, Lao, Burmese, Khmer, kana, Chinese characters: written without spaces, so that a word has no edge to look for.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
UNSPACED += "\U00020000-\U000323af"
SPACED_LETTER = rf"[^\W{UNSPACED}]"


@dataclass(frozen=True, eq=False)
class Tokens:
    """The pieces of one text, the model's own marks included (BERT: [CLS] first, [SEP] last; XLM-R: <s> and </s>).

    Attributes:
        source: the text itself.
        ids: (n,) int64, the pieces' numbers in the vocabulary.
        text: the n pieces as strings. In BERT a piece that continues a word begins with ``##``; in XLM-R and in byte
            pairs a piece that begins a word after a space begins with ``▁``. Bytes of a byte pair that make no whole
            character are written ``\\xe5``.
        spans: for each piece the (start, end) characters of `source` that it came from; (0, 0) for a mark
            that the model adds.
    """

    source: str
    ids: Tensor
    text: list[str]
    spans: list[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.text)

    def __repr__(self) -> str:
        return f"Tokens({len(self)}: {' '.join(self.text)})"

    def find_all(self, words: str) -> list[list[int]]:
        """Positions of the pieces of every occurrence of a word, a phrase or a mark such as "[CLS]".

        Whole words only, upper and lower case alike; in a script that is written without spaces, such as Chinese, any
        run of characters is a word. An empty list when there is none.
        """
        marks = [
            [i]
            for i, (piece, span) in enumerate(zip(self.text, self.spans, strict=True))
            if piece == words and span[0] == span[1]
        ]
        phrase = words.strip()
        if marks or not phrase:
            return marks
        # A word ends where no other letter follows its last letter; a comma or a Chinese character ends anywhere.
        before = f"(?<!{SPACED_LETTER})" if re.match(SPACED_LETTER, phrase[0]) else ""
        after = f"(?!{SPACED_LETTER})" if re.match(SPACED_LETTER, phrase[-1]) else ""
        whole = re.compile(before + re.escape(phrase) + after, re.IGNORECASE)
        return [
            [i for i, (start, end) in enumerate(self.spans) if start < hit.end() and end > hit.start()]
            for hit in whole.finditer(self.source)
        ]

    def find(self, words: str, occurrence: int = 0) -> list[int]:
        """Positions of the pieces of one occurrence of a word or a phrase, the first unless told otherwise.

        ``tokens.find("overloaded")`` is a list because a word may be cut into several pieces.

        Raises:
            ValueError: the text has no such occurrence; the message lists the pieces it does have.
        """
        found = self.find_all(words)
        if not -len(found) <= occurrence < len(found):
            raise ValueError(
                f"{words!r} occurs {len(found)} times in the text, so there is no occurrence {occurrence}; "
                f"its pieces are {self.text}"
            )
        return found[occurrence]
