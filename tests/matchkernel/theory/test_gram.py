"""Gram matrices against pairs walked one by one, and their spectra against eigenvalues known otherwise."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.kernels.feature_base import FeatureKernel
from matchkernel.theory.gram import (
    NEGATIVE,
    NOT_NEGATIVE,
    Spectrum,
    asymmetry,
    centred,
    conditional_spectrum,
    gram_of_scores,
    gram_of_weights,
    pair_excess,
    spectrum,
)
from tests.matchkernel.oracle import draw

EPS = torch.finfo(torch.float64).eps


def exact_eigenvalues(gram: torch.Tensor) -> list[float]:
    """Of the float64 entries as they are, with 60 digits."""
    with mpmath.workdps(60):
        return sorted(float(value) for value in mpmath.eigsy(mpmath.matrix(gram.tolist()), eigvals_only=True))


# The tables.


def test_scores_pair_by_pair():
    x = draw(5, 3)
    gram = gram_of_scores(mk.Gaussian(1.5), x)
    for i, a in enumerate(x.tolist()):
        for j, b in enumerate(x.tolist()):
            assert float(gram[i, j]) == pytest.approx(-sum((s - t) ** 2 for s, t in zip(a, b, strict=True)) / 4.5)
    assert_close(gram_of_weights(mk.Gaussian(1.5), x), gram.exp())


def test_the_terms_softmax_does_not_see_are_there():
    """Without its query term a Gaussian's table would be neither symmetric nor zero on the diagonal."""
    gram = gram_of_scores(mk.Gaussian(), draw(6, 4))
    assert_close(gram.diagonal(), torch.zeros(6, dtype=torch.float64))
    assert float(asymmetry(gram)) < 1e-14


def test_content_alone_enters_unless_places_are_given():
    x, place = draw(4, 6), torch.tensor([0, 3, 5, 9])
    assert_close(gram_of_scores(mk.ALiBi(1), x), torch.zeros(4, 4, dtype=torch.float64))
    apart = (place[:, None] - place).abs().double()
    assert_close(gram_of_scores(mk.ALiBi(1), x, place), -mk.alibi_slopes(1)[0] * apart)
    assert_close(gram_of_scores(mk.Rotary(6), x), gram_of_scores(mk.ScaledDot(), x))
    assert (gram_of_scores(mk.Rotary(6), x, place) - gram_of_scores(mk.ScaledDot(), x)).abs().max() > 0.1


def test_float64_whatever_comes_in_and_leading_dimensions():
    x = draw(2, 3, 5, 4, dtype=torch.float32)
    before = x.clone()
    gram = gram_of_weights(mk.Dot(), x)
    assert gram.dtype == torch.float64
    assert gram.shape == (2, 3, 5, 5)
    assert_close(gram, (x.double() @ x.double().mT).exp())
    assert torch.equal(x, before)


def test_a_weight_that_is_given_by_features_is_taken_as_it_is():
    class Squares(FeatureKernel):
        def features(self, x, position):
            return x - position[..., None]  # signed: no score

    x = draw(5, 3)
    assert_close(gram_of_weights(Squares(), x), x @ x.T)
    y = x - 2
    assert_close(gram_of_weights(Squares(), x, torch.full((5,), 2)), y @ y.T)
    with pytest.raises(ValueError, match="Squares"):
        gram_of_scores(Squares(), x)


def test_a_weight_out_of_range_is_an_error():
    x = torch.full((2, 1), 30.0)
    with pytest.raises(ValueError, match=r"Dot.* a score above 709"):
        gram_of_weights(mk.Dot(), x)
    assert gram_of_scores(mk.Dot(), x).max() == 900


def test_shapes_are_named_in_errors():
    with pytest.raises(ValueError, match=r"x must have shape \(…, n, d\), got \(3,\)"):
        gram_of_scores(mk.Dot(), draw(3))
    with pytest.raises(ValueError, match=r"position must have shape \(…, 4\).*\(3,\)"):
        gram_of_scores(mk.Dot(), draw(4, 2), torch.arange(3))
    for function in (asymmetry, centred, pair_excess):
        with pytest.raises(ValueError, match=r"must have shape \(…, n, n\), got \(3, 4\)"):
            function(draw(3, 4))


# Measures without eigenvalues.


def test_asymmetry():
    a = draw(7, 7)
    assert float(asymmetry(a + a.T)) == 0
    assert float(asymmetry(a - a.T)) == pytest.approx(2)
    assert float(asymmetry(torch.zeros(3, 3))) == 0
    assert float(asymmetry(draw(400, 400, seed=5))) == pytest.approx(math.sqrt(2), rel=0.01)
    assert_close(asymmetry(torch.stack([a, a.T]))[0], (a - a.T).norm() / a.norm())
    for size in (1e-300, 1e-160, 1e160, 1e300):
        assert_close(asymmetry(size * torch.stack([a, a - a.T])), asymmetry(torch.stack([a, a - a.T])))


