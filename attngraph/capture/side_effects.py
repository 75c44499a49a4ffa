"""What a forward does besides returning values, which a graph of it would lose: found, named, and refused.

Changes of the model's attributes, of variables around it and of arguments are found, and prints, hooks on
tensors, and functions with gradients of their own. A changed attribute is named as the user writes it, with
the line that changes it.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from attngraph.capture.attributes import Described, Settings, can_be_watched, holder_of
from attngraph.capture.process_state import process_state_kept
from attngraph.capture.state.fingerprint import fingerprint
from attngraph.capture.state.parts import Place
from attngraph.capture.state.scope import Space
from attngraph.capture.state.snapshot import Snapshot
from attngraph.errors import CaptureError
from attngraph.ir.graph.source import short_path

_CHANGING = {
    name
    for kind in (list, dict, set, collections.deque)
    for name in dir(kind)
    if not name.startswith("_") and name not in ("copy", "count", "get", "index", "items", "keys", "values")
}
"""Methods that may change a container."""

_HOOKS = "forward() registers hooks on tensors"
_ASKS_FOR_GRADIENTS = {
    "register_hook": _HOOKS,
    "register_post_accumulate_grad_hook": _HOOKS,
    "retain_grad": "forward() asks for the gradient of a tensor (retain_grad)",
}
"""Methods of a tensor by which a forward has its gradient, which is no tensor of a graph."""


class SideEffects:
    """The side effect that one trace found; empty if there is none."""

    what: str = ""
    line: str = ""
    advice: str = ""
    of_arguments: bool = False
    """Whether only this call's arguments are changed, so that other calls may be captured."""
    of_state: bool = False
    """Whether nothing but attributes of the model or values around it are changed."""
    splits: bool = True
    """Whether torch.compile notices it; else the model runs as it is."""
    settings: Settings
    """The attributes that are changed, and to what."""

    def __init__(self) -> None:
        self.settings = {}
        self.kept: Snapshot | None = None

    def note(
        self, what: str, line: str = "", advice: str = "return what changes", *,
        of_arguments: bool = False, of_state: bool = False, splits: bool = True,
    ) -> None:  # fmt: skip
        self.splits = self.splits and splits
        self.of_arguments = of_arguments and (self.of_arguments or not self.what)
        self.of_state = of_state and not self.what
        self.what, self.line, self.advice = what, line, advice

    @contextlib.contextmanager
    def watch(
        self, target: Callable[..., Any], arguments: Sequence[Any], weights: Callable[[], dict[int, int]]
    ) -> Iterator[None]:
        """Note what the body changes in the target's state or the arguments', and undo it.

        Args:
            weights: from the identity of each current parameter and buffer to that of the model's own.
        """
        kept = self.kept = Snapshot([target])
        theirs = Snapshot(arguments)
        given, held = fingerprint(arguments), weights()
        try:
            with (
                self._own_gradients(),
                process_state_kept(self._note_of_process, lambda name: line_using(name, target)),
                kept.iterators_refused(lambda place: self._note_iterator(place, target)),
                theirs.iterators_refused(lambda place: self._note_iterator(place, target)),
            ):
                yield
        except BaseException:
            self._restore(kept, theirs)
            raise
        if given != fingerprint(arguments):
            self.note(
                f"forward() changes an argument's attributes{_named(theirs, target)}", of_arguments=True
            )
        changed = kept.first_change(weights())
        is_refused = self.what and not self.of_arguments
        if not is_refused and (changed is not None or held != weights()):
            self.settings = _settings(kept.changed_attributes())
            # torch.compile loses which of two equal objects an attribute is, and repeats what was drawn.
            self.splits &= not kept.swapped and (changed is None or not kept.is_generator(changed))
            self.note_change(changed, target)
        if self.what:
            self._restore(kept, theirs)

    @staticmethod
    def _restore(*kept: Snapshot) -> None:
        for each in kept:
            each.restore()

    def begins(self, frame: types.FrameType) -> None:
        """Watch also what the code can read that is about to run."""
        if self.kept is not None:
            self.kept.add(frame)

    def note_change(self, place: Place | None, target: Callable[..., Any]) -> None:
        """Note that the target changes its state; `place` is where, if it is known."""
        if place is None:
            self.note("forward() changes attributes of the model, or values around it", of_state=True)
        else:
            line = line_of(place, target)
            self.note(f"forward() changes {name_of(place, target)}", line, of_state=True)

    def _note_of_process(self, what: str, line: str, advice: str) -> None:
        """Note what the target does to the process. torch.compile repeats what it drew of Python's
        numbers."""
        draws = "random" in what or "seed" in what
        self.note(what, line, advice, splits=not draws)

    def _note_iterator(self, place: Place, target: Callable[..., Any]) -> None:
        """Note that the target advances an iterator, which torch.compile does not notice either."""
        line = line_using(place.name, target)
        self.note(f"forward() advances an iterator, {name_of(place, target)}", line, splits=False)

    @contextlib.contextmanager
    def _own_gradients(self) -> Iterator[None]:
        """Note where the model defines gradients itself, which a graph of its forward would lose."""
        if not torch.is_grad_enabled():
            yield
            return
        apply = CheckpointFunction.apply

        def applied(cls: Any, run: Callable[..., Any], preserve: Any, *given: Any) -> Any:
            if any(isinstance(a, Tensor) and a.requires_grad for a in given):
                return run(*given)  # a graph for training keeps no scores, and computes them again itself
            return apply(run, preserve, *given)

        def made(node: Any) -> None:
            """Is called by every `apply`, wherever the user keeps it."""
            if not node._forward_cls.__module__.startswith("torch.") or isinstance(node, checkpoint):
                self.note(f"{node._forward_cls.__name__} has a backward of its own")

        checkpoint: Any = CheckpointFunction._backward_cls  # type: ignore[attr-defined]

        def noting(what: str) -> Callable[..., None]:
            return lambda tensor, *args, **kwargs: self.note(what)

        with contextlib.ExitStack() as patched:
            patched.enter_context(mock.patch.object(CheckpointFunction, "apply", classmethod(applied)))
            patched.enter_context(mock.patch.object(BackwardCFunction, "__init__", made))
            for name, what in _ASKS_FOR_GRADIENTS.items():
                patched.enter_context(mock.patch.object(Tensor, name, noting(what)))
            yield

    def error(self) -> CaptureError:
        found = refusal(
            self.what,
            self.line,
            lasting=not self.of_arguments,
            changes_state=self.of_state,
            advice=self.advice,
        )
        found.settings = self.settings if self.of_state else {}
        found.splits = self.splits
        return found


