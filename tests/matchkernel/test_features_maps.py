"""Feature maps without randomness, against their formulas, loops over coordinates, torch and scikit-learn."""

import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from sklearn.metrics.pairwise import polynomial_kernel
from sklearn.preprocessing import PolynomialFeatures as AllMonomials
from torch.testing import assert_close

import matchkernel as mk

sys.path.insert(0, str(Path(__file__).parent))
from kernels_under_test import hedgehog
from oracle import draw, inputs

Tensor = torch.Tensor
HALF = [torch.bfloat16, torch.float16]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def features(kernel: mk.FeatureKernel, x: Tensor, position: Tensor | None = None) -> Tensor:
    """φ itself, its scale multiplied back in."""
    values, log_scale = kernel.encode_query(x, torch.arange(x.shape[-2]) if position is None else position)
    return values * log_scale.exp()


# elu + 1


def test_elu_features_are_elu_plus_1() -> None:
    x = torch.cat([draw(9, 5) * 3, torch.zeros(1, 5, dtype=torch.float64), -draw(3, 5).abs()])
    assert_close(features(mk.EluFeatures(), x), torch.nn.functional.elu(x) + 1, **EXACT)
    q, k, _ = inputs()
    assert_close(
        mk.EluFeatures().kappa(q, k), (torch.nn.functional.elu(q) + 1) @ (torch.nn.functional.elu(k) + 1).mT, **EXACT
    )


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_elu_features_are_positive_where_elu_plus_1_is_not(dtype: torch.dtype) -> None:
    x = torch.full((3, 4), -8.0, dtype=dtype) if dtype != torch.float32 else torch.full((3, 4), -20.0)
    if dtype != torch.float16:
        assert (torch.nn.functional.elu(x) + 1).eq(0).all()
    assert_close(mk.scores(x, x, mk.EluFeatures()).float(), 2 * x[:, :3].float() + math.log(4), rtol=1e-2, atol=0.0)
    assert_close(mk.weights(x, x, mk.EluFeatures()), torch.full((3, 3), 1 / 3, dtype=dtype))


def test_elu_features_far_below_zero_do_not_fade() -> None:
    """e^−400 is no float32: the scale of a token keeps what is left."""
    q, k = torch.tensor([[-200.0, -201.0]]), torch.tensor([[-200.0, -203.0], [-202.0, -200.0], [-300.0, -300.0]])
    wide = q.double(), k.double()
    truth = torch.logsumexp(wide[0].unsqueeze(-2) + wide[1].unsqueeze(-3), -1)
    assert mk.EluFeatures().kappa(q, k).eq(0).all()
    assert_close(mk.scores(q, k, mk.EluFeatures()).double(), truth, rtol=1e-6, atol=0.0)
    assert_close(mk.weights(q, k, mk.EluFeatures()).double(), truth.softmax(-1), rtol=1e-4, atol=1e-6)
    apart = mk.weights(torch.tensor([[-1e4, 0.0]]), torch.tensor([[0.0, -1e4], [0.0, -1e4]]), mk.EluFeatures())
    assert_close(apart, torch.tensor([[0.5, 0.5]]))


@pytest.mark.parametrize("value", [100.0, -100.0, 0.0, 1e30])
def test_elu_features_have_the_derivative_of_elu(value: float) -> None:
    x = torch.tensor([[value, 1.0]], requires_grad=True)
    (grad,) = torch.autograd.grad(mk.EluFeatures().kappa(x, torch.ones(1, 2)).sum(), x)
    assert_close(grad, torch.tensor([[2.0 if value >= 0 else 0.0, 2.0]]))


# Taylor, polynomial


@pytest.mark.parametrize("d", [1, 2, 5, 8])
def test_taylor_features_are_the_second_order_of_the_exponential(d: int) -> None:
    q, k, _ = inputs(2, d=d)
    x = q @ k.mT / math.sqrt(d)
    assert_close(mk.TaylorFeatures().kappa(q, k), 1 + x + x**2 / 2, **EXACT)
    phi = features(mk.TaylorFeatures(), q)
    assert phi.shape[-1] == 1 + d + d * (d + 1) // 2
    small = 1e-3 * x
    near = mk.TaylorFeatures().kappa(1e-3 * q, k)
    assert ((near - small.exp()).abs() <= 1.1 * small.abs() ** 3 / 6 + 1e-15).all()


