"""torch.compile for the arithmetic of a tile: where a compiler exists, one build for each kind of kernel."""

from __future__ import annotations

import functools
import os
import shutil
import types
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

_built: dict[tuple[Hashable, Hashable], Callable[..., Any]] = {}
_failures: dict[Hashable, str] = {}

@functools.cache
def missing() -> str | None:
    """Why nothing can be compiled here, or None when it can."""
    compiler = os.environ.get("CXX", "").split()[:1] or ["g++", "clang++"]
    if not any(shutil.which(name) for name in compiler):
        return f"no C++ compiler was found ({' or '.join(compiler)})"
    return None


def built(function: Callable[..., Any], key: Hashable) -> Callable[..., Any]:
    """`function`, compiled at its first call; one build for each key and kind of arguments.

    Where the compiler fails, a warning says why and the function runs as it stands from then on.
    """

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        kind = _kind(arguments)
        known = _built.get((function, (key, kind)))
        if known is None:
            # torch keeps what it compiles with the code object, and only a few variants of each: give every kind of
            # arguments its own, so that what is left to vary is sizes.
            code = function.__code__.replace(co_name=f"{function.__name__}_{len(_built)}")
            own = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__)
            known = _built[function, (key, kind)] = _guarded(torch.compile(own, fullgraph=True), function, key)
        return known(*arguments)

    return call


def _kind(argument: Any) -> Hashable:
    """What a compiler builds other code for: which tensors there are, of what type, and where they broadcast."""
    if isinstance(argument, Tensor):
        pattern = (min(number, 2) for number in (*argument.shape, *argument.stride()))
        return argument.dtype, argument.device.type, *pattern
    if isinstance(argument, tuple):
        return type(argument), *(_kind(part) for part in argument)
    if argument is None or isinstance(argument, bool):
        return argument
    numbers = (argument == 1.0, argument == 0.0) if isinstance(argument, float) else ()
    return type(argument).__qualname__, *numbers


def _guarded(compiled: Callable[..., Any], plain: Callable[..., Any], key: Hashable) -> Callable[..., Any]:
    failed = False

    @functools.wraps(plain)
    def call(*arguments: Any) -> Any:
        nonlocal failed
        if failed:
            return plain(*arguments)
        try:
            return compiled(*arguments)
        except _errors() as error:
            failed = True
            _failures[key] = first = str(error).strip().splitlines()[0]
            warnings.warn(f"torch.compile could not build {key}, so its tiles run uncompiled: {first}", stacklevel=2)
            return plain(*arguments)

    return call


def failure(key: Hashable) -> str | None:
    """Why a key's function is not compiled, once that has been tried and has failed."""
    return _failures.get(key)


@functools.cache
def _errors() -> tuple[type[Exception], ...]:
    import torch._dynamo.exc
    import torch._inductor.exc

    return (
        torch._dynamo.exc.TorchDynamoException,
        torch._dynamo.exc.FailOnRecompileLimitHit,
        torch._inductor.exc.InductorError,
    )
