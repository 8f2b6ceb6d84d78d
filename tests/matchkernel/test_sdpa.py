"""The default is torch's own attention: bit for bit where torch runs the same kernel, to one rounding elsewhere."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

import matchkernel as mk

sys.path.insert(0, str(Path(__file__).parent))
from oracle import draw, inputs

Tensor = torch.Tensor
LOW = (torch.bfloat16, torch.float16)


def _with_gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, leaves, draw(*out.shape, seed=9, dtype=out.dtype))]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 33, 130])
def test_value_and_gradients_are_torchs_bit_for_bit(dtype: torch.dtype, causal: bool, n: int) -> None:
    leaves = [x.requires_grad_() for x in inputs(2, 3, n=n, m=n, d=16, width=16, dtype=dtype)]
    q, k, v = leaves
    ours = _with_gradients(mk.attend(q, k, v, causal=causal), leaves)
    theirs = _with_gradients(sdpa(q, k, v, is_causal=causal), leaves)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", LOW)
def test_half_precision_is_torchs_to_one_rounding(dtype: torch.dtype, causal: bool) -> None:
    leaves = [x.requires_grad_() for x in inputs(2, 3, n=65, m=65, d=16, width=16, dtype=dtype)]
    q, k, v = leaves
    ours = _with_gradients(mk.attend(q, k, v, causal=causal), leaves)
    theirs = _with_gradients(sdpa(q, k, v, is_causal=causal), leaves)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype
        assert_close(a, b, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps * float(b.abs().max()))


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (7, 7)])
def test_bool_and_float_masks_are_torchs(shape: tuple[int, int]) -> None:
    n, m = shape
    q, k, v = inputs(2, 3, n=n, m=m, d=8, width=8)
    allowed = draw(2, 1, n, m, seed=4) > -0.5
    allowed[..., 0] = True
    assert_close(mk.attend(q, k, v, mask=allowed), sdpa(q, k, v, attn_mask=allowed))
    bias = draw(3, n, m, seed=5)
    assert_close(mk.attend(q, k, v, mask=bias), sdpa(q, k, v, attn_mask=bias[None].expand(2, -1, -1, -1)))


def test_grouped_heads_are_torchs() -> None:
    q, k, v = draw(2, 6, 9, 8, seed=1), draw(2, 2, 9, 8, seed=2), draw(2, 2, 9, 8, seed=3)
    assert_close(mk.attend(q, k, v, causal=True), sdpa(q, k, v, is_causal=True, enable_gqa=True))


@pytest.mark.parametrize("scale", [None, 0.3, -0.4])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6)])
def test_the_drop_in_keeps_torchs_conventions(shape: tuple[int, int], is_causal: bool, scale: float | None) -> None:
    """Above all the causal order: aligned to the start, so that with more keys than queries the last are unseen."""
    n, m = shape
    q, k, v = inputs(2, 3, n=n, m=m, d=8, width=8)
    ours = mk.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
    if is_causal and scale is not None and scale < 0:
        # torch itself returns NaN here, see the traps; the same scores with the sign in the query.
        assert_close(ours, sdpa(q * scale, k, v, is_causal=True, scale=1.0))
    else:
        assert_close(ours, sdpa(q, k, v, is_causal=is_causal, scale=scale))


def test_the_drop_in_takes_masks_kernels_and_groups_as_torch_does() -> None:
    q, k, v = inputs(2, 4, n=5, m=6, d=8, width=8)
    mask = draw(5, 6, seed=4) > -1
    mask[:, 0] = True
    assert_close(mk.scaled_dot_product_attention(q, k, v, mask), sdpa(q, k, v, mask))
    grouped = mk.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
    assert_close(grouped, sdpa(q, k[:, :2], v[:, :2], enable_gqa=True))
    directions = [x / x.norm(dim=-1, keepdim=True) for x in (q, k)]
    by_cosine = mk.scaled_dot_product_attention(q, k, v, scale=3.0, kernel=mk.Cosine())
    assert_close(by_cosine, sdpa(*directions, v, scale=3.0))


def test_the_drop_in_refuses_what_torch_refuses() -> None:
    q, k, v = inputs(2, 4, n=5, m=5, d=8, width=8)
    with pytest.raises(ValueError, match="attn_mask and is_causal"):
        mk.scaled_dot_product_attention(q, k, v, torch.ones(5, 5, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match=r"query has shape \(2, 4, 5, 8\).*enable_gqa=True"):
        mk.scaled_dot_product_attention(q, k[:, :2], v[:, :2])


def test_dropout_reaches_the_weights() -> None:
    q, k, v = inputs(2, 4, n=5, m=5, d=8, width=8)
    torch.manual_seed(3)
    ours = mk.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert not torch.equal(ours, sdpa(q, k, v))
    many = torch.stack([mk.attend(q, k, v, dropout=0.5) for _ in range(4000)])
    # The mean of 4000 draws, each with a standard deviation below 3.
    assert_close(many.mean(0), sdpa(q, k, v), rtol=0.0, atol=5 * float((many.std(0) / 4000**0.5).max()))


class _Counted:
    """Our function in the place of torch's, counting its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
        self.calls = 0
        self.given = given
        monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return mk.scaled_dot_product_attention(*args, **kwargs, **self.given)


