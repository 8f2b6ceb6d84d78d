"""Who computes it: one file per way, none of which knows a kernel by name."""

from .fused import Fused
from .problem import Cost, Engine, Problem
from .reference import Reference
from .tiled import Tiled

__all__ = ["Cost", "Engine", "Fused", "Problem", "Reference", "Tiled"]
