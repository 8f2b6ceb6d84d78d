"""To and from torch.nn.MultiheadAttention: the same values and gradients, to rounding."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.masks import from_key_padding

sys.path.insert(0, str(Path(__file__).parent))
from oracle import draw

Tensor = torch.Tensor
BATCH, N, M, HEADS = 3, 5, 7, 4
LATER = torch.ones(N, N, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * 7, [False] * 5 + [True] * 2, [True] + [False] * 6])
"""True = padding, and nobody is left without a key."""


def theirs(seed: int = 0, **settings: Any) -> torch.nn.MultiheadAttention:
    """torch's module in float64, with biases that are not zero."""
    torch.manual_seed(seed)
    module = torch.nn.MultiheadAttention(8, HEADS, **{"batch_first": True} | settings).double()
    for name, x in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(x)
    return module


def projections(module: torch.nn.MultiheadAttention) -> list[Tensor]:
    """The gradients of torch's parameters, as those of our projections: q, k, v and out, weights and then biases."""
    if module.in_proj_weight is None:
        weights = [module.q_proj_weight.grad, module.k_proj_weight.grad, module.v_proj_weight.grad]
    else:
        weights = list(module.in_proj_weight.grad.chunk(3))
    weights.append(module.out_proj.weight.grad)
    if module.in_proj_bias is None:
        return weights
    return [*weights, *module.in_proj_bias.grad.chunk(3), module.out_proj.bias.grad]


def gradients(layer: mk.MultiHeadAttention) -> list[Tensor]:
    of = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    return [x.weight.grad for x in of] + [x.bias.grad for x in of if x.bias is not None]


def same(module: torch.nn.MultiheadAttention, tokens: list[Tensor], of_torch: Any, of_ours: Any) -> None:
    """One call on both: outputs, weights, and the gradients of tokens and parameters, with and without weights."""
    layer = mk.MultiHeadAttention.from_torch(module)
    for need_weights in (False, True):
        results = []
        for call, setting in ((module, of_torch), (layer, of_ours)):
            call.zero_grad()
            leaves = [x.clone().requires_grad_() for x in tokens]
            given = leaves * 3 if len(leaves) == 1 else leaves
            extra = {"average_attn_weights": False} if call is module else {}
            found = call(*given, need_weights=need_weights, **setting, **extra)
            out, weights = found if isinstance(found, tuple) else (found, None)
            out.sin().sum().backward()
            of_parameters = projections(module) if call is module else gradients(layer)
            results.append([out, *([] if weights is None else [weights]), *[x.grad for x in leaves], *of_parameters])
        assert len(results[0]) == len(results[1])
        for ours, expected in zip(results[1], results[0], strict=True):
            assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("settings", [{}, {"kdim": 6}, {"vdim": 10}, {"kdim": 6, "vdim": 10}])
def test_values_and_gradients_are_torchs(settings: dict[str, Any], bias: bool) -> None:
    module = theirs(bias=bias, **settings)
    query, key = draw(BATCH, N, 8), draw(BATCH, M, settings.get("kdim", 8), seed=1)
    value = draw(BATCH, M, settings.get("vdim", 8), seed=2)
    later = torch.ones(N, M, dtype=torch.bool).triu(M - N + 1)
    each = draw(BATCH * HEADS, N, M, seed=3)
    forbidden = (each > 0.7) & (torch.arange(M) != 2)
    rows = draw(N, M, seed=4)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"attn_mask": later}, {"mask": ~later}),
        ({"attn_mask": later}, {"causal": True}),
        ({"key_padding_mask": PADDING}, {"mask": from_key_padding(PADDING)}),
        (
            {"key_padding_mask": PADDING, "attn_mask": forbidden},
            {"mask": from_key_padding(PADDING) & ~forbidden.unflatten(0, (BATCH, HEADS))},
        ),
        ({"attn_mask": rows}, {"mask": rows}),
        ({"attn_mask": each}, {"mask": each.unflatten(0, (BATCH, HEADS))}),
    ]
    for of_torch, of_ours in cases:
        same(module, [query, key, value], of_torch, of_ours)


def test_self_attention_is_torchs() -> None:
    x = draw(BATCH, N, 8)
    same(theirs(), [x], {}, {})
    same(theirs(), [x], {"attn_mask": LATER, "is_causal": True}, {"causal": True})
    same(theirs(), [x[0]], {"attn_mask": LATER}, {"causal": True})


def test_torchs_fast_path_agrees() -> None:
    """In eval without gradients torch runs other code."""
    module, x = theirs().eval(), draw(BATCH, N, 8)
    with torch.no_grad():
        expected = module(x, x, x, key_padding_mask=PADDING[:, :N], need_weights=False)[0]
        found = mk.MultiHeadAttention.from_torch(module)(x, mask=from_key_padding(PADDING[:, :N]))
    assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("settings", [{}, {"kdim": 6}, {"kdim": 6, "vdim": 10}])
