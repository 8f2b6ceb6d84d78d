"""Local linear regression against numpy's weighted least squares, one query at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import matchkernel as mk
from matchkernel.theory.local_linear import local_linear
from matchkernel.theory.smoothing import smooth
from tests.matchkernel.oracle import draw

SOME = [mk.Gaussian(0.8), mk.Laplacian(1.1), mk.RationalQuadratic(), mk.ScaledDot(), mk.Cosine(0.5)]


def by_lstsq(x, y, at, alpha):
    out = []
    for place, w in zip(at.numpy(), alpha.numpy(), strict=True):
        design = np.concatenate([np.ones((len(x), 1)), x.numpy() - place], axis=1)
        root = np.sqrt(w)[:, None]
        out.append(np.linalg.lstsq(root * design, root * y.numpy(), rcond=None)[0][0])
    return np.array(out)


@pytest.mark.parametrize("d", [1, 2, 4])
@pytest.mark.parametrize("kernel", SOME, ids=str)
def test_each_query_is_a_weighted_least_squares_fit(kernel, d):
    x, y, at = draw(25, d, seed=1), draw(25, 3, seed=2), draw(6, d, seed=3)
    expected = by_lstsq(x, y, at, mk.weights(at, x, kernel))
    np.testing.assert_allclose(local_linear(x, y, at, kernel).numpy(), expected, rtol=1e-9, atol=1e-10)


def test_causal_weights_are_attentions():
    x, y = draw(20, 2, seed=4), draw(20, 1, seed=5)
    at = x[5:]
    expected = by_lstsq(x, y, at, mk.weights(at, x, mk.Gaussian(), causal=True))
    np.testing.assert_allclose(local_linear(x, y, at, mk.Gaussian(), causal=True).numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("kernel", SOME, ids=str)
def test_a_plane_comes_back_even_far_outside_the_data(kernel):
    x, at = draw(40, 3, seed=6), 3 * draw(9, 3, seed=7)
    slope = draw(3, 2, seed=8)
    torch.testing.assert_close(local_linear(x, 2 + x @ slope, at, kernel), 2 + at @ slope, rtol=0, atol=1e-9)


def test_batches_are_loops():
    x, y, at = draw(2, 3, 15, 2, seed=1), draw(2, 3, 15, 1, seed=2), draw(2, 3, 4, 2, seed=3)
    together = local_linear(x, y, at, mk.Gaussian())
    for a in range(2):
        for b in range(3):
            torch.testing.assert_close(together[a, b], local_linear(x[a, b], y[a, b], at[a, b], mk.Gaussian()))


def test_units_and_places_do_not_matter():
    """Metres or micrometres in one coordinate, a million away: the same fit, if the kernel sees the same distances."""
    x, y, at = draw(30, 2, seed=1), draw(30, 1, seed=2), draw(5, 2, seed=3)
    unit = torch.tensor([1e-6, 1.0], dtype=torch.float64)

    class Anisotropic(mk.MatchKernel):
        def match(self, q, k):
            return -mk.squared_distance(q / unit, k / unit)

    plain = local_linear(x, y, at, 2.0 * mk.Gaussian())
    torch.testing.assert_close(local_linear(x * unit, y, at * unit, Anisotropic()), plain, rtol=1e-7, atol=1e-9)
    moved = local_linear(x + 1e6, y, at + 1e6, mk.Gaussian(0.5**0.5))
    torch.testing.assert_close(moved, plain, rtol=1e-5, atol=1e-6)


def test_two_points_of_very_unequal_weight_still_give_their_line():
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    at = torch.tensor([[-1.0]], dtype=torch.float64)
    got = local_linear(x, 3 * x + 1, at, mk.Gaussian(0.25))  # weights 1 and e^{-24}
    torch.testing.assert_close(got, torch.tensor([[-2.0]], dtype=torch.float64))


class Nearest(mk.MatchKernel):
    def match(self, q, k):
        return torch.where(mk.squared_distance(q, k) < 0.25, 0.0, -torch.inf).to(q.dtype)


@pytest.mark.parametrize("d", [1, 2])
def test_too_few_points_are_an_error_that_names_the_query(d):
    x = torch.arange(4, dtype=torch.float64)[:, None].expand(-1, d).contiguous()
    with pytest.raises(ValueError, match=rf"2 of 2 queries, the first at \(0,\): fewer than d \+ 1 = {d + 1}"):
        local_linear(x, x[:, :1], x[1:3], Nearest())


def test_points_on_a_line_in_the_plane_are_too_few():
    x = draw(20, 1, seed=1) @ torch.tensor([[1.0, 0.7]], dtype=torch.float64)
    with pytest.raises(ValueError, match="no plane is determined"):
        local_linear(x, x[:, :1], draw(3, 2, seed=2), mk.Gaussian(5.0))


@pytest.mark.parametrize("n", [3, 7, 11, 23])
def test_equal_points_far_from_the_origin_are_one_point(n):
    """Their mean is off by a rounding error, and a line through rounding errors is none."""
    x = torch.full((n, 1), 1e4 / 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="no plane is determined"):
        local_linear(x, draw(n, 1), x[:1] + 0.1, mk.Gaussian(1.0))


def test_a_penalty_goes_from_the_line_to_attention():
    x, y, at = draw(20, 2, seed=1), draw(20, 1, seed=2), draw(5, 2, seed=3)
    kernel = mk.Gaussian()
    near = local_linear(x, y, at, kernel, penalty=1e-12)
    torch.testing.assert_close(near, local_linear(x, y, at, kernel), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(local_linear(x, y, at, kernel, penalty=1e12), smooth(x, y, at, kernel))


def test_the_penalised_fit_is_the_minimum_that_the_docstring_writes():
    x, y, at = draw(20, 2, seed=1), draw(20, 1, seed=2), draw(4, 2, seed=3)
    alpha = mk.weights(at, x, mk.Gaussian())
    got = local_linear(x, y, at, mk.Gaussian(), penalty=0.3)
    for i in range(4):
        design = np.concatenate([np.ones((20, 1)), (x - at[i]).numpy()], axis=1)
        table = design.T @ (alpha[i].numpy()[:, None] * design) + 0.3 * np.diag([0.0, 1.0, 1.0])
        best = np.linalg.solve(table, design.T @ (alpha[i].numpy()[:, None] * y.numpy()))[0]
        np.testing.assert_allclose(got[i].numpy(), best, rtol=1e-10)


def test_gradients():
    x, y, at = (draw(*shape, seed=s).requires_grad_() for s, shape in enumerate([(8, 2), (8, 1), (3, 2)]))
    assert torch.autograd.gradcheck(lambda *a: local_linear(*a, mk.Laplacian(2.0)), (x, y, at))


@pytest.mark.parametrize(
    ("shapes", "named"),
    [(((5, 2), (5, 1), (3, 1)), "x_query"), (((5, 2), (4, 1), (3, 2)), "y_train"), (((5,), (5, 1), (3, 1)), "x_train")],
)
def test_shapes(shapes, named):
    with pytest.raises(ValueError, match=named):
        local_linear(*(torch.zeros(s) for s in shapes), mk.Gaussian())


@pytest.mark.parametrize("penalty", [-1.0, float("nan"), float("inf")])
def test_penalty(penalty):
    with pytest.raises(ValueError, match="penalty"):
        local_linear(draw(5, 1), draw(5, 1), draw(2, 1), mk.Gaussian(), penalty=penalty)


@pytest.mark.parametrize("penalty", [0.0, 0.1])
@pytest.mark.parametrize("kernel", [mk.PolynomialFeatures(1, 0.0), mk.PolynomialFeatures(3, 0.5)])
def test_weights_below_zero_have_no_best_plane(kernel, penalty):
    x, y, at = draw(6, 2, seed=1), draw(6, 1, seed=2), draw(3, 2, seed=3)
    assert mk.weights(at, x, kernel).min() < 0
    with pytest.raises(ValueError, match="weights are negative"):
        local_linear(x, y, at, kernel, penalty=penalty)
