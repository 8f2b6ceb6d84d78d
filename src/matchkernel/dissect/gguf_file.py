"""Read a GGUF file: what it says about its model, and its tensors in float32."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class GgufFile:
    """A GGUF file, opened with the package gguf.

    Attributes:
        facts: what the file says about the model, by GGUF's own names ("llama.block_count"); texts are str.
    """

    def __init__(self, gguf: ModuleType, path: Path) -> None:
        self._gguf = gguf
        self._reader = gguf.GGUFReader(path)
        self.facts: dict[str, Any] = {name: field.contents() for name, field in self._reader.fields.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor's name and its values in float32; a quantised one is multiplied out, which does not undo the
        rounding."""
        for stored in self._reader.tensors:
            values = self._gguf.quants.dequantize(stored.data, stored.tensor_type)
            # What was stored in float32 is still a view of the file, which must not be written to.
            yield stored.name, torch.from_numpy(values if values.flags.writeable else values.copy())
