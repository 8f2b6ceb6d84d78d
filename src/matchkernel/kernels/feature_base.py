"""What a feature kernel is: its weight, not its score, is an inner product of finite maps of query and key."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .base import MatchKernel
from .encoding import Encoding, leaves
from .feature_maps import FeatureMap
from .pairs import lifted

LEAST = -1e4
"""The logarithm of a positive κ, before its scales, that has left the range of its type: finite, in float16 too, so
that no factor makes it NaN, and far enough down to lose against every key that has not."""


class Features(NamedTuple):
    """A feature map whose entries may leave the range of a float: φ = values · exp(log_scale).

    values (…, n, f), log_scale (…, n). One stabiliser for each token, made from that token alone: a largest entry over
    all keys would let the future reach the past.
    """

    values: Tensor
    log_scale: Tensor


class FeatureKernel(MatchKernel):
    """A kernel whose weight is an inner product of finite feature maps, one of the query and one of the key.

    κ_ij = φ_q(q_i) · φ_k(k_j),  s_ij = log κ_ij

    q (…, n, d), k (…, m, d) → weights κ (…, n, m). Subclass it and write `features(x, position)`, from tokens
    (…, n, d) and positions (…, n) to (…, n, f), for both sides; or `query_features` and `key_features`, with equal f.
    Half types come in as float32. A map that can overflow returns `Features(values, log_scale)`.

        class Squares(mk.FeatureKernel):
            def features(self, x, position):
                return x.square()

    It declares the sign of κ, as facts for all inputs, and the tests hold it to them:
      positive     κ > 0. Features whose products are all too small for a float count as κ = e^−10000.
      nonnegative  κ ≥ 0. What is positive is; what rounding brought below 0 counts as 0.
    Neither is the default: κ may then have either sign. The other facts are those of every kernel, and
    `positive_definite` speaks of κ: with one map for both sides Σᵢⱼ cᵢ cⱼ κ(xᵢ, xⱼ) = |Σᵢ cᵢ φ(xᵢ)|² ≥ 0.

    `Softmax()` at temperature 1 and `SinkSoftmax` weigh by shares of κ, α_ij = κ_ij / Σ_j' κ_ij', whatever its sign, a
    float mask b multiplying it by eᵇ. A row whose sum is 0 gives zeros; the sum of a signed row may come close to 0,
    and its weights are then as large as they look. Everything else sees the score log κ, −∞ where κ is 0, whose
    gradient there is 0: other normalisers, and sums, multiples, mixtures and softcaps of kernels. `a + b` has the
    weight κ_a κ_b, which is what a product of kernels means. ValueError where a signed kernel's score is asked for.
    The multiple or softcap of a kernel that can be 0 by a learned number has no derivative where it is.

    Cost here: both maps, and a table of 2nmf operations. Features are summed in float32 or wider.
    Source: Katharopoulos et al. 2020, eq. 4; Tsai et al. 2019, eq. 2, for κ in the place of an exponential.
    """

    positive: bool = False
    nonnegative: bool = False

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if cls.positive and "nonnegative" not in cls.__dict__:
            cls.nonnegative = True
        for taken in ("match", "encode_query", "encode_key"):
            if taken in cls.__dict__:
                # An engine that sums features never calls it, so the weights would depend on who computes them.
                raise TypeError(
                    f"{cls.__name__} is a FeatureKernel, whose {taken} is made from its features: write "
                    "features(x, position), or subclass MatchKernel"
                )

    def features(self, x: Tensor, position: Tensor) -> Tensor | Features:
        """φ of either side: (…, n, d) and positions (…, n) → (…, n, f)."""
        raise NotImplementedError(
            f"{type(self).__name__} must define features(x, position) -> (…, tokens, f), "
            "or query_features and key_features"
        )

    def query_features(self, q: Tensor, position: Tensor) -> Tensor | Features:
        """φ_q; `features` unless it is another."""
        return self.features(q, position)

    def key_features(self, k: Tensor, position: Tensor) -> Tensor | Features:
        """φ_k; `features` unless it is another."""
        return self.features(k, position)

    def feature_count(self, width: int) -> int | None:
        """How many features a token of that width has; None when nobody has said."""
        return None

    def feature_map(self, dtype: torch.dtype) -> FeatureMap | None:
        """The map of both sides as its author wrote it for sums of that dtype; None to have `features` used."""
        return None

    def _maps_as(self, owner: type[FeatureKernel]) -> bool:
        """Whether the maps are still those of `owner`: a subclass with others has not the map that it ships."""
        names = ("features", "query_features", "key_features", "encode")
        return all(getattr(type(self), name) is getattr(owner, name) for name in names)

    def kappa(
        self, q: Tensor, k: Tensor, query_position: Tensor | None = None, key_position: Tensor | None = None
    ) -> Tensor:
        """The table of κ (…, n, m), of either sign, in float32 or wider; positions as in `forward`.

        An entry beyond the range of that type is infinite or 0, where the score log κ may still be finite.
        """
        n, m = q.shape[-2], k.shape[-2]
        if query_position is None:
            query_position = torch.arange(m - n, m, device=q.device)
        if key_position is None:
            key_position = torch.arange(m, device=k.device)
        product, log_scale = self.products(*self.encode(q, k, query_position, key_position))
        half = (log_scale / 2.0).exp()
        return product * half * half

    def products(self, q: Encoding, k: Encoding) -> tuple[Tensor, Tensor]:
        """κ of all encoded queries and keys in two factors: κ = product · e^log_scale, both (…, n, m)."""
        (x, of_query), (y, of_key) = leaves(q), leaves(k)
        self.check_features(x, y)
        product = x.to(torch.promote_types(x.dtype, y.dtype)) @ y.to(torch.promote_types(x.dtype, y.dtype)).mT
        if self.positive or self.nonnegative:
            product = lifted(product)
        return product, of_query + of_key.mT

    def check_features(self, query: Tensor, key: Tensor) -> None:
        """Raise unless both maps give equally many features."""
        if query.shape[-1] != key.shape[-1]:
            found = f"queries to {query.shape[-1]} features and keys to {key.shape[-1]}"
            raise ValueError(f"{self!r} maps {found}, expected equally many")

    def check_positions(self, query_position: Tensor, key_position: Tensor) -> None:
        """Raise where the map is not meant for such positions, which it does not see together elsewhere."""

    def encode(
        self, q: Tensor, k: Tensor, query_position: Tensor, key_position: Tensor, *, up_to_row_shift: bool = False
    ) -> tuple[Encoding, Encoding]:
        self.check_positions(query_position, key_position)
        return super().encode(q, k, query_position, key_position, up_to_row_shift=up_to_row_shift)

    def encode_query(self, q: Tensor, position: Tensor) -> Encoding:
        return self._encoded("q", q, self.query_features(_widened(q), position))

    def encode_key(self, k: Tensor, position: Tensor) -> Encoding:
        return self._encoded("k", k, self.key_features(_widened(k), position))

    def _encoded(self, name: str, x: Tensor, features: object) -> Encoding:
        owner = f"{name} has shape {tuple(x.shape)}: {self!r}"
        values, log_scale = features if isinstance(features, Features) else (features, None)
        if not isinstance(values, Tensor) or not values.is_floating_point():
            kind = f"a tensor of {values.dtype}" if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(f"{owner} maps it to {kind}, expected a floating-point tensor or Features")
        if values.dim() < 2 or values.shape[-2] != x.shape[-2]:
            raise ValueError(f"{owner} maps it to {tuple(values.shape)}, expected (…, {x.shape[-2]}, features)")
        if log_scale is None:
            return values, values.new_zeros(()).expand(*values.shape[:-1], 1)
        if log_scale.shape[-1:] != values.shape[-2:-1]:
            raise ValueError(f"{owner} has a log_scale of {tuple(log_scale.shape)}, expected (…, {x.shape[-2]})")
        return values, log_scale.unsqueeze(-1)

    def match(self, q: Encoding, k: Encoding) -> Tensor:
        """log κ (…, n, m); ValueError for a kernel that may be negative."""
        reason = why_no_score(self)
        if reason is not None:
            raise ValueError(f"{reason}: take Softmax() or SinkSoftmax, which weigh by κ itself, or read kappa(q, k)")
        product, log_scale = self.products(q, k)
        none = product < torch.finfo(product.dtype).tiny
        # The logarithm's slope at 0 is infinite: what is 0 takes the branch that never meets it. A NaN stays one.
        logarithm = torch.where(none, 1.0, product).log()
        if self.positive:
            return torch.where(none, LEAST, logarithm) + log_scale
        return torch.where(none, float("-inf"), logarithm + log_scale)

    def forward(
        self, q: Tensor, k: Tensor, query_position: Tensor | None = None, key_position: Tensor | None = None
    ) -> Tensor:
        """The scores log κ (…, n, m), in the inputs' dtype or that of a wider parameter."""
        scores = super().forward(q, k, query_position, key_position)
        dtype = torch.promote_types(q.dtype, k.dtype)
        narrow = torch.finfo(dtype).bits < 32 and scores.dtype == torch.float32
        return scores.to(dtype) if narrow else scores

    def flops_per_pair(self, query_width: int, key_width: int) -> int | None:
        """A multiplication and an addition for each feature."""
        count = self.feature_count(key_width)
        return None if count is None else 2 * count


def why_no_score(kernel: MatchKernel) -> str | None:
    """Why a kernel, or one that it is made of, has no score log κ; None when it has."""
    for part in kernel.modules():
        if isinstance(part, FeatureKernel) and not (part.positive or part.nonnegative):
            return f"{part!r} is signed: its weight κ may be negative, and then has no logarithm"
    return None


def may_be_zero(kernel: MatchKernel) -> bool:
    """Whether a weight κ may be exactly 0, and the score −∞."""
    return any(isinstance(part, FeatureKernel) and not part.positive for part in kernel.modules())


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
