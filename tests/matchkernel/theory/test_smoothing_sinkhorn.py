"""Sinkhorn's normalisation against the plain iteration, closed forms and its optimality."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from matchkernel.theory.sinkhorn import NotConvergedError, sinkhorn
from tests.matchkernel.oracle import draw


@pytest.mark.parametrize(("n", "m"), [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1)])
def test_sums(n, m):
    weights = sinkhorn(2 * draw(3, n, m), tolerance=1e-10)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, n, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(weights.sum(-2), torch.full((3, m), n / m, dtype=torch.float64), rtol=0, atol=1e-10)


def test_it_is_the_plain_iteration():
    table = np.exp(draw(5, 5).numpy())
    for _ in range(400):
        table = table / table.sum(0, keepdims=True)
        table = table / table.sum(1, keepdims=True)
    np.testing.assert_allclose(sinkhorn(draw(5, 5), tolerance=1e-13).numpy(), table, rtol=1e-10)


def test_two_by_two_in_closed_form():
    """a b / c d has one invariant, ad/bc: p²/(1 − p)² equals it."""
    scores = torch.tensor([[1.0, -0.3], [0.4, 2.0]], dtype=torch.float64)
    p = 1 / (1 + math.exp(-(1.0 + 2.0 + 0.3 - 0.4) / 2))
    expected = torch.tensor([[p, 1 - p], [1 - p, p]], dtype=torch.float64)
    torch.testing.assert_close(sinkhorn(scores, tolerance=1e-13), expected)


def test_only_what_rows_and_columns_share_is_changed():
    """log α − s is a number for the row plus one for the column."""
    scores = 3 * draw(7, 7)
    change = sinkhorn(scores, tolerance=1e-12).log() - scores
    torch.testing.assert_close(change, change[:, :1] + change[:1] - change[:1, :1])


def test_terms_of_rows_and_columns_are_not_seen():
    scores = draw(6, 6)
    moved = scores + 5 * draw(6, 1, seed=1) + 5 * draw(1, 6, seed=2)
    torch.testing.assert_close(sinkhorn(moved, tolerance=1e-12), sinkhorn(scores, tolerance=1e-12))


def test_large_scores_do_not_overflow():
    scores = 1e4 + torch.tensor([[3e3, 0.0], [0.0, 3e3]])
    torch.testing.assert_close(sinkhorn(scores), torch.eye(2))


def test_not_converged_is_an_error_with_what_was_reached():
    with pytest.raises(NotConvergedError, match=r"after 3 rounds a column's sum is .* from 1, tolerance=1e-12"):
        sinkhorn(10 * draw(8, 8), tolerance=1e-12, iterations=3)


def test_the_last_round_counts():
    rounds = next(r for r in range(1, 300) if _converges(r))
    sinkhorn(draw(5, 5), tolerance=1e-8, iterations=rounds)
    with pytest.raises(NotConvergedError):
        sinkhorn(draw(5, 5), tolerance=1e-8, iterations=rounds - 1)


def _converges(rounds: int) -> bool:
    try:
        sinkhorn(draw(5, 5), tolerance=1e-8, iterations=rounds)
    except NotConvergedError:
        return False
    return True


def test_causal_order_leaves_only_the_identity_and_at_a_slow_pace():
    scores = draw(5, 5).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    with pytest.raises(NotConvergedError):
        sinkhorn(scores, tolerance=1e-6, iterations=1000)
    near = sinkhorn(scores, tolerance=1e-2, iterations=5000)
    assert (near - torch.eye(5)).abs().max() < 0.05
    assert (near.triu(1) == 0).all()


def test_forbidden_pairs_stay_at_zero_where_a_solution_exists():
    scores = draw(4, 4).masked_fill(torch.eye(4, dtype=torch.bool), -torch.inf)
    weights = sinkhorn(scores, tolerance=1e-10)
    assert (weights.diagonal() == 0).all()
    torch.testing.assert_close(weights.sum(0), torch.ones(4, dtype=torch.float64))


def test_gradient():
    scores = draw(4, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: sinkhorn(s, tolerance=1e-13), scores, atol=1e-6)


@pytest.mark.parametrize(
    ("scores", "named"),
    [
        (torch.zeros(3), "shape"),
        (torch.zeros(3, 3, dtype=torch.long), "dtype"),
        (torch.zeros(0, 3), "shape"),
        (torch.full((2, 2), torch.nan), "NaN"),
        (torch.full((2, 2), torch.inf), "inf"),
        (torch.tensor([[0.0, -torch.inf], [0.0, -torch.inf]]), "a column in which"),
        (torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]]), "a row in which"),
    ],
)
def test_errors(scores, named):
    with pytest.raises(ValueError, match=named):
        sinkhorn(scores)


@pytest.mark.parametrize("options", [{"tolerance": 0.0}, {"tolerance": float("nan")}, {"iterations": 0}])
def test_options(options):
    with pytest.raises(ValueError, match="tolerance"):
        sinkhorn(torch.zeros(2, 2), **options)
