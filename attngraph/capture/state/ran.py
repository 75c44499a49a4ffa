"""Which of the user's functions a trace ran: what a graph of it depends on besides state.

A profiler written in C counts calls while forward itself runs; it is off inside of torch's operations, where
nearly all of a trace's time goes, so it costs next to nothing. Code of torch and of Python's library does not
count: their versions do.
"""

from __future__ import annotations

import contextlib
import contextvars
import cProfile
import functools
import importlib.util
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_LIBRARY = tuple({sysconfig.get_path(n) + os.sep for n in ("stdlib", "platstdlib")})
TOOLS = ("sympy", "mpmath", "networkx", "numpy", "typing_extensions")
"""Packages that torch itself works with: what they do follows from their versions."""
_INSTALLED = ("site-packages", "dist-packages")
"""Folders of packages; one may lie inside of Python's library, whichever environment runs."""


class Executed:
    """The code that ran in the traces of one compilation. `codes`: the user's; `without_file`: other code
    that has no file; `complete`: whether all of it could be seen; `files`: what it opened, besides code."""

    def __init__(self) -> None:
        self.codes: dict[int, types.CodeType] = {}
        self.without_file: dict[int, types.CodeType] = {}
        self.complete = True
        self.files: list[str] = []

    def add(self, entries: Sequence[Any]) -> None:
        """Add what a profile has."""
        self.codes |= {id(code): code for code in _of_the_user(entries)}
        ran = (e.code for e in entries if isinstance(e.code, types.CodeType))
        self.without_file |= {id(code): code for code in ran if _is_generated(code.co_filename)}


_CURRENT: contextvars.ContextVar[Executed | None] = contextvars.ContextVar("executed", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[Executed]:
    """Collect the code that traces in the body run."""
    found = Executed()
    token = _CURRENT.set(found)
    try:
        yield found
    finally:
        _CURRENT.reset(token)


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Record the code that the body runs, for whoever collects it."""
    into = _CURRENT.get()
    if into is None:
        yield
        return
    profile = None if sys.getprofile() is not None else _profiler()
    if profile is None:  # another profiler runs, and there can be one only
        into.complete = False
        yield
        return
    with _Off(profile), _files_noted(into):
        profile.enable()
        try:
            yield
        finally:
            profile.disable()
            into.add(profile.getstats())


def _profiler() -> Any:
    """None where another one runs that Python does not show."""
    profile: Any = cProfile.Profile(subcalls=True, builtins=False)
    try:
        profile.enable()
        profile.disable()
    except ValueError:
        return None
    return profile


_OPENED: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("opened", default=None)
_CODE_FILES = (".py", ".pyc", ".pyi", ".so", ".pth")


@contextlib.contextmanager
def _files_noted(into: Executed) -> Iterator[None]:
    """Note the files that the body opens: what a graph takes from them cannot be seen."""
    _listen()
    token = _OPENED.set(into.files)
    try:
        yield
    finally:
        _OPENED.reset(token)


@functools.cache
def _listen() -> None:
    sys.addaudithook(_heard)  # it cannot be removed; it returns at once outside of traces


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        opened = _OPENED.get()
        name = str(arguments[0])
        if opened is not None and not name.endswith(_CODE_FILES) and not name.startswith(_TORCH):
            opened.append(name)


class _Off(TorchFunctionMode):
    """Stops the profiler inside of torch's operations."""

    def __init__(self, profile: Any) -> None:
        super().__init__()
        self.profile = profile

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.profile.disable()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.profile.enable()


def _of_the_user(entries: Iterable[Any]) -> list[types.CodeType]:
    """The user's code among a profile's entries, and code without a file that it called."""
    entries = [e for e in entries if isinstance(e.code, types.CodeType)]
    calls = {
        id(e.code): [c.code for c in e.calls or () if isinstance(c.code, types.CodeType)] for e in entries
    }
    stack = [e.code for e in entries if is_users(e.code.co_filename)]
    found: dict[int, types.CodeType] = {}
    while stack:
        code = stack.pop()
        if id(code) not in found:
            found[id(code)] = code
            stack += [c for c in calls.get(id(code), ()) if _is_generated(c.co_filename)]
    return list(found.values())


def _is_generated(file: str) -> bool:
    """Whether code has no file: a dataclass's own methods, say, or what is typed into a notebook."""
    return file.startswith("<") and not file.startswith("<frozen")


def _is_pythons(file: str) -> bool:
    """Whether a file is of Python's library, and not of a package that is installed in its folder."""
    inside = (file.removeprefix(root) for root in _LIBRARY if file.startswith(root))
    return any(part.split(os.sep)[0] not in _INSTALLED for part in inside)


@functools.cache
def _folders_of_tools() -> tuple[str, ...]:
    """Where the tools lie: in any folder that Python finds packages in. One may be a single file."""
    found = [spec for tool in TOOLS if (spec := importlib.util.find_spec(tool)) and spec.origin]
    return tuple(
        str(spec.origin)
        if spec.submodule_search_locations is None
        else os.path.dirname(str(spec.origin)) + os.sep
        for spec in found
    )


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Whether code of this file is neither torch's, nor Python's own, nor attngraph's."""
    if file.startswith("<"):
        return file.startswith(("<stdin", "<ipython", "<input", "<doctest", "<console"))
    if file.startswith(_TORCH) or _is_pythons(file) or file.startswith(_folders_of_tools()):
        return False
    real = os.path.realpath(file)
    return not real.startswith(_OURS) or real.startswith(os.path.join(_OURS, "models") + os.sep)
