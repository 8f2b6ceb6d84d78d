"""Attention with any match kernel, any normaliser and any mask: exact, and fused where a fused kernel exists."""

from .attention import Explanation, attend, explain, scaled_dot_product_attention, scores, weights
from .kernels import (
    Bilinear,
    Cosine,
    Dot,
    DotKernel,
    Gaussian,
    Laplacian,
    MatchKernel,
    RationalQuadratic,
    ScaledDot,
    squared_distance,
)
from .normalizers import Normalizer, ScalableSoftmax, Sigmoid, SinkSoftmax, Softmax

__version__ = "0.1.0"

__all__ = [
    "Bilinear",
    "Cosine",
    "Dot",
    "DotKernel",
    "Explanation",
    "Gaussian",
    "Laplacian",
    "MatchKernel",
    "Normalizer",
    "RationalQuadratic",
    "ScalableSoftmax",
    "ScaledDot",
    "Sigmoid",
    "SinkSoftmax",
    "Softmax",
    "attend",
    "explain",
    "scaled_dot_product_attention",
    "scores",
    "squared_distance",
    "weights",
]
