"""What a class says of its objects: whether attributes are all their state, whether they compare by value.

A class is foreign if it belongs to torch or to Python's standard library. What is mute has state on which no
result depends: locks, loggers, threads.
"""

from __future__ import annotations

import argparse
import contextvars
import dis
import operator
import pickle
import random
import sys
import threading
import types
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

_HEAP_TYPE = 1 << 9
"""CPython's flag of types made by a class statement: all state of their objects is in attributes."""
_OPEN = (types.SimpleNamespace, argparse.Namespace, partial, threading.local)
_OPEN_FILES = frozenset(
    {"collections", "configparser", "contextlib", "http", "os", "queue", "string", "weakref"}
)
"""Modules of Python's library whose objects hold what users put into them."""
_MUTE_FILES = frozenset(
    {
        "_frozen_importlib", "_frozen_importlib_external", "asyncio", "concurrent", "importlib", "inspect",
        "logging", "multiprocessing", "threading", "warnings",
    }
)  # fmt: skip
_MUTE = (type(threading.Lock()), type(threading.RLock()))
_CODE = (
    torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator,
    types.BuiltinFunctionType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.WrapperDescriptorType, types.MethodDescriptorType, types.MethodWrapperType,
    operator.itemgetter, operator.attrgetter, operator.methodcaller,
)  # fmt: skip
"""Code in C, and torch's operations: they are what they are."""
_CONSTANT = (torch.layout, torch.memory_format, torch.qscheme, types.EllipsisType, types.NotImplementedType)
TOOLS = ("sympy", "mpmath", "networkx", "numpy", "typing_extensions", "tqdm")
"""Packages that torch itself works with: what they do follows from their versions."""
_WITH_STATE = (torch.Generator, torch.Stream, torch.Event, contextvars.ContextVar)


@lru_cache(maxsize=4096)
def own_classes(kind: type) -> tuple[type, ...]:
    """The class and its bases, without those of Python's standard library and torch."""
    return tuple(k for k in kind.__mro__ if not is_foreign(k.__module__))


@lru_cache(maxsize=4096)
def slots_of(kind: type) -> tuple[str, ...]:
    named = (getattr(k, "__slots__", ()) for k in kind.__mro__)
    each = (n for names in named for n in ((names,) if isinstance(names, str) else names))
    return tuple(n for n in each if n not in ("__dict__", "__weakref__"))


@lru_cache(maxsize=4096)
def is_open(kind: type) -> bool:
    """Whether attributes are the whole state of objects of this class."""
    if issubclass(kind, _OPEN):
        return True
    made_here = all(k is object or k.__flags__ & _HEAP_TYPE for k in kind.__mro__)
    root = kind.__module__.partition(".")[0]
    return made_here and (not is_foreign(kind.__module__) or root == "torch" or root in _OPEN_FILES)


@lru_cache(maxsize=4096)
def is_mute(kind: type) -> bool:
    """Whether no result depends on the state of objects of this class; attngraph's own are among these."""
    if _is_ours(kind.__module__) or kind.__module__ == "typing" or issubclass(kind, _MUTE):
        return True
    return any(k.__module__.partition(".")[0] in _MUTE_FILES for k in kind.__mro__)


def state_of_generator(value: Any) -> tuple[Any, Callable[[Any], None]] | None:
    """The state of a generator of random numbers, Python's or numpy's, and what sets it; None for other
    objects. No graph depends on it: a forward that draws from one changes it, and is not captured whole."""
    if isinstance(value, random.Random):
        return value.getstate(), value.setstate
    if not type(value).__module__.startswith("numpy.random"):
        return None
    inner = getattr(value, "bit_generator", value)
    state = getattr(inner, "state", None)
    return (
        None
        if state is None
        else (pickle.dumps(state), lambda kept: setattr(inner, "state", pickle.loads(kept)))
    )


def is_fixed(value: Any) -> bool:
    """Whether the object has no state at all: a constant, or code in C."""
    if isinstance(value, _WITH_STATE):
        return False
    return type(value) is object or isinstance(value, (*_CONSTANT, *_CODE)) or _is_named_code(value)


def _is_named_code(value: Any) -> bool:
    """Whether this is a function or a descriptor of another language, such as one of numpy's."""
    if type(value).__flags__ & _HEAP_TYPE:
        return False
    is_function = callable(value) and isinstance(getattr(value, "__name__", None), str)
    return is_function or hasattr(type(value), "__get__")


@lru_cache(maxsize=4096)
def set_on_entry(kind: type) -> frozenset[str]:
    """The attributes that one of torch's context managers, such as `torch.autocast`, sets whenever it is
    entered, to undo what it does. Nothing else reads them."""
    enter = getattr(kind, "__enter__", None)
    if not kind.__module__.startswith("torch.") or not isinstance(enter, types.FunctionType):
        return frozenset()
    return frozenset(str(i.argval) for i in dis.get_instructions(enter) if i.opname == "STORE_ATTR")


def has_value(value: Any) -> bool:
    """Whether the object is compared and hashed by value. (A weak reference is hashable if its object is.)"""
    own_hash: Any = type(value).__hash__
    if own_hash in (None, object.__hash__) or isinstance(value, _WITH_STATE):
        return False
    try:
        hash(value)
    except (TypeError, ValueError):  # the latter of a view of memory that can be written to
        return False
    return True


def is_foreign(module: str) -> bool:
    root = module.partition(".")[0]
    return root == "torch" or (root in sys.stdlib_module_names and root != "__main__")


@lru_cache(maxsize=4096)
def is_known(module: str) -> bool:
    """Whether what a module's code does follows from versions: torch's, Python's, that of a package that
    torch works with, or ours."""
    root = module.partition(".")[0]
    return is_foreign(module) or _is_ours(module) or root in TOOLS or root.startswith("namedtuple_")


def _is_ours(module: str) -> bool:
    return module.startswith("attngraph.") and not module.startswith("attngraph.models.")
