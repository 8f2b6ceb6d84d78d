"""The variance of a score q·k: derived line by line with sympy, and predicted in numbers with torch.

Derivations (they need sympy): `independent_entries`, `independent_vectors`, `jointly_gaussian`, `aligned_entries`.
Predictions (torch alone): `sample_moments`, `dot_product_mean`, `dot_product_variance`.

Every line of a derivation is made from the line above it by a rule in `expectation.py`; none is typed in.

Source: Vaswani et al. 2017, section 3.2.1, footnote 4 (independent entries); Isserlis 1918 (products of jointly
Gaussian variables); the general formulas are derived here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matchkernel.theory.derivation import Derivation, Step, require_sympy

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class _Symbols:
    """The symbols all derivations share: q, k, d, two indices, means, covariances, and their names as matrices."""

    def __init__(self) -> None:
        sympy = require_sympy()
        self.d = sympy.Symbol("d_k", integer=True, positive=True)
        self.i, self.j = sympy.symbols("i j", integer=True, positive=True)
        self.q, self.k = sympy.IndexedBase("q"), sympy.IndexedBase("k")
        self.mean = {v: sympy.IndexedBase(sympy.Symbol(f"mu^{v}")) for v in (self.q, self.k)}
        self.covariance = {v: sympy.IndexedBase(sympy.Symbol(f"Sigma^{v}")) for v in (self.q, self.k)}
        self.cross = sympy.IndexedBase("C")
        self.rho = sympy.Symbol("rho", real=True)
        self.score = sympy.Sum(self.q[self.i] * self.k[self.i], (self.i, 1, self.d))
        self.matrices = {
            **{self.mean[v]: sympy.MatrixSymbol(f"mu_{v}", self.d, 1) for v in (self.q, self.k)},
            **{self.covariance[v]: sympy.MatrixSymbol(f"Sigma_{v}", self.d, self.d) for v in (self.q, self.k)},
            self.cross: sympy.MatrixSymbol("C", self.d, self.d),
        }

    @property
    def vectors(self) -> tuple[Any, Any]:
        return (self.q, self.k)

    def mean_of(self, entry: Any) -> Any:
        return self.mean[entry.base][entry.indices]

    def covariance_of(self, a: Any, b: Any) -> Any:
        """Σ of one vector (symmetric: smaller index first), or C, whose row belongs to q and whose column to k."""
        if a.base == b.base:
            return self.covariance[a.base][tuple(sorted((a.indices[0], b.indices[0]), key=str))]
        query, key = (a, b) if a.base == self.q else (b, a)
        return self.cross[query.indices[0], key.indices[0]]

    def to_matrices(self, expression: Any) -> Any:
        from matchkernel.theory import expectation as rules

        return rules.sums_to_matrices(expression, self.matrices, tuple(self.covariance.values()))


class _Chain:
    """Collects steps: each applies a rule to the line above and notes the reason."""

    def __init__(self, start: Any) -> None:
        self.line = start
        self.steps: list[Step] = []

    def then(self, reason: str, *rules: Callable[[Any], Any]) -> _Chain:
        sympy = require_sympy()
        line = self.line
        for rule in rules:
            line = rule(line)
        if line == self.line:
            raise RuntimeError(f"the rule for {reason!r} changed nothing in {line}")
        self.steps.append(Step(sympy.Eq(self.line, line, evaluate=False), reason))
        self.line = line
        return self

    def close(self, title: str) -> Derivation:
        return Derivation(title, tuple(self.steps))


def _opened(symbols: _Symbols) -> _Chain:
    """The lines all variances begin with: definition, square written as a double sum, linearity."""
    from matchkernel.theory import expectation as rules

    def inside_square(line: Any) -> Any:
        return line.replace(
            lambda node: isinstance(node, rules.Expectation) and node.args[0].is_Pow,
            lambda node: rules.Expectation(rules.square_to_double_sum(node.args[0], symbols.j)),
        )

    return (
        _Chain(rules.Variance(symbols.score))
        .then("the variance is the mean square minus the squared mean", rules.variance_by_moments)
        .then("a squared sum is a double sum", inside_square)
        .then("the expectation of a sum is the sum of expectations", lambda e: rules.linearity(e, symbols.vectors))
    )


def independent_entries() -> Derivation:
    """Var(q·k) = d_k, line by line, for uncorrelated entries of mean 0 and variance 1, q independent of k.

    Returns a `Derivation` (7 steps). Only moments are used, so no distribution is assumed. Raises ImportError without
    sympy. Cost: well under a second.
    """
    from matchkernel.theory import expectation as rules

    sympy, s = require_sympy(), _Symbols()

    def delta(a: Any, b: Any) -> Any:
        return sympy.KroneckerDelta(a.indices[0], b.indices[0])

    return (
        _opened(s)
        .then("q is independent of k", lambda e: rules.independence(e, s.vectors))
        .then(
            "mean 0, variance 1, entries uncorrelated (1 if i = j, else 0)",
            lambda e: rules.moments(e, lambda a: sympy.Integer(0), delta),
            lambda e: e.replace(lambda n: isinstance(n, sympy.Sum) and n.function == 0, lambda n: sympy.Integer(0)),
        )
        .then("only the terms with i = j are left", rules.contract_delta)
        .then("count them", lambda e: e.doit())
        .close("Var(q·k), independent standard entries")
    )


def independent_vectors() -> Derivation:
    """Var(q·k) = tr(Σ_q Σ_k) + μ_qᵀ Σ_k μ_q + μ_kᵀ Σ_q μ_k, line by line, for q independent of k.

    Entries may have any means, variances and correlations inside each vector; no distribution is assumed. Returns a
    `Derivation` (7 steps). Raises ImportError without sympy. Cost: under a second.
    """
    from matchkernel.theory import expectation as rules

    s = _Symbols()
    return (
        _opened(s)
        .then("q is independent of k", lambda e: rules.independence(e, s.vectors))
        .then(
            "a mean product is the covariance plus the product of means",
            lambda e: rules.moments(e, s.mean_of, s.covariance_of),
        )
        .then(
            "multiply out; the products of four means cancel",
            lambda e: rules.join_sums(rules.square_to_double_sum(e, s.j)),
        )
        .then("write the sums as matrix products", s.to_matrices)
        .close("Var(q·k), independent vectors, any means and covariances")
    )


def jointly_gaussian() -> Derivation:
    """Var(q·k) for jointly Gaussian q and k with cross-covariance C = Cov(q, k), line by line.

    tr(Σ_q Σ_k) + tr(C C) + μ_qᵀ Σ_k μ_q + μ_kᵀ Σ_q μ_k + 2 μ_kᵀ C μ_q. Without the Gaussian assumption, fourth
    cumulants would stay in it. Returns a `Derivation` (6 steps). Raises ImportError without sympy.
    """
    from matchkernel.theory import expectation as rules

    s = _Symbols()
    return (
        _opened(s)
        .then(
            "Isserlis: sum over all ways to pair entries or leave them as means",
            lambda e: rules.gaussian_moments(e, s.mean_of, s.covariance_of),
        )
        .then("multiply out and cancel", lambda e: rules.join_sums(rules.square_to_double_sum(e, s.j)))
        .then("write the sums as matrix products", s.to_matrices)
        .close("Var(q·k), jointly Gaussian vectors")
    )


def aligned_entries() -> tuple[Derivation, Derivation]:
    """Mean ρ·d_k and variance d_k·(1 + ρ²) when each q_i has correlation ρ with its own k_i.

    Entries are jointly Gaussian, of mean 0 and variance 1. ρ = 1 is q = k, whose score is chi-square with d_k degrees
    of freedom: mean d_k, variance 2·d_k. Returns two `Derivation`s, of the mean and of the variance. Raises
    ImportError without sympy.
    """
    from matchkernel.theory import expectation as rules

    sympy, s = require_sympy(), _Symbols()

    def zero(entry: Any) -> Any:
        return sympy.Integer(0)

    def correlated(a: Any, b: Any) -> Any:
        same = sympy.KroneckerDelta(a.indices[0], b.indices[0])
        return same if a.base == b.base else s.rho * same

    def pair_up(line: Any) -> Any:
        return rules.gaussian_moments(line, zero, correlated)

    mean = (
        _Chain(rules.Expectation(s.score))
        .then("the expectation of a sum is the sum of expectations", lambda e: rules.linearity(e, s.vectors))
        .then("each pair has correlation ρ", pair_up)
        .then("add them up", lambda e: e.doit())
        .close("E[q·k], aligned entries")
    )
    variance = (
        _opened(s)
        .then("Isserlis: sum over all ways to pair entries", pair_up)
        .then("multiply out and cancel", lambda e: rules.join_sums(rules.square_to_double_sum(e, s.j)))
        .then("only the terms with i = j are left", rules.contract_delta)
        .then("add them up", lambda e: sympy.factor(e.doit()))
        .close("Var(q·k), aligned entries")
    )
    return mean, variance


def sample_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean μ = (1/n) Σᵢ xᵢ and covariance Σ = (1/n) Σᵢ (xᵢ − μ)(xᵢ − μ)ᵀ of the rows of x.

    x (…, n, d) → mean (…, d), covariance (…, d, d), in x's units and units². Divided by n, not n − 1: these are the
    moments of the rows themselves. With them `dot_product_variance` is exact for the scores of all pairs of rows.
    Raises ValueError unless x has two dimensions or more and a row. Cost: n·d² multiplications.
    """
    if x.ndim < 2 or x.shape[-2] == 0:
        raise ValueError(f"x must have shape (…, n, d) with n ≥ 1, got {tuple(x.shape)}")
    mean = x.mean(-2)
    centred = x - mean.unsqueeze(-2)
    return mean, centred.mT @ centred / x.shape[-2]


