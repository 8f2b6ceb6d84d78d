"""How scores become weights."""

from .base import Normalizer
from .sigmoid import Sigmoid
from .softmax import ScalableSoftmax, SinkSoftmax, Softmax, SoftmaxFamily
from .sparse import Entmax, Sparsemax

__all__ = [
    "Entmax",
    "Normalizer",
    "ScalableSoftmax",
    "Sigmoid",
    "SinkSoftmax",
    "Softmax",
    "SoftmaxFamily",
    "Sparsemax",
]
