"""The softmax Jacobian derived with sympy, against autograd."""

from __future__ import annotations

import itertools
import sys

import pytest
import sympy
import torch

from matchkernel.theory.softmax import softmax_jacobian


@pytest.mark.parametrize("n", [2, 3, 5])
def test_every_line_holds_at_real_scores(n):
    """Both sides of each line, with numbers for s and α = softmax(s)."""
    scores = torch.linspace(-1.5, 2.0, n, dtype=torch.float64) ** 3
    weights = scores.softmax(-1)
    values = {
        **{sympy.Symbol(f"s_{i + 1}", real=True): float(s) for i, s in enumerate(scores)},
        **{sympy.Symbol(f"alpha_{i + 1}", positive=True): float(a) for i, a in enumerate(weights)},
    }
    for step in softmax_jacobian(n):
        left, right = (sympy.Matrix([sympy.sympify(side.doit()).subs(values)]) for side in step.equation.args)
        assert float((left - right).norm()) < 1e-12, step.reason


@pytest.mark.parametrize("n", [2, 4])
def test_the_table_is_autograds(n):
    scores = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    weights = scores.softmax(-1)
    expected = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), scores)
    table = softmax_jacobian(n)[-1].equation.lhs
    derived = table.subs({sympy.Symbol(f"alpha_{i + 1}", positive=True): float(a) for i, a in enumerate(weights)})
    torch.testing.assert_close(torch.tensor(derived.tolist(), dtype=torch.float64), expected)


def test_steps_and_their_reasons():
    steps = softmax_jacobian(3)
    assert [step.reason for step in steps][:2] == ["the quotient rule", "each fraction is a weight"]
    assert len(steps) == 5
    assert all(step.reason in steps._repr_latex_() for step in steps)
    a1, a2 = sympy.symbols("alpha_1 alpha_2", positive=True)
    assert [steps[1].equation.rhs, steps[3].equation.rhs] == [a1 - a1**2, -a1 * a2]
    for first, second in itertools.pairwise(steps[:2]):
        assert first.equation.rhs == second.equation.lhs


def test_it_is_not_one_chain():
    with pytest.raises(ValueError, match="not one chain"):
        _ = softmax_jacobian(2).result


def test_one_score_is_an_error():
    with pytest.raises(ValueError, match="n must be at least 2, got 1"):
        softmax_jacobian(1)


def test_without_sympy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sympy", None)
    with pytest.raises(ImportError, match="need sympy"):
        softmax_jacobian()