def test_taylor_features_never_reach_below_a_half() -> None:
    q = torch.tensor([[2.0]], dtype=torch.float64)
    k = torch.linspace(-3, 3, 61, dtype=torch.float64).unsqueeze(-1)
    kappa = mk.TaylorFeatures().kappa(q, k)
    assert float(kappa.min()) == pytest.approx(0.5) and int(kappa.argmin()) == 25
    assert mk.TaylorFeatures().kappa(q, torch.tensor([[-5.0]]).double()) > 40 * mk.TaylorFeatures().kappa(q, -q / 4)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("offset", [0.0, 0.5, 2.0])
def test_polynomial_features_are_scikit_learns_kernel(degree: int, offset: float) -> None:
    q, k, _ = inputs(n=6, m=9, d=3)
    kernel = mk.PolynomialFeatures(degree, offset)
    truth = torch.from_numpy(polynomial_kernel(q, k, degree=degree, gamma=1.0, coef0=offset))
    assert_close(kernel.kappa(q, k), truth, **EXACT)
    count = AllMonomials(degree).fit(q).n_output_features_ if offset else math.comb(3 + degree - 1, degree)
    assert features(kernel, q).shape[-1] == kernel.feature_count(3) == count
    assert kernel.nonnegative is (degree % 2 == 0) and not kernel.positive


def test_polynomial_features_are_monomials_with_the_roots_of_their_coefficients() -> None:
    x = draw(4, 3)
    a, b, c = x.unbind(-1)
    r = math.sqrt
    truth = [
        a**3, r(3) * a**2 * b, r(3) * a**2 * c, r(3) * a * b**2, r(6) * a * b * c, r(3) * a * c**2, b**3,
        r(3) * b**2 * c, r(3) * b * c**2, c**3,
    ]  # fmt: skip
    assert_close(features(mk.PolynomialFeatures(3, 0.0), x), torch.stack(truth, -1), **EXACT)


@pytest.mark.parametrize("kernel", [mk.PolynomialFeatures(6, 0.0), mk.TaylorFeatures(), mk.DPFPFeatures(2)])
def test_powers_do_not_overflow(kernel: mk.FeatureKernel) -> None:
    """Where κ itself leaves the range of float32 its logarithm does not, and weights are what they are."""
    q, k, v = inputs(d=3, dtype=torch.float32)
    far = 1e8
    wide = [x.double() for x in (q, k, v)]
    truth = mk.attend(far * wide[0], far * wide[1], wide[2], kernel)
    assert mk.attend(far * q, far * k, v, kernel).isfinite().all()
    assert_close(mk.attend(far * q, far * k, v, kernel).double(), truth, rtol=1e-3, atol=1e-4)
    tiny = mk.attend(1e-20 * q, 1e-20 * k, v, kernel)
    assert_close(tiny.double(), mk.attend(1e-20 * wide[0], 1e-20 * wide[1], wide[2], kernel), rtol=1e-3, atol=1e-4)


