"""Feature kernels where attention is part of something larger: layers, opened models, transformers' models."""

import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

import matchkernel as mk
from matchkernel.integrations import huggingface

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "dissect"))
from kernels_under_test import Squares
from oracle import draw
from tiny import make_decoder

Tensor = torch.Tensor


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def kernels(d: int) -> list[mk.FeatureKernel]:
    return [
        mk.EluFeatures(), mk.TaylorFeatures(), mk.PolynomialFeatures(3, 4.0), mk.DPFPFeatures(2), mk.CosFeatures(64),
        mk.FavorFeatures(d, 40, generator=seeded(0)), mk.HyperbolicFeatures(d, 40, generator=seeded(0)),
        mk.FourierFeatures(d, 40, 6.0, generator=seeded(0)), mk.HedgehogFeatures(d), Squares(),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(10))
def test_a_layer_of_many_heads(number: int) -> None:
    kernel = kernels(4)[number].double()
    layer = mk.MultiHeadAttention(12, 3, head_dim=4, kv_heads=1, kernel=kernel).double()
    x = draw(2, 6, 12).requires_grad_()
    out = layer(x, causal=True)
    with torch.no_grad():
        q = layer.q_proj(x).unflatten(-1, (3, 4)).transpose(1, 2)
        k, v = (projection(x)[:, None] for projection in (layer.k_proj, layer.v_proj))
        kappa = kernel.kappa(q, k.expand_as(q)).tril()
        total = kappa.sum(-1, keepdim=True)
        shares = torch.where(total == 0, 0.0, kappa / torch.where(total == 0, 1.0, total))
        assert_close(out, layer.out_proj((shares @ v).transpose(1, 2).flatten(-2)))
        assert_close(layer(x, causal=True, need_weights=True)[1], shares)
    out.sin().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    with torch.no_grad():
        later = x.detach().clone()
        later[:, 4:] += 3.0
        assert_close(layer(later, causal=True)[:, :4], out.detach()[:, :4])


@pytest.mark.parametrize("number", range(10))
def test_an_opened_decoder(number: int) -> None:
    model, kernel = make_decoder(), kernels(6)[number].double()
    text = "thequickbrownfox"
    given = {(0, 1): kernel, 1: kernel}
    out = model.losses([text], given)[0]
    assert out.isfinite().all() and not torch.allclose(out, model.losses([text])[0], atol=1e-3)
    if not kernel.nonnegative:
        with pytest.raises(ValueError, match="is signed"):
            model.read(text, given)
        return
    reading = model.read(text, given)
    assert_close(reading.losses, out)
    assert_close(reading.scores[1].exp(), kernel.kappa(reading.queries[1], reading.keys[1]).tril())
    for scores, weights in ((reading.scores[1], reading.weights[1]), (reading.scores[0, 1], reading.weights[0, 1])):
        total = scores.exp().sum(-1, keepdim=True)
        assert_close(weights, scores.exp() / torch.where(total == 0, 1.0, total))


def test_an_opened_encoder_reads_near_what_it_did_and_nearer_with_more_features() -> None:
    from matchkernel.dissect import load

    model = load("minilm")
    text = "Because the server is overloaded, the system responds slowly, and finally the request times out."
    trained = model.read(text).sentence
    near = []
    for count in (16, 4096):
        kernel = mk.FavorFeatures(32, count, generator=seeded(0))
        reading = model.read(text, kernel=kernel)
        assert reading.weights.sum(-1).sub(1).abs().max() < 1e-4
        assert_close(model.embed([text], kernel)[0], reading.sentence, rtol=0, atol=2e-5)
        near.append(float(reading.sentence @ trained))
    assert near[0] + 0.1 < near[1] and near[1] > 0.7


@pytest.mark.parametrize("number", range(10))
def test_a_transformers_model(number: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    kernel = kernels(8)[number].double()
    huggingface.register("features", kernel)
    model.set_attn_implementation("features")
    ids = torch.randint(1, 61, (2, 9), generator=seeded(0))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    # A rotation by another angle changes what a feature map sees, though no dot product: places are given.
    place = (mask.cumsum(-1) - 1).clamp_min(0)
    out = model(ids, attention_mask=mask, position_ids=place)
    assert out.logits[mask.bool()].isfinite().all()
    alone = model(ids[1:, 4:])
    assert_close(out.logits[1, 4:], alone.logits[0], rtol=1e-7, atol=1e-9)
    # One token at a time, from a cache, is what reading all of them again gives.
    grown, again = (model.generate(ids[:1], max_new_tokens=5, do_sample=False, use_cache=use) for use in (True, False))
    assert torch.equal(grown, again)
    model(ids, labels=ids).loss.backward()
    grads = [parameter.grad for name, parameter in model.named_parameters() if "q_proj" in name or "k_proj" in name]
    assert all(grad.isfinite().all() and grad.any() for grad in grads)


def test_the_readmes_feature_kernels_print_shapes_and_smaller_errors(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    exec(readme.partition("<!-- features -->\n```python\n")[2].partition("```")[0], {})
    shape, *errors = capsys.readouterr().out.splitlines()
    assert shape == "torch.Size([2, 128, 16])"
    assert [error.split(":")[0] for error in errors] == ["16 features", "128 features", "1024 features"]
    distances = [float(error.split()[2]) for error in errors]
    assert 0.25 <= distances[0] <= 0.5 and 0.05 <= distances[2] <= 0.15
