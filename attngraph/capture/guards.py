"""Which calls a traced graph is valid for (the key of a call, accepted sizes, buffer contents), and in words
what differs between a call and the one that a graph was traced for: why it is traced again."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attngraph.capture.asked import answers
from attngraph.capture.instead import LOCK
from attngraph.capture.lines import name_of
from attngraph.capture.state.fingerprint import Exact, Fingerprint, fingerprint
from attngraph.capture.state.kinds import Place, own_attributes
from attngraph.capture.state.scope import EVERYTHING, Scope
from attngraph.capture.structure import is_value
from attngraph.ir import budgets
from attngraph.ir.graph.formula import holds
from attngraph.ir.modes import autocast_of, default_device, hooks_of_all_modules, settings, surroundings
from attngraph.ir.versions import version_of

FingerprintOf = Callable[[Sequence[Any], Scope], tuple[Any, ...]]
"""Gives the fingerprint of a model, and of the objects among a call's arguments, in a scope."""


def call_key(leaves: Sequence[Any], spec: Any, fingerprint: FingerprintOf, scope: Scope = EVERYTHING) -> Any:
    """A key of everything in a call that a trace depends on, except for tensor sizes and values: structure,
    dtypes, devices, numbers, which tensors are identical or share memory, global state of PyTorch, and what
    of the state of the model is in the scope."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return (
        spec, tuple(_leaf_key(leaf) for leaf in leaves), repeats(tensors), aliases(tensors),
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        (autocast_of("cpu"), autocast_of("cuda")), default_device(), settings(),
        answers(tensors, scope.asked, scope.layouts) if tensors else (),
        fingerprint(things(leaves), scope),
    )  # fmt: skip


def things(leaves: Sequence[Any]) -> list[Any]:
    """The leaves of a call that may have mutable state: objects without tensors, sets, functions."""
    return [leaf for leaf in leaves if not isinstance(leaf, Tensor) and not is_value(leaf)]


def aliases(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """For each tensor the number of the first one that it shares its memory with."""

    def memory(tensor: Tensor) -> int:
        try:
            return int(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return id(tensor)

    return _firsts(map(memory, tensors))


def repeats(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """For each tensor the number of the first one that is the same object."""
    return _firsts(map(id, tensors))


def _firsts(values: Iterable[int]) -> tuple[int, ...]:
    first: dict[int, int] = {}
    return tuple(first.setdefault(value, place) for place, value in enumerate(values))


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        held = own_attributes(leaf)
        attributes = tuple(fingerprint([held])) if held else ()
        return leaf.dtype, leaf.device, leaf.ndim, type(leaf), leaf.requires_grad, attributes
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
        self.bind = functools.lru_cache(maxsize=4096)(self._bind)

    def _bind(self, shapes: tuple[torch.Size, ...]) -> dict[str, int] | None:
        """The values of the graph's symbols for these shapes, or None if the graph does not accept them."""
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
    numbers = {s: sympy.Integer(sizes[str(s)]) for s in formula.free_symbols if str(s) in sizes}
    value = sympy.sympify(formula.xreplace(numbers))
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
                copy = next(same, None)
                self._copies.append((place, buffer.detach().clone() if copy is None else copy))

    def holds(self, buffers: Sequence[Tensor]) -> bool:
        if any(_stamp(b) != stamp for b, stamp in zip(buffers, self._stamps, strict=True)):
            return False
        return all(torch.equal(buffers[place], copy) for place, copy in self._copies)


def _stamp(tensor: Tensor) -> tuple[int, int | None]:
    return tensor.data_ptr(), version_of(tensor)


# --- what differs, in words ---

_SHARED_OR_SET = (
    "which tensors are the same object", "which tensors share their memory",
    "whether gradients are recorded", "inference mode", "the default dtype", "autocast", "the default device",
    "torch's settings", "what forward() asks of its arguments, such as their layout in memory",
)  # fmt: skip


class Change(NamedTuple):
    """What changed (`what`, the same for every new value of it), its values, and what to do about it."""

    what: str
    values: str = ""
    advice: str = "give what changes as a tensor, or keep it constant"

    def __str__(self) -> str:
        return f"{self.what} ({self.values})" if self.values else self.what


