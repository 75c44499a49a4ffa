"""What differs between a call and the one that a graph was traced for, in words: why it is traced again."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attngraph.capture.guards import ShapeGuard, things
from attngraph.capture.side_effects import name_of
from attngraph.capture.state.fingerprint import Exact, Fingerprint
from attngraph.capture.state.parts import Place
from attngraph.capture.state.scope import EVERYTHING, Scope

_SHARED = ("which tensors are the same object", "which tensors share their memory")
_STATE = (
    "whether gradients are recorded", "inference mode", "the default dtype", "autocast", "the default device",
    "torch's settings", "what forward() asks of its arguments, such as their layout in memory",
)  # fmt: skip


class Change(NamedTuple):
    """What changed (`what`, the same for every new value of it), and its values."""

    what: str
    values: str = ""

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
    for what, before, after in zip((*_SHARED, *_STATE), old[2:-1], new[2:-1], strict=True):
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
                    return Change(what, f"{given.shape[dim]}, and it was {extent}")
    return Change("the sizes of the arguments", ", ".join(str(list(t.shape)) for t in tensors))


def _name(place: int, target: Callable[..., Any], spec: Any, leaves: Sequence[Any]) -> str:
    """The argument that a leaf of the call belongs to."""
    args, kwargs = torch.utils._pytree.tree_unflatten(list(range(len(leaves))), spec)
    function = target.forward if isinstance(target, nn.Module) else target
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return f"argument {place}"
    held = (name for name, value in given.items() if place in torch.utils._pytree.tree_leaves(value))
    return f"the argument {next(held, place)}"


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
    number: int,
    before: Any,
    after: Any,
    target: Callable[..., Any],
    leaves: Sequence[Any],
    scope: Scope,
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
