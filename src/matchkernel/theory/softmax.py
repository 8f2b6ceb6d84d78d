"""How the weights of a softmax move when a score moves, derived with sympy."""

from __future__ import annotations

from typing import Any

from matchkernel.theory.derivation import Derivation, Step, require_sympy


def softmax_jacobian(n: int = 3) -> Derivation:
    """∂α/∂s = diag(α) − ααᵀ for a softmax over n scores, entry by entry, then as one matrix.

    Returns a `Derivation` of separate equations: one diagonal entry, one entry beside it, the whole table. All n²
    entries are differentiated and compared; ArithmeticError if one differed. Raises ValueError for n < 2 (one weight is
    always 1), ImportError without sympy. Cost: n² symbolic derivatives, for n ≤ 5 under a second.
    """
    if n < 2:
        raise ValueError(f"n must be at least 2, got {n}: a softmax over one score is the constant 1")
    sympy = require_sympy()
    scores = sympy.symbols(f"s_1:{n + 1}", real=True)
    weights = sympy.symbols(f"alpha_1:{n + 1}", positive=True)
    exponentials = [sympy.exp(score) for score in scores]
    total = sympy.Add(*exponentials)
    softmax = [exponential / total for exponential in exponentials]

    def in_weights(expression: Any) -> Any:
        """Replace exp(s_i) / Σ exp by α_i: with Z = Σ exp, exp(s_i) = α_i Z, and Z cancels."""
        z = sympy.Symbol("Z", positive=True)

        def exponential(argument: Any) -> Any:
            powers = argument.as_coefficients_dict()
            return sympy.Mul(*((weights[scores.index(score)] * z) ** power for score, power in powers.items()))

        replaced = expression.xreplace({total: z}).replace(sympy.exp, exponential)
        return sympy.expand(replaced)

    def steps_for(row: int, column: int) -> list[Step]:
        derivative = sympy.Derivative(softmax[row], scores[column], evaluate=False)
        done = sympy.diff(softmax[row], scores[column])
        entry = in_weights(done)
        return [
            Step(sympy.Eq(derivative, done, evaluate=False), "the quotient rule"),
            Step(sympy.Eq(done, entry, evaluate=False), "each fraction is a weight"),
        ]

    jacobian = sympy.Matrix(n, n, lambda row, column: in_weights(sympy.diff(softmax[row], scores[column])))
    alpha = sympy.Matrix(weights)
    closed = sympy.diag(*weights) - alpha * alpha.T
    if sympy.expand(jacobian - closed) != sympy.zeros(n, n):
        raise ArithmeticError(f"the derivatives {jacobian} are not diag(α) − ααᵀ = {closed}")
    minus_outer = sympy.MatMul(-1, alpha, alpha.T, evaluate=False)
    whole = sympy.Eq(jacobian, sympy.MatAdd(sympy.diag(*weights), minus_outer, evaluate=False), evaluate=False)
    last = Step(whole, "the table of all entries is diag(α) minus α times its transpose")
    return Derivation(f"the Jacobian of a softmax over {n} scores", (*steps_for(0, 0), *steps_for(0, 1), last))