def refusal(
    what: str, line: str = "", lasting: bool = True, changes_state: bool = False,
    advice: str = "return what changes",
) -> CaptureError:  # fmt: skip
    return CaptureError(
        f"a graph of the model would lose a side effect: {what}{f' at {line}' if line else ''}.\n"
        f"What to do: {advice}, or compile without strict=True.",
        what,
        line,
        lasting=lasting,
        changes_state=changes_state,
    )


def name_of(place: Place, target: Callable[..., Any]) -> str:
    """The attribute or variable as a user would name it: `h.0.attn.count` of a module, `Cache.used` of
    another object, `COUNT` of a file."""
    owner, name = place
    if isinstance(owner, nn.Module):
        path = next((p for p, m in _modules(target) if m is owner), type(owner).__name__)
        return f"the attribute {f'{path}.' if path else ''}{name} of the model"
    if isinstance(owner, types.FunctionType) and not name:
        return f"what the function {owner.__name__} has around it"
    if isinstance(owner, (Space, types.FunctionType)):
        return f"the {'global' if isinstance(owner, Space) else 'local'} variable {name}"
    if isinstance(owner, type):
        return f"the attribute {name} of the class {owner.__name__}"
    if isinstance(owner, types.ModuleType):
        return f"the variable {name} of {owner.__name__}"
    return f"the attribute {name} of a {type(owner).__name__}" if name else f"a {type(owner).__name__}"


