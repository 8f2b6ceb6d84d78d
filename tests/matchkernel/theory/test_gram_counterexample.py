"""The search finds what is there, says nothing about what it does not find, and its finds refute."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.theory.counterexample import examine, search
from matchkernel.theory.gram import gram_of_scores, gram_of_weights, spectrum


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def of_product(function):
    return lambda x: function(x @ x.T)


@pytest.mark.parametrize(
    ("function", "points"),
    # tanh and relu need no more than two or three; a sigmoid's eigenvalue needs more, as 1 + σ'(0)·xy is on its way.
    [(torch.tanh, 10), (torch.relu, 20), (torch.sigmoid, 20), (lambda t: (1 + t).clamp(min=0).sqrt(), 20)],
)
def test_finds_points_that_refute(function, points):
    found = search(of_product(function), 4, generator=seeded())
    assert found is not None
    assert found.points.shape[1] == 4 and len(found.points) <= points
    table = function(found.points @ found.points.T)
    assert_close(found.gram, table)
    assert float(found.coefficients @ table @ found.coefficients) < -found.spectrum.error
    assert_close(found.coefficients @ table @ found.coefficients, found.spectrum.eigenvalues[0])
    assert float(found.coefficients.norm()) == pytest.approx(1)


def test_a_cube_of_the_distance_needs_three_points_and_close_ones():
    """exp(−r³) has a table of all but ones on the diagonal for distant points: a unit table refutes nothing."""

    def table(x):
        return (-torch.cdist(x, x).pow(3)).exp()

    assert search(table, 8, generator=seeded(), sizes=(50,), scales=(1.0,), draws=5) is None
    found = search(table, 8, generator=seeded())
    assert found is not None and len(found.points) == 3
    line = torch.tensor([[0.0], [0.1], [0.2]], dtype=torch.float64)
    exact = examine(table, line)
    assert exact is not None
    c = torch.tensor([1.0, -2.0, 1.0], dtype=torch.float64)
    assert float(c @ exact.gram @ c) == pytest.approx(-8 * 0.1**3, rel=0.02)


@pytest.mark.parametrize("kernel", [mk.Dot(), mk.Gaussian(), mk.Laplacian(), mk.Cosine(), mk.RationalQuadratic()])
def test_finds_nothing_where_there_is_nothing(kernel):
    def table(x):
        return gram_of_weights(kernel, x / 10)  # scores in range at the largest scale

    assert search(table, 3, generator=seeded(), draws=5) is None


def test_the_smallest_size_and_its_worst_set():
    """A score of squared distances: any two points refute, and the ratio is −1 for all of them."""
    found = search(partial(gram_of_scores, mk.Gaussian()), 2, generator=seeded(), sizes=(2, 3))
    assert found is not None and len(found.points) == 2
    assert found.spectrum.ratio == pytest.approx(-1)
    seen = []

    def watched(x):
        seen.append(spectrum(torch.tanh(x @ x.T)).ratio)
        return torch.tanh(x @ x.T)

    worst = search(watched, 2, generator=seeded(), sizes=(4,), draws=5)
    assert worst is not None and len(seen) == 30
    assert worst.spectrum.ratio == min(seen) < sorted(seen)[1] < 0


def test_drawn_from_its_generator_alone():
    first, second = (search(of_product(torch.tanh), 4, generator=seeded(3)) for _ in range(2))
    assert first is not None and second is not None
    assert torch.equal(first.points, second.points)
    assert "smallest eigenvalue -" in repr(first) and "d = 4" in repr(first)


def test_an_error_of_the_entries_is_believed():
    line = torch.tensor([[0.0], [0.1], [0.2]], dtype=torch.float64)

    def table(x):
        return (-torch.cdist(x, x).pow(3)).exp()

    assert examine(table, line, entry_error=1e-6) is not None
    assert examine(table, line, entry_error=1e-2) is None
    assert search(table, 1, generator=seeded(), sizes=(3,), draws=2, entry_error=1.0) is None


def test_refuses():
    with pytest.raises(ValueError, match="nothing to try"):
        search(of_product(torch.tanh), 4, generator=seeded(), sizes=())
    with pytest.raises(ValueError, match="dim=0"):
        search(of_product(torch.tanh), 0, generator=seeded())
    with pytest.raises(ValueError, match=r"table returned shape \(5, 2\) for 5 points"):
        examine(lambda x: x, torch.zeros(5, 2))
