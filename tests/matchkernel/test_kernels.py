"""How a query scores a key, against closed forms, scikit-learn and torch's own modules."""

import math
import sys
from pathlib import Path

import pytest
import torch
from sklearn.metrics.pairwise import cosine_similarity, euclidean_distances, linear_kernel
from torch import nn
from torch.testing import assert_close

import matchkernel as mk

sys.path.insert(0, str(Path(__file__).parent))
from oracle import draw, inputs

Tensor = torch.Tensor


def test_dot_and_cosine_are_scikit_learns() -> None:
    q, k, _ = inputs(n=6, m=9, d=5)
    assert_close(mk.Dot()(q, k), torch.from_numpy(linear_kernel(q, k)))
    assert_close(mk.ScaledDot()(q, k), torch.from_numpy(linear_kernel(q, k)) / math.sqrt(5))
    assert_close(mk.Cosine()(q, k), torch.from_numpy(cosine_similarity(q, k)))
    assert_close(mk.Cosine(0.1)(q, k), torch.from_numpy(cosine_similarity(q, k)) * 10)


def test_a_right_angle_and_three_lengths() -> None:
    q = torch.tensor([[3.0, 4.0]])
    k = torch.tensor([[4.0, -3.0], [3.0, 4.0], [-6.0, -8.0]])
    assert mk.Dot()(q, k).tolist() == [[0.0, 25.0, -50.0]]
    assert_close(mk.ScaledDot()(q, k), torch.tensor([[0.0, 25.0, -50.0]]) / 2**0.5)
    assert_close(mk.Cosine()(q, k), torch.tensor([[0.0, 1.0, -1.0]]))


def test_bilinear_is_torchs() -> None:
    kernel = mk.Bilinear(4, 3, generator=torch.Generator().manual_seed(0)).double()
    theirs = nn.Bilinear(4, 3, 1, bias=False, dtype=torch.float64)
    theirs.weight.data.copy_(kernel.weight.data[None])
    q, k = draw(5, 4, seed=1), draw(7, 3, seed=2)
    pairs = theirs(q.repeat_interleave(7, 0), k.repeat(5, 1)).reshape(5, 7)
    assert_close(kernel(q, k), pairs)


def test_low_rank_bilinear_is_the_product_of_its_factors() -> None:
    kernel = mk.Bilinear(4, 3, rank=2, generator=torch.Generator().manual_seed(0)).double()
    q, k = draw(5, 4, seed=1), draw(7, 3, seed=2)
    matrix = kernel.query_weight @ kernel.key_weight.mT
    assert matrix.shape == (4, 3) and torch.linalg.matrix_rank(matrix) == 2
    assert_close(kernel(q, k), q @ matrix @ k.mT)


@pytest.mark.parametrize("rank", [None, 8])
def test_bilinear_starts_with_scores_of_unit_variance(rank: int | None) -> None:
    kernel = mk.Bilinear(64, 48, rank, generator=torch.Generator().manual_seed(0)).double()
    scores = kernel(draw(2000, 64, seed=1), draw(2000, 48, seed=2))
    assert 0.8 < scores.var().item() < 1.2


