"""Which of the user's code a trace ran, heard while it runs: what a graph of it depends on besides arguments.

Python tells of each call (`sys.setprofile`) while forward itself runs; it is silent inside of torch's
operations, where nearly all of a trace's time goes. Code of torch and of Python's library does not count:
their versions do.
"""

import _lsprof
import collections
import contextlib
import contextvars
import functools
import importlib.util
import os
import sys
import sysconfig
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from attngraph.capture.instead import replaced
from attngraph.capture.state.kinds import TOOLS, is_known
from attngraph.capture.state.scope import THREADS, Ran
from attngraph.ir.kept import holding

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", "..")) + os.sep
_LIBRARY = tuple({sysconfig.get_path(n) + os.sep for n in ("stdlib", "platstdlib")})
_INSTALLED = ("site-packages", "dist-packages")
"""Folders of packages; one may lie inside of Python's library, whichever environment runs."""


_CLOCKS = frozenset(
    value for name, value in vars(time).items()
    if isinstance(value, types.BuiltinFunctionType) and name not in ("sleep", "tzset", "mktime",
    "get_clock_info")
)  # fmt: skip
_IMPORT = "<frozen importlib._bootstrap>"
_CODE_FILES = (".py", ".pyc", ".pyi", ".so", ".pth")
_OUTSIDE = ("socket.connect", "subprocess.Popen", "urllib.Request", "os.listdir", "os.scandir", "os.urandom")
"""Events of Python's audit that read something outside of the process."""


_CURRENT = contextvars.ContextVar[Ran | None]("executed", default=None)


def collecting() -> contextlib.AbstractContextManager[Ran]:
    """Collect the code that traces in the body run."""
    return holding(_CURRENT, Ran())


@contextlib.contextmanager
def recorded(into: Ran, begins: Callable[[types.FrameType], None]) -> Iterator[None]:
    """Record the code that the body runs. `begins`: is called when code of the user's begins to run for the
    first time, before it does anything."""
    profile, environment = _Profile(into, begins), cast(Any, os.environ)
    _listen()
    with (
        holding(_OUTSIDE_READ, into.outside),
        replaced(os.environ, "_data", _Environment(environment._data, into.environment)),
        profile.listening(),
        _Off(profile),
    ):
        yield
    around = _CURRENT.get()
    if around is not None and around is not into:
        around.update(into)


class _Profile:
    """Hears of calls. There can be one such listener only: where another one is active, it is put aside
    meanwhile; a debugger's is not touched."""

    def __init__(self, into: Ran, begins: Callable[[types.FrameType], None]) -> None:
        self.into, self.begins = into, begins
        self._known: dict[tuple[int, int], types.CodeType] = {}
        self._around: types.FrameType | None = None

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            key = id(code), id(frame.f_globals)
            if key not in self._known and _importing(frame) is self._around:
                self._known[key] = code
                self.first(frame)
        elif event == "c_call" and is_users(frame.f_code.co_filename):
            if argument is torch.get_num_threads:
                self.into.environment.add(THREADS)
            elif _asks_the_time(argument):
                self.into.outside[f"the clock ({argument.__qualname__})"] = None

    def first(self, frame: types.FrameType) -> None:
        code = frame.f_code
        file = code.co_filename
        has_no_file = file.startswith("<") and not file.startswith("<frozen")  # a dataclass's methods, say
        made = has_no_file and not is_known(str(frame.f_globals.get("__name__")))
        if made or is_users(file):
            sys.setprofile(None)
            try:
                self.into.add(code, frame.f_globals)
                self.begins(frame)
            finally:
                sys.setprofile(self)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        before, self._around = sys.getprofile(), _importing(sys._getframe())
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._around = None
            if isinstance(before, _lsprof.Profiler):
                before.enable()  # one written in C is put back by its own method
            else:
                sys.setprofile(before)


class _Off(TorchFunctionMode):
    """Stops listening inside of torch's operations, but not inside of those that run functions."""

    def __init__(self, profile: _Profile) -> None:
        super().__init__()
        self.profile = profile

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*args, **(kwargs or {}))
        sys.setprofile(None)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            sys.setprofile(self.profile)


def _importing(frame: types.FrameType | None) -> types.FrameType | None:
    """The import on whose behalf code runs. It happens once, so what it reads and sets is not a forward's."""
    while frame is not None and frame.f_code.co_filename != _IMPORT:
        frame = frame.f_back
    return frame


def _asks_the_time(function: Any) -> bool:
    if function in _CLOCKS:
        return True
    names_now = getattr(function, "__name__", "") in ("now", "today", "utcnow")
    return names_now and isinstance(getattr(function, "__self__", None), type)


class _Environment(collections.UserDict[Any, Any]):
    """The variables of the environment, which notes what the user's code reads. (Torch reads some of its own
    in the first trace of a process alone.)"""

    def __init__(self, held: dict[Any, Any], read: set[str]) -> None:
        self.data, self.read = held, read

    def __getitem__(self, key: Any) -> Any:
        self._note([key])
        return self.data[key]

    def __contains__(self, key: Any) -> bool:
        self._note([key])
        return key in self.data

    def __iter__(self) -> Iterator[Any]:
        self._note(self.data)
        return iter(self.data)

    def _note(self, keys: Iterable[Any]) -> None:
        if _users_below(sys._getframe(2)):
            self.read.update(map(os.fsdecode, keys))


_OUTSIDE_READ = contextvars.ContextVar[dict[str, None] | None]("outside", default=None)


@functools.cache
def _listen() -> None:
    """Let Python tell what code reads from outside of the process."""
    sys.addaudithook(_heard)  # it cannot be removed; it returns at once outside of traces


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if (event != "open" and event not in (_OUTSIDE or ())) or _OUTSIDE_READ is None:
        return  # at the end of the process there are no variables
    into = _OUTSIDE_READ.get()
    name = str(arguments[0]) if arguments else ""
    if into is None or (event == "open" and name.endswith(_CODE_FILES)):
        return
    if _users_below(sys._getframe(1)):
        into[f"the file {name}" if event == "open" else f"what lies outside of the process ({event})"] = None


def _users_below(frame: types.FrameType | None) -> bool:
    """Whether it is the user's code for which Python's library runs, and not to load code."""
    while frame is not None and (_is_pythons(file := frame.f_code.co_filename) or file.startswith("<frozen")):
        if "importlib" in file:
            return False
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


def _is_pythons(file: str) -> bool:
    """Whether a file is of Python's library, and not of a package that is installed in its folder."""
    inside = (file.removeprefix(root) for root in _LIBRARY if file.startswith(root))
    return any(part.split(os.sep)[0] not in _INSTALLED for part in inside)


@functools.cache
def _folders_of_tools() -> tuple[str, ...]:
    """Where the tools lie: in any folder that Python finds packages in. One may be a single file."""
    specs = [spec for tool in TOOLS if (spec := importlib.util.find_spec(tool))]
    files = [(spec.origin, spec.submodule_search_locations is None) for spec in specs if spec.origin]
    return tuple(file if is_alone else os.path.dirname(file) + os.sep for file, is_alone in files)


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Whether code of this file is neither torch's, nor Python's own, nor attngraph's."""
    if file.startswith("<"):
        return file.startswith(("<stdin", "<ipython", "<input", "<doctest", "<console"))
    if file.startswith(_TORCH) or _is_pythons(file) or file.startswith(_folders_of_tools()):
        return False
    real = os.path.realpath(file)
    return not real.startswith(_OURS) or real.startswith(os.path.join(_OURS, "models") + os.sep)
