"""Sparsemax and entmax: held against the authors' own package, closed forms and finite differences."""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import entmax
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import matchkernel as mk

sys.path.insert(0, str(Path(__file__).parent))
import oracle
from oracle import by_loop, draw, inputs

Tensor = torch.Tensor
NUMBERS = [1.5, 2.0, 1.05, 1.3, 1.8, 2.5, 4.0]


def _theirs(alpha: float) -> Callable[[Tensor], Tensor]:
    if alpha in (1.5, 2.0):
        return entmax.entmax15 if alpha == 1.5 else entmax.sparsemax
    return lambda scores: entmax.entmax_bisect(scores, alpha, n_iter=100)


def _rows() -> Tensor:
    """Rows (…, 19) of many kinds, from a hundredth to a hundred thousand wide; some with ties, one of equal entries."""
    rows = draw(60, 19, seed=3) * torch.logspace(-2, 5, 60, dtype=torch.float64)[:, None]
    rows[::3, 4] = rows[::3].amax(-1)
    rows[1::3, 7:11] = rows[1::3, 6:7]
    return torch.cat([rows, torch.full((1, 19), -3.7, dtype=torch.float64)])


@pytest.mark.parametrize("alpha", NUMBERS)
def test_values_and_gradients_are_those_of_the_package(alpha: float) -> None:
    rows = _rows().requires_grad_()
    toward = draw(61, 19, seed=4)
    for ours in (mk.Entmax(alpha), mk.Entmax(torch.tensor(alpha, dtype=torch.float64))):
        weights, truth = ours.weigh(rows), _theirs(alpha)(rows)
        assert_close(weights, truth, rtol=1e-9, atol=1e-12)
        slopes = [torch.autograd.grad((x * toward).sum(), rows)[0] for x in (weights, truth)]
        assert_close(*slopes, rtol=1e-7, atol=1e-9)
        assert_close(weights.sum(-1), torch.ones(61, dtype=torch.float64), rtol=0, atol=1e-13)
        assert 0.1 < float((weights == 0).double().mean()) or alpha < 1.1


def test_the_gradient_in_alpha_is_that_of_the_package() -> None:
    rows, toward = _rows(), draw(61, 19, seed=4)
    slopes = []
    for weigh in (lambda a: mk.Entmax(a).weigh(rows), lambda a: entmax.entmax_bisect(rows, a, n_iter=100)):
        alpha = nn.Parameter(torch.tensor(1.4, dtype=torch.float64))
        slopes.append(torch.autograd.grad((weigh(alpha) * toward).sum(), alpha)[0])
    assert_close(*slopes, rtol=1e-9, atol=0)


