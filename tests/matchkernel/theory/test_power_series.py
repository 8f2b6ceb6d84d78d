"""The map of exp(x·y) by powers: its coordinates, their number, and what a cut-off leaves out."""

from __future__ import annotations

import math
from itertools import product

import mpmath
import pytest
import torch

from matchkernel.theory import power_series
from tests.matchkernel.oracle import draw


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("degree", [0, 1, 2, 4])
def test_the_map_sums_the_series_up_to_its_degree(d, degree):
    x, y = draw(3, d, seed=1), draw(4, d, seed=2)
    features = power_series.taylor_map(x, degree), power_series.taylor_map(y, degree)
    assert features[0].shape == (3, power_series.monomials(d, degree))
    partial = sum((x @ y.T) ** r / math.factorial(r) for r in range(degree + 1))
    torch.testing.assert_close(features[0] @ features[1].T, partial)


def test_every_coordinate_by_hand():
    a, b = 1.5, -0.5
    expected = [1, a, b, a * a / 2**0.5, a * b, b * b / 2**0.5]
    x = torch.tensor([a, b], dtype=torch.float64)
    torch.testing.assert_close(power_series.taylor_map(x, 2), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("d", "degree"), [(1, 3), (2, 3), (3, 4), (4, 0), (0, 2)])
def test_the_number_of_coordinates_by_counting(d, degree):
    exponents = [alpha for alpha in product(range(degree + 1), repeat=d) if sum(alpha) <= degree]
    assert power_series.monomials(d, degree) == len(exponents)


@pytest.mark.parametrize("score", [-30.0, -9.0, -1.0, -1e-4, 0.0, 1e-4, 1.0, 4.0, 9.0, 30.0])
@pytest.mark.parametrize("degree", [0, 1, 2, 7, 20])
def test_the_remainder_to_every_digit(score, degree):
    with mpmath.workdps(60):
        s = mpmath.mpf(score)
        exact = mpmath.exp(s) - mpmath.fsum(s**r / mpmath.factorial(r) for r in range(degree + 1))
    got = power_series.taylor_remainder(torch.tensor(score, dtype=torch.float64), degree)
    assert float(got) == pytest.approx(float(exact), rel=1e-11)


def test_remainders_of_a_table():
    scores = draw(3, 4, seed=3) * 5
    table = power_series.taylor_remainder(scores, 3)
    for at in product(range(3), range(4)):
        torch.testing.assert_close(table[at], power_series.taylor_remainder(scores[at], 3))


@pytest.mark.parametrize("degree", [0, 1, 4, 9])
def test_the_bound_holds_and_is_met_where_it_should_be(degree):
    x, y = draw(200, 3, seed=4), draw(200, 3, seed=5)
    missed = power_series.taylor_remainder((x * y).sum(-1), degree).abs()
    bound = power_series.taylor_bound(x, y, degree)
    assert (missed <= bound).all()
    size = (x.norm(dim=-1) * y.norm(dim=-1)) ** (degree + 1) / math.factorial(degree + 1)
    torch.testing.assert_close(bound, size * (x.norm(dim=-1) * y.norm(dim=-1)).exp())
    small = torch.tensor([1e-3], dtype=torch.float64)
    tight = power_series.taylor_remainder(small * small, degree) / power_series.taylor_bound(small, small, degree)
    assert float(tight) == pytest.approx(1, abs=1e-5)


def test_a_gaussian_after_one_factor_for_each_vector():
    """Cotter et al. 2011: the cut-off map of the Gaussian, and the bound on what it misses."""
    x, y = draw(50, 3, seed=6), draw(50, 3, seed=7)
    shrink = (-(x.square().sum(-1) + y.square().sum(-1)) / 2).exp()
    estimate = shrink * (power_series.taylor_map(x, 4) * power_series.taylor_map(y, 4)).sum(-1)
    gaussian = (-(x - y).square().sum(-1) / 2).exp()
    missed = (gaussian - estimate).abs()
    assert (missed <= shrink * power_series.taylor_bound(x, y, 4)).all()
    torch.testing.assert_close(estimate + shrink * power_series.taylor_remainder((x * y).sum(-1), 4), gaussian)


def test_unsuitable_arguments_are_named():
    x = draw(2, 3)
    with pytest.raises(ValueError, match="degree is -1: expected at least 0"):
        power_series.taylor_map(x, -1)
    with pytest.raises(ValueError, match="degree is -1"):
        power_series.taylor_remainder(x, -1)
    with pytest.raises(ValueError, match="degree is -2"):
        power_series.taylor_bound(x, x, -2)
    with pytest.raises(ValueError, match="dim is -3"):
        power_series.monomials(-3, 2)
    with pytest.raises(ValueError, match=r"x has shape \(\)"):
        power_series.taylor_map(torch.tensor(1.0), 2)
    with pytest.raises(ValueError, match=r"shapes \(2, 3\) and \(2, 2\)"):
        power_series.taylor_bound(x, x[:, :2], 2)
