"""Fingerprints: two of the same scope are equal if nothing that a graph depends on has changed.

Numbers and texts count by value; tensors by identity and metadata; weights by their metadata and by which
modules share them, since they are looked up at every call; modules, functions and classes by identity;
containers and objects by what is in them.
"""

import functools
import types
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from attngraph.capture.state.kinds import BY_VALUE, bytes_of
from attngraph.capture.state.scope import EVERYTHING, Scope
from attngraph.capture.state.walk import Walk

_COMPARED_EXACTLY = frozenset({int, str, bytes, type(None), torch.dtype, torch.device})


class Same:
    """Compares an object by identity. It keeps the object alive, so that its address is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Exact(NamedTuple):
    """A value that equals only one of its type and text: `True` is not 1, -0.0 is not 0.0, NaN is NaN."""

    type: type
    text: str

    def __repr__(self) -> str:
        return self.text


def exact(value: Any) -> Any:
    return value if type(value) in _COMPARED_EXACTLY else Exact(type(value), repr(value))


class Taken(tuple[Any, ...]):
    """A fingerprint, whose hash is computed once."""

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


def fingerprint(
    targets: Iterable[Any], scope: Scope = EVERYTHING, weights: Mapping[int, int] = MappingProxyType({})
) -> Taken:
    """The state of the targets (modules, functions, values) and of all that the scope's code reads.

    Args:
        weights: during a trace, from the identity of each weight to that of the one that it stands for.
    """
    found = Fingerprint(scope, weights)
    found.everything(targets)
    return Taken(found.found)


class Fingerprint(Walk):
    """The walk that takes a fingerprint: `found`."""

    def __init__(self, scope: Scope = EVERYTHING, weights: Mapping[int, int] = MappingProxyType({})) -> None:
        super().__init__(scope)
        self.weights = weights
        self.found: list[Any] = []

    def child(self, step: str, value: Any, depth: int) -> None:
        self.found.append(step)
        self.visit(value, depth)

    def function(self, function: types.FunctionType, depth: int) -> None:
        self.found.append(Same(function.__code__))
        super().function(function, depth)

    def plain(self, value: Any) -> None:
        self.found.append(value if type(value) in _COMPARED_EXACTLY else Exact(type(value), repr(value)))

    def tensor(self, value: Tensor) -> None:
        # A tensor that a graph takes as a constant lives as long as that, so its address is its own.
        identity = self.weights.get(id(value)) or getattr(value, "serial_number", id(value))
        self.found.append((identity, *self._about(value)))

    def weight(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is None:
            self.found.append((name, None))
            return
        # Weights may be replaced by similar ones; only which modules share a weight matters.
        order, lazy = self.seen.setdefault(id(tensor), len(self.seen)), is_lazy(tensor)
        about = (tensor.dtype, tensor.device) if lazy else self._about(tensor, name in module._buffers)
        self.found.append((name, order, lazy, *about))

    def _about(self, tensor: Tensor, wants: bool = True) -> tuple[Any, ...]:
        layout = (tensor.stride(), tensor.storage_offset()) if self.scope.layouts else ()
        return (
            tensor.dtype, tensor.device, tuple(tensor.shape), wants and tensor.requires_grad, *layout,
        )  # fmt: skip

    def head(self, module: nn.Module) -> None:
        self.found += (id(module), module.training)

    def opened(self, value: Any) -> None:
        self.found.append(type(value))

    def same(self, value: Any) -> None:
        self.found.append(Same(value))

    def valued(self, value: Any) -> None:
        self.found.append((slice, repr(value)) if isinstance(value, slice) else (type(value), value))

    def buffer(self, value: Any) -> None:
        self.found += (Same(value), bytes_of(value))

    def length(self, value: Any, entries: int) -> None:
        self.found.append((type(value), entries))

    def members_of_set(self, value: Any) -> None:
        self.found.append(frozenset(exact(v) if isinstance(v, BY_VALUE) else Same(v) for v in value))

    def again(self, value: Any) -> None:
        self.found.append(self.seen[id(value)])
