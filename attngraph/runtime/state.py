"""What a forward may branch on besides its arguments: the state of the model and of its surroundings.

A fingerprint, equal before and after as long as nothing changed that a trace can depend on. It is taken
at every call (a change means another graph) and around the trace itself (a change there is a side
effect, which a graph would lose).
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_PLAIN = (int, bool, str, bytes, type(None), torch.dtype, torch.device)
_LONGEST = 256
_DEEPEST = 6
_MODULES_OWN = frozenset(vars(nn.Module())) | {"_is_torch_compile"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def fingerprint(targets: Iterable[Any]) -> tuple[Any, ...]:
    """Everything reached from the targets (modules, functions, values): numbers and texts by value;
    tensors by identity and metadata; modules by identity, training flag, weights' metadata, hooks and
    attributes; containers and plain objects by their contents."""
    walk = _Walk()
    for target in targets:
        walk.visit(target, 0)
    return tuple(walk.found)


def has_hooks(model: nn.Module) -> bool:
    """Whether calling some module of the model calls hooks as well."""
    return any(getattr(module, name) for module in model.modules() for name in _HOOKS)


class Snapshot:
    """The containers and attributes reached from the targets, to be put back as they are now."""

    def __init__(self, targets: Iterable[Any]) -> None:
        walk = _Walk()
        for target in targets:
            walk.visit(target, 0)
        self._kept = [(c, c.copy()) for c in walk.containers]

    def restore(self) -> None:
        for container, copy in self._kept:
            if isinstance(container, list):
                container[:] = copy
            else:
                container.clear()
                container.update(copy)


class _Walk:
    def __init__(self) -> None:
        self.found: list[Any] = []
        self.containers: list[Any] = []
        self.seen: dict[int, int] = {}

    def visit(self, value: Any, depth: int) -> None:
        found = self.found
        if isinstance(value, _PLAIN):
            found.append(value)
        elif isinstance(value, float):
            found.append(repr(value))  # -0.0 and NaN are values too
        elif isinstance(value, Tensor):
            found.append((id(value), value.dtype, value.device, tuple(value.shape)))
        elif id(value) in self.seen:
            found.append(self.seen[id(value)])
        elif depth > _DEEPEST:
            found.append(id(value))
        else:
            self.seen[id(value)] = len(self.seen)
            self.open(value, depth + 1)

    def open(self, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module):
            self.module(value, depth)
        elif isinstance(value, (types.ModuleType, type)):
            self.found.append(id(value))
        elif isinstance(value, (list, tuple, set, frozenset, dict)):
            self.container(value, depth)
        elif isinstance(value, types.FunctionType):
            self.found.append(id(value))
            if depth <= 2:
                self.function(value, depth)
        elif isinstance(value, types.MethodType):
            self.found.append(id(value.__func__))
            self.visit(value.__self__, depth)
        else:
            self.found.append(id(value))
            if isinstance(getattr(value, "__dict__", None), dict):
                self.containers.append(value.__dict__)
            for name, inner in getattr(value, "__dict__", {}).items():
                self.found.append(name)
                self.visit(inner, depth)

    def container(self, value: Any, depth: int) -> None:
        self.found.append((type(value), len(value)))
        if type(value) in (list, dict, set):
            self.containers.append(value)
        if len(value) > _LONGEST:
            self.found.append(id(value))
        elif isinstance(value, dict):
            for key, inner in value.items():
                self.visit(key, depth)
                self.visit(inner, depth)
        elif isinstance(value, (set, frozenset)):
            self.found.append(frozenset(id(v) if not isinstance(v, _PLAIN) else v for v in value))
        else:
            for inner in value:
                self.visit(inner, depth)

    def module(self, module: nn.Module, depth: int) -> None:
        found = self.found
        found += (id(module), type(module), module.training)
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is None:
                    found.append((name, None))
                    continue
                # Weights may be replaced by others like them; only who shares one matters.
                order = self.seen.setdefault(id(tensor), len(self.seen))
                shape = () if is_lazy(tensor) else tuple(tensor.shape)
                found.append((name, order, tensor.dtype, tensor.device, shape, is_lazy(tensor)))
        for hooks in _HOOKS:
            found += (id(hook) for hook in getattr(module, hooks).values())
        self.containers.append(vars(module))
        for name, value in vars(module).items():
            if name not in _MODULES_OWN:
                found.append(name)
                self.visit(value, depth)
        for name, child in module._modules.items():
            found.append(name)
            self.visit(child, 0)

    def function(self, function: types.FunctionType, depth: int) -> None:
        """What a function reads from around it: its closure, its defaults, the globals it names, and its
        own attributes."""
        if function.__dict__:
            self.containers.append(function.__dict__)
            self.visit(dict(function.__dict__), depth)
        self.visit(function.__defaults__, depth)
        self.visit(function.__kwdefaults__, depth)
        for cell in function.__closure__ or ():
            try:
                self.visit(cell.cell_contents, depth)
            except ValueError:
                self.found.append("empty")
        for name in function.__code__.co_names:
            if name in function.__globals__:
                self.visit(function.__globals__[name], depth)
