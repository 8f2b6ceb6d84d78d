"""The feature map that exp(x·y) comes with: one coordinate for each product of coordinates, infinitely many in all.

exp(x·y) = Σ_r (x·y)^r / r! = Σ_α (x^α / √α!) (y^α / √α!), the second sum over all lists α of d whole numbers, with
x^α = ∏ x_c^{α_c} and α! = ∏ α_c!. Cut off at |α| ≤ degree it is finite.

Source: Cotter, Keshet & Srebro 2011 for the Gaussian, which is this map after a factor for each vector.
"""

from __future__ import annotations

import math
from itertools import combinations_with_replacement

import torch
from torch import Tensor


def monomials(dim: int, degree: int) -> int:
    """How many coordinates the map has up to `degree`: C(dim + degree, degree).

    ValueError for a negative number.
    """
    _check(dim=dim, degree=degree)
    return math.comb(dim + degree, degree)


def taylor_map(x: Tensor, degree: int) -> Tensor:
    """The coordinates x^α / √α! for all |α| ≤ degree, so that φ(x)·φ(y) = Σ_{r ≤ degree} (x·y)^r / r!.

    x (…, d) → (…, C(d + degree, degree)), the constant 1 first, then by degree. ValueError for a scalar or a negative
    degree. Cost: the length of the result times its degree; it grows like d^degree, so this is for small numbers.
    """
    if x.dim() == 0:
        raise ValueError("x has shape (): expected (…, d)")
    _check(degree=degree)
    columns = [torch.ones_like(x[..., :1])]
    for size in range(1, degree + 1):
        chosen = torch.tensor(list(combinations_with_replacement(range(x.shape[-1]), size)), device=x.device)
        if chosen.numel():
            repeats = [[row.count(c) for c in set(row)] for row in chosen.tolist()]
            weight = [math.prod(math.factorial(count) for count in counts) ** -0.5 for counts in repeats]
            columns.append(x[..., chosen].prod(-1) * torch.tensor(weight, dtype=x.dtype, device=x.device))
    return torch.cat(columns, dim=-1)


def taylor_remainder(score: Tensor, degree: int) -> Tensor:
    """What the cut-off map misses: e^s − Σ_{r ≤ degree} s^r / r! for s = x·y.

    score (…) → (…), positive for s > 0, and for s < 0 of the sign of (−1)^{degree+1}. Summed as the series of what was
    cut off (for s < 0 after Kummer's transformation), so that nothing cancels. ValueError for a negative degree.
    Cost: about |s| + 12√|s| + 60 terms for each entry.
    """
    _check(degree=degree)
    size = score.abs()
    largest = float(size.max()) if size.numel() else 0.0
    count = math.ceil(largest + 12 * math.sqrt(largest) + 60)
    k = torch.arange(count, dtype=score.dtype, device=score.device)
    first = torch.lgamma(torch.tensor(degree + 2.0, dtype=score.dtype, device=score.device))
    start = (degree + 1) * size.log() - first
    # s > 0: s^{r+1}/(r+1)! Σ_k s^k (r+1)!/(r+1+k)!
    rising = (torch.special.xlogy(k, size.unsqueeze(-1)) + first - torch.lgamma(k + degree + 2)).exp().sum(-1)
    # s < 0: s^{r+1}/(r+1)! e^{−|s|} Σ_k |s|^k/k! (r+1)/(r+1+k)
    poisson = torch.special.xlogy(k, size.unsqueeze(-1)) - size.unsqueeze(-1) - torch.lgamma(k + 1)
    falling = (poisson.exp() * ((degree + 1) / (degree + 1 + k))).sum(-1)
    sign = -1.0 if degree % 2 == 0 else 1.0
    return torch.where(score >= 0, start.exp() * rising, sign * start.exp() * falling)


def taylor_bound(x: Tensor, y: Tensor, degree: int) -> Tensor:
    """A bound on |taylor_remainder| that needs only the lengths: (|x||y|)^{degree+1} / (degree+1)! · e^{|x||y|}.

    x, y (…, d), broadcast → (…). Without the last factor it bounds the error for scores below 0, and, times
    e^{−(|x|² + |y|²)/2}, that of the Gaussian. ValueError for a negative degree or widths that differ.
    Source: the Lagrange form of the remainder; Cotter, Keshet & Srebro 2011 for the Gaussian.
    """
    _check(degree=degree)
    if x.dim() == 0 or y.dim() == 0 or x.shape[-1] != y.shape[-1]:
        raise ValueError(f"x and y have shapes {tuple(x.shape)} and {tuple(y.shape)}: expected the same last dimension")
    size = (x.square().sum(-1) * y.square().sum(-1)).sqrt()
    return size.pow(degree + 1) / math.factorial(degree + 1) * size.exp()


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if count < 0:
            raise ValueError(f"{name} is {count}: expected at least 0")
