"""The model's own methods, called on the compiled module: they run compiled code where they call the model.

A method such as `training_step` calls `self(...)`. It is given the compiled module as its `self`, through
which it reaches the model's attributes as before. The `generate` of a transformers model runs on a derived
decoder.
"""

import ast
import contextlib
import functools
import inspect
import logging
import sys
import textwrap
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from attngraph.api import saving
from attngraph.api.derive import derive_decoder
from attngraph.api.options import Options
from attngraph.api.progress_line import progress_line
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.decoder import Decoder
from attngraph.runtime.examples import Example
from attngraph.runtime.step import Step
from attngraph.runtime.wrapper import ModelWrapper, own_names

log = logging.getLogger(__name__)


class Generate(Protocol):
    """transformers' `generate`, on a decoder."""

    @property
    def decoder(self) -> Decoder: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def bound(compiled: ModelWrapper, model: Any, method: types.MethodType) -> Callable[..., Any]:
    """The model's method, with the compiled module as its `self` if it calls the model."""
    if method.__self__ is not model or not isinstance(method.__func__, types.FunctionType):
        return method
    calls, names, _ = _uses(type(model), method.__func__)  # type: ignore[arg-type]
    if not calls:
        if method.__name__ == "generate":
            _tell_once(method.__qualname__, "it calls parts of the model, and never the model.")
        return method
    added = names & (own_names(type(compiled)) - own_names(nn.Module))  # type: ignore[arg-type]
    both = sorted(n for n in added if not n.startswith("__") and hasattr(model, n))
    if both:
        why = f"it uses the model's {both[0]}, and a compiled module has one of its own."
        _tell_once(method.__qualname__, f"{why} What to do: rename it.")
        return method
    return types.MethodType(method.__func__, compiled)


def decoder_of(
    compiled: ModelWrapper, options: Options, config: CacheConfig, saved: saving.Folder | None = None
) -> Decoder:
    """A decoder for the model of a compiled module, derived, or taken from what was saved, at its first
    call."""
    model = compiled._model

    def derive(example: Example, fits: Callable[[Step], bool]) -> Step:
        with progress_line(options) as told:
            if options.devices.is_one:
                return saving.step_for(model, told, config, saved, example, fits)
            step: Step = options.devices.derived(lambda: derive_decoder(model, told, config, example))
            return step

    def save(path: str | Path, steps: Sequence[Step], weights: bool) -> Path:
        options.devices.require_savable("decoder")
        return saving.save(path, model, steps, options, config, weights)

    def again(copied: ModelWrapper) -> Decoder:
        return decoder_of(copied, options, config, saved)

    return Decoder(model, config, compiled, derive, save, again, options.devices)


def is_generated_by_transformers(model: Any) -> bool:
    """Whether `model.generate` is that of transformers, or comes to call it."""
    mixin = getattr(sys.modules.get("transformers"), "GenerationMixin", None)
    if mixin is None or not isinstance(model, mixin) or not isinstance(model, nn.Module):
        return False
    kind: Any = type(model)
    return mixin.generate in _uses(kind, kind.generate)[2]


def generate(decoder: Decoder) -> Generate:
    """transformers' `generate` on a decoder."""
    from attngraph.hf.generation import Generation

    return Generation(decoder, decoder._model)


@functools.cache
def _tell_once(method: str, why: str) -> None:
    log.warning("%s runs the uncompiled model: %s", method, why)


@functools.cache
def _uses(kind: type, function: types.FunctionType) -> tuple[bool, frozenset[str], frozenset[Any]]:
    """Whether a method of a class calls the model, itself or through other methods; the attributes of the
    model that all these name; and these methods."""
    calls, names, seen, waiting = False, set[str](), {function}, [function]
    while waiting:
        method = waiting.pop()
        more_calls, own, above = _reads(method)
        calls, names = calls or more_calls, names | own
        classes = kind.__mro__
        place = next((n for n, base in enumerate(classes) if method in vars(base).values()), len(classes))
        bases = classes[place + 1 :]  # among which `super()` looks
        called = [getattr(kind, name, None) for name in own]
        called += (next((vars(b)[name] for b in bases if name in vars(b)), None) for name in above)
        new = {found for found in called if isinstance(found, types.FunctionType)} - seen
        seen, waiting = seen | new, [*waiting, *new]
    return calls, frozenset(names), frozenset(seen)


def _reads(function: types.FunctionType) -> tuple[bool, set[str], set[str]]:
    """Whether a method calls `self` or its forward, and which attributes of `self` and of `super()` it names.
    A method without source code is taken not to."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, SyntaxError, TypeError):
        return False, set(), set()
    definition, own = tree.body[0], ""
    if isinstance(definition, ast.FunctionDef):
        named = [*definition.args.posonlyargs, *definition.args.args]
        own = named[0].arg if named else ""
    calls, names, above = False, set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == own:
                names.add(attribute)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=attribute):
                above.add(attribute)
            case ast.Call(func=ast.Name(id=name)) if name == own:
                calls = True
    calls = calls or bool((names | above) & {"forward", "__call__"})
    return calls, names - {"forward", "__call__"}, above


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
