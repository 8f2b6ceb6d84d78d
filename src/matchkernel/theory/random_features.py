"""How far random features of exp(x·y), and of the Gaussian, lie from what they estimate: the closed forms.

Everywhere x and y are the vectors whose exp(x·y) is estimated; for scaled dot-product attention x = q/d^{1/4} and
y = k/d^{1/4}. One projection is one Gaussian vector ω ~ N(0, I_d). What each kind makes of it:
  positive         e^{ω·x − |x|²/2} e^{ω·y − |y|²/2}                   one feature per projection
  hyperbolic       e^{−|x|²/2 − |y|²/2} cosh(ω·(x + y))                two, for ω and −ω
  trigonometric    e^{+|x|²/2 + |y|²/2} cos(ω·(x − y))                 two, a cosine and a sine
Each has mean exp(x·y); an estimate is the mean over `projections` of them, and the mean squared errors below are its
variance. Projections are drawn independently unless a function says otherwise.

Source: Choromanski et al. 2021, Lemmas 1 and 2; Sutherland & Schneider 2015 for Fourier features.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["positive", "hyperbolic", "trigonometric"]


def positive_mse(x: Tensor, y: Tensor, projections: int) -> Tensor:
    """Mean squared error of positive features: e^{2x·y} (e^{|x+y|²} − 1) / projections.

    x, y (…, d), broadcast → (…), in the square of the kernel's unit. Relative to the kernel it grows with |x + y|: the
    pairs that matter most, long and pointing the same way, are estimated worst. ValueError for shapes that do not fit
    or `projections` below 1. Cost: a dot product for each entry.
    Source: Choromanski et al. 2021, Lemma 2 (SM⁺).
    """
    return _squared_kernel(x, y) * relative_mse(x, y, projections, "positive")


def hyperbolic_mse(x: Tensor, y: Tensor, projections: int) -> Tensor:
    """Mean squared error of hyperbolic features: e^{2x·y} (cosh|x+y|² − 1) / projections.

    Two features per projection; it is ½(1 − e^{−|x+y|²}) times `positive_mse`, so for two features as good as two
    independent positive ones where |x + y| is large, and far better where it is small. Shapes, errors, cost as there.
    Source: Choromanski et al. 2021, Lemma 2 (SM^{hyp+}), rewritten.
    """
    return _squared_kernel(x, y) * relative_mse(x, y, projections, "hyperbolic")


def trigonometric_mse(x: Tensor, y: Tensor, projections: int) -> Tensor:
    """Mean squared error of trigonometric features: e^{2x·y} (cosh|x−y|² − 1) / projections.

    Two features per projection. The mirror image of `hyperbolic_mse`, with y turned round: exact for x = y, and for
    vectors of given lengths its relative error grows as the kernel shrinks, like exp(−2x·y). Shapes, errors, cost as
    for `positive_mse`.
    Source: Choromanski et al. 2021, Lemma 2 (SM^{trig}), rewritten: ½ e^{|x+y|²} e^{−2x·y} (1 − e^{−|x−y|²})².
    """
    return _squared_kernel(x, y) * relative_mse(x, y, projections, "trigonometric")


def relative_mse(x: Tensor, y: Tensor, projections: int, kind: Kind) -> Tensor:
    """Mean squared error over the square of exp(x·y): how wrong one estimate is, in units of the truth.

    (e^{|x+y|²} − 1), (cosh|x+y|² − 1) or (cosh|x−y|² − 1), over `projections`. x, y (…, d) → (…). Errors as for
    `positive_mse`, and ValueError for an unknown kind. Infinite where the exponential leaves the inputs' range (float64
    beyond |x+y|² ≈ 709).
    """
    _check_count("projections", projections)
    size = _size(x, y, kind)
    # cosh z − 1 = 2 sinh²(z/2), without the cancellation at small z.
    one = size.expm1() if kind == "positive" else 2.0 * (size / 2.0).sinh().square()
    return one / projections


def projections_needed(x: Tensor, y: Tensor, relative_error: float, kind: Kind = "positive") -> Tensor:
    """How many projections bring the root mean squared error down to `relative_error` times exp(x·y).

    m = (e^{|x+y|²} − 1) / relative_error² for positive features. x, y (…, d) → (…), numbers of the inputs' type and not
    rounded up. Errors as for `relative_mse`, and ValueError unless `relative_error` is above 0.
    """
    if not relative_error > 0:
        raise ValueError(f"relative_error is {relative_error}: expected a number above 0")
    return relative_mse(x, y, 1, kind) / relative_error**2


def orthogonal_positive_mse(x: Tensor, y: Tensor, projections: int) -> Tensor:
    """Mean squared error of positive features whose projections are orthogonal in blocks of d.

    positive_mse − (p/m²) e^{2x·y} E[1 − c_K], K ~ Poisson(|x+y|²), c_K = ∏_{j<K} (d + j)/(d + 2j)

    with m projections and p ordered pairs of different ones in a common block, d(d − 1) for each full block. Directions
    are uniform (Haar) and orthogonal in a block, and lengths are redrawn from a chi distribution, so that each
    projection alone is Gaussian. Two of them then have E[e^{ω·z} e^{ω'·z}] = ₁F₁(d; d/2; |z|²/2), where independent
    ones have e^{|z|²}; the expectation is the difference, term by term. For full blocks the gain is a share of about
    (d − 1)/(d + 2) · s/2 of the independent error where s = |x + y|² is small, and below ½s²/(e^s − 1), at most 0.324,
    everywhere: where s is large, the variance comes from single projections.

    x, y (…, d) → (…). Errors as for `positive_mse`. Cost: about |x+y|² + 12|x+y| + 60 terms for each entry.
    Source: the construction is Yu et al. 2016, section 3; the closed form derived here is that of Reid et al. 2023 in
    another shape.
    """
    mse = positive_mse(x, y, projections)
    d, size = x.shape[-1], _size(x, y, "positive").double()
    largest = float(size.max()) if size.numel() else 0.0
    k = torch.arange(math.ceil(largest + 12 * math.sqrt(largest) + 60), dtype=size.dtype, device=size.device)
    shrink = torch.cat([k.new_ones(1), ((d + k) / (d + 2 * k)).cumprod(0)[:-1]])
    log_chance = torch.special.xlogy(k, size.unsqueeze(-1)) - size.unsqueeze(-1) - torch.lgamma(k + 1)
    lost: Tensor = (log_chance.exp() * (1 - shrink)).sum(-1)
    blocks, rest = divmod(projections, d)
    pairs = blocks * d * (d - 1) + rest * (rest - 1)
    return mse - lost.to(mse.dtype) * _squared_kernel(x, y) * (pairs / float(projections) ** 2)


def row_mse(x: Tensor, y: Tensor, v: Tensor, projections: int, kind: Kind) -> Tensor:
    """Expected squared error of an attention output whose kernel is estimated, to first order in 1/projections.

    Σ_jl α_j α_l E_jl (v_j − o)·(v_l − o) / projections,  o = Σ_j α_j v_j,  α = softmax(x yᵀ)

    E_jl = e^{a_j·a_l} for positive and cosh(a_j·a_l) for hyperbolic features, with a_j = x + y_j; cosh(b_j·b_l) for
    trigonometric ones, b_j = x − y_j. Numerator and denominator share their projections, which is why values near the
    output do not matter. x (…, n, d), y (…, m, d), v (…, m, w) → (…, n), summed over the w coordinates.

    First order only: it says what happens once `projections` is large. Before, the ratio of two noisy sums can do
    anything, and where denominators may vanish (trigonometric) its variance is infinite at every finite number.
    Errors as for `relative_mse`. Cost: n m² w operations and n m w numbers, in the inputs' type: use float64.
    Source: derived here from the covariances of the estimates, Cov(κ̂_j, κ̂_l) = κ_j κ_l (E_jl − 1).
    """
    weight, apart = _apart(x, y, v)
    terms = [
        (weighted := (weight * along).unsqueeze(-1) * apart).mul(key @ weighted).sum((-2, -1))
        for along, key in _second_moment(x, y, projections, kind)
    ]
    return torch.stack(terms).sum(0)


def row_bias(x: Tensor, y: Tensor, v: Tensor, projections: int, kind: Kind) -> Tensor:
    """Expected error of an attention output whose kernel is estimated, to first order in 1/projections.

    −Σ_jl α_j α_l E_jl (v_j − o) / projections, with the letters of `row_mse`

    Both sums of the ratio are unbiased, and the ratio is not: they share their noise. x (…, n, d), y (…, m, d),
    v (…, m, w) → (…, n, w). Errors and cost as for `row_mse`.
    """
    weight, apart = _apart(x, y, v)
    terms = [
        ((weighted := (weight * along).unsqueeze(-1)) * apart * (key @ weighted)).sum(-2)
        for along, key in _second_moment(x, y, projections, kind)
    ]
    return -torch.stack(terms).sum(0)


def paired_fourier_variance(difference: Tensor, features: int, bandwidth: float = 1.0) -> Tensor:
    """Variance of random Fourier features that come in pairs (cos, sin): (1 + k(2Δ) − 2k(Δ)²) / features.

    k(Δ) = exp(−|Δ|²/2σ²); `features` counts cosines and sines, so half as many frequencies are drawn. It vanishes at
    Δ = 0: cos² + sin² is 1. difference Δ (…, d) → (…). ValueError for fewer than 1 feature or a bandwidth not above 0.
    Source: Sutherland & Schneider 2015.
    """
    one, two = _gaussian(difference, bandwidth), _gaussian(2 * difference, bandwidth)
    _check_count("features", features)
    return (1 + two - 2 * one.square()) / features


def phase_fourier_variance(difference: Tensor, features: int, bandwidth: float = 1.0) -> Tensor:
    """Variance of random Fourier features √2 cos(ω·x + b) with a random phase: (1 + ½k(2Δ) − k(Δ)²) / features.

    One frequency per feature. Never below that of as many paired features: the phase adds noise of its own, and at
    Δ = 0 it is all there is, ½ / features. Arguments and errors as for `paired_fourier_variance`.
    Source: Sutherland & Schneider 2015; the map is Rahimi & Recht 2007, algorithm 1.
    """
    one, two = _gaussian(difference, bandwidth), _gaussian(2 * difference, bandwidth)
    _check_count("features", features)
    return (1 + two / 2 - one.square()) / features


def _squared_kernel(x: Tensor, y: Tensor) -> Tensor:
    _check_widths(x, y)
    return (2 * (x * y).sum(-1)).exp()


def _size(x: Tensor, y: Tensor, kind: Kind) -> Tensor:
    """|x + y|², or |x − y|² for the trigonometric kind: all that the relative error depends on."""
    _check_kind(kind)
    _check_widths(x, y)
    return (x - y if kind == "trigonometric" else x + y).square().sum(-1)


def _apart(x: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax weights (…, n, m) and how far each value lies from each output, (…, n, m, w)."""
    _check_widths(x, y)
    if min(x.dim(), y.dim(), v.dim()) < 2 or y.shape[-2] != v.shape[-2]:
        shapes = f"{tuple(x.shape)}, {tuple(y.shape)} and {tuple(v.shape)}"
        raise ValueError(f"x, y and v have shapes {shapes}: expected (…, n, d), (…, m, d) and (…, m, w)")
    weight = (x @ y.mT).softmax(-1)
    return weight, v.unsqueeze(-3) - (weight @ v).unsqueeze(-2)


def _second_moment(x: Tensor, y: Tensor, projections: int, kind: Kind) -> list[tuple[Tensor, Tensor]]:
    """E_jl / projections as a sum of terms f_j g_jl f_l: pairs of f (…, n, m) and g (…, 1, m, m).

    e^{±(x ± y_j)·(x ± y_l)} has a factor for the query and each key, and one for the two keys: no n × m × m table.
    """
    _check_kind(kind)
    _check_count("projections", projections)
    length, cross = x.square().sum(-1, keepdim=True), x @ y.mT
    if kind == "trigonometric":
        cross = -cross
    keys = (y @ y.mT).unsqueeze(-3)
    if kind == "positive":
        return [((length / 2 + cross).exp(), keys.exp() / projections)]
    half = 2 * projections
    return [((length / 2 + cross).exp(), keys.exp() / half), ((-length / 2 - cross).exp(), (-keys).exp() / half)]


def _gaussian(difference: Tensor, bandwidth: float) -> Tensor:
    if not bandwidth > 0:
        raise ValueError(f"bandwidth is {bandwidth}: expected a number above 0")
    return (-difference.square().sum(-1) / (2 * bandwidth**2)).exp()


def _check_widths(x: Tensor, y: Tensor) -> None:
    if x.dim() == 0 or y.dim() == 0 or x.shape[-1] != y.shape[-1]:
        raise ValueError(f"x and y have shapes {tuple(x.shape)} and {tuple(y.shape)}: expected the same last dimension")


def _check_count(name: str, count: int) -> None:
    if count < 1:
        raise ValueError(f"{name} is {count}: expected at least 1")


def _check_kind(kind: str) -> None:
    if kind not in ("positive", "hyperbolic", "trigonometric"):
        raise ValueError(f'kind is {kind!r}: expected "positive", "hyperbolic" or "trigonometric"')