def dot_product_mean(query_mean: Tensor, key_mean: Tensor, cross_covariance: Tensor | None = None) -> Tensor:
    """E[q·k] = μ_q·μ_k + tr(C).

    query_mean, key_mean (…, d); cross_covariance C (…, d, d), C[a, b] = Cov(q_a, k_b), none means q and k are
    uncorrelated. Returns (…). True for every distribution. Raises ValueError when shapes do not fit.
    """
    d = _width(query_mean, key_mean)
    mean = (query_mean * key_mean).sum(-1)
    if cross_covariance is None:
        return mean
    _require_table("cross_covariance", cross_covariance, d)
    return mean + cross_covariance.diagonal(dim1=-2, dim2=-1).sum(-1)


def dot_product_variance(
    query_mean: Tensor,
    key_mean: Tensor,
    query_covariance: Tensor,
    key_covariance: Tensor,
    cross_covariance: Tensor | None = None,
) -> Tensor:
    """Var(q·k) = tr(Σ_q Σ_k) + μ_qᵀ Σ_k μ_q + μ_kᵀ Σ_q μ_k, and with C also tr(C C) + 2 μ_kᵀ C μ_q.

    Means (…, d), covariances (…, d, d), C[a, b] = Cov(q_a, k_b). Without C: exact for q independent of k, whatever
    their distributions. With C: exact for jointly Gaussian q and k. Returns (…), in score units². Leading dimensions
    broadcast. Raises ValueError when shapes do not fit. Cost: d² multiplications per entry of the result.
    """
    d = _width(query_mean, key_mean)
    _require_table("query_covariance", query_covariance, d)
    _require_table("key_covariance", key_covariance, d)
    variance = (
        (query_covariance * key_covariance.mT).sum((-2, -1))
        + _form(query_mean, key_covariance, query_mean)
        + _form(key_mean, query_covariance, key_mean)
    )
    if cross_covariance is None:
        return variance
    _require_table("cross_covariance", cross_covariance, d)
    return (
        variance
        + (cross_covariance * cross_covariance.mT).sum((-2, -1))
        + 2 * _form(key_mean, cross_covariance, query_mean)
    )


def _form(left: Tensor, table: Tensor, right: Tensor) -> Tensor:
    """leftᵀ · table · right, over leading dimensions."""
    return (left * (table @ right.unsqueeze(-1)).squeeze(-1)).sum(-1)


def _width(query_mean: Tensor, key_mean: Tensor) -> int:
    if query_mean.ndim == 0 or key_mean.ndim == 0 or query_mean.shape[-1] != key_mean.shape[-1]:
        raise ValueError(
            "query_mean and key_mean must have the same last dimension d, got shapes "
            f"{tuple(query_mean.shape)} and {tuple(key_mean.shape)}"
        )
    return query_mean.shape[-1]


def _require_table(name: str, table: Tensor, d: int) -> None:
    if table.shape[-2:] != (d, d):
        raise ValueError(f"{name} must have shape (…, {d}, {d}), got {tuple(table.shape)}")
