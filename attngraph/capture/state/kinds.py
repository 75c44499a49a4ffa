"""The kinds of things that a walk through Python's state meets, and places, the names of what holds a value.

What is a container, what is told by its value, whether attributes are all the state of an object, which
attributes of a module are its own. A class is foreign if it belongs to torch or to Python's standard library.
What is mute has state on which no result depends: locks, loggers, threads.
"""

import argparse
import contextvars
import dis
import functools
import operator
import pickle
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attngraph.ir import budgets

MISSING = object()
"""In the place of what has no value."""
BY_VALUE = (int, bool, str, bytes, type(None), torch.dtype, torch.device, float, complex)
_MARKS = {"_is_torch_compile", "_is_fsdp_managed_module", "_fsdp_use_orig_params"}
"""Attributes by which PyTorch's own tools mark modules: no forward reads them."""
MODULES_OWN = frozenset(vars(nn.Module())) | _MARKS
MODULES_TABLES = tuple(name for name, held in vars(nn.Module()).items() if isinstance(held, (dict, set)))
NAMING = ("_parameters", "_buffers", "_modules")
"""Of a module's tables those whose entries are read as attributes of it."""
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
HOOKS = (*FORWARD_HOOKS, *BACKWARD_HOOKS)
CONTAINERS = (list, tuple, set, frozenset, dict, deque, types.MappingProxyType)
VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
WRAPPERS = (
    property, staticmethod, classmethod, functools.cached_property, functools.partialmethod,
    functools._lru_cache_wrapper,
)  # fmt: skip
OF_EVERY_CLASS = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__slots__",
    "__abstractmethods__", "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__parameters__",
    "__orig_bases__", "__hash__", "__static_attributes__", "__firstlineno__", "_abc_impl"}
)  # fmt: skip
ORDER = frozenset({"__dict__", "vars"})
"""Names by which code asks for all attributes, in their order."""
TOO_DEEP = "it is nested too deeply"


class Place(NamedTuple):
    """An attribute or a variable: the module, object, class, function, file or globals (`Space`) that it
    belongs to, and its name. Without a name, all of the owner's."""

    owner: Any
    name: str


_HEAP_TYPE = 1 << 9
"""CPython's flag of types made by a class statement: all state of their objects is in attributes."""
_OPEN = (types.SimpleNamespace, argparse.Namespace, partial, threading.local)
_OPEN_FILES = frozenset(
    {"collections", "configparser", "contextlib", "dataclasses", "http", "os", "queue", "string", "weakref"}
)
"""Modules of Python's library whose objects hold what users put into them."""
_MUTE_FILES = frozenset(
    {"_frozen_importlib", "_frozen_importlib_external", "asyncio", "concurrent", "importlib", "inspect",
    "logging", "multiprocessing", "threading", "warnings"}
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
    return tuple(k for k in kind.__mro__ if not is_foreign(module_of(k)))


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
    root = module_of(kind).partition(".")[0]
    return made_here and (not is_foreign(module_of(kind)) or root == "torch" or root in _OPEN_FILES)


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
    if state is None:
        return None
    return pickle.dumps(state), lambda kept: setattr(inner, "state", pickle.loads(kept))


def is_fixed(value: Any) -> bool:
    """Whether the object has no state at all: a constant, or code in C."""
    if isinstance(value, _WITH_STATE):
        return False
    if type(value) is object or isinstance(value, (*_CONSTANT, *_CODE)):
        return True
    # A function or a descriptor of another language, such as one of numpy's.
    is_function = callable(value) and isinstance(getattr(value, "__name__", None), str)
    return not type(value).__flags__ & _HEAP_TYPE and (is_function or hasattr(type(value), "__get__"))


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


def module_of(kind: Any) -> str:
    """The name of a class's module; "" where its instances have one of their own (numpy's ufuncs)."""
    found = kind.__module__
    return found if isinstance(found, str) else ""


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


_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    held = vars(tensor) if type(tensor) in _PLAIN_TENSORS else None
    return {n: v for n, v in held.items() if not n.startswith("_dynamo")} if held else {}


def hooks_not_traced(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """The hooks that a call runs, or its backward pass if gradients are recorded, and a trace does not: the
    path of each one's module, its kind, and itself. Other forward hooks are code of the forward. Those of
    torch.distributed move weights between devices."""
    for path, module in model.named_modules():
        hooks = (hook for name in FORWARD_HOOKS for hook in getattr(module, name).values())
        for hook in hooks:
            if (getattr(hook, "__module__", None) or "").startswith("torch.distributed."):
                yield path, "hook", hook
        for name in BACKWARD_HOOKS if torch.is_grad_enabled() else ():
            yield from ((path, "backward hook", hook) for hook in getattr(module, name).values())


@functools.lru_cache(maxsize=4096)
def set_by_user(names: tuple[str, ...]) -> tuple[str, ...]:
    """Of the names of a module's attributes those that not every module has."""
    return tuple(name for name in names if name not in MODULES_OWN)


def is_of_stand_ins(key: Any) -> bool:
    """Whether a key is a class of tensors that exist in a trace alone, or holds one, or is the text of a
    class of ours. What a library notes under it (einx does, under the types of its operands; transformers,
    under the text of each model's class) is no state of the model."""
    if isinstance(key, tuple):
        return any(map(is_of_stand_ins, key))
    if isinstance(key, str):
        return key.startswith("<class 'attngraph.")
    return isinstance(key, type) and key.__module__ in _STAND_INS


_STAND_INS = ("torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor")


def is_plain(value: Any) -> bool:
    if not isinstance(value, CONTAINERS):
        return isinstance(value, BY_VALUE)
    entries = [*value, *value.values()] if isinstance(value, dict) else value
    return len(value) <= budgets.STATE_ENTRIES and all(isinstance(entry, BY_VALUE) for entry in entries)


def wrapped_by(value: Any) -> list[Any]:
    """What one of `WRAPPERS` makes of functions: these."""
    if isinstance(value, property):
        parts = [value.fget, value.fset, value.fdel]
    elif isinstance(value, functools._lru_cache_wrapper):
        parts = [value.__wrapped__]
    else:
        parts = [getattr(value, "func", None) or getattr(value, "__func__", None)]
    return [part for part in parts if part is not None]


def inside(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def size_of(value: Any) -> int:
    """The bytes of an object such as a numpy array; -1 if it has none."""
    try:
        return memoryview(value).nbytes
    except TypeError:
        return -1


def bytes_of(value: Any) -> bytes:
    """The contents of a buffer, such as a numpy array; empty for other objects."""
    try:
        return memoryview(value).tobytes()
    except TypeError:
        return b""
