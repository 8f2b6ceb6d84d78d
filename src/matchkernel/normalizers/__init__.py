"""How scores become weights."""

from .base import Normalizer
from .sigmoid import Sigmoid
from .softmax import ScalableSoftmax, SinkSoftmax, Softmax, SoftmaxFamily

__all__ = [
    "Normalizer",
    "ScalableSoftmax",
    "Sigmoid",
    "SinkSoftmax",
    "Softmax",
    "SoftmaxFamily",
]
