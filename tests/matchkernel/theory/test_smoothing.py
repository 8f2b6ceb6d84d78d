"""Nadaraya–Watson regression against scikit-learn, loops and the closed asymptotics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsRegressor

import matchkernel as mk
from matchkernel.theory import smoothing, smoothing_rate
from matchkernel.theory.smoothing_rate import GAUSSIAN_ROUGHNESS
from tests.matchkernel.oracle import draw

KERNELS = {
    "gaussian": (mk.Gaussian(0.7), lambda r2, r1: np.exp(-r2 / (2 * 0.7**2))),
    "laplacian": (mk.Laplacian(0.7), lambda r2, r1: np.exp(-r1 / 0.7)),
    "cauchy": (mk.RationalQuadratic(1.0, 0.7), lambda r2, r1: 1 / (1 + r2 / (2 * 0.7**2))),
}


@pytest.mark.parametrize("name", ["gaussian", "cauchy"])
def test_it_is_scikit_learns_neighbours_with_kernel_weights(name):
    kernel, kappa = KERNELS[name]
    x, y, at = draw(30, 3, seed=1), draw(30, 2, seed=2), draw(9, 3, seed=3)
    neighbours = KNeighborsRegressor(n_neighbors=30, weights=lambda distance: kappa(distance**2, None))
    expected = neighbours.fit(x.numpy(), y.numpy()).predict(at.numpy())
    np.testing.assert_allclose(smoothing.smooth(x, y, at, kernel).numpy(), expected, rtol=1e-12)


def test_the_laplacian_is_scikit_learns_under_its_own_distance():
    x, y, at = draw(30, 3, seed=1), draw(30, 2, seed=2), draw(9, 3, seed=3)
    neighbours = KNeighborsRegressor(n_neighbors=30, weights=lambda distance: np.exp(-distance / 0.7), p=1)
    expected = neighbours.fit(x.numpy(), y.numpy()).predict(at.numpy())
    np.testing.assert_allclose(smoothing.smooth(x, y, at, mk.Laplacian(0.7)).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("name", KERNELS)
def test_leave_one_out_fits_without_that_one(name):
    kernel, kappa = KERNELS[name]
    x, y = draw(12, 2, seed=4), draw(12, 1, seed=5)
    expected = []
    for i in range(12):
        r = x.numpy()[i] - x.numpy()
        w = np.array([kappa((row**2).sum(), np.abs(row).sum()) for row in r])
        w[i] = 0
        expected.append(w @ y.numpy() / w.sum())
    np.testing.assert_allclose(smoothing.leave_one_out(x, y, kernel).numpy(), expected, rtol=1e-12)


def test_leave_one_out_has_the_shortcut_of_linear_smoothers():
    """y − m̂₋ = (y − m̂) / (1 − α_ii)."""
    x, y = draw(15, 1, seed=6), draw(15, 1, seed=7)
    kernel = mk.Gaussian(0.4)
    own = mk.weights(x, x, kernel).diagonal()[:, None]
    shortcut = (y - smoothing.smooth(x, y, x, kernel)) / (1 - own)
    torch.testing.assert_close(y - smoothing.leave_one_out(x, y, kernel), shortcut)


@pytest.mark.parametrize("shape", [(1, 2), (0, 2), (5,)])
def test_leave_one_out_needs_another(shape):
    with pytest.raises(ValueError, match=r"at least two observations"):
        smoothing.leave_one_out(torch.zeros(shape), torch.zeros(shape), mk.Gaussian())


def test_far_away_a_gaussian_hears_the_nearest_and_does_not_divide_by_zero():
    x, y = torch.tensor([[0.0], [1.0]], dtype=torch.float64), torch.tensor([[3.0], [5.0]], dtype=torch.float64)
    assert smoothing.smooth(x, y, torch.tensor([[1e3]], dtype=torch.float64), mk.Gaussian(0.1)).item() == 5.0


def _integral(function, low, high, steps=200_001):
    at = np.linspace(low, high, steps)
    return np.trapezoid(function(at), at)


def _normal(u):
    return np.exp(-(u**2) / 2) / math.sqrt(2 * math.pi)


def test_the_gaussians_roughness():
    assert math.isclose(_integral(lambda u: _normal(u) ** 2, -12, 12), GAUSSIAN_ROUGHNESS, rel_tol=1e-9)


@pytest.mark.parametrize("x", [-0.4, 0.3, 0.8])
def test_bias_is_the_limit_of_the_exact_one(x):
    """With many observations m̂ → ∫K m f / ∫K f; its distance from m over h² tends to the formula. f ~ e^{ax}."""
    a = 1.3
    m, slope, curvature = np.sin(2 * x), 2 * np.cos(2 * x), -4 * np.sin(2 * x)
    for h, within in ((0.1, 0.05), (0.05, 0.0125), (0.025, 0.0032)):
        top = _integral(lambda t, h=h: _normal((t - x) / h) * np.sin(2 * t) * np.exp(a * t), x - 12 * h, x + 12 * h)
        bottom = _integral(lambda t, h=h: _normal((t - x) / h) * np.exp(a * t), x - 12 * h, x + 12 * h)
        predicted = smoothing_rate.nadaraya_watson_bias(h, slope, curvature, a)
        assert abs((top / bottom - m) - predicted) / h**2 < within * 2


def test_local_linear_bias_is_the_limit_of_the_exact_one():
    """The same for the line: weighted least squares with many observations, by integrals."""
    a, x, h = 1.3, 0.3, 0.02
    m, curvature = np.sin(2 * x), -4 * np.sin(2 * x)

    def moment(power, with_m):
        return _integral(
            lambda t: _normal((t - x) / h) * np.exp(a * t) * (t - x) ** power * (np.sin(2 * t) if with_m else 1.0),
            x - 12 * h, x + 12 * h,
        )  # fmt: skip

    design = np.array([[moment(0, False), moment(1, False)], [moment(1, False), moment(2, False)]])
    intercept = np.linalg.solve(design, [moment(0, True), moment(1, True)])[0]
    assert abs(intercept - m - smoothing_rate.local_linear_bias(h, curvature)) < 0.005 * h**2


def test_variance_is_what_repeated_noise_gives():
    """On a dense even grid Σα² is the variance of the average over σ²."""
    n, h, noise = 4001, 0.05, 0.49
    x = torch.linspace(0, 2, n, dtype=torch.float64)[:, None]
    alpha = mk.weights(torch.tensor([[1.0]], dtype=torch.float64), x, mk.Gaussian(h))
    predicted = smoothing_rate.smoothing_variance(noise, 0.5, h, n)
    assert math.isclose(noise * alpha.square().sum().item(), predicted, rel_tol=1e-3)


def test_best_bandwidth_is_the_least_of_the_sum():
    bias, noise, density, n = 1.7, 0.3, 0.8, 900
    best = smoothing_rate.best_bandwidth(bias, noise, density, n)

    def error(h, n):
        return (bias * h**2) ** 2 + smoothing_rate.smoothing_variance(noise, density, h, n)

    grid = np.linspace(0.5 * best, 2 * best, 30_001)
    assert math.isclose(grid[np.argmin([error(h, n) for h in grid])], best, rel_tol=1e-3)
    wanted = error(best, n) / 16  # 32^(4/5)
    more = 32 * n
    assert math.isclose(error(smoothing_rate.best_bandwidth(bias, noise, density, more), more), wanted, rel_tol=1e-12)


def test_best_bandwidth_wants_a_bias():
    with pytest.raises(ValueError, match="bias_per_square"):
        smoothing_rate.best_bandwidth(0.0, 1.0, 1.0, 10)
    with pytest.raises(ValueError, match="density=0"):
        smoothing_rate.best_bandwidth(1.0, 1.0, 0.0, 10)
