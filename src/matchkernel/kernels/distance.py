"""Scores that fall with a distance: Gaussian, Laplacian, rational quadratic."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import DotKernel, Fact, MatchKernel, Parts, ScoreFact, as_tensor
from .distance_tiles import AbsoluteForm, LogarithmForm
from .encoding import Encoding, leaves
from .pairs import anchored, lifted
from .tiles import Tiles
from .values import HeadValue, as_column, as_factor, as_number, hold, show
from .wrap_tiles import TimesForm, beside, carrying


class Gaussian(DotKernel):
    """Minus half the squared distance over a bandwidth: the weight is a Gaussian bump around the key.

    s_ij = −|q_i − k_j|² / 2σ² = (q_i · k_j − |k_j|²/2) / σ² − |q_i|²/2σ²

    q (…, n, d), k (…, m, d) → scores (…, n, m), at most 0. `bandwidth` σ > 0, in the inputs' unit, is a number (default
    1), a tensor with one entry per head, or an `nn.Parameter`. An inner product with one more coordinate, so it runs
    fused; a softmax does not see the last term. For keys of one length it is `Dot` over σ². Both inputs are moved so
    that the first key is the origin, and the coordinate that holds the norm keeps its digits in half precision. One
    origin serves one place: in a half type, data in groups many bandwidths apart lose digits away from the first key
    on the fused engine; `Tiled` and the reference compute in float32 and do not.
    2nm(d + 1) operations, and a few passes over q and k. ValueError for a bandwidth that is not above zero.
    e^{q·k/σ²} is positive definite as `Dot` is, and a factor f(q) f(k) keeps it so. For Σᵢ cᵢ = 0 the norms drop out of
    Σᵢⱼ cᵢ cⱼ s(xᵢ, xⱼ) = |Σᵢ cᵢ xᵢ|²/σ² ≥ 0, so s is conditionally positive definite, and no more: s(x, x) = 0.
    Source: Tsai et al. 2019 (the RBF kernel); Kim, Papamakarios & Mnih 2021 (L2 attention, where σ² = √d/2).
    """

    symmetric: Fact = True
    translation_invariant: Fact = True
    position_invariant: Fact = True
    score_positive_definite: ScoreFact = "conditionally"
    positive_definite: Fact = True

    bandwidth: HeadValue

    def __init__(self, bandwidth: HeadValue = 1.0) -> None:
        super().__init__()
        hold(self, "bandwidth", bandwidth, positive=True)

    def scale(self, width: int) -> float:
        return 1.0 if isinstance(self.bandwidth, Tensor) else self.bandwidth**-2

    def encode_pair(
        self, q: Tensor, k: Tensor, query_position: Tensor, key_position: Tensor, *, up_to_row_shift: bool = False
    ) -> Parts:
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k = anchored(q, k, beyond=0.0 if q.dtype == wide else self._near())
        # A norm may leave the range of float16 where its sixteenth does not.
        fine_q = q.new_full((*q.shape[:-1], 1), 16.0, dtype=wide)
        fine_k = _half_square(k, wide) / -16.0
        term = None if up_to_row_shift else -_half_square(q, wide)
        if not isinstance(self.bandwidth, Tensor):
            return Parts(q, k, None if term is None else self.bandwidth**-2 * term.squeeze(-1), fine_q, fine_k)
        # Into the query: grouped queries share a key, and may differ in bandwidth.
        precision = torch.as_tensor(as_factor(self.bandwidth, q))
        precision = precision.to(torch.promote_types(precision.dtype, wide)) ** -2
        term = None if term is None else (precision * term).squeeze(-1)
        return Parts((precision * q).to(q.dtype), k, term, precision * fine_q, fine_k)

    def _near(self) -> float | Tensor:
        """How near the origin a half type is left where it is.

        There the norm, in two parts, keeps digits enough, while q − anchor would be rounded to the type's few.
        """
        bandwidth = self.bandwidth
        return 3.0 * (bandwidth.detach().amin() if isinstance(bandwidth, Tensor) else bandwidth)

    def flops_per_pair(self, query_width: int, key_width: int) -> int:
        """The product, with a coordinate for the key's norm."""
        return 2 * (key_width + 1)

    def extra_repr(self) -> str:
        return f"bandwidth={show(self.bandwidth)}"


