"""Who computes it: one file per way, none of which knows a kernel by name."""

from .fused import Fused
from .linear import Linear
from .linformer import Linformer
from .lowrank import Nystrom
from .problem import Cost, Engine, Problem
from .reference import Reference
from .ring import Ring
from .sparse import Sparse
from .tiled import Tiled

__all__ = ["Cost", "Engine", "Fused", "Linear", "Linformer", "Nystrom", "Problem", "Reference", "Ring", "Sparse", "Tiled"]
