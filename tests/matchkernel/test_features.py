"""Weights that are inner products of features: how the engines take them, and what they refuse."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.engines import Reference
from matchkernel.testing import KernelContract, check

sys.path.insert(0, str(Path(__file__).parent))
from kernels_under_test import Powers, Squares, Tokens
from oracle import draw, inputs

Tensor = torch.Tensor


class Given(mk.FeatureKernel):
    """φ = x[…, :-1] · exp(x[…, -1]): features and scale written by hand."""

    def features(self, x: Tensor, position: Tensor) -> mk.Features:
        return mk.Features(x[..., :-1], x[..., -1])


class GivenPositive(Given):
    positive = True


class GivenNonnegative(Given):
    nonnegative = True


def by_hand(
    kappa: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, sink: float | None = None
) -> Tensor:
    """κ over its sum, row by row in plain Python."""
    rows = []
    for i, row in enumerate(kappa.tolist()):
        weights = [
            value * (0.0 if mask is not None and not mask[i, j] else 1.0)
            * (1.0 if bias is None else math.exp(float(bias[i, j])))
            for j, value in enumerate(row)
        ]  # fmt: skip
        total = sum(weights) + (0.0 if sink is None else math.exp(sink))
        rows.append([weight / total if total else 0.0 for weight in weights])
    return torch.tensor(rows, dtype=torch.float64)


# Values.


@pytest.mark.parametrize("kernel", [Squares(), Tokens(), mk.EluFeatures(), mk.DPFPFeatures(), mk.TaylorFeatures()])
def test_weights_are_kappa_over_its_sum(kernel: mk.FeatureKernel) -> None:
    q, k, v = inputs()
    kappa = kernel.kappa(q, k)
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(4)) > 0.3
    mask[2] = False
    bias = draw(5, 7, seed=5)
    for sink in (None, -0.7, 2.0):
        normalizer = mk.Softmax() if sink is None else mk.SinkSoftmax(sink)
        for setting, truth in (
            ({}, by_hand(kappa, sink=sink)),
            ({"mask": mask}, by_hand(kappa, mask, sink=sink)),
            ({"mask": bias}, by_hand(kappa, bias=bias, sink=sink)),
            ({"mask": bias.masked_fill(~mask, -math.inf)}, by_hand(kappa, mask, bias, sink)),
        ):
            assert_close(mk.weights(q, k, kernel, normalizer=normalizer, **setting), truth)
            assert_close(mk.attend(q, k, v, kernel, normalizer=normalizer, **setting), truth @ v)
    assert mk.weights(q, k, kernel, mask=mask)[2].eq(0).all()


def test_a_sink_per_head_and_a_learned_one() -> None:
    q, k, _ = inputs(2, 3)
    logit = nn.Parameter(torch.tensor([-1.0, 0.5, 3.0], dtype=torch.float64))
    weights = mk.weights(q, k, Tokens(), normalizer=mk.SinkSoftmax(logit))
    for b in range(2):
        for h, sink in enumerate(logit.tolist()):
            assert_close(weights[b, h], by_hand(q[b, h] @ k[b, h].mT, sink=sink))
    weights.sin().sum().backward()

    def total(value: Tensor) -> Tensor:
        kappa = q @ k.mT
        return (kappa / (kappa.sum(-1, keepdim=True) + value[:, None, None].exp())).sin().sum()

    (truth,) = torch.autograd.grad(total(logit), logit)
    assert_close(logit.grad, truth)


def test_the_score_is_the_logarithm_of_kappa_and_minus_infinity_at_zero() -> None:
    q, k = torch.tensor([[1.0, 2.0], [-1.0, 0.0]]), torch.tensor([[3.0, 1.0], [0.0, 5.0], [0.0, 0.0]])

    class Parts(mk.FeatureKernel):
        nonnegative = True

        def features(self, x: Tensor, position: Tensor) -> Tensor:
            return x.relu()

    table = mk.scores(q, k, Parts())
    truth = torch.tensor([[5.0, 10.0, 0.0], [0.0, 0.0, 0.0]]).log()
    assert torch.equal(torch.isinf(table), torch.isinf(truth))
    assert_close(table, truth)
    assert_close(Parts().kappa(q, k), truth.exp())
    q.requires_grad_()
    mk.scores(q, k, Parts()).masked_fill(torch.isinf(truth), 0.0).sum().backward()
    assert_close(q.grad, torch.tensor([[3.0 / 5.0, 1.0 / 5.0 + 5.0 / 10.0], [0.0, 0.0]]))


def test_positions_are_the_kernels_to_use() -> None:
    class Places(mk.FeatureKernel):
        def features(self, x: Tensor, position: Tensor) -> Tensor:
            return x * position.to(x.dtype).unsqueeze(-1)

    q, k, _ = inputs(n=2, m=4)
    assert_close(Places().kappa(q, k), (q @ k.mT) * torch.tensor([2.0, 3.0])[:, None] * torch.arange(4.0))
    place = torch.tensor([5.0, 1.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert_close(Places().kappa(q, k, *place), (q @ k.mT) * place[0][:, None] * place[1])
    assert_close(
        mk.weights(q, k, Places(), query_position=place[0], key_position=place[1]),
        by_hand(Places().kappa(q, k, *place)),
    )


def test_a_sum_of_kernels_has_the_product_of_their_weights() -> None:
    q, k, _ = inputs()
    a, b = mk.EluFeatures(), mk.TaylorFeatures()
    product = a.kappa(q, k) * b.kappa(q, k)
    assert_close(mk.weights(q, k, a + b), by_hand(product))
    assert_close(mk.weights(q, k, 2.0 * a), by_hand(a.kappa(q, k) ** 2))
    mixed = 0.5 * a.kappa(q, k) + 2.0 * b.kappa(q, k)
    assert_close(mk.weights(q, k, mk.mixture(a, b, weights=(0.5, 2.0))), by_hand(mixed))
    capped = 3.0 * torch.tanh(a.kappa(q, k).log() / 3.0)
    assert_close(mk.weights(q, k, mk.Softcap(a, 3.0)), capped.softmax(-1))


# Normalisers.


@pytest.mark.parametrize(
    "normalizer",
    [
        mk.Softmax(0.5),
        mk.Softmax(nn.Parameter(torch.tensor(1.0))),
        mk.Softmax(torch.ones(2)),
        mk.ScalableSoftmax(),
        mk.Sigmoid(),
        mk.Sparsemax(),
        mk.Entmax(),
    ],
)
def test_another_normaliser_needs_a_score(normalizer: mk.Normalizer) -> None:
    q, k, v = inputs(1, 2, dtype=torch.float32)
    assert not normalizer.proportional
    signed, positive = Tokens(), mk.EluFeatures()
    for call in (mk.attend, mk.explain):
        with pytest.raises(ValueError, match=r"no engine can run this call: .*Tokens\(\) is signed.* needs a score"):
            call(q, k, v, signed, normalizer=normalizer)
    with pytest.raises(ValueError, match=r"Tokens\(\) is signed: its weight κ may be negative"):
        mk.weights(q, k, signed, normalizer=normalizer)
    score = mk.scores(q, k, positive)
    counted = torch.tensor([[7]]) if normalizer.counts_keys else None
    factor, shift = normalizer.factor(counted, score), normalizer.shift(counted, score)
    assert_close(mk.weights(q, k, positive, normalizer=normalizer), normalizer.weigh(factor * score + shift))
    with pytest.raises(NotImplementedError, match="not proportional"):
        normalizer.share(score, score)


@pytest.mark.parametrize(
    "normalizer", [mk.Softmax(), mk.Softmax(1.0), mk.SinkSoftmax(), mk.SinkSoftmax(torch.zeros(2))]
)
def test_softmax_at_temperature_1_and_the_sink_take_kappa_itself(normalizer: mk.Normalizer) -> None:
    q, k, v = inputs(1, 2, dtype=torch.float32)
    assert normalizer.proportional
    assert mk.attend(q, k, v, Tokens(), normalizer=normalizer).isfinite().all()
    why = mk.explain(q, k, v, Tokens(), normalizer=normalizer)
    assert why.engine == "reference" and "as shares of κ" in why.reason and "tiles are made of scores" in why.reason
    for name, reason in (("tiled", "is signed"), ("fused", "not a DotKernel")):
        with pytest.raises(ValueError, match=reason):
            mk.attend(q, k, v, Tokens(), normalizer=normalizer, engine=name)


def test_a_temperature_changed_later_is_noticed() -> None:
    normalizer = mk.Softmax()
    normalizer.temperature = 2.0
    assert not normalizer.proportional


@pytest.mark.parametrize(
    "kernel",
    [Tokens() + mk.ALiBi(2), 2.0 * Tokens(), mk.mixture(mk.ScaledDot(), Tokens()), mk.Softcap(Tokens(), 1.0)],
)
def test_kernels_are_put_together_by_their_scores(kernel: mk.MatchKernel) -> None:
    q, k, v = inputs(1, 2, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"is signed.* and kernels are put together by their scores"):
        mk.attend(q, k, v, kernel)
    with pytest.raises(ValueError, match=r"Tokens\(\) is signed"):
        mk.scores(q, k, kernel)


def test_what_may_be_zero_leaves_tiles_alone_and_what_is_positive_streams() -> None:
    q, k, v = inputs(1, 2, dtype=torch.float32)
    with pytest.raises(ValueError, match="κ = 0"):
        mk.attend(q, k, v, mk.DPFPFeatures() + mk.ALiBi(2), engine="tiled")
    long = [x.repeat(1, 1, 80, 1) for x in (q, k, v)]
    assert mk.explain(*long, mk.DPFPFeatures(), normalizer=mk.Softmax(2.0)).engine == "reference"
    assert mk.explain(*long, mk.EluFeatures(), normalizer=mk.Softmax(2.0)).engine == "tiled"
    tiled = mk.attend(*long, mk.EluFeatures(), engine="tiled", causal=True)
    assert_close(tiled, mk.attend(*long, mk.EluFeatures(), engine="reference", causal=True))


def test_a_weight_of_zero_stays_zero_whatever_multiplies_its_logarithm() -> None:
    """A learned temperature, whose gradient must not be 0 · ∞, and a factor of log 1 = 0."""
    q, k, v = torch.eye(3).double(), torch.eye(3).double().roll(1, 0), draw(3, 2)
    kernel = mk.PolynomialFeatures(2, 0.0)
    temperature = nn.Parameter(torch.tensor(0.6, dtype=torch.float64))
    weights = mk.weights(q + 0.5 * q.roll(1, 0), k, kernel, normalizer=mk.Softmax(temperature))
    kappa = ((q + 0.5 * q.roll(1, 0)) @ k.mT).square()
    assert int((kappa == 0).sum()) == 3
    assert_close(weights, by_hand(kappa ** (1 / 0.6)))
    weights.square().sum().backward()

    def total(t: float) -> float:
        return float(by_hand(kappa ** (1 / t)).square().sum())

    assert float(temperature.grad) == pytest.approx((total(0.6 + 1e-5) - total(0.6 - 1e-5)) / 2e-5, rel=1e-6)
    lonely = torch.eye(3, dtype=torch.bool)
    assert mk.attend(q, k, v, kernel, mask=lonely, normalizer=mk.ScalableSoftmax()).eq(0).all()


# Extremes.


def test_the_sum_of_a_signed_row_may_be_anything() -> None:
    q, k = torch.tensor([[1.0], [2.0]], requires_grad=True), torch.tensor([[3.0], [-1.0], [-1.99]])
    assert_close(mk.weights(q, k, Tokens()), by_hand(q @ k.mT).float(), rtol=1e-4, atol=0.0)
    assert mk.weights(q, k, Tokens()).max() > 200
    nothing = mk.weights(q, torch.tensor([[1.0], [-1.0]]), Tokens())
    assert nothing.eq(0).all()
    (grad,) = torch.autograd.grad(nothing.sum(), q)
    assert grad.eq(0).all()


@pytest.mark.parametrize(
    ("far", "dtype"),
    [*((far, torch.float32) for far in (0.0, 300.0, -300.0)), *((far, torch.float64) for far in (1e3, -1e3, 1e5))],
)
def test_scales_beyond_the_range_of_a_float_change_nothing(far: float, dtype: torch.dtype) -> None:
    """One scale for all keys and another for all queries cancel; the sink's logit moves with them."""
    values = draw(7, 3, dtype=dtype).abs(), draw(7, 3, seed=1, dtype=dtype)
    bias = draw(7, 7, seed=3, dtype=dtype)
    scales = torch.linspace(-2.0, 2.0, 7, dtype=dtype)
    q, near, k = (
        torch.cat([x, (scales + shift).unsqueeze(-1)], -1)
        for x, shift in ((values[0], far), (values[1], 0.0), (values[1], far))
    )
    kappa = torch.exp(scales)[:, None] * torch.exp(scales) * (values[0] @ values[1].mT)
    tolerance = {"rtol": 1e-3, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    assert_close(mk.weights(q, k, Given()).double(), by_hand(kappa), **tolerance)
    biased = mk.weights(q, k, Given(), mask=bias).double()
    assert_close(biased, by_hand(kappa, bias=bias), **tolerance)
    sunk = mk.weights(q, k, Given(), normalizer=mk.SinkSoftmax(2 * far + 0.4)).double()
    assert_close(sunk, by_hand(kappa, sink=0.4), **tolerance)
    assert_close(mk.weights(q, near, Given()), mk.weights(q, k, Given()), **tolerance)


def test_the_key_with_the_largest_scale_need_not_have_the_largest_weight() -> None:
    q = torch.tensor([[1.0, 1.0, 0.0]])
    k = torch.tensor([[1e-30, 0.0, 100.0], [1.0, 1.0, 100.0 + math.log(5e-31)], [0.0, 0.0, 500.0]]).requires_grad_()
    for kernel in (Given(), GivenNonnegative(), GivenPositive()):
        weights = mk.weights(q, k, kernel)
        assert_close(weights, torch.tensor([[0.5, 0.5, 0.0]]), rtol=1e-4, atol=1e-6)
        (grad,) = torch.autograd.grad(weights[0, 0], k)
        assert grad[:2].isfinite().all()
    with_sink = mk.weights(q, k, Given(), normalizer=mk.SinkSoftmax(100.0 + math.log(1e-30)))
    assert_close(with_sink, torch.tensor([[1 / 3, 1 / 3, 0.0]]), rtol=1e-4, atol=1e-6)


def test_the_future_has_no_part_in_the_past_however_large_it_is() -> None:
    q, k = torch.cat([draw(6, 3), draw(6, 1)], -1), torch.cat([draw(6, 3, seed=1), draw(6, 1, seed=2)], -1)
    later = k.clone()
    later[3:] = torch.cat([1e6 * draw(3, 3, seed=7), torch.tensor([[900.0], [-900.0], [700.0]])], -1)
    for kernel in (Given(), Powers().double()):
        for normalizer in (mk.Softmax(), mk.SinkSoftmax()):
            before, after = (mk.attend(q, x, x, kernel, causal=True, normalizer=normalizer) for x in (k, later))
            assert torch.equal(before[:3], after[:3])
            assert before.isfinite().all()


def test_what_rounding_brought_below_its_sign_is_mended() -> None:
    """κ of a nonnegative kernel counts as 0, that of a positive one as less than anything but 0."""
    q, k = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.0, -1.0 - 1e-6, 3.0], [0.5, 0.5, 0.0]])
    assert Given().kappa(q, k)[0, 0] < 0
    assert GivenNonnegative().kappa(q, k)[0, 0] == 0
    assert mk.scores(q, k, GivenNonnegative())[0, 0] == -math.inf
    assert_close(mk.weights(q, k, GivenNonnegative()), torch.tensor([[0.0, 1.0]]))
    assert_close(mk.scores(q, k, GivenPositive())[0, 0], torch.tensor(3.0 - 1e4))
    assert mk.scores(q, k, GivenPositive())[0, 1] == 0.0
    nothing = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [0.0, 1.0, 3.0]])
    for engine in ("reference", "tiled"):
        out = mk.attend(*nothing, torch.eye(3), GivenPositive(), engine=engine)
        assert_close(out, torch.tensor([[2.0, 2.0, 3.0]]).softmax(-1))


