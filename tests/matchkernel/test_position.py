"""ALiBi, Rotary and RelativeBias against the code they come from, closed forms, and loops over pairs."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotate_every_two
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention

import matchkernel as mk

sys.path.insert(0, str(Path(__file__).parent))
from oracle import by_loop, draw, inputs

Tensor = torch.Tensor


def _learned(*entries: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(entries, dtype=torch.float64))


# ALiBi.


def _authors_slopes(n: int) -> list[float]:
    """`get_slopes` of the authors' code, restated."""

    def power_of_two(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_two(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_two(closest) + _authors_slopes(2 * closest)[0::2][: n - closest]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20, 31, 32, 33, 48, 71, 112, 128])
def test_slopes_are_the_authors(heads: int) -> None:
    slopes = mk.alibi_slopes(heads)
    assert len(slopes) == heads
    assert_close(torch.tensor(slopes), torch.tensor(_authors_slopes(heads)), rtol=1e-7, atol=0.0)


def test_slopes_in_numbers() -> None:
    assert mk.alibi_slopes(8) == (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256)
    twelve = mk.alibi_slopes(12)
    assert twelve[:8] == mk.alibi_slopes(8)
    assert_close(torch.tensor(twelve[8:]), torch.tensor([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]))


def test_alibi_is_slope_times_distance() -> None:
    q, k, _ = inputs(2, 3, n=5, m=7)
    table = mk.scores(q, k, mk.ALiBi(3))
    for h, slope in enumerate((2**-4, 2**-8, 2**-2)):
        for i in range(5):
            for j in range(7):
                assert bool((table[:, h, i, j] == -slope * abs(i + 2 - j)).all())


@pytest.mark.parametrize("causal", [False, True])
def test_alibi_beside_the_scaled_dot_is_a_loop(causal: bool) -> None:
    q, k, v = inputs(12, n=6, m=9)
    out = mk.attend(q, k, v, mk.ScaledDot() + mk.ALiBi(12), causal=causal)
    for h, slope in enumerate(_authors_slopes(12)):
        truth = by_loop(
            q[h], k[h], v[h],
            allowed=lambda i, j: not causal or j <= i + 3,
            bias=lambda i, j, slope=slope: -slope * abs(i + 3 - j),
        )  # fmt: skip
        assert_close(out[h], truth)


