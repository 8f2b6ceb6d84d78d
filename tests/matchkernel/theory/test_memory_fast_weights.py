"""Linear attention as a table, as a memory and in chunks: one sum, against loops in plain Python."""

import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from matchkernel.theory import fast_weights, memory

sys.path.insert(0, str(Path(__file__).parent.parent))
from oracle import inputs


def by_pairs(q, k, v, causal=False, normalized=False):
    rows = []
    for i, query in enumerate(q.tolist()):
        out, total = [0.0] * v.shape[-1], 0.0
        for j, (key, value) in enumerate(zip(k.tolist(), v.tolist(), strict=True)):
            if causal and j > i:
                continue
            weight = sum(a * b for a, b in zip(query, key, strict=True))
            total += weight
            out = [old + weight * new for old, new in zip(out, value, strict=True)]
        rows.append([x / total if total else 0.0 for x in out] if normalized else out)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_table_and_state_agree_with_the_pairs(causal, normalized):
    q, k, v = inputs(n=7, m=7)
    q, k = q.exp(), k.exp()  # products of positive features are positive
    expected = by_pairs(q, k, v, causal, normalized)
    assert_close(fast_weights.by_table(q, k, v, causal=causal, normalized=normalized), expected)
    assert_close(fast_weights.by_state(q, k, v, causal=causal, normalized=normalized), expected)
    if not causal:
        few = fast_weights.by_state(q[:2], k, v, normalized=normalized)
        assert_close(few, expected[:2])


def test_two_bracketings_are_equal_to_rounding():
    q, k, v = (x / 8 for x in inputs(n=64, m=64, d=64, width=64))
    off = fast_weights.by_table(q, k, v) - fast_weights.by_state(q, k, v)
    assert off.abs().max() < 4e-15
    assert off.abs().max() > 0  # two computations, and not one under two names


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 16, 50, 64])
def test_chunks_are_the_recurrence(size, normalized):
    q, k, v = inputs(n=50, m=50, d=8, width=5)
    q, k = q.sigmoid(), k.sigmoid()
    expected = fast_weights.by_state(q, k, v, causal=True, normalized=normalized)
    assert_close(fast_weights.by_chunks(q, k, v, size, normalized=normalized), expected, rtol=0, atol=1e-12)
    assert_close(expected, by_pairs(q, k, v, causal=True, normalized=normalized))


def test_the_future_is_not_read():
    q, k, v = inputs(n=9, m=9)
    later_k, later_v = k.clone(), v.clone()
    later_k[5:] += 1
    later_v[5:] -= 1
    for way in (
        lambda *x: fast_weights.by_table(*x, causal=True),
        lambda *x: fast_weights.by_state(*x, causal=True),
        lambda *x: fast_weights.by_chunks(*x, 4),
    ):
        assert_close(way(q, k, v)[:5], way(q, later_k, later_v)[:5])
        assert (way(q, k, v)[5:] - way(q, later_k, later_v)[5:]).abs().min() > 0


def test_the_state_is_the_sum_rules_memory():
    q, k, v = inputs(n=6, m=6)
    assert_close(fast_weights.by_state(q, k, v), q @ memory.sum_rule(k, v))
    prefixes = memory.sum_states(k, v)
    assert_close(fast_weights.by_state(q, k, v, causal=True), (q.unsqueeze(-2) @ prefixes).squeeze(-2))


def test_a_row_without_weight_gives_zeros():
    q = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    k = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    v = torch.tensor([[2.0], [4.0]])
    for out in (
        fast_weights.by_table(q, k, v, normalized=True),
        fast_weights.by_state(q, k, v, normalized=True),
    ):
        assert_close(out, torch.tensor([[3.0], [0.0]]))
    # A small sum, and one below zero, are sums all the same.
    small = torch.tensor([[1e-3, 0.0], [-0.5, 0.0]])
    for way in (fast_weights.by_table, fast_weights.by_state):
        assert_close(way(small, k, v, normalized=True), torch.tensor([[3.0], [3.0]]))
    # A later row without weight: rows 0 and 1 meet keys 0 and 0, 1.
    for out in (
        fast_weights.by_table(q, k, v, causal=True, normalized=True),
        fast_weights.by_state(q, k, v, causal=True, normalized=True),
        fast_weights.by_chunks(q, k, v, 2, normalized=True),
    ):
        assert_close(out, torch.tensor([[2.0], [0.0]]))


def test_batches_gradients_and_empty_sequences():
    q, k, v = inputs(2, 3, n=5, m=5)
    for way in (
        lambda *x: fast_weights.by_table(*x, causal=True),
        lambda *x: fast_weights.by_state(*x, causal=True),
        lambda *x: fast_weights.by_chunks(*x, 2),
    ):
        assert_close(way(q, k, v)[1, 2], way(q[1, 2], k[1, 2], v[1, 2]))
        assert_close(way(q, k[0], v[1])[1, 2], way(q[1, 2], k[0, 2], v[1, 2]))
        assert way(q[..., :0, :], k[..., :0, :], v[..., :0, :]).shape == (2, 3, 0, 3)
        small = [x[0, 0].clone().requires_grad_() for x in (q, k, v)]
        torch.autograd.gradcheck(way, small)


def test_what_does_not_fit_is_named():
    q, k, v = inputs(n=5, m=5)
    for way in (fast_weights.by_table, fast_weights.by_state, lambda *x: fast_weights.by_chunks(*x, 2)):
        with pytest.raises(ValueError, match="do not fit together"):
            way(q[:, :3], k, v)
        with pytest.raises(ValueError, match="do not fit together"):
            way(q, k, v[:4])
        with pytest.raises(TypeError, match="share one dtype"):
            way(q, k, v.float())
        with pytest.raises(TypeError, match="q must be real"):
            way(q.long(), k, v)
        with pytest.raises(ValueError, match="do not broadcast"):
            way(q.expand(2, 5, 4), k.expand(3, 5, 4), v)
        with pytest.raises(ValueError, match="two dimensions"):
            way(q[0], k, v)
    for way in (fast_weights.by_table, fast_weights.by_state):
        with pytest.raises(ValueError, match="as many queries as keys"):
            way(q[:2], k, v, causal=True)
    with pytest.raises(ValueError, match="size must be at least 1"):
        fast_weights.by_chunks(q, k, v, 0)
