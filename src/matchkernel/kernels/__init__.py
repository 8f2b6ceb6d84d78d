"""How a query scores a key: maths on a pair, with no knowledge of who computes it."""

from .additive import Additive
from .base import DotKernel, MatchKernel
from .distance import Gaussian, Laplacian, RationalQuadratic
from .dot import Bilinear, Cosine, Dot, ScaledDot
from .feature_base import FeatureKernel, Features
from .features import CosFeatures, DPFPFeatures, EluFeatures, PolynomialFeatures, TaylorFeatures
from .features_learned import HedgehogFeatures
from .features_random import FavorFeatures, FourierFeatures, HyperbolicFeatures, TrigonometricFeatures
from .pairs import squared_distance
from .position import ALiBi, RelativeBias, Rotary, alibi_slopes
from .product import ProductKernel
from .wrap import Mixture, Softcap, mixture

__all__ = [
    "ALiBi",
    "Additive",
    "Bilinear",
    "CosFeatures",
    "Cosine",
    "DPFPFeatures",
    "Dot",
    "DotKernel",
    "EluFeatures",
    "FavorFeatures",
    "FeatureKernel",
    "Features",
    "FourierFeatures",
    "Gaussian",
    "HedgehogFeatures",
    "HyperbolicFeatures",
    "Laplacian",
    "MatchKernel",
    "Mixture",
    "PolynomialFeatures",
    "ProductKernel",
    "RationalQuadratic",
    "RelativeBias",
    "Rotary",
    "ScaledDot",
    "Softcap",
    "TaylorFeatures",
    "TrigonometricFeatures",
    "alibi_slopes",
    "mixture",
    "squared_distance",
]
