"""What an encoder returns."""

from __future__ import annotations

from torch import Tensor

Encoding = Tensor | tuple["Encoding", ...]
"""A tensor (…, tokens, width), or a tuple of encodings. Engines slice it along the tokens only."""
