"""An independent reading of a derivation's lines: every E and Var is computed by going through all outcomes.

Knows none of the rules in `matchkernel.theory.expectation`; a line is only ever evaluated in numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sympy

from matchkernel.theory.expectation import Expectation, QuadraticForm, Variance

# Three points with the moments of a standard normal up to order 5 (Gauss-Hermite): products of four entries are exact.
THREE_POINTS = ((1 / 6, -(3**0.5)), (2 / 3, 0.0), (1 / 6, 3**0.5))


@dataclass
class Outcome:
    probability: float
    vectors: dict[str, np.ndarray]


@dataclass
class World:
    """d, all outcomes of (q, k), and numbers for every other name: tables, vectors, scalars."""

    d: int
    outcomes: Sequence[Outcome]
    names: dict[str, Any] = field(default_factory=dict)

    def value(self, node: Any, bound: dict[Any, int] | None = None, drawn: Outcome | None = None) -> Any:
        bound = bound or {}

        def read(part: Any) -> Any:
            return self.value(part, bound, drawn)

        if node.is_Number:
            return float(node)
        if isinstance(node, Expectation):
            return sum(o.probability * self.value(node.args[0], bound, o) for o in self.outcomes)
        if isinstance(node, Variance):
            values = [self.value(node.args[0], bound, o) for o in self.outcomes]
            mean = sum(o.probability * x for o, x in zip(self.outcomes, values, strict=True))
            return sum(o.probability * (x - mean) ** 2 for o, x in zip(self.outcomes, values, strict=True))
        if isinstance(node, sympy.Sum):
            ranges = [range(int(low), self.d + 1) for _, low, _ in node.limits]
            indices = [limit[0] for limit in node.limits]
            return sum(
                self.value(node.function, {**bound, **dict(zip(indices, where, strict=True))}, drawn)
                for where in itertools.product(*ranges)
            )
        if isinstance(node, sympy.Indexed):
            where = tuple(bound[index] - 1 for index in node.indices)
            name = str(node.base)
            if name in ("q", "k"):
                assert drawn is not None, f"{node} stands outside every expectation"
                return drawn.vectors[name][where]
            return self.names[name][where]
        if isinstance(node, sympy.KroneckerDelta):
            return float(bound[node.args[0]] == bound[node.args[1]])
        if isinstance(node, QuadraticForm):
            left, table, right = (read(argument) for argument in node.args)
            return float(left @ table @ right)
        if isinstance(node, sympy.Trace):
            return float(np.trace(read(node.arg)))
        if isinstance(node, sympy.Transpose):
            return read(node.arg).T
        if isinstance(node, sympy.MatMul):
            return np.linalg.multi_dot([read(factor) for factor in node.args])
        if isinstance(node, sympy.MatPow):
            return np.linalg.matrix_power(read(node.base), int(node.exp))
        if isinstance(node, sympy.Symbol | sympy.MatrixSymbol):
            return float(self.d) if str(node) == "d_k" else self.names[str(node)]
        if node.is_Add:
            return sum(read(term) for term in node.args)
        if node.is_Mul:
            return float(np.prod([read(factor) for factor in node.args]))
        if node.is_Pow:
            return read(node.base) ** int(node.exp)
        raise TypeError(f"cannot read {type(node).__name__}: {node}")


def from_latent(mixing: np.ndarray, mean: np.ndarray, d: int) -> list[Outcome]:
    """All outcomes of (q, k) = mean + mixing·z, z independent with the moments of a normal up to order 5."""
    outcomes = []
    for points in itertools.product(THREE_POINTS, repeat=mixing.shape[1]):
        x = mean + mixing @ np.array([point for _, point in points])
        probability = float(np.prod([p for p, _ in points]))
        outcomes.append(Outcome(probability, {"q": x[:d], "k": x[d:]}))
    return outcomes
