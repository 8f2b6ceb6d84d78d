"""What scores of width d can say, and what they cannot.

Rank: `rank_residuals`, `best_scores` (which weights a score table of rank d comes near to).
Order: `circle`, `every_top_k`, `unreachable_top_k`, `plane_top_k`, `separable_sets` (which sets a query can put first).
Margin: `margin_bound`, `factor_for_weight` (how long vectors must be for the first to get most of the weight).
Few: `random_codes` (how little width a sparse pattern needs).

Throughout, keys are rows k_j in R^d, a query is any q in R^d, and the score is q·k_j.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from matchkernel.theory.identities import centred


def rank_residuals(weights: Tensor) -> Tensor:
    """How far the scores behind a table of weights are from every score table of rank d, for each d at once.

    r_d = min over S of rank ≤ d and shifts c of ‖S + c1ᵀ − log P‖_F = (Σ_{i>d} σ_i²)^½,
    σ the singular values of log P (I − 11ᵀ/m)

    weights P (n, m), all above 0 → residuals (min(n, m) + 1,), for d = 0, 1, …. Rows may be shifted because softmax
    does not see it: split the error along 1 and across it; across it the shift does nothing, along it the shift does
    everything, and S need not help. What is left is Eckart–Young for the row-centred table, whose last singular value
    is 0 when n ≥ m: the shift is worth one rank. It measures scores, not weights: a large residual at weights near 0
    need not be seen. Raises ValueError for a weight that is not above 0. Cost: one singular value decomposition.
    Source: Bhojanapalli et al. 2020, theorem 1 (the bottleneck); Eckart & Young 1936.
    """
    return _tails(torch.linalg.svdvals(_centred_logarithm(weights)))


class BestScores(NamedTuple):
    """The nearest scores of rank d, q kᵀ, and how far they are."""

    q: Tensor
    k: Tensor
    residual: Tensor


def best_scores(weights: Tensor, width: int) -> BestScores:
    """Queries and keys of width d whose scores come nearest to log P, row shifts aside.

    q kᵀ = the first d terms of the singular value decomposition of log P (I − 11ᵀ/m)

    weights P (n, m), all above 0 → q (n, d), k (m, d), which share the singular values evenly, and the residual r_d of
    `rank_residuals`. The score is q·k, not divided by √d. Raises ValueError unless 0 ≤ width ≤ min(n, m).
    Source: Eckart & Young 1936.
    """
    table = _centred_logarithm(weights)
    if not 0 <= width <= min(table.shape):
        raise ValueError(f"width={width}: expected 0 to {min(table.shape)} for weights of shape {tuple(table.shape)}")
    left, sizes, right = torch.linalg.svd(table, full_matrices=False)
    half = sizes[:width].sqrt()
    return BestScores(left[:, :width] * half, right.mT[:, :width] * half, _tails(sizes)[width])


def circle(keys: int, degree: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Unit keys on a closed curve, evenly spaced: a circle, or for a higher degree the trigonometric moment curve.

    k_j = (cos t, sin t, cos 2t, sin 2t, …, cos pt, sin pt)/√p,  t = 2πj/n

    → (n, 2p). With p = 1 each key is its own best query and beats its neighbours by 1 − cos(2π/n): width 2 realises the
    argmax of an identity of any size. With p = k see `every_top_k`.
    Source: Carathéodory 1911; Gale 1963.
    """
    return _curve(torch.arange(keys, dtype=dtype) * (2 * math.pi / keys), degree)


def every_top_k(keys: int, chosen: Sequence[int] | Tensor) -> Tensor:
    """A unit query that puts any chosen k of n keys first: width 2k is enough, however many keys there are.

    q·k_j = a − b ∏_{i chosen} (1 − cos(t_j − t_i)) with b > 0: the same a for the chosen, less for every other

    chosen: k different indices below `keys`, or a tensor (…, k) of them → queries (…, 2k) for `circle(keys, degree=k)`,
    in float64. The product is a trigonometric polynomial of degree k, so it is a constant plus a query's score.
    The gap to the rest shrinks fast with n and k: exact arithmetic is needed long before geometry gives out.
    Raises ValueError for indices that repeat or are out of range.
    Source: Gale 1963 (neighbourly polytopes), for retrieval Wang et al. 2026.
    """
    index = torch.as_tensor(chosen, dtype=torch.long)
    degree = index.shape[-1]
    ordered = index.sort(dim=-1).values
    if bool((index < 0).any() or (index >= keys).any() or (ordered[..., 1:] == ordered[..., :-1]).any()):
        raise ValueError(f"chosen of shape {tuple(index.shape)}: expected different indices from 0 to {keys - 1}")
    # A polynomial of degree k is known from its values at more than 2k even steps; the curve's columns are orthogonal.
    steps = 4 * degree
    at = torch.arange(steps, dtype=torch.float64) * (2 * math.pi / steps)
    chosen_at = index.to(torch.float64) * (2 * math.pi / keys)
    gaps = (1 - (at - chosen_at[..., None]).cos()).prod(dim=-2)
    query = -gaps @ _curve(at, degree)
    unit: Tensor = query / query.norm(dim=-1, keepdim=True)
    return unit


