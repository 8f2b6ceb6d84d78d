"""Softcap and mixture: values pair by pair in plain Python, and what they must not lose of the kernels inside."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

import matchkernel as mk

sys.path.insert(0, str(Path(__file__).parent))
from kernels_under_test import NormColumn
from oracle import by_loop, draw, inputs, scaled_dot

Tensor = torch.Tensor
Score = Callable[[list[float], list[float]], float]


def _gaussian(q: list[float], k: list[float]) -> float:
    return -(math.dist(q, k) ** 2) / 2


# Softcap.


@pytest.mark.parametrize("limit", [0.5, 3.0, 50.0])
@pytest.mark.parametrize(
    ("kernel", "score"), [(mk.ScaledDot(), scaled_dot), (mk.Gaussian(), _gaussian)], ids=["dot", "gaussian"]
)
def test_a_capped_score_in_a_loop(kernel: mk.MatchKernel, score: Score, limit: float) -> None:
    q, k, v = inputs(d=4)
    out = mk.attend(4 * q, k, v, mk.Softcap(kernel, limit))
    assert_close(out, by_loop(4 * q, k, v, lambda a, b: limit * math.tanh(score(a, b) / limit)))


def test_the_cap_is_gemma_2s() -> None:
    q, k, v = inputs(2, 4, n=9, m=9, d=16)
    k, v = k[:, :2], v[:, :2]
    module = nn.Module()
    module.num_key_value_groups, module.training = 2, False  # type: ignore[assignment]
    causal = torch.zeros(9, 9, dtype=torch.float64).masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    truth, _ = eager_attention_forward(module, 9 * q, k, v, causal, scaling=0.25, softcap=5.0)
    out = mk.attend(9 * q, k, v, mk.Softcap(mk.ScaledDot(), 5.0), causal=True)
    # Its softmax is taken in float32.
    assert_close(out, truth.transpose(1, 2), rtol=1e-4, atol=1e-6)


def test_a_limit_per_head_and_a_learned_one() -> None:
    q, k, _ = inputs(2, 2)
    plain = mk.scores(q, k)
    limits = torch.tensor([0.5, 2.0], dtype=torch.float64)
    capped = torch.stack([limits[h] * torch.tanh(plain[:, h] / limits[h]) for h in range(2)], 1)
    assert_close(mk.scores(q, k, mk.Softcap(mk.ScaledDot(), limits)), capped)
    learned = nn.Parameter(limits.clone())
    down = draw(*plain.shape, seed=5)
    (mk.scores(q, k, mk.Softcap(mk.ScaledDot(), learned)) * down).sum().backward()
    ratio = plain / limits[:, None, None]
    slope = ratio.tanh() - ratio * (1 - ratio.tanh() ** 2)
    assert learned.grad is not None
    assert_close(learned.grad, (down * slope).sum((0, 2, 3)))


@pytest.mark.parametrize("inside", [NormColumn(), mk.Gaussian(1.3), 0.5 * mk.Gaussian() + mk.Dot()], ids=repr)
@pytest.mark.parametrize("wrap", [lambda x: mk.Softcap(x, 2.0), lambda x: mk.mixture(x, mk.Dot())], ids=["cap", "mix"])
def test_terms_of_the_query_alone_are_kept_inside(inside: mk.MatchKernel, wrap: Any) -> None:
    """A softmax over the keys would not see −|q|²/2; tanh and the logarithm do."""
    q, k, v = inputs(2, d=4)
    outer = wrap(inside)
    full = mk.scores(q, k, inside)
    capped = 2.0 * torch.tanh(full / 2.0)
    mixed = (full.exp() + (q @ k.mT).exp()).log()
    table = capped if isinstance(outer, mk.Softcap) else mixed
    assert_close(mk.attend(q, k, v, outer), table.softmax(-1) @ v)
    encoded = outer.encode(q, k, torch.arange(5), torch.arange(7), up_to_row_shift=True)
    assert_close(outer.match(*encoded), table)


def test_a_cap_undoes_positive_definiteness_of_the_dot() -> None:
    """So the fact is None, for any limit: tanh has a negative Taylor coefficient."""
    assert mk.Softcap(mk.Dot(), 50.0).positive_definite is None
    x = draw(60, 2)
    table = mk.scores(x, x, mk.Softcap(mk.Dot(), 1.0)).exp()
    assert float(torch.linalg.eigvalsh(table)[0]) < -1e-3


@pytest.mark.parametrize("kernel", [mk.Dot(), mk.Gaussian(), mk.Bilinear(4), mk.Rotary(4)], ids=repr)
def test_what_is_symmetric_or_invariant_stays_so(kernel: mk.MatchKernel) -> None:
    capped = mk.Softcap(kernel, 3.0)
    for fact in ("symmetric", "translation_invariant", "position_invariant"):
        assert getattr(capped, fact) is getattr(kernel, fact)


# Mixture.


def test_a_mixture_adds_weights_in_a_loop() -> None:
    q, k, v = inputs(d=4)

    def score(a: list[float], b: list[float]) -> float:
        return math.log(0.25 * math.exp(scaled_dot(a, b)) + 3.0 * math.exp(_gaussian(a, b)))

    assert_close(
        mk.attend(q, k, v, mk.mixture(mk.ScaledDot(), mk.Gaussian(), weights=(0.25, 3.0))), by_loop(q, k, v, score)
    )


def test_three_parts_and_no_weights() -> None:
    q, k, _ = inputs(2, 3)
    parts = (mk.Dot(), mk.Gaussian(0.7), mk.ALiBi(3))
    truth = torch.stack([mk.scores(q, k, part).exp() for part in parts]).sum(0).log()
    assert_close(mk.scores(q, k, mk.mixture(*parts)), truth)


def test_a_mixture_of_one_is_itself() -> None:
    q, k, v = inputs(2)
    assert_close(mk.attend(q, k, v, mk.mixture(mk.Cosine(0.3))), mk.attend(q, k, v, mk.Cosine(0.3)))
    assert_close(mk.scores(q, k, mk.mixture(mk.Dot(), weights=[2.0])), mk.scores(q, k, mk.Dot()) + math.log(2.0))


def test_a_common_factor_of_the_weights_is_not_seen() -> None:
    q, k, v = inputs(2)
    one, ten = (mk.mixture(mk.Dot(), mk.Gaussian(), weights=w) for w in ([0.1, 0.3], [1.0, 3.0]))
    assert_close(mk.attend(q, k, v, one), mk.attend(q, k, v, ten))


def test_learned_weights_take_the_share_of_their_part() -> None:
    """d s / d log w_c is the part's share of the weight: a posterior, as in a mixture model."""
    logs = nn.Parameter(torch.tensor([0.4, -0.7], dtype=torch.float64))
    q, k, _ = inputs(2)
    kernel = mk.mixture(mk.Dot(), mk.Gaussian(), log_weights=logs)
    table = mk.scores(q, k, kernel)
    parts = torch.stack([mk.scores(q, k, mk.Dot()) + 0.4, mk.scores(q, k, mk.Gaussian()) - 0.7])
    assert_close(table, parts.exp().sum(0).log())
    down = draw(*table.shape, seed=5)
    (table * down).sum().backward()
    assert logs.grad is not None
    assert_close(logs.grad, (parts.softmax(0) * down).sum((1, 2, 3)))
    assert list(kernel.state_dict()) == ["log_weights"]
    assert [name for name, _ in kernel.named_parameters()] == ["log_weights"]


