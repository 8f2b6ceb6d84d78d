"""Steepness of self-attention: Jacobians of layers known in closed form, and the bound of Kim et al. from below."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.special import lambertw
from torch.testing import assert_close

from matchkernel.theory.lipschitz import (
    dot_self_attention,
    inverse_phi,
    jacobian_norm,
    l2_lipschitz_bound,
    l2_self_attention,
    steepest,
)
from tests.matchkernel.oracle import by_loop, draw

EYE = torch.eye(4, dtype=torch.float64)


def with_a_zero_token(seed: int = 0) -> torch.Tensor:
    x = draw(8, 4, seed=seed)
    x[0] = 0
    return x


def test_dot_attention_pair_by_pair():
    x, w_q, w_k, w_v = draw(5, 4), draw(4, 3, seed=1), draw(4, 3, seed=2), draw(4, 2, seed=3)
    assert_close(dot_self_attention(x, w_q, w_k, w_v), by_loop(x @ w_q, x @ w_k, x @ w_v))
    assert_close(dot_self_attention(x), by_loop(x, x, x))


def test_l2_attention_pair_by_pair():
    x, w_q, w_v = draw(5, 4), draw(4, 3, seed=1), draw(4, 2, seed=3)

    def minus_square(q, k):
        return -sum((a - b) ** 2 for a, b in zip(q, k, strict=True)) / math.sqrt(3)

    values = x @ (w_q @ w_q.T / math.sqrt(3)) @ w_v
    assert_close(l2_self_attention(x, w_q, w_v), by_loop(x @ w_q, x @ w_q, values, score=minus_square))
    assert_close(l2_self_attention(x), l2_self_attention(x, EYE, EYE))


def test_the_norm_of_a_linear_layer_is_its_largest_singular_value():
    weight, x = draw(6, 3), draw(2, 6, seed=1)
    before = x.clone()
    assert jacobian_norm(lambda y: y @ weight, x) == pytest.approx(float(torch.linalg.svdvals(weight)[0]))
    assert torch.equal(x, before) and not x.requires_grad


def test_the_norm_is_a_ratio_of_moves():
    """No small move does better than the norm says, and the best direction reaches it."""
    x = draw(6, 4)
    norm = jacobian_norm(dot_self_attention, x)
    jacobian = torch.autograd.functional.jacobian(dot_self_attention, x).reshape(24, 24)
    best = torch.linalg.svd(jacobian).Vh[0].reshape(6, 4)
    for move in (*draw(20, 6, 4, seed=2), best):
        step = 1e-6 * move / move.norm()
        ratio = float((dot_self_attention(x + step) - dot_self_attention(x - step)).norm()) / 2e-6
        assert ratio < norm * (1 + 1e-6)
    assert ratio == pytest.approx(norm, rel=1e-6)


def test_the_measured_row():
    """n = 8, d = 4, one zero token, inputs 1, 10 and 100 times as large; elsewhere 2.0/88.9/8882 and 1.7/1.0/1.0.

    Those for L2 are without the factor 1/√d of A, so twice ours.
    """
    for seed in range(5):
        x = with_a_zero_token(seed)
        dot = [jacobian_norm(dot_self_attention, c * x) for c in (1, 10, 100)]
        l2 = [jacobian_norm(l2_self_attention, c * x) for c in (1, 10, 100)]
        assert 1.5 < dot[0] < 3.5
        assert 40 < dot[1] < 200
        assert dot[2] / dot[1] == pytest.approx(100, rel=0.02)
        assert 1.4 < 2 * l2[0] < 2.2
        assert [2 * norm for norm in l2[1:]] == pytest.approx([1, 1], rel=1e-3)


def test_inverse_phi_against_lambert():
    for y in (0.0, 1e-9, 0.5, 1.0, 7.0, 1e3, 1e12):
        x = inverse_phi(y)
        assert x == pytest.approx(float(lambertw(y / math.e).real), rel=1e-13, abs=1e-300)
        assert x * math.exp(x + 1) == pytest.approx(y, rel=1e-12)
    with pytest.raises(ValueError, match="y=-1"):
        inverse_phi(-1)


def test_the_bound_in_numbers():
    assert l2_lipschitz_bound(1, EYE) == pytest.approx(0.5)  # one token: the layer is x A, A = I/√4
    w = float(lambertw(7 / math.e).real)
    assert l2_lipschitz_bound(8, EYE) == pytest.approx(math.sqrt(8) / 2 * (4 * w + 1))
    assert l2_lipschitz_bound(8, 3 * EYE, 2 * EYE) == pytest.approx(18 * l2_lipschitz_bound(8, EYE))
    with pytest.raises(ValueError, match="n=0"):
        l2_lipschitz_bound(0, EYE)
    with pytest.raises(ValueError, match=r"value_weight must have shape.*\(4,\)"):
        l2_lipschitz_bound(3, EYE, torch.ones(4))


def test_the_jacobian_is_quadratic_in_the_query_weight_as_the_bound_is():
    """c W_Q on x/c is the same attention, with values c² times as large for an input 1/c as large."""
    x, w_q = draw(6, 4), draw(4, 4, seed=1)
    once = jacobian_norm(lambda y: l2_self_attention(y, w_q), x)
    assert jacobian_norm(lambda y: l2_self_attention(y, 5 * w_q), x / 5) == pytest.approx(25 * once)


@pytest.mark.parametrize("n", [2, 8, 20])
def test_below_the_bound_wherever_we_look(n):
    for seed in range(8):
        w_q, w_v = draw(4, 3, seed=seed), draw(4, 4, seed=100 + seed)
        bound = l2_lipschitz_bound(n, w_q, w_v)
        for size in (0.3, 1.0, 10.0):
            x = size * draw(n, 4, seed=200 + seed)
            assert jacobian_norm(lambda y, q=w_q, v=w_v: l2_self_attention(y, q, v), x) < bound


def test_climbing_makes_it_steeper_and_stays_below_the_bound():
    x = draw(8, 4)
    at, norm = steepest(l2_self_attention, x, steps=15, rate=0.2)
    assert norm == pytest.approx(jacobian_norm(l2_self_attention, at))
    assert jacobian_norm(l2_self_attention, x) * 1.2 < norm < l2_lipschitz_bound(8, EYE)
    assert steepest(dot_self_attention, with_a_zero_token(), steps=10, rate=1.0)[1] > 10  # and on
    with pytest.raises(ValueError, match="steps=0"):
        steepest(l2_self_attention, x, steps=0)


def test_shapes_are_named():
    with pytest.raises(ValueError, match=r"weight has shape \(3, 4\) and x has shape \(5, 4\): expected \(4, width\)"):
        dot_self_attention(draw(5, 4), draw(3, 4))


@pytest.mark.parametrize("n", [2, 3, 8, 100])
def test_the_mean_square_distance_that_the_bound_rests_on(n):
    """Under weights e^{−|z|²} beside one 1, the mean of |z|² is at most φ⁻¹(n − 1), reached where all are equal."""

    def mean(squares):
        weights = (-squares).exp()
        return float((weights * squares).sum() / (1 + weights.sum()))

    most = inverse_phi(n - 1)
    assert mean(torch.full((n - 1,), 1 + most, dtype=torch.float64)) == pytest.approx(most, rel=1e-12)
    for scale in (0.3, 1.0, 3.0):
        assert all(mean(scale * draw(n - 1, seed=seed).square()) < most for seed in range(20))


def test_no_token_moves_further_than_the_bound_on_tokens_says():
    """Row i of P y moves by at most 4 φ⁻¹(n − 1) + 1 times the longest move of a token."""
    n, d = 8, 4
    most = 4 * inverse_phi(n - 1) + 1
    for seed, size in enumerate((0.3, 1.0, 3.0)):
        y = size * draw(n, d, seed=seed)
        for i in range(20):
            move = torch.nn.functional.normalize(draw(n, d, seed=100 + i), dim=1)
            step = 1e-6 * move
            # A and the score both carry 1/√d; with y scaled by d^¼ and the output by √d neither does.
            ahead, behind = (2 * l2_self_attention(2**0.5 * (y + s)) / 2**0.5 for s in (step, -step))
            assert float((ahead - behind).norm(dim=1).max()) / 2e-6 < most
