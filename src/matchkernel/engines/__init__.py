"""Who computes it: one file per way, none of which knows a kernel by name."""

from .blocks import Blocks
from .fused import Fused
from .linear import Linear
from .linformer import Linformer
from .lowrank import Nystrom
from .lsh import LSH
from .problem import Cost, Engine, Problem
from .reference import Reference
from .ring import Ring
from .sparse import Sparse
from .tiled import Tiled
from .topk import TopK

__all__ = [
    "LSH",
    "Blocks",
    "Cost",
    "Engine",
    "Fused",
    "Linear",
    "Linformer",
    "Nystrom",
    "Problem",
    "Reference",
    "Ring",
    "Sparse",
    "Tiled",
    "TopK",
]
