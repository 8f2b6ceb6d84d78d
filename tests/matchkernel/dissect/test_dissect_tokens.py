"""Words and phrases are found among the pieces."""

import pytest
import torch

from matchkernel.dissect import Tokens


@pytest.fixture(scope="module")
def tokens(model):
    return model.tokenize("Because the Server is overloaded, the system responds, and the server's request times out.")


def test_the_pieces_are_known(tokens):
    assert tokens.text[0] == "[CLS]"
    assert tokens.text[-1] == "[SEP]"
    assert len(tokens) == len(tokens.text) == len(tokens.ids) == len(tokens.spans)
    assert tokens.ids.ndim == 1
    assert repr(tokens).startswith(f"Tokens({len(tokens)}: [CLS] because the server is over ##loaded ,")


def test_a_word_a_split_word_a_phrase_and_a_mark(tokens):
    def pieces(positions):
        return [tokens.text[i] for i in positions]

    assert pieces(tokens.find("because")) == ["because"]
    assert pieces(tokens.find("overloaded")) == ["over", "##loaded"]
    assert pieces(tokens.find("times out")) == ["times", "out"]
    assert tokens.find("[CLS]") == [0]
    assert tokens.find("[SEP]") == [len(tokens) - 1]
    assert pieces(tokens.find(",")) == [","]


def test_occurrences_are_counted_in_order_whatever_their_case(tokens):
    first, second = tokens.find("server"), tokens.find("server", 1)
    assert tokens.find_all("SERVER") == [first, second]
    assert tokens.find("server", -1) == second
    assert first == [tokens.text.index("server")]
    assert second[0] > first[0]
    assert len(tokens.find_all("the")) == 3


def test_only_whole_words_count(tokens):
    assert tokens.find_all("over") == []
    assert tokens.find_all("quest") == []
    assert tokens.find_all("##loaded") == []


@pytest.mark.parametrize(("words", "occurrence"), [("client", 0), ("server", 2), ("server", -3), ("", 0), (" ", 0)])
def test_what_is_not_there_is_an_error_that_shows_the_pieces(tokens, words, occurrence):
    with pytest.raises(
        ValueError, match=rf"occurs \d times in the text, so there is no occurrence {occurrence}.*'server'"
    ):
        tokens.find(words, occurrence)


def by_character(source):
    """A text whose pieces are its characters, between two marks."""
    spans = [(0, 0), *((i, i + 1) for i in range(len(source))), (0, 0)]
    return Tokens(source, torch.zeros(len(spans), dtype=torch.int64), ["<s>", *source, "</s>"], spans)


def test_a_chinese_word_is_found_inside_a_run_of_characters():
    source = "因为服务器过载，系统响应变慢，最终导致请求超时。"
    tokens = by_character(source)
    for word in ("因为", "过载", "响应变慢", "超时", "导致请求", "时。"):
        assert tokens.find_all(word) == [[source.index(word) + 1 + i for i in range(len(word))]]
    assert tokens.find_all("载过") == []


def test_a_script_without_spaces_ends_a_word_of_one_with_spaces():
    source = "GPU过载，serverの応答と GPU2 señor𠀀x"
    tokens = by_character(source)

    def place(word):
        return list(range(source.index(word) + 1, source.index(word) + 1 + len(word)))

    for word in ("GPU", "GPU过", "server", "の応", "señor", "𠀀x", "𠀀", "x"):
        assert tokens.find_all(word) == [place(word)]
    for part in ("seño", "PU过", "erver", "GP"):
        assert tokens.find_all(part) == []
