"""What regression is given, checked: places with what was observed there, and the places that are asked about."""

from __future__ import annotations

import torch
from torch import Tensor


def check_rows(**given: Tensor) -> None:
    """Raise unless each has a row for each place and all are of one dtype; ValueError, TypeError name the argument."""
    for name, x in given.items():
        if x.dim() < 2:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: expected a row for each place, (…, places, width)")
    if len({x.dtype for x in given.values()}) > 1:
        raise TypeError(f"expected one dtype, got {', '.join(f'{name} of {x.dtype}' for name, x in given.items())}")


def check_observations(x_train: Tensor, y_train: Tensor, x_query: Tensor) -> None:
    """Raise unless the three fit together, for a method that solves equations: half precision has no solver."""
    check_rows(x_train=x_train, y_train=y_train, x_query=x_query)
    if x_train.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"x_train is of {x_train.dtype}: expected float32 or float64, since equations are solved")
    if x_train.shape[-1] != x_query.shape[-1]:
        raise ValueError(
            f"x_train has shape {tuple(x_train.shape)} and x_query {tuple(x_query.shape)}: "
            "expected (…, m, d) and (…, n, d)"
        )
    if y_train.shape[-2] != x_train.shape[-2]:
        raise ValueError(
            f"y_train has shape {tuple(y_train.shape)}: expected (…, {x_train.shape[-2]}, c), a row for each row of "
            f"x_train, which has shape {tuple(x_train.shape)}"
        )
