"""What an encoder returns."""

from __future__ import annotations

from torch import Tensor

Encoding = Tensor | tuple["Encoding", ...]
"""A tensor (…, tokens, width), or a tuple of encodings. Engines slice it along the tokens only."""


def leaves(encoding: Encoding) -> list[Tensor]:
    """The tensors of an encoding, in order."""
    if isinstance(encoding, Tensor):
        return [encoding]
    return [leaf for part in encoding for leaf in leaves(part)]
