"""One list of kernels; every property of the contract runs over all of it."""

import torch

import matchkernel as mk

Tensor = torch.Tensor


class Cauchy(mk.MatchKernel):
    """A reader's own kernel, that only has a match."""

    symmetric = translation_invariant = position_invariant = True

    def match(self, q: Tensor, k: Tensor) -> Tensor:
        return -torch.log1p(mk.squared_distance(q, k))


class Ratio(mk.ProductKernel):
    """A reader's own function of q·k, |q|² and |k|², with something to learn."""

    symmetric = translation_invariant = position_invariant = True

    def __init__(self) -> None:
        super().__init__()
        self.sharpness = torch.nn.Parameter(torch.tensor(0.7))

    def combine(self, product: Tensor, query_square: Tensor, key_square: Tensor) -> Tensor:
        return -self.sharpness * torch.log1p(query_square + key_square - 2.0 * product)


class NormColumn(mk.DotKernel):
    """−|q − k|²/2 as an inner product with one more coordinate, and a query term that a softmax cannot see."""

    symmetric = translation_invariant = position_invariant = positive_definite = True
    score_positive_definite = "conditionally"

    def encode_query(self, q: Tensor, position: Tensor) -> Tensor:
        return torch.cat([q, torch.ones_like(q[..., :1])], -1)

    def encode_key(self, k: Tensor, position: Tensor) -> Tensor:
        return torch.cat([k, -k.square().sum(-1, keepdim=True) / 2], -1)

    def query_term(self, q: Tensor, position: Tensor) -> Tensor:
        return -q.square().sum(-1) / 2


class Distance(mk.MatchKernel):
    """−|i − j|/4, from positions alone: what the encoders are for."""

    symmetric = position_invariant = True

    def encode_query(self, q: Tensor, position: Tensor) -> Tensor:
        return position.to(q.dtype).unsqueeze(-1) + 0.0 * q[..., :1]

    def encode_key(self, k: Tensor, position: Tensor) -> Tensor:
        return position.to(k.dtype).unsqueeze(-1) + 0.0 * k[..., :1]

    def match(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q - k.mT).abs() / 4


class Squares(mk.FeatureKernel):
    """A reader's own feature kernel, in three lines: it does not say that it is never negative."""

    def features(self, x: Tensor, position: Tensor) -> Tensor:
        return x.square()


class Tokens(mk.FeatureKernel):
    """κ = q·k itself, which has either sign."""

    symmetric = position_invariant = positive_definite = True

    def features(self, x: Tensor, position: Tensor) -> Tensor:
        return x


class Powers(mk.FeatureKernel):
    """Another map for keys than for queries, with scales of their own and something to learn."""

    positive = position_invariant = True

    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.nn.Parameter(torch.tensor(0.7))

    def query_features(self, q: Tensor, position: Tensor) -> mk.Features:
        return mk.Features((self.rate * q).sigmoid(), q[..., 0])

    def key_features(self, k: Tensor, position: Tensor) -> mk.Features:
        return mk.Features((k + self.rate).sigmoid(), k.sum(-1))


def hedgehog(heads: int | None = None) -> mk.HedgehogFeatures:
    """Away from the identity, where both maps are one."""
    kernel, generator = mk.HedgehogFeatures(6, heads=heads), torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return kernel


def _learned(*entries: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(entries))


