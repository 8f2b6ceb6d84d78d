"""The closed forms are what sampling finds, along several directions, and what published values and scipy say."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

from matchkernel.theory import random_features
from tests.matchkernel.oracle import draw

KINDS = ("positive", "hyperbolic", "trigonometric")
MSE = {
    "positive": random_features.positive_mse,
    "hyperbolic": random_features.hyperbolic_mse,
    "trigonometric": random_features.trigonometric_mse,
}
DRAWS = 400_000
COSINES = (-0.8, 0.0, 0.6, 1.0)


def pair(cosine: float, length: float = 0.45, d: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Two vectors of one length at a given angle, in a direction that favours no axis."""
    basis = torch.linalg.qr(draw(d, d, seed=11)).Q
    return length * basis[0], length * (cosine * basis[0] + math.sqrt(1 - cosine**2) * basis[1])


def one_projection(omega: torch.Tensor, x: torch.Tensor, y: torch.Tensor, kind: str) -> torch.Tensor:
    """What each projection (N, d) makes of one pair, written from the papers' feature maps, both sides apart."""
    up, down = omega @ x, omega @ y
    shrink = math.exp(-float(x @ x + y @ y) / 2)
    if kind == "positive":
        return up.exp() * down.exp() * shrink
    if kind == "hyperbolic":
        return (up.exp() * down.exp() + (-up).exp() * (-down).exp()) / 2 * shrink
    return (up.cos() * down.cos() + up.sin() * down.sin()) / shrink


def assert_mean(sample: torch.Tensor, expected: float) -> None:
    """The mean of independent draws (N,) is within four standard errors, and that says something."""
    error = float(sample.std()) / math.sqrt(len(sample))
    assert float(sample.mean()) == pytest.approx(expected, abs=4 * error + 1e-12)
    assert 4 * error < 0.08 * abs(expected) + 1e-12


