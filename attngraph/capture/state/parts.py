"""The parts of Python's state that a walk meets: which attributes of modules are their own, what is a
container, what is told by its value; and places, the names of what holds a value."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attngraph.capture.state.scope import MISSING
from attngraph.ir import budgets

PLAIN = (int, bool, str, bytes, type(None), torch.dtype, torch.device)
BY_VALUE = (*PLAIN, float, complex)
_MARKS = {"_is_torch_compile", "_is_fsdp_managed_module", "_fsdp_use_orig_params"}
"""Attributes by which PyTorch's own tools mark modules: no forward reads them."""
MODULES_OWN = frozenset(vars(nn.Module())) | _MARKS
MODULES_TABLES = tuple(name for name, held in vars(nn.Module()).items() if isinstance(held, (dict, set)))
NAMING = ("_parameters", "_buffers", "_modules")
"""Of a module's tables those whose entries are read as attributes of it."""
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
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


_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    """The attributes that users put on a tensor."""
    held = vars(tensor) if type(tensor) in _PLAIN_TENSORS else None
    return {n: v for n, v in held.items() if not n.startswith("_dynamo")} if held else {}


def hooks_not_traced(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """The hooks that a call runs, or its backward pass if gradients are recorded, and a trace does not: the
    path of each one's module, its kind, and itself. Other forward hooks are code of the forward. Those of
    torch.distributed move weights between devices."""
    for path, module in model.named_modules():
        for name in FORWARD_HOOKS:
            for hook in getattr(module, name).values():
                if (getattr(hook, "__module__", None) or "").startswith("torch.distributed."):
                    yield path, "hook", hook
        for name in BACKWARD_HOOKS if torch.is_grad_enabled() else ():
            for hook in getattr(module, name).values():
                yield path, "backward hook", hook


@functools.lru_cache(maxsize=4096)
def set_by_user(names: tuple[str, ...]) -> tuple[str, ...]:
    """Of the names of a module's attributes those that not every module has."""
    return tuple(name for name in names if name not in MODULES_OWN)


def is_of_stand_ins(key: Any) -> bool:
    """Whether a key is a class of tensors that exist in a trace alone, or holds one. What a library notes
    under it (einx does, under the types of its operands) is no state of the model."""
    if isinstance(key, tuple):
        return any(map(is_of_stand_ins, key))
    return isinstance(key, type) and key.__module__ in _STAND_INS


_STAND_INS = ("torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor")


def is_plain(value: Any) -> bool:
    if not isinstance(value, CONTAINERS):
        return isinstance(value, BY_VALUE)
    entries = [*value, *value.values()] if isinstance(value, dict) else value
    return len(value) <= budgets.STATE_ENTRIES and all(isinstance(entry, BY_VALUE) for entry in entries)


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