def unreachable_top_k(keys: Tensor, k: int) -> Tensor:
    """k keys that no query can put strictly before all others: below width 2k there always are some.

    keys (n, d) with d < 2k and n ≥ d + 1 + k → k indices, ascending. Take d + 2 keys and numbers λ, not all 0, with
    Σλ_j k_j = 0 and Σλ_j = 0. Then Σ_{λ>0} λ_j s_j = Σ_{λ<0} |λ_j| s_j for every query: two averages with the same
    weights agree, so neither side can lie strictly above the other. One side has at most k keys; it is filled up to k
    from outside the other. Ranking by the distance to the query is the same with width d + 1: append |k|².
    Raises ValueError where this argument does not apply.
    Source: Radon 1921; the same limit by sign rank in Weller et al. 2025.
    """
    count, width = keys.shape
    if not width < 2 * k or count < width + 1 + k:
        raise ValueError(
            f"keys have shape {tuple(keys.shape)} and k={k}: expected fewer than 2k = {2 * k} columns and at least "
            f"{width + 1 + k} rows"
        )
    some = keys[: width + 2]
    table = torch.cat([some, torch.ones_like(some[:, :1])], dim=-1).to(torch.promote_types(keys.dtype, torch.float64))
    null = torch.linalg.svd(table.mT).Vh[-1]
    sides = [(null > 0).nonzero().flatten().tolist(), (null <= 0).nonzero().flatten().tolist()]
    small, large = sorted(sides, key=len)
    others = [j for j in range(count) if j not in small and j not in large]
    return torch.tensor(sorted([*small, *others[: k - len(small)]]))


def plane_top_k(keys: Tensor, k: int) -> set[tuple[int, ...]]:
    """All sets of k keys that some query in the plane returns as its top k, ties left out.

    keys (n, 2) → sets of indices, each ascending. The order of two keys flips where q is perpendicular to their
    difference; between two such directions next to each other nothing changes, so one query there stands for all.
    No n ≥ 4 keys have more than ⌊3n/2⌋ such pairs (k = 2), and some have as many.
    Cost: n² directions, n³ numbers. Raises ValueError for keys of another width, or k not from 1 to n − 1.
    Source: the k-set problem (Erdős et al. 1973); pairs: Edelsbrunner & Stöckl 1986.
    """
    count = keys.shape[0]
    if keys.dim() != 2 or keys.shape[1] != 2 or not 1 <= k < count:
        raise ValueError(f"keys have shape {tuple(keys.shape)} and k={k}: expected (n, 2) and 1 ≤ k < n")
    first, second = torch.triu_indices(count, count, offset=1)
    apart = (keys[first] - keys[second]).to(torch.float64)
    flips = torch.atan2(apart[:, 0], -apart[:, 1])
    angles = torch.cat([flips, flips + math.pi]).remainder(2 * math.pi).sort().values
    after = torch.cat([angles[1:], angles[:1] + 2 * math.pi])
    wide = after - angles > 1e-9  # directions that are one and the same up to rounding
    middle = ((angles + after) / 2)[wide]
    scores = _curve(middle, 1) @ keys.to(torch.float64).mT
    return {tuple(sorted(row)) for row in scores.topk(k, dim=-1).indices.tolist()}


def separable_sets(keys: int, width: int) -> int:
    """At most so many subsets of n keys in R^d lie above some threshold for some query, of all sizes together.

    2 Σ_{i=0}^{d} C(n − 1, i), attained by keys in general position

    Every top-k set is one of them, so where this is below C(n, k), some are out of reach.
    Source: Cover 1965, theorem 1 (with a threshold, so one dimension more).
    """
    return 2 * sum(math.comb(keys - 1, i) for i in range(width + 1))


