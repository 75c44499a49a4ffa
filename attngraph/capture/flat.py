"""The callable that is traced: the user's over a flat list of tensors; and the record of its trace.

Torch only sees tensors in and tensors out. All else that a trace finds while the callable runs is in one
record, `Trace`: what ran, what was asked and decided, what is set and changed.
"""

import contextlib
import dataclasses
import enum
import functools
import inspect
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import maybe_enable_thunkify

from attngraph.capture.asked import Answered, Asked, Numbers, lend_attributes
from attngraph.capture.attributes import Described, Given, Path, Set, Watch, containers
from attngraph.capture.captured import Assumed, Attribute, Change, Dimension, Structure, dimensions
from attngraph.capture.guards import aliases, things
from attngraph.capture.instead import products_cast
from attngraph.capture.lines import label_of
from attngraph.capture.side_effects import SideEffects
from attngraph.capture.state.ran import recorded
from attngraph.capture.state.scope import Ran
from attngraph.capture.state.snapshot import Snapshot
from attngraph.capture.structure import Args, Named, Target, TreeSpec, flatten, is_value, unflatten
from attngraph.capture.subgraphs import functions_run
from attngraph.ir.versions import version_of


@contextlib.contextmanager
def _sizes_recorded_when_needed() -> Iterator[None]:
    """Let torch record arithmetic with sizes where an operation needs its result. (Each step of a long chain
    of sizes is then recorded by a call within that of the next.)"""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 5_000))
    try:
        with maybe_enable_thunkify():
            yield
    finally:
        sys.setrecursionlimit(limit)


