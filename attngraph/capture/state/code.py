"""Digests of Python code, and the functions that stand behind a name.

Two code objects with equal digests do the same and stand on the same lines of their file, wherever that file
is. What a decorator makes of a function counts with the function.
"""

import dis
import functools
import hashlib
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from attngraph.capture.state.kinds import WRAPPERS, wrapped_by

_DEPTH = 6
"""Decorators around decorators that are followed."""
_OF_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, *WRAPPERS)
_WITHOUT_CODE = (
    str, int, float, bool, bytes, types.NoneType, list, tuple, dict, set, frozenset,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType,
    types.BuiltinFunctionType,
)  # fmt: skip
_known: dict[int, tuple[types.CodeType, str]] = {}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def code_digest(code: types.CodeType) -> str:
    """The same in every process for the same source, version of Python and place in its file."""
    known = _known.get(id(code))
    if known is None or known[0] is not code:
        parts = (
            code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
            code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags,
            code.co_qualname, code.co_firstlineno, code.co_linetable.hex(), code.co_exceptiontable.hex(),
            [_constant(c) for c in code.co_consts],
        )  # fmt: skip
        known = _known[id(code)] = code, digest(repr(parts))
    return known[1]


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):  # its order differs between processes
        return f"frozenset {sorted(map(_constant, value))}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return f"{type(value).__name__} {value!r}"


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
