"""What of the state around a call a graph depends on: what the code that its trace ran can read by name.

A graph depends on what was read, not on what can be reached. So functions count if their code ran, however
deep they lie; global variables count if code that ran names them; and something large, or something whose
state cannot be seen, counts only if code that ran names it.
"""

import builtins
import dataclasses
import dis
import functools
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from attngraph.capture.state.kinds import MISSING, WRAPPERS, is_known, wrapped_by

_DEPTH = 6
"""Decorators around decorators that are followed."""
_OF_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, *WRAPPERS)
_WITHOUT_CODE = (
    str, int, float, bool, bytes, types.NoneType, list, tuple, dict, set, frozenset,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType,
    types.BuiltinFunctionType,
)  # fmt: skip
LeftOut = frozenset[tuple[int, str]]
"""Attributes that do not count: the identity of each owner, and the name."""
Asked = frozenset[tuple[int, str]]
"""What a forward asks of its arguments besides values: the number of the tensor, and the question."""
BUILT_IN = vars(builtins)
THREADS = "torch.get_num_threads()"


def surrounding(name: str) -> Any:
    """A variable of the environment, None if it is not set; or the number of torch's threads."""
    return torch.get_num_threads() if name == THREADS else os.environ.get(name)


class Space:
    """The global variables of a file or of other code, as the owner of them. Equal ones are of the same
    dictionary."""

    __slots__ = ("held",)

    def __init__(self, held: Mapping[str, Any]) -> None:
        self.held: Any = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Space) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)

    @property
    def name(self) -> str:
        return str(self.held.get("__name__") or self.held.get("__module__") or "globals")

    def get(self, name: str) -> Any:
        """What a name stands for, or the file that is imported by it; `MISSING` if there is neither."""
        if name in self.held or name in BUILT_IN:
            return self.held[name] if name in self.held else BUILT_IN[name]
        inside = f"{self.held.get('__package__') or ''}.{name}".strip(".")
        return sys.modules.get(name) or sys.modules.get(inside, MISSING)

    def variables(self) -> list[str]:
        return [name for name in self.held if not name.startswith("__")]


TENSORS = Space(vars(torch.Tensor))
"""The methods of tensors, which users replace."""


# --- what code names ---


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object, and those of the functions, lambdas and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested(constant)


_LOOKS_UP = frozenset(
    kind
    for kind in dis.hasname
    if any(word in dis.opname[kind] for word in ("GLOBAL", "NAME")) and "SUPER" not in dis.opname[kind]
)
"""The kinds of instructions that name a global variable, or a module."""
_EXTENDED, _LOAD_GLOBAL = dis.opmap["EXTENDED_ARG"], dis.opmap["LOAD_GLOBAL"]


class Chain(NamedTuple):
    """What code looks up: a global variable, or a module that it imports, and the attributes that it takes
    of it at once: `torch.nn.functional.softmax`."""

    root: str
    attributes: tuple[str, ...] = ()


_TAKES = frozenset(dis.opmap[name] for name in ("LOAD_ATTR", "LOAD_METHOD") if name in dis.opmap)
_IMPORT, _FROM = dis.opmap["IMPORT_NAME"], dis.opmap["IMPORT_FROM"]
_SHIFTED = {_LOAD_GLOBAL, *(_TAKES if sys.version_info >= (3, 12) else ())}
"""Instructions whose lowest bit is no part of the number of a name."""
_PASSED_OVER = frozenset(dis.opmap[name] for name in ("CACHE", "NOP", "PUSH_NULL") if name in dis.opmap)


