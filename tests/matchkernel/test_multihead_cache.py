"""A key-value cache: a text read in pieces gives what reading it at once does."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.masks import from_lengths

sys.path.insert(0, str(Path(__file__).parent))
from oracle import draw

Tensor = torch.Tensor
HEADS, LENGTH, WIDTH = 4, 11, 12

KERNELS: dict[str, Any] = {
    "scaled dot": mk.ScaledDot,
    "rotary": lambda: mk.Rotary(6),
    "rotary, interleaved part": lambda: mk.Rotary(4, interleaved=True),
    "alibi": lambda: mk.ScaledDot() + mk.ALiBi(HEADS),
    "relative bias": lambda: mk.ScaledDot() + mk.RelativeBias(HEADS, 8, 6, generator=torch.Generator().manual_seed(1)),
    "gaussian per head": lambda: mk.Gaussian(torch.tensor([0.5, 1.0, 1.5, 2.0])),
    "streamed": lambda: mk.Laplacian(2.0) + mk.ALiBi(HEADS),
    "list": lambda: [mk.Rotary(6), mk.ScaledDot() + mk.ALiBi(slopes=0.3)] * 2,
}
NORMALIZERS: dict[str, Any] = {
    "softmax": mk.Softmax,
    "sink per head": lambda: mk.SinkSoftmax(torch.tensor([0.1, 0.2, 0.3, 0.4])),
    "scalable": mk.ScalableSoftmax,
    "sigmoid": mk.Sigmoid,
    "sparsemax": mk.Sparsemax,
}


def layer(kernel: Any = None, **settings: Any) -> mk.MultiHeadAttention:
    generator = torch.Generator().manual_seed(0)
    made = mk.MultiHeadAttention(WIDTH, HEADS, kernel=kernel, head_dim=6, generator=generator, **settings).double()
    for projection in (made.q_proj, made.k_proj, made.v_proj, made.out_proj):
        with torch.no_grad():
            projection.bias.normal_(generator=generator)
    return made


def in_pieces(
    made: mk.MultiHeadAttention, x: Tensor, lengths: list[int], mask: Tensor | None = None, **call: Any
) -> Tensor:
    """x read piece after piece; a mask over all keys is cut to those that are there."""
    assert sum(lengths) == x.shape[-2]
    cache, outs = mk.KeyValueCache(), []
    for piece in x.split(lengths, dim=-2):
        seen = None if mask is None else mask[..., : len(cache) + piece.shape[-2]]
        outs.append(made(piece, mask=seen, cache=cache, causal=True, **call))
    assert len(cache) == x.shape[-2]
    return torch.cat(outs, dim=-2)


SPLITS = ([LENGTH], [1] * LENGTH, [7, 1, 1, 1, 1], [4, 3, 4], [1, 0, 9, 1])


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kernel", KERNELS)
def test_pieces_are_the_whole(kernel: str, kv_heads: int) -> None:
    made, x = layer(KERNELS[kernel](), kv_heads=kv_heads, value_dim=5), draw(2, LENGTH, WIDTH)
    for call in ({}, {"window": 3}, {"window": (4, 0)}):
        whole = made(x, causal=True, **call)
        for lengths in SPLITS:
            assert_close(in_pieces(made, x, lengths, **call), whole, rtol=0, atol=1e-11)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("kernel", ["rotary", "list"])
def test_every_normaliser_and_a_padded_batch(kernel: str, normalizer: str) -> None:
    made, x = layer(KERNELS[kernel](), normalizer=NORMALIZERS[normalizer](), kv_heads=2), draw(3, LENGTH, WIDTH)
    # Sequences that begin with padding: in the middle of decoding, all of them end at the same place.
    mask = from_lengths(torch.tensor([11, 8, 5]), LENGTH).flip(-1)
    whole = made(x, mask=mask, causal=True)
    for lengths in SPLITS:
        assert_close(in_pieces(made, x, lengths, mask), whole, rtol=0, atol=1e-11)


def test_the_weights_of_a_piece_are_rows_of_the_whole_table() -> None:
    made, x = layer(KERNELS["list"](), kv_heads=2), draw(2, LENGTH, WIDTH)
    out, weights = made(x, causal=True, need_weights=True)
    cache = mk.KeyValueCache()
    made(x[:, :6], causal=True, cache=cache)
    found, rows = made(x[:, 6:], causal=True, cache=cache, need_weights=True)
    assert rows.shape == (2, HEADS, 5, LENGTH)
    assert_close(rows, weights[:, :, 6:], rtol=0, atol=1e-13)
    assert_close(found, out[:, 6:], rtol=0, atol=1e-13)


def test_gradients_pass_through_what_is_held() -> None:
    made, x = layer(KERNELS["alibi"](), kv_heads=2), draw(2, LENGTH, WIDTH).requires_grad_()
    leaves = [x, *made.parameters()]
    whole = torch.autograd.grad(made(x, causal=True).sin().sum(), leaves)
    pieces = torch.autograd.grad(in_pieces(made, x, [4, 1, 6]).sin().sum(), leaves)
    for ours, expected in zip(pieces, whole, strict=True):
        assert_close(ours, expected, rtol=0, atol=1e-11)


def test_other_leading_dimensions_and_self_attention_in_full() -> None:
    made, x = layer(), draw(2, 2, LENGTH, WIDTH)
    whole = made(x, causal=True)
    assert_close(in_pieces(made, x, [5, 6]), whole, rtol=0, atol=1e-12)
    assert_close(in_pieces(made, x[0, 0], [5, 6]), whole[0, 0], rtol=0, atol=1e-12)
    # As users of torch's module write it.
    cache, piece = mk.KeyValueCache(), x[0]
    assert_close(made(piece, piece, piece, causal=True, cache=cache), whole[0], rtol=0, atol=1e-12)
    assert len(cache) == LENGTH


def test_what_is_held() -> None:
    """Keys and values as projected, for the heads of the keys alone, in the layer's dtype."""
    made, x = layer(KERNELS["rotary"](), kv_heads=2, value_dim=5), draw(3, LENGTH, WIDTH)
    cache = mk.KeyValueCache()
    assert len(cache) == 0 and cache.keys is None and cache.values is None
    made(x[:, :4], cache=cache, causal=True)
    made(x[:, 4:], cache=cache, causal=True)
    assert cache.keys is not None and cache.values is not None
    assert cache.keys.shape == (3, 2, LENGTH, 6) and cache.values.shape == (3, 2, LENGTH, 5)
    for head in range(2):
        rows, wide = slice(6 * head, 6 * head + 6), slice(5 * head, 5 * head + 5)
        assert_close(cache.keys[:, head], x @ made.k_proj.weight[rows].T + made.k_proj.bias[rows])
        assert_close(cache.values[:, head], x @ made.v_proj.weight[wide].T + made.v_proj.bias[wide])
    assert cache.keys.dtype == torch.float64
    assert repr(cache) == "KeyValueCache(keys=(3, 2, 11, 6), values=(3, 2, 11, 5))"
    assert repr(mk.KeyValueCache()) == "KeyValueCache(keys=None, values=None)"


