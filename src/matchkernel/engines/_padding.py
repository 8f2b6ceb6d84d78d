"""Masks that do no more than pad, and who computes an attention that is part of another."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _torch_private
from .fused import Fused
from .problem import Engine, Problem
from .reference import Reference
from .tiled import Tiled

_WITHIN: tuple[Engine, ...] = (Fused(), Tiled(), Reference())


def run_within(problem: Problem) -> Tensor:
    """The exact output (…, n, d_v), by the first engine that takes it."""
    refusals = []
    for engine in _WITHIN:
        refusal = engine.refuse(problem) or engine.declines(problem)
        if refusal is None:
            return engine.run(problem)
        refusals.append(f"not {engine.name} ({refusal})")
    raise ValueError(f"no engine can run a part of this call: {'; '.join(refusals)}")


def why_not_padding(problem: Problem, what: str) -> str | None:
    """Why `what`, made of many tokens at once, cannot keep to what the call permits; None where that is padding.

    Padding hides some keys from all queries, and perhaps some queries from all keys.
    """
    place = problem.visibility
    if place.causal:
        return f"{what} mixes tokens of the whole sequence, and the future would leak through causal order"
    if place.ordered:
        return f"{what} mixes tokens of the whole sequence, and those outside of a window would come in"
    if place.by_key:
        return None
    reason = f"{what} is the same for all queries, and the mask {{}}: expected (…, 1, {place.keys})"
    if place.bias is not None:
        return reason.format("adds to the scores of each query")
    if torch.compiler.is_compiling() or _torch_private.transforming():
        return reason.format("has a row for each, which can only be compared outside of vmap and torch.compile")
    sees, seen, allowed = place.query_sees, place.key_seen, place.allowed
    if sees is None or seen is None or allowed is None:
        return None
    if bool(((sees.unsqueeze(-1) & seen.unsqueeze(-2)) == allowed).all()):
        return None
    return reason.format("permits different keys to different ones")
