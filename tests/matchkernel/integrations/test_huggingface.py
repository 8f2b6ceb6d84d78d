"""transformers' models on match kernels: their own attention to rounding, and any other kernel in its place."""

import copy
import importlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AttentionInterface,
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import matchkernel as mk
from matchkernel.integrations import huggingface

sys.path.insert(0, str(Path(__file__).parent.parent))
from kernels_under_test import Cauchy, Distance
from oracle import draw

Tensor = torch.Tensor
SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
# "eager" models take their softmax in float32 whatever their dtype (where float64's least number is −∞, so that a query
# without keys gets NaN), and some their norms: they are compared in float32.
NARROW = {"rtol": 1e-4, "atol": 1e-5}
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": None}

huggingface.register("own")
huggingface.register("scaled dot", mk.ScaledDot())
huggingface.register("cauchy", Cauchy())
huggingface.register("distance", mk.ScaledDot() + 4.0 * Distance())
huggingface.register("gaussian", mk.Gaussian(torch.tensor([0.5, 1.0, 2.0, 3.0])))
huggingface.register("alibi", mk.ScaledDot() + mk.ALiBi(4))
# A query that is put in a wrong place changes ALiBi's rows by a constant, which no softmax sees; these it changes.
RELATIVE = mk.RelativeBias(4, 12, 10, bidirectional=False, generator=torch.Generator().manual_seed(0))
huggingface.register("relative", mk.ScaledDot() + 50.0 * RELATIVE)
EVERY = ("own", "cauchy", "distance", "gaussian", "alibi", "relative")


def _model(make: type, config: Any, seed: int = 0) -> PreTrainedModel:
    """Random weights of a size at which attention matters, in float64."""
    torch.manual_seed(seed)
    model = make(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "query", "key", ".q.", ".k.")):
                parameter.mul_(8.0)
    return model


def _llama(**changes: Any) -> PreTrainedModel:
    return _model(LlamaForCausalLM, LlamaConfig(**{**GROUPED, **changes}))


def _bert(**changes: Any) -> PreTrainedModel:
    return _model(BertModel, BertConfig(**{**SMALL, **changes}))


