"""Open a trained model and read its heads as match kernels."""

from .architecture import Architecture
from .encoder import Encoder
from .form import Form, Spread, mismatched_forms, random_forms, spreads
from .head import Head, ScoreTerms
from .metrics import METRICS, Confirmed, Metric, confirm, draw_ids, head_metrics, repeated, sinks
from .model import Model
from .models import load
from .offsets import KeyShare, OffsetProfile, key_share, offset_profile
from .package import ModelFileError, ModelMissingError
from .reading import CausalReading, Reading, SentenceReading
from .split import Split, split
from .tokens import Tokens

__all__ = [
    "METRICS",
    "Architecture",
    "CausalReading",
    "Confirmed",
    "Encoder",
    "Form",
    "Head",
    "KeyShare",
    "Metric",
    "Model",
    "ModelFileError",
    "ModelMissingError",
    "OffsetProfile",
    "Reading",
    "ScoreTerms",
    "SentenceReading",
    "Split",
    "Spread",
    "Tokens",
    "confirm",
    "draw_ids",
    "head_metrics",
    "key_share",
    "load",
    "mismatched_forms",
    "offset_profile",
    "random_forms",
    "repeated",
    "sinks",
    "split",
    "spreads",
]