def test_pair_excess_by_hand_and_what_it_does_not_see():
    scores = torch.tensor([[1.0, 5.0], [2.0, 3.0]], dtype=torch.float64)
    assert_close(pair_excess(scores), torch.tensor([[0.0, 1.5], [1.5, 0.0]], dtype=torch.float64))
    table = draw(3, 6, 6)
    assert_close(pair_excess(table + draw(3, 6, 1, seed=1) + draw(3, 1, 6, seed=2)), pair_excess(table))
    x, form = draw(6, 4, seed=3), draw(4, 4, seed=4)
    apart = x[:, None] - x
    assert_close(pair_excess(x @ form @ x.T), -((apart @ form) * apart).sum(-1) / 2)


def test_a_positive_excess_is_a_negative_eigenvalue():
    """Of the symmetric part of the weights, symmetric or not; and no excess of a kernel that is positive definite."""
    for seed in range(30):
        scores = draw(2, 2, seed=seed)
        kappa = scores.exp()
        smallest = torch.linalg.eigvalsh((kappa + kappa.T) / 2)[0]
        if pair_excess(scores)[0, 1] > 0:
            assert smallest < 0
        if asymmetry(scores + scores.T) == 0 and pair_excess(scores + scores.T)[0, 1] < 0:
            assert torch.linalg.eigvalsh((scores + scores.T).exp())[0] > 0
    for kernel in (mk.Dot(), mk.Gaussian(), mk.Laplacian(), mk.Cosine(), mk.RationalQuadratic()):
        assert pair_excess(gram_of_scores(kernel, draw(20, 3))).max() < 1e-13


def test_centred():
    gram = draw(6, 6)
    h = torch.eye(6, dtype=torch.float64) - 1 / 6
    assert_close(centred(gram), h @ gram @ h)


# Spectra.


def test_the_second_difference():
    """2 on the diagonal, −1 beside it: 2 − 2 cos(kπ/(n + 1))."""
    n = 40
    ones = torch.ones(n - 1, dtype=torch.float64)
    gram = 2 * torch.eye(n, dtype=torch.float64) - torch.diag(ones, 1) - torch.diag(ones, -1)
    known = 2 - 2 * torch.cos(torch.arange(1, n + 1, dtype=torch.float64) * math.pi / (n + 1))
    found = spectrum(gram, entry_error=0.0)
    assert (found.eigenvalues - known).abs().max() <= found.error < 1e-12
    assert found.smallest == float(found.eigenvalues[0])
    assert found.largest == float(found.eigenvalues[-1])
    assert found.ratio == pytest.approx(float(known[0] / known[-1]))


@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_the_bound_holds_where_eigenvalues_are_lost_in_rounding(scale):
    """Gaussians of 12 points: all but a few eigenvalues are far below ε. Truth: 60 digits on the same entries."""
    gram = gram_of_weights(mk.Gaussian(), scale * draw(12, 2))
    gram = (gram + gram.T) / 2
    found = spectrum(gram, entry_error=0.0)
    truth = torch.tensor(exact_eigenvalues(gram), dtype=torch.float64)
    assert (found.eigenvalues - truth).abs().max() <= found.error <= 20 * 12 * EPS * found.largest


def test_weyl_for_the_entries():
    """All entries off by e in one direction move an eigenvalue by n·e: the bound says so, and no more."""
    gram, e = torch.full((10, 10), 1.0, dtype=torch.float64), 1e-6
    found = spectrum(gram, entry_error=e)
    moved = torch.linalg.eigvalsh(gram + e) - found.eigenvalues
    assert moved.abs().max() == pytest.approx(10 * e)
    assert moved.abs().max() <= found.error < 10.001 * e
    table = torch.zeros(10, 10, dtype=torch.float64)
    table[2, 2] = 3e-4
    assert spectrum(gram, entry_error=table).error == pytest.approx(3e-4, rel=1e-6)


def test_the_default_error_follows_the_type_of_the_table():
    gram = torch.eye(4)
    wide, narrow = spectrum(gram.double()).error, spectrum(gram).error
    assert 4 * 8 * EPS < wide < 4 * 10 * EPS
    assert 4 * 8 * torch.finfo(torch.float32).eps < narrow < 4 * 9 * torch.finfo(torch.float32).eps


def test_verdicts():
    column = draw(50, 1)
    singular = spectrum(column @ column.T)
    assert singular.smallest < 0  # by rounding alone
    assert singular.verdict == NOT_NEGATIVE == "not negative on this sample"
    assert not singular.negative
    refuted = spectrum(column @ column.T - 1e-9 * torch.eye(50))
    assert refuted.verdict == NEGATIVE == "negative beyond rounding"
    assert refuted.negative
    assert "negative beyond rounding" in repr(refuted) and "50 eigenvalues" in repr(refuted)
    edge = Spectrum(torch.tensor([-1.0, 2.0]), 1.0)
    assert not edge.negative  # −1 may be 0


