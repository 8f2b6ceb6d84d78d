"""Open a trained model and read its heads as match kernels."""

from .architecture import Architecture
from .encoder import Encoder
from .head import Head, ScoreTerms
from .model import Model
from .models import load
from .package import ModelFileError, ModelMissingError
from .reading import CausalReading, Reading, SentenceReading
from .tokens import Tokens

__all__ = [
    "Architecture",
    "CausalReading",
    "Encoder",
    "Head",
    "Model",
    "ModelFileError",
    "ModelMissingError",
    "Reading",
    "ScoreTerms",
    "SentenceReading",
    "Tokens",
    "load",
]