def test_polynomial_features_of_what_they_cannot_be() -> None:
    for degree, error in ((0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"PolynomialFeatures\(degree=…\): expected"):
            mk.PolynomialFeatures(degree)
    for offset in (-0.1, math.inf, math.nan, "1", True):
        with pytest.raises(ValueError, match=r"PolynomialFeatures\(offset=…\): expected a finite number of at least 0"):
            mk.PolynomialFeatures(2, offset)
    assert repr(mk.PolynomialFeatures(3, 0.5)) == "PolynomialFeatures(3, offset=0.5)"


# DPFP


def dpfp_by_loop(x: list[float], nu: int) -> list[float]:
    """Schlag, Irie & Schmidhuber 2021, term by term."""
    r = [max(value, 0.0) for value in [*x, *(-value for value in x)]]
    return [r[i] * r[(i + shift) % len(r)] for shift in range(1, nu + 1) for i in range(len(r))]


@pytest.mark.parametrize("d", [1, 3, 4])
def test_dpfp_features_are_those_of_the_loop(d: int) -> None:
    x = draw(6, d)
    for nu in range(1, 2 * d):
        truth = torch.tensor([dpfp_by_loop(row, nu) for row in x.tolist()], dtype=torch.float64)
        assert truth.shape[-1] == 2 * d * nu
        assert_close(features(mk.DPFPFeatures(nu), x), truth, **EXACT)


def test_dpfp_takes_shifts_from_1_to_twice_the_width_less_1() -> None:
    with pytest.raises(ValueError, match=r"nu=6\) of tokens of shape \(5, 3\): .* at most .* 5"):
        mk.DPFPFeatures(6)(draw(5, 3), draw(5, 3))
    for nu, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match=r"DPFPFeatures\(nu=…\)"):
            mk.DPFPFeatures(nu)


def test_a_query_that_shares_no_features_with_any_key_gets_zeros() -> None:
    q, k, v = torch.tensor([[1.0, 1.0], [-1.0, 1.0]]), torch.tensor([[1.0, 2.0], [3.0, 0.5]]), torch.eye(2)
    out = mk.attend(q, k, v, mk.DPFPFeatures())
    assert_close(out, torch.tensor([[2.0 / 3.5, 1.5 / 3.5], [0.0, 0.0]]))
    sunk = mk.attend(q, k, v, mk.DPFPFeatures(), normalizer=mk.SinkSoftmax())
    assert_close(sunk, torch.tensor([[2.0 / 4.5, 1.5 / 4.5], [0.0, 0.0]]))


# cosFormer


def cosformer_by_loop(q: Tensor, k: Tensor, length: int, i: list[float], j: list[float]) -> Tensor:
    rows = []
    for a, query in zip(i, q.tolist(), strict=True):
        row = []
        for b, key in zip(j, k.tolist(), strict=True):
            dot = sum(max(x, 0.0) * max(y, 0.0) for x, y in zip(query, key, strict=True))
            row.append(dot * math.cos(math.pi * (a - b) / (2 * length)))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def test_cos_features_are_those_of_the_loop() -> None:
    q, k, v = inputs(n=5, m=7)
    kernel = mk.CosFeatures(9)
    assert_close(kernel.kappa(q, k), cosformer_by_loop(q, k, 9, [2, 3, 4, 5, 6], list(range(7))), **EXACT)
    place = torch.tensor([0.5, 3.0, 9.0, 1.0, 2.0]), torch.arange(7) + 1
    truth = cosformer_by_loop(q, k, 9, place[0].tolist(), place[1].tolist())
    assert_close(kernel.kappa(q, k, *place), truth, **EXACT)
    out = mk.attend(q, k, v, kernel, query_position=place[0], key_position=place[1])
    total = truth.sum(-1, keepdim=True)
    assert_close(out, torch.where(total == 0, 0.0, truth / torch.where(total == 0, 1.0, total)) @ v)


def test_cos_features_refuse_a_sequence_that_is_too_long() -> None:
    q, k, v = inputs(n=7, m=7)
    assert mk.attend(q, k, v, mk.CosFeatures(6)).isfinite().all()
    assert mk.CosFeatures(6).kappa(q.abs(), k.abs())[0, 6] < 1e-12
    short = mk.CosFeatures(5)
    for call in (lambda: mk.attend(q, k, v, short), lambda: short.kappa(q, k), lambda: short(q, k)):
        with pytest.raises(ValueError, match="positions from 0 to 6 are more than 5 apart"):
            call()
    with pytest.raises(ValueError, match="positions from -4 to 6"):
        mk.attend(q, k, v, mk.CosFeatures(8), query_position=torch.arange(7) - 4)
    with pytest.raises(ValueError, match="positions from 0 to 6"):
        mk.attend(q, k, v, mk.CosFeatures(5) + mk.ALiBi(1))
    later = torch.arange(7) + 1000
    far = mk.attend(q, k, v, mk.CosFeatures(6), query_position=later, key_position=later)
    assert_close(far, mk.attend(q, k, v, mk.CosFeatures(6)))
    with pytest.raises(ValueError, match=r"CosFeatures\(length=…\): expected at least 1, got 0"):
        mk.CosFeatures(0)


