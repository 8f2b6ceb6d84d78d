"""The derivations are true line by line, and the predictions are right."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import sympy
import torch

from matchkernel.theory import variance
from matchkernel.theory.derivation import Derivation, Step
from tests.matchkernel.theory.enumeration import Outcome, World, from_latent

MEAN_Q, MEAN_K = np.array([0.7, -0.4]), np.array([-1.1, 0.3])
MIX_Q, MIX_K = np.array([[1.2, 0.0], [-0.5, 0.6]]), np.array([[0.4, 0.9], [0.0, -1.3]])


def names(mean_q, mean_k, covariance_q, covariance_k, cross=None):
    """The same numbers under the names of the entries (mu^q) and of the matrices (mu_q)."""
    table = {"mu^q": mean_q, "mu^k": mean_k, "Sigma^q": covariance_q, "Sigma^k": covariance_k, "C": cross}
    return {**table, **{name.replace("^", "_"): value for name, value in table.items()}}


def independent_world() -> World:
    """Skewed, correlated, with means: three lopsided outcomes for q, four for k, every pair possible."""
    q_values = [(0.5, np.array([1.0, 2.0])), (0.3, np.array([-1.0, 0.5])), (0.2, np.array([3.0, -2.0]))]
    k_values = [
        (0.1, np.array([4.0, 1.0])),
        (0.4, np.array([0.0, -1.0])),
        (0.25, np.array([-2.0, 2.0])),
        (0.25, np.array([1.0, 1.0])),
    ]

    def moments(values):
        mean = sum(p * x for p, x in values)
        return mean, sum(p * np.outer(x - mean, x - mean) for p, x in values)

    (mean_q, covariance_q), (mean_k, covariance_k) = moments(q_values), moments(k_values)
    outcomes = [Outcome(p * r, {"q": x, "k": y}) for (p, x), (r, y) in itertools.product(q_values, k_values)]
    return World(2, outcomes, names(mean_q, mean_k, covariance_q, covariance_k))


def gaussian_world() -> World:
    """q and k mixed from three shared latent numbers: correlated inside and across, with means."""
    mixing = np.array([[1.0, 0.3, 0.0], [-0.4, 0.8, 0.5], [0.6, -0.2, 0.9], [0.1, 1.1, -0.7]])
    mean = np.concatenate([MEAN_Q, MEAN_K])
    covariance = mixing @ mixing.T
    world_names = names(MEAN_Q, MEAN_K, covariance[:2, :2], covariance[2:, 2:], covariance[:2, 2:])
    return World(2, from_latent(mixing, mean, 2), world_names)


def standard_world(d: int) -> World:
    """2·d independent signs: mean 0, variance 1, and nothing Gaussian about them."""
    signs = itertools.product((-1.0, 1.0), repeat=2 * d)
    return World(d, [Outcome(0.25**d, {"q": np.array(s[:d]), "k": np.array(s[d:])}) for s in signs])


def aligned_world(d: int, rho: float) -> World:
    """k_i = ρ q_i + √(1 − ρ²) noise."""
    mixing = np.block([[np.eye(d), np.zeros((d, d))], [rho * np.eye(d), (1 - rho**2) ** 0.5 * np.eye(d)]])
    return World(d, from_latent(mixing, np.zeros(2 * d), d), {"rho": rho})


def assert_every_line_holds(derivation: Derivation, world: World) -> None:
    for step in derivation:
        left, right = world.value(step.equation.lhs), world.value(step.equation.rhs)
        assert left == pytest.approx(right, rel=1e-10, abs=1e-10), f"{step.reason}: {left} ≠ {right}"


@pytest.mark.parametrize("d", [1, 2, 3])
def test_every_line_for_independent_entries(d):
    assert_every_line_holds(variance.independent_entries(), standard_world(d))


def test_every_line_for_independent_vectors():
    assert_every_line_holds(variance.independent_vectors(), independent_world())


def test_every_line_for_jointly_gaussian_vectors():
    assert_every_line_holds(variance.jointly_gaussian(), gaussian_world())


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.8, 1.0])
def test_every_line_for_aligned_entries(rho):
    for derivation in variance.aligned_entries():
        assert_every_line_holds(derivation, aligned_world(2, rho))


def test_the_check_notices_a_false_line():
    """Dropping independence from a world makes exactly the independence line false."""
    failing = []
    for step in variance.independent_vectors():
        left, right = gaussian_world().value(step.equation.lhs), gaussian_world().value(step.equation.rhs)
        if abs(left - right) > 1e-6:
            failing.append(step.reason)
    assert failing == ["q is independent of k"]


def test_results_in_closed_form():
    d, rho = sympy.Symbol("d_k", integer=True, positive=True), sympy.Symbol("rho", real=True)
    assert variance.independent_entries().result.rhs == d
    mean, spread = variance.aligned_entries()
    assert mean.result.rhs == rho * d
    assert sympy.expand(spread.result.rhs - d * (1 + rho**2)) == 0
    assert spread.result.rhs.subs(rho, 1) == 2 * d  # q = k: chi-square with d degrees of freedom


@pytest.mark.parametrize(
    "derivation", [variance.independent_entries, variance.independent_vectors, variance.jointly_gaussian]
)
def test_each_line_starts_where_the_one_above_ended(derivation):
    chain = derivation()
    assert all(isinstance(step, Step) and step.reason for step in chain)
    for before, after in itertools.pairwise(chain):
        assert before.equation.rhs == after.equation.lhs
        assert before.equation.lhs != before.equation.rhs
    assert chain.result.lhs == chain[0].equation.lhs


def test_it_displays_as_latex():
    chain = variance.independent_entries()
    block = chain._repr_latex_()
    assert block.startswith("$\\displaystyle \\begin{aligned}") and block.endswith("= d_{k}\n\\end{aligned}$")
    assert all(step.reason in block for step in chain)
    assert chain[0]._repr_latex_().count("=") >= 1
    assert "= \\mathbb{E}" in block  # E[s²] − E[s]², the positive term first


def test_without_latex_it_prints_one_line_per_step():
    chain = variance.independent_entries()
    lines = repr(chain).splitlines()
    assert len(lines) == 2 + len(chain)
    assert lines[-1] == "  = d_k    (count them)"


def test_predictions_agree_with_the_derived_formulas():
    """The torch functions against a world's own numbers, term by term different from zero."""
    for world, cross in ((independent_world(), False), (gaussian_world(), True)):
        given = {name: torch.tensor(value) for name, value in world.names.items() if value is not None}
        table = given["C"] if cross else None
        chain = variance.jointly_gaussian() if cross else variance.independent_vectors()
        arguments = (given["mu^q"], given["mu^k"], given["Sigma^q"], given["Sigma^k"])
        expected = torch.tensor(world.value(chain[0].equation.lhs), dtype=torch.float64)
        torch.testing.assert_close(variance.dot_product_variance(*arguments, table), expected)
        mean = sum(o.probability * o.vectors["q"] @ o.vectors["k"] for o in world.outcomes)
        torch.testing.assert_close(
            variance.dot_product_mean(given["mu^q"], given["mu^k"], table), torch.tensor(mean, dtype=torch.float64)
        )


