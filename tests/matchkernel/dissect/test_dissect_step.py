"""The attention step is open: kernels, normalisers, hooks and masks reach exactly the heads they are meant for."""

import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.dissect import forbid, silence

TEXT = "Because the server is overloaded, the system responds slowly, and finally the request times out."


@pytest.fixture(scope="module")
def trained(model):
    return model.read(TEXT)


def test_embed_and_read_agree_and_do_not_depend_on_neighbours_or_order(model, texts):
    together = model.embed(texts)
    assert_close(together, torch.stack([model.read(text).sentence for text in texts]), rtol=0, atol=2e-6)
    assert_close(together, torch.cat([model.embed([text]) for text in texts]), rtol=0, atol=2e-6)
    assert_close(together, model.embed(texts[::-1]).flip(0), rtol=0, atol=2e-6)
    assert_close(together, model.embed([model.tokenize(text) for text in texts]), rtol=0, atol=0)


def test_equal_lengths_run_in_batches(model):
    texts = [f"the {colour} door" for colour in ("red", "blue", "green", "black", "white")]
    assert_close(model.embed(texts, batch=2), model.embed(texts), rtol=0, atol=2e-6)
    assert model.embed(texts).unique(dim=0).shape == (5, 384)


def test_the_trained_kernel_put_back_changes_nothing(model, trained):
    again = model.read(TEXT, mk.ScaledDot())
    assert_close(again.sentence, trained.sentence, rtol=0, atol=2e-6)
    assert_close(again.weights, trained.weights, rtol=0, atol=1e-5)
    same = (1 / math.sqrt(32)) * mk.Dot()
    assert_close(model.embed([TEXT], same)[0], trained.sentence, rtol=0, atol=2e-6)
    assert_close(model.embed([TEXT], mk.ScaledDot(), mk.Softmax())[0], trained.sentence, rtol=0, atol=2e-6)


def test_another_scale_changes_scores_as_it_says_and_the_sentence_with_them(model, trained):
    bare = model.read(TEXT, mk.Dot())
    assert_close(bare.scores[0], math.sqrt(32) * trained.scores[0], rtol=1e-5, atol=1e-4)
    assert_close(bare.weights[0], (math.sqrt(32) * trained.scores[0]).softmax(-1), rtol=0, atol=1e-5)
    assert bare.sentence @ trained.sentence < 0.95
    assert_close(model.embed([TEXT], mk.Dot())[0], bare.sentence, rtol=0, atol=2e-6)


def test_a_kernel_of_zero_spreads_every_weight_evenly(model, trained):
    uniform = model.read(TEXT, 0 * mk.Dot())
    assert_close(uniform.weights, torch.full_like(uniform.weights, 1 / len(uniform.tokens)))
    assert_close(uniform.mixed, uniform.values.mean(2, keepdim=True).expand_as(uniform.mixed), rtol=0, atol=1e-5)
    assert uniform.sentence @ trained.sentence < 0.7


def test_a_kernel_of_one_layer_leaves_the_others(model, trained):
    changed = model.read(TEXT, {3: 0 * mk.Dot()})
    assert_close(changed.hidden[:4], trained.hidden[:4], rtol=0, atol=0)
    assert_close(changed.scores[3], torch.zeros_like(changed.scores[3]))
    assert not torch.allclose(changed.hidden[4], trained.hidden[4], atol=1e-2)
    for layer in (4, 5):
        heads = torch.stack([model.head(layer, h).scores(changed.hidden[layer]) for h in range(12)])
        assert_close(changed.scores[layer], heads, rtol=0, atol=2e-5)


def test_a_kernel_of_one_head_leaves_the_other_heads(model, trained):
    changed = model.read(TEXT, {(2, 9): 0 * mk.Dot(), (2, 4): mk.Dot()})
    others = [h for h in range(12) if h not in (4, 9)]
    assert_close(changed.scores[2][others], trained.scores[2][others], rtol=0, atol=1e-5)
    assert_close(changed.scores[2][9], torch.zeros_like(changed.scores[2][9]))
    assert_close(changed.scores[2][4], math.sqrt(32) * trained.scores[2][4], rtol=1e-5, atol=1e-4)
    assert_close(changed.mixed[2][others], trained.mixed[2][others], rtol=0, atol=1e-5)
    assert_close(changed.mixed[2][9], trained.values[2][9].mean(0, keepdim=True).expand(len(changed.tokens), -1))
    assert_close(model.embed([TEXT], {(2, 9): 0 * mk.Dot(), (2, 4): mk.Dot()})[0], changed.sentence, rtol=0, atol=2e-6)