def margin_bound(keys: int, width: int) -> float:
    """No n unit keys in R^d, each its own query, beat all others by more than this.

    n ≤ d + 1: 1 + 1/(n − 1), attained by a simplex · n ≤ 2d: 1, attained by ±basis vectors · d = 2: 1 − cos(2π/n),
    attained by the circle · else 1 − cos θ, where n caps of half-angle θ/2 just fill the sphere (not attained)

    The margin is min over i ≠ j of k_i·k_i − k_i·k_j. The first bound holds for any unit queries too. Raises ValueError
    for fewer than two keys or a width below 1, or for more than two keys in width 1 (two of them coincide: margin 0).
    Source: Rankin 1955; the cap bound is a comparison of areas, integrated numerically to about 1e-4.
    """
    if keys < 2 or width < 1 or (width == 1 and keys > 2):
        raise ValueError(f"keys={keys}, width={width}: expected two keys or more, and room for them to differ")
    if keys <= width + 1:
        return 1 + 1 / (keys - 1)
    if keys <= 2 * width:
        return 1.0
    # The area of a cap grows with its half-angle φ as ∫ sin^{d−2}; find where it is 1/n of the sphere.
    angles = torch.linspace(0, math.pi, 100_001, dtype=torch.float64)
    area = torch.cumulative_trapezoid(angles.sin() ** (width - 2), angles)
    at = int(torch.searchsorted(area, area[-1] / keys))
    share = float((area[-1] / keys - (area[at - 1] if at else 0)) / (area[at] - (area[at - 1] if at else 0)))
    half = float(angles[at]) + share * float(angles[1])
    return min(1.0, 1 - math.cos(2 * half))


def factor_for_weight(scores: Tensor, target: Tensor, weight: float) -> Tensor:
    """The factor by which scores must be multiplied so that softmax gives the target that weight.

    The smallest c ≥ 0 with softmax(c s)_target ≥ weight; ∞ where the target is not first, or ties for it

    scores (…, m), target (…,) indices → (…,), in float64. With unit vectors c is the product of the norms (over √d, if
    scores are divided by it). A margin Δ against m − 1 keys needs at most c = log((m − 1)w/(1 − w))/Δ, and exactly that
    when all are equally far. For a weight of 1/m or less it is 0. Found by halving, to rounding.
    Raises ValueError unless 0 < weight < 1.
    """
    if not 0 < weight < 1:
        raise ValueError(f"weight={weight}: expected a number between 0 and 1")
    wide = scores.to(torch.float64)
    behind = wide - wide.gather(-1, target[..., None])
    rivals = behind.scatter(-1, target[..., None], -math.inf)
    gap = -rivals.amax(dim=-1)
    wanted = math.log(weight / (1 - weight))
    high = (math.log(max(scores.shape[-1] - 1, 1)) + max(wanted, 0.0)) / gap.clamp(min=torch.finfo(wide.dtype).tiny)
    low = torch.zeros_like(high)
    for _ in range(200):
        middle = (low + high) / 2
        enough = -torch.logsumexp(middle[..., None] * rivals, dim=-1) >= wanted
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    at_zero = scores.shape[-1] * weight <= 1
    return torch.where(gap > 0, torch.where(torch.full_like(gap, at_zero, dtype=torch.bool), 0.0, high), math.inf)


def random_codes(pattern: Tensor, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Queries and keys of width d whose scores are a given sparse table plus noise.

    k_j random signs/√d,  q_i = Σ_j A_ij k_j,  so that q_i·k_j = A_ij + noise of variance at most |A_i|²/d

    pattern A (n, m), signs drawn from `generator` on its device → q (n, d), k (m, d). The noise has mean 0. With c ones
    per row all n·m scores are within ε once d is about 2c log(n m)/ε²: width grows with the logarithm of the length.
    Raises ValueError for a width below 1.
    Source: Likhosherstov, Choromanski & Weller 2021 (d = O(log n)); Johnson & Lindenstrauss 1984; Achlioptas 2003.
    """
    if width < 1:
        raise ValueError(f"width={width}: expected at least 1")
    signs = torch.randint(2, (pattern.shape[-1], width), generator=generator, device=generator.device)
    k = (2 * signs - 1).to(pattern) / math.sqrt(width)
    return pattern @ k, k


def _centred_logarithm(weights: Tensor) -> Tensor:
    if weights.dim() != 2 or not bool((weights > 0).all()):
        raise ValueError(f"weights of shape {tuple(weights.shape)}: expected (n, m), every weight above 0")
    return centred(weights.log())


def _tails(sizes: Tensor) -> Tensor:
    """(Σ_{i>d} σ_i²)^½ for d = 0 … all, summed from the smallest so that small tails keep their digits."""
    tails = sizes.square().flip(0).cumsum(0).flip(0).sqrt()
    return torch.cat([tails, tails.new_zeros(1)])


def _curve(angles: Tensor, degree: int) -> Tensor:
    """The trigonometric moment curve at these angles (n,) → (n, 2·degree), rows of length 1."""
    multiples = angles[:, None] * torch.arange(1, degree + 1, dtype=angles.dtype, device=angles.device)
    return torch.stack([multiples.cos(), multiples.sin()], dim=-1).flatten(-2) / math.sqrt(degree)
