"""Which rows and keys of a reading count."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .reading import Reading
from .tokens import Tokens


def content(tokens: Tokens) -> Tensor:
    """(n,) bool: True where a piece is part of the text, False for the model's own marks such as [CLS] and [SEP]."""
    return torch.tensor([start < end for start, end in tokens.spans], dtype=torch.bool)


def permitted(reading: Reading) -> Tensor:
    """(L, h, n, n) bool, or (1, 1, n, n) where all heads agree: True where the query may attend to the key."""
    allowed = reading.scores != -torch.inf
    first = allowed[:1, :1]
    return first if bool((allowed == first).all()) else allowed


def as_readings(readings: Reading | Iterable[Reading]) -> Iterator[Reading]:
    """One reading or many, one after the other. Raises ValueError when there is none, TypeError for anything else."""
    none = True
    for reading in [readings] if isinstance(readings, Reading) else readings:
        if not isinstance(reading, Reading):
            raise TypeError(f"readings: expected what model.read(text) returns, got a {type(reading).__name__}")
        none = False
        yield reading
    if none:
        raise ValueError("readings: expected at least one")