def make() -> dict[str, mk.MatchKernel]:
    """Fresh kernels for q, k of width 6 and two heads, the same every time."""
    generator = torch.Generator().manual_seed(7)
    per_head = torch.tensor([0.5, 2.0])
    kernels = [
        mk.Dot(),
        mk.ScaledDot(),
        mk.Cosine(),
        mk.Cosine(0.4),
        mk.Cosine(per_head),
        mk.Cosine(_learned(0.5, 0.9)),
        mk.Bilinear(6, generator=generator),
        mk.Bilinear(6, rank=2, generator=generator),
        mk.Gaussian(),
        mk.Gaussian(2.5),
        mk.Gaussian(per_head),
        mk.Gaussian(_learned(0.8, 1.7)),
        mk.Laplacian(3.0),
        mk.Laplacian(per_head),
        mk.Laplacian(_learned(2.5, 4.0)),
        mk.RationalQuadratic(),
        mk.RationalQuadratic(2.5, 0.7),
        mk.RationalQuadratic(per_head, per_head),
        mk.RationalQuadratic(_learned(0.6, 1.5), _learned(0.8, 1.7)),
        Ratio(),
        Cauchy(),
        NormColumn(),
        Distance(),
        mk.Dot() + NormColumn(),
        0.5 * NormColumn() + mk.Cosine(),
        per_head * NormColumn(),
        mk.ScaledDot() + Distance(),
        mk.ScaledDot() + Ratio(),
        mk.ScaledDot() + mk.Gaussian(per_head),
        0.5 * mk.Gaussian(2.0) + mk.Laplacian(3.0),
        per_head * mk.Gaussian(_learned(0.8, 1.7)),
        0.3 * Cauchy(),
        -0.5 * mk.Dot(),
        0.0 * mk.Dot(),
        0.0 * NormColumn(),
        _learned(0.7, 1.2) * (mk.ScaledDot() + mk.Bilinear(6, generator=generator)),
        _learned(0.8, 1.3) * Cauchy(),
        mk.ALiBi(2),
        mk.ScaledDot() + mk.ALiBi(slopes=_learned(0.3, 0.9)),
        per_head * (mk.Gaussian(2.0) + mk.ALiBi(2)),
        mk.Rotary(6),
        mk.Rotary(4, 100.0, interleaved=True),
        mk.RelativeBias(2, 8, 6, generator=generator),
        mk.ScaledDot() + mk.RelativeBias(2, 8, 6, bidirectional=False, generator=generator),
        mk.Softcap(mk.Gaussian(), 2.0),
        mk.Softcap(mk.ScaledDot() + mk.ALiBi(2), _learned(1.5, 3.0)),
        mk.mixture(mk.ScaledDot(), mk.ALiBi(2)),
        mk.mixture(mk.Dot(), mk.Gaussian(), mk.Bilinear(6, generator=generator), log_weights=_learned(0.1, -0.4, 0.3)),
        mk.Softcap(mk.mixture(mk.Gaussian(), mk.Rotary(6), weights=(0.5, 2.0)), 2.0) + mk.ALiBi(2),
        mk.Additive(6, 5, generator=generator),
        0.5 * mk.Gaussian(per_head) + mk.Additive(6, 4, generator=generator) + mk.ALiBi(2),
        mk.EluFeatures(),
        mk.TaylorFeatures(),
        mk.PolynomialFeatures(),
        mk.PolynomialFeatures(3, 2.0),
        mk.PolynomialFeatures(2, 0.0),
        mk.DPFPFeatures(3),
        mk.CosFeatures(150),
        mk.FavorFeatures(6, 32, generator=generator),
        mk.HyperbolicFeatures(6, 20, False, generator=generator),
        mk.TrigonometricFeatures(6, 64, generator=generator),
        mk.FourierFeatures(6, 64, 4.0, generator=generator),
        mk.FourierFeatures(6, 64, _learned(5.0, 7.0), generator=generator),
        hedgehog(heads=2),
        Squares(),
        Tokens(),
        Powers(),
        per_head * mk.EluFeatures() + mk.ALiBi(2),
        mk.DPFPFeatures() + mk.ALiBi(2),
        mk.Softcap(mk.FavorFeatures(6, 32, generator=generator), _learned(1.5, 3.0)),
        mk.mixture(hedgehog(), mk.Gaussian(), log_weights=_learned(0.1, -0.4)),
    ]
    return {f"{number:02d} {kernel!r}": kernel for number, kernel in enumerate(kernels)}
