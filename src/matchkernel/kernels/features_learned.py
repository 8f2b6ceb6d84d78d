"""A feature map that is learned."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import Fact
from .feature_base import FeatureKernel, Features
from .features import _count, _size


class HedgehogFeatures(FeatureKernel):
    """Exponentials of a learned linear map and of its negative, one map for queries and one for keys.

    κ_ij = φ_q(q_i) · φ_k(k_j),  φ(x) = [exp(W x + b), exp(−W x − b)]

    q (…, n, dim), k (…, m, dim) → κ (…, n, m) > 0, from 2 · dim features. `heads` None (default) gives all heads the
    same maps, a number one of each for every head. 2 · dim · (dim + 1) parameters, times heads. W starts as the
    identity and b at 0, as the authors' do, where κ = 2 Σ_c cosh(q_c + k_c). Each token is measured by its own largest
    feature, so no exponent overflows.
    What it is learned for is often to give the weights of a softmax that is already there; the loss is the cross
    entropy between the two tables, on the queries and keys of that model:

        loss = -(mk.weights(q, k) * mk.weights(q, k, hedgehog).log()).sum(-1).mean()

    Not symmetric in general, since the maps differ; None of the facts but that of positions.
    TypeError, ValueError for counts below 1 and for an input of another width or number of heads.
    Source: Zhang et al. 2024 (The Hedgehog & the Porcupine), section 4.
    """

    positive = True
    position_invariant: Fact = True

    def __init__(self, dim: int, heads: int | None = None) -> None:
        super().__init__()
        self.dim = _count("HedgehogFeatures(dim=…)", dim)
        self.heads = None if heads is None else _count("HedgehogFeatures(heads=…)", heads)
        lead = () if self.heads is None else (self.heads,)
        self.query_weight = nn.Parameter(torch.empty(*lead, dim, dim))
        self.query_bias = nn.Parameter(torch.empty(*lead, dim))
        self.key_weight = nn.Parameter(torch.empty(*lead, dim, dim))
        self.key_bias = nn.Parameter(torch.empty(*lead, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Both maps to the identity."""
        with torch.no_grad():
            for weight, bias in ((self.query_weight, self.query_bias), (self.key_weight, self.key_bias)):
                weight.copy_(torch.eye(self.dim).expand_as(weight))
                bias.zero_()

    def query_features(self, q: Tensor, position: Tensor) -> Features:
        return self._exponentials(q, self.query_weight, self.query_bias)

    def key_features(self, k: Tensor, position: Tensor) -> Features:
        return self._exponentials(k, self.key_weight, self.key_bias)

    def _exponentials(self, x: Tensor, weight: Tensor, bias: Tensor) -> Features:
        if x.shape[-1] != self.dim:
            raise ValueError(f"tokens of shape {tuple(x.shape)}: this {self!r} expects a last dimension of {self.dim}")
        if self.heads is not None and (x.dim() < 3 or x.shape[-3] not in (1, self.heads)):
            raise ValueError(f"tokens of shape {tuple(x.shape)}: this {self!r} expects {self.heads} at dimension -3")
        wide = torch.promote_types(x.dtype, weight.dtype)
        exponent = x.to(wide) @ weight.to(wide).mT + bias.to(wide).unsqueeze(-2)
        top = _size(exponent)
        values = (torch.cat([exponent, -exponent], dim=-1) - top).exp()
        return Features(values, top.squeeze(-1))

    def feature_count(self, width: int) -> int:
        return 2 * self.dim

    def extra_repr(self) -> str:
        return f"{self.dim}" if self.heads is None else f"{self.dim}, heads={self.heads}"
