"""Where in the user's code something is, and how a user would name it: for refusals and for reports.

Torch's tracer looks at all frames of the stack, most of them its own, and writes out those of functions that
are called `forward`, which loses lines in helper functions. Here frames are walked from an operation up to
the wrapper that is traced. What changed is found in the syntax of the code that may have changed it.
"""

import ast
import collections
import contextlib
import functools
import inspect
import os
import sys
import textwrap
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn

from attngraph.capture.instead import instead
from attngraph.capture.state.kinds import Place
from attngraph.capture.state.scope import Space
from attngraph.errors import CaptureError
from attngraph.ir.graph.source import short_path

TORCH = os.path.dirname(torch.__file__) + os.sep
CAPTURE = os.path.dirname(__file__) + os.sep
_LAYERS = os.path.join(TORCH, "nn") + os.sep
_WRAPPER = os.path.join(CAPTURE, "flat.py")
_Line = tuple[str, int, str]
"""The file, the number and the function of a line."""
_CHANGING = {
    name
    for kind in (list, dict, set, collections.deque)
    for name in dir(kind)
    if not name.startswith("_") and name not in ("copy", "count", "get", "index", "items", "keys", "values")
}
"""Methods that may change a container."""


def refused(
    reason: str, line: str = "", advice: str = "", *, lead: str = "", then: str = "", splits: bool = True,
    **facts: Any,
) -> CaptureError:  # fmt: skip
    """The refusal of a trace: why, at which line, and what to do besides compiling without `strict=True`.

    Args:
        lead, then: what its text says before and after the reason. splits, facts: as the error has them.
    """
    told = f"{lead}{reason}{f' at {line}' if line else ''}.{f' {then}' if then else ''}"
    told += f"\nWhat to do: {advice}, or compile without strict=True." if advice else ""
    found = CaptureError(told, reason, line, **facts)
    found.splits = splits
    return found


# --- lines of frames ---


def outside(frame: types.FrameType | None, passed: Callable[[types.FrameType], bool]) -> Any:
    """The first frame, from this one outwards, that is not passed over; None if there is none."""
    while frame is not None and passed(frame):
        frame = frame.f_back
    return frame


def line_at(frame: types.FrameType | None) -> str:
    """The line of a frame, "file:line"; empty if there is none."""
    return "" if frame is None else f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def room_of(frame: types.FrameType) -> str:
    """The package whose code runs in a frame."""
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def is_torchs(frame: types.FrameType) -> bool:
    return frame.f_code.co_filename.startswith(TORCH)


def user_lines(frame: Any) -> tuple[_Line, ...]:
    """The lines that are told, from that which the wrapper calls to the innermost one: of torch's own frames
    only those of its layers."""
    found: list[_Line] = []
    while frame is not None:
        code = frame.f_code
        if _is_told(code.co_filename):
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        elif code.co_name == "forward" and code.co_filename == _WRAPPER:
            break
        frame = frame.f_back
    return tuple(reversed(found))


@functools.lru_cache(maxsize=4096)
def _is_told(file: str) -> bool:
    return not file.startswith(CAPTURE) and (not file.startswith(TORCH) or file.startswith(_LAYERS))


@contextlib.contextmanager
def whole_stack_traces() -> Iterator[None]:
    """Let traces record every line of the user's code. Equal operations of equal layers have equal stacks,
    each of which is written out once."""
    written: dict[tuple[_Line, ...], str] = {}

    class Stack:
        """The stack of an operation, in place of torch's `CapturedTraceback`."""

        def __init__(self, lines: tuple[_Line, ...]) -> None:
            self.lines = lines

        @staticmethod
        def extract(*_: Any, **__: Any) -> "Stack":
            return Stack(user_lines(sys._getframe(1)))

        def summary(self) -> "Stack":
            return self

        def __len__(self) -> int:
            return len(self.lines)

        def format(self) -> list[str]:
            if self.lines not in written:
                frames = [traceback.FrameSummary(*line) for line in self.lines]
                written[self.lines] = "".join(traceback.StackSummary.from_list(frames).format())
            return [written[self.lines]]

    with instead(
        (fx.proxy, "CapturedTraceback", lambda _: Stack),
        (fx.proxy.TracerBase, "_filter_traceback_frames", lambda _: lambda _, stack: stack),
    ):
        yield


# --- names and lines of state ---


def name_of(place: Place, target: Callable[..., Any]) -> str:
    """The attribute or variable as a user would name it: `h.0.attn.count` of a module, `Cache.used` of
    another object, `COUNT` of a file."""
    owner, name = place
    match owner:
        case nn.Module():
            return f"the attribute {'.'.join(filter(None, (_path_of(owner, target), name)))} of the model"
        case types.FunctionType() if not name:
            return f"what the function {owner.__name__} has around it"
        case Space() | types.FunctionType():
            return f"the {'global' if isinstance(owner, Space) else 'local'} variable {name}"
        case type():
            return f"the attribute {name} of the class {owner.__name__}"
        case types.ModuleType():
            return f"the variable {name} of {owner.__name__}"
    return f"the attribute {name} of a {type(owner).__name__}" if name else f"a {type(owner).__name__}"


def label_of(place: Place, target: Callable[..., Any]) -> str:
    """The attribute as a graph's text names it, with the prefix of capture's wrapper: `model.h.0.attn`."""
    return ".".join(part for part in ("model", _path_of(place.owner, target), place.name) if part)


def line_of(place: Place, target: Callable[..., Any]) -> str:
    """The line, "file:line", where the code of the model changes this place; empty if none is found. The
    owner's own methods are searched first, then those of the model's modules."""
    owner, name = place
    kinds = [owner if isinstance(owner, type) else type(owner), *(type(m) for _, m in _modules(target))]
    functions = [owner, target] if isinstance(owner, types.FunctionType) else [target]
    held = [*owner.held.values()] if isinstance(owner, Space) else []
    functions += [value for value in held if isinstance(value, types.FunctionType)]
    kinds += [value for value in held if isinstance(value, type)]
    return _first_line((*functions, *_methods(kinds)), lambda node: _changes(node, name))


def line_using(name: str, target: Callable[..., Any]) -> str:
    """The first line, "file:line", where the code of the model uses this name; empty if none is found."""
    kinds = [type(m) for _, m in _modules(target)]
    return _first_line((target, *_methods(kinds)), lambda node: _is(node, name))


def _path_of(owner: Any, target: Callable[..., Any]) -> str:
    return next((path for path, m in _modules(target) if m is owner), type(owner).__name__)


def _modules(target: Callable[..., Any]) -> Iterable[tuple[str, nn.Module]]:
    return target.named_modules() if isinstance(target, nn.Module) else ()


def _methods(kinds: Iterable[type]) -> Iterator[types.FunctionType]:
    """The methods of these classes and their bases, but for torch's and `__init__`."""
    for kind in dict.fromkeys(base for owner in kinds for base in owner.__mro__):
        if kind is not object and not kind.__module__.startswith("torch."):
            for name, method in vars(kind).items():
                if isinstance(method, types.FunctionType) and name != "__init__":
                    yield method


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


def _changes(node: ast.AST, name: str) -> bool:
    """Whether a piece of syntax assigns to `name` or an entry of it, or calls a method of it."""
    match node:
        case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Name(ctx=ast.Store() | ast.Del()):
            return _is(node, name)
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
            return _is(value, name)
        case ast.Call(func=ast.Attribute(value=value, attr=method)):
            return _is(value, name) and method in _CHANGING
    return False


def _is(node: ast.AST, name: str) -> bool:
    return name in (getattr(node, "id", None), getattr(node, "attr", None))