def test_a_cache_branches_and_goes_back() -> None:
    made, x, other = layer(), draw(1, LENGTH, WIDTH), draw(1, 3, WIDTH, seed=5)
    cache = mk.KeyValueCache()
    made(x[:, :8], causal=True, cache=cache)
    for branch in (mk.KeyValueCache(cache.keys, cache.values), copy.copy(cache)):
        expected = made(torch.cat([x[:, :8], other], 1), causal=True)[:, 8:]
        assert_close(made(other, causal=True, cache=branch), expected, rtol=0, atol=1e-12)
        assert len(branch) == 11 and len(cache) == 8
    made(other, causal=True, cache=cache)
    assert cache.keys is not None and cache.values is not None
    back = mk.KeyValueCache(cache.keys[..., :8, :], cache.values[..., :8, :])
    assert_close(made(x[:, 8:], causal=True, cache=back), made(x, causal=True)[:, 8:], rtol=0, atol=1e-12)


def test_without_causal_order_pieces_see_what_is_there() -> None:
    made, x = layer(), draw(1, 5, WIDTH)
    cache = mk.KeyValueCache()
    first = made(x[:, :3], cache=cache)
    assert_close(first, made(x[:, :3]), rtol=0, atol=1e-12)
    assert_close(made(x[:, 3:], cache=cache), made(x)[:, 3:], rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_decoding_in_a_compiled_graph() -> None:
    torch._dynamo.reset()
    made = layer(KERNELS["rotary"](), kv_heads=2).float()
    x = draw(2, LENGTH, WIDTH, dtype=torch.float32)
    compiled = torch.compile(made, fullgraph=True)
    with torch.no_grad():
        whole = made(x, causal=True)
        assert_close(in_pieces(compiled, x, [9, 2]), whole, rtol=1e-4, atol=1e-5)


def _filled(made: mk.MultiHeadAttention) -> mk.KeyValueCache:
    cache = mk.KeyValueCache()
    made(draw(2, 3, WIDTH), cache=cache, causal=True)
    return cache


def test_a_cache_that_does_not_fit() -> None:
    made = layer(kv_heads=2)
    x, y = draw(2, 1, WIDTH), draw(2, 4, WIDTH, seed=1)
    with pytest.raises(
        ValueError, match=r"cache holds keys of shape \(2, 2, 3, 6\), and the new ones have \(3, 2, 1, 6\)"
    ):
        made(draw(3, 1, WIDTH), cache=_filled(made))
    with pytest.raises(
        ValueError, match=r"cache holds keys of shape \(2, 2, 3, 6\), and the new ones have \(2, 4, 1, 6\)"
    ):
        layer()(x, cache=_filled(made))
    with pytest.raises(ValueError, match=r"cache holds values of shape \(2, 2, 3, 6\), .* \(2, 2, 1, 5\)"):
        layer(kv_heads=2, value_dim=5)(x, cache=_filled(made))
    with pytest.raises(
        ValueError, match=r"cache holds keys of shape \(2, 2, 3, 6\), and the new ones have \(2, 1, 6\)"
    ):
        made(x[0], cache=_filled(made))
    with pytest.raises(TypeError, match=r"cache holds keys of dtype torch\.float64, and .* torch\.float32"):
        layer(kv_heads=2).float()(x.float(), cache=_filled(made))
    with pytest.raises(ValueError, match="cache holds keys on cpu, and the new ones are on meta"):
        copy.deepcopy(made).to("meta")(x.to("meta"), cache=_filled(made))
    for given in ((y,), (y, x), (x, y), (x.clone(), x)):
        with pytest.raises(ValueError, match="cache: it adds the query's own tokens to those before"):
            made(x, *given, cache=_filled(made))
    with pytest.raises(TypeError, match=r"cache: expected a KeyValueCache, got .*add parentheses"):
        made(x, cache=mk.KeyValueCache)
    with pytest.raises(TypeError, match=r"cache: expected a KeyValueCache, got \(\)"):
        made(x, cache=())


def test_a_call_that_fails_leaves_the_cache_as_it_was() -> None:
    made = layer()
    cache = _filled(made)
    before = cache.keys, cache.values
    x = draw(2, 2, WIDTH)
    for wrong in ({"mask": torch.ones(7, 7).bool()}, {"window": 0}, {"causal": 1}):
        with pytest.raises((TypeError, ValueError)):
            made(x, cache=cache, **wrong)
    assert cache.keys is before[0] and cache.values is before[1]


def test_what_is_held_is_not_written_to() -> None:
    made = layer()
    cache = _filled(made)
    assert cache.keys is not None and cache.values is not None
    held = cache.keys, cache.values
    before = [x.clone() for x in held]
    made(draw(2, 4, WIDTH), cache=cache, causal=True)
    assert cache.keys is not held[0]
    for x, kept in zip(held, before, strict=True):
        assert torch.equal(x, kept)


def test_a_cache_that_another_layer_filled_is_refused_and_kept():
    first, second, cache = layer(), layer(), mk.KeyValueCache()
    x = draw(2, 3, WIDTH)
    first(x, causal=True, cache=cache)
    with pytest.raises(ValueError, match="another layer has filled it"):
        second(x, causal=True, cache=cache)
    assert len(cache) == 3
    whole = second(torch.cat([x, x], dim=-2), causal=True)
    own = mk.KeyValueCache()
    second(x, causal=True, cache=own)
    branch = mk.KeyValueCache(own.keys, own.values)
    assert_close(second(x, causal=True, cache=branch), whole[:, 3:])
