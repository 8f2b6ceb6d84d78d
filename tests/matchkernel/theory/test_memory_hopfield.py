"""Hopfield retrieval: against formulas in plain Python, attention, gradients of the energy, and its theorems."""

import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import matchkernel as mk
from matchkernel.theory import hopfield

sys.path.insert(0, str(Path(__file__).parent.parent))
from oracle import by_loop, draw

BETAS = [0.01, 1.0, 8.0, 200.0]


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def by_hand(state, patterns, beta):
    dots = [sum(a * b for a, b in zip(state, x, strict=True)) for x in patterns]
    lse = math.log(sum(math.exp(beta * s) for s in dots)) / beta
    longest = max(sum(a * a for a in x) for x in patterns)
    return -lse + sum(a * a for a in state) / 2 + math.log(len(patterns)) / beta + longest / 2


@pytest.mark.parametrize("beta", [0.01, 1.0, 8.0])
def test_the_energy_is_the_papers(beta):
    X, state = draw(6, 4), draw(5, 4, seed=1)
    expected = torch.tensor([by_hand(row, X.tolist(), beta) for row in state.tolist()], dtype=torch.float64)
    assert_close(hopfield.energy(state, X, beta), expected)


@pytest.mark.parametrize("beta", BETAS)
def test_the_update_is_attention_with_keys_for_values(beta):
    X, state = draw(6, 4), draw(5, 4, seed=1)
    expected = by_loop(state, X, X, score=lambda q, k: beta * sum(a * b for a, b in zip(q, k, strict=True)))
    assert_close(hopfield.retrieve(state, X, beta), expected)
    normalizer = mk.Softmax(temperature=1 / beta)
    assert_close(hopfield.retrieve(state, X, beta), mk.attend(state, X, X, mk.Dot(), normalizer=normalizer))


@pytest.mark.parametrize("beta", BETAS)
def test_the_update_is_a_gradient_step_of_length_one(beta):
    X, state = draw(6, 4), draw(5, 4, seed=1).requires_grad_()
    hopfield.energy(state, X, beta).sum().backward()
    assert_close(state.detach() - state.grad, hopfield.retrieve(state.detach(), X, beta))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_the_energy_never_rises_and_stays_in_its_bounds(beta, scale):
    X = scale * draw(12, 6)
    path = hopfield.trajectory(draw(40, 6, seed=1), X, beta, steps=30)
    energy = hopfield.energy(path, X, beta)
    assert (energy[1:] - energy[:-1]).max() <= 1e-12 * energy.abs().max()
    assert energy[1].max() < energy[0].max()
    inside = energy[1:]  # after a step a state is an average of patterns
    longest = X.square().sum(-1).max()
    assert inside.min() >= -1e-12 and inside.max() <= 2 * longest


def test_a_trajectory_is_a_loop():
    X, state = draw(6, 4), draw(5, 4, seed=1)
    path = hopfield.trajectory(state, X, 2.0, steps=3)
    assert path.shape == (4, 5, 4) and torch.equal(path[0], state)
    for before, after in pairwise(path):
        assert_close(after, (2.0 * before @ X.T).softmax(dim=-1) @ X)
    assert_close(hopfield.retrieve(state, X, 2.0, steps=3), path[-1])
    assert_close(hopfield.retrieve(state, X, 2.0, steps=0), state)


def test_at_rest_nothing_moves_and_the_gradient_is_zero():
    X = unit(draw(6, 16))
    rest, steps = hopfield.fixed_point(X + 0.1 * draw(6, 16, seed=1), X, beta=12.0)
    assert 1 < steps < 1000
    assert_close(hopfield.retrieve(rest, X, 12.0), rest, atol=1e-10, rtol=0)
    rest = rest.requires_grad_()
    hopfield.energy(rest, X, 12.0).sum().backward()
    assert rest.grad.abs().max() < 1e-9
    assert (rest.detach() - X).norm(dim=-1).max() < 0.1


def test_hot_memories_rest_at_the_mean_of_all_patterns():
    X = unit(draw(6, 16))
    X = X - X.mean(0)  # then the mean, 0, is at rest at every temperature; whether it attracts is another matter
    rest, _ = hopfield.fixed_point(X, X, beta=0.1)
    assert_close(rest, torch.zeros_like(rest), atol=1e-8, rtol=0)
    rest, _ = hopfield.fixed_point(X, X, beta=30.0)
    assert (rest - X).norm(dim=-1).max() < 0.1