# Hedgehog


def test_hedgehog_features_start_as_exponentials_of_the_token_and_its_negative() -> None:
    q, k, _ = inputs()
    kernel = mk.HedgehogFeatures(4).double()
    assert_close(features(kernel, q), torch.cat([q.exp(), (-q).exp()], -1), **EXACT)
    assert_close(kernel.kappa(q, k), 2 * torch.cosh(q.unsqueeze(-2) + k.unsqueeze(-3)).sum(-1), **EXACT)


@pytest.mark.parametrize("heads", [None, 2])
def test_hedgehog_features_are_those_of_a_linear_layer_each_for_queries_and_keys(heads: int | None) -> None:
    q, k, _ = inputs(3, 2, d=6)
    kernel = hedgehog(heads).double()

    def by_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        sides = []
        for head in range(2):
            w, b = (weight, bias) if heads is None else (weight[head], bias[head])
            y = torch.nn.functional.linear(x[:, head], w, b)
            sides.append(torch.cat([y.exp(), (-y).exp()], -1))
        return torch.stack(sides, 1)

    left = by_layer(q, kernel.query_weight, kernel.query_bias)
    right = by_layer(k, kernel.key_weight, kernel.key_bias)
    assert_close(kernel.kappa(q, k), left @ right.mT, **EXACT)
    kernel.reset_parameters()
    assert torch.equal(kernel.query_weight, torch.eye(6).double().expand_as(kernel.query_weight))
    assert kernel.key_bias.eq(0).all()


def test_hedgehog_features_learn_the_weights_of_a_softmax() -> None:
    """By the loss that its description gives."""
    q, k, _ = inputs(2, n=12, m=12, dtype=torch.float32)
    kernel = mk.HedgehogFeatures(4)

    def loss() -> Tensor:
        return -(mk.weights(q, k) * mk.weights(q, k, kernel).log()).sum(-1).mean()

    truth = mk.weights(q, k)
    least = float(-(truth * truth.log()).sum(-1).mean())
    before = float(loss().detach()) - least
    optimizer = torch.optim.Adam(kernel.parameters(), 0.03)
    for _ in range(150):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert 0 < float(loss().detach()) - least < before / 3


def test_hedgehog_features_of_another_width_or_other_heads() -> None:
    for kernel, message in (
        (mk.HedgehogFeatures(5), r"expects a last dimension of 5"),
        (mk.HedgehogFeatures(4, heads=3), r"expects 3 at dimension -3"),
    ):
        with pytest.raises(ValueError, match=message):
            mk.attend(*inputs(2), kernel)
    for heads, error in ((0, ValueError), (1.0, TypeError)):
        with pytest.raises(error, match=r"HedgehogFeatures\(heads=…\)"):
            mk.HedgehogFeatures(4, heads=heads)
    assert repr(mk.HedgehogFeatures(4, heads=3)) == "HedgehogFeatures(4, heads=3)"


# All of them.


