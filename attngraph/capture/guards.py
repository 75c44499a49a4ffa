"""Which calls a traced graph is valid for: the key of a call, accepted sizes, buffer contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from attngraph.capture.asked import answers, key_of_attributes
from attngraph.capture.state.scope import EVERYTHING, Scope
from attngraph.capture.structure import is_value
from attngraph.capture.trace_lock import LOCK
from attngraph.ir import budgets
from attngraph.ir.graph.conditions import holds
from attngraph.ir.modes import (
    autocast_of,
    default_device,
    hooks_of_all_modules,
    settings,
    surroundings,
)
from attngraph.ir.versions import version_of

FingerprintOf = Callable[[Sequence[Any], Scope], tuple[Any, ...]]
"""Gives the fingerprint of a model, and of the objects among a call's arguments, in a scope."""


def call_key(leaves: Sequence[Any], spec: Any, fingerprint: FingerprintOf, scope: Scope = EVERYTHING) -> Any:
    """A key of everything in a call that a trace depends on, except for tensor sizes and values: structure,
    dtypes, devices, numbers, which tensors are identical or share memory, global state of PyTorch, and what
    of the state of the model is in the scope."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return (
        spec,
        tuple(_leaf_key(leaf) for leaf in leaves),
        repeats(tensors),
        aliases(tensors),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        (autocast_of("cpu"), autocast_of("cuda")),
        default_device(),
        settings(),
        answers(tensors, scope.asked, scope.layouts) if tensors else (),
        fingerprint(things(leaves), scope),
    )


def things(leaves: Sequence[Any]) -> list[Any]:
    """The leaves of a call that may have mutable state: objects without tensors, sets, functions."""
    return [leaf for leaf in leaves if not isinstance(leaf, Tensor) and not is_value(leaf)]


def aliases(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """For each tensor the number of the first one that it shares its memory with."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(_storage(t), place) for place, t in enumerate(tensors))


def repeats(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """For each tensor the number of the first one that is the same object."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(t), place) for place, t in enumerate(tensors))


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (leaf.dtype, leaf.device, leaf.ndim, type(leaf), leaf.requires_grad, key_of_attributes(leaf))
    if isinstance(leaf, (float, complex)):
        return repr(leaf)  # distinguishes -0.0 from 0.0, and makes NaN equal to itself
    return (type(leaf), leaf if is_value(leaf) else None)


def run_past() -> str:
    """What is around a call that a graph would run past, in words; "" if there is nothing of the kind. (Hooks
    of all modules are those of the process, and torch.export sets some: while another thread traces, they
    tell nothing about this one.)"""
    begun = -1 if LOCK.is_tracing() else LOCK.begun
    hooks = hooks_of_all_modules()
    return (hooks if begun == LOCK.begun else "") or surroundings()


class ShapeGuard:
    """Checks whether a graph accepts a call's sizes, and binds its symbols to numbers.

    Args:
        shapes: the shape of each tensor argument, numbers and sympy expressions.
        conditions: sympy relations between the symbols that must hold.
    """

    def __init__(self, shapes: tuple[tuple[Any, ...], ...], conditions: tuple[Any, ...]) -> None:
        self.shapes, self.conditions = shapes, conditions
        self._known: dict[tuple[torch.Size, ...], dict[str, int] | None] = {}

    def bind(self, shapes: tuple[torch.Size, ...]) -> dict[str, int] | None:
        """The values of the graph's symbols for these shapes, or None if the graph does not accept them."""
        if shapes not in self._known:
            if len(self._known) > 4096:
                self._known.clear()
            self._known[shapes] = self._bind(shapes)
        return self._known[shapes]

    def _bind(self, shapes: tuple[torch.Size, ...]) -> dict[str, int] | None:
        if len(shapes) != len(self.shapes):
            return None
        sizes: dict[str, int] = {}
        formulas: list[tuple[Any, int]] = []
        for wanted, given in zip(self.shapes, shapes, strict=True):
            if len(wanted) != len(given):
                return None
            for extent, number in zip(wanted, given, strict=True):
                if isinstance(extent, int):
                    if extent != number:
                        return None
                elif extent.is_Symbol:
                    if sizes.setdefault(str(extent), number) != number:
                        return None
                else:
                    formulas.append((extent, number))
        for formula, number in formulas:
            if size_value(formula, sizes) != number:
                return None
        return sizes if all(holds(condition, sizes) for condition in self.conditions) else None


def size_value(formula: Any, sizes: dict[str, int]) -> Any:
    """A sympy size formula as a Python number."""
    value = sympy.sympify(
        formula.xreplace({s: sympy.Integer(sizes[str(s)]) for s in formula.free_symbols if str(s) in sizes})
    )
    if value.is_Boolean:
        return bool(value)
    return int(value) if value.is_Integer else float(value)


class ValueGuard:
    """Checks whether buffers whose contents were read at compile time still have these contents."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._stamps = [_stamp(b) for b in buffers]
        is_small = sum(b.numel() for b in buffers) <= budgets.GUARDED_ELEMENTS
        self._copies: list[tuple[int, Tensor]] = []
        """The place and the contents of each buffer that is compared: all if small, and those whose writes
        torch does not count."""
        for place, (buffer, (_, version)) in enumerate(zip(buffers, self._stamps, strict=True)):
            if is_small or version is None:
                same = (c for _, c in self._copies if c.dtype == buffer.dtype and torch.equal(c, buffer))
                self._copies.append((place, _first_or_copy(same, buffer)))

    def holds(self, buffers: Sequence[Tensor]) -> bool:
        if any(_stamp(b) != stamp for b, stamp in zip(buffers, self._stamps, strict=True)):
            return False
        return all(torch.equal(buffers[place], copy) for place, copy in self._copies)


def _first_or_copy(same: Iterator[Tensor], buffer: Tensor) -> Tensor:
    """A copy of the buffer; buffers of equal contents share one."""
    found = next(same, None)
    return buffer.detach().clone() if found is None else found


def _stamp(tensor: Tensor) -> tuple[int, int | None]:
    return tensor.data_ptr(), version_of(tensor)