def test_bilinear_draws_what_its_generator_says() -> None:
    drawn = [mk.Bilinear(3, generator=torch.Generator().manual_seed(seed)).weight for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    kernel = mk.Bilinear(3)
    kernel.reset_parameters(torch.Generator().manual_seed(1))
    assert torch.equal(kernel.weight, drawn[0])


def test_bilinear_with_tied_projections_is_a_scaled_dot() -> None:
    """M = W_Q W_Kᵀ / √d_k on raw tokens is scaled dot attention on their projections."""
    x, wq, wk = draw(6, 8, seed=1), draw(8, 4, seed=2), draw(8, 4, seed=3)
    kernel = mk.Bilinear(8).double()
    kernel.weight.data.copy_(wq @ wk.mT / 2.0)
    assert_close(mk.attend(x, x, x, kernel), mk.attend(x @ wq, x @ wk, x))


def test_the_default_scale_follows_the_width_of_the_query() -> None:
    for d in (1, 4, 9, 64):
        q = torch.ones(1, d, dtype=torch.float64)
        assert_close(float(mk.ScaledDot()(q, q)), math.sqrt(d))


# The algebra.


def test_scores_add_and_scale() -> None:
    q, k, _ = inputs(2, 3, d=4)
    cosine, dot = mk.Cosine()(q, k), q @ k.mT
    assert_close((mk.Dot() + mk.Cosine())(q, k), dot + cosine)
    assert_close((mk.ScaledDot() + mk.Cosine(0.5))(q, k), dot / 2 + 2 * cosine)
    assert_close((3.0 * (mk.ScaledDot() + 0.1 * mk.Dot()))(q, k), 3 * (dot / 2 + 0.1 * dot))
    assert_close((mk.Dot() * -2)(q, k), -2 * dot)
    factor = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    assert_close((factor[0] * mk.Dot())(q, k), dot)
    assert_close((mk.ScaledDot() * factor)(q, k), factor[:, None, None] * dot / 2)
    three = mk.Dot() + mk.ScaledDot() + mk.Cosine()
    assert_close(three(q, k), dot + dot / 2 + cosine)


def test_sums_of_dots_stay_dots_and_others_do_not() -> None:
    class Negative(mk.MatchKernel):
        def match(self, q: Tensor, k: Tensor) -> Tensor:
            return -mk.squared_distance(q, k)

    assert isinstance(mk.Dot() + 2 * mk.Cosine(), mk.DotKernel)
    other = Negative() + mk.Dot()
    assert not isinstance(other, mk.DotKernel) and not isinstance(2 * Negative(), mk.DotKernel)
    q, k, v = inputs(3)
    truth = -torch.cdist(q, k).square()
    assert_close(other(q, k), truth + q @ k.mT)
    assert_close((2 * Negative())(q, k), 2 * truth)
    factor = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert_close((factor * Negative())(q, k), factor[:, None, None] * truth)
    assert_close(mk.attend(q, k, v, other), (truth + q @ k.mT).softmax(-1) @ v)


def test_the_algebra_refuses_what_is_no_kernel_and_no_number() -> None:
    for wrong in (lambda: mk.Dot() + 1, lambda: mk.Dot() * True, lambda: "2" * mk.Dot(), lambda: mk.Dot() * mk.Dot()):
        with pytest.raises(TypeError, match=r"unsupported operand|can't multiply"):
            wrong()


def test_facts_of_sums_and_multiples() -> None:
    pd, none = mk.Dot(), mk.Bilinear(4)
    assert (pd + mk.Cosine()).positive_definite is True
    assert (pd + none).positive_definite is None and (pd + none).symmetric is None
    assert (pd + none).position_invariant is True
    assert (2 * pd).positive_definite is True and (2 * pd).score_positive_definite is True
    assert (-2 * pd).positive_definite is None and (-2 * pd).score_positive_definite is None
    assert (torch.tensor(2.0) * pd).positive_definite is None
    assert (0.5 * none).positive_definite is None and (0.5 * none).symmetric is None


def test_what_kernels_call_themselves() -> None:
    assert repr(mk.ScaledDot()) == "ScaledDot()"
    assert repr(mk.Cosine(0.25)) == "Cosine(temperature=0.25)"
    assert repr(mk.Bilinear(4)) == "Bilinear(4, 4)" and repr(mk.Bilinear(4, 3, 2)) == "Bilinear(4, 3, rank=2)"
    assert repr(2 * (mk.Dot() + mk.Cosine())) == "2 * (Dot() + Cosine(temperature=1))"
    assert repr(torch.ones(3) * mk.Dot()) == "<per head, 3 heads> * Dot()"
    assert repr(nn.Parameter(torch.tensor(0.5)) * mk.Dot()) == "0.5 (learned) * Dot()"


def test_parameters_of_parts_belong_to_the_whole() -> None:
    kernel = nn.Parameter(torch.ones(2)) * (mk.Bilinear(4) + mk.Cosine(nn.Parameter(torch.ones(()))))
    assert set(dict(kernel.named_parameters())) == {"factor", "kernel.a.weight", "kernel.b.temperature"}
    assert all(p.dtype == torch.float64 for p in kernel.double().parameters())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: mk.Cosine(0.0), ValueError, r"Cosine\(temperature=…\): expected a finite number above 0, got 0"),
        (lambda: mk.Cosine(-1.0), ValueError, "above 0, got -1"),
        (lambda: mk.Cosine(torch.tensor([1.0, 0.0])), ValueError, r"every entry must be above 0, got \[1.0, 0.0\]"),
        (lambda: mk.Cosine(torch.ones(2, 3)), ValueError, r"shape \(\) or \(heads,\), got shape \(2, 3\)"),
        (lambda: mk.Cosine(torch.tensor(1)), ValueError, "floating-point tensor.*int64"),
        (lambda: mk.Cosine("1"), TypeError, r"Cosine\(temperature=…\): expected a number.*got '1'"),
        (lambda: mk.Cosine(True), TypeError, "got True"),
        (lambda: mk.Softmax(math.nan), ValueError, r"Softmax\(temperature=…\): expected a finite.*above 0, got nan"),
        (lambda: mk.SinkSoftmax(math.inf), ValueError, r"SinkSoftmax\(logit=…\): expected a finite number, got inf"),
        (lambda: mk.ScalableSoftmax(0), ValueError, r"ScalableSoftmax\(s=…\).*above 0"),
        (lambda: math.nan * mk.Dot(), ValueError, r"\(factor=…\): expected a finite number, got nan"),
        (lambda: mk.Bilinear(0), ValueError, r"Bilinear\(query_dim=…\): expected at least 1, got 0"),
        (lambda: mk.Bilinear(4, 0), ValueError, r"Bilinear\(key_dim=…\): expected at least 1, got 0"),
        (lambda: mk.Bilinear(4, rank=0), ValueError, r"Bilinear\(rank=…\): expected at least 1, got 0"),
    ],
)  # fmt: skip
def test_values_that_no_kernel_takes(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# Directions.


def test_the_cosine_of_a_zero_vector_is_zero_and_so_is_its_slope() -> None:
    q, k = torch.zeros(1, 3, requires_grad=True), torch.ones(2, 3)
    score = mk.Cosine()(q, k)
    assert score.tolist() == [[0.0, 0.0]]
    assert torch.equal(torch.autograd.grad(score.sum(), q)[0], torch.zeros(1, 3))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_cosine_of_what_is_no_vector_is_no_number(bad: float) -> None:
    """Not 0: what is wrong in an input that is looked at must be seen in the output."""
    q, k, v = inputs(n=3, m=4)
    q[1, 0] = bad
    assert bool(mk.Cosine()(q, k)[1].isnan().all())
    for engine in ("reference", "fused"):
        out = mk.attend(q, k, v, mk.Cosine(), engine=engine)
        assert bool(out[1].isnan().all()) and bool(out[[0, 2]].isfinite().all())


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e22, 1e38])
def test_the_cosine_knows_no_length(size: float) -> None:
    q, k, _ = inputs(d=5, dtype=torch.float32)
    q[:, 0] = 3.0
    small = q / q.abs().amax() * size
    assert_close(mk.Cosine()(small, k), mk.Cosine()(q.double(), k.double()).float(), rtol=1e-5, atol=1e-6)


