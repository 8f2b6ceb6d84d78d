"""A small random decoder is transformers' Llama, and takes in its attention step whatever an encoder takes."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.dissect import Architecture, Decoder, Tokens
from tests.matchkernel.dissect.llama import llama_weights

SIZE = Architecture(
    name="tiny", layers=3, heads=4, kv_heads=2, d_model=24, d_head=8, d_feedforward=20, vocabulary=27, positions=40,
    norm_eps=1e-3, source="nowhere", licence="none",
)  # fmt: skip
TEXT = "thequickbrownfoxjumps"
OTHER = "overthelazydog"
END = 26


class Letters:
    """A letter is a piece; piece 26 is a mark."""

    marks = frozenset({END})

    def __call__(self, text):
        return self.from_ids([ord(letter) - ord("a") for letter in text])

    def from_ids(self, ids):
        text = self.join(ids)
        return Tokens(text, torch.tensor(ids, dtype=torch.long), list(text), [(i, i + 1) for i in range(len(text))])

    def join(self, ids):
        return "".join(chr(index + ord("a")) for index in ids)


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    model = Decoder(SIZE, Letters(), mk.Rotary(8, base=50.0, interleaved=True)).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.7 if parameter.ndim > 1 else 0.1) + ("norm" in name))
    return model


@pytest.fixture(scope="module")
def llama(tiny):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=27, hidden_size=24, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=40, rms_norm_eps=1e-3, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 50.0}, attn_implementation="eager",
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).double().eval()
    theirs.load_state_dict(llama_weights(tiny, 4, 2), strict=True)
    return theirs


def test_everything_equals_transformers(tiny, llama):
    reading = tiny.read(TEXT)
    with torch.no_grad():
        out = llama(reading.tokens.ids[None], output_hidden_states=True, output_attentions=True)
    # Their norms and cosines are float32 even here, beside logits of standard deviation 3.
    assert_close(reading.logits, out.logits[0], rtol=0, atol=2e-4)
    assert_close(reading.hidden[:3], torch.cat(out.hidden_states[:3]), rtol=0, atol=2e-4)
    assert_close(tiny.norm(reading.hidden[3]), out.hidden_states[3][0], rtol=0, atol=2e-4)
    assert_close(reading.weights, torch.cat(out.attentions), rtol=0, atol=2e-5)
    chances = out.logits[0].log_softmax(-1)
    expected = -torch.stack([chances[i, index] for i, index in enumerate(reading.tokens.ids[1:])])
    assert_close(reading.losses, expected, rtol=0, atol=2e-4)
    assert reading.logits.std() > 1
    assert reading.hidden.shape == (4, 21, 24)
    assert reading.inputs.shape == (3, 21, 24)
    assert reading.queries.shape == reading.keys.shape == reading.values.shape == reading.mixed.shape == (3, 4, 21, 8)


def test_positions_equal_transformers(tiny, llama):
    places = torch.tensor([0, 3, 4, 9, 9, 20, 2, 39, 1, 1, 0, 5, 5, 30, 8, 7, 6, 11, 12, 13, 2])
    with torch.no_grad():
        out = llama(tiny.tokenize(TEXT).ids[None], position_ids=places[None])
    reading = tiny.read(TEXT, position=places)
    assert_close(reading.logits, out.logits[0], rtol=0, atol=2e-4)
    assert_close(tiny.losses([TEXT], position=places)[0], reading.losses, rtol=0, atol=1e-10)
    assert_close(tiny.losses([TEXT], position=lambda tokens: places)[0], reading.losses, rtol=0, atol=1e-10)
    plain = tiny.read(TEXT)
    assert not torch.allclose(reading.logits, plain.logits, atol=0.1)
    assert_close(tiny.read(TEXT, position=torch.arange(7, 28)).logits, plain.logits, rtol=0, atol=1e-9)


def test_without_places_only_the_set_of_earlier_tokens_counts(tiny):
    def nowhere(tokens):
        return torch.zeros(len(tokens))

    def last(text):
        reading = tiny.read(text, {1: 0 * mk.Dot(), 2: 0 * mk.Dot()}, position=nowhere)
        return reading.weights[0, :, -1].sort().values

    assert_close(last("thequickb"), last("ehtquickb"))
    reading = tiny.read("thequickb", position=nowhere)
    block = tiny.layers[0]
    assert_close(reading.queries[0].transpose(0, 1).flatten(1), reading.inputs[0] @ block.query.weight.T)


@pytest.mark.parametrize("places", [torch.zeros(5), torch.zeros(1, 21), torch.zeros(())])
def test_a_position_for_each_token(tiny, places):
    with pytest.raises(ValueError, match=r"position has shape .*; expected \(21,\)"):
        tiny.read(TEXT, position=places)
    with pytest.raises(ValueError, match=r"position has shape .*; expected \(21,\)"):
        tiny.losses([TEXT], position=lambda tokens: places)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_positions_are_finite_tensors(tiny, bad):
    places = torch.arange(21.0).index_fill(0, torch.tensor(4), bad)
    for run in (tiny.read, lambda text, position: tiny.losses([text], position=position)):
        with pytest.raises(ValueError, match="position holds NaN or infinity"):
            run(TEXT, position=places)
        with pytest.raises(TypeError, match="position returned a list; expected a tensor"):
            run(TEXT, position=lambda tokens: list(range(len(tokens))))
        with pytest.raises(TypeError, match="position: expected a tensor or a function of Tokens, got list"):
            run(TEXT, position=list(range(21)))


def test_inputs_make_queries_keys_and_values(tiny):
    reading = tiny.read(TEXT)
    x = reading.hidden[1]
    rms = (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    assert_close(reading.inputs[1], x / rms * tiny.layers[1].attention_norm.weight)
    at = torch.arange(21, dtype=torch.float64)
    for index, shared in enumerate((0, 0, 1, 1)):
        head = tiny.head(1, index)
        assert_close(head.W_K, tiny.layers[1].key.weight[8 * shared : 8 * shared + 8].T)
        assert_close(head.W_V, tiny.layers[1].value.weight[8 * shared : 8 * shared + 8].T)
        assert_close(head.W_Q, tiny.layers[1].query.weight[8 * index : 8 * index + 8].T)
        assert_close(head.W_O, tiny.layers[1].output.weight[:, 8 * index : 8 * index + 8].T)
        for bare, met in ((head.query, reading.queries), (head.key, reading.keys)):
            pairs = torch.view_as_complex(bare(reading.inputs[1]).unflatten(-1, (4, 2)).contiguous())
            turns = torch.exp(1j * at[:, None] * 50.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8))
            assert_close(met[1, index], torch.view_as_real(pairs * turns).flatten(-2))
        assert_close(head.value(reading.inputs[1]), reading.values[1, index])
        assert (head.b_Q == 0).all() and (head.b_K == 0).all() and (head.b_V == 0).all()
        assert head.scale == 1 / math.sqrt(8)
        assert head.rotation is tiny.rotation


def test_a_heads_scores_are_those_of_the_reading(tiny):
    reading = tiny.read(TEXT)
    earlier = torch.ones(21, 21, dtype=torch.bool).tril()
    for head in tiny.heads():
        x = reading.inputs[head.layer]
        expected = reading.scores[head.layer, head.index]
        assert (expected[~earlier] == -math.inf).all()
        assert_close(head.scores(x)[earlier], expected[earlier])
        assert_close(head.terms(x).total[earlier], expected[earlier])
        there, here = torch.arange(4, 9), torch.arange(12, 16)
        some = head.scores(x[here], x[there], query_position=here, key_position=there)
        assert_close(some, expected[12:16, 4:9])
        assert_close(head.scores(x[here], query_position=here, key_position=here)[3, 1], expected[15, 13])
        far = head.scores(x[here], x[there], query_position=here + 1000, key_position=there + 1000)
        assert_close(far, some)
        assert not torch.allclose(head.scores(x[here], x[there], query_position=here, key_position=here[:1]), some)
        assert_close(head.scores(x, scale=1.0), math.sqrt(8) * head.scores(x))
    with pytest.raises(ValueError, match=r"query_position and key_position"):
        head.scores(x[:3], x)
    with pytest.raises(ValueError, match=r"query_position and key_position"):
        head.terms(x[:3], x, key_position=there)


def test_a_rotation_turns_whole_chunks_and_leaves_the_rest(tiny):
    torch.manual_seed(1)
    head = tiny.head(0, 1)
    at = torch.tensor([0, 2, 3, 9, 9, 4])
    one, two, rest = (torch.randn(6, width, dtype=torch.float64) for width in (8, 8, 3))
    turned = head.rotate(torch.cat([one, two, rest], 1), at)
    alone = [head.rotation.encode_query(part, at) for part in (one, two)]
    assert_close(turned, torch.cat([*alone, rest], 1), rtol=0, atol=0)
    assert_close(head.rotate(rest, at), rest, rtol=0, atol=0)
    stacked = torch.stack([torch.cat([one, two], 1), torch.cat([two, one], 1)])[None]
    assert_close(head.rotate(stacked, at[None, None])[0, 1], torch.cat(alone[::-1], 1), rtol=0, atol=0)
    bare = replace(head, rotation=None)
    assert_close(bare.rotate(one, at), one, rtol=0, atol=0)


def test_terms_of_a_rotary_head_with_biases_are_refused(tiny):
    x = torch.randn(4, 24, dtype=torch.float64)
    for name in ("b_Q", "b_K"):
        biased = replace(tiny.head(0, 0), **{name: torch.ones(8, dtype=torch.float64)})
        with pytest.raises(ValueError, match="biases and a rotation"):
            biased.terms(x)
        assert biased.scores(x).shape == (4, 4)


def test_losses_are_those_of_the_reading_alone_and_in_batches(tiny):
    texts = [TEXT, OTHER, "lazydogoverthe", "a", "ab"]
    alone = [tiny.read(text).losses for text in texts]
    for batch in (1, 2, 8):
        for found, expected in zip(tiny.losses(texts, batch=batch), alone, strict=True):
            assert_close(found, expected, rtol=0, atol=1e-10)
    assert [len(text) for text in alone] == [20, 13, 13, 0, 1]
    assert tiny.loss(texts) == pytest.approx(float(torch.cat(alone).mean()), abs=1e-10)
    assert_close(tiny.losses([tiny.tokenize(TEXT)])[0], alone[0], rtol=0, atol=1e-10)
    assert tiny.losses([]) == []


def test_losses_of_many_tokens_come_a_part_at_a_time(tiny, monkeypatch):
    from matchkernel.dissect import decoder

    expected = tiny.losses([TEXT, TEXT])
    monkeypatch.setattr(decoder, "ROWS", 7)
    for found, whole in zip(tiny.losses([TEXT, TEXT]), expected, strict=True):
        assert_close(found, whole, rtol=0, atol=1e-10)


def test_losses_make_no_table(tiny, monkeypatch):
    from matchkernel import attention

    def refuse(*_, **__):
        raise AssertionError("a table was asked for")

    monkeypatch.setattr(attention, "weights", refuse)
    monkeypatch.setattr(attention, "scores", refuse)
    assert len(tiny.losses([TEXT])[0]) == 20
    with pytest.raises(AssertionError, match="a table"):
        tiny.read(TEXT)


def test_a_loss_needs_two_tokens_and_a_list(tiny):
    with pytest.raises(ValueError, match=r"no text has two tokens"):
        tiny.loss(["a", "b"])
    with pytest.raises(ValueError, match=r"no text has two tokens"):
        tiny.loss([])
    for measure in (tiny.loss, tiny.losses):
        with pytest.raises(TypeError, match=r"list of strings; for one text write \[text\]"):
            measure(TEXT)


CHANGES = {
    "kernel": {"kernel": mk.Gaussian(bandwidth=1.5)},
    "layer": {"kernel": {1: 0 * mk.Dot()}},
    "normalizer": {"normalizer": {(1, 2): mk.Softmax(temperature=0.5)}},
    "hook": {"intervene": lambda layer, q, k, v: (q, k, 0 * v if layer == 1 else v)},
    "mask": {"mask": lambda tokens: torch.arange(len(tokens)) != 1},
    "window": {"window": 3},
    "sinks": {
        "mask": lambda tokens: (
            (torch.arange(len(tokens)) < 2) | (torch.arange(len(tokens))[:, None] - torch.arange(len(tokens)) < 3)
        )
    },
    "position": {"position": lambda tokens: 2 * torch.arange(len(tokens))},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_losses_and_completions_take_what_read_takes(tiny, change):
    reading = tiny.read(TEXT, **change)
    assert not torch.allclose(reading.losses, tiny.read(TEXT).losses, atol=1e-3)
    assert_close(tiny.losses([TEXT, OTHER], **change)[0], reading.losses, rtol=0, atol=1e-9)
    assert tiny.loss([TEXT], **change) == pytest.approx(float(reading.losses.mean()), abs=1e-9)
    earlier = torch.ones(21, 21, dtype=torch.bool).tril()
    assert (reading.weights[..., ~earlier] == 0).all()
    text, written = TEXT, tiny.complete(TEXT, 4, **change)
    for letter in written:
        assert letter == Letters().join([int(tiny.read(text, **change).logits[-1].argmax())])
        text += letter
    assert len(written) == 4 or int(tiny.read(text, **change).logits[-1].argmax()) == END


def test_a_window_and_a_few_first_tokens(tiny):
    weights = tiny.read(TEXT, **CHANGES["sinks"]).weights
    i, j = torch.arange(21)[:, None], torch.arange(21)
    assert ((weights > 0) == ((j <= i) & ((i - j < 3) | (j < 2)))).all()
    assert ((tiny.read(TEXT, window=3).weights > 0) == ((j <= i) & (i - j < 3))).all()


def test_a_kernel_gets_rotated_queries_and_keys(tiny):
    plain = tiny.read(TEXT)
    bare = tiny.read(TEXT, {0: mk.Dot()})
    assert_close(bare.queries[0], plain.queries[0])
    earlier = torch.ones(21, 21, dtype=torch.bool).tril()
    assert_close(bare.scores[0][:, earlier], (plain.queries[0] @ plain.keys[0].mT)[:, earlier])


def test_the_hook_sees_rotated_queries_and_keys_of_every_head(tiny):
    seen = []

    def look(layer, q, k, v):
        seen.append((q, k, v))
        return q, k, v

    reading = tiny.read(TEXT, intervene=look)
    for kept, part in zip((reading.queries, reading.keys, reading.values), zip(*seen, strict=True), strict=True):
        assert_close(kept, torch.stack(part), rtol=0, atol=0)
    seen.clear()
    tiny.losses([TEXT, TEXT], intervene=look)
    assert [tuple(q.shape) for q, _, _ in seen] == [(4, 21, 8)] * 6


class Deaf(Decoder):
    """Writes one letter whatever it reads."""

    letter = 3

    def _logits(self, hidden):
        return nn.functional.one_hot(torch.tensor(self.letter), 27).expand(*hidden.shape[:-1], 27).to(hidden.dtype)


def test_a_completion_ends_at_a_mark_or_after_so_many_tokens():
    model = Deaf(SIZE, Letters(), mk.Rotary(8, interleaved=True))
    assert model.complete("the", 5) == "ddddd"
    assert len(model.complete("the")) == 16
    model.letter = END
    assert model.complete("the", 5) == ""
    model.letter = 3
    with pytest.raises(ValueError, match=r"41 tokens; tiny has 40 positions"):
        model.complete("a" * 39, 3)
    with pytest.raises(ValueError, match=r"tokens=0: expected at least 1"):
        model.complete("the", 0)


def test_a_text_may_be_given_by_its_numbers(tiny):
    tokens = tiny.from_ids([19, 7, 4])
    assert tokens.source == "the"
    assert_close(tiny.read(tokens).logits, tiny.read("the").logits, rtol=0, atol=0)
    assert tiny.from_ids(torch.tensor([19, 7, 4])).ids.tolist() == [19, 7, 4]
    assert tiny.from_ids(torch.tensor([19, 7, 4])).ids.dtype == torch.int64
    with pytest.raises(ValueError, match=r"ids \[27, -1\] are outside the vocabulary, 0…26"):
        tiny.from_ids([3, 27, -1])
    with pytest.raises(ValueError, match="the text is empty; tiny reads at least one token"):
        tiny.from_ids([])
    with pytest.raises(ValueError, match=r"has 41 tokens; tiny has 40 positions"):
        tiny.from_ids([1] * 41)
    for ids in (torch.tensor([1.7, 2.0]), "123", [1, 2.0]):
        with pytest.raises(TypeError, match="integer"):
            tiny.from_ids(ids)
    with pytest.raises(ValueError, match=r"ids has shape \(3, 1\): expected one number for each piece"):
        tiny.from_ids(torch.ones(3, 1, dtype=torch.long))


@pytest.mark.parametrize("wrong", [27, -1])
def test_pieces_outside_the_vocabulary_are_named(tiny, wrong):
    text = Tokens("d?", torch.tensor([3, wrong]), ["d", "?"], [(0, 1), (1, 2)])
    for run in (tiny.read, lambda text: tiny.losses([text]), tiny.complete):
        with pytest.raises(ValueError, match=r"ids \[.*\] are outside the vocabulary, 0…26"):
            run(text)


def test_texts_are_checked(tiny):
    for given in ("", tiny._pieces("")):
        with pytest.raises(ValueError, match="the text is empty; tiny reads at least one token"):
            tiny.read(given)
    with pytest.raises(ValueError, match=r"the text has 41 tokens; tiny has 40 positions"):
        tiny.losses(["a" * 41])
    with pytest.raises(ValueError, match=r"the text is not valid Unicode: '\\udce9' at 2"):
        tiny.tokenize("ab\udce9")
    with pytest.raises(TypeError, match="text must be a string, not int"):
        tiny.read(3)
    assert len(tiny.read("a" * 40).losses) == 39


def test_gradients_flow_only_when_asked_for(tiny):
    temperature = nn.Parameter(torch.ones(4, dtype=torch.float64))
    kernel = mk.Cosine(temperature)
    assert not tiny.losses([TEXT], kernel)[0].requires_grad
    assert not tiny.read(TEXT, kernel).losses.requires_grad
    for run in (
        lambda: tiny.losses([TEXT], kernel, differentiable=True)[0],
        lambda: tiny.read(TEXT, kernel, differentiable=True).losses,
    ):
        temperature.grad = None
        run().sum().backward()
        assert (temperature.grad != 0).all()
    assert all(parameter.grad is None for parameter in tiny.parameters())


def test_repr_says_what_is_there(tiny):
    lines = repr(tiny).splitlines()
    assert lines[0] == "tiny: 3 layers of 4 heads that share 2 sets of keys and values, d_model 24, d_head 8"
    count = 27 * 24 + 3 * (24 * 32 * 2 + 24 * 16 * 2 + 24 * 20 * 3 + 48) + 24
    assert lines[1] == f"  {count:,} parameters, {count * 8 / 2**20:.1f} MiB in float64 on cpu"
    assert lines[2:] == ["  from nowhere", "  licence none"]