def test_a_heads_own_kernel_wins_over_its_layers(model, trained):
    changed = model.read(TEXT, {1: 0 * mk.Dot(), (1, 8): mk.ScaledDot()})
    assert_close(changed.scores[1][8], trained.scores[1][8], rtol=0, atol=1e-5)
    assert_close(changed.scores[1][:8], torch.zeros_like(changed.scores[1][:8]))


@pytest.mark.parametrize("place", [6, -1, (0, 12), (6, 0), (0, -1), "0", (1, 2, 3)])
@pytest.mark.parametrize("what", ["kernel", "normalizer"])
def test_a_place_outside_the_model_is_refused(model, what, place):
    part = mk.Dot() if what == "kernel" else mk.Softmax()
    with pytest.raises(ValueError, match=rf"{what} has the key .*layer 0…5.*head 0…11"):
        model.embed([TEXT], **{what: {place: part}})
    with pytest.raises(ValueError, match=rf"{what} has the key"):
        model.read(TEXT, **{what: {place: part}})


def test_a_normaliser_stands_where_it_is_put(model, trained):
    sink = model.read(TEXT, normalizer={4: mk.SinkSoftmax(logit=0.0)})
    expected = trained.scores[4].exp() / (1 + trained.scores[4].exp().sum(-1, keepdim=True))
    assert_close(sink.weights[4], expected, rtol=1e-4, atol=1e-6)
    assert_close(sink.weights[3], trained.weights[3], rtol=0, atol=0)
    cold = model.read(TEXT, normalizer={(4, 7): mk.Softmax(temperature=0.5)})
    assert_close(cold.weights[4][7], (2 * trained.scores[4][7]).softmax(-1), rtol=0, atol=1e-5)
    assert_close(cold.weights[4][:7], trained.weights[4][:7], rtol=0, atol=1e-5)
    everywhere = model.embed([TEXT], normalizer=mk.Softmax(temperature=0.5))[0]
    assert_close(everywhere, model.embed([TEXT], 2 * mk.ScaledDot())[0], rtol=0, atol=2e-6)


def test_doubling_queries_is_halving_the_temperature(model):
    def louder(layer, q, k, v):
        return 2 * q, k, v

    expected = model.embed([TEXT], normalizer=mk.Softmax(temperature=0.5))
    assert_close(model.embed([TEXT], intervene=louder), expected, rtol=0, atol=2e-6)
    assert_close(model.read(TEXT, intervene=louder).sentence, expected[0], rtol=0, atol=2e-6)