class Laplacian(MatchKernel):
    """Minus the sum of absolute differences over a bandwidth.

    s_ij = −|q_i − k_j|₁ / σ = −Σ_c |q_ic − k_jc| / σ

    q (…, n, d), k (…, m, d) → scores (…, n, m), at most 0. `bandwidth` σ > 0, in the inputs' unit, is a number (default
    1), a tensor with one entry per head, or an `nn.Parameter`. Not an inner product of finite encodings: 3nmd
    operations, and written out densely nmd numbers in memory. Where q and k agree in a coordinate its slope is 0;
    elsewhere the score is linear in it, so second derivatives in q and k are 0, where `torch.cdist` has none at all.
    ValueError for a bandwidth that is not above zero.
    eˢ is a product of e^{−|x − y|/σ} over coordinates, each the Fourier transform of a Cauchy density, so positive
    definite (Bochner). That holds for every σ, so s is conditionally positive definite (Schoenberg), and no more:
    s(x, x) = 0.
    Source: Rahimi & Recht 2007, fig. 1 ("Laplacian"); as attention, Kim et al. 2019 (Attentive Neural Processes).
    """

    symmetric: Fact = True
    translation_invariant: Fact = True
    position_invariant: Fact = True
    score_positive_definite: ScoreFact = "conditionally"
    positive_definite: Fact = True

    bandwidth: HeadValue

    def __init__(self, bandwidth: HeadValue = 1.0) -> None:
        super().__init__()
        hold(self, "bandwidth", bandwidth, positive=True)

    def encode_query(self, q: Tensor, position: Tensor) -> Encoding:
        """The query; beside it one over the bandwidth, where heads may differ in it."""
        return carrying(q, 1.0 / self.bandwidth, q)

    def match(self, q: Encoding, k: Encoding) -> Tensor:
        own, precision = beside(q, self._precision)
        q, k = as_tensor(own, self), as_tensor(k, self)
        return -(q.unsqueeze(-2) - k.unsqueeze(-3)).abs().sum(-1) * precision

    def tiles(self, q: Encoding, k: Encoding) -> Tiles:
        return Tiles(TimesForm(AbsoluteForm(), self._precision), q, k)

    @property
    def _precision(self) -> float | None:
        return as_number(1.0 / self.bandwidth)

    def flops_per_pair(self, query_width: int, key_width: int) -> int:
        """A difference, its absolute value and a sum for each coordinate; the division."""
        return 3 * key_width + 1

    def extra_repr(self) -> str:
        return f"bandwidth={show(self.bandwidth)}"


class RationalQuadratic(MatchKernel):
    """A mixture of Gaussians of many bandwidths: falls like a power of the distance, with the tail that α says.

    s_ij = −α log(1 + |q_i − k_j|² / 2ασ²)

    q (…, n, d), k (…, m, d) → scores (…, n, m), at most 0. `alpha` α > 0, which has no unit, and `bandwidth` σ > 0, in
    the inputs' unit, are numbers (default 1), tensors with one entry per head, or `nn.Parameter`s. α = 1 is the Cauchy
    kernel, whose weight is 1 / (1 + |q − k|²/2σ²); α → ∞ is `Gaussian`. One matrix product, and a logarithm per pair:
    2nmd operations and a few more. ValueError for a value that is not above zero.
    eˢ is the mean of e^{−t|x − y|²/2σ²} over t gamma distributed with shape α and mean 1, so positive definite. That
    holds for every α > 0, so s is conditionally positive definite (Schoenberg), and no more: s(x, x) = 0.
    Source: Rasmussen & Williams 2006, eq. 4.19.
    """

    symmetric: Fact = True
    translation_invariant: Fact = True
    position_invariant: Fact = True
    score_positive_definite: ScoreFact = "conditionally"
    positive_definite: Fact = True

    alpha: HeadValue
    bandwidth: HeadValue

    def __init__(self, alpha: HeadValue = 1.0, bandwidth: HeadValue = 1.0) -> None:
        super().__init__()
        hold(self, "alpha", alpha, positive=True)
        hold(self, "bandwidth", bandwidth, positive=True)

    def encode(
        self, q: Tensor, k: Tensor, query_position: Tensor, key_position: Tensor, *, up_to_row_shift: bool = False
    ) -> tuple[Encoding, Encoding]:
        """Both with their squared norms, moved near the origin; beside the query α and 1/2ασ², where heads differ."""
        q, k = anchored(q, k)
        query = (q, q.square().sum(-1, keepdim=True))
        key = (k, k.square().sum(-1, keepdim=True))
        if self._numbers is not None:
            return query, key
        alpha = as_column(self.alpha, q)
        return (*query, alpha, 0.5 / (alpha * as_column(self.bandwidth, q) ** 2)), key

    def match(self, q: Encoding, k: Encoding) -> Tensor:
        x, of_query, *beside_query = leaves(q)
        y, of_key = leaves(k)
        alpha, c = beside_query if self._numbers is None else self._numbers
        return -alpha * torch.log1p(c * lifted(of_query + of_key.mT - 2.0 * (x @ y.mT)))

    def tiles(self, q: Encoding, k: Encoding) -> Tiles:
        return Tiles(LogarithmForm(*(self._numbers or (None, None))), q, k)

    @property
    def _numbers(self) -> tuple[float, float] | None:
        """α and 1/2ασ², or None where one of them is a tensor."""
        if isinstance(self.alpha, Tensor) or isinstance(self.bandwidth, Tensor):
            return None
        return self.alpha, 0.5 / (self.alpha * self.bandwidth**2)

    def flops_per_pair(self, query_width: int, key_width: int) -> int:
        """The product, three operations to make it a distance, and division, logarithm and factor."""
        return 2 * key_width + 6

    def extra_repr(self) -> str:
        return f"alpha={show(self.alpha)}, bandwidth={show(self.bandwidth)}"


def _half_square(x: Tensor, dtype: torch.dtype) -> Tensor:
    """|x|²/2 in `dtype`, shape (…, tokens, 1)."""
    return x.to(dtype).square().sum(-1, keepdim=True) / 2.0