def test_noncentral_chi_square():
    """q = k ~ N(μ, I): the score is noncentral chi-square, mean d + |μ|², variance 2(d + 2|μ|²)."""
    d, mean = 7, torch.linspace(-1.0, 2.0, 7, dtype=torch.float64)
    identity = torch.eye(d, dtype=torch.float64)
    squared = mean @ mean
    torch.testing.assert_close(variance.dot_product_mean(mean, mean, identity), d + squared)
    torch.testing.assert_close(
        variance.dot_product_variance(mean, mean, identity, identity, identity), 2 * (d + 2 * squared)
    )


@pytest.mark.parametrize("d", [4, 64])
def test_monte_carlo_within_its_error_bar(d):
    """General means and correlated entries, 200 000 draws; the variance's standard error is √((m₄ − v²)/n)."""
    generator = torch.Generator().manual_seed(d)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    count = 200_000 if d == 4 else 50_000
    mean_q, mean_k, mix_q, mix_k = normal(d), normal(d), normal(d, d) / d**0.5, normal(d, d) / d**0.5
    q, k = mean_q + normal(count, d) @ mix_q.T, mean_k + normal(count, d) @ mix_k.T
    score = (q * k).sum(-1)
    expected = variance.dot_product_variance(mean_q, mean_k, mix_q @ mix_q.T, mix_k @ mix_k.T)
    deviation = score - score.mean()
    error = ((deviation**4).mean() - deviation.var() ** 2).sqrt() / count**0.5
    assert (deviation.var() - expected).abs() < 4 * error
    assert error < 0.02 * expected  # tight enough to notice a missing term