def _ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, SMALL["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def _padding(side: str, rows: int = 3, length: int = 9) -> Tensor:
    """Ones and zeros: a full row, one with three and one with five places of padding."""
    mask = torch.ones(rows, length, dtype=torch.long)
    for row, places in enumerate((0, 3, 5)[:rows]):
        if places:
            mask[row, slice(0, places) if side == "left" else slice(length - places, length)] = 0
    return mask


def _run(model: PreTrainedModel, name: str, **inputs: Any) -> Tensor:
    model.set_attn_implementation(name)
    out = model(**inputs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def _with_gradients(model: PreTrainedModel, name: str, real: Tensor, **inputs: Any) -> list[Tensor]:
    model.zero_grad()
    out = _run(model, name, **inputs)[real]
    out.sin().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _generate(model: PreTrainedModel, name: str, ids: Tensor, mask: Tensor, **how: Any) -> Tensor:
    model.set_attn_implementation(name)
    return model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False, **how)[:, ids.shape[1] :]


# The model's own attention.


@pytest.mark.parametrize("name", ["own", "scaled dot"])
@pytest.mark.parametrize("theirs", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("make", [_llama, _bert])
def test_a_scaled_dot_is_the_models_own_attention(make: Any, padding: str, theirs: str, name: str) -> None:
    model, mask = make(), None if padding == "none" else _padding(padding)
    model = model.float() if theirs == "eager" else model
    real = torch.ones(3, 9, dtype=torch.bool) if mask is None else mask.bool()
    call = {"input_ids": _ids(3, 9), "attention_mask": mask}
    truth = _with_gradients(model, theirs, real, **call)
    ours = _with_gradients(model, name, real, **call)
    assert len(ours) == len(truth) > 10
    for a, b in zip(ours, truth, strict=True):
        assert_close(a, b, **(NARROW if theirs == "eager" else CLOSE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_the_models_dtype(dtype: torch.dtype) -> None:
    model = _llama()
    truth = _run(model, "sdpa", input_ids=_ids(2, 9))
    model = model.to(dtype)
    theirs, ours = (_run(model, name, input_ids=_ids(2, 9)) for name in ("sdpa", "own"))
    assert ours.dtype == dtype
    # As far from the truth as transformers' own attention in this dtype, and one rounding.
    budget = (theirs - truth).abs().max() + torch.finfo(dtype).eps * truth.abs().max()
    assert (ours - truth).abs().max() <= 1.2 * budget


def test_a_window_a_cap_and_padding_are_the_models() -> None:
    """Gemma 2: capped scores, a scaling of its own, windows in every other layer. Mistral: windows in all."""
    gemma = _model(Gemma2ForCausalLM, Gemma2Config(
        **GROUPED, sliding_window=3, attn_logit_softcapping=2.0, query_pre_attn_scalar=5,
    )).float()  # fmt: skip
    mistral = _model(MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=3))
    for model, theirs, within in ((gemma, "eager", NARROW), (mistral, "sdpa", CLOSE)):
        for mask in (None, _padding("left")):
            call = {"input_ids": _ids(3, 9), "attention_mask": mask}
            real = torch.ones(3, 9, dtype=torch.bool) if mask is None else mask.bool()
            assert_close(_run(model, "own", **call)[real], _run(model, theirs, **call)[real], **within)
    assert torch.equal(
        _generate(mistral, "own", _ids(2, 5), _padding("left", 2, 5)),
        _generate(mistral, "sdpa", _ids(2, 5), _padding("left", 2, 5)),
    )


def test_sinks_are_the_models_with_their_gradient() -> None:
    model = _model(GptOssForCausalLM, GptOssConfig(**GROUPED, num_local_experts=4, sliding_window=4)).float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
    real = torch.ones(2, 9, dtype=torch.bool)
    truth = _with_gradients(model, "eager", real, input_ids=_ids(2, 9))
    assert model.model.layers[0].self_attn.sinks.grad.abs().min() > 0
    for a, b in zip(_with_gradients(model, "own", real, input_ids=_ids(2, 9)), truth, strict=True):
        assert_close(a, b, **NARROW)
    huggingface.register("no sinks", normalizer=mk.Softmax())
    assert (_run(model, "no sinks", input_ids=_ids(2, 9)) - truth[0].view(2, 9, -1)).abs().max() > 1e-3


def test_a_relative_bias_and_an_encoder_before_a_decoder() -> None:
    """T5: a learned bias on the scores, no scaling, cross-attention, and padding in the encoder."""
    model = _model(T5ForConditionalGeneration, T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
    ))  # fmt: skip
    call = {"input_ids": _ids(3, 9), "attention_mask": _padding("right"), "decoder_input_ids": _ids(3, 6, seed=1)}
    real = torch.ones(3, 6, dtype=torch.bool)
    truth, ours = (_with_gradients(model, name, real, **call) for name in ("eager", "own"))
    for a, b in zip(ours, truth, strict=True):
        assert_close(a, b, **NARROW)
    mask = _padding("right")
    assert torch.equal(_generate(model, "own", _ids(3, 9), mask), _generate(model, "eager", _ids(3, 9), mask))


# Masks and order, with kernels of one's own.


@pytest.mark.parametrize("name", EVERY)
def test_the_future_is_not_seen(name: str) -> None:
    model, ids = _llama(), _ids(2, 9)
    for mask in (None, _padding("left", 2)):
        before = _run(model, name, input_ids=ids, attention_mask=mask)
        for i in range(1, 8):
            later = ids.clone()
            later[:, i + 1 :] = _ids(2, 8 - i, seed=i)
            after = _run(model, name, input_ids=later, attention_mask=mask)
            assert torch.equal(after[:, : i + 1], before[:, : i + 1])
            assert not torch.equal(after[:, i + 1 :], before[:, i + 1 :])


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [_llama, _bert])
def test_padded_is_trimmed(make: Any, side: str, name: str) -> None:
    model, ids, mask = make(), _ids(3, 9), _padding(side)
    place = (mask.cumsum(-1) - 1).clamp_min(0)
    batch = _run(model, name, input_ids=ids, attention_mask=mask, position_ids=place)
    for row in range(3):
        real = mask[row].bool()
        alone = _run(model, name, input_ids=ids[row : row + 1, real])
        assert_close(batch[row, real], alone[0], **CLOSE)


@pytest.mark.parametrize("name", EVERY)
def test_generation_is_the_same_with_every_cache(name: str) -> None:
    """Greedy continuations of left-padded prompts. A static cache has room behind the query: that moves no position."""
    model, ids, mask = _llama(), _ids(3, 9), _padding("left")
    without = _generate(model, name, ids, mask, use_cache=False)
    assert len(set(without.flatten().tolist())) > 8
    assert torch.equal(_generate(model, name, ids, mask), without)
    assert torch.equal(_generate(model, name, ids, mask, cache_implementation="static"), without)
    if name == "own":
        assert torch.equal(_generate(model, "sdpa", ids, mask), without)
    else:
        assert not torch.equal(_generate(model, "sdpa", ids, mask), without)


def test_a_prompt_read_in_two_parts() -> None:
    model, ids = _llama(), _ids(2, 9)
    for name in EVERY:
        whole = _run(model, name, input_ids=ids)
        first = model(ids[:, :4], use_cache=True)
        second = model(ids[:, 4:], cache=first.cache)
        assert_close(torch.cat([first.logits, second.logits], 1), whole, **CLOSE)


def test_packed_sequences_do_not_meet() -> None:
    model, ids = _llama(), _ids(1, 9)
    place = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    for name in EVERY:
        packed = _run(model, name, input_ids=ids, position_ids=place, use_cache=False)
        apart = [_run(model, name, input_ids=ids[:, part]) for part in (slice(0, 4), slice(4, 9))]
        assert_close(packed, torch.cat(apart, 1), **CLOSE)


def test_a_mask_of_the_callers_own() -> None:
    """Four dimensions, bool or added to the scores; what is forbidden by the least number is forbidden."""
    model, ids = _llama(), _ids(2, 9)
    allowed = torch.ones(9, 9, dtype=torch.bool).tril()[None, None].expand(2, 1, -1, -1).clone()
    allowed[0, :, :, 2], allowed[0, :, 2, 2] = False, True
    added = torch.where(allowed, 0.3, torch.finfo(torch.float32).min).double()
    truth = _run(model, "sdpa", input_ids=ids, attention_mask=added)
    for name in ("own", "scaled dot"):
        for mask in (allowed, added):
            assert_close(_run(model, name, input_ids=ids, attention_mask=mask), truth, **CLOSE)
    nothing = torch.full_like(added, torch.finfo(torch.float64).min)
    assert bool(_run(model, "own", input_ids=ids, attention_mask=nothing).isfinite().all())


# The attention function by itself, against formulas written out.


def _call(name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **given: Any) -> Any:
    module = SimpleNamespace(is_causal=given.pop("module_is_causal", False), layer_idx=given.pop("layer_idx", 0))
    return AttentionInterface()[name](module, q, k, v, mask, **given)


def _by_hand(scores: Tensor, v: Tensor) -> Tensor:
    return (scores.softmax(-1) @ v.repeat_interleave(scores.shape[1] // v.shape[1], 1)).transpose(1, 2)


@pytest.fixture
def tensors() -> list[Tensor]:
    """Four heads of queries, two of keys and values."""
    return [draw(2, heads, 5, 8, seed=heads + seed) for heads, seed in ((4, 0), (2, 1), (2, 2))]


def test_what_is_left_out_stays_the_models(tensors: list[Tensor]) -> None:
    q, k, v = tensors
    dot = q @ k.repeat_interleave(2, 1).mT
    assert_close(_call("own", q, k, v, scaling=0.7)[0], _by_hand(0.7 * dot, v))
    assert_close(_call("own", q, k, v)[0], _by_hand(dot / math.sqrt(8), v))
    capped = 2.0 * torch.tanh(0.7 * dot / 2.0)
    assert_close(_call("own", q, k, v, scaling=0.7, softcap=2.0)[0], _by_hand(capped, v))
    bias = draw(1, 4, 5, 5, seed=9)
    assert_close(_call("own", q, k, v, scaling=0.7, position_bias=bias)[0], _by_hand(0.7 * dot + bias, v))
    below = torch.ones(5, 5, dtype=torch.bool).tril()
    ordered = torch.where(below, 0.7 * dot + bias, float("-inf"))
    assert_close(_call("own", q, k, v, scaling=0.7, position_bias=bias, is_causal=True)[0], _by_hand(ordered, v))
    assert_close(_call("own", q, k, v, below[None, None], scaling=0.7, position_bias=bias)[0], _by_hand(ordered, v))
    added = torch.zeros(1, 1, 5, 5, dtype=torch.float64).masked_fill(~below, torch.finfo(torch.float64).min)
    assert_close(_call("own", q, k, v, added, scaling=0.7, position_bias=bias)[0], _by_hand(ordered, v))
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    with_sinks = torch.cat([dot, sinks[:, None, None].expand(2, -1, 5, 1)], -1).softmax(-1)[..., :-1]
    truth = (with_sinks @ v.repeat_interleave(2, 1)).transpose(1, 2)
    assert_close(_call("own", q, k, v, scaling=1.0, s_aux=sinks)[0], truth)


def test_what_is_given_replaces_it(tensors: list[Tensor]) -> None:
    q, k, v = tensors
    distance = torch.cdist(q, k.repeat_interleave(2, 1)).square()
    sinks = torch.ones(4, dtype=torch.float64)
    truth = _by_hand(-distance.log1p(), v)
    assert_close(_call("cauchy", q, k, v, scaling=0.7, softcap=2.0)[0], truth)
    huggingface.register("cold cauchy", Cauchy(), normalizer=mk.Softmax(0.5))
    assert_close(_call("cold cauchy", q, k, v, scaling=0.7, s_aux=sinks)[0], _by_hand(-2 * distance.log1p(), v))


def test_who_decides_the_order(tensors: list[Tensor]) -> None:
    """A flag in the call, else the module's, else causal; never beside a mask, and not for one query."""
    q, k, v = tensors
    free, ordered = (mk.attend(q, k, v, causal=causal).transpose(1, 2) for causal in (False, True))
    assert_close(_call("own", q, k, v, module_is_causal=True)[0], ordered)
    assert_close(_call("own", q, k, v, module_is_causal=True, is_causal=False)[0], free)
    assert_close(_call("own", q, k, v, is_causal=True)[0], ordered)
    assert_close(AttentionInterface()["own"](SimpleNamespace(), q, k, v, None)[0], ordered)
    everything = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    assert_close(_call("own", q, k, v, everything, is_causal=True)[0], free)
    assert_close(_call("own", q[..., :1, :], k, v, is_causal=True)[0], free[:, :1])
    # A cache that holds nothing yet: as many queries as written keys, and room behind them.
    room = [torch.cat([x, torch.full_like(x, float("nan"))], -2) for x in (k, v)]
    assert_close(_call("own", q, *room, is_causal=True)[0], ordered)
    bias = draw(1, 4, 5, 10, seed=9)
    biased = mk.attend(q, k, v, causal=True, mask=bias[..., :5]).transpose(1, 2)
    assert_close(_call("own", q, *room, is_causal=True, position_bias=bias)[0], biased)


def test_what_a_mask_forbids_is_not_counted(tensors: list[Tensor]) -> None:
    """Scalable softmax counts the keys that a query may attend to: the least number of a dtype forbids too."""
    q, k, v = tensors
    huggingface.register("scalable", normalizer=mk.ScalableSoftmax())
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    truth = _call("scalable", q, k, v, allowed)[0]
    for least in (torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)):
        added = torch.zeros(1, 1, 5, 5, dtype=torch.float64).masked_fill(~allowed, least)
        assert_close(_call("scalable", q, k, v, added)[0], truth)


def test_an_encoders_padding_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all queries see alike takes no n × m mask."""
    seen: list[Any] = []

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(kwargs["mask"])
        return mk.attend(*args, **kwargs)

    monkeypatch.setattr(huggingface, "attend", attend)
    _run(_bert(), "own", input_ids=_ids(3, 9), attention_mask=_padding("right"))
    assert [tuple(mask.shape) for mask in seen] == [(3, 1, 1, 9)] * 2
    _run(_bert(), "own", input_ids=_ids(3, 9), attention_mask=torch.ones(3, 9))
    assert seen[2:] == [None, None]


def test_dropout_while_training(tensors: list[Tensor]) -> None:
    q, k, v = tensors
    torch.manual_seed(0)
    many = torch.stack([_call("cauchy", q, k, v, dropout=0.4)[0] for _ in range(2000)])
    still = _call("cauchy", q, k, v)[0]
    assert many.std(0).min() > 0.01
    assert_close(many.mean(0), still, rtol=0.0, atol=5 * float((many.std(0) / 2000**0.5).max()))
    model = _llama(attention_dropout=0.5)
    first, second = (_run(model.train(), "own", input_ids=_ids(1, 9)) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(*(_run(model.eval(), "own", input_ids=_ids(1, 9)) for _ in range(2)))


# Kernels that learn, and kernels per layer.


def test_a_kernel_learns_once_it_is_one_of_the_models_modules() -> None:
    kernel = mk.Cosine(torch.nn.Parameter(torch.full((4,), 0.5)))
    huggingface.register("learned", kernel)
    model = _llama()
    names = set(model.state_dict())
    model.match_kernel = kernel
    assert set(model.state_dict()) == names | {"match_kernel.temperature"}
    assert any(p is kernel.temperature for p in model.parameters())
    model.double().train().set_attn_implementation("learned")
    assert kernel.temperature.dtype == torch.float64
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids, start, losses = _ids(4, 9), kernel.temperature.detach().clone(), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert (kernel.temperature.detach() - start).abs().min() > 1e-3


@pytest.mark.parametrize("form", [list, torch.nn.ModuleList, lambda kernels: dict(enumerate(kernels))])
def test_a_kernel_for_each_layer(form: Any) -> None:
    model, ids = _llama(), _ids(2, 9)
    kernels = [mk.Cosine(0.1), Cauchy()]
    huggingface.register("two", form(kernels))
    both = _run(model, "two", input_ids=ids)
    # By hand: the layers' attention modules run on a config each, and each config names one kernel.
    by_layer = copy.deepcopy(model)
    for number, layer in enumerate(by_layer.model.layers):
        layer.self_attn.config = copy.deepcopy(layer.self_attn.config)
        huggingface.register(f"layer {number}", kernels[number])
        layer.self_attn.config._attn_implementation_internal = f"layer {number}"
    assert_close(by_layer(ids).logits, both)
    assert not torch.equal(_run(model, "cauchy", input_ids=ids), both)


def test_none_for_a_layer_is_the_models_own_score() -> None:
    model, ids = _llama(), _ids(2, 9)
    huggingface.register("nothing new", {0: None, 1: None})
    assert torch.equal(_run(model, "nothing new", input_ids=ids), _run(model, "own", input_ids=ids))
    huggingface.register("half", [None, Cauchy()])
    assert not torch.equal(_run(model, "half", input_ids=ids), _run(model, "own", input_ids=ids))


def test_registering_a_name_again_replaces_its_kernel() -> None:
    model, ids = _llama(), _ids(2, 9)
    huggingface.register("mine", mk.ScaledDot())
    before = _run(model, "mine", input_ids=ids)
    huggingface.register("mine", Cauchy())
    assert torch.equal(model(ids).logits, _run(model, "cauchy", input_ids=ids))
    assert not torch.equal(model(ids).logits, before)


def test_the_weights_on_request() -> None:
    model, ids = _llama(), _ids(2, 9)
    model.set_attn_implementation("eager")
    truth = model(ids, output_attentions=True).attentions
    model.set_attn_implementation("own")
    ours = model(ids, output_attentions=True)
    for a, b in zip(ours.attentions, truth, strict=True):
        assert a.shape == (2, 4, 9, 9)
        assert_close(a, b, **NARROW)
    assert model(ids).attentions is None
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_model_is_one_graph() -> None:
    torch._dynamo.reset()
    model = _llama().float()
    huggingface.register("cosine", mk.Cosine(0.2))
    for name in ("cosine", "cauchy"):
        plain = [_run(model, name, input_ids=_ids(2, n)) for n in (9, 12)]
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for n, truth in zip((9, 12), plain, strict=True):
            assert_close(compiled(input_ids=_ids(2, n)).logits, truth, rtol=1e-4, atol=1e-5)


def test_the_readmes_lines_run() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(readme.partition("<!-- transformers -->\n```python\n")[2].partition("```")[0], names)
    assert names["model"](_ids(1, 4)).logits.isfinite().all()
    assert names["model"].config._attn_implementation == "gaussian"


# What cannot work says so.


def test_without_transformers_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "matchkernel.integrations.huggingface")
    with pytest.raises(ImportError, match=r"pip install 'transformers>=5\.24'"):
        importlib.import_module("matchkernel.integrations.huggingface")


def test_the_library_does_not_import_transformers() -> None:
    names = [name for name in Path(mk.__file__).parent.rglob("*.py") if "integrations" not in name.parts]
    assert names and not [name for name in names if "transformers import" in name.read_text(encoding="utf-8")]


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("eager", ValueError, "taken by transformers"),
        ("sdpa", ValueError, "taken by transformers"),
        ("flash_gaussian", ValueError, "reads a meaning"),
        ("me/gaussian", ValueError, "reads a meaning"),
        ("paged|gaussian", ValueError, "reads a meaning"),
        ("", TypeError, "expected a string"),
        (3, TypeError, "expected a string"),
    ],
)
def test_names_that_cannot_be_used(name: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        huggingface.register(name, mk.Dot())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kernel": mk.Dot}, "it is a class, so add parentheses"),
        ({"kernel": torch.nn.Linear(2, 2)}, "or one for each layer"),
        ({"kernel": [mk.Dot(), "cosine"]}, "got 'cosine'"),
        ({"kernel": []}, r"got \[\]"),
        ({"kernel": {"0": mk.Dot()}}, "layers by their index, got '0'"),
        ({"normalizer": torch.nn.Softmax(-1)}, "expected a Normalizer"),
    ],
)
def test_kernels_and_normalisers_that_cannot_be_used(given: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        huggingface.register("never", **given)
    assert "never" not in AttentionInterface()


def test_what_a_running_model_is_told(tensors: list[Tensor]) -> None:
    model = _llama()
    with pytest.raises(ValueError, match="unregistered"):
        model.set_attn_implementation("unregistered")
    for kernel in ([Cauchy()], {0: Cauchy()}):
        huggingface.register("one layer", kernel)
        with pytest.raises(ValueError, match="layer 1 has no kernel among the 1 that were registered"):
            _run(model, "one layer", input_ids=_ids(1, 4))
    with pytest.raises(ValueError, match="does not say which layer it is"):
        AttentionInterface()["one layer"](SimpleNamespace(), *tensors, None)
    for unknown in ("sinks", "indices", "block_indices"):
        with pytest.raises(ValueError, match=f"{unknown}=.*keep this model's own implementation"):
            _call("own", *tensors, **{unknown: tensors[0]})
    huggingface.register("fused only", Cauchy(), engine="fused")
    with pytest.raises(ValueError, match="not a DotKernel"):
        _run(model, "fused only", input_ids=_ids(1, 4))