def change_between(
    old: Any, new: Any, target: Callable[..., Any], leaves: Sequence[Any], scope: Scope = EVERYTHING
) -> Change | None:
    """The first difference of two keys of calls (`guards.call_key`) in a scope,
    None if they are equal. `leaves` are those of the new call."""
    if old == new:
        return None
    if old[0] != new[0]:
        return Change("which arguments are given, or their structure")
    for place, (before, after) in enumerate(zip(old[1], new[1], strict=False)):
        if before != after:
            return _of_argument(_name(place, target, new[0], leaves), before, after)
    for what, before, after in zip(_SHARED_OR_SET, old[2:-1], new[2:-1], strict=True):
        if before != after:
            return Change(what)
    for place, (before, after) in enumerate(itertools.zip_longest(old[-1], new[-1])):
        if before != after:
            return _of_state(place, before, after, target, leaves, scope)
    return Change("the state of the model")


def change_of_sizes(guards: Sequence[ShapeGuard], tensors: Sequence[Tensor]) -> Change:
    """Why graphs that accept everything else about a call do not accept its sizes, or the contents of the
    model's buffers."""
    if any(guard.bind(tuple(t.shape for t in tensors)) is not None for guard in guards):
        return Change("the contents of a buffer that the graph relies on")
    for guard in guards:
        for number, (wanted, given) in enumerate(zip(guard.shapes, tensors, strict=False)):
            for dim, extent in enumerate(wanted):
                if isinstance(extent, int) and extent != given.shape[dim]:
                    what = f"dimension {dim} of tensor argument {number}"
                    return Change(what, f"{given.shape[dim]}, and it was {extent}", _OF_SIZES)
    given_sizes = ", ".join(str(list(t.shape)) for t in tensors)
    return Change("the sizes of the arguments", given_sizes, _OF_SIZES)


_OF_SIZES = "pad calls to a few sizes; the report says which line of the model asks for the size as a number"


def _name(place: int, target: Callable[..., Any], spec: Any, leaves: Sequence[Any]) -> str:
    args, kwargs = pytree.tree_unflatten(list(range(len(leaves))), spec)
    function = target.forward if isinstance(target, nn.Module) else target
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return f"argument {place}"
    return f"the argument {next((n for n, v in given.items() if place in pytree.tree_leaves(v)), place)}"


def _of_argument(name: str, before: Any, after: Any) -> Change:
    if len(before) == len(after) == 6:  # both tensors
        about = (
            "the dtype", "the device", "the number of dimensions", "the class", "requires_grad",
            "the attributes",
        )  # fmt: skip
        for what, old, new in zip(about, before, after, strict=True):
            if old != new:
                return Change(f"{what} of {name}", f"{new}, and it was {old}")
    values = (v if isinstance(v, str) else v[1] if len(v) == 2 else "a tensor" for v in (after, before))
    new, old = (v if isinstance(v, str) else repr(v) for v in values)
    return Change(name, f"{new}, and it was {old}")


def _of_state(
    number: int, before: Any, after: Any, target: Callable[..., Any], leaves: Sequence[Any], scope: Scope
) -> Change:
    """The attribute or variable that an entry of a fingerprint belongs to."""
    walk = _Finding(number, scope)
    walk.everything((target, *things(leaves)))
    place = walk.place
    if place is None:
        return Change("the state of the model")
    plain = all(isinstance(v, (int, str, type(None), Exact)) for v in (before, after))
    values = f"{after!r}, and it was {before!r}" if plain else ""
    if isinstance(place.owner, nn.Module) and not place.name:
        if {before, after} == {True, False}:
            return Change("train() or eval() mode")
        if isinstance(after, str) and after in vars(place.owner):  # it was set anew
            return Change(name_of(Place(place.owner, after), target))
        return Change("weights, hooks or attributes of a module")
    return Change(name_of(place, target), values)


class _Finding(Fingerprint):
    """A walk that remembers the place of one entry of the fingerprint."""

    def __init__(self, number: int, scope: Scope) -> None:
        super().__init__(scope)
        self.number = number
        self.place: Place | None = None

    def visit(self, value: Any, depth: int) -> None:
        at, before = self.at, len(self.found)
        if isinstance(value, nn.Module):
            at = Place(value, "")
        super().visit(value, depth)
        if self.place is None and before <= self.number < len(self.found):
            self.place = at