def test_there_and_back(settings: dict[str, Any], bias: bool) -> None:
    module = theirs(bias=bias, dropout=0.25, **settings).eval()
    layer = mk.MultiHeadAttention.from_torch(module)
    back = layer.to_torch()
    assert type(back) is torch.nn.MultiheadAttention and back.batch_first
    assert back.dropout == layer.dropout == 0.25
    assert not back.training and not layer.training
    for (name, ours), (expected_name, expected) in zip(
        back.state_dict().items(), module.state_dict().items(), strict=True
    ):
        assert name == expected_name and ours.dtype == torch.float64
        assert torch.equal(ours, expected)
    assert all(x.requires_grad and x.is_leaf for made in (layer, back) for x in made.parameters())
    assert mk.MultiHeadAttention.from_torch(module.train()).training and layer.train().to_torch().training


@pytest.mark.parametrize("settings", [{}, {"kdim": 6}])
def test_nothing_is_shared_with_the_module(settings: dict[str, Any]) -> None:
    module = theirs(**settings)
    layer = mk.MultiHeadAttention.from_torch(module)
    back = layer.to_torch()
    given = draw(BATCH, N, 8), draw(BATCH, M, module.kdim, seed=1), draw(BATCH, M, 8, seed=2)
    expected = layer(*given)
    with torch.no_grad():
        for made in (module, back):
            for parameter in made.parameters():
                parameter.zero_()
    assert torch.equal(layer(*given), expected)


def test_a_layer_of_ours_becomes_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    for settings in ({}, {"kernel": [mk.ScaledDot() for _ in range(4)]}, {"key_dim": (6, 10), "bias": False}):
        layer = mk.MultiHeadAttention(8, 4, generator=generator, **settings).double()
        query, key = draw(BATCH, N, 8), draw(BATCH, M, layer.k_proj.in_features, seed=1)
        value = draw(BATCH, M, layer.v_proj.in_features, seed=2)
        expected = layer.to_torch()(query, key, value, need_weights=False)[0]
        assert_close(layer(query, key, value), expected, rtol=1e-12, atol=1e-12)


def test_sequence_first_modules_carry_their_weights() -> None:
    """The layout of the tokens is no weight: they are transposed by hand, and the layer stays batch first."""
    module, x = theirs(batch_first=False), draw(N, BATCH, 8)
    expected = module(x, x, x, need_weights=False)[0]
    layer = mk.MultiHeadAttention.from_torch(module)
    assert_close(layer(x.transpose(0, 1)).transpose(0, 1), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("settings", [{}, {"kdim": 6, "vdim": 10}])
def test_parametrized_weights_are_carried_as_they_stand(settings: dict[str, Any]) -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    module = theirs(**settings)
    for owner, name in ((module, "q_proj_weight" if settings else "in_proj_weight"), (module.out_proj, "weight")):
        torch.nn.utils.parametrize.register_parametrization(owner, name, Twice())
    q, k, v = draw(BATCH, N, 8), draw(BATCH, M, module.kdim), draw(BATCH, M, module.vdim)
    made = mk.MultiHeadAttention.from_torch(module)
    assert_close(made(q, k, v), module(q, k, v, need_weights=False)[0])
    assert all(x.is_leaf and x.requires_grad for x in made.parameters())


def test_chance_is_left_alone() -> None:
    module = theirs()
    before = torch.get_rng_state()
    mk.MultiHeadAttention.from_torch(module).to_torch()
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_carried_from_torch() -> None:
    for setting in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ValueError, match=f"module has {setting}=True"):
            mk.MultiHeadAttention.from_torch(theirs(**{setting: True}))
    with pytest.raises(TypeError, match=r"module: expected a torch\.nn\.MultiheadAttention, got Linear"):
        mk.MultiHeadAttention.from_torch(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


class Steeper(mk.ScaledDot):
    """A scaled dot product in name, with other scores."""

    def scale(self, width: int) -> float:
        return 2.0 * super().scale(width)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernel": mk.Gaussian()}, r"kernel Gaussian\(bandwidth=1\): torch\.nn\.MultiheadAttention has ScaledDot"),
        ({"kernel": mk.Rotary(2)}, "kernel Rotary"),
        ({"kernel": Steeper()}, r"kernel Steeper\(\)"),
        ({"kernel": [mk.ScaledDot()] * 3 + [mk.Dot()]}, r"kernel Dot\(\)"),
        ({"normalizer": mk.Softmax(0.5)}, r"normalizer Softmax\(temperature=0\.5\)"),
        ({"normalizer": mk.Softmax(torch.ones(4))}, "normalizer Softmax"),
        ({"normalizer": mk.SinkSoftmax()}, "normalizer SinkSoftmax"),
        ({"kv_heads": 2}, "kv_heads=2: torch"),
        ({"head_dim": 3}, "head_dim=3: torch"),
        ({"value_dim": 3}, "value_dim=3: torch"),
    ],
)
def test_what_torch_cannot_hold(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mk.MultiHeadAttention(8, 4, **settings).to_torch()
