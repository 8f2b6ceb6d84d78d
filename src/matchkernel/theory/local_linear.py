"""Local linear regression: where attention fits a constant to the values nearby, this fits a line."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..attention import weights
from ..kernels.base import MatchKernel
from ._observations import check_observations


def local_linear(
    x_train: Tensor,
    y_train: Tensor,
    x_query: Tensor,
    kernel: MatchKernel,
    *,
    causal: bool = False,
    penalty: float = 0.0,
) -> Tensor:
    """The value at x_query of the plane that fits the observations best, each weighted as attention weighs it.

    m̂(x_i) = â,  (â, b̂) = argmin_{a, b} Σ_j α_ij |y_j − a − (x_j − x_i) b|² + λ |b|²

    α are the weights of attention. With x̄_i = Σ_j α_ij x_j and ȳ_i = Σ_j α_ij y_j, attention's own answer, it is
    â = ȳ_i + (x_i − x̄_i) b̂,  b̂ = (C_i + λI)⁻¹ Σ_j α_ij (x_j − x̄_i)ᵀ y_j,  C_i = Σ_j α_ij (x_j − x̄_i)ᵀ(x_j − x̄_i).
    Without a penalty a plane is reproduced exactly, with any kernel and at any place.

    Args:
        x_train, y_train, x_query: (…, m, d), (…, m, c), (…, n, d), one floating dtype. Give double precision.
        kernel: any MatchKernel; queries and keys must live in one space, since they are subtracted.
        causal: an observation with a later position has no weight, as in `attend`.
        penalty: λ ≥ 0 on the slope, in x's unit²; 0 by default. As it grows the answer becomes attention's.

    Returns:
        (…, n, c) in y's unit.

    Raises:
        TypeError: more than one dtype, or half precision.
        ValueError: shapes that do not fit; a negative penalty; and, without a penalty, a query whose weights do not
            determine a plane, since fewer than d + 1 observations in general position carry any. It is named, and
            nothing is put in the plane's place: widen the kernel or give a penalty. Also weights below 0,
            as a signed feature kernel may have: what is summed then has no least value.

    Cost: O(nmd(d + c)) time for the moments, n solves of size d; O(nmd) memory.
    Source: Fan 1993; Fan & Gijbels 1996, chapter 3; in more dimensions Ruppert & Wand 1994.
    """
    check_observations(x_train, y_train, x_query)
    if not 0.0 <= penalty < math.inf:
        raise ValueError(f"penalty={penalty}: expected a finite number that is not negative")
    alpha = weights(x_query, x_train, kernel, causal=causal)
    if (alpha < 0.0).any():
        raise ValueError(
            f"kernel={kernel!r}: some of its weights are negative here, so that the sum of squares has no least value"
        )
    x_mean, y_mean = alpha @ x_train, alpha @ y_train
    # Around the weighted mean, pair by pair: moments about the origin would lose what is small beside the place.
    away = x_train.unsqueeze(-3) - x_mean.unsqueeze(-2)
    weighted = (alpha.unsqueeze(-1) * away).mT
    spread = weighted @ away
    together = weighted @ (y_train.unsqueeze(-3) - y_mean.unsqueeze(-2))
    if penalty == 0.0:
        _require_a_plane(spread, x_train, x_query.shape[-1])
    else:
        spread = spread + penalty * torch.eye(x_query.shape[-1], dtype=spread.dtype, device=spread.device)
    # Coordinates in units of their own spread: one that is measured in small units is not a flat one.
    unit = spread.diagonal(dim1=-2, dim2=-1).sqrt().unsqueeze(-1)
    slope: Tensor = torch.linalg.solve(spread / unit / unit.mT, together / unit) / unit
    step: Tensor = (x_query - x_mean).unsqueeze(-2) @ slope
    return y_mean + step.squeeze(-2)


def _require_a_plane(spread: Tensor, x_train: Tensor, d: int) -> None:
    """Raise unless the weighted covariance (…, n, d, d) is of full rank, beyond what rounding makes of a lower one."""
    with torch.no_grad():
        eps = torch.finfo(spread.dtype).eps
        variance = spread.diagonal(dim1=-2, dim2=-1)
        rounding = 4.0 * eps * x_train.abs().amax(-2, keepdim=True)
        flat = (variance <= rounding.square()).any(-1)
        unit = torch.where(flat.unsqueeze(-1), 1.0, variance).sqrt().unsqueeze(-1)
        correlation = torch.where(
            flat.unsqueeze(-1).unsqueeze(-1), torch.zeros_like(spread), spread / unit / unit.mT
        )  # fmt: skip
        short = flat | (torch.linalg.eigvalsh(correlation)[..., 0] <= 64.0 * d * eps)
        if short.any():
            first = tuple(int(at) for at in short.nonzero()[0])
            raise ValueError(
                f"{int(short.sum())} of {short.numel()} queries, the first at {first}: fewer than d + 1 = {d + 1} "
                "observations in general position carry weight, so no plane is determined; "
                "widen the kernel or give penalty > 0"
            )