@functools.lru_cache(maxsize=4096)
def chains_in(code: types.CodeType) -> tuple[Chain, ...]:
    """What the code looks up by name, each once. It is read from the instructions as Python's `dis` reads
    them, in a tenth of its time."""
    raw, found, more = code.co_code, dict[Chain, None](), 0
    open_chain, imported = Chain(""), ""
    for kind, number in zip(raw[::2], raw[1::2], strict=True):
        if kind == _EXTENDED:
            more = (more | number) << 8
            continue
        number, more = number | more, 0
        if kind in _PASSED_OVER:
            continue
        if kind in _TAKES and open_chain.root:
            name = code.co_names[number >> 1 if kind in _SHIFTED else number]
            open_chain = Chain(open_chain.root, (*open_chain.attributes, name))
            continue
        if kind == _FROM:
            if open_chain == Chain(imported):
                open_chain = Chain("")  # the module itself is no value of the code's
            found[Chain(imported, (code.co_names[number],))] = None
        if open_chain.root:
            found[open_chain] = None
        open_chain = Chain("")
        if kind in _LOOKS_UP:
            open_chain = Chain(code.co_names[number >> 1 if kind in _SHIFTED else number])
            imported = open_chain.root if kind == _IMPORT else imported
    return tuple(found)


class Names(NamedTuple):
    """Names in code: those of attributes and variables, and texts that may be names (`getattr(x, "name")`).
    `looks_around`: whether it asks for variables of its file by other means than their names."""

    all: frozenset[str]
    written: frozenset[str]
    looks_around: bool


_LOOKS_AROUND = frozenset(
    {"globals", "vars", "eval", "exec", "modules", "import_module", "__import__", "f_globals", "__globals__"}
)


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> Names:
    constants = (c for c in code.co_consts for c in (c if isinstance(c, (tuple, frozenset)) else (c,)))
    texts = (c for c in constants if isinstance(c, str) and len(c) < 100)
    written = frozenset(text for text in texts if all(map(str.isidentifier, text.split("."))))
    return Names(frozenset(code.co_names) | written, written, not _LOOKS_AROUND.isdisjoint(code.co_names))


def functions_of(value: Any) -> list[types.FunctionType]:
    """The Python functions that a function, a method, a property or a decorated function consists of."""
    if type(value) in _WITHOUT_CODE:
        return []
    if type(value) is types.FunctionType and value.__closure__ is None and not value.__dict__:
        return [value]
    found: dict[int, types.FunctionType] = {}
    stack = [(value, 0)]
    while stack:
        part, depth = stack.pop()
        if depth > _DEPTH or id(part) in found:
            continue
        inner: list[Any] = []
        if isinstance(part, types.FunctionType):
            found[id(part)] = part
            cells = (c.cell_contents for c in part.__closure__ or () if c != types.CellType())
            inner = [c for c in cells if isinstance(c, _OF_FUNCTIONS)]
            inner.append(vars(part).get("__wrapped__"))
        elif isinstance(part, types.MethodType):
            inner = [part.__func__]
        elif isinstance(part, _OF_FUNCTIONS):
            inner = wrapped_by(part)
        stack += [(p, depth + 1) for p in inner if p is not None]
    return list(found.values())


# --- the scope ---


def read_by(code: types.CodeType, held: dict[str, Any]) -> Iterator[tuple[Space, Iterable[str]]]:
    """The variables that code names that runs among these globals: its own, and those of files that it takes
    them of. All of a file that it uses as a value, since it may ask that for any name."""
    own = Space(held)
    names = names_in(code)
    yield own, (text for text in names.written if text in held and not text.startswith("__"))
    if names.looks_around:
        yield own, (*own.variables(), *(text for text in names.written if text in sys.modules))
    for root, attributes in chains_in(code):
        yield own, (root,)
        value = own.get(root)
        for name in attributes:
            if not isinstance(value, types.ModuleType):
                break
            if name not in vars(value) and "__getattr__" in vars(value):
                getattr(value, name, None)  # a file that loads its names when they are first asked for
            space = Space(vars(value))
            yield space, (name,)
            value = space.get(name)
        if isinstance(value, types.ModuleType) and not is_known(value.__name__):
            yield Space(vars(value)), Space(vars(value)).variables()