@pytest.mark.parametrize(
    ("slopes", "each"),
    [
        (0.3, [0.3, 0.3]), (torch.tensor([0.2, 0.7]), [0.2, 0.7]),
        (_learned(0.2, 0.7), [0.2, 0.7]), (_learned(0.4), [0.4, 0.4]),
    ],
    ids=["number", "per head", "learned", "one learned"],
)  # fmt: skip
def test_slopes_of_ones_own(slopes: float | Tensor, each: list[float]) -> None:
    q, k, _ = inputs(2, 2, n=4, m=4)
    distance = (torch.arange(4)[:, None] - torch.arange(4)).abs().double()
    table = mk.scores(q, k, mk.ALiBi(slopes=slopes).double())
    for h in range(2):
        assert_close(table[:, h], -each[h] * distance.expand(2, 4, 4), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("engine", ["fused", "reference"])
def test_a_slope_learns(engine: str) -> None:
    """By hand: d out / d slope of a softmax over −slope · distance, two keys, v = (0, 1)."""
    slope = _learned(0.3)
    q, k, v = torch.zeros(1, 4), torch.zeros(2, 4), torch.tensor([[0.0], [1.0]])
    out = mk.attend(q.double(), k.double(), v.double(), mk.ALiBi(slopes=slope), causal=True, engine=engine)
    near = 1 / (1 + math.exp(-0.3))
    assert_close(out.item(), near)
    out.sum().backward()
    assert slope.grad is not None
    assert_close(slope.grad.item(), near * (1 - near))


def test_a_model_in_half_precision_keeps_the_authors_slopes() -> None:
    q, k, _ = inputs(12, n=4, m=4, dtype=torch.float32)
    kernel = mk.ScaledDot() + mk.ALiBi(12)
    assert torch.equal(mk.scores(q, k, kernel.bfloat16()), mk.scores(q, k, mk.ScaledDot() + mk.ALiBi(12)))
    assert not list(kernel.parameters()) and not kernel.state_dict()


@pytest.mark.parametrize("kernel", [mk.ALiBi(4), mk.ScaledDot() + mk.ALiBi(4), mk.RelativeBias(4)], ids=repr)
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (5, 4)], ids=str)
def test_heads_that_do_not_match(kernel: mk.MatchKernel, shape: tuple[int, ...]) -> None:
    x = draw(*shape)
    for causal in (False, True):
        with pytest.raises(ValueError, match=r"4 heads.*at dimension -3|expected 4 at dimension -3") as caught:
            mk.attend(x, x, x, kernel, causal=causal)
        assert str(shape) in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mk.ALiBi(), "one of the two"),
        (lambda: mk.ALiBi(2, slopes=0.5), "one of the two"),
        (lambda: mk.ALiBi(0), "at least 1"),
        (lambda: mk.ALiBi(slopes=-0.5), "above 0"),
        (lambda: mk.ALiBi(slopes=torch.tensor([0.5, 0.0])), "above 0"),
        (lambda: mk.Rotary(5), "even number"),
        (lambda: mk.Rotary(0), "even number"),
        (lambda: mk.Rotary(4, base=0.0), "above 0"),
        (lambda: mk.Rotary(4, base=math.inf), "finite"),
        (lambda: mk.RelativeBias(0), "at least 1"),
        (lambda: mk.RelativeBias(2, buckets=7), "even number of at least 4"),
        (lambda: mk.RelativeBias(2, buckets=2), "even number of at least 4"),
        (lambda: mk.RelativeBias(2, buckets=1, bidirectional=False), "at least 2"),
        (lambda: mk.RelativeBias(2, buckets=32, max_distance=8), "more than 8"),
    ],
)
def test_arguments_are_checked(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ALiBi far from the origin: fused in the inputs' dtype, against float64 on the same inputs.


@pytest.mark.parametrize(
    ("dtype", "budget"), [(torch.float32, 4e-6), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)], ids=str
)
@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("first", [0, 60_000, 10_000_000])
def test_positions_cost_no_digits(dtype: torch.dtype, budget: float, heads: int, first: int) -> None:
    """4,096 keys; one bfloat16 column for slope · j is off by 3.7 there."""
    m, n = 4096, 64
    q, k, v = inputs(heads, n=n, m=m, d=64, dtype=dtype)
    slopes = torch.tensor([0.5, 2**-6.3, 2**-0.5][:heads])
    kernel = mk.ScaledDot() + mk.ALiBi(slopes=slopes)
    for at in (0, 1000, m - n):
        where = {"query_position": torch.arange(n) + first + at, "key_position": torch.arange(m) + first}
        out = mk.attend(q, k, v, kernel, causal=True, engine="fused", **where)
        assert out.dtype == dtype
        wide = (x.double() for x in (q, k, v))
        truth = mk.attend(*wide, kernel, causal=True, engine="reference", **where)
        assert (out.double() - truth).abs().max() < budget


def test_the_hundred_thousandth_position() -> None:
    q, k, v = inputs(2, n=8, m=100_000, d=64, dtype=torch.float32)
    kernel = mk.ScaledDot() + mk.ALiBi(slopes=torch.tensor([0.5, 2**-0.5]))
    for at in (100, 50_000, 99_992):
        where = {"query_position": torch.arange(8) + at, "key_position": torch.arange(100_000)}
        out = mk.attend(q, k, v, kernel, causal=True, engine="fused", **where)
        truth = mk.attend(q.double(), k.double(), v.double(), kernel, causal=True, engine="reference", **where)
        # A content of unit variance beside 70,000: one float32 column for slope · j is off by 4e-3.
        assert (out.double() - truth).abs().max() < 5e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_head_wise_factor_costs_no_digits_either(dtype: torch.dtype) -> None:
    q, k, v = inputs(2, n=32, m=4096, d=16, dtype=dtype)
    kernel = torch.tensor([0.7, 1.3]) * (mk.ScaledDot() + mk.ALiBi(2))
    out = mk.attend(q, k, v, kernel, causal=True, engine="fused")
    truth = mk.attend(q.double(), k.double(), v.double(), kernel, causal=True, engine="reference")
    assert (out.double() - truth).abs().max() < {torch.float32: 2e-5}.get(dtype, 2e-2)


