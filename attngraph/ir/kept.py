"""Methods that are asked once for each argument, and variables that are held for a while."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")
_Value = TypeVar("_Value")


class kept(Generic[_Given, _Made]):
    """A method of which an object keeps what it gave. What it raises is not kept."""

    def __init__(self, method: Callable[Concatenate[Any, _Given], _Made]) -> None:
        self.method, self.__doc__ = method, method.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> Callable[_Given, _Made]:
        found: Callable[_Given, _Made] = functools.cache(MethodType(self.method, instance))  # type: ignore[assignment]
        instance.__dict__[self.method.__name__] = found  # found there from now on
        return found


@contextlib.contextmanager
def holding(variable: ContextVar[Any], value: _Value) -> Iterator[_Value]:
    """Give a context variable this value while the context is active."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