def test_the_cosine_in_half_precision_is_rounded_only_at_the_end() -> None:
    """Squares of 300 leave float16, and the norm must not."""
    q = torch.full((1, 4), 300.0, dtype=torch.float16)
    assert mk.Cosine()(q, q).item() == 1.0


# Distances of all pairs.


def test_squared_distance_is_scikit_learns() -> None:
    q, k, _ = inputs(n=6, m=9, d=5)
    assert_close(mk.squared_distance(q, k), torch.from_numpy(euclidean_distances(q, k, squared=True)))


def test_squared_distance_far_from_the_origin() -> None:
    q, k, _ = inputs(n=6, m=9, d=5, dtype=torch.float32)
    far = mk.squared_distance(q + 1000.0, k + 1000.0)
    truth = mk.squared_distance((q + 1000.0).double(), (k + 1000.0).double()).float()
    assert_close(far, truth, rtol=1e-5, atol=1e-5)


def test_squared_distance_is_twice_differentiable_everywhere() -> None:
    x = draw(3, 2).requires_grad_()
    y = x.detach().clone().requires_grad_()
    assert bool((mk.squared_distance(x, y) >= 0).all())
    (slope,) = torch.autograd.grad(mk.squared_distance(x, y).sum(), x, create_graph=True)
    assert_close(slope, 2 * (3 * x - y.sum(0)))
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    assert_close(curvature, torch.full_like(x, 6.0))


