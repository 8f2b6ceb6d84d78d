"""Byte pairs are merged as their inventors say, and put together they are the text."""

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

TEXTS = [
    "Because the server is overloaded, the system responds slowly, and finally the request times out.",
    "In 1984 it's what they'd say:  two spaces, 3.14159 and 12345x",
    "\n\ttabs\tand\r\nnewlines \n\n   x ",
    "A naïve café owner; “quotes” — 因为服务器过载，系统响应变慢。 🙂",
    "antidisestablishmentarianism",
    "a",
    " ",
]


@pytest.fixture(scope="module")
def file(smollm_file):
    """The vocabulary and merges as stored."""
    fields = smollm_file.fields
    return {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges", "add_bos_token")}


def merged(word, rank):
    """Sennrich et al. 2016: as long as a known pair stands side by side, join the most frequent one."""
    parts = list(word)
    while len(parts) > 1:
        pairs = [(rank.get((left, right), len(rank)), at) for at, (left, right) in enumerate(pairwise(parts))]
        best, at = min(pairs)
        if best == len(rank):
            return parts
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def test_pieces_are_the_inventors(smollm, file):
    ids = {piece: index for index, piece in enumerate(file["tokens"])}
    rank = {tuple(pair.split(" ")): at for at, pair in enumerate(file["merges"])}
    # ASCII only: a word, a run of signs, each with the space before it; a digit alone; white space.
    cut = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s+(?![^\s0-9])|\s+")
    for text in [TEXTS[0], TEXTS[4], "it's what they'd say: 3.14159 and 12345x", "x = [1,2] # no"]:
        words = [word.replace(" ", "Ġ") for word in cut.findall(text)]
        expected = [ids[piece] for word in words for piece in merged(word, rank)]
        assert smollm.tokenize(text).ids.tolist() == expected
    assert file["add_bos_token"] is False


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_put_together_are_the_text(smollm, text):
    tokens = smollm.tokenize(text)
    assert smollm._pieces.join(tokens.ids.tolist()) == text
    assert tokens.source == text
    again = smollm.from_ids(tokens.ids)
    assert (again.source, again.text, again.spans) == (text, tokens.text, tokens.spans)
    assert tokens.spans[0][0] == 0 and tokens.spans[-1][1] == len(text)
    for (start, end), (following, _) in pairwise(tokens.spans):
        assert start < end
        assert following in (end, end - 1)


@settings(max_examples=100, deadline=None)
@given(st.text(min_size=1, max_size=30))
def test_any_text_comes_back_or_is_refused(smollm, text):
    # Bytes that stand in no text: six control characters, and the first bytes of planes that hold no letters.
    if re.search("[\x04\x06\x13\x14\x16\x1d\U00040000-\U000bffff]", text):
        with pytest.raises(ValueError, match="characters that no pieces of the vocabulary spell"):
            smollm.tokenize(text)
        return
    tokens = smollm.tokenize(text)
    assert smollm._pieces.join(tokens.ids.tolist()) == text
    assert tokens.spans[-1][1] == len(text)


def test_a_character_that_cannot_be_spelt_is_named(smollm):
    with pytest.raises(ValueError, match=r"no pieces of the vocabulary spell: \['\\x04', '\\U00040000'\]"):
        smollm.read("a\U00040000\x04b\x04")


def test_spans_are_the_tokenizers_offsets(smollm):
    tokenizer = smollm._pieces._tokenizer
    for text in TEXTS:
        tokens = smollm.tokenize(text)
        for (start, end), (least, most) in zip(tokens.spans, tokenizer.encode(text).offsets, strict=True):
            # Theirs leave out the space before a word.
            assert end == most
            assert text[start:least].strip() == ""


def test_pieces_are_shown_for_people(smollm):
    tokens = smollm.tokenize("Oh dear!  因\n<|im_end|> naïve")
    assert tokens.text == [
        "Oh",
        "▁dear",
        "!",
        "▁",
        "▁\\xe5",
        "\\x9b",
        "\\xa0",
        "\\n",
        "<|im_end|>",
        "▁na",
        "ïve",
    ]
    assert tokens.spans[4:7] == [(9, 11), (10, 11), (10, 11)]
    assert tokens.source[slice(*tokens.spans[1])] == " dear"


def test_digits_stand_alone(smollm):
    assert smollm.tokenize("in 2024").text == ["in", "▁", "2", "0", "2", "4"]


def test_marks_are_recognised_and_kept(smollm):
    tokens = smollm.tokenize("<|im_start|>user\nHi<|im_end|>")
    assert tokens.ids[0] == 1 and tokens.ids[-1] == 2
    assert tokens.text[0] == "<|im_start|>"
    assert tokens.spans[0] == (0, 12)
    assert smollm._pieces.marks == frozenset(range(17))


def test_words_are_found_among_the_pieces(smollm):
    tokens = smollm.tokenize("Because the server is overloaded, the system responds. The server!")
    assert [tokens.text[i] for i in tokens.find("overloaded")] == ["▁overload", "ed"]
    assert [tokens.text[i] for i in tokens.find("the server", 1)] == ["▁The", "▁server"]
    assert tokens.find("Because") == [0]


def test_half_a_character_becomes_the_sign_for_it(smollm):
    ids = smollm.tokenize(" 因").ids
    tokens = smollm.from_ids(ids[:-1])
    assert tokens.source == " �"
    assert tokens.text == ["▁\\xe5", "\\x9b"]
    assert tokens.spans == [(0, 2), (1, 2)]
    mended = smollm.from_ids(torch.cat([ids[:-1], smollm.tokenize("x").ids]))
    assert mended.source == " �x"
    assert mended.spans[-1][1] == 3
