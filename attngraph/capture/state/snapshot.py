"""A copy of the state that a trace may change, to find what it changed and to put everything back.

A trace runs the model's Python code, some of it several times. What that does to attributes, containers,
iterators, numpy arrays and small tensors must not be seen by the call that is computed afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.capture.state.walk import MODULES_TABLES, NAMING, Place, bytes_of, fingerprint, walk
from attngraph.ir import budgets

_NO_NAMES: dict[Any, Any] = {}
_NO_VALUES: frozenset[Any] = frozenset()


class Snapshot:
    """The containers, attributes and variables reachable from the targets, and the hooks of modules, so that
    they can be restored."""

    def __init__(self, targets: Iterable[Any]) -> None:
        walked = walk(targets)
        found = [each for place, c in walked.containers for each in ((place, c), *_tables_of(place.owner, c))]
        self._containers = [(place, c, c.copy() if c else _empty(c)) for place, c in found]
        self._variables = walked.variables
        self._buffers = [(place, value, bytes_of(value)) for place, value in walked.buffers]
        is_traced = torch._C._len_torch_dispatch_stack() > 0  # nothing can be copied or written there
        small = (t for _, c in found if not is_traced for _, t in _entries(c) if _is_small(t))
        self._tensors = [(t, t._version, t.detach().clone()) for t in small]

    def restore(self) -> None:
        for _, container, copy in self._containers:
            if _is_untouched(container, copy):
                continue  # other threads may read it
            if isinstance(container, list):
                container[:] = copy
            else:
                container.clear()
                (container.extend if isinstance(container, deque) else container.update)(copy)
        for place, value in self._variables:
            if _variable(place) is not value:
                _assign(place, value)
        for _, value, content in self._buffers:
            if isinstance(value, bytearray):
                value[:] = content
            elif content and bytes_of(value) != content and memoryview(value).c_contiguous:
                memoryview(value).cast("B")[:] = content
        for tensor, version, copy in self._tensors:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(copy)

    @contextlib.contextmanager
    def iterators_refused(self, refuse: Callable[[Place], None]) -> Iterator[None]:
        """Where the body would advance an iterator among the attributes, which nobody could take back, call
        `refuse` with its place and raise an error."""
        replaced = []
        for place, container, _ in self._containers:
            for name, value in _entries(container):
                if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
                    container[name] = _Refused(refuse, place if place.name else Place(place.owner, str(name)))
                    replaced.append((container, name, value))
        try:
            yield
        finally:
            for container, name, value in replaced:
                if any(n == name and isinstance(held, _Refused) for n, held in _entries(container)):
                    container[name] = value

    def replace_tensors(self, replacement: Callable[[Tensor], Tensor]) -> None:
        """Put replacements of tensors into attributes, lists and dictionaries, until they are restored."""
        for _, container, copy in self._containers:
            for name, value in _entries(copy):
                if isinstance(value, Tensor):
                    container[name] = replacement(value)

    def changed_attributes(self) -> list[Place]:
        """All attributes that are other objects now, and buffers that were there before."""
        found: list[Place] = []
        for (owner, whole), now, before in self._containers:
            held: Any = getattr(owner, "__dict__", None)
            is_buffers = isinstance(owner, nn.Module) and now is owner._buffers
            if not whole and (now is held or is_buffers):
                names = dict.fromkeys(before if is_buffers else (*before, *now))
                found += (Place(owner, n) for n in names if _is_another(now.get(n, now), before.get(n, now)))
        return found

    def containers(self) -> set[int]:
        """The identities of the containers."""
        return {id(container) for _, container, _ in self._containers}

    def first_change(self) -> Place | None:
        """The first attribute or variable whose value is another one now, or whose container has changed."""
        for place, container, copy in self._containers:
            if not place.name and isinstance(container, dict):
                for name in (*copy, *(n for n in container if n not in copy)):
                    if _is_another(container.get(name, container), copy.get(name, container)):
                        return Place(place.owner, str(name))
            elif len(container) != len(copy) or not _same(container, copy):
                return place
        variables = (place for place, value in self._variables if _variable(place) is not value)
        buffers = (place for place, value, content in self._buffers if bytes_of(value) != content)
        return next(itertools.chain(variables, buffers), None)


class _Refused:
    """Stands for an iterator, and refuses to be advanced."""

    def __init__(self, refuse: Callable[[Place], None], place: Place) -> None:
        self._refuse, self._place = refuse, place

    def __iter__(self) -> _Refused:
        return self

    def __next__(self) -> Any:
        self._refuse(self._place)
        raise ValueError("a trace cannot advance an iterator")


def _empty(container: Any) -> Any:
    """What an empty container is compared with. (Most tables of most modules are empty.)"""
    return _NO_NAMES if isinstance(container, dict) else _NO_VALUES if isinstance(container, set) else ()


def _entries(container: Any) -> list[tuple[Any, Any]]:
    """The entries that can be set, with their keys."""
    if isinstance(container, dict):
        return list(container.items())
    return list(enumerate(container)) if isinstance(container, (list, deque)) else []


def _is_small(value: Any) -> bool:
    """Whether this is a tensor of few elements: a trace computes with those, and writes to them."""
    return (
        type(value) is Tensor
        and value.is_cpu
        and value.layout is torch.strided
        and value.nbytes <= budgets.STATE_BYTES
    )


def _tables_of(owner: Any, held: Any) -> Iterator[tuple[Place, Any]]:
    """If these are the attributes of a module: its tables of weights, of submodules and of hooks."""
    if isinstance(owner, nn.Module) and held is vars(owner):
        for name in MODULES_TABLES:
            table = held.get(name)
            if isinstance(table, (dict, set)):
                yield Place(owner, "" if name in NAMING else name), table


def _is_another(now: Any, before: Any) -> bool:
    """Whether a value is another one, and not a copy with the same contents."""
    return now is not before and fingerprint([now]) != fingerprint([before])


def _same(container: Any, copy: Any) -> bool:
    """Whether two containers of equal length hold the same objects."""
    if isinstance(container, dict):
        return all(k in copy and copy[k] is v for k, v in container.items())
    if isinstance(container, set):
        return {id(v) for v in container} == {id(v) for v in copy}
    return all(a is b for a, b in zip(container, copy, strict=True))


def _is_untouched(container: Any, copy: Any) -> bool:
    """Whether a container holds the same objects as its copy, in the same order."""
    if len(container) != len(copy) or not _same(container, copy):
        return False
    return not isinstance(container, dict) or all(map(operator.is_, container, copy))


def _variable(place: Place) -> Any:
    owner = place.owner
    if isinstance(owner, types.FunctionType):
        return owner.__globals__.get(place.name)
    held = getattr(owner, "__dict__", {})
    return held[place.name] if place.name in held else getattr(owner, place.name, None)  # a slot


def _assign(place: Place, value: Any) -> None:
    if isinstance(place.owner, types.FunctionType):
        place.owner.__globals__[place.name] = value
    else:
        setattr(place.owner, place.name, value)
