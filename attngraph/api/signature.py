"""The signature of a model's forward, by which libraries choose arguments and by which calls are checked."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def with_signature_of(model: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` as a function with the signature and the docstring of the model's forward: libraries choose
    arguments by them."""
    original = model.forward if isinstance(model, nn.Module) else model

    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    forward.__doc__ = getattr(original, "__doc__", None)
    with contextlib.suppress(TypeError, ValueError):  # a builtin may have none
        forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return forward


def takes(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the model's forward has parameters for these arguments."""
    try:
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