@dataclasses.dataclass(frozen=True)
class Scope:
    """What counts.

    Attributes:
        left_out: attributes that do not count, because each call sets them before it reads them.
        codes: the identities of the code that ran; None: unknown, so that everything with a name counts, and
            no function is opened but a target itself.
        spaces: where it reads variables, with their names.
        names: all names of attributes in it.
        environment: what `surrounding` tells, and was read.
        asked: questions about the arguments' tensors that are part of a call's key. layouts: whether the
            layouts of all tensors in memory are.
    """

    left_out: LeftOut = frozenset()
    codes: frozenset[int] | None = None
    spaces: tuple[tuple[Space, tuple[str, ...]], ...] = ()
    names: frozenset[str] = frozenset()
    environment: tuple[str, ...] = ()
    asked: Asked = frozenset()
    layouts: bool = False
    others: frozenset[Any] = frozenset()
    """What counts and is not reached through what the model holds: functions that ran and have variables of
    their own, classes of arguments."""
    alive: Any = dataclasses.field(default=None, compare=False, repr=False)
    """Keeps the code alive, whose identities are compared."""

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.left_out, self.codes, self.spaces, self.names, self.environment, self.asked))

    def __hash__(self) -> int:
        return self._hash

    def reads(self, name: str) -> bool:
        """Whether the code may read what has this name; it may, if there is no name."""
        return self.codes is None or not name or name in self.names


EVERYTHING = Scope()


class Ran:
    """Code that ran, with the globals that it ran among.

    Attributes:
        codes: the user's, by identity.
        environment: names of what `surrounding` tells, and was read.
        outside: what it read that no later call can look at, such as files, clocks and the network.
    """

    def __init__(self) -> None:
        self.codes: dict[int, types.CodeType] = {}
        self.environment: set[str] = set()
        self.outside: dict[str, None] = {}
        self._spaces: dict[int, tuple[Space, dict[str, None]]] = {}
        self._names: set[str] = set()
        self._known: set[tuple[int, int]] = set()

    def add(self, code: types.CodeType, held: dict[str, Any]) -> bool:
        """Add code that runs among these globals; whether it is new there."""
        if (id(code), id(held)) in self._known:
            return False
        self._known.add((id(code), id(held)))
        self.codes[id(code)] = code
        self._names.update(names_in(code).all)
        for space, names in read_by(code, held):
            own = self._spaces.setdefault(id(space.held), (space, {}))[1]
            for name in names:
                own[name] = None
                kept = space.get(name)
                if isinstance(kept, functools._lru_cache_wrapper):
                    self._assume(kept.__wrapped__)
        return True

    def _assume(self, function: Any) -> None:
        """Count a function whose results are kept as one that ran, with those that it names: it may have
        given a result that it had."""
        counts = isinstance(function, types.FunctionType)
        counts = counts and not is_known(str(function.__globals__.get("__name__")))
        if counts and self.add(function.__code__, function.__globals__):
            for space, names in read_by(function.__code__, function.__globals__):
                for name in tuple(names):
                    self._assume(space.get(name))

    def update(self, other: "Ran") -> None:
        """Add what another one has."""
        self._known |= other._known
        self.codes |= other.codes
        self.environment |= other.environment
        self.outside |= other.outside
        self._names |= other._names
        for space, names in other._spaces.values():
            self._spaces.setdefault(id(space.held), (space, {}))[1].update(names)

    def scope(self, asked: Asked = frozenset(), layouts: bool = False) -> Scope:
        read = [(space, tuple(names)) for space, names in self._spaces.values()]
        read.append((TENSORS, tuple(sorted(self._names))))
        return Scope(
            frozenset(), frozenset(self.codes), tuple(read), frozenset(self._names),
            tuple(sorted(self.environment)), asked, layouts, alive=tuple(self.codes.values()),
        )  # fmt: skip
