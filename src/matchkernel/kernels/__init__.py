"""How a query scores a key: maths on a pair, with no knowledge of who computes it."""

from .base import DotKernel, MatchKernel
from .distance import Gaussian, Laplacian, RationalQuadratic
from .dot import Bilinear, Cosine, Dot, ScaledDot
from .pairs import squared_distance

__all__ = [
    "Bilinear",
    "Cosine",
    "Dot",
    "DotKernel",
    "Gaussian",
    "Laplacian",
    "MatchKernel",
    "RationalQuadratic",
    "ScaledDot",
    "squared_distance",
]