Repeats = Callable[[Callable[[], Any]], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass
class Trace:
    """What a trace is of, what it takes for granted, and what it recorded."""

    target: Target
    originals: list[Tensor | None]
    """The parameters and buffers, in whose places a trace has others."""
    assumed: Assumed
    repeats: Repeats
    """What repeats equal calls of torch's functions while the target runs."""
    structure: Structure | None = None
    attributes: tuple[Attribute, ...] = ()
    changes: tuple[Change, ...] = ()
    shared: bool = False
    """Whether an object is at two places among the call's arguments."""
    kinds: dict[int, tuple[str, str]] = dataclasses.field(default_factory=dict)
    """The kinds and names of tensors that are not the call's own results, by number."""
    answered: Answered = dataclasses.field(default_factory=Answered)
    """Whether sizes and values were said to be true."""
    asked: Asked | None = None
    """What was asked of arguments."""
    written: dict[int, int] = dataclasses.field(default_factory=dict)
    """From the identity of each argument that is written to, to its number."""
    memory: tuple[int, ...] = ()
    """For the arguments, the model's own tensors and the results, the number of the first in its memory."""
    shapes: tuple[torch.Size, ...] = ()
    extents: set[int] = dataclasses.field(default_factory=set)
    """The extents of values that are numbers."""
    written_out: set[str] = dataclasses.field(default_factory=set)
    """The operations that run functions, and stand in plain operations."""
    executed: Ran = dataclasses.field(default_factory=Ran)
    """The code that ran."""

    def __post_init__(self) -> None:
        self.effects, self.numbers = SideEffects(self.target), Numbers(self.of)

    def of(self, symbols: frozenset[str] | None) -> frozenset[Dimension]:
        """The dimensions of the arguments whose extents involve these symbols; all symbolic ones for None."""
        return dimensions(self.shapes, symbols)


class Flat(nn.Module):
    """The user's callable over a flat list of tensors."""

    def __init__(
        self, target: Target, leaves: Sequence[Any], spec: TreeSpec, assumed: Assumed, repeats: Repeats
    ) -> None:
        super().__init__()
        if not isinstance(target, nn.Module):
            self.function = target
        hold(self, target)
        self.training = getattr(target, "training", True)  # of the wrapper alone: submodules keep theirs
        self.leaves, self.spec = list(leaves), spec
        # Export restores attributes that forward() sets here, and hands out stand-ins of weights and modules:
        # what must survive, or be the original, is in an object of its own.
        self.trace = Trace(target, self._weights(), assumed, repeats)

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        trace = self.trace
        trace.shapes = tuple(t.shape for t in arguments)
        for one, *others in map(sorted, trace.assumed.equal):
            for n, dim in others:
                torch._check(arguments[n].shape[dim] == arguments[one[0]].shape[one[1]])
        given = iter(arguments)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = unflatten(leaves, self.spec)
        before, _ = flatten((args, kwargs))
        target: Any = self.model if hasattr(self, "model") else self.function
        versions = list(map(version_of, arguments))
        originals = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        trace.asked = Asked(arguments, originals, trace.effects.note)
        for tensor, weight in zip(self._weights(), trace.originals, strict=False):
            if tensor is not None and weight is not None and tensor is not weight:
                lend_attributes(tensor, weight)  # a stand-in has what users put on the weight
        if not all([*map(lend_attributes, arguments, originals)]):
            trace.effects.note("a tensor is an attribute of an argument", of_arguments=True)
        objects = Given(args, kwargs)
        watch = Watch(list(trace.assumed.settings), trace.effects.note_change, trace.assumed.reads)
        with self._recorded(watch, things(leaves)):
            rows_alone = trace.assumed.rows_alone
            result = _of_rows(target, args, kwargs) if rows_alone else target(*args, **kwargs)
            sets = [] if trace.shared or objects.shared else objects.taken_back()
        after, _ = flatten((args, kwargs))
        if len(after) != len(before) or any(a is not b for a, b in zip(after, before, strict=True)):
            trace.effects.note("forward() changes the containers among its arguments", of_arguments=True)
        tensors: list[Tensor] = []
        changed = [n for n, t in enumerate(arguments) if version_of(t) != versions[n]]
        trace.written = {id(arguments[n]): n for n in changed}
        paths = objects.paths if sets or changed else {}
        trace.structure = _structure(result, tensors, trace.written, paths)
        if sets:
            self._record_changes(sets, {*containers(result)}, tensors, paths)
        if watch.found:
            self._record(watch, result, {*containers((args, kwargs))}, tensors)
        for condition, line in trace.answered.checks:
            trace.kinds[len(tensors)] = "check", line
            tensors.append(condition)
        own = (tensor for tensor in self._weights() if tensor is not None)
        trace.memory = aliases([*arguments, *own, *tensors])
        return tuple(tensors)

    @contextlib.contextmanager
    def _recorded(self, watch: Watch, others: Sequence[Any]) -> Iterator[None]:
        """Write into the record what the body does and asks. `others`: arguments that are no tensors."""
        trace, printed = self.trace, io.StringIO()
        row = trace.assumed.one_row
        one = None if row is None else trace.shapes[row[0]][row[1]]
        assert trace.asked is not None

        def noted() -> Any:
            return len(trace.answered.checks), trace.effects.problem, printed.tell()

        def weights() -> dict[int, int]:
            return dict(zip(map(id, self._weights()), map(id, trace.originals), strict=False))

        with (
            functions_run() as trace.written_out, contextlib.redirect_stdout(printed),
            trace.effects.watch(others, weights) as kept, watch, trace.answered.listening(one),
            _sizes_recorded_when_needed(), trace.repeats(noted),
            recorded(trace.executed, kept.add), trace.asked, products_cast(),
        ):  # fmt: skip
            yield
        if printed.getvalue():
            trace.effects.note("forward() prints")

    def _weights(self) -> list[Tensor | None]:
        return [t for m in self.modules() for t in (*m._parameters.values(), *m._buffers.values())]

    def _record_changes(
        self, sets: Sequence[Set], others: set[int], tensors: list[Tensor], paths: Mapping[int, Path]
    ) -> None:
        """Record what objects among the arguments were changed to, and add the tensors in it. `others`: as
        for `_record`."""
        others |= Snapshot([self.trace.target]).containers()
        changes: list[Change] = []
        for one in sets:
            own = set(containers(one.value)) - paths.keys()
            try:
                if not one.can_be_repeated():
                    raise TypeError("another one in each call")
                structure = self._set_to(one.value, one.label, own, others, tensors, paths)
            except TypeError:
                what = f"forward() changes an argument's attributes: {one.label}"
                self.trace.effects.note(what, of_arguments=True)
                return
            changes.append(Change(one.path, one.key, structure))
        self.trace.changes = tuple(changes)

    def _record(self, watch: Watch, result: Any, others: set[int], tensors: list[Tensor]) -> None:
        """Record what attributes were set to, and add the tensors in it. `others`: the identities of
        containers; a value that shares one with the caller, with the model or with another value would be a
        copy of it, so it is no result."""
        trace, structure = self.trace, None
        others |= {*containers(result)} | Snapshot([trace.target]).containers()
        attributes: list[Attribute] = []
        for place, value in watch.found.items():
            own, label = set(containers(value)), label_of(place, trace.target)
            try:
                if not trace.assumed.settings[place].agrees(Described.of(value)):
                    raise TypeError("not what an earlier trace found")
                structure = None if value is result else self._set_to(value, label, own, others, tensors)
            except TypeError:
                trace.effects.note_change(place)
                continue
            attributes.append(Attribute(place.owner, place.name, label, structure, place in watch.read))
        trace.attributes = tuple(attributes)

    def _set_to(
        self, value: Any, label: str, own: set[int], others: set[int], tensors: list[Tensor],
        paths: Mapping[int, Path] = MappingProxyType({}),
    ) -> Structure:  # fmt: skip
        """The structure of what is set, whose tensors are added; its `own` containers are added to `others`.
        Raises TypeError if it has one of these, or something else than tensors and numbers."""
        if not own.isdisjoint(others):
            raise TypeError("a container that is also elsewhere")
        first = len(tensors)
        structure = _structure(value, tensors, self.trace.written, paths)
        others |= own
        self.trace.kinds |= dict.fromkeys(range(first, len(tensors)), ("attribute", label))
        return structure


def _of_rows(target: Target, args: Args, kwargs: Named) -> Any:
    """The target's result for a batch, each sequence of which is a call of its own: a loop in Python over the
    sequences is then one over a single one, and `torch.vmap` makes a batch of such calls."""
    leaves, spec = flatten((args, kwargs))
    (tokens,) = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    trees: list[tuple[list[Any], TreeSpec]] = []

    def of_one(row: Tensor) -> tuple[Tensor, ...]:
        own, named = unflatten([row[None] if leaf is tokens else leaf for leaf in leaves], spec)
        results, tree = flatten(target(*own, **named))
        trees.append((results, tree))
        return tuple(leaf.squeeze(0) for leaf in results if isinstance(leaf, Tensor))

    tensors = iter(torch.vmap(of_one)(tokens))
    results, tree = trees[-1]
    return unflatten([next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in results], tree)


def _structure(
    result: Any, tensors: list[Tensor], written: Mapping[int, int], given: Mapping[int, Path]
) -> Structure:
    """The structure of a result, whose tensors are added to the list, but for `written` arguments, by their
    identities. `given`: the places of objects among the arguments, by their identities. Raises TypeError if
    there is something else in it than tensors and numbers."""
    leaves, tree = flatten(result, given)
    recorded: list[tuple[str, Any]] = []
    for leaf in leaves:
        if id(leaf) in given:
            recorded.append(("given", given[id(leaf)]))
        elif id(leaf) in written:
            recorded.append(("argument", written[id(leaf)]))
        elif isinstance(leaf, Tensor):
            recorded.append(("tensor", len(tensors)))
            tensors.append(leaf)
        elif isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            recorded.append(("size", leaf.node.expr))
        elif is_value(leaf) or isinstance(leaf, enum.Enum):
            recorded.append(("fixed", leaf))
        else:
            raise TypeError(f"the model returns a {type(leaf).__name__}, which is no tensor or number")
    return Structure(tree, tuple(recorded))


def hold(holder: nn.Module, target: Target) -> None:
    """Make the target, or the modules that it can reach, submodules of a module."""
    if isinstance(target, nn.Module):
        holder.model = target
        return
    for place, module in enumerate(closed_over_modules(target)):
        holder.add_module(f"closure_{place}", module)


def closed_over_modules(function: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a callable can reach: itself; a bound method's object; the contents of its closure,
    its defaults and the globals that it names, also of functions found there; the contents of partial
    applications and other callable objects."""
    found: dict[nn.Module, None] = {}
    seen: set[int] = set()
    stack: list[Any] = [function]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found[value] = None
        elif isinstance(value, functools.partial):
            stack += [value.func, *value.args, *value.keywords.values()]
        elif inspect.ismethod(value):
            stack += [value.__self__, value.__func__, *getattr(value.__self__, "__dict__", {}).values()]
        elif inspect.isfunction(value):
            if not value.__module__ or not value.__module__.startswith("torch"):
                variables = inspect.getclosurevars(value)
                stack += [*variables.nonlocals.values(), *variables.globals.values()]
                stack += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
                stack.append(getattr(value, "__wrapped__", None))
        elif isinstance(value, (list, tuple, dict)):
            stack += value.values() if isinstance(value, dict) else value
        elif callable(value) and not isinstance(value, type):
            stack += getattr(value, "__dict__", {}).values()
    return list(found)