@pytest.mark.parametrize(
    ("dtype", "budget"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str
)
def test_a_sink_meets_the_score_itself(dtype: torch.dtype, budget: float) -> None:
    """Not the score up to a shift of the row: the query's −slope · i must be there, with the right sign."""
    q, k, v = inputs(2, n=32, m=1024, d=16, dtype=dtype)
    kernel = mk.ScaledDot() + mk.ALiBi(slopes=torch.tensor([0.5, 2**-6.3]))
    where: dict[str, Any] = {"query_position": torch.arange(32) + 500, "key_position": torch.arange(1024)}
    out = mk.attend(q, k, v, kernel, causal=True, normalizer=mk.SinkSoftmax(1.0), engine="fused", **where)
    truth = mk.attend(
        q.double(), k.double(), v.double(), kernel, causal=True, normalizer=mk.SinkSoftmax(1.0), engine="reference",
        **where,
    )  # fmt: skip
    assert (out.double() - truth).abs().max() < budget


# Rotary.


def _by_complex_numbers(x: Tensor, position: Tensor, base: float, interleaved: bool) -> Tensor:
    """Pairs as complex numbers, times e^{i · position · frequency}."""
    half = x.shape[-1] // 2
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).mT
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones(len(position), half, dtype=torch.float64),
        position.double()[:, None] * torch.tensor([base ** (-t / half) for t in range(half)], dtype=torch.float64),
    )
    real = torch.view_as_real(turned)
    return real.flatten(-2) if interleaved else real.mT.flatten(-2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "base"), [(8, 10000.0), (8, 50.0), (4, 10000.0), (2, 3.0)])
def test_rotary_is_a_product_of_complex_numbers(dim: int, base: float, interleaved: bool) -> None:
    q, k, _ = inputs(2, 3, n=5, m=7, d=8)
    at, to = torch.tensor([3, 0, 11, 500, 2]), torch.tensor([9, -4, 0, 1, 2000, 3, 7])
    turned = [
        torch.cat([_by_complex_numbers(x[..., :dim], place, base, interleaved), x[..., dim:]], -1)
        for x, place in ((q, at), (k, to))
    ]
    table = mk.scores(q, k, mk.Rotary(dim, base, interleaved), query_position=at, key_position=to)
    assert_close(table, turned[0] @ turned[1].mT / math.sqrt(8))


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_rotary_is_llamas(base: float) -> None:
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=2, rope_parameters={"rope_type": "default", "rope_theta": base}
    )
    q, k, v = inputs(2, 2, n=40, m=40, d=16, dtype=torch.float32)
    position = torch.arange(40)[None]
    cos, sin = LlamaRotaryEmbedding(config)(q, position)
    turned_q, turned_k = apply_rotary_pos_emb(q, k, cos, sin)
    truth = torch.nn.functional.scaled_dot_product_attention(turned_q, turned_k, v, is_causal=True)
    assert_close(mk.attend(q, k, v, mk.Rotary(16, base), causal=True), truth, rtol=1e-5, atol=1e-5)


def test_interleaved_rotary_is_gpt_js() -> None:
    q, k, _ = inputs(1, 2, n=6, m=6, d=8)
    angle = torch.arange(6)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    turned = [rotate_every_two(x.transpose(1, 2), angle.sin()[None], angle.cos()[None]).transpose(1, 2) for x in (q, k)]
    assert_close(mk.scores(q, k, mk.Rotary(8, interleaved=True)), turned[0] @ turned[1].mT / math.sqrt(8))


