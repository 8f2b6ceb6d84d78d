"""Random feature maps: of the exponential of the scaled dot product, and of the Gaussian."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .base import Fact
from .feature_base import FeatureKernel, Features
from .feature_maps import ExponentialMap, FeatureMap
from .features import _count, _fourth_root, _largest
from .values import HeadValue, hold, show


def random_projection(
    rows: int, dim: int, *, orthogonal: bool = True, generator: torch.Generator | None = None
) -> Tensor:
    """Directions ω, each normal with mean 0 and variance 1 in every coordinate: (rows, dim), in float64.

    With `orthogonal` they come in blocks of `dim` that stand at right angles to each other: the rows of a rotation
    drawn from the Haar measure, times independent lengths, χ distributed as those of a normal vector are, so that each
    row alone is still exactly normal. The Q of a QR decomposition is Haar distributed only after its columns have been
    given the signs of R's diagonal, since a decomposition routine fixes those in its own way.
    Source: Yu et al. 2016, section 3; Mezzadri 2007 for the signs.
    """
    device = torch.device("cpu") if generator is None else generator.device
    normal = torch.randn(rows, dim, generator=generator, dtype=torch.float64, device=device)
    if not orthogonal:
        return normal
    blocks = torch.randn(-(-rows // dim), dim, dim, generator=generator, dtype=torch.float64, device=device)
    q, r = torch.linalg.qr(blocks)
    turned: Tensor = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return turned.reshape(-1, dim)[:rows] * normal.square().sum(dim=-1, keepdim=True).sqrt()


class _RandomFeatures(FeatureKernel):
    """A map through a random projection, drawn once and kept in a buffer: `redraw` draws another."""

    projection: Tensor
    symmetric: Fact = True
    translation_invariant: Fact = False
    position_invariant: Fact = True
    positive_definite: Fact = True

    _for_each = 1
    """How many features a direction gives."""

    def __init__(
        self, dim: int, features: int, orthogonal: bool = True, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.dim, self.count = _count(f"{name}(dim=…)", dim), _count(f"{name}(features=…)", features)
        if self.count % self._for_each:
            raise ValueError(f"{name}(features={features}): expected an even number, two for each direction")
        if not isinstance(orthogonal, bool):
            raise TypeError(f"{name}(orthogonal=…): expected True or False, got {orthogonal!r}")
        self.orthogonal = orthogonal
        self.register_buffer("projection", self._draw(generator).to(torch.get_default_dtype()))

    def _draw(self, generator: torch.Generator | None) -> Tensor:
        rows = self.count // self._for_each
        return random_projection(rows, self.dim, orthogonal=self.orthogonal, generator=generator)

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw the projection anew, from `generator` or torch's own."""
        self.projection.copy_(self._draw(generator))

    def _scaled(self, x: Tensor) -> Tensor:
        """x in the type of the projection, if that is wider, and as large as the estimate wants it."""
        if x.shape[-1] != self.dim:
            raise ValueError(f"tokens of shape {tuple(x.shape)}: this {self!r} expects a last dimension of {self.dim}")
        return x.to(torch.promote_types(x.dtype, self.projection.dtype)) * _fourth_root(self.dim)

    def _projected(self, x: Tensor) -> Tensor:
        return x @ self.projection.to(x.dtype).mT

    def feature_count(self, width: int) -> int:
        return self.count

    def extra_repr(self) -> str:
        return f"{self.dim}, {self.count}" + ("" if self.orthogonal else ", orthogonal=False")


class FavorFeatures(_RandomFeatures):
    """Positive random features of the exponential of the scaled dot product (FAVOR+).

    κ_ij = φ(q_i) · φ(k_j) ≈ exp(q_i · k_j / √d),  φ(x)_r = exp(ω_r · x' − |x'|²/2) / √m,  x' = x d^(−1/4)

    q (…, n, dim), k (…, m, dim) → κ (…, n, m) > 0, from `features` m directions ω_r, normal with variance 1 and, by
    default, orthogonal in blocks of `dim`. Unbiased over draws, E κ = exp(x·y) at x = q', y = k', with independent
    directions of variance e^{|x+y|²} e^{2x·y} (1 − e^{−|x+y|²}) / m: small where κ is small, and beyond hope while m is
    far below e^{|x+y|²}, where a rare direction carries the mean. Orthogonal directions take off a part of it. Draws
    once, from `generator` or torch's own; `redraw(generator)` draws again. The projection is a buffer.
    Each token is measured by its own largest feature, so no exponent overflows. Products of features can still be too
    small for a float, in float32 where |q'| and |k'| are some tens; the pair then has next to no weight, whatever the
    exact estimate is. Positive definite: an inner product of one map.
    TypeError, ValueError for counts below 1 and for an input of another width.
    Source: Choromanski et al. 2021 (Performers), lemma 1 and lemma 2, section 2.4 for the blocks.
    """

    positive = True

    def features(self, x: Tensor, position: Tensor) -> Features:
        x = self._scaled(x)
        exponent = self._projected(x)
        top = _largest(exponent)
        values = (exponent - top).exp() / math.sqrt(self.count)
        return Features(values, top.squeeze(-1) - _half_square(x))

    def feature_map(self, dtype: torch.dtype) -> FeatureMap | None:
        if not self._maps_as(FavorFeatures) or torch.promote_types(dtype, self.projection.dtype) != dtype:
            return None
        scale = _fourth_root(self.dim)
        return ExponentialMap(self.projection.to(dtype) * scale, scale)


