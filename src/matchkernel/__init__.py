"""Attention with any match kernel, any normaliser and any mask: exact, and fused where a fused kernel exists."""

from .attention import Explanation, attend, explain, scaled_dot_product_attention, scores, weights
from .cache import KeyValueCache
from .engines import Tiled
from .kernels import (
    Additive,
    ALiBi,
    Bilinear,
    Cosine,
    Dot,
    DotKernel,
    Gaussian,
    Laplacian,
    MatchKernel,
    Mixture,
    ProductKernel,
    RationalQuadratic,
    RelativeBias,
    Rotary,
    ScaledDot,
    Softcap,
    alibi_slopes,
    mixture,
    squared_distance,
)
from .multihead import MultiHeadAttention
from .normalizers import Entmax, Normalizer, ScalableSoftmax, Sigmoid, SinkSoftmax, Softmax, Sparsemax

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "Additive",
    "Bilinear",
    "Cosine",
    "Dot",
    "DotKernel",
    "Entmax",
    "Explanation",
    "Gaussian",
    "KeyValueCache",
    "Laplacian",
    "MatchKernel",
    "Mixture",
    "MultiHeadAttention",
    "Normalizer",
    "ProductKernel",
    "RationalQuadratic",
    "RelativeBias",
    "Rotary",
    "ScalableSoftmax",
    "ScaledDot",
    "Sigmoid",
    "SinkSoftmax",
    "Softcap",
    "Softmax",
    "Sparsemax",
    "Tiled",
    "alibi_slopes",
    "attend",
    "explain",
    "mixture",
    "scaled_dot_product_attention",
    "scores",
    "squared_distance",
    "weights",
]