def test_the_hook_sees_one_text_at_a_time_and_every_layer(model, texts):
    seen = []

    def look(layer, q, k, v):
        seen.append((layer, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return q, k, v

    lengths = [len(model.tokenize(text)) for text in texts]
    model.embed([*texts, texts[0]], intervene=look)
    expected = [(layer, *[(12, n, 32)] * 3) for n in [*lengths, lengths[0]] for layer in range(6)]
    assert sorted(seen) == sorted(expected)
    seen.clear()
    model.read(texts[0], intervene=look)
    assert seen == [(layer, *[(12, lengths[0], 32)] * 3) for layer in range(6)]


def test_a_hook_that_averages_over_tokens_meets_only_real_ones(model, texts):
    def even_keys(layer, q, k, v):
        length = k.norm(dim=-1, keepdim=True)
        return q, k * length.mean(dim=-2, keepdim=True) / length, v

    alone = torch.stack([model.read(text, intervene=even_keys).sentence for text in texts])
    assert_close(model.embed(texts, intervene=even_keys), alone, rtol=0, atol=2e-6)
    keys = model.read(texts[0], intervene=even_keys).keys.norm(dim=-1)
    assert_close(keys, keys[..., :1].expand_as(keys), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model.embed(texts), alone, atol=1e-2)


def test_the_reading_shows_what_the_hook_left(model, trained):
    def silence(layer, q, k, v):
        v = v.clone()
        if layer == 2:
            v[5] = 0
        return q, k, v

    changed = model.read(TEXT, intervene=silence)
    assert_close(changed.mixed[2][5], torch.zeros_like(changed.mixed[2][5]))
    assert_close(changed.values[2][4], trained.values[2][4], rtol=0, atol=0)
    assert not torch.allclose(changed.hidden[3], trained.hidden[3], atol=1e-3)
    assert_close(model.embed([TEXT], intervene=silence)[0], changed.sentence, rtol=0, atol=2e-6)


def test_a_hook_must_keep_the_shapes(model):
    with pytest.raises(
        ValueError, match=r"intervene returned shapes .*\(12, 1, 32\).* in layer 0; expected .*\(12, \d+, 32\)"
    ):
        model.read(TEXT, intervene=lambda layer, q, k, v: (q, k[:, :1], v))
    with pytest.raises(ValueError, match=r"intervene returned shapes"):
        model.embed([TEXT], intervene=lambda layer, q, k, v: (q, k))


def test_a_forbidden_key_gets_nothing_and_the_rest_share(model, trained, texts):
    n = len(trained.tokens)
    mask = torch.ones(n, n, dtype=torch.bool)
    mask[:, 0] = False
    masked = model.read(TEXT, mask=mask)
    assert_close(masked.weights[..., 0], torch.zeros_like(masked.weights[..., 0]))
    assert (masked.scores[..., 0] == -math.inf).all()
    assert_close(masked.weights[0][..., 1:], trained.scores[0][..., 1:].softmax(-1), rtol=0, atol=1e-5)
    assert masked.sentence @ trained.sentence < 0.8

    def no_start(tokens):
        allowed = torch.ones(len(tokens), dtype=torch.bool)
        allowed[0] = False
        return allowed

    assert_close(model.embed([TEXT], mask=no_start)[0], masked.sentence, rtol=0, atol=2e-6)
    alone = torch.cat([model.embed([text], mask=no_start) for text in texts])
    assert_close(model.embed(texts, mask=no_start), alone, rtol=0, atol=2e-6)


def test_texts_of_one_length_keep_each_its_own_mask_and_hook(model):
    texts = ["the red door opened", "a very red door", "red paint on doors"]
    assert len({len(model.tokenize(text)) for text in texts}) == 1

    def no_red(tokens):
        allowed = torch.ones(len(tokens), dtype=torch.bool)
        allowed[tokens.find("red")] = False
        return allowed

    def even_keys(layer, q, k, v):
        length = k.norm(dim=-1, keepdim=True)
        return q, k * length.mean() / length, v

    for options in ({"mask": no_red}, {"intervene": even_keys}):
        alone = torch.stack([model.read(text, **options).sentence for text in texts])
        assert_close(model.embed(texts, **options), alone, rtol=0, atol=2e-6)


def test_a_mask_may_differ_by_head_even_where_kernels_do(model, trained):
    n = len(trained.tokens)
    mask = torch.ones(12, n, n, dtype=torch.bool)
    mask[7, :, 3] = False
    masked = model.read(TEXT, {(0, 2): mk.Dot(), (0, 7): mk.ScaledDot()}, mask=mask)
    assert (masked.scores[:, 7, :, 3] == -math.inf).all()
    assert torch.isfinite(masked.scores[:, [h for h in range(12) if h != 7]]).all()
    assert_close(masked.weights[0][6], trained.weights[0][6], rtol=0, atol=1e-5)
    assert_close(model.embed([TEXT], mask=lambda tokens: mask)[0], model.embed([TEXT], mask=mask)[0], rtol=0, atol=2e-6)


def test_a_float_mask_is_added(model, trained):
    n = len(trained.tokens)
    bias = torch.linspace(-2, 2, n).expand(n, n)
    assert_close(model.read(TEXT, mask=bias).scores[0], trained.scores[0] + bias, rtol=0, atol=1e-5)


def test_causal_and_window(model):
    n = len(model.tokenize(TEXT))
    offset = torch.arange(n)[:, None] - torch.arange(n)
    assert ((model.read(TEXT, causal=True).weights > 0) == (offset >= 0)).all()
    assert ((model.read(TEXT, window=3).weights > 0) == (offset.abs() < 3)).all()
    for options in ({"causal": True}, {"window": 3}, {"causal": True, "window": 2}):
        assert_close(model.embed([TEXT], **options)[0], model.read(TEXT, **options).sentence, rtol=0, atol=2e-6)


def test_gradients_flow_only_when_asked_for(model):
    temperature = torch.nn.Parameter(torch.ones(12))
    assert not model.embed([TEXT], mk.Cosine(temperature)).requires_grad
    original = model.embed([TEXT])[0]
    for run in (
        lambda kernel: model.embed([TEXT], kernel, differentiable=True)[0],
        lambda kernel: model.read(TEXT, kernel, differentiable=True).sentence,
    ):
        temperature.grad = None
        (run(mk.Cosine(temperature)) @ original).backward()
        assert temperature.grad.shape == (12,)
        assert (temperature.grad != 0).all()
    with torch.no_grad():
        assert not model.embed([TEXT], mk.Cosine(temperature), differentiable=True).requires_grad


def test_gradients_through_a_hook_equal_finite_differences(model):
    from matchkernel.dissect import load

    model = load("minilm").double()
    original = model.embed(["The server is overloaded."])[0]

    def similarity(size):
        hook = lambda layer, q, k, v: (q * size if layer == 4 else q, k, v)  # noqa: E731
        return model.embed(["The server is overloaded."], intervene=hook, differentiable=True)[0] @ original

    assert torch.autograd.gradcheck(similarity, torch.tensor(1.5, dtype=torch.float64, requires_grad=True))


class Recency(mk.MatchKernel):
    """A reader's own kernel: nearer is better."""

    def encode_query(self, q, position):
        return position[..., None].to(q.dtype).expand(*q.shape[:-1], 1)

    encode_key = encode_query

    def match(self, q, k):
        return -(q - k.mT).abs()


def test_a_readers_own_kernel_runs(model):
    reading = model.read(TEXT, Recency())
    n = len(reading.tokens)
    expected = -(torch.arange(n)[:, None] - torch.arange(n)).abs().float()
    assert_close(reading.scores, expected.expand(6, 12, n, n))
    assert_close(model.embed([TEXT], Recency())[0], reading.sentence, rtol=0, atol=2e-6)


HOW_WRONG = [
    ({"mask": [[True]]}, TypeError, "mask: expected a tensor or a function of Tokens, got list"),
    ({"mask": lambda tokens: [True] * len(tokens)}, ValueError, "mask returned list; expected a tensor"),
    ({"mask": lambda tokens: torch.ones(1, 1, 1, 1)}, ValueError, r"mask returned \(1, 1, 1, 1\); expected a tensor"),
    ({"intervene": 3}, TypeError, "intervene: expected a function, got int"),
    ({"intervene": lambda layer, q, k, v: None}, TypeError, "intervene returned a NoneType in layer 0"),
    ({"intervene": lambda layer, q, k, v: v}, TypeError, "intervene returned a Tensor in layer 0; expected q, k, v"),
    ({"intervene": lambda layer, q, k, v: (q.double(), k, v)}, ValueError, "torch.float32, torch.float64 in layer 0"),
    ({"heads": [1]}, TypeError, r"heads: expected a dict \{\(layer, head\): Head\}, got list"),
    ({"intervene": silence([0, 1])}, TypeError, r"a position is an integer, got \[0, 1\]"),
    ({"mask": forbid("a")}, TypeError, "a position is an integer, got 'a'"),
]


@pytest.mark.parametrize(("change", "error", "message"), HOW_WRONG)
def test_what_is_no_mask_no_hook_and_no_head_is_named(model, change, error, message):
    with pytest.raises(error, match=message):
        model.read(TEXT, **change)
    with pytest.raises(error, match=message):
        model.embed([TEXT], **change)


def test_a_head_of_another_type_than_the_model_is_named(model):
    head = model.head(2, 9)
    double = replace(head, **{name: getattr(head, name).double() for name in ("W_Q", "W_K", "b_Q", "b_K")})
    with pytest.raises(TypeError, match=r"heads\[\(2, 9\)\] is of torch.float64 on cpu; expected the model's"):
        model.read(TEXT, heads={(2, 9): double})


def test_batches_have_at_least_one_text(model):
    for batch in (0, -1):
        with pytest.raises(ValueError, match=f"batch={batch}: expected at least 1"):
            model.embed([TEXT], batch=batch)
