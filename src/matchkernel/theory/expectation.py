"""The rules of expectation, as functions that rewrite sympy expressions.

A random vector is an `IndexedBase` (q, k); its entries q[i] are the random variables, everything else is a constant.
Each rule returns a rewritten expression and knows no derivation: `variance.py` puts them in order. This module imports
sympy when it is imported, so import it only inside a function that has called `require_sympy`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
from sympy.core.function import Function

Expression = Any  # sympy ships no types


class Expectation(Function):  # type: ignore[misc]
    """E[x], never evaluated by itself: only the rules below open it."""

    nargs = 1

    def _latex(self, printer: Any, exp: str | None = None) -> str:
        text = rf"\mathbb{{E}}\left[{printer.doprint(self.args[0])}\right]"
        return text if exp is None else rf"{text}^{{{exp}}}"


class Variance(Function):  # type: ignore[misc]
    """Var(x), never evaluated by itself."""

    nargs = 1

    def _latex(self, printer: Any, exp: str | None = None) -> str:
        text = rf"\operatorname{{Var}}\left({printer.doprint(self.args[0])}\right)"
        return text if exp is None else rf"{text}^{{{exp}}}"


def variance_by_moments(expression: Expression) -> Expression:
    """Var(x) → E[x²] − E[x]²."""
    return expression.replace(Variance, lambda x: Expectation(x**2) - Expectation(x) ** 2)


def square_to_double_sum(expression: Expression, second_index: Expression) -> Expression:
    """(Σᵢ fᵢ)² → ΣᵢΣⱼ fᵢ fⱼ, wherever a sum over one index is squared."""

    def is_squared_sum(node: Expression) -> bool:
        return node.is_Pow and node.exp == 2 and isinstance(node.base, sympy.Sum) and len(node.base.limits) == 1

    def expand(node: Expression) -> Expression:
        index, low, high = node.base.limits[0]
        term = node.base.function
        return sympy.Sum(
            sympy.expand_mul(term * term.xreplace({index: second_index})), (index, low, high), (second_index, low, high)
        )

    return expression.replace(is_squared_sum, expand)


def is_random(expression: Expression, vectors: tuple[Expression, ...]) -> bool:
    """Whether an entry of one of the random vectors occurs in the expression."""
    return any(entry.base in vectors for entry in expression.atoms(sympy.Indexed))


def linearity(expression: Expression, vectors: tuple[Expression, ...]) -> Expression:
    """E[Σ f] → Σ E[f], E[a + b] → E[a] + E[b], E[c·x] → c·E[x] for constants c, and E[c] → c."""

    def open_up(inside: Expression) -> Expression:
        if isinstance(inside, sympy.Sum):
            return sympy.Sum(open_up(inside.function), *inside.limits)
        inside = sympy.expand_mul(inside)
        if inside.is_Add:
            return sympy.Add(*(open_up(term) for term in inside.args))
        constants = [factor for factor in sympy.Mul.make_args(inside) if not is_random(factor, vectors)]
        random = [factor for factor in sympy.Mul.make_args(inside) if is_random(factor, vectors)]
        expected = Expectation(sympy.Mul(*random)) if random else sympy.Integer(1)
        return sympy.Mul(*constants) * expected

    return expression.replace(Expectation, open_up)


def independence(expression: Expression, vectors: tuple[Expression, ...]) -> Expression:
    """E[a·b] → E[a]·E[b] when a holds entries of one vector only and b of another, the vectors being independent."""

    def factorise(inside: Expression) -> Expression:
        factors = sympy.Mul.make_args(inside)
        product = sympy.Integer(1)
        for vector in vectors:
            own = [factor for factor in factors if is_random(factor, (vector,))]
            if any(is_random(factor, tuple(v for v in vectors if v != vector)) for factor in own):
                raise ValueError(f"{inside} is not a product of entries: use linearity first")
            if own:
                product *= Expectation(sympy.Mul(*own))
        return product

    return expression.replace(Expectation, factorise)


def entries_of(product: Expression) -> list[Expression]:
    """The entries in a product, each as often as it occurs: q₁²k₂ → [q₁, q₁, k₂]."""
    entries: list[Expression] = []
    for factor in sympy.Mul.make_args(product):
        base, power = factor.as_base_exp()
        entries.extend([base] * int(power))
    return entries


def moments(
    expression: Expression,
    mean: Callable[[Expression], Expression],
    covariance: Callable[[Expression, Expression], Expression],
) -> Expression:
    """E[a] → mean(a) and E[a·b] → covariance(a, b) + mean(a)·mean(b). Higher products are left as they stand."""

    def known(inside: Expression) -> Expression:
        entries = entries_of(inside)
        if len(entries) == 1:
            return mean(entries[0])
        if len(entries) == 2:
            return covariance(*entries) + mean(entries[0]) * mean(entries[1])
        return Expectation(inside)

    return expression.replace(Expectation, known)


def gaussian_moments(
    expression: Expression,
    mean: Callable[[Expression], Expression],
    covariance: Callable[[Expression, Expression], Expression],
) -> Expression:
    """E[a·b·c·…] of jointly Gaussian entries → sum over all ways to pair some of them and leave the rest as means.

    Isserlis' theorem with means: E[x₁⋯xₙ] = Σ over partial pairings of Π covariance(pair) · Π mean(left over).
    """

    def expand(entries: list[Expression]) -> Expression:
        if not entries:
            return sympy.Integer(1)
        first, rest = entries[0], entries[1:]
        total = mean(first) * expand(rest)
        for position, partner in enumerate(rest):
            total += covariance(first, partner) * expand(rest[:position] + rest[position + 1 :])
        return total

    return expression.replace(Expectation, lambda inside: sympy.expand(expand(entries_of(inside))))


def join_sums(expression: Expression) -> Expression:
    """Σ f + c·Σ g → Σ (f + c·g) for sums over the same indices and ranges, with what cancels cancelled."""
    total, limits, rest = sympy.Integer(0), None, sympy.Integer(0)
    for term in sympy.Add.make_args(expression):
        factor, body = term.as_independent(sympy.Sum, as_Add=False)
        if isinstance(body, sympy.Sum) and limits in (None, body.limits):
            limits = body.limits
            total += factor * body.function
        else:
            rest += term
    return rest if limits is None else sympy.Sum(sympy.expand(total), *limits) + rest


def contract_delta(expression: Expression) -> Expression:
    """ΣᵢΣⱼ δᵢⱼ f(i, j) → Σᵢ f(i, i), for sums in which every term holds that δ and both indices share one range."""

    def contract(*args: Expression) -> Expression:
        body, limits = args[0], args[1:]
        unchanged = sympy.Sum(body, *limits)
        if len(limits) != 2 or limits[0][1:] != limits[1][1:]:
            return unchanged
        (first, low, high), (second, _, _) = limits
        delta = sympy.KroneckerDelta(first, second)
        terms = sympy.Add.make_args(sympy.expand(body))
        if not all(term.has(delta) for term in terms):
            return unchanged
        return sympy.Sum(
            sympy.Add(*terms).xreplace({delta: sympy.Integer(1)}).xreplace({second: first}), (first, low, high)
        )

    return expression.replace(sympy.Sum, contract)


class QuadraticForm(sympy.Expr):  # type: ignore[misc]
    """The number uᵀAw for column vectors u, w and a table A (sympy has no scalar of this kind)."""

    def __new__(cls, left: Expression, table: Expression, right: Expression) -> QuadraticForm:
        form: QuadraticForm = sympy.Expr.__new__(cls, left, table, right)
        return form

    is_commutative = True

    def doit(self, **hints: Any) -> Expression:
        left, table, right = (argument.doit(**hints) for argument in self.args)
        return sympy.Trace(left.T * table * right).doit()

    def _latex(self, printer: Any) -> str:
        left, table, right = (printer.doprint(argument) for argument in self.args)
        return rf"{left}^{{T}} {table} {right}"

    def _sympystr(self, printer: Any) -> str:
        left, table, right = (printer.doprint(argument) for argument in self.args)
        return f"{left}.T*{table}*{right}"


def sums_to_matrices(
    expression: Expression, names: dict[Expression, Expression], symmetric: tuple[Expression, ...]
) -> Expression:
    """Write sums over entries as matrix products: Σᵢⱼ AᵢⱼBᵢⱼ → tr(ABᵀ), Σᵢⱼ AᵢⱼAⱼᵢ → tr(AA), Σᵢⱼ Aᵢⱼuᵢwⱼ → uᵀAw.

    names: each indexed base → its matrix symbol (d × d, or d × 1 for a vector). symmetric: the bases whose table equals
    its transpose, so that the transpose is not written. Raises ValueError for a term of another form.
    """

    def table(entry: Expression, row: Expression) -> Expression:
        matrix = names[entry.base]
        return matrix if entry.base in symmetric or entry.indices[0] == row else matrix.T

    def as_matrix(term: Expression, first: Expression, second: Expression) -> Expression:
        number, entries = term.as_independent(sympy.Indexed, as_Add=False)
        factors = entries_of(entries)
        tables = [entry for entry in factors if len(entry.indices) == 2]
        vectors = {entry.indices[0]: names[entry.base] for entry in factors if len(entry.indices) == 1}
        if not all(set(entry.indices) == {first, second} for entry in tables):
            raise ValueError(f"{term} is not a trace or a quadratic form in {first}, {second}")
        if len(tables) == 2 and len(factors) == 2:
            return number * sympy.Trace(table(tables[0], first) * table(tables[1], second))
        if len(tables) == 1 and len(factors) == 3 and set(vectors) == {first, second}:
            if tables[0].base not in symmetric:  # start from the table's own row, so that no transpose is needed
                first, second = tables[0].indices
            return number * QuadraticForm(vectors[first], names[tables[0].base], vectors[second])
        raise ValueError(f"{term} is not a trace or a quadratic form in {first}, {second}")

    def convert(*args: Expression) -> Expression:
        body, limits = args[0], args[1:]
        if len(limits) != 2:
            raise ValueError(f"expected a sum over two indices, got limits {limits}")
        return sympy.Add(*(as_matrix(term, limits[0][0], limits[1][0]) for term in sympy.Add.make_args(body)))

    return expression.replace(sympy.Sum, convert)
