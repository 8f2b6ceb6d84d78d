"""Kernel smoothing, which is attention: regression by an average of what was observed nearby."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import attend
from ..kernels.base import MatchKernel
from ._observations import check_rows


def smooth(x_train: Tensor, y_train: Tensor, x_query: Tensor, kernel: MatchKernel) -> Tensor:
    """The Nadaraya–Watson estimate of y at x_query: attention from the places asked about to the places observed.

    m̂(x_i) = Σ_j κ(x_i, x_j) y_j / Σ_j κ(x_i, x_j),  κ = exp(score)

    x_train (…, m, d), y_train (…, m, c), x_query (…, n, d) → (…, n, c) in y's unit. One dtype. κ never has to be
    formed, so no weight underflows to a division by zero: far from every observation a Gaussian gives the nearest one.
    ValueError for an argument without its last dimension (one coordinate is d = 1, not left out), TypeError for more
    than one dtype; otherwise what `attend` raises for shapes that do not fit. Cost: `attend`'s, O(nm) time.
    Source: Nadaraya 1964; Watson 1964; as attention, Tsai et al. 2019, eq. 2.
    """
    check_rows(x_train=x_train, y_train=y_train, x_query=x_query)
    return attend(x_query, x_train, y_train, kernel)


def leave_one_out(x: Tensor, y: Tensor, kernel: MatchKernel) -> Tensor:
    """What the others say about each observation: attention with the diagonal masked.

    m̂₋ᵢ(x_i) = Σ_{j≠i} κ(x_i, x_j) y_j / Σ_{j≠i} κ(x_i, x_j)

    x (…, m, d), y (…, m, c) → (…, m, c). The mean of (y − m̂₋)² estimates the squared error at a new observation, noise
    included; the bandwidth that makes it least is the cross-validated one. ValueError for fewer than two observations.
    Cost: O(m²) time, and m² booleans.
    Source: Györfi, Kohler, Krzyżak & Walk 2002, chapter 8.
    """
    m = x.shape[-2] if x.dim() > 1 else 0
    if m < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: expected (…, m, d) with at least two observations, m ≥ 2")
    others = ~torch.eye(m, dtype=torch.bool, device=x.device)
    return attend(x, x, y, kernel, mask=others)
