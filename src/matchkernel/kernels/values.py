"""A temperature, bandwidth, slope or factor: a number, a tensor with one entry per head, or a learned parameter."""

from __future__ import annotations

import math

from torch import Tensor, nn

HeadValue = float | Tensor


def hold(module: nn.Module, name: str, value: HeadValue, *, positive: bool = False) -> None:
    """Store `value` on `module`: a number as a number, a tensor as a buffer, a parameter as a parameter.

    Raises TypeError for anything else and ValueError for a shape other than () or (heads,), for a value that is not
    finite and, with `positive`, for one that is not above zero.
    """
    owner = f"{type(module).__name__}({name}=…)"
    if isinstance(value, Tensor):
        if value.dim() > 1 or not value.is_floating_point():
            raise ValueError(
                f"{owner}: expected a floating-point tensor of shape () or (heads,), "
                f"got shape {tuple(value.shape)} of {value.dtype}"
            )
        if positive and not bool((value > 0).all()):
            raise ValueError(f"{owner}: every entry must be above 0, got {value.tolist()}")
        if isinstance(value, nn.Parameter):
            module.register_parameter(name, value)
        else:
            module.register_buffer(name, value)
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{owner}: expected a number, a tensor with one entry per head or a parameter, got {value!r}")
    if not math.isfinite(value) or (positive and value <= 0):
        raise ValueError(f"{owner}: expected a finite number{' above 0' if positive else ''}, got {value}")
    setattr(module, name, float(value))


def as_factor(value: HeadValue, like: Tensor) -> HeadValue:
    """`value` shaped to multiply `like` of shape (…, heads, tokens, width)."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0 or value.shape[0] == 1:
        return value.reshape(())
    if like.dim() < 3 or like.shape[-3] != value.shape[0]:
        raise ValueError(
            f"a value with one entry per head has shape {tuple(value.shape)}, "
            f"so q needs {value.shape[0]} heads at dimension -3, got shape {tuple(like.shape)}"
        )
    return value[:, None, None]


def as_column(value: HeadValue, like: Tensor) -> Tensor:
    """`value` once for each token of `like` (…, heads, tokens, width): (…, heads, tokens, 1), which holds no memory.

    It rides beside a query's encoding, so that `match` needs no value of a head's own.
    """
    column = as_factor(value, like)
    if not isinstance(column, Tensor):
        column = like.new_tensor(column)
    return column.expand(*like.shape[:-1], 1)


def as_number(value: HeadValue) -> float | None:
    """`value` where it is a number, None where it is a tensor and rides beside the query."""
    return None if isinstance(value, Tensor) else value


def show(value: HeadValue) -> str:
    """How a value reads in a kernel's repr."""
    if not isinstance(value, Tensor):
        return f"{value:g}"
    kind = "learned" if isinstance(value, nn.Parameter) else "per head"
    return f"{value.item():.4g} ({kind})" if value.numel() == 1 else f"<{kind}, {value.shape[0]} heads>"
