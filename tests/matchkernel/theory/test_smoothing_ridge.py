"""Kernel ridge regression against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge

import matchkernel as mk
from matchkernel.theory.ridge import kernel_ridge
from tests.matchkernel.oracle import draw


@pytest.mark.parametrize("penalty", [1e-3, 0.5])
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (mk.Gaussian(0.7), {"kernel": "rbf", "gamma": 1 / (2 * 0.7**2)}),
        (mk.Laplacian(0.7), {"kernel": "laplacian", "gamma": 1 / 0.7}),
        (mk.Dot(), {"kernel": lambda a, b: np.exp(a @ b)}),
    ],
    ids=["gaussian", "laplacian", "dot"],
)
def test_it_is_scikit_learns(kernel, options, penalty):
    x, y, at = draw(25, 2, seed=1), draw(25, 3, seed=2), draw(7, 2, seed=3)
    expected = KernelRidge(alpha=penalty, **options).fit(x.numpy(), y.numpy()).predict(at.numpy())
    got = kernel_ridge(x, y, at, kernel, penalty=penalty)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-7, atol=1e-8)


class Linear(mk.FeatureKernel):
    """κ = q·k, of either sign."""

    def features(self, x, position):
        return x


def test_a_signed_kernel_is_ridge_regression_on_its_features():
    x, y, at = draw(25, 4, seed=1), draw(25, 3, seed=2), draw(7, 4, seed=3)
    kernel = Linear()
    assert (kernel.kappa(x, x) < 0).any()
    expected = Ridge(alpha=0.3, fit_intercept=False).fit(x.numpy(), y.numpy()).predict(at.numpy())
    np.testing.assert_allclose(kernel_ridge(x, y, at, kernel, penalty=0.3).numpy(), expected, rtol=1e-9, atol=1e-10)


def test_so_are_random_features():
    x, y, at = draw(25, 2, seed=1), draw(25, 3, seed=2), draw(7, 2, seed=3)
    kernel = mk.FourierFeatures(2, 16, generator=torch.Generator().manual_seed(0)).double()
    phi, phi_at = (kernel.features(z, torch.arange(len(z))).numpy() for z in (x, at))
    expected = Ridge(alpha=0.1, fit_intercept=False).fit(phi, y.numpy()).predict(phi_at)
    np.testing.assert_allclose(kernel_ridge(x, y, at, kernel, penalty=0.1).numpy(), expected, rtol=1e-8, atol=1e-9)


def test_a_narrow_bandwidth_is_not_mistaken_for_an_uneven_table():
    x, y, at = draw(25, 1, seed=1), draw(25, 1, seed=2), draw(7, 1, seed=3)
    expected = KernelRidge(alpha=0.1, kernel="rbf", gamma=1 / (2 * 0.003**2)).fit(x.numpy(), y.numpy())
    got = kernel_ridge(x, y, at, mk.Gaussian(0.003), penalty=0.1)
    np.testing.assert_allclose(got.numpy(), expected.predict(at.numpy()), rtol=1e-8, atol=1e-9)


def test_it_shrinks_to_zero_far_away_where_smoothing_does_not():
    x, y = draw(10, 1, seed=1), 5 + draw(10, 1, seed=2)
    far = torch.full((1, 1), 100.0, dtype=torch.float64)
    assert kernel_ridge(x, y, far, mk.Gaussian(), penalty=0.1).item() == 0.0


def test_batches_are_loops():
    x, y, at = draw(3, 8, 2, seed=1), draw(3, 8, 1, seed=2), draw(3, 4, 2, seed=3)
    together = kernel_ridge(x, y, at, mk.Gaussian(), penalty=0.1)
    for b in range(3):
        torch.testing.assert_close(together[b], kernel_ridge(x[b], y[b], at[b], mk.Gaussian(), penalty=0.1))


def test_a_rule_with_two_projections_has_no_ridge_solution():
    x, y = draw(6, 2, seed=1), draw(6, 1, seed=2)
    with pytest.raises(ValueError, match="not symmetric"):
        kernel_ridge(x, y, x, mk.Bilinear(2, generator=torch.Generator().manual_seed(0)).double(), penalty=1.0)


def test_an_indefinite_table_has_none_either():
    class Far(mk.MatchKernel):
        def match(self, q, k):
            return mk.squared_distance(q, k)

    x, y = draw(6, 2, seed=1), draw(6, 1, seed=2)
    with pytest.raises(ValueError, match="not positive definite"):
        kernel_ridge(x, y, x, Far(), penalty=0.1)


def test_overflow_is_said():
    x = 100 * draw(6, 2, seed=1)
    with pytest.raises(ValueError, match="not finite"):
        kernel_ridge(x, x, x, mk.Dot(), penalty=1.0)


@pytest.mark.parametrize("penalty", [0.0, -1.0, float("nan")])
def test_penalty(penalty):
    with pytest.raises(ValueError, match="penalty"):
        kernel_ridge(draw(5, 1), draw(5, 1), draw(2, 1), mk.Gaussian(), penalty=penalty)


def test_shapes():
    with pytest.raises(ValueError, match="y_train"):
        kernel_ridge(draw(5, 1), draw(4, 1), draw(2, 1), mk.Gaussian(), penalty=1.0)