@pytest.mark.parametrize("cosine", COSINES)
@pytest.mark.parametrize("kind", KINDS)
def test_sampling_finds_the_mean_squared_error(kind, cosine):
    x, y = pair(cosine)
    kernel = math.exp(x @ y)
    sample = one_projection(draw(DRAWS, 4, seed=5), x, y, kind)
    assert_mean(sample, kernel)
    assert_mean((sample - kernel).square(), float(MSE[kind](x, y, 1)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_a_mean_of_many_projections(kind):
    x, y = pair(0.3)
    blocks = one_projection(draw(DRAWS, 4, seed=6), x, y, kind).reshape(-1, 8).mean(-1)
    assert_mean((blocks - math.exp(x @ y)).square(), float(MSE[kind](x, y, 8)))


def test_the_papers_own_formulas():
    x, y = draw(9, 6, seed=1) * 0.4, draw(9, 6, seed=2) * 0.4
    kernel = (x * y).sum(-1).exp()
    together, apart = (x + y).square().sum(-1), (x - y).square().sum(-1)
    positive = together.exp() * kernel**2 * (1 - (-together).exp()) / 64
    expected = {
        "positive": positive,
        "hyperbolic": (1 - (-together).exp()) * positive / 2,
        "trigonometric": together.exp() * kernel**-2 * (1 - (-apart).exp()) ** 2 / 128,
    }
    for kind, value in expected.items():
        torch.testing.assert_close(MSE[kind](x, y, 64), value)
        torch.testing.assert_close(
            random_features.relative_mse(x, y, 64, kind) * (2 * (x * y).sum(-1)).exp(), value, rtol=1e-12, atol=0
        )


def test_the_two_sided_kinds_are_mirror_images_and_exact_where_they_should_be():
    x, y = pair(0.4)
    torch.testing.assert_close(
        random_features.relative_mse(x, y, 3, "hyperbolic"), random_features.relative_mse(x, -y, 3, "trigonometric")
    )
    assert random_features.trigonometric_mse(x, x, 1) == 0
    assert random_features.hyperbolic_mse(x, -x, 1) == random_features.positive_mse(x, -x, 1) == 0


def test_small_sizes_do_not_cancel():
    x = torch.full((1,), 1e-5, dtype=torch.float64)
    z = mpmath.mpf(float(x)) ** 2 * 4
    for kind, exact in (("positive", mpmath.expm1(z)), ("hyperbolic", 2 * mpmath.sinh(z / 2) ** 2)):
        assert float(random_features.relative_mse(x, x, 1, kind)) == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_projections_as_needed_reach_the_error(kind):
    x, y = pair(0.2, length=1.3)
    needed = random_features.projections_needed(x, y, 0.01, kind)
    count = math.ceil(needed)
    assert random_features.relative_mse(x, y, count, kind).sqrt() <= 0.01
    assert random_features.relative_mse(x, y, count - 1, kind).sqrt() > 0.01


def orthogonal_blocks(blocks: int, d: int, seed: int) -> torch.Tensor:
    """(blocks, d, d): Haar-orthogonal rows, each with the length of a Gaussian vector of its own."""
    q, r = torch.linalg.qr(draw(blocks, d, d, seed=seed))
    rows = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT
    return rows * draw(blocks, d, d, seed=seed + 1).norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("cosine", COSINES)
@pytest.mark.parametrize("projections", [4, 6, 8])
def test_sampling_finds_the_orthogonal_error(projections, cosine):
    """Whole blocks, and a last block that is cut off."""
    x, y = pair(cosine)
    draws = 60_000
    rows = orthogonal_blocks(2 * draws, 4, seed=21).reshape(draws, 8, 4)[:, :projections].reshape(-1, 4)
    estimate = one_projection(rows, x, y, "positive").reshape(draws, projections).mean(-1)
    squared = (estimate - math.exp(x @ y)).square()
    expected = float(random_features.orthogonal_positive_mse(x, y, projections))
    error = float(squared.std()) / math.sqrt(draws)
    assert float(squared.mean()) == pytest.approx(expected, abs=4 * error)
    if cosine == 0.6:
        assert expected < float(random_features.positive_mse(x, y, projections)) - 4 * error


@pytest.mark.parametrize("size", [1e-6, 0.3, 5.0, 60.0])
def test_the_orthogonal_error_against_the_confluent_hypergeometric_function(size):
    d = 6
    x = torch.zeros(d, dtype=torch.float64)
    y = torch.full((d,), math.sqrt(size / d), dtype=torch.float64)
    together = mpmath.exp(size) - mpmath.hyp1f1(d, mpmath.mpf(d) / 2, mpmath.mpf(size) / 2)
    one = mpmath.expm1(size) / 12 - mpmath.exp(-size) * together * (d - 1) / 12  # x·y = 0 and two full blocks
    got = float(random_features.orthogonal_positive_mse(x, y, 12))
    assert got == pytest.approx(float(one), rel=1e-9)


def test_orthogonal_projections_change_nothing_where_there_is_no_pair():
    x, y = pair(0.5)
    torch.testing.assert_close(random_features.orthogonal_positive_mse(x, y, 1), random_features.positive_mse(x, y, 1))
    line = torch.tensor([0.8], dtype=torch.float64)
    torch.testing.assert_close(
        random_features.orthogonal_positive_mse(line, line, 5), random_features.positive_mse(line, line, 5)
    )


def test_a_published_bound_on_the_orthogonal_gain():
    """Choromanski et al. 2021, theorem 2, for at most d projections: at least this much is gained."""
    for cosine in COSINES:
        x, y = pair(cosine, d=8)
        least = (x @ y).exp() - (-(x @ x + y @ y) / 2).exp()
        for m in (2, 8):
            gain = random_features.positive_mse(x, y, m) - random_features.orthogonal_positive_mse(x, y, m)
            assert gain >= (1 - 1 / m) * 2 / (8 + 2) * least.square() * (1 - 1e-12)


@pytest.mark.parametrize("d", [2, 6, 40, 600])
def test_the_orthogonal_gain_has_a_slope_and_a_ceiling(d):
    """The share of full blocks: (d − 1)/(d + 2)·s/2 at first, below ½s²/(e^s − 1) always, near it for wide heads."""
    size = torch.tensor([1e-4, 0.1, 1.6, 5.0, 20.0], dtype=torch.float64)
    x = torch.zeros(5, d, dtype=torch.float64)
    x[:, 0] = size.sqrt()
    zero = torch.zeros_like(x)
    share = 1 - random_features.orthogonal_positive_mse(x, zero, 3 * d) / random_features.positive_mse(x, zero, 3 * d)
    assert float(share[0]) == pytest.approx((d - 1) / (d + 2) * 0.5e-4, rel=1e-3)
    ceiling = size.square() / 2 / size.expm1()
    assert (share[:4] < ceiling[:4]).all() and (share[4] < ceiling[4] + 1e-15)
    if d == 600:
        assert share[2] > 0.98 * ceiling[2]


def output_of_many(kind: str, m: int, runs: int) -> tuple[torch.Tensor, ...]:
    """x, y, v and `runs` estimated attention outputs (runs, n, w), each from m projections of its own."""
    x, y, v = 0.4 * draw(2, 3, seed=31), 0.4 * draw(5, 3, seed=32), draw(5, 2, seed=33)
    omega = draw(runs, m, 3, seed=34)
    up, down = omega @ x.T, omega @ y.T
    shrink = (-(x.square().sum(-1)[:, None] + y.square().sum(-1)) / 2).exp()
    if kind == "trigonometric":
        total = (up.cos().mT @ down.cos() + up.sin().mT @ down.sin()) / shrink
    else:
        total = up.exp().mT @ down.exp() * shrink
        if kind == "hyperbolic":
            total = total + (-up).exp().mT @ (-down).exp() * shrink
    return x, y, v, (total @ v) / total.sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_finds_the_error_and_the_bias_of_a_row(kind):
    """To first order: at m projections the next order is some 1/m of it, which the tolerance has to leave room for."""
    m, runs = 100, 80_000
    x, y, v, output = output_of_many(kind, m, runs)
    exact = (x @ y.T).softmax(-1) @ v
    mse = (output - exact).square().sum(-1).mean(0)
    torch.testing.assert_close(random_features.row_mse(x, y, v, m, kind), mse, rtol=0.05, atol=0)
    bias, noise = (output - exact).mean(0), (output - exact).std(0) / math.sqrt(runs)
    expected = random_features.row_bias(x, y, v, m, kind)
    assert (bias - expected).abs().max() < 4 * noise.max() + 0.05 * expected.abs().max()
    assert expected.abs().max() > 6 * noise.max()


def test_rows_pair_by_pair():
    """The factored sums are the double sums they stand for."""
    x, y, v = 0.5 * draw(2, 3, seed=41), 0.5 * draw(4, 3, seed=42), draw(4, 2, seed=43)
    for kind in KINDS:
        for i in range(2):
            weight = (x[i] @ y.T).softmax(-1)
            output = weight @ v
            mse, bias = 0.0, torch.zeros(2, dtype=torch.float64)
            for j in range(4):
                for l in range(4):  # noqa: E741
                    if kind == "trigonometric":
                        moment = math.cosh((x[i] - y[j]) @ (x[i] - y[l]))
                    else:
                        inner = float((x[i] + y[j]) @ (x[i] + y[l]))
                        moment = math.exp(inner) if kind == "positive" else math.cosh(inner)
                    both = float(weight[j] * weight[l]) * moment / 7
                    mse += both * float((v[j] - output) @ (v[l] - output))
                    bias -= both * (v[j] - output)
            torch.testing.assert_close(random_features.row_mse(x, y, v, 7, kind)[i].item(), mse)
            torch.testing.assert_close(random_features.row_bias(x, y, v, 7, kind)[i], bias)


def test_batches_of_rows():
    x, y, v = draw(3, 2, 4, seed=51), draw(1, 5, 4, seed=52), draw(3, 5, 2, seed=53)
    for function in (random_features.row_mse, random_features.row_bias):
        whole = function(x, y, v, 9, "positive")
        for b in range(3):
            torch.testing.assert_close(whole[b], function(x[b], y[0], v[b], 9, "positive"))


@pytest.mark.parametrize("distance", [0.0, 0.4, 1.1, 3.0])
@pytest.mark.parametrize("phase", [False, True])
def test_sampling_finds_the_variance_of_fourier_features(phase, distance):
    x, y = draw(3, seed=61), draw(3, seed=62)
    delta = (x - y) / (x - y).norm() * distance
    x, bandwidth = y + delta, 1.7
    omega = draw(DRAWS, 3, seed=63) / bandwidth
    if phase:
        b = torch.rand(DRAWS, generator=torch.Generator().manual_seed(64), dtype=torch.float64) * 2 * math.pi
        sample = 2 * (omega @ x + b).cos() * (omega @ y + b).cos()
        expected = float(random_features.phase_fourier_variance(delta, 1, bandwidth))
    else:  # a pair of features shares a frequency: a mean over one frequency has the variance of two features
        sample = (omega @ x).cos() * (omega @ y).cos() + (omega @ x).sin() * (omega @ y).sin()
        expected = float(random_features.paired_fourier_variance(delta, 2, bandwidth))
    kernel = math.exp(-(distance**2) / (2 * bandwidth**2))
    error = float(sample.std()) / math.sqrt(DRAWS)
    assert float(sample.mean()) == pytest.approx(kernel, abs=4 * error + 1e-12)
    assert_mean((sample - kernel).square(), expected)


def test_more_features_less_variance():
    delta = draw(5, 3, seed=71)
    for function in (random_features.paired_fourier_variance, random_features.phase_fourier_variance):
        torch.testing.assert_close(function(delta, 128), function(delta, 1) / 128)
    assert (
        random_features.paired_fourier_variance(delta, 64) <= random_features.phase_fourier_variance(delta, 64)
    ).all()


def test_unsuitable_arguments_are_named():
    x, y, v = draw(2, 3), draw(4, 3), draw(4, 2)
    with pytest.raises(ValueError, match=r"x and y have shapes \(2, 3\) and \(4, 2\)"):
        random_features.positive_mse(x, v, 8)
    for function in MSE.values():
        with pytest.raises(ValueError, match="projections is 0: expected at least 1"):
            function(x, x, 0)
    with pytest.raises(ValueError, match=r"kind is 'sine'"):
        random_features.relative_mse(x, x, 8, "sine")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="relative_error is 0"):
        random_features.projections_needed(x, x, 0)
    for function in (random_features.row_mse, random_features.row_bias):
        with pytest.raises(ValueError, match=r"expected \(…, n, d\), \(…, m, d\) and \(…, m, w\)"):
            function(x, y, v[:3], 8, "positive")
        with pytest.raises(ValueError, match=r"kind is 'both'"):
            function(x, y, v, 8, "both")
    for function in (random_features.paired_fourier_variance, random_features.phase_fourier_variance):
        with pytest.raises(ValueError, match="bandwidth is -1"):
            function(x, 8, -1.0)
        with pytest.raises(ValueError, match="features is 0"):
            function(x, 0)
