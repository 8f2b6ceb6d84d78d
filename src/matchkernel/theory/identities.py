"""The same kernel written in other ways: scores and weights, dot products and distances, sums and products of features.

Every function here is one identity. A score s and a weight κ belong together by κ = eˢ; κ has features φ when
κ(x, y) = φ(x)·φ(y).
"""

from __future__ import annotations

import torch
from torch import Tensor


def scores_of(kappa: Tensor) -> Tensor:
    """The scores that a table of weights κ came from.

    s_ij = log κ_ij, and −∞ where κ_ij = 0

    kappa (…, n, m), any scale; returns the same shape. A row multiplied by a number gives a row with a constant added,
    which no softmax sees. Raises ValueError for a negative weight: it has no score.
    Source: the definition of softmax; Tsai et al. 2019.
    """
    if bool((kappa < 0).any()):
        raise ValueError(f"kappa of shape {tuple(kappa.shape)} has negative entries: only a weight ≥ 0 has a score")
    return kappa.log()


def weights_of(kappa: Tensor) -> Tensor:
    """A kernel smoother's weights: each row of κ divided by its sum.

    α_ij = κ_ij / Σ_l κ_il, which is softmax(log κ) where κ > 0

    kappa (…, n, m), signed or not; returns the same shape. A row whose sum is 0 gets zeros.
    Source: Nadaraya 1964; Watson 1964.
    """
    total = kappa.sum(dim=-1, keepdim=True)
    empty = total == 0
    return torch.where(empty, 0.0, kappa / torch.where(empty, 1.0, total))


def centred(scores: Tensor) -> Tensor:
    """Scores with each row's mean taken off: what is left of them when rows may be shifted freely.

    S Π with Π = I − 11ᵀ/m

    scores (…, n, m), finite; returns the same shape. Two finite tables give the same softmax weights exactly when they
    agree after centring: log softmax(s) = s − log Σ eˢ differs from s by a constant per row.
    Raises ValueError for an infinite or undefined score: its row has no mean.
    """
    if not bool(scores.isfinite().all()):
        raise ValueError(f"scores of shape {tuple(scores.shape)} hold values that are not finite: rows have no mean")
    return scores - scores.mean(dim=-1, keepdim=True)


def gaussian_factors(q: Tensor, k: Tensor, bandwidth: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """The Gaussian weight as a dot product's weight, times a factor per query, times a factor per key.

    exp(−|q − k|²/2σ²) = exp(q·k/σ²) · exp(−|q|²/2σ²) · exp(−|k|²/2σ²)

    q (…, n, d), k (…, m, d) → the three factors, (…, n, m), (…, n, 1) and (…, 1, m). Division by the row's sum cancels
    the second. The third stays: a Gaussian is a dot product that discounts long keys. ValueError unless σ > 0.
    Source: expand the square; Tsai et al. 2019.
    """
    temperature = temperature_of(bandwidth)
    squares = [x.square().sum(dim=-1, keepdim=True) for x in (q, k)]
    per_query, per_key = ((-square / (2 * temperature)).exp() for square in squares)
    return (q @ k.mT / temperature).exp(), per_query, per_key.mT


def temperature_of(bandwidth: float) -> float:
    """The temperature of the dot product hidden in a Gaussian: τ = σ² (`gaussian_factors`). ValueError unless σ > 0."""
    if not bandwidth > 0:
        raise ValueError(f"bandwidth={bandwidth}: expected a number above 0")
    return bandwidth**2


def bandwidth_of(temperature: float) -> float:
    """The bandwidth of the Gaussian around a dot product: σ = √τ, so d^¼ for scores q·k/√d. ValueError unless τ > 0.

    Between keys of one length the two give the same softmax weights.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: expected a number above 0")
    return float(temperature**0.5)


def sum_features(first: Tensor, second: Tensor) -> Tensor:
    """Features of κ₁ + κ₂: both lists one after the other.

    (φ ⊕ ψ)(x)·(φ ⊕ ψ)(y) = φ(x)·φ(y) + ψ(x)·ψ(y)

    first (…, n, f), second (…, n, g) → (…, n, f + g). Source: Aronszajn 1950, section 6.
    """
    return torch.cat([first, second], dim=-1)


def product_features(first: Tensor, second: Tensor) -> Tensor:
    """Features of κ₁ κ₂: every feature of one times every feature of the other.

    (φ ⊗ ψ)(x)·(φ ⊗ ψ)(y) = φ(x)·φ(y) · ψ(x)·ψ(y)

    first (…, n, f), second (…, n, g) → (…, n, f·g). Scores add where weights multiply. Source: Aronszajn 1950,
    section 8.
    """
    return (first[..., :, None] * second[..., None, :]).flatten(-2)


def dot_from_distances(between: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Inner products from squared distances: to each other, and to an origin.

    q·k = (|q|² + |k|² − |q − k|²) / 2

    between (…, n, m) squared distances, query (…, n) and key (…, m) squared distances to the point called 0; returns
    (…, n, m). Source: the polarization identity; Schoenberg 1935 for the distances that come from an inner product.
    """
    return (query[..., :, None] + key[..., None, :] - between) / 2


def feature_distances(between: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Squared distances between features, from the kernel alone.

    |φ(q) − φ(k)|² = κ(q, q) + κ(k, k) − 2 κ(q, k)

    between (…, n, m) = κ(q_i, k_j), query (…, n) = κ(q_i, q_i), key (…, m) = κ(k_j, k_j); returns (…, n, m).
    No feature is formed, so there may be infinitely many. Source: Schölkopf & Smola 2002, section 2.2.
    """
    return query[..., :, None] + key[..., None, :] - 2 * between
