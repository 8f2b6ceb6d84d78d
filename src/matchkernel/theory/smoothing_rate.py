"""How far a kernel smoother is from the truth, when the bandwidth is small and observations are many.

All in one dimension, at a point x inside the data: y = m(x) + noise of variance σ², x from a density f, kernel with
second moment μ₂ = ∫u²K(u)du and roughness R = ∫K(u)²du. The defaults are the Gaussian's, with h its bandwidth.
Arguments are numbers or arrays that broadcast, and results are of their kind.
"""

from __future__ import annotations

import math
from typing import TypeVar

from torch import Tensor

Number = TypeVar("Number", float, Tensor)

GAUSSIAN_ROUGHNESS = 1.0 / (2.0 * math.sqrt(math.pi))
"""∫K² for the Gaussian density of variance 1."""


def nadaraya_watson_bias(
    bandwidth: Number, slope: Number, curvature: Number, log_density_slope: Number, second_moment: float = 1.0
) -> Number:
    """E[m̂(x)] − m(x) of the local constant fit, to first order: h² μ₂ (½ m″ + m′ f′/f).

    slope m′(x), curvature m″(x), log_density_slope f′(x)/f(x). Error o(h²) for twice differentiable m and
    differentiable f; given the places observed, also for nh³ → ∞, since where they fall moves it by about m′√(h/n).
    Not valid within a few bandwidths of an edge of the data, where the bias is of order h.
    Source: Fan 1992; Wand & Jones 1995, chapter 5.
    """
    return bandwidth * bandwidth * second_moment * (curvature / 2 + slope * log_density_slope)


def local_linear_bias(bandwidth: Number, curvature: Number, second_moment: float = 1.0) -> Number:
    """E[m̂(x)] − m(x) of the local linear fit, to first order: ½ h² μ₂ m″. Neither slope nor density enters.

    Source: Fan 1992; Wand & Jones 1995, chapter 5.
    """
    return bandwidth * bandwidth * second_moment * curvature / 2


def smoothing_variance(
    noise_variance: Number, density: Number, bandwidth: Number, n: int, roughness: float = GAUSSIAN_ROUGHNESS
) -> Number:
    """Var m̂(x), to first order and for both fits: σ² R / (n h f(x)).

    Source: Fan 1992; Wand & Jones 1995, chapter 5.
    """
    return roughness * noise_variance / (n * bandwidth * density)


def best_bandwidth(
    bias_per_square: float, noise_variance: float, density: float, n: int, roughness: float = GAUSSIAN_ROUGHNESS
) -> float:
    """The h that makes (B h²)² + σ²R/(n h f) least: h⁵ = σ² R / (4 B² f n), so h ~ n^(−1/5) and the error ~ n^(−4/5).

    bias_per_square B is the bias divided by h². ValueError for B = 0, where no finite h is best.
    Source: Wand & Jones 1995, chapter 5; no estimator has a better rate for twice differentiable m, Stone 1980.
    """
    if bias_per_square == 0.0:
        raise ValueError("bias_per_square=0.0: without bias to first order no finite bandwidth is best")
    if not (noise_variance > 0.0 and density > 0.0 and n > 0):
        raise ValueError(f"noise_variance={noise_variance}, density={density}, n={n}: expected numbers above zero")
    fifth = roughness * noise_variance / (4.0 * bias_per_square**2 * density * n)
    return math.pow(fifth, 0.2)
