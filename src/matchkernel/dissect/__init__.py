"""Open a trained model and read its heads as match kernels."""

from .encoder import Encoder
from .head import Head, ScoreTerms
from .models import load
from .package import ModelFileError, ModelMissingError
from .reading import Reading
from .tokens import Tokens

__all__ = ["Encoder", "Head", "ModelFileError", "ModelMissingError", "Reading", "ScoreTerms", "Tokens", "load"]