class HyperbolicFeatures(_RandomFeatures):
    """Positive random features of the exponential of the scaled dot product, each direction used both ways.

    κ_ij = φ(q_i) · φ(k_j) ≈ exp(q_i · k_j / √d),  φ(x) = exp(−|x'|²/2) [exp(ω_r · x'), exp(−ω_r · x')] / √2m,
    x' = x d^(−1/4)

    q (…, n, dim), k (…, m, dim) → κ (…, n, m) > 0, from `features` = 2m features of m directions. As `FavorFeatures`
    otherwise. Unbiased over draws; with independent directions its variance is that of m positive features times
    (1 − e^{−|x+y|²})/2, so never above that of 2m of them.
    TypeError, ValueError for counts below 1, odd `features`, and an input of another width.
    Source: Choromanski et al. 2021, lemma 1 and lemma 2 (SM^hyp+).
    """

    positive = True
    _for_each = 2

    def features(self, x: Tensor, position: Tensor) -> Features:
        x = self._scaled(x)
        exponent = self._projected(x)
        exponent = torch.cat([exponent, -exponent], dim=-1)
        top = _largest(exponent)
        values = (exponent - top).exp() / math.sqrt(self.count)
        return Features(values, top.squeeze(-1) - _half_square(x))


class TrigonometricFeatures(_RandomFeatures):
    """Random cosines and sines of the exponential of the scaled dot product: of either sign.

    κ_ij = φ(q_i) · φ(k_j) ≈ exp(q_i · k_j / √d),  φ(x) = exp(|x'|²/2) [cos(ω_r · x'), sin(ω_r · x')] / √m,
    x' = x d^(−1/4)

    q (…, n, dim), k (…, m, dim) → κ (…, n, m), from `features` = 2m features of m directions. Unbiased over draws; with
    independent directions of variance e^{|x+y|²} e^{−2x·y} (1 − e^{−|x−y|²})² / 2m at x = q', y = k': 0 at q = k, and
    largest just where κ should be next to nothing. There it is often negative, the sum of a row comes near 0, and
    weights explode: compare `FavorFeatures`. Draws as that does. Positive definite: an inner product of one map.
    TypeError, ValueError for counts below 1, odd `features`, and an input of another width.
    Source: Choromanski et al. 2021, lemma 2 (SM^trig); Rahimi & Recht 2007 for the cosines.
    """

    _for_each = 2

    def features(self, x: Tensor, position: Tensor) -> Features:
        x = self._scaled(x)
        return Features(_waves(self._projected(x)), _half_square(x))


class FourierFeatures(_RandomFeatures):
    """Random Fourier features of the Gaussian: a cosine and a sine for each direction.

    κ_ij = φ(q_i) · φ(k_j) = Σ_r cos(ω_r · (q_i − k_j)/σ) / m ≈ exp(−|q_i − k_j|²/2σ²),
    φ(x) = [cos(ω_r · x/σ), sin(ω_r · x/σ)] / √m

    q (…, n, dim), k (…, m, dim) → κ (…, n, m) in [−1, 1], from `features` D = 2m features of m directions. `bandwidth`
    σ > 0, in the inputs' unit, is a number (default 1), a tensor with one entry per head, or an `nn.Parameter`.
    Unbiased over draws; with independent directions of variance (1 + κ(2Δ) − 2κ(Δ)²)/D at Δ = q − k for the exact κ: 0
    at q = k, and 1/D far away, whatever the dimension, so that what should be no weight is of size 1/√D and of either
    sign. Draws as `FavorFeatures` does. Positive definite: an inner product of one map.
    TypeError, ValueError for counts below 1, odd `features`, a bandwidth not above zero, an input of another width.
    Source: Rahimi & Recht 2007; Sutherland & Schneider 2015 for the variance.
    """

    translation_invariant: Fact = True
    _for_each = 2

    bandwidth: HeadValue

    def __init__(
        self,
        dim: int,
        features: int,
        bandwidth: HeadValue = 1.0,
        orthogonal: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(dim, features, orthogonal, generator)
        hold(self, "bandwidth", bandwidth, positive=True)

    def _scaled(self, x: Tensor) -> Tensor:
        return super()._scaled(x) / _fourth_root(self.dim)

    def features(self, x: Tensor, position: Tensor) -> Tensor:
        x = self._scaled(x)
        width: HeadValue = self.bandwidth
        if isinstance(width, Tensor):
            if width.dim() and width.shape[0] > 1 and (x.dim() < 3 or x.shape[-3] not in (1, width.shape[0])):
                raise ValueError(
                    f"bandwidth has one entry for each of {width.shape[0]} heads, "
                    f"so tokens need as many at dimension -3, got shape {tuple(x.shape)}"
                )
            width = width.reshape(-1, 1, 1) if width.numel() > 1 else width.reshape(())
            x = x.to(torch.promote_types(x.dtype, width.dtype))
        return _waves(self._projected(x / width))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bandwidth={show(self.bandwidth)}"


def _half_square(x: Tensor) -> Tensor:
    return x.square().sum(dim=-1) / 2.0


def _waves(angle: Tensor) -> Tensor:
    """[cos, sin] over the root of their number, (…, n, 2m)."""
    return torch.cat([angle.cos(), angle.sin()], dim=-1) / math.sqrt(angle.shape[-1])