def test_a_nan_that_only_some_rows_may_see_stays_out_of_the_others() -> None:
    q, k, v = inputs(n=5, m=5)
    k[4], v[4] = math.nan, 0.0
    for kernel in (Tokens(), mk.EluFeatures(), mk.DPFPFeatures()):
        weights = mk.weights(q, k, kernel, causal=True)
        assert weights[:4].isfinite().all() and weights[4].isnan().any()
        assert_close(weights[:4, :4], mk.weights(q[:4], k[:4], kernel, causal=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kernel", [mk.EluFeatures(), mk.TaylorFeatures(), mk.PolynomialFeatures(4), mk.DPFPFeatures(), mk.CosFeatures(9)]
)
def test_half_precision_is_rounded_once_at_the_end(kernel: mk.FeatureKernel, dtype: torch.dtype) -> None:
    q, k, v = inputs(2, dtype=dtype)
    wide = [x.float() for x in (q, k, v)]
    assert torch.equal(mk.attend(q, k, v, kernel), mk.attend(*wide, kernel).to(dtype))
    assert torch.equal(mk.scores(q, k, kernel), mk.scores(*wide[:2], kernel).to(dtype))
    assert torch.equal(kernel(q, k), kernel(*wide[:2]).to(dtype))
    assert torch.equal(kernel.kappa(q, k), kernel.kappa(*wide[:2])) and kernel.kappa(q, k).dtype == torch.float32


def test_a_parameter_in_a_wider_type_is_used_in_it() -> None:
    q, k, v = inputs(2, dtype=torch.float32)
    kernel = mk.HedgehogFeatures(4).double()
    assert kernel.kappa(q, k).dtype == torch.float64
    out = mk.attend(q, k, v, kernel)
    assert out.dtype == torch.float32
    assert_close(out, mk.attend(q.double(), k.double(), v.double(), kernel).float())


# Errors, and what the class takes care of.


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (lambda x: x.long(), TypeError, r"q has shape \(5, 4\): .* maps it to a tensor of torch.int64"),
        (lambda x: x.tolist(), TypeError, "maps it to list"),
        (lambda x: x[:-1], ValueError, r"maps it to \(4, 4\), expected \(…, 5, features\)"),
        (lambda x: x.sum(), ValueError, r"maps it to \(\)"),
        (lambda x: mk.Features(x, x), ValueError, r"has a log_scale of \(5, 4\), expected \(…, 5\)"),
    ],
)
def test_features_of_the_wrong_kind(made: object, error: type[Exception], message: str) -> None:
    class Wrong(mk.FeatureKernel):
        def features(self, x: Tensor, position: Tensor) -> Tensor:
            return made(x)

    with pytest.raises(error, match=message):
        mk.attend(*inputs(), Wrong())


