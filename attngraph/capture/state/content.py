"""The state that a forward may depend on, described by its content: the same in another process.

`capture/state/` compares by identity, at every call; here every part has a path (`model.h.0.attn.scale`)
and a short text, so that a difference has a name. What cannot be described is named in `doubts`: a graph that
may depend on it is not taken up again unasked.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import re
import sys
import threading
import types
import weakref
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.capture.state.code import code_digest, digest, functions_of, nested
from attngraph.capture.state.kinds import has_value, is_foreign, is_open, set_on_entry, slots_of
from attngraph.capture.state.ran import TOOLS
from attngraph.capture.state.walk import BACKWARD_HOOKS, FORWARD_HOOKS, MODULES_OWN, PLAIN
from attngraph.ir import budgets

_LINE = 100
"""Longer texts are written as digests."""
_ENTRIES = 1 << 14
_BYTES = 1 << 26
"""Contents of larger tensors, and containers with more entries, are not described."""
_MUTE = (logging.Logger, type(threading.Lock()), type(threading.RLock()))
"""Objects on which no result depends."""
_NAMED = (
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)


_CONTAINERS = (list, tuple, set, frozenset, dict)


class Content:
    """What is reachable from some values.

    Attributes:
        lines: a text for each path.
        objects: modules, objects and tensors by path.
        doubts: what could not be described.
        functions: functions and methods that were met, by path or by the name of the class.
        codes: for the identity of each code object in them the name of its function.
    """

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}
        self.objects: dict[str, Any] = {}
        self.doubts: list[str] = []
        self.functions: dict[str, types.FunctionType] = {}
        self.codes: dict[int, str] = {}
        self._seen: dict[int, str] = {}
        self._held: list[Any] = []
        self._classes: dict[type, str] = {}
        self._owners: dict[type, list[str]] = {}

    def beside(self) -> Content:
        """An empty one, which takes the classes that this one has described as described."""
        made = Content()
        made._classes, made._owners = self._classes, self._owners
        return made

    def paths(self) -> dict[int, str]:
        """The path of each object, by its identity."""
        return {id(value): path for path, value in self.objects.items()}

    def meet(self, name: str, function: types.FunctionType) -> None:
        self.functions.setdefault(name, function)
        for code in nested(function.__code__):
            self.codes.setdefault(id(code), name)

    def put(self, path: str, text: str) -> None:
        self.lines[path] = text if len(text) <= _LINE else f"{text[:24]}... {digest(text)}"

    def doubt(self, path: str, value: Any) -> None:
        self.put(path, f"a {_name(type(value))}")
        self.doubts.append(f"{path}, a {type(value).__name__}")

    def visit(self, path: str, value: Any, depth: int = 0) -> None:
        if isinstance(value, (*PLAIN, float, complex, types.NotImplementedType, types.EllipsisType)):
            self.put(path, f"{type(value).__name__} {value!r}")
        elif isinstance(value, weakref.ref):
            self.visit(path, value(), depth)
        elif id(value) in self._seen:
            self.put(path, f"same as {self._seen[id(value)]}")
        elif depth > budgets.STATE_DEPTH:
            self.doubt(path, value)
        else:
            self._seen[id(value)] = path
            self._held.append(value)  # its identity stays its own
            self._open(path, value, depth + 1)

    def _open(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            self._tensor(path, value)
        elif isinstance(value, nn.Module):
            self._module(path, value, depth)
        elif isinstance(value, type):
            self.put(path, self.kind(value))
        elif isinstance(value, types.ModuleType):
            self.put(path, f"module {value.__name__} {getattr(value, '__version__', '')}")
        elif isinstance(value, (list, tuple, set, frozenset, dict, types.MappingProxyType)):
            self._container(path, value, depth)
        elif isinstance(value, types.MethodType):
            self._function(path, value.__func__, depth)
            self.visit(f"{path}.__self__", value.__self__, depth)
        elif isinstance(value, partial):
            for name in ("func", "args", "keywords"):
                self.visit(f"{path}.{name}", getattr(value, name), depth)
        elif functions_of(value):
            self._function(path, value, depth)
        else:
            self._thing(path, value, depth)

    def _tensor(self, path: str, tensor: Tensor) -> None:
        """A tensor that is not a weight: by its contents too."""
        self.objects[path] = tensor
        about = f"tensor {tensor.dtype} {tuple(tensor.shape)} {tensor.device} {tensor.requires_grad}"
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.nbytes > _BYTES:
            self.doubt(path, tensor)
        else:
            self.put(path, f"{about} {tensor_digest(tensor)}")

    def _module(self, path: str, module: nn.Module, depth: int) -> None:
        self.objects[path] = module
        self.put(path, f"{self.kind(type(module))} {'training' if module.training else 'eval'}")
        for kind, store in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in store.items():
                where = f"{path}.{name}"
                if tensor is None:
                    self.put(where, f"no {kind}")
                    continue
                known = self._seen.setdefault(id(tensor), where)
                same = "" if known == where else f", same as {known}"
                wants = kind == "buffer" and tensor.requires_grad
                shape = tuple(tensor.shape)
                self.put(where, f"{kind} {tensor.dtype} {shape} {tensor.device}{' wants' * wants}{same}")
                if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
                    self.doubt(where, tensor)
        for hooks in (*FORWARD_HOOKS, *BACKWARD_HOOKS):
            for number, hook in enumerate(getattr(module, hooks).values()):
                self.visit(f"{path}.{hooks}.{number}", hook, depth)
        for name, value in tuple(vars(module).items()):
            if name not in MODULES_OWN:
                self.visit(f"{path}.{name}", value, depth)
        for name, child in module._modules.items():
            self.visit(f"{path}.{name}", child, 0)

    def _container(self, path: str, value: Any, depth: int) -> None:
        self.put(path, f"{type(value).__name__} of {len(value)}")
        if len(value) > _ENTRIES:
            self.doubt(path, value)
        elif isinstance(value, (set, frozenset)):
            inner = Content()
            texts = []
            for number, entry in enumerate(value):
                inner.visit(str(number), entry, depth)
                texts.append(inner.lines[str(number)])
            self.doubts += [f"{path}, {d}" for d in inner.doubts]
            self.put(path, f"{type(value).__name__} {sorted(texts)}")
        elif isinstance(value, (dict, types.MappingProxyType)):
            for number, (key, inner_value) in enumerate(tuple(value.items())):
                name = key if isinstance(key, str) else f"{number}"
                if not isinstance(key, str):
                    self.visit(f"{path}[key {number}]", key, depth)
                self.visit(f"{path}[{name}]", inner_value, depth)
        else:
            for number, entry in enumerate(value):
                self.visit(f"{path}[{number}]", entry, depth)

    def _function(self, path: str, value: Any, depth: int) -> None:
        """A function by its code and what it was made with; not the globals that it names."""
        texts = []
        identities = {id(function) for function in functions_of(value)}  # torch notes them on its wrappers
        for number, function in enumerate(functions_of(value)):
            texts.append(f"{function.__module__}.{function.__qualname__} {code_digest(function.__code__)}")
            own = f"{path}.{number}" if number else path
            self.meet(own, function)
            for name in ("__defaults__", "__kwdefaults__"):
                if getattr(function, name):
                    self.visit(f"{own}.{name}", getattr(function, name), depth)
            names = function.__code__.co_freevars
            for name, cell in zip(names, function.__closure__ or (), strict=True):
                if cell != types.CellType() and not isinstance(cell.cell_contents, types.FunctionType):
                    self.visit(f"{own}.<{name}>", cell.cell_contents, depth)
            for name, inner in vars(function).items():
                if type(inner) is int and inner in identities:
                    self.put(f"{own}.{name}", "its own identity, which differs between processes")
                elif name != "__wrapped__":
                    self.visit(f"{own}.{name}", inner, depth)
        self.put(path, f"function {'; '.join(texts)}")

    def _thing(self, path: str, value: Any, depth: int) -> None:
        kind: Any = type(value)
        if isinstance(value, _MUTE):
            self.put(path, kind.__name__)
        elif isinstance(value, enum.Enum):
            self.put(path, f"{_name(kind)}.{value.name}")
        elif isinstance(value, _NAMED) or _is_of_a_tool(value):
            self.put(
                path,
                f"{kind.__name__} {getattr(value, '__module__', '')} {getattr(value, '__qualname__', value)}",
            )
        elif isinstance(value, ContextVar):
            self.visit(f"{path}.value", value.get(None), depth)
        elif is_open(kind) and (hasattr(value, "__dict__") or slots_of(kind)):
            self.objects[path] = value
            self.put(path, self.kind(kind))
            passing = set_on_entry(kind)
            held = {name: getattr(value, name, None) for name in slots_of(kind)}
            held |= getattr(value, "__dict__", {})
            for name, inner in tuple(held.items()):
                if name in passing:
                    continue
                if type(inner) is int and abs(inner) > 1 << 32 and _is_hash_of(value, inner):
                    self.put(f"{path}.{name}", "its own hash, which differs between processes")
                else:
                    self.visit(f"{path}.{name}", inner, depth)
        else:
            self._closed(path, value)

    def _closed(self, path: str, value: Any) -> None:
        """An object whose attributes are not all of its state: by its text, if that stands for its value."""
        try:
            view = memoryview(value)
        except TypeError:
            view = None
        text = repr(value)
        if view is not None and view.nbytes <= _BYTES:
            self.put(
                path, f"{_name(type(value))} {view.shape} {hashlib.sha256(view.tobytes()).hexdigest()[:32]}"
            )
        elif isinstance(value, (slice, re.Pattern)) or (has_value(value) and " at 0x" not in text):
            self.put(path, f"{_name(type(value))} {text}")
        else:
            self.doubt(path, value)

    def kind(self, kind: type) -> str:
        """A class: its name, the code of all its methods, and plain attributes."""
        found = self._classes.get(kind)
        if found is None:
            owners = (k for k in kind.__mro__ if k is not object and k.__module__ != "builtins")
            parts = [part for owner in owners for part in self._own(owner)]
            found = self._classes[kind] = f"class {_name(kind)} {digest(chr(10).join(parts))[:16]}"
        return found

    def _own(self, owner: type) -> list[str]:
        """What a class has itself, without its bases; looked at once: many classes have equal bases."""
        if owner in self._owners:
            return self._owners[owner]
        parts = [_name(owner)]
        for name, value in tuple(vars(owner).items()):
            for number, function in enumerate(functions_of(value)):
                self.meet(f"{_name(owner)}.{name}.{number}", function)
                parts.append(f"{name} {code_digest(function.__code__)}")
            if isinstance(value, enum.Enum):
                value = value.value if isinstance(value.value, PLAIN) else repr(value.value)
            is_plain = isinstance(value, (int, float, str))
            if is_foreign(owner.__module__) or name.startswith("__"):
                continue
            if is_plain:
                parts.append(f"{name} {value!r}")
            elif isinstance(value, _CONTAINERS):
                self.visit(f"{_name(owner)}.{name}", value)
        self._owners[owner] = parts
        return parts


def _is_of_a_tool(value: Any) -> bool:
    """Whether an object is what a package that torch works with has under the object's own name. What it does
    then follows from the package's version."""
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if not isinstance(module, str) or module.partition(".")[0] not in TOOLS or not isinstance(name, str):
        return False
    return getattr(sys.modules.get(module), name, None) is value


def _is_hash_of(value: Any, number: int) -> bool:
    try:
        return number in (id(value), hash(value))
    except TypeError:
        return False


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def tensor_digest(tensor: Tensor) -> str:
    """A digest of a tensor's type and contents."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    about = f"{tensor.dtype} {tuple(tensor.shape)}"
    content = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return hashlib.sha256(about.encode() + content).hexdigest()[:32]
