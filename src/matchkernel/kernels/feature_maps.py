"""Feature maps with a derivative of their own: what a feature kernel may ship, so that summing features costs less."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._opaque import product

MOST = 2.0**32
"""What a feature is to stay below: sums of products of two such are far from overflowing."""


class Mapped(NamedTuple):
    """Features (…, tokens, f) of some tokens, and their log scales (…, tokens, 1), None where all are 0."""

    values: Tensor
    log_scale: Tensor | None


class FeatureMap:
    """The map of both sides and all heads, for tokens (…, tokens, d) of the dtype of sums; it sees no position.

    `FeatureKernel.features` measures every token by its largest feature, so that none leaves the range of a float. This
    takes features as they are, which costs less, where all are in range. No derivative is recorded.
    """

    def features(self, x: Tensor) -> Mapped | None:
        """None where a feature is above `MOST`, or not a number."""
        raise NotImplementedError(f"{type(self).__name__} must define features(x)")

    def pull(self, x: Tensor, values: Tensor, grad: Tensor, into: Tensor) -> None:
        """Put into `into` the gradient of x, given that of the values, grad; both of these may be overwritten.

        As what is summed is values · e^log_scale, the gradient of a token's log scale is the sum of values · grad.
        """
        raise NotImplementedError(f"{type(self).__name__} must define pull(x, values, grad, into)")


class EluMap(FeatureMap):
    """e^x below 0, and x + 1 above."""

    def features(self, x: Tensor) -> Mapped | None:
        if not bool(x.amax() < MOST):
            return None
        above = x.relu()
        return Mapped((x - above).exp_().add_(above), None)

    def pull(self, x: Tensor, values: Tensor, grad: Tensor, into: Tensor) -> None:
        # Below 0 the slope is the feature itself, and above it is 1, where the feature is larger.
        torch.mul(grad, values.clamp_max_(1.0), out=into)


class ExponentialMap(FeatureMap):
    """e^(ω_r · x) for each row ω_r of a projection (f, d), with the log scale −(scale · |x|)²/2 − log(f)/2."""

    def __init__(self, projection: Tensor, scale: float) -> None:
        self.projection = projection
        self.scale = scale

    def features(self, x: Tensor) -> Mapped | None:
        exponent = self._product(x, self.projection)
        if not bool(exponent.amax() < math.log(MOST)):
            return None
        half_square = x.square().sum(dim=-1, keepdim=True).mul_(-(self.scale**2) / 2.0)
        return Mapped(exponent.exp_(), half_square.sub_(math.log(len(self.projection)) / 2.0))

    def pull(self, x: Tensor, values: Tensor, grad: Tensor, into: Tensor) -> None:
        grad.mul_(values)
        into.copy_(self._product(grad, self.projection.mT))
        into.addcmul_(x, grad.sum(dim=-1, keepdim=True), value=-(self.scale**2))

    @staticmethod
    def _product(x: Tensor, rows: Tensor) -> Tensor:
        return product(x.reshape(-1, x.shape[-1]), rows).view(*x.shape[:-1], -1)