def test_two_maps_of_different_length() -> None:
    class Uneven(mk.FeatureKernel):
        def query_features(self, q: Tensor, position: Tensor) -> Tensor:
            return q

        def key_features(self, k: Tensor, position: Tensor) -> Tensor:
            return k[..., :2]

    with pytest.raises(ValueError, match=r"Uneven\(\) maps queries to 4 features and keys to 2"):
        mk.attend(*inputs(), Uneven())
    with pytest.raises(NotImplementedError, match="query_features and key_features"):
        mk.attend(*inputs(), mk.FeatureKernel())


@pytest.mark.parametrize("taken", ["match", "encode_query", "encode_key"])
def test_what_follows_from_the_features_is_not_written_anew(taken: str) -> None:
    with pytest.raises(TypeError, match=f"whose {taken} is made from its features"):
        type("Lying", (mk.FeatureKernel,), {taken: lambda self, *x: x})


def test_what_is_positive_is_nonnegative() -> None:
    assert GivenPositive.nonnegative and not Given.nonnegative and not Given.positive
    assert Powers().nonnegative


def test_costs_are_counted_by_features() -> None:
    q, k, v = inputs(1, 2, dtype=torch.float32)
    for kernel, count in (
        (mk.EluFeatures(), 4), (mk.TaylorFeatures(), 15), (mk.PolynomialFeatures(3), 35), (mk.DPFPFeatures(2), 16),
        (mk.PolynomialFeatures(3, 0.0), 20), (mk.CosFeatures(9), 8), (mk.FavorFeatures(4, 10), 10),
        (mk.HedgehogFeatures(4), 8), (mk.FourierFeatures(4, 10), 10), (mk.HyperbolicFeatures(4, 6), 6),
    ):  # fmt: skip
        encoded, _ = kernel.encode(q, k, torch.arange(5), torch.arange(7))
        assert encoded[0].shape[-1] == kernel.feature_count(4) == count
        assert kernel.flops_per_pair(4, 4) == 2 * count
        assert mk.explain(q, k, v, kernel).flops == 2 * 5 * 7 * (2 * count + 2 * 3)
    assert Squares().flops_per_pair(4, 4) is None and mk.explain(q, k, v, Squares()).flops is None


