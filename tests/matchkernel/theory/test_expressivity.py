"""What a width can say: against numpy, linear programs, brute force over directions, and closed forms."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from matchkernel.theory import expressivity
from tests.matchkernel.oracle import draw


def table(n=12, m=9, seed=0):
    return draw(n, m, seed=seed).softmax(dim=-1)


def returned_by_a_query(keys, chosen):
    """Whether some query scores all of `chosen` at least 1 above every other key: a linear program decides."""
    keys = np.asarray(keys, dtype=float)
    others = [j for j in range(len(keys)) if j not in chosen]
    apart = np.array([keys[j] - keys[i] for i in chosen for j in others])
    answer = linprog(np.zeros(keys.shape[1]), A_ub=apart, b_ub=-np.ones(len(apart)), bounds=(None, None))
    assert answer.status in (0, 2), answer.message
    return answer.status == 0


def test_residuals_are_the_tails_of_the_row_centred_logarithm():
    weights = table()
    logs = np.log(weights.numpy())
    sizes = np.linalg.svd(logs @ (np.eye(9) - np.full((9, 9), 1 / 9)), compute_uv=False)
    expected = [np.sqrt((sizes[d:] ** 2).sum()) for d in range(10)]
    np.testing.assert_allclose(expressivity.rank_residuals(weights), expected, atol=1e-12)


@pytest.mark.parametrize("width", [0, 1, 3, 8])
def test_the_best_scores_reach_the_residual(width):
    weights = table()
    best = expressivity.best_scores(weights, width)
    assert best.q.shape == (12, width) and best.k.shape == (9, width)
    off = best.q @ best.k.mT - weights.log()
    shifted = off - off.mean(dim=-1, keepdim=True)
    torch.testing.assert_close(shifted.norm(), best.residual)
    torch.testing.assert_close(best.residual, expressivity.rank_residuals(weights)[width])


def test_no_search_over_queries_keys_and_shifts_gets_below_the_residual():
    weights, width = table(6, 5, seed=4), 2
    goal = weights.log()
    free = [draw(6, width, seed=1), draw(5, width, seed=2), draw(6, 1, seed=3)]
    for x in free:
        x.requires_grad_()
    optimizer = torch.optim.LBFGS(free, max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-12)

    def closure():
        optimizer.zero_grad()
        loss = (free[0] @ free[1].mT + free[2] - goal).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    found = closure().detach().sqrt()
    torch.testing.assert_close(found, expressivity.rank_residuals(weights)[width], atol=1e-6, rtol=0)


def test_the_shift_is_worth_one_rank():
    q, k = draw(12, 3, seed=1), draw(9, 3, seed=2)
    shifted = (q @ k.mT + draw(12, 1, seed=3)).softmax(dim=-1)
    residuals = expressivity.rank_residuals(shifted)
    assert residuals[2] > 0.1 and residuals[3] < 1e-12
    square = expressivity.rank_residuals(table(9, 9))
    assert square[7] > 0.1 and square[8] < 1e-12


def test_weights_that_have_no_logarithm_are_refused():
    with pytest.raises(ValueError, match=r"shape \(2, 2\): expected \(n, m\), every weight above 0"):
        expressivity.rank_residuals(torch.eye(2))
    with pytest.raises(ValueError, match="width=10: expected 0 to 9"):
        expressivity.best_scores(table(), 10)


@pytest.mark.parametrize("keys", [3, 8, 256])
def test_width_two_realises_an_identity_by_argmax(keys):
    points = expressivity.circle(keys)
    scores = points @ points.mT
    assert scores.argmax(dim=-1).tolist() == list(range(keys))
    second = scores.topk(2, dim=-1).values[:, 1]
    np.testing.assert_allclose(scores.diagonal() - second, 1 - math.cos(2 * math.pi / keys), rtol=1e-9)


@pytest.mark.parametrize(("keys", "k"), [(9, 1), (12, 2), (9, 3), (10, 4)])
def test_width_2k_returns_every_top_k_set(keys, k):
    chosen = torch.tensor(list(itertools.combinations(range(keys), k)))
    points, queries = expressivity.circle(keys, degree=k), expressivity.every_top_k(keys, chosen)
    assert points.shape == (keys, 2 * k)
    np.testing.assert_allclose(points.norm(dim=-1), 1)
    np.testing.assert_allclose(queries.norm(dim=-1), 1)
    scores = queries @ points.mT
    top = scores.topk(k + 1, dim=-1)
    assert torch.equal(top.indices[:, :k].sort(dim=-1).values, chosen)
    inside = top.values[:, :k]
    np.testing.assert_allclose(inside.amax(dim=-1), inside.amin(dim=-1), atol=1e-12)
    assert ((inside[:, -1] - top.values[:, k]) > 1e-6).all()


def test_it_takes_one_set_as_well_as_many_and_refuses_repeats():
    one = expressivity.every_top_k(12, [3, 7])
    torch.testing.assert_close(one, expressivity.every_top_k(12, torch.tensor([[3, 7]]))[0])
    for wrong in ([3, 3], [0, 12], [-1, 2]):
        with pytest.raises(ValueError, match="different indices from 0 to 11"):
            expressivity.every_top_k(12, wrong)


@pytest.mark.parametrize(("width", "k"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_below_width_2k_a_set_is_out_of_reach(width, k):
    for seed in range(25):
        keys = draw(width + 4 + k, width, seed=seed)
        chosen = expressivity.unreachable_top_k(keys, k).tolist()
        assert len(set(chosen)) == k
        assert not returned_by_a_query(keys, chosen)
    points = expressivity.circle(10, degree=2)
    assert all(returned_by_a_query(points, pair) for pair in itertools.combinations(range(10), 2))


def test_the_argument_says_where_it_ends():
    with pytest.raises(ValueError, match="fewer than 2k = 4 columns and at least 7 rows"):
        expressivity.unreachable_top_k(draw(10, 4), 2)
    with pytest.raises(ValueError, match="at least 6 rows"):
        expressivity.unreachable_top_k(draw(5, 3), 2)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_sets_of_the_plane_are_those_that_a_linear_program_finds(k):
    keys = draw(9, 2, seed=5)
    expected = {c for c in itertools.combinations(range(9), k) if returned_by_a_query(keys, c)}
    assert expressivity.plane_top_k(keys, k) == expected
    assert len(expected) < math.comb(9, k)


def test_on_a_circle_only_neighbours_come_first_together():
    sets = expressivity.plane_top_k(expressivity.circle(16), 2)
    assert sets == {tuple(sorted((i, (i + 1) % 16))) for i in range(16)}
    with pytest.raises(ValueError, match="k=16"):
        expressivity.plane_top_k(expressivity.circle(16), 16)


@pytest.mark.parametrize("count", [8, 10, 16, 22])
def test_keys_in_the_plane_have_at_most_three_pairs_on_top_for_two_of_them(count):
    # Every second key a little inside the edge of its neighbours: with each of the two it can be on top, as they can.
    keys = expressivity.circle(count)
    keys[1::2] *= 0.97 * math.cos(2 * math.pi / count)
    assert len(expressivity.plane_top_k(keys, 2)) == 3 * count // 2
    for seed in range(20):
        assert len(expressivity.plane_top_k(draw(count, 2, seed=seed), 2)) <= 3 * count // 2


def test_separable_sets_are_counted_as_cover_does():
    keys = draw(7, 2, seed=6)
    found = sum(len(expressivity.plane_top_k(keys, k)) for k in range(1, 7)) + 2  # and none, and all
    assert found == expressivity.separable_sets(7, 2) == 44
    assert expressivity.separable_sets(4, 3) == 2**4


def test_margins_are_bounded_and_the_bounds_are_reached():
    simplex = torch.eye(6, dtype=torch.float64) - 1 / 6
    simplex = simplex / simplex.norm(dim=-1, keepdim=True)
    cross = torch.cat([torch.eye(4), -torch.eye(4)]).double()
    for points, width in ((simplex, 5), (cross, 4), (expressivity.circle(16), 2)):
        cosines = points @ points.mT
        cosines.fill_diagonal_(-2)
        assert float(1 - cosines.max()) == pytest.approx(expressivity.margin_bound(len(points), width), abs=2e-4)


@pytest.mark.parametrize(("keys", "width"), [(20, 2), (12, 3), (24, 4), (240, 8)])
def test_no_arrangement_passes_the_bound(keys, width):
    points = draw(keys, width, seed=7).requires_grad_()
    optimizer = torch.optim.Adam([points], lr=0.02)
    for step in range(400):
        unit = points / points.norm(dim=-1, keepdim=True)
        cosines = (unit @ unit.mT).masked_fill(torch.eye(keys, dtype=torch.bool), -1)
        optimizer.zero_grad()
        (torch.logsumexp((10 + step) * cosines.flatten(), 0) / (10 + step)).backward()
        optimizer.step()
    margin = 1 - float(cosines.detach().max())
    assert 0.5 * expressivity.margin_bound(keys, width) < margin < expressivity.margin_bound(keys, width) + 1e-9


def test_the_bound_lies_above_the_best_codes_known():
    # The icosahedron; the 24-cell; the roots of E8, whose neighbours are 60 degrees apart.
    for keys, width, cosine in ((12, 3, 1 / math.sqrt(5)), (24, 4, 0.5), (240, 8, 0.5)):
        assert 1 - cosine < expressivity.margin_bound(keys, width) < 1
    with pytest.raises(ValueError, match="room for them to differ"):
        expressivity.margin_bound(3, 1)


@pytest.mark.parametrize("weight", [0.3, 0.5, 0.99])
def test_the_factor_gives_exactly_the_weight_asked_for(weight):
    scores, target = draw(6, 8, seed=8), torch.tensor([0, 1, 2, 3, 4, 5])
    scores[torch.arange(6), target] = scores.amax(dim=-1) + 0.25
    factor = expressivity.factor_for_weight(scores, target, weight)
    found = (factor[:, None] * scores).softmax(dim=-1)[torch.arange(6), target]
    np.testing.assert_allclose(found, weight, rtol=1e-9)


def test_the_factor_has_a_closed_form_when_all_are_equally_far():
    scores = torch.full((1, 20), -0.1)
    scores[0, 3] = 0.2
    (factor,) = expressivity.factor_for_weight(scores, torch.tensor([3]), 0.9).tolist()
    assert factor == pytest.approx(math.log(19 * 9) / 0.3, rel=1e-6)


def test_a_target_that_is_not_first_never_gets_most():
    scores = torch.tensor([[1.0, 2.0, 0.0], [1.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    factor = expressivity.factor_for_weight(scores, torch.zeros(3, dtype=torch.long), 0.5)
    assert factor[:2].tolist() == [math.inf, math.inf] and 0 < factor[2] < math.inf
    assert expressivity.factor_for_weight(scores[2:], torch.tensor([0]), 0.25).item() == 0
    with pytest.raises(ValueError, match=r"weight=1\.0"):
        expressivity.factor_for_weight(scores, torch.zeros(3, dtype=torch.long), 1.0)


def test_random_codes_hold_a_sparse_pattern_up_to_noise_of_known_size():
    generator = torch.Generator().manual_seed(0)
    pattern = torch.zeros(200, 300, dtype=torch.float64)
    pattern.scatter_(1, torch.rand(200, 300, generator=generator).topk(3).indices, 1.0)
    q, k = expressivity.random_codes(pattern, 256, generator)
    assert q.shape == (200, 256) and k.shape == (300, 256)
    np.testing.assert_allclose(k.square().sum(dim=-1), 1)
    noise = q @ k.mT - pattern
    assert abs(noise.mean()) < 0.003
    assert float(noise[pattern == 0].square().mean()) == pytest.approx(3 / 256, rel=0.05)
    assert float(noise[pattern == 1].square().mean()) == pytest.approx(2 / 256, rel=0.15)
    with pytest.raises(ValueError, match="width=0"):
        expressivity.random_codes(pattern, 0, generator)


def test_inputs_are_left_as_they_were():
    keys, weights, scores = draw(9, 2), table(), draw(3, 4)
    copies = [x.clone() for x in (keys, weights, scores)]
    expressivity.plane_top_k(keys, 2)
    expressivity.unreachable_top_k(keys, 2)
    expressivity.best_scores(weights, 2)
    expressivity.factor_for_weight(scores, torch.zeros(3, dtype=torch.long), 0.5)
    assert all(torch.equal(x, y) for x, y in zip((keys, weights, scores), copies, strict=True))