def label_of(place: Place, target: Callable[..., Any]) -> str:
    """The attribute as a graph's text names it, with the prefix of capture's wrapper: `model.h.0.attn`."""
    path = next((p for p, m in _modules(target) if m is place.owner), type(place.owner).__name__)
    return ".".join(part for part in ("model", path, place.name) if part)


def line_of(place: Place, target: Callable[..., Any]) -> str:
    """The line, "file:line", where the code of the model changes this place; empty if none is found. The
    owner's own methods are searched first, then those of the model's modules."""
    owner, name = place
    kinds = [owner if isinstance(owner, type) else type(owner), *(type(m) for _, m in _modules(target))]
    functions = [owner, target] if isinstance(owner, types.FunctionType) else [target]
    if isinstance(owner, Space):
        functions += [value for value in owner.held.values() if isinstance(value, types.FunctionType)]
        kinds += [value for value in owner.held.values() if isinstance(value, type)]
    return _first_line((*functions, *_methods(kinds)), lambda node: _changes(node, name))


def line_using(name: str, target: Callable[..., Any]) -> str:
    """The first line, "file:line", where the code of the model uses this name; empty if none is found."""
    kinds = [type(m) for _, m in _modules(target)]

    def uses(node: ast.AST) -> bool:
        return name in (getattr(node, "id", None), getattr(node, "attr", None))

    return _first_line((target, *_methods(kinds)), uses)


def _first_line(functions: Iterable[Callable[..., Any]], is_meant: Callable[[ast.AST], bool]) -> str:
    """The first line with a piece of syntax that is meant, in the first of these functions that has one."""
    for function in functions:
        code = inspect.unwrap(getattr(function, "__func__", function))
        if not isinstance(code, types.FunctionType):
            continue
        try:
            lines, first = inspect.getsourcelines(code)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, SyntaxError, TypeError):
            continue  # made at run time, without a file
        places = (n.lineno for n in ast.walk(tree) if is_meant(n))  # type: ignore[attr-defined]
        found = min(places, default=None)
        if found is not None:
            return f"{short_path(inspect.getfile(code))}:{first + found - 1}"
    return ""


def _settings(places: Iterable[Place]) -> Settings:
    """What these attributes are now; none if one of them cannot be watched."""
    found = list(places)
    if not all(can_be_watched(place) for place in found):
        return {}
    return {place: Described.of(holder_of(*place).get(place.name)) for place in found}


def _named(kept: Snapshot, target: Callable[..., Any]) -> str:
    place = kept.first_change()
    return "" if place is None else f": {name_of(place, target)}"


def _modules(target: Callable[..., Any]) -> Iterable[tuple[str, nn.Module]]:
    return target.named_modules() if isinstance(target, nn.Module) else ()


def _methods(kinds: Iterable[type]) -> Iterator[types.FunctionType]:
    """The methods of these classes and their bases, but for torch's and `__init__`."""
    for kind in dict.fromkeys(base for owner in kinds for base in owner.__mro__):
        if kind is not object and not kind.__module__.startswith("torch."):
            for name, method in vars(kind).items():
                if isinstance(method, types.FunctionType) and name != "__init__":
                    yield method


def _changes(node: ast.AST, name: str) -> bool:
    """Whether a piece of syntax assigns to `name` or an entry of it, or calls a method of it."""
    match node:
        case ast.Attribute(attr=found, ctx=ast.Store() | ast.Del()):
            return found == name
        case ast.Name(id=found, ctx=ast.Store() | ast.Del()):
            return found == name
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
            return _is(value, name)
        case ast.Call(func=ast.Attribute(value=value, attr=method)):
            return _is(value, name) and method in _CHANGING
    return False


def _is(node: ast.AST, name: str) -> bool:
    return getattr(node, "attr", None) == name or getattr(node, "id", None) == name