@pytest.mark.parametrize("far", [1.0, 30.0, 300.0])
def test_large_exponents_neither_overflow_nor_lose_their_weights(far: float) -> None:
    """Against the logarithm of the sum of exponentials, pair by pair, in float64."""
    q, k, _ = inputs(dtype=torch.float32)
    q, k = (far * x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    exponent = torch.cat([q.double(), -q.double()], -1).unsqueeze(-2) + torch.cat([k, -k], -1).double().unsqueeze(-3)
    truth = exponent.logsumexp(-1)
    # A pair whose features do not meet within the range of float32 counts as next to nothing.
    inner = truth - q.double().abs().amax(-1)[:, None] - k.double().abs().amax(-1)
    kernel = mk.HedgehogFeatures(4)
    met = inner > math.log(torch.finfo(torch.float32).tiny)
    scores = mk.scores(q, k, kernel).double()
    assert_close(scores[met], truth[met], rtol=1e-6, atol=1e-5)
    assert scores.isfinite().all() and met.any(-1).all() and (far > 100 or met.all())
    weights = truth.masked_fill(~met, -math.inf).softmax(-1)
    assert_close(mk.weights(q, k, kernel).double(), weights, rtol=1e-3, atol=1e-5)


EVERY = [mk.EluFeatures(), mk.TaylorFeatures(), mk.PolynomialFeatures(3), mk.DPFPFeatures(2), mk.CosFeatures(9)]


@pytest.mark.parametrize("kernel", [*EVERY, hedgehog()])
def test_derivatives_of_the_features_are_those_of_finite_differences(kernel: mk.FeatureKernel) -> None:
    kernel = kernel.double()
    q, k = (x.requires_grad_() for x in inputs(n=2, m=3, d=6)[:2])
    torch.autograd.gradcheck(lambda q, k: kernel.kappa(q, k), (q, k))
    torch.autograd.gradgradcheck(lambda q, k: kernel.kappa(q, k), (q, k))


def test_a_token_without_coordinates_is_no_error() -> None:
    q, k, v = torch.ones(2, 0), torch.ones(3, 0), draw(3, 2).float()
    assert_close(mk.attend(q, k, v, mk.TaylorFeatures()), v.mean(0).expand(2, 2))
    assert_close(mk.attend(q, k, v, mk.PolynomialFeatures()), v.mean(0).expand(2, 2))
    for kernel in (mk.EluFeatures(), mk.CosFeatures(4)):
        assert mk.attend(q, k, v, kernel).isfinite().all()


def test_maps_are_those_of_each_head_and_batch() -> None:
    q, k, _ = inputs(2, 3)
    for kernel in EVERY:
        table = kernel.kappa(q, k)
        for b, h in itertools.product(range(2), range(3)):
            assert_close(table[b, h], kernel.kappa(q[b, h], k[b, h]))


@pytest.mark.parametrize("kernel", [mk.PolynomialFeatures(3), mk.CosFeatures(9), mk.HedgehogFeatures(4)])
def test_maps_are_traced_whole(kernel: mk.FeatureKernel) -> None:
    torch.compiler.reset()
    inputs_ = inputs(2, dtype=torch.float32)
    traced = torch.compile(lambda q, k, v: mk.attend(q, k, v, kernel), fullgraph=True, backend="eager")
    assert_close(traced(*inputs_), mk.attend(*inputs_, kernel))


def test_monomials_that_were_counted_under_inference_mode_still_learn() -> None:
    q, k, _ = inputs(d=5)
    kernel = mk.PolynomialFeatures(3, 0.3)
    with torch.inference_mode():
        kernel.kappa(q, k)
    q.requires_grad_()
    kernel.kappa(q, k).sum().backward()
    assert_close(q.grad, (3 * (q @ k.mT + 0.3).square().unsqueeze(-1) * k).sum(1))


@pytest.mark.parametrize("size", [1e-36, 1e-22, 1e21, 1e37])
@pytest.mark.parametrize(
    "kernel", [mk.EluFeatures(), mk.CosFeatures(9), mk.DPFPFeatures(3), mk.PolynomialFeatures(2, 0)]
)
def test_tokens_whose_weights_are_no_floats_keep_their_shares(kernel: mk.FeatureKernel, size: float) -> None:
    """κ = 10^−44 is 0 in float32 and 10^42 is infinite: shares of it are those that float64 has."""
    q, k, v = inputs(dtype=torch.float32)
    q, k = ((size * x.abs() + size / 10).requires_grad_() for x in (q, k))
    weights = mk.weights(q, k, kernel)
    truth = kernel.kappa(q.detach().double(), k.detach().double())
    assert_close(weights.double(), truth / truth.sum(-1, keepdim=True), rtol=2e-4, atol=1e-6)
    gradients = torch.autograd.grad(mk.attend(q, k, v, kernel).sum(), (q, k))
    assert all(gradient.isfinite().all() for gradient in gradients)