def test_all_pairs_of_rows_obey_the_formula_exactly():
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 9, 5, generator=generator, dtype=torch.float64).exp()
    k = q.roll(1, -2) - 3 * torch.rand(2, 9, 5, generator=generator, dtype=torch.float64)  # as dependent as can be
    scores = q @ k.mT
    (mean_q, covariance_q), (mean_k, covariance_k) = variance.sample_moments(q), variance.sample_moments(k)
    torch.testing.assert_close(variance.dot_product_mean(mean_q, mean_k), scores.mean((-2, -1)))
    torch.testing.assert_close(
        variance.dot_product_variance(mean_q, mean_k, covariance_q, covariance_k),
        scores.var((-2, -1), correction=0),
    )


def test_sample_moments_against_torch_cov():
    x = torch.randn(11, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 5
    mean, covariance = variance.sample_moments(x)
    torch.testing.assert_close(mean, x.mean(0))
    torch.testing.assert_close(covariance, torch.cov(x.T, correction=0))


def test_errors_name_the_argument_and_its_shape():
    mean, table = torch.zeros(3), torch.eye(3)
    with pytest.raises(ValueError, match=r"query_mean and key_mean.*\(3,\) and \(4,\)"):
        variance.dot_product_mean(mean, torch.zeros(4))
    with pytest.raises(ValueError, match=r"key_covariance must have shape \(…, 3, 3\), got \(4, 4\)"):
        variance.dot_product_variance(mean, mean, table, torch.eye(4))
    with pytest.raises(ValueError, match=r"query_covariance.*got \(3,\)"):
        variance.dot_product_variance(mean, mean, mean, table)
    with pytest.raises(ValueError, match=r"cross_covariance.*got \(2, 3\)"):
        variance.dot_product_variance(mean, mean, table, table, torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"cross_covariance.*got \(2, 3\)"):
        variance.dot_product_mean(mean, mean, torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"x must have shape.*\(0, 3\)"):
        variance.sample_moments(torch.zeros(0, 3))


@pytest.mark.parametrize(
    "derive",
    [variance.independent_entries, variance.independent_vectors, variance.jointly_gaussian, variance.aligned_entries],
)
def test_without_sympy_the_error_says_what_to_install(derive, monkeypatch):
    monkeypatch.setitem(sys.modules, "sympy", None)
    with pytest.raises(ImportError, match=r"need sympy.*pip install 'matchkernel\[book\]'"):
        derive()


def test_importing_the_module_does_not_import_sympy():
    code = (
        "import sys; import torch; before = 'sympy' in sys.modules; sys.modules.setdefault('sympy', None)\n"
        "from matchkernel.theory import variance\n"
        "print(float(variance.dot_product_variance(*torch.ones(2, 3), *torch.eye(3).expand(2, 3, 3))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == 9.0
