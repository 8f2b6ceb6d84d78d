"""A head taken out of the model scores as it does inside."""

import math

import pytest
import torch
from torch.testing import assert_close

TEXT = "Because the server is overloaded, the system responds slowly, and finally the request times out."


@pytest.fixture(scope="module")
def reading(model):
    return model.read(TEXT)


def test_weights_are_the_stored_ones_with_tokens_as_rows(model, raw):
    head = model.head(4, 7)
    at, rows = "encoder.layer.4.attention.", slice(7 * 32, 8 * 32)
    for name, part in (("Q", "query"), ("K", "key"), ("V", "value")):
        assert_close(getattr(head, f"W_{name}").double(), raw[f"{at}self.{part}.weight"][rows].T, rtol=0, atol=0)
        assert_close(getattr(head, f"b_{name}").double(), raw[f"{at}self.{part}.bias"][rows], rtol=0, atol=0)
    assert_close(head.W_O.double(), raw[f"{at}output.dense.weight"][:, rows].T, rtol=0, atol=0)
    assert head.W_Q.shape == head.W_K.shape == head.W_V.shape == (384, 32)
    assert head.W_O.shape == (32, 384)


def test_heads_come_layer_by_layer(model, reading):
    heads = list(model.heads())
    assert [(head.layer, head.index) for head in heads] == [(layer, h) for layer in range(6) for h in range(12)]
    for head in heads:
        x = reading.hidden[head.layer]
        assert_close(head.query(x), reading.queries[head.layer, head.index], rtol=0, atol=2e-5)
        assert_close(head.key(x), reading.keys[head.layer, head.index], rtol=0, atol=2e-5)
        assert_close(head.value(x), reading.values[head.layer, head.index], rtol=0, atol=2e-5)
        assert_close(head.scores(x), reading.scores[head.layer, head.index], rtol=0, atol=5e-5)


def test_m_is_the_bilinear_form_of_the_scores_without_biases(model, reading):
    head, x = model.head(2, 9), reading.hidden[2]
    assert head.M.shape == (384, 384)
    singular = torch.linalg.svdvals(head.M)
    assert singular[31] > 0.01 * singular[0] > 1e3 * singular[32]
    assert_close(head.scores(x, biases=False), x @ head.M @ x.T / math.sqrt(32), rtol=1e-4, atol=1e-4)
    assert_close(head.scores(x, biases=False, scale=1.0), x @ head.M @ x.T, rtol=1e-4, atol=5e-4)
    assert not torch.allclose(head.scores(x, biases=False), head.scores(x), atol=0.1)


def test_queries_are_rows_and_keys_are_columns(model, reading):
    head, x = model.head(3, 1), reading.hidden[3]
    assert_close(head.scores(x[:4], x[4:9]), head.scores(x)[:4, 4:9], rtol=0, atol=2e-5)
    assert_close(head.scores(x, biases=False)[1, 5], x[1] @ head.M @ x[5] / math.sqrt(32), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("layer", "index"), [(0, 2), (2, 9), (5, 11)])
def test_four_terms_add_up_to_the_score(model, reading, layer, index):
    head, x = model.head(layer, index), reading.hidden[layer]
    x_q, x_k = x[:5], x[3:]
    terms = head.terms(x_q, x_k)
    n, m = 5, len(x) - 3
    assert [tuple(term.shape) for term in terms] == [(n, m), (n, 1), (1, m), (1, 1)]
    assert_close(terms.total, head.scores(x_q, x_k), rtol=1e-4, atol=5e-5)
    assert_close(terms.content, head.scores(x_q, x_k, biases=False), rtol=1e-4, atol=5e-5)
    root = math.sqrt(32)
    assert_close(terms.query[2, 0], (x_q[2] @ head.W_Q) @ head.b_K / root, rtol=1e-4, atol=1e-5)
    assert_close(terms.key[0, 2], head.b_Q @ (x_k[2] @ head.W_K) / root, rtol=1e-4, atol=1e-5)
    assert_close(terms.constant[0, 0], head.b_Q @ head.b_K / root, rtol=1e-4, atol=1e-5)
    assert_close(head.terms(x_q, x_k, scale=1.0).total, root * terms.total, rtol=1e-4, atol=5e-4)


def test_terms_of_a_query_do_not_reach_the_weights_but_those_of_a_key_do(model, reading):
    head, x = model.head(4, 5), reading.hidden[4]
    terms = head.terms(x)
    weights = reading.weights[4, 5]
    assert_close((terms.content + terms.key).softmax(-1), weights, rtol=0, atol=1e-5)
    assert not torch.allclose((terms.content + terms.query).softmax(-1), weights, atol=1e-2)


def test_terms_and_scores_take_batches(model, reading):
    head = model.head(1, 8)
    x = torch.stack([reading.hidden[1], reading.hidden[1].flip(0)])
    terms = head.terms(x)
    assert terms.total.shape == (2, x.shape[1], x.shape[1])
    assert_close(terms.total, head.scores(x), rtol=1e-4, atol=5e-5)
    assert_close(terms.total[1], head.scores(x[1]), rtol=1e-4, atol=5e-5)


def test_heads_add_up_to_the_layers_attention(model, reading, raw):
    layer = 3
    x = reading.hidden[layer]
    mixed = reading.mixed[layer]
    total = sum(mixed[h] @ model.head(layer, h).W_O for h in range(12))
    at = f"encoder.layer.{layer}.attention.output.dense."
    joined = mixed.transpose(0, 1).reshape(len(x), 384).double()
    expected = joined @ raw[f"{at}weight"].T
    assert_close(total.double(), expected, rtol=0, atol=1e-5)


def test_writing_to_a_head_does_not_reach_the_model(model):
    head = model.head(0, 0)
    for part in (head.W_Q, head.W_K, head.W_V, head.W_O, head.b_Q, head.b_K, head.b_V):
        assert not part.requires_grad
        before = part.clone()
        part.zero_()
        assert before.abs().sum() > 0
    again = model.head(0, 0)
    for part in (again.W_Q, again.W_K, again.W_V, again.W_O, again.b_Q, again.b_K, again.b_V):
        assert part.abs().sum() > 0


@pytest.mark.parametrize("place", [(6, 0), (0, 12), (-1, 0), (0, -1)])
def test_a_head_outside_the_model_is_refused(model, place):
    with pytest.raises(IndexError, match=r"layers are 0…5, heads 0…11"):
        model.head(*place)


def test_reprs_say_what_is_there(model, reading):
    assert repr(model.head(2, 9)) == "Head(layer=2, index=9, d_model=384, d_head=32)"
    assert repr(reading).startswith(f"Reading({len(reading.tokens)} tokens, 6 layers of 12 heads: [CLS] because the")