def test_two_near_patterns_share_a_resting_state():
    far = torch.eye(4, dtype=torch.float64)[:2]
    near = unit(torch.tensor([[0.0, 0, 1, 0.2], [0, 0, 1, -0.2]], dtype=torch.float64))
    rest, _ = hopfield.fixed_point(near, torch.cat([far, near]), beta=8.0)
    assert (rest[0] - rest[1]).norm() < 1e-6
    assert (rest[0] - near.mean(0)).norm() < 0.05


def test_no_rest_is_an_error():
    X = unit(draw(6, 16))
    with pytest.raises(RuntimeError, match="no rest after 1 steps"):
        hopfield.fixed_point(X, X, beta=8.0, limit=1)


def test_separation_by_hand():
    X = draw(5, 3)
    rows = X.tolist()
    for i, found in enumerate(hopfield.separation(X).tolist()):
        dots = [sum(a * b for a, b in zip(rows[i], other, strict=True)) for other in rows]
        assert math.isclose(found, dots[i] - max(dots[:i] + dots[i + 1 :]))


@pytest.mark.parametrize("beta", [1.0, 8.0, 32.0])
def test_the_retrieval_error_is_below_its_bound(beta):
    for seed in range(20):
        X = draw(9, 8, seed=seed)
        error = (hopfield.retrieve(X, X, beta) - X).norm(dim=-1)
        bound = hopfield.retrieval_bound(X, beta)
        assert (error <= bound * (1 + 1e-9) + 1e-12).all()
    # For two opposite patterns the bound is as tight as it can be: the only other weight times the distance.
    pair = torch.tensor([[1.0, 0], [-1, 0]], dtype=torch.float64)
    error = (hopfield.retrieve(pair, pair, beta) - pair).norm(dim=-1)
    assert_close(error * (1 + math.exp(-2 * beta)), hopfield.retrieval_bound(pair, beta))


def test_leading_dimensions_broadcast():
    X, state = draw(2, 1, 6, 4), draw(3, 5, 4, seed=1)
    path = hopfield.trajectory(state, X, 2.0, steps=2)
    assert path.shape == (3, 2, 3, 5, 4)
    assert_close(path[-1][1, 2], hopfield.retrieve(state[2], X[1, 0], 2.0, steps=2))
    assert_close(hopfield.energy(state, X, 2.0)[1, 2], hopfield.energy(state[2], X[1, 0], 2.0))
    assert_close(hopfield.retrieval_bound(X, 2.0)[1, 0], hopfield.retrieval_bound(X[1, 0], 2.0))


def test_large_scores_do_not_overflow():
    X = 100 * unit(draw(6, 4))
    assert_close(hopfield.retrieve(X, X, 50.0), X)
    assert hopfield.energy(X, X, 50.0).isfinite().all()


def test_what_does_not_fit_is_named():
    X, state = draw(6, 4), draw(5, 4)
    for call in (
        lambda s, x, b: hopfield.energy(s, x, b),
        lambda s, x, b: hopfield.retrieve(s, x, b),
        lambda s, x, b: hopfield.fixed_point(s, x, b),
    ):
        with pytest.raises(ValueError, match="same width"):
            call(state[:, :3], X, 1.0)
        with pytest.raises(ValueError, match="at least one pattern"):
            call(state, X[:0], 1.0)
        with pytest.raises(TypeError, match="share one dtype"):
            call(state.float(), X, 1.0)
        with pytest.raises(TypeError, match="state must be real"):
            call(state.long(), X, 1.0)
        for beta in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(ValueError, match="beta must be above 0"):
                call(state, X, beta)
    with pytest.raises(ValueError, match="steps must be at least 0"):
        hopfield.retrieve(state, X, 1.0, steps=-1)
    with pytest.raises(ValueError, match="at least two rows"):
        hopfield.separation(X[:1])
    with pytest.raises(ValueError, match="do not broadcast"):
        hopfield.retrieve(state.expand(2, 5, 4), X.expand(3, 6, 4), 1.0)
