"""Loading a TARGET: `package.module:callable`, which returns a model and its example inputs."""

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from attngraph.cli.terminal import TargetError, told
from attngraph.errors import AttnGraphError


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
    except (Exception, SystemExit) as problem:
        raise TargetError(f"cannot import {module_name}: {told(problem)}") from problem
    make = getattr(module, attribute, None)
    if make is None:
        found = [n for n, v in vars(module).items() if inspect.isfunction(v) and n[0] != "_"]
        raise TargetError(f"{module_name} has no {attribute!r}; it has {', '.join(found) or 'no functions'}.")
    if not callable(make):
        raise TargetError(f"{name} is no function: its type is {type(make).__name__}.")
    accepted = inspect.signature(make).parameters
    given = {k: v for k, v in sizes.items() if v is not None}
    unknown = [k for k in given if k not in accepted]
    if unknown:
        raise TargetError(
            f"{name} takes no {' and no '.join(unknown)}; it takes {', '.join(accepted) or 'nothing'}."
        )
    try:
        made = make(**given)
    except (Exception, SystemExit) as problem:
        raise TargetError(f"{name} failed: {told(problem)}") from problem
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise TargetError(f"{name} must return (model, inputs), it returned {_kind(made)}.")
    model, inputs = made
    return model, inputs if isinstance(inputs, tuple) else (inputs,)


def _kind(made: Any) -> str:
    """What a target returned, by types: of a tuple, those of its parts."""
    if not isinstance(made, tuple):
        return type(made).__name__
    return f"({', '.join(type(part).__name__ for part in made)})"


def run_as_given(
    run: Callable[..., Any], model: Callable[..., Any], inputs: tuple[Any, ...], name: str
) -> Any:
    """What `run(*inputs)` gives.

    Raises:
        TargetError: the model itself cannot be run on its inputs.
    """
    try:
        return run(*inputs)
    except AttnGraphError:
        raise
    except Exception:
        try:
            model(*inputs)
        except Exception as problem:
            raise TargetError(
                f"{name}: the model cannot be run on the inputs of the target: {told(problem)}"
            ) from problem
        raise
