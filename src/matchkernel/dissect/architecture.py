"""The sizes of a model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """The sizes of a model, and where its weights come from (for people, shown by repr).

    `heads` are those that ask and `kv_heads` those that are asked: where there are fewer, heads // kv_heads neighbours
    share one set of keys and values (grouped queries). `d_head` is the width of a query. `positions` is the longest
    text, in tokens.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    d_model: int
    d_head: int
    d_feedforward: int
    vocabulary: int
    positions: int
    norm_eps: float
    source: str
    licence: str