def test_scores_a_thousand_apart() -> None:
    q, k, v = inputs(2)
    far = mk.mixture(1000.0 * mk.Dot(), -1000.0 * mk.Dot())
    leaf = q.clone().requires_grad_()
    out = mk.attend(leaf, k, v, far)
    assert_close(out, (1000.0 * (q @ k.mT).abs()).softmax(-1) @ v)
    out.sum().backward()
    assert leaf.grad is not None and bool(leaf.grad.isfinite().all())


def test_facts_of_a_mixture() -> None:
    both = mk.mixture(mk.Dot(), mk.Gaussian())
    assert both.positive_definite is True and both.symmetric is True and both.position_invariant is True
    assert both.translation_invariant is None and both.score_positive_definite is None
    assert mk.mixture(mk.Dot(), mk.Bilinear(4)).positive_definite is None


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: mk.Softcap(mk.Dot(), 0.0), ValueError, "above 0"),
        (lambda: mk.Softcap(torch.tanh, 2.0), TypeError, "Softcap.*expected match kernels"),
        (lambda: mk.mixture(), ValueError, "at least one kernel"),
        (lambda: mk.mixture(mk.Dot(), 2.0), TypeError, "mixture.*got float"),
        (lambda: mk.mixture(mk.Dot(), weights=[1.0, 2.0]), ValueError, "expected 1 finite"),
        (lambda: mk.mixture(mk.Dot(), mk.Dot(), weights=[1.0, 0.0]), ValueError, "above 0"),
        (lambda: mk.mixture(mk.Dot(), log_weights=torch.zeros(1)), TypeError, "Parameter"),
        (lambda: mk.mixture(mk.Dot(), log_weights=nn.Parameter(torch.zeros(2))), ValueError, r"shape \(1,\)"),
        (lambda: mk.mixture(mk.Dot(), weights=[1], log_weights=nn.Parameter(torch.zeros(1))), ValueError, "one of"),
    ],
)
def test_arguments_are_checked(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_reprs_read_like_the_formula() -> None:
    assert repr(mk.mixture(mk.ScaledDot(), mk.ALiBi(heads=8))) == "mixture(ScaledDot(), ALiBi(heads=8))"
    assert repr(mk.mixture(mk.Dot(), mk.Dot(), weights=(0.25, 3))) == "mixture(Dot(), Dot(), weights=(0.25, 3))"
    assert repr(mk.Softcap(0.5 * mk.Dot() + mk.ALiBi(8), 50)) == "Softcap(0.5 * Dot() + ALiBi(heads=8), limit=50)"
    assert repr(0.5 * mk.mixture(mk.Dot(), mk.Gaussian(2.0)) + mk.Softcap(mk.Dot(), 3)) == (
        "0.5 * mixture(Dot(), Gaussian(bandwidth=2)) + Softcap(Dot(), limit=3)"
    )