def test_conditional_spectrum_is_that_of_the_centred_table():
    gram = draw(9, 9)
    gram = gram + gram.T
    inside = conditional_spectrum(gram).eigenvalues
    around = torch.linalg.eigvalsh(centred(gram))
    at = int(around.abs().argmin())
    assert around[at].abs() < 1e-13
    assert_close(inside, torch.cat([around[:at], around[at + 1 :]]))


def test_scores_of_distance_are_conditionally_positive_definite():
    x = draw(30, 3)
    for kernel in (mk.Gaussian(), mk.Laplacian(), mk.RationalQuadratic()):
        assert kernel.score_positive_definite == "conditionally"
        gram = gram_of_scores(kernel, x)
        assert spectrum(gram).negative
        assert not conditional_spectrum(gram).negative
        assert conditional_spectrum(-gram).negative
    cubes = -torch.cdist(x, x).pow(3)
    assert conditional_spectrum(cubes).negative


def exact_inside(gram: torch.Tensor) -> list[float]:
    """Eigenvalues on coefficients that sum to zero, with 60 digits: those of H G H, less the one of the constants."""
    n = len(gram)
    with mpmath.workdps(60):
        h = mpmath.eye(n) - mpmath.ones(n) / n
        values = list(mpmath.eigsy(h * mpmath.matrix(gram.tolist()) * h, eigvals_only=True))
        values.remove(min(values, key=abs))
        return sorted(float(value) for value in values)


def test_what_cancels_in_centring_is_in_the_bound():
    """A constant of 1e6 on a table costs ten digits of what is left of it, and the bound knows."""
    gram = gram_of_scores(mk.Gaussian(), draw(12, 2))
    gram = (gram + gram.T) / 2 + 1e6
    found = conditional_spectrum(gram, entry_error=0.0)
    off = (found.eigenvalues - torch.tensor(exact_inside(gram), dtype=torch.float64)).abs().max()
    assert 1e-12 < off <= found.error < 1e-6
    assert not conditional_spectrum(gram).negative


def test_spectrum_refuses():
    with pytest.raises(ValueError, match=r"one square table.*\(2, 3, 3\)"):
        spectrum(draw(2, 3, 3))
    with pytest.raises(ValueError, match=r"one square table.*\(0, 0\)"):
        spectrum(torch.zeros(0, 0))
    with pytest.raises(ValueError, match="finite"):
        spectrum(torch.tensor([[float("nan")]]))
    with pytest.raises(ValueError, match=r"not symmetric.*up to 0\.1"):
        spectrum(torch.tensor([[1.0, 0.1], [0.0, 1.0]]))
    with pytest.raises(ValueError, match=r"entry_error must be a number ≥ 0 or a table \(2, 2\)"):
        spectrum(torch.eye(2), entry_error=torch.zeros(3, 3))
    with pytest.raises(ValueError, match="entry_error must be a number ≥ 0"):
        spectrum(torch.eye(2), entry_error=-1.0)
    with pytest.raises(ValueError, match="one coefficient"):
        conditional_spectrum(torch.eye(1))


# The measured row: 200 points, d = 8, smallest over largest eigenvalue.


@pytest.mark.parametrize(
    ("of_product", "lowest", "highest"),
    [
        (torch.sigmoid, -0.06, -0.04),
        (torch.tanh, -0.24, -0.17),
        (torch.relu, -0.048, -0.032),
        (lambda t: torch.relu(t) ** 2, -0.015, -0.009),
    ],
)
def test_functions_of_a_dot_product_that_are_not_positive_definite(of_product, lowest, highest):
    """Three samples each; measured elsewhere −0.05, −0.20, −0.04, −0.012."""
    for seed in range(3):
        x = draw(200, 8, seed=seed)
        found = spectrum(of_product(x @ x.T))
        assert lowest < found.ratio < highest
        assert found.negative


@pytest.mark.parametrize("seed", range(3))
def test_functions_that_are_positive_definite_stay_within_rounding(seed):
    x = draw(200, 8, seed=seed)
    features = torch.nn.functional.elu(x) + 1
    tables = [gram_of_weights(kernel, x) for kernel in (mk.Dot(), mk.Gaussian(), mk.Laplacian(), mk.Cosine())]
    for gram in (*tables, (1 + x @ x.T) ** 2, gram_of_scores(mk.Cosine(), x), features @ features.T):
        found = spectrum(gram)
        assert not found.negative
        assert found.ratio > -1e-14