def test_a_table_of_no_keys_and_a_head_of_keys_for_several() -> None:
    q, k, v = inputs(2, 4, n=3, m=0)
    assert mk.attend(q, k, v, Tokens()).eq(0).all()
    with_sink = mk.SinkSoftmax()
    assert mk.weights(q, k, Tokens(), normalizer=with_sink).shape == (2, 4, 3, 0)
    q, k, v = inputs(2, 4)
    shared = mk.attend(q, k[:, :1], v[:, :1], Tokens())
    assert_close(shared, mk.attend(q, k[:, :1].expand_as(k), v[:, :1].expand_as(v), Tokens()))


# The contract catches what is not so.


class _Leaky(mk.FeatureKernel):
    positive = True

    def features(self, x: Tensor, position: Tensor) -> mk.Features:
        top = x.detach().flatten(-2).logsumexp(-1)[..., None, None] if x.numel() else 0.0 * x[..., :1].sum()
        return mk.Features((x - top).exp(), top.expand(*x.shape[:-1], 1).squeeze(-1))


class _NotPositive(mk.FeatureKernel):
    positive = True

    def features(self, x: Tensor, position: Tensor) -> Tensor:
        return torch.cat([x, 2.0 + 0.0 * x[..., :1]], -1)


class _NotNonnegative(mk.FeatureKernel):
    nonnegative = True

    def features(self, x: Tensor, position: Tensor) -> Tensor:
        return x


class _NotSymmetric(mk.FeatureKernel):
    symmetric = True

    def query_features(self, q: Tensor, position: Tensor) -> Tensor:
        return q

    def key_features(self, k: Tensor, position: Tensor) -> Tensor:
        return k.roll(1, -1)


class _LyingWeights(mk.FeatureKernel):
    def features(self, x: Tensor, position: Tensor) -> Tensor:
        return x

    def kappa(self, *x: Tensor) -> Tensor:
        return super().kappa(*x).square()


@pytest.mark.parametrize("broken", [_Leaky, _NotPositive, _NotNonnegative, _NotSymmetric, _LyingWeights])
def test_the_contract_catches(broken: type[mk.FeatureKernel]) -> None:
    with pytest.raises(AssertionError):
        check(broken())


def test_a_signed_kernel_is_checked_where_it_has_weights() -> None:
    class Signed(KernelContract):
        def make_kernel(self) -> mk.MatchKernel:
            return Squares()

    assert [type(x) for x in Signed().normalizers()] == [mk.Softmax, mk.SinkSoftmax]
    assert check(Squares()) >= 22
    assert Reference().name == "reference"
