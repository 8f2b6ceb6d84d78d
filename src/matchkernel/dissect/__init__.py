"""Open a trained model and read its heads as match kernels."""

from .architecture import Architecture
from .atlas import Atlas, Role, atlas
from .decoder import Decoder
from .encoder import Encoder
from .form import Form, Spread, mismatched_forms, random_forms, spreads
from .head import Head, ScoreTerms
from .hooks import ablate, ablate_to_mean, compose, forbid, mean_mixed, silence, silence_to_mean, window_with_first
from .metrics import METRICS, Confirmed, Metric, confirm, draw_ids, head_metrics, sinks
from .model import Model
from .models import load
from .offsets import KeyShare, OffsetProfile, key_share, offset_profile
from .package import ModelFileError, ModelMissingError
from .reading import CausalReading, Reading, SentenceReading
from .shift import EmbeddingShift, LossShift, embedding_shift, loss_shift, spearman
from .split import Split, split
from .surgery import (
    antisymmetric_part,
    only_key_term,
    random_like,
    symmetric_part,
    transposed,
    truncated,
    without_key_term,
)
from .tokens import Tokens

__all__ = [
    "METRICS",
    "Architecture",
    "Atlas",
    "CausalReading",
    "Confirmed",
    "Decoder",
    "EmbeddingShift",
    "Encoder",
    "Form",
    "Head",
    "KeyShare",
    "LossShift",
    "Metric",
    "Model",
    "ModelFileError",
    "ModelMissingError",
    "OffsetProfile",
    "Reading",
    "Role",
    "ScoreTerms",
    "SentenceReading",
    "Split",
    "Spread",
    "Tokens",
    "ablate",
    "ablate_to_mean",
    "antisymmetric_part",
    "atlas",
    "compose",
    "confirm",
    "draw_ids",
    "embedding_shift",
    "forbid",
    "head_metrics",
    "key_share",
    "load",
    "loss_shift",
    "mean_mixed",
    "mismatched_forms",
    "offset_profile",
    "only_key_term",
    "random_forms",
    "random_like",
    "silence",
    "silence_to_mean",
    "sinks",
    "spearman",
    "split",
    "spreads",
    "symmetric_part",
    "transposed",
    "truncated",
    "window_with_first",
    "without_key_term",
]