def test_squared_distance_is_lifted_in_value_alone() -> None:
    """Where rounding leaves a hair below zero the value is 0, and slope and curvature are those of the formula."""
    x = draw(200, 8, dtype=torch.float32)
    moved = x - x[:1]
    square = moved.square().sum(-1)
    assert bool((square + square - 2 * (moved @ moved.mT).diagonal() < 0).any()), "no pair shows what is tested here"
    q, k = x.clone().requires_grad_(), x.clone()
    distance = mk.squared_distance(q, k)
    assert bool((distance >= 0).all())
    (slope,) = torch.autograd.grad(distance.diagonal().sum(), q, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), q)
    assert_close(slope, torch.zeros_like(x), rtol=0.0, atol=1e-5)
    assert_close(curvature, torch.full_like(x, 2.0))


def test_squared_distance_without_keys_and_with_a_nan_anchor() -> None:
    q, k, _ = inputs(n=2, m=3)
    assert mk.squared_distance(q, k[:0]).shape == (2, 0)
    k[0, 0] = math.nan
    distance = mk.squared_distance(q, k)
    assert bool(distance[:, 0].isnan().all())
    assert_close(distance[:, 1:], torch.cdist(q, k[1:]).square())


def test_positions_default_to_the_end() -> None:
    class Seen(mk.MatchKernel):
        def encode_query(self, q: Tensor, position: Tensor) -> Tensor:
            return position[:, None].double()

        def encode_key(self, k: Tensor, position: Tensor) -> Tensor:
            return position[:, None].double()

        def match(self, q: Tensor, k: Tensor) -> Tensor:
            return 10 * q + k.mT

    q, k, _ = inputs(n=2, m=3)
    assert Seen()(q, k).tolist() == [[10, 11, 12], [20, 21, 22]]
    assert mk.scores(q, k, Seen()).tolist() == [[10, 11, 12], [20, 21, 22]]
    given = Seen()(q, k, torch.tensor([5, 6]), torch.tensor([1, 2, 3]))
    assert given.tolist() == [[51, 52, 53], [61, 62, 63]]


def test_a_kernel_without_a_match_says_so() -> None:
    q, k, v = inputs()
    with pytest.raises(NotImplementedError, match=r"MatchKernel must define match\(q, k\)"):
        mk.attend(q, k, v, mk.MatchKernel())


def test_a_dot_kernel_that_encodes_two_tensors_says_so() -> None:
    class Two(mk.DotKernel):
        def encode_key(self, k: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
            return k, k

    q, k, v = inputs()
    for kernel in (Two(), Two() + mk.Dot(), 2 * Two()):
        with pytest.raises(TypeError, match="must return one tensor each"):
            mk.attend(q, k, v, kernel)


@pytest.mark.parametrize(
    "kernel", [mk.ScaledDot(), mk.Laplacian(2.0), mk.ALiBi(2) + mk.Dot(), mk.EluFeatures()], ids=repr
)
def test_kappa_is_the_exponential_of_the_score(kernel):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, n, 4, generator=generator, dtype=torch.float64) for n in (3, 5))
    late, places = torch.tensor([7, 8, 9]), torch.arange(5) + 3
    assert_close(kernel.kappa(q, k), mk.scores(q, k, kernel).exp())
    moved = mk.scores(q, k, kernel, query_position=late, key_position=places).exp()
    assert_close(kernel.kappa(q, k, late, places), moved)
