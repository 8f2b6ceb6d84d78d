"""The first layer's scores are exactly their nine terms."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from matchkernel.dissect import Tokens, load, split
from matchkernel.dissect.split import PARTS

TEXT = "Because the server is overloaded, the system responds slowly, and finally the request times out."


@pytest.fixture(scope="module")
def exact():
    return load("minilm").double()


@pytest.mark.parametrize("text", [TEXT, "", "buffalo buffalo buffalo"])
def test_the_terms_add_up_to_the_scores(model, text):
    found = split(model, text)
    scores = model.read(text).scores[0]
    assert_close(found.total, scores, rtol=1e-5, atol=1e-4)
    assert_close(sum(found.term(a, b) for a in PARTS for b in PARTS), scores, rtol=1e-5, atol=1e-4)


def test_in_float64_they_add_up_to_rounding(exact):
    found = split(exact, TEXT)
    assert_close(found.total, exact.read(TEXT).scores[0], rtol=0, atol=1e-11)
    assert_close(sum(found.term(a, b) for a in PARTS for b in PARTS), found.total, rtol=0, atol=1e-11)
    assert_close(split(exact, exact.tokenize(TEXT)).total, found.total, rtol=0, atol=0)


def test_each_term_is_its_own_part_of_the_stored_weights(exact, raw):
    tokens = exact.tokenize(TEXT)
    n, h = len(tokens), 4
    word = raw["embeddings.word_embeddings.weight"][tokens.ids].numpy()
    position = raw["embeddings.position_embeddings.weight"][:n].numpy()
    segment = raw["embeddings.token_type_embeddings.weight"][:1].numpy().repeat(n, 0)
    sd = np.sqrt((word + position + segment).var(1, keepdims=True) + 1e-12)
    gamma, beta = (raw[f"embeddings.LayerNorm.{name}"].numpy() for name in ("weight", "bias"))
    parts = [gamma * (part - part.mean(1, keepdims=True)) / sd for part in (word, position, segment)]
    parts[2] = parts[2] + beta
    at, rows = "encoder.layer.0.attention.self.", slice(h * 32, (h + 1) * 32)
    q, k = ([part @ raw[f"{at}{side}.weight"][rows].T.numpy() for part in parts] for side in ("query", "key"))
    q[2] = q[2] + raw[f"{at}query.bias"][rows].numpy()
    k[2] = k[2] + raw[f"{at}key.bias"][rows].numpy()
    found = split(exact, tokens)
    for a, asks in enumerate(PARTS):
        for b, answers in enumerate(PARTS):
            expected = q[a] @ k[b].T / np.sqrt(32)
            np.testing.assert_allclose(found.term(asks, answers)[h].numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("marks", [False, True])
def test_shares_are_covariances_with_the_score(exact, marks):
    found = split(exact, TEXT)
    shares = found.shares(marks=marks)
    assert shares.shape == (3, 3, 12)
    assert_close(shares.sum((0, 1)), torch.ones(12, dtype=torch.float64))
    inside = slice(None) if marks else slice(1, -1)

    def centred(table):
        table = table.numpy()[inside, inside]
        return table - table.mean(1, keepdims=True)

    for head in (0, 2, 9):
        score = centred(found.total[head])
        for a, asks in enumerate(PARTS):
            for b, answers in enumerate(PARTS):
                share = (centred(found.term(asks, answers)[head]) * score).sum() / (score**2).sum()
                assert shares[a, b, head].item() == pytest.approx(share, abs=1e-10)


def test_the_previous_token_head_asks_positions_about_positions(model):
    shares = split(model, TEXT).shares()
    assert shares[1, 1, 2] > 0.95
    assert shares[0, 0, 1] > 0.9
    assert repr(split(model, "hi")) == "Split(12 heads, 3 tokens: [CLS] hi [SEP])"
    # Where a word stands does not change what its content has to say, beyond the one number per token that divides it.
    first, second = (split(model, text) for text in ("the old dog barks", "the dog barks old"))
    dog, place = [2], [3]
    a, b = (
        found.queries[0, :, found.tokens.find("dog")]
        / found.queries[0, :, found.tokens.find("dog")].norm(dim=-1)[..., None]
        for found in (first, second)
    )
    assert first.tokens.find("dog") == place and second.tokens.find("dog") == dog
    assert_close(a, b, rtol=0, atol=1e-5)


def test_what_has_no_split_is_refused(model, smollm):
    with pytest.raises(TypeError, match=r"expected an Encoder, got a Decoder"):
        split(smollm, TEXT)
    with pytest.raises(ValueError, match=r"layer=1: the inputs of layers above 0"):
        split(model, TEXT, layer=1)
    with pytest.raises(ValueError, match=r"no part is called 'word'; the parts are content, position, rest"):
        split(model, TEXT).term("word", "position")
    with pytest.raises(ValueError, match=r"has 0 tokens that count"):
        split(model, "").shares()
    with pytest.raises(ValueError, match=r"512 positions"):
        split(model, "word " * 600)
    with pytest.raises(ValueError, match=r"512 positions"):
        split(model, Tokens("", torch.arange(2000, 2600), ["word"] * 600, [(0, 1)] * 600))
