"""Sinkhorn's normalisation: weights whose rows and columns both have the sums that are asked for."""

from __future__ import annotations

from torch import Tensor


class NotConvergedError(ArithmeticError):
    """An iteration that stopped before it reached its tolerance."""


def sinkhorn(scores: Tensor, *, tolerance: float = 1e-6, iterations: int = 1000) -> Tensor:
    """The weights α_ij = a_i exp(s_ij) b_j with rows that sum to 1 and columns that sum to n/m.

    Columns and rows are brought to their sums in turn, in logarithms, rows last: s − logΣ_i exp(s) + log(n/m), then
    s − logΣ_j exp(s). The first softmax of the rows alone is ordinary attention.

    Args:
        scores: (…, n, m), floating; −inf forbids a pair. With n = m the result is doubly stochastic.
        tolerance: the largest difference of a column's sum from n/m, above zero; 1e-6 by default. Rows are exact.
        iterations: the most rounds that are run; 1000 by default. A round is one pass over columns and one over rows.

    Returns:
        (…, n, m), differentiable through the rounds.

    Raises:
        ValueError: a shape or an argument that does not fit; a row or a column without a permitted pair; a NaN or +inf.
        NotConvergedError: the tolerance was not reached, with what was. No table of positive entries refuses to
            converge, but scores far apart need many rounds. Where −inf forbids pairs a solution may not exist or, as
            under a causal mask (the identity is the only triangular one), may be neared at a pace of one over rounds.

    Cost: two passes over the table for each round.
    Source: Sinkhorn 1964; Sinkhorn & Knopp 1967 for tables with zeros; as attention, Sander et al. 2022 (Sinkformers).
    """
    if scores.dim() < 2 or not scores.is_floating_point() or 0 in scores.shape[-2:]:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)} and dtype {scores.dtype}: expected floating (…, n, m), n, m ≥ 1"
        )
    if not tolerance > 0.0 or iterations < 1:
        raise ValueError(f"tolerance={tolerance}, iterations={iterations}: expected a tolerance above 0, one or more")
    if scores.isnan().any() or scores.isposinf().any():
        raise ValueError("scores: expected numbers or −inf, got NaN or +inf")
    for dim, name in ((-1, "row"), (-2, "column")):
        if scores.isneginf().all(dim).any():
            raise ValueError(f"scores: a {name} in which every pair is forbidden has no sum to be brought to 1")
    n, m = scores.shape[-2:]
    target = n / m
    log_weights = scores.log_softmax(-1)
    for _ in range(iterations):
        off = (log_weights.exp().sum(-2) - target).abs().amax()
        if off <= tolerance:
            return log_weights.exp()
        log_weights = log_weights.log_softmax(-2).log_softmax(-1)
    off = (log_weights.exp().sum(-2) - target).abs().amax()
    if off <= tolerance:
        return log_weights.exp()
    raise NotConvergedError(
        f"after {iterations} rounds a column's sum is {float(off):.2g} from {target:g}, tolerance={tolerance:g}"
    )
