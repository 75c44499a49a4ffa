"""Checks before any work is done: of a model, of the arguments of a call, and of what is around it."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from attngraph.capture.guards import run_past
from attngraph.capture.instead import LOCK
from attngraph.runtime.decoder import Decoder


def require_model(model: Any, caller: str) -> None:
    """Check that a model is something that can be compiled; `caller` is what was given it. TypeError where it
    cannot be called, is a class, or is a decoder, which is compiled already."""
    if not callable(model):
        raise TypeError(f"{caller} takes an nn.Module or a function, found {type(model).__name__}.")
    if isinstance(model, type):
        raise TypeError(f"{caller} takes an instance of {model.__name__}, found the class itself.")
    if type(model) is Decoder:
        raise TypeError(f"{caller} takes a model; this decoder is compiled already.")


def require_sequence(args: Any, name: str) -> None:
    """Check that the arguments of a call are given as one sequence; TypeError where they are not, as where a
    tensor stands for a tuple of one."""
    if not isinstance(args, list | tuple):
        raise TypeError(f"{name} takes the arguments of a call, as in (ids,), found {type(args).__name__}.")


def require_fit(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that the model's forward has parameters for these arguments; a TypeError says which is missing or
    unknown."""
    try:
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):
        return  # a builtin may have none
    try:
        signature.bind(*args, **kwargs)
    except TypeError as problem:
        own = type(model) if isinstance(model, nn.Module) else model
        name = getattr(own, "__name__", "the model")
        raise TypeError(f"{name}{signature} does not take these arguments: {problem}.") from None


def by_name(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, those that a parameter such as `**kwargs` takes among them."""
    given = dict(signature.bind(*args, **kwargs).arguments)
    further = (n for n, p in signature.parameters.items() if p.kind is inspect.Parameter.VAR_KEYWORD)
    more: dict[str, Any] = given.pop(next(further, ""), {})
    return given | more


log = logging.getLogger(__name__)


def is_transformed() -> bool:
    """Whether the call is part of another trace, or of a transformation (vmap, jvp) that needs the model's
    own operations. The original model is then run instead."""
    if LOCK.traces_here():
        return True
    # Torch's flags are those of the process: while another thread traces, they tell nothing about this one.
    begun = -1 if LOCK.is_tracing() else LOCK.begun
    exports = torch.compiler.is_exporting() or torch.compiler.is_compiling()
    return (
        (exports and begun == LOCK.begun)
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        or (bool(around := run_past()) and _told(around))
    )


@functools.cache
def _told(around: str) -> bool:
    log.warning("under %s the model itself runs, and not what was compiled", around)
    return True
