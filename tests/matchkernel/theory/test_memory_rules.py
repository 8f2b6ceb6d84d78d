"""The rules that write a memory, against loops in plain Python, numpy, autograd and closed forms."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from matchkernel.theory import memory

sys.path.insert(0, str(Path(__file__).parent.parent))
from oracle import draw

CELLS = [(4, 5), (8, 8), (8, 20), (3, 1)]  # widths and pairs: fewer pairs than the width, as many, more


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def pairs(d, m, *lead, width=3, seed=0):
    return unit(draw(*lead, m, d, seed=seed)), draw(*lead, m, width, seed=seed + 1)


def add_up(k, v):
    """Σ_j k_jᵀ v_j, entry by entry."""
    return [
        [sum(key[a] * value[b] for key, value in zip(k, v, strict=True)) for b in range(len(v[0]))]
        for a in range(len(k[0]))
    ]


def correct(k, v, beta):
    """The delta rule, entry by entry; returns the memory after each pair."""
    state = [[0.0] * len(v[0]) for _ in k[0]]
    after = []
    for key, value, step in zip(k, v, beta, strict=True):
        said = [sum(key[a] * state[a][b] for a in range(len(key))) for b in range(len(value))]
        state = [
            [state[a][b] + step * key[a] * (value[b] - said[b]) for b in range(len(value))] for a in range(len(key))
        ]
        after.append(state)
    return after


@pytest.mark.parametrize(("d", "m"), CELLS)
def test_the_sum_rule_adds_outer_products(d, m):
    k, v = pairs(d, m)
    assert_close(memory.sum_rule(k, v), torch.tensor(add_up(k.tolist(), v.tolist()), dtype=torch.float64))


def test_the_sum_rule_is_one_gradient_step_from_zero():
    k, v = pairs(4, 6)
    state = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    ((v - k @ state).square().sum() / 2).backward()
    assert_close(memory.sum_rule(k, v), -state.grad)


@pytest.mark.parametrize(("d", "m"), CELLS)
def test_the_delta_rule_corrects_pair_by_pair(d, m):
    k, v = pairs(d, m)
    beta = torch.linspace(0, 2, m, dtype=torch.float64)
    expected = torch.tensor(correct(k.tolist(), v.tolist(), beta.tolist()), dtype=torch.float64)
    assert_close(memory.delta_states(k, v, beta), expected)
    assert_close(memory.delta_rule(k, v, beta), expected[-1])


def test_the_delta_rule_is_a_gradient_step_per_pair():
    k, v = pairs(4, 6)
    state = torch.zeros(4, 3, dtype=torch.float64)
    for key, value in zip(k, v, strict=True):
        state.requires_grad_()
        ((value - key @ state).square().sum() / 2).backward()
        state = (state - 0.7 * state.grad).detach()
    assert_close(memory.delta_rule(k, v, 0.7), state)


def test_a_delta_step_multiplies_by_its_transition_and_writes():
    k, v = pairs(5, 7)
    beta = torch.linspace(0.2, 1.9, 7, dtype=torch.float64)
    start = draw(5, 3, seed=9)
    state = start
    for matrix, key, value, step in zip(memory.transition(k, beta), k, v, beta, strict=True):
        state = matrix @ state + step * torch.outer(key, value)
    assert_close(memory.delta_states(k, v, beta, initial=start)[-1], state)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 2.0])
def test_the_eigenvalues_of_a_transition(beta):
    key = draw(1, 6)
    values = np.linalg.eigvalsh(memory.transition(key, beta)[0].numpy())
    along = 1 - beta * float(key.square().sum())
    np.testing.assert_allclose(values, sorted([along] + [1.0] * 5), atol=1e-12)


def test_at_two_the_transition_is_a_reflection():
    key = unit(draw(1, 6))
    mirror = memory.transition(key, 2.0)[0]
    assert_close(mirror @ mirror, torch.eye(6, dtype=torch.float64))
    assert_close(key @ mirror, -key)


@pytest.mark.parametrize(("d", "m"), CELLS)
def test_least_squares_is_numpys(d, m):
    k, v = pairs(d, m)
    expected, *_ = np.linalg.lstsq(k.numpy(), v.numpy(), rcond=None)
    np.testing.assert_allclose(memory.least_squares(k, v), expected, atol=1e-10)


@pytest.mark.parametrize(("d", "m"), CELLS)
def test_ridge_is_least_squares_with_rows_added(d, m):
    k, v = pairs(d, m)
    padded = np.concatenate([k.numpy(), np.sqrt(0.3) * np.eye(d)])
    expected, *_ = np.linalg.lstsq(padded, np.concatenate([v.numpy(), np.zeros((d, 3))]), rcond=None)
    np.testing.assert_allclose(memory.least_squares(k, v, ridge=0.3), expected, atol=1e-10)


def test_a_small_ridge_is_no_ridge():
    k, v = pairs(8, 5)
    assert_close(memory.least_squares(k, v, ridge=1e-9), memory.least_squares(k, v), atol=1e-6, rtol=0)


@pytest.mark.parametrize("d", [3, 8])
def test_online_is_batch_at_every_prefix(d):
    k, v = pairs(d, 6)
    running = {
        memory.sum_rule: memory.sum_states(k, v),
        memory.delta_rule: memory.delta_states(k, v),
        lambda k, v: memory.least_squares(k, v, ridge=0.2): memory.ridge_states(k, v, 0.2),
    }
    for batch, states in running.items():
        assert states.shape == (6, d, 3)
        for t in range(6):
            assert_close(states[t], batch(k[: t + 1], v[: t + 1]))


def test_a_batch_is_a_loop():
    k, v = pairs(4, 6, 2, 3)
    beta = torch.linspace(0.5, 1.5, 12, dtype=torch.float64).reshape(2, 1, 6)
    for rule in (
        memory.sum_rule,
        lambda k, v: memory.least_squares(k, v, 0.1),
        lambda k, v: memory.ridge_states(k, v, 0.1),
        memory.sum_states,
    ):
        whole = rule(k, v)
        for at in np.ndindex(2, 3):
            assert_close(whole[at], rule(k[at], v[at]))
    for rule in (memory.delta_rule, memory.delta_states):
        whole = rule(k, v, beta)
        for at in np.ndindex(2, 3):
            assert_close(whole[at], rule(k[at], v[at], beta[at[0], 0]))


def test_values_may_be_shared_between_keys():
    k, v = pairs(4, 6, 2)
    for rule in (memory.sum_rule, memory.delta_rule, memory.delta_states, memory.least_squares):
        assert_close(rule(k, v[0])[1], rule(k[1], v[0]))


def test_orthonormal_keys_are_recalled_exactly_by_all():
    k = torch.linalg.qr(draw(8, 8)).Q[:5]
    v = draw(5, 3, seed=1)
    for rule in (memory.sum_rule, memory.delta_rule, memory.least_squares):
        assert_close(k @ rule(k, v), v)


def test_the_last_pair_is_recalled_and_a_key_written_twice_holds_the_new_value():
    k, v = pairs(4, 9)
    assert_close(k[-1:] @ memory.delta_rule(k, v), v[-1:])
    same = k[:1].expand(2, -1)
    assert_close(k[:1] @ memory.delta_rule(same, v[:2]), v[1:2])
    assert_close(k[:1] @ memory.sum_rule(same, v[:2]), v[:1] + v[1:2])
    assert_close(k[:1] @ memory.least_squares(same, v[:2]), (v[:1] + v[1:2]) / 2)


@pytest.mark.parametrize(("beta", "length"), [(2.1, 1.0), (-0.1, 1.0), (1.0, 1.5), (float("nan"), 1.0)])
def test_steps_that_enlarge_are_refused(beta, length):
    k, v = pairs(4, 3)
    for rule in (memory.delta_rule, memory.delta_states):
        with pytest.raises(ValueError, match=r"0 ≤ β\|k\|² ≤ 2"):
            rule(length * k, v, beta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_borders_are_allowed_up_to_rounding(dtype):
    k = unit(draw(200, 16, dtype=dtype))
    v = draw(200, 2, dtype=dtype)
    assert (memory.delta_rule(k, v, 2.0) - memory.delta_states(k, v, 2.0)[-1]).abs().max() < 1e-2
    assert_close(memory.delta_rule(k, v, 0.0), torch.zeros(16, 2, dtype=dtype))


def test_beyond_two_an_error_is_multiplied_at_every_step():
    key = unit(draw(1, 4)).expand(40, -1)
    value = draw(1, 2, seed=1).expand(40, -1)
    states = memory.delta_states(key, value, 2.5, unstable=True)
    off = (key[:1] @ states - value[:1]).norm(dim=-1)[:, 0]
    assert_close(off[1:] / off[:-1], torch.full((39,), 1.5, dtype=torch.float64))
    assert_close(memory.delta_rule(key, value, 2.5, unstable=True), states[-1])


def test_recall_error_is_a_share():
    v = draw(5, 3)
    assert memory.recall_error(v, v) == 0
    assert memory.recall_error(torch.zeros_like(v), v) == 1
    assert_close(memory.recall_error(v + 2 * v, v), torch.tensor(4.0, dtype=torch.float64))
    # A share of the whole, and not the mean of each pair's share.
    uneven = torch.tensor([[1.0], [3.0]])
    assert_close(memory.recall_error(torch.tensor([[0.0], [3.0]]), uneven), torch.tensor(0.1))


@pytest.mark.parametrize(("m", "d"), [(8, 16), (16, 16), (48, 16), (3, 2)])
@pytest.mark.parametrize("rule", ["sum", "delta", "least_squares"])
def test_the_closed_forms_against_random_keys(rule, m, d):
    """The mean over 2,000 memories lies within four standard errors of the closed form."""
    trials = 2000
    k, v = unit(draw(trials, m, d, seed=3)), draw(trials, m, 5, seed=4)
    # Each value has the same mean square, so that the mean of the errors is not a mean of ratios.
    v = v / v.square().sum((-2, -1), keepdim=True).sqrt()
    write = {"sum": memory.sum_rule, "delta": memory.delta_rule, "least_squares": memory.least_squares}[rule]
    error = memory.recall_error(k @ write(k, v), v)
    expected = getattr(memory, f"expected_{rule}_error")(m, d)
    standard = float(error.std()) / trials**0.5
    assert abs(float(error.mean()) - expected) < 4 * standard + 1e-12
    assert standard < 0.02 * max(1.0, expected)


def test_the_delta_error_tends_to_two():
    assert 1.98 < memory.expected_delta_error(100_000, 16) < 2.0
    assert memory.expected_delta_error(1, 16) == 0


def test_gradients():
    k, v = pairs(3, 4, width=2)
    k, v = k.requires_grad_(), v.requires_grad_()
    for rule in (
        memory.sum_rule,
        lambda k, v: memory.delta_rule(k, v, 0.8),
        lambda k, v: memory.delta_states(k, v, 0.8),
        lambda k, v: memory.ridge_states(k, v, 0.5),
        lambda k, v: memory.least_squares(k, v, 0.5),
    ):
        torch.autograd.gradcheck(rule, (k, v))


def test_nothing_is_written_to_and_empty_memories_are_zero():
    k, v = pairs(4, 6)
    before = k.clone(), v.clone()
    for rule in (memory.sum_rule, memory.delta_rule, memory.delta_states, memory.least_squares, memory.sum_states):
        rule(k, v)
    memory.ridge_states(k, v, 0.1)
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])
    for rule in (memory.sum_rule, memory.delta_rule, memory.least_squares):
        assert torch.equal(rule(k[:0], v[:0]), torch.zeros(4, 3, dtype=torch.float64))
    for states in (memory.sum_states(k[:0], v[:0]), memory.delta_states(k[:0], v[:0])):
        assert states.shape == (0, 4, 3)
    assert memory.ridge_states(k[:0], v[:0], 0.1).shape == (0, 4, 3)


def test_what_does_not_fit_is_named():
    k, v = pairs(4, 6)
    every = (memory.sum_rule, memory.sum_states, memory.delta_rule, memory.delta_states, memory.least_squares)
    for rule in every:
        with pytest.raises(ValueError, match="as many pairs"):
            rule(k, v[:5])
        with pytest.raises(TypeError, match="share one dtype"):
            rule(k, v.float())
        with pytest.raises(TypeError, match="k must be real"):
            rule(k.long(), v)
        with pytest.raises(ValueError, match="do not broadcast"):
            rule(k.expand(2, 6, 4), v.expand(3, 6, 3))
    with pytest.raises(ValueError, match="beta must be a number"):
        memory.delta_rule(k, v, torch.ones(5))
    with pytest.raises(ValueError, match="initial must have shape"):
        memory.delta_states(k, v, initial=torch.zeros(3, 3))
    for ridge in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="ridge must be"):
            memory.least_squares(k, v, ridge)
        with pytest.raises(ValueError, match="ridge must be"):
            memory.ridge_states(k, v, ridge)
    with pytest.raises(ValueError, match="above 0"):
        memory.ridge_states(k, v, 0.0)
    with pytest.raises(ValueError, match="same shape"):
        memory.recall_error(v[:2], v)
    with pytest.raises(ValueError, match="k must have shape"):
        memory.transition(k[0])
    for expected in (memory.expected_sum_error, memory.expected_least_squares_error, memory.expected_delta_error):
        with pytest.raises(ValueError, match="at least 1"):
            expected(0, 4)
