"""Each identity against both of its sides, computed pair by pair or by another library."""

import math

import pytest
import torch
from sklearn.metrics.pairwise import polynomial_kernel, rbf_kernel

import matchkernel as mk
from matchkernel.theory import identities
from tests.matchkernel.oracle import draw

QUERY, KEY = draw(5, 3, seed=1), draw(7, 3, seed=2)


def squares(x):
    return torch.tensor([sum(entry * entry for entry in row) for row in x.tolist()], dtype=x.dtype)


def test_scores_and_weights_undo_each_other():
    scores = draw(5, 7, seed=3)
    kappa = scores.exp() * draw(5, 1, seed=4).exp()
    torch.testing.assert_close(identities.scores_of(kappa).softmax(-1), scores.softmax(-1))
    torch.testing.assert_close(identities.weights_of(kappa), scores.softmax(-1))


def test_a_weight_of_zero_has_the_score_minus_infinity_and_a_negative_one_none():
    kappa = torch.tensor([[1.0, 0.0, 3.0]])
    assert identities.scores_of(kappa).tolist() == [[0.0, -math.inf, pytest.approx(math.log(3))]]
    with pytest.raises(ValueError, match=r"kappa of shape \(1, 2\)"):
        identities.scores_of(torch.tensor([[1.0, -0.1]]))


def test_a_row_without_weight_stays_without():
    kappa = torch.tensor([[0.0, 0.0], [1.0, 3.0], [2.0, -1.0], [1.0, -3.0]])
    assert identities.weights_of(kappa).tolist() == [[0.0, 0.0], [0.25, 0.75], [2.0, -1.0], [-0.5, 1.5]]


def test_centring_keeps_the_weights_and_forgets_the_shift():
    scores, shift = draw(5, 7, seed=3), draw(5, 1, seed=4)
    middle = identities.centred(scores)
    torch.testing.assert_close(middle.sum(-1), torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(middle.softmax(-1), scores.softmax(-1))
    torch.testing.assert_close(identities.centred(scores + 3 * shift), middle)
    torch.testing.assert_close(identities.centred(scores.softmax(-1).log()), middle)
    with pytest.raises(ValueError, match="not finite"):
        identities.centred(torch.tensor([[0.0, -math.inf]]))


@pytest.mark.parametrize("bandwidth", [0.5, 1.0, 3.0])
def test_a_gaussian_is_a_dot_product_times_two_factors(bandwidth):
    dot, query, key = identities.gaussian_factors(QUERY, KEY, bandwidth)
    expected = torch.from_numpy(rbf_kernel(QUERY, KEY, gamma=1 / (2 * bandwidth**2)))
    torch.testing.assert_close(dot * query * key, expected)
    torch.testing.assert_close(identities.weights_of(dot * key), mk.weights(QUERY, KEY, mk.Gaussian(bandwidth)))


def test_temperature_and_bandwidth_give_one_weight_to_keys_of_one_length():
    key = 2 * KEY / KEY.norm(dim=-1, keepdim=True)
    width = QUERY.shape[-1]
    bandwidth = identities.bandwidth_of(math.sqrt(width))
    assert bandwidth == pytest.approx(3**0.25) and identities.temperature_of(bandwidth) == pytest.approx(3**0.5)
    torch.testing.assert_close(mk.weights(QUERY, key, mk.Gaussian(bandwidth)), mk.weights(QUERY, key))
    for wrong in (identities.temperature_of, identities.bandwidth_of):
        for width in (0.0, -1.0, math.nan):
            with pytest.raises(ValueError, match="expected a number above 0"):
                wrong(width)


def test_features_of_a_sum_and_of_a_product():
    def lift(x):  # (1 + x·y)² by its own features: the products of (1, x) with itself
        one = torch.cat([torch.ones(len(x), 1, dtype=x.dtype), x], dim=-1)
        return identities.product_features(one, one)

    square = torch.from_numpy(polynomial_kernel(QUERY, KEY, degree=2, gamma=1, coef0=1))
    torch.testing.assert_close(lift(QUERY) @ lift(KEY).mT, square)
    both = [identities.sum_features(lift(x), x) for x in (QUERY, KEY)]
    linear = torch.from_numpy(polynomial_kernel(QUERY, KEY, degree=1, gamma=1, coef0=0))
    torch.testing.assert_close(both[0] @ both[1].mT, square + linear)
    cube = [identities.product_features(lift(x), x) for x in (QUERY, KEY)]
    torch.testing.assert_close(cube[0] @ cube[1].mT, square * linear)


def test_features_are_listed_in_order():
    first, second = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0, 7.0]])
    assert identities.sum_features(first, second).tolist() == [[1, 2, 3, 5, 7]]
    assert identities.product_features(first, second).tolist() == [[3, 5, 7, 6, 10, 14]]


def test_a_dot_product_from_distances_alone():
    origin = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    query, key = QUERY - origin, KEY - origin
    between = torch.cdist(QUERY, KEY).square()
    found = identities.dot_from_distances(between, squares(query), squares(key))
    torch.testing.assert_close(found, query @ key.mT)


def test_distances_between_features_from_the_kernel_alone():
    features = [torch.cat([x, x.sin()], dim=-1) for x in (QUERY, KEY)]
    kappa = features[0] @ features[1].mT
    found = identities.feature_distances(kappa, squares(features[0]), squares(features[1]))
    torch.testing.assert_close(found, torch.cdist(*features).square())