@pytest.mark.parametrize("alpha", NUMBERS)
def test_derivatives_of_both_orders_and_forward_mode(alpha: float) -> None:
    scores = draw(4, 6, seed=2).requires_grad_()
    weigh = mk.Entmax(alpha).weigh
    assert 0 < int((weigh(scores) == 0).sum()) < 24 or alpha < 1.4
    assert torch.autograd.gradcheck(weigh, scores, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(weigh, scores)


@pytest.mark.parametrize("alpha", NUMBERS)
def test_a_batch_is_a_loop_of_rows(alpha: float) -> None:
    rows = _rows()
    weigh = mk.Entmax(alpha).weigh
    looped = torch.stack([weigh(row) for row in rows])
    assert_close(torch.func.vmap(weigh)(rows), looped, rtol=0, atol=1e-14)
    assert_close(weigh(rows), looped, rtol=0, atol=1e-14)
    toward = draw(61, 19, seed=4)
    _, push = torch.func.jvp(torch.func.vmap(weigh), (rows,), (toward,))
    _, pull = torch.func.vjp(weigh, rows)
    # The Jacobian is symmetric: what is pushed forward is what is pulled back.
    assert_close(push, pull(toward)[0], rtol=1e-6, atol=1e-9)


def test_in_closed_form() -> None:
    def weights(normalizer: mk.Normalizer, *scores: float) -> list[float]:
        return normalizer.weigh(torch.tensor(scores, dtype=torch.float64)).tolist()

    assert weights(mk.Sparsemax(), 0.3, 0.0) == pytest.approx([0.65, 0.35])
    assert weights(mk.Sparsemax(), 1.0, 0.0) == weights(mk.Sparsemax(), 7.0, 0.0) == [1.0, 0.0]
    assert weights(mk.Sparsemax(), 0.5, 0.25, -0.5) == [0.625, 0.375, 0.0]
    # Two keys at a = 1.5: squares of u ± gap/4, with 2u² + gap²/8 = 1; the second is gone at a gap of 2.
    u = math.sqrt((1 - 0.8**2 / 8) / 2)
    assert weights(mk.Entmax(), 0.8, 0.0) == pytest.approx([(u + 0.2) ** 2, (u - 0.2) ** 2])
    assert weights(mk.Entmax(), 2.0, 0.0) == [1.0, 0.0]
    assert weights(mk.Entmax(), 1.99, 0.0)[1] > 0.0
    for alpha in NUMBERS:
        assert weights(mk.Entmax(alpha), -5.0) == [1.0]
        assert weights(mk.Entmax(alpha), *[1.3] * 8) == pytest.approx([0.125] * 8)
        # A key 1/(a − 1) below the best has none.
        assert weights(mk.Entmax(alpha), 0.0, -1 / (alpha - 1) - 1e-9) == [1.0, 0.0]


def test_towards_one_it_is_a_softmax() -> None:
    rows = draw(5, 9)
    for alpha, within in ((1.01, 3e-2), (1.001, 3e-3), (1.0001, 3e-4)):
        assert_close(mk.Entmax(alpha).weigh(rows), rows.softmax(-1), rtol=0, atol=within)


@pytest.mark.parametrize("alpha", NUMBERS)
def test_attention_pair_by_pair(alpha: float) -> None:
    q, k, v = inputs(n=6, m=6)
    normalizer = mk.Sparsemax() if alpha == 2.0 else mk.Entmax(alpha)
    for setting, allowed in (({}, lambda i, j: True), ({"causal": True}, lambda i, j: j <= i)):
        truth = by_loop(q, k, v, allowed=allowed, normalize=oracle.entmax(alpha))
        assert_close(mk.attend(q, k, v, normalizer=normalizer, **setting), truth, rtol=1e-7, atol=1e-9)
    assert mk.explain(q, k, v, normalizer=normalizer).engine == "reference"


@pytest.mark.parametrize("make", [float, lambda a: nn.Parameter(torch.tensor(a, dtype=torch.float64))])
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0, 3.0])
def test_what_is_not_permitted_has_no_weight_and_no_gradient(
    alpha: float, make: Callable[[float], float | Tensor]
) -> None:
    scores = draw(3, 8)
    scores[0, ::2] = scores[1] = scores[2, 1:] = -math.inf
    scores.requires_grad_()
    normalizer = mk.Entmax(make(alpha))
    weights = normalizer.weigh(scores)
    assert_close(weights[0, 1::2], normalizer.weigh(scores[0, 1::2]))
    assert weights[0, ::2].tolist() == [0.0] * 4
    assert weights[1].tolist() == [0.0] * 8
    assert weights[2].tolist() == [1.0] + [0.0] * 7
    leaves = [scores, *normalizer.parameters()]
    slopes = torch.autograd.grad((weights * draw(3, 8, seed=1)).sum(), leaves)
    assert all(bool(x.isfinite().all()) for x in slopes)
    assert slopes[0][scores == -math.inf].tolist() == [0.0] * 19
    assert normalizer.weigh(torch.zeros(2, 0)).shape == (2, 0)


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_long_rows_in_float32(alpha: float) -> None:
    """One key above twenty thousand almost equal ones, just at the threshold, which differ in their last digits."""
    rows = (draw(20_000, seed=9) * 1e-5 - 0.995 / (alpha - 1)).float()
    rows[0] = 0.0
    truth = mk.Entmax(alpha).weigh(rows.double())
    weights = mk.Entmax(alpha).weigh(rows)
    assert int((truth > 0).sum()) > 1000
    assert float((weights.double() - truth).abs().sum()) < 2e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [float, lambda a: torch.tensor([a, a])])
def test_half_precision_is_rounded_once(dtype: torch.dtype, make: Callable[[float], float | Tensor]) -> None:
    scores = draw(2, 5, 40, dtype=dtype)
    for alpha in torch.tensor([1.1, 1.5, 2.0, 3.3], dtype=dtype).tolist():
        normalizer = mk.Entmax(make(alpha)).to(dtype)
        weights = normalizer.weigh(scores)
        assert weights.dtype == dtype
        truth = mk.Entmax(alpha).weigh(scores.double())
        assert_close(weights.double(), truth.to(dtype).double(), rtol=torch.finfo(dtype).eps, atol=1e-3 * (alpha > 2))


def test_nan_comes_out_as_nan() -> None:
    rows = draw(2, 5)
    rows[0, 3] = math.nan
    for alpha in NUMBERS:
        weights = mk.Entmax(alpha).weigh(rows)
        assert bool(weights[0].isnan().any()) and bool(weights[1].isfinite().all())


def test_alpha_must_be_above_one() -> None:
    for alpha in (1.0, 0.5, torch.tensor([1.5, 1.0]), nn.Parameter(torch.tensor(0.9))):
        with pytest.raises(ValueError, match=r"Entmax\(alpha=…\): every entry must be above 1"):
            mk.Entmax(alpha)
    with pytest.raises(ValueError, match="expected a finite number"):
        mk.Entmax(math.inf)
    with pytest.raises(TypeError, match="expected a number"):
        mk.Entmax("1.5")  # type: ignore[arg-type]
