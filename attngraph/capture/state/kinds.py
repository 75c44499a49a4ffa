"""What a class says of its objects: whether attributes are all their state, whether they compare by value.

A class is foreign if it belongs to torch or to Python's standard library.
"""

from __future__ import annotations

import argparse
import dis
import sys
import types
from functools import lru_cache, partial
from typing import Any

_HEAP_TYPE = 1 << 9
"""CPython's flag of types made by a class statement: all state of their objects is in attributes."""
_OPEN = (types.SimpleNamespace, argparse.Namespace, partial)


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
    """Whether attributes are the whole state of objects of this class. attngraph's runtime objects are
    excluded: a trace cannot depend on how they change."""
    if issubclass(kind, _OPEN):
        return True
    if kind.__module__.startswith("attngraph.runtime."):
        return False
    made_here = all(k is object or k.__flags__ & _HEAP_TYPE for k in kind.__mro__)
    return made_here and (not is_foreign(kind.__module__) or kind.__module__.startswith("torch."))


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
    if own_hash in (None, object.__hash__):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True


def is_foreign(module: str) -> bool:
    root = module.partition(".")[0]
    return root == "torch" or (root in sys.stdlib_module_names and root != "__main__")
