"""An attribute computed when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import torch

T = TypeVar("T")


class lazy(Generic[T]):
    """As functools.cached_property, whose lock torch.compile cannot trace in Python 3.11.

    While a graph is traced nothing is kept: the compiler sees equal expressions by itself.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute, self.name, self.__doc__ = compute, compute.__name__, compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> lazy[T]: ...

    @overload
    def __get__(self, instance: object, owner: type[Any]) -> T: ...

    def __get__(self, instance: object | None, owner: type[Any]) -> lazy[T] | T:
        if instance is None:
            return self
        value = self.compute(instance)
        if not torch.compiler.is_compiling():
            instance.__dict__[self.name] = value
        return value
