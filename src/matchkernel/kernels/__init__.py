"""How a query scores a key: maths on a pair, with no knowledge of who computes it."""

from .additive import Additive
from .base import DotKernel, MatchKernel
from .distance import Gaussian, Laplacian, RationalQuadratic
from .dot import Bilinear, Cosine, Dot, ScaledDot
from .pairs import squared_distance
from .position import ALiBi, RelativeBias, Rotary, alibi_slopes
from .product import ProductKernel
from .wrap import Mixture, Softcap, mixture

__all__ = [
    "ALiBi",
    "Additive",
    "Bilinear",
    "Cosine",
    "Dot",
    "DotKernel",
    "Gaussian",
    "Laplacian",
    "MatchKernel",
    "Mixture",
    "ProductKernel",
    "RationalQuadratic",
    "RelativeBias",
    "Rotary",
    "ScaledDot",
    "Softcap",
    "alibi_slopes",
    "mixture",
    "squared_distance",
]
