"""Loading a TARGET: `package.module:callable`, which returns a model and its example inputs."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from typing import Any

from torch import Tensor, nn


class TargetError(Exception):
    """A target, or another argument of a command, that cannot be used."""


def add_target(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """The arguments that name a target and the sizes of its example."""
    parser.add_argument("target", nargs=nargs, help="package.module:callable returning (model, inputs)")
    parser.add_argument("--tokens", type=int, help="tokens of the example, passed to the callable")
    parser.add_argument("--batch", type=int, help="batch size of the example, passed to the callable")


def shapes_of(inputs: tuple[Any, ...]) -> str:
    """The shapes of a target's inputs, in words."""
    return ", ".join(str(list(t.shape)) for t in inputs if isinstance(t, Tensor))


def load_target(name: str, **sizes: int | None) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model and example inputs that `package.module:callable` returns.

    Raises:
        TargetError: it cannot be imported, does not exist, or returns something else.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise TargetError(f"a target is package.module:callable, found {name!r}.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except Exception as problem:
        raise TargetError(f"cannot import {module_name}: {type(problem).__name__}: {problem}") from problem
    make = getattr(module, attribute, None)
    if make is None:
        found = [n for n, v in vars(module).items() if inspect.isfunction(v) and n[0] != "_"]
        raise TargetError(f"{module_name} has no {attribute!r}; it has {', '.join(found) or 'no functions'}.")
    if not callable(make):
        raise TargetError(f"{name} is no function, it is a {type(make).__name__}.")
    accepted = inspect.signature(make).parameters
    given = {k: v for k, v in sizes.items() if v is not None}
    unknown = [k for k in given if k not in accepted]
    if unknown:
        raise TargetError(
            f"{name} takes no {' and no '.join(unknown)}; it takes {', '.join(accepted) or 'nothing'}."
        )
    try:
        made = make(**given)
    except Exception as problem:
        raise TargetError(f"{name} failed: {type(problem).__name__}: {problem}") from problem
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise TargetError(f"{name} must return (model, inputs), it returned {type(made).__name__}.")
    model, inputs = made
    return model, inputs if isinstance(inputs, tuple) else (inputs,)