def _encoder_layer() -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True, norm_first=True, dtype=torch.float64)


ENCODER_CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"src_key_padding_mask": torch.tensor([[False] * 6, [False] * 4 + [True] * 2])},
    "a mask": {"src_mask": torch.triu(torch.full((6, 6), float("-inf"), dtype=torch.float64), 1)},
    "causal": {"src_mask": nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64), "is_causal": True},
}


@pytest.mark.parametrize("call", ENCODER_CALLS)
def test_torchs_own_layers_run_on_the_drop_in(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    layer, x = _encoder_layer(), draw(2, 6, 16, seed=1).requires_grad_()
    leaves = [x, *layer.parameters()]
    truth = _with_gradients(layer(x, **ENCODER_CALLS[call]), leaves)
    counted = _Counted(monkeypatch)
    ours = _with_gradients(layer(x, **ENCODER_CALLS[call]), leaves)
    assert counted.calls == 1
    for a, b in zip(ours, truth, strict=True):
        assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_torchs_own_layers_run_on_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cosine in a TransformerEncoderLayer, against the layer's own steps with the scores written out."""
    layer, x = _encoder_layer(), draw(2, 6, 16, seed=1)
    counted = _Counted(monkeypatch, kernel=mk.Cosine(0.2))
    ours = layer(x)
    assert counted.calls == 1
    attention = layer.self_attn
    normed = layer.norm1(x)
    q, k, v = (
        part.unflatten(-1, (4, 4)).transpose(1, 2)
        for part in nn.functional.linear(normed, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
    )
    cosine = nn.functional.cosine_similarity(q.unsqueeze(-2), k.unsqueeze(-3), dim=-1)
    heads = ((cosine / 0.2).softmax(-1) @ v).transpose(1, 2).flatten(-2)
    x = x + attention.out_proj(heads)
    x = x + layer.linear2(nn.functional.relu(layer.linear1(layer.norm2(x))))
    assert_close(ours, x)


@pytest.mark.parametrize("padded", [False, True])
def test_a_transformers_model_runs_on_the_drop_in(monkeypatch: pytest.MonkeyPatch, padded: bool) -> None:
    """Grouped heads, a causal order and a padded batch, through the call that transformers' "sdpa" makes."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa",
    )).double()  # fmt: skip
    ids = torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 7, dtype=torch.long)
    if padded:
        mask[1, :3] = 0
    truth = _with_gradients(model(ids, attention_mask=mask).logits[mask.bool()], list(model.parameters()))
    counted = _Counted(monkeypatch)
    ours = _with_gradients(model(ids, attention_mask=mask).logits[mask.bool()], list(model.parameters()))
    assert counted.calls == 2
    for a, b in zip(ours, truth, strict=True):
        assert_close(a, b, rtol=1e-9, atol=1e-11)