def test_rotary_turns_towards_the_later_token() -> None:
    """q = k = e₁: the score is the cosine of the angle; q = e₁, k = e₂: the sine of i − j, so its sign is seen."""
    e = torch.eye(2, dtype=torch.float64)
    where = {"query_position": torch.tensor([5]), "key_position": torch.tensor([3])}
    root = math.sqrt(2)
    assert_close(mk.scores(e[:1], e[:1], mk.Rotary(2), **where).item() * root, math.cos(2.0))
    assert_close(mk.scores(e[:1], e[1:], mk.Rotary(2), **where).item() * root, math.sin(2.0))


def test_rotary_depends_on_the_difference_alone() -> None:
    q, k, _ = inputs(n=5, m=7, d=8)
    at, to = torch.tensor([0, 4, 9, 2, 30]), torch.arange(7)
    here = mk.scores(q, k, mk.Rotary(8), query_position=at, key_position=to)
    for far in (17, -1000, 1_000_000):
        there = mk.scores(q, k, mk.Rotary(8), query_position=at + far, key_position=to + far)
        assert_close(there, here, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("far", [1_000, 100_000, 1_000_000, 16_000_000])
def test_rotary_keeps_its_digits_far_away(far: int) -> None:
    """A table made of float32 angles is off by 0.03 at a million."""
    q, k, _ = inputs(n=5, m=7, d=64, dtype=torch.float32)
    at, to = torch.arange(5) + far, torch.arange(7)
    turned = [_by_complex_numbers(x.double(), place, 10000.0, False) for x, place in ((q, at), (k, to))]
    table = mk.scores(q, k, mk.Rotary(64), query_position=at, key_position=to)
    assert_close(table.double(), turned[0] @ turned[1].mT / 8, rtol=0.0, atol=2e-6)


def test_rotary_tables_are_float32_in_a_half_precision_model() -> None:
    """The only rounding is that of the turned vectors: half a step of bfloat16 for each coordinate."""
    x = draw(64, 32, dtype=torch.bfloat16)
    position = torch.arange(64) + 30_000
    encoded = mk.Rotary(32).bfloat16().encode_query(x, position)
    assert isinstance(encoded, Tensor) and encoded.dtype == torch.bfloat16
    truth = _by_complex_numbers(x.double(), position, 10000.0, False)
    assert bool(((encoded.double() - truth).abs() <= truth.abs() * 2**-8 * 1.01 + 1e-6).all())


def test_rotary_of_a_narrow_input() -> None:
    x = draw(2, 5, 6)
    with pytest.raises(ValueError, match=r"q has shape \(2, 5, 6\).*at least 8"):
        mk.attend(x, x, x, mk.Rotary(8))


# RelativeBias.

T5 = [(32, 128, True), (32, 128, False), (8, 20, True), (10, 7, False), (4, 2, True), (6, 50, True), (64, 1000, False)]


@pytest.mark.parametrize(("buckets", "max_distance", "bidirectional"), T5)
def test_buckets_are_t5s(buckets: int, max_distance: int, bidirectional: bool) -> None:
    kernel = mk.RelativeBias(2, buckets, max_distance, bidirectional).double()
    with torch.no_grad():
        kernel.weight.copy_(torch.arange(2.0 * buckets).reshape(buckets, 2))
    place = torch.arange(0, 5 * max_distance + 40)[::3]
    offset = place - place[:, None]
    expected = T5Attention._relative_position_bucket(offset, bidirectional, buckets, max_distance)
    x = draw(2, len(place), 4)
    table = mk.scores(x, x, kernel, query_position=place, key_position=place)
    assert_close(table[0], 2.0 * expected.double())
    assert_close(table[1], 2.0 * expected.double() + 1.0)


def test_every_distance_of_t5_has_t5s_bucket() -> None:
    kernel = mk.RelativeBias(1)
    with torch.no_grad():
        kernel.weight.copy_(torch.arange(32.0)[:, None])
    offset = torch.arange(-1000, 1001)
    table = mk.scores(
        torch.zeros(1, 1), torch.zeros(2001, 1), kernel, query_position=torch.tensor([0]), key_position=offset
    )
    assert torch.equal(table[0].long(), T5Attention._relative_position_bucket(offset[None], True, 32, 128)[0])


def test_the_bias_learns_where_it_is_used() -> None:
    """A weight's gradient is the sum of the score gradients over the pairs in its bucket."""
    kernel = mk.RelativeBias(2, 8, 6).double()
    q, k, _ = inputs(3, 2, n=9, m=9)
    down = draw(3, 2, 9, 9, seed=9)
    (mk.scores(q, k, mk.ScaledDot() + kernel) * down).sum().backward()
    bucket = T5Attention._relative_position_bucket(torch.arange(9) - torch.arange(9)[:, None], True, 8, 6)
    truth = torch.zeros(8, 2, dtype=torch.float64)
    for i in range(9):
        for j in range(9):
            truth[bucket[i, j]] += down[:, :, i, j].sum(0)
    assert kernel.weight.grad is not None
    assert_close(kernel.weight.grad, truth)


def test_the_table_starts_as_the_generator_says() -> None:
    one, two, other = (
        mk.RelativeBias(64, generator=torch.Generator().manual_seed(seed)).weight.detach() for seed in (1, 1, 2)
    )
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert 0.018 < float(one.std()) < 0.022
    assert list(mk.RelativeBias(2).state_dict()) == ["weight"]


def test_no_table_of_eight_byte_integers() -> None:
    """What a tile holds at a time: a few tables of four bytes an entry, for any distance."""
    kernel = mk.RelativeBias(2).requires_grad_(False)
    x = draw(2, 512, 4, dtype=torch.float32)
    encoded = kernel.encode(x, x, torch.arange(512), torch.arange(512))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        kernel.match(*encoded)
    largest = max(event.cpu_memory_usage for event in seen.events() if not event.cpu_children)
    assert largest <= 4 * 2 * 512 * 512


# All of them: positions of one's own, padding, decoding, grouped heads.

KERNELS = {
    "alibi": mk.ALiBi(2),
    "dot + alibi": mk.ScaledDot() + mk.ALiBi(2),
    "learned alibi": mk.ScaledDot() + mk.ALiBi(slopes=_learned(0.3, 0.9)),
    "rotary": mk.Rotary(6),
    "interleaved": mk.Rotary(4, 100.0, True),
    "rotary + alibi": 0.7 * mk.Rotary(6) + mk.ALiBi(2),
    "bias": mk.ScaledDot() + mk.RelativeBias(2, 8, 6, generator=torch.Generator().manual_seed(0)).double(),
}
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


@every_kernel
def test_one_by_one_with_a_cache_is_the_full_pass(kernel: mk.MatchKernel) -> None:
    q, k, v = inputs(2, 2, n=9, m=9, d=6)
    whole = mk.attend(q, k, v, kernel, causal=True)
    for i in range(9):
        step = mk.attend(q[..., i : i + 1, :], k[..., : i + 1, :], v[..., : i + 1, :], kernel, causal=True)
        assert_close(step, whole[..., i : i + 1, :])


@every_kernel
def test_order_is_in_the_positions_alone(kernel: mk.MatchKernel) -> None:
    q, k, v = inputs(2, 2, n=9, m=9, d=6)
    whole = mk.attend(q, k, v, kernel, causal=True)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    shuffled = mk.attend(
        q[..., order, :], k[..., order.flip(0), :], v[..., order.flip(0), :], kernel, causal=True,
        query_position=order, key_position=order.flip(0),
    )  # fmt: skip
    assert_close(shuffled, whole[..., order, :])


@every_kernel
@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_padding_on_the_left_changes_nothing(kernel: mk.MatchKernel, engine: str) -> None:
    """Two texts of 9 and 6 tokens in one batch, positions counted from each one's first token."""
    q, k, v = inputs(2, 2, n=9, m=9, d=6)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[1, ..., :3] = False
    position = (mask.long().cumsum(-1) - 1).clamp_min(0).squeeze(-2)
    for x in (q, k, v):
        x[1, :, :3] = float("nan")
    out = mk.attend(
        q, k, v, kernel, mask=mask, causal=True, query_position=position, key_position=position, engine=engine
    )
    assert_close(out[0], mk.attend(q[0], k[0], v[0], kernel, causal=True))
    short = (x[1, :, 3:] for x in (q, k, v))
    assert_close(out[1, :, 3:], mk.attend(*short, kernel, causal=True))


@every_kernel
@pytest.mark.parametrize("causal", [False, True])
def test_query_heads_in_groups_keep_their_own_slope(kernel: mk.MatchKernel, causal: bool) -> None:
    q, k, v = inputs(3, 2, n=7, m=9, d=6)
    k, v = k[:, :1], v[:, :1]
    truth = mk.attend(q, k.expand(3, 2, -1, -1), v.expand(3, 2, -1, -1), kernel, causal=causal, engine="reference")
    assert_close(mk.attend(q, k, v, kernel, causal=causal), truth)


def test_reprs_read_like_the_formula() -> None:
    assert repr(mk.ScaledDot() + mk.ALiBi(heads=8)) == "ScaledDot() + ALiBi(heads=8)"
    assert repr(0.5 * mk.Rotary(64) + mk.RelativeBias(8)) == "0.5 * Rotary(64) + RelativeBias(heads=8)"
    assert repr(mk.Rotary(64, 500000.0, True)) == "Rotary(64, base=500000, interleaved=True)"
    assert repr(mk.ALiBi(slopes=0.25)) == "ALiBi(slopes=0.25)"
    assert repr(mk.RelativeBias(4, 16, 64, False)) == (
        "RelativeBias(heads=4, buckets=16, max_distance=64, bidirectional=False)"
    )


@pytest.mark.parametrize(("heads", "coordinates", "budget"), [(8, 4, 1e-6), (12, 6, 2e-5), (16, 6, 2e-5)])
def test_alibi_as_an_inner_product_loses_little_in_either_order(heads: int, coordinates: int, budget: float) -> None:
    """In float32, added one after another, and the even coordinates apart from the odd, as some products do.

    The rest of a slope, less than a sixty-fourth of it, is rounded when a position multiplies it.
    """
    kernel = mk.ALiBi(heads).under_causal_order()
    assert isinstance(kernel, mk.DotKernel)
    q, k = torch.zeros(heads, 3, 4), torch.zeros(heads, 50, 4)
    here, there = torch.tensor([30000, 30010, 65535]), torch.cat([torch.arange(29961, 30010), torch.tensor([65535])])
    parts = kernel.encode_pair(q, k, here, there)
    assert parts.fine_q is not None and parts.fine_q.shape[-1] == parts.fine_k.shape[-1] == coordinates
    terms = parts.fine_q[:, :, None] * parts.fine_k[:, None]
    assert terms.dtype == torch.float32
    slopes = torch.tensor(mk.alibi_slopes(heads), dtype=torch.float64)[:, None, None]
    content = draw(4, heads, 3, 50, seed=7, dtype=torch.float32)
    exact = content.double().sum(0) + slopes * (there - here[:, None])
    # From the last key, 65,535, these tokens are far; from each other they are not.
    def added(columns: list[Tensor]) -> Tensor:
        total = columns[0]
        for column in columns[1:]:
            total = total + column
        return total

    columns = [*terms.unbind(-1), *content]  # the fine ones come first
    for found in (added(columns), added(columns[0::2]) + added(columns[1::2])):
        assert_close(found.double(), exact, rtol=1e-6, atol=budget)


def test_which_slopes_of_alibi_are_short() -> None:
    assert all(mk.ALiBi(heads)._short for heads in range(1, 9)) and not any(mk.ALiBi(h)._short for h in (9, 12, 16))
    assert mk.ALiBi(slopes=0.25)._short and mk.ALiBi(slopes=63.0)._short
    assert not mk.ALiBi(slopes=65.0)._short and not mk.ALiBi(slopes=0.1)._short
    assert not mk.ALiBi(slopes=torch.tensor([0.5]))._short
