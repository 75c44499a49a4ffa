"""Checks what users give before any work is done with it: a model, and the arguments of a call of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from attngraph.runtime.decoder import Decoder


def require_model(model: Any, caller: str) -> None:
    """Check that a model is something that can be compiled; `caller` is what was given it.

    Raises:
        TypeError: it cannot be called, is a class, or is a decoder, which is compiled already.
    """
    if not callable(model):
        raise TypeError(f"{caller} takes an nn.Module or a function, found {type(model).__name__}.")
    if isinstance(model, type):
        raise TypeError(f"{caller} takes an instance of {model.__name__}, found the class itself.")
    if type(model) is Decoder:
        raise TypeError(f"{caller} takes a model; this decoder is compiled already.")


def require_sequence(args: Any, name: str) -> None:
    """Check that the arguments of a call are given as one sequence.

    Raises:
        TypeError: they are not, as where a tensor stands for a tuple of one.
    """
    if not isinstance(args, list | tuple):
        raise TypeError(f"{name} takes the arguments of a call, as in (ids,), found {type(args).__name__}.")


def require_fit(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that the model's forward has parameters for these arguments.

    Raises:
        TypeError: it has not; says which is missing or unknown.
    """
    try:
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):
        return  # a builtin may have none
    try:
        signature.bind(*args, **kwargs)
    except TypeError as problem:
        name = (
            type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "the model")
        )
        raise TypeError(f"{name}{signature} does not take these arguments: {problem}.") from None
