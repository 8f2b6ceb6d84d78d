"""How torch.nn.MultiheadAttention names and stacks its projections, and how ours are named: one to the other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_INWARD = ("q_proj", "k_proj", "v_proj")


def from_torch_layout(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of torch's weights, from its one `in_proj_weight` or its three, under our names."""
    ours = {name: state[name].clone() for name in state if name.startswith("out_proj.")}
    for at, name in enumerate(_INWARD):
        packed = state.get("in_proj_weight")
        ours[f"{name}.weight"] = (state[f"{name}_weight"] if packed is None else packed.chunk(3)[at]).clone()
        if "in_proj_bias" in state:
            ours[f"{name}.bias"] = state["in_proj_bias"].chunk(3)[at].clone()
    return ours


def to_torch_layout(state: Mapping[str, Tensor], *, packed: bool) -> dict[str, Tensor]:
    """Copies of our weights under torch's names, as one `in_proj_weight` or as three."""
    theirs = {name: state[name].clone() for name in state if name.startswith("out_proj.")}
    weights = [state[f"{name}.weight"] for name in _INWARD]
    if packed:
        theirs["in_proj_weight"] = torch.cat(weights)
    else:
        theirs |= {f"{name}_weight": weight.clone() for name, weight in zip(_INWARD, weights, strict=True)}
    if "q_proj.bias" in state:
        theirs["in_proj_bias"] = torch.cat([state[f"{name}.bias"] for name in _INWARD])
    return theirs
