"""Methods that are asked once for each argument."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


class kept(Generic[_Given, _Made]):
    """A method of which an object keeps what it gave. What it raises is not kept."""

    def __init__(self, method: Callable[Concatenate[Any, _Given], _Made]) -> None:
        self.method, self.__doc__ = method, method.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> Callable[_Given, _Made]:
        found: Callable[_Given, _Made] = functools.cache(MethodType(self.method, instance))  # type: ignore[assignment]
        instance.__dict__[self.method.__name__] = found  # found there from now on
        return found
