"""What a derivation is: equations in order, each with the rule that gives it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any


def require_sympy() -> ModuleType:
    """Return sympy, or raise an ImportError that says how to get it."""
    try:
        import sympy
    except ImportError as error:
        raise ImportError(
            "the derivations in matchkernel.theory need sympy, which is not installed: pip install 'matchkernel[book]'"
        ) from error
    module: ModuleType = sympy
    return module


def to_latex(expression: Any) -> str:
    """sympy's LaTeX of an expression, with what is subtracted after what it is subtracted from (a − b, not −b + a)."""
    require_sympy()
    from sympy.printing.latex import LatexPrinter

    class Printer(LatexPrinter):  # type: ignore[misc]
        def _as_ordered_terms(self, expr: Any, order: Any = None) -> list[Any]:
            terms = super()._as_ordered_terms(expr, order=order)
            return sorted(terms, key=lambda term: bool(term.could_extract_minus_sign()))

        def _print_MatAdd(self, expr: Any) -> str:
            terms = sorted((self._print(term) for term in expr.args), key=lambda text: text.startswith("-"))
            return " + ".join(terms).replace("+ -", "-")

    text: str = Printer().doprint(expression)
    return text


@dataclass(frozen=True)
class Step:
    """One line of a derivation: `equation` (a sympy equation, left = right) and the `reason` it holds."""

    equation: Any
    reason: str

    def _repr_latex_(self) -> str:
        return rf"$\displaystyle {to_latex(self.equation)}$"


@dataclass(frozen=True, repr=False)
class Derivation:
    """Equations in order. Iterate over its steps; `result` is what the first left side equals in the end.

    In a notebook it displays as one block: each reason, and under it the line that the reason gives. A left side that
    only repeats the right side above it is left out, as one would on paper.
    """

    title: str
    steps: tuple[Step, ...]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> Step:
        return self.steps[index]

    @property
    def result(self) -> Any:
        """First left side = last right side, for a chain in which every left side repeats the right side before it.

        Raises ValueError when the steps are separate equations and not one chain.
        """
        for before, after in zip(self.steps, self.steps[1:], strict=False):
            if before.equation.rhs != after.equation.lhs:
                raise ValueError(f"{self.title!r} is not one chain of equalities: read its steps, they are {len(self)}")
        return require_sympy().Eq(self.steps[0].equation.lhs, self.steps[-1].equation.rhs, evaluate=False)

    def __repr__(self) -> str:
        lines = [f"{self.title}:", f"    {self.steps[0].equation.lhs}"]
        above = self.steps[0].equation.lhs
        for step in self.steps:
            if step.equation.lhs != above:
                lines.append(f"    {step.equation.lhs}")
            above = step.equation.rhs
            lines.append(f"  = {above}    ({step.reason})")
        return "\n".join(lines)

    def _repr_latex_(self) -> str:
        rows: list[str] = []
        above = None
        for step in self.steps:
            left, right = step.equation.lhs, step.equation.rhs
            if left != above:
                rows.append(rf"& {to_latex(left)}")
            rows.append(rf"& \quad {{\small\text{{{step.reason}}}}}")
            rows.append(rf"& = {to_latex(right)}")
            above = right
        body = " \\\\\n".join(rows)
        return f"$\\displaystyle \\begin{{aligned}}\n{body}\n\\end{{aligned}}$"
