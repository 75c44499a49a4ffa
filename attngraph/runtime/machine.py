"""Runs a program graph: fetches its inputs, recomputes stages when needed, copies writes back.

Inputs come from the arguments and the state of a call, or from the model that the graph serves. All graphs
run on this class: compiled calls (`executable.py`), a decoder's step and its prompt stage (`step.py`), and
models converted to fewer heads (`api/convert.py`).
"""

import collections
import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from attngraph.capture.guards import ValueGuard
from attngraph.capture.instead import LOCK
from attngraph.errors import CheckError, FrozenError
from attngraph.ir.graph.program_graph import Input, Output, ProgramGraph, Rate
from attngraph.ir.modes import without_autocast
from attngraph.ir.ops.declare import one_run
from attngraph.ir.ops.panels import GivenUp, give_up, in_panels, stamp_of
from attngraph.runtime.parallel.fully_sharded import collected, is_fully_sharded

Run = Callable[..., Sequence[Any]]
Interpret = Callable[[fx.GraphModule], fx.Interpreter]
Given = Sequence[Tensor] | Mapping[str, Tensor]


class Machine:
    """A graph, ready to run.

    It is immutable except for cached results of the weights stage, so fingerprints skip it
    (`capture/state/`). No call runs while a trace in any thread has replaced the weights by fake tensors
    (`instead.py`).

    Args:
        graph: at any level.
        owner: the module whose parameters and buffers the graph's inputs name. They are looked up at every
            call, because the user may have moved or replaced them, or changed their dtype.
        run: makes the function that computes a graph's results from its inputs (None: the graph's module).
        names: the names of the arguments by number, if calls pass them by name.
    """

    __slots__ = (
        "_assumed", "_checks", "_inputs", "_module", "_overwritten", "_run", "_sharing", "_targets",
        "_values", "_weights", "arguments",
    )  # fmt: skip

    def __init__(
        self, graph: ProgramGraph, owner: nn.Module, run: Callable[[ProgramGraph], Run] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self._module = graph.module
        self._run: Run = graph.module if run is None else run(graph)
        # Compiled by others, a graph may write to its intermediate values.
        is_plain = isinstance(self._run, fx.GraphModule)
        self._sharing: Callable[..., Any] = one_run if is_plain else contextlib.nullcontext
        weights = graph.stages.get(Rate.WEIGHTS)
        self._weights = None if weights is None else _ValuesOfWeights(weights, owner)
        self._inputs = Inputs(graph, owner, names)
        self.arguments = [
            names[int(i.name)] if names else i.name for i in graph.inputs if i.kind == "argument"
        ]
        known = dict(zip((p.name for p in graph.placeholders()), graph.inputs, strict=True))
        assumed = (known[name] for name in sorted(graph.assumed) if name in known)
        self._assumed = [own_tensor(given, owner, graph.constants) for given in assumed]
        self._values = ValueGuard([fetch(None) for fetch in self._assumed])
        written = {(o.kind, o.name) for o in graph.outputs if o.kind in ("buffer", "argument")}
        self._overwritten = {n for n, i in enumerate(graph.inputs) if (i.kind, i.name) in written}
        self._checks = [
            (n, _FAILED[o.kind].format(o.name)) for n, o in enumerate(graph.outputs) if o.kind in _FAILED
        ]
        self._targets = [_target(output, owner) for output in graph.outputs]

    def is_valid(self) -> bool:
        """Whether the buffers whose values the graph relies on still hold them."""
        if self._weights is not None and not self._weights.machine.is_valid():
            return False
        return self._values.holds([fetch(None) for fetch in self._assumed])

    def own(self) -> list[Any]:
        """The model's tensors that the graph and its weights stage read, as the model has them now."""
        stage = [] if self._weights is None else self._weights.own()
        return self._inputs.own() + stage

    def __call__(
        self, arguments: Given, state: Mapping[str, Tensor] | None = None, interpret: Interpret | None = None,
        later: list[tuple[Tensor, Tensor]] | None = None,
    ) -> list[Any]:  # fmt: skip
        """The graph's results, in order; None for results that are written to a tensor.

        Args:
            arguments: the call's tensors by number, or by name.
            state: the graph's other inputs, by name: pages, rows, results of the prompt stage.
            interpret: an interpreter to run the graph, and its weights stage, with instead.
            later: gets the tensors that results are written to, with these, for whoever calls to `change`.

        Raises:
            CheckError: a condition on values that the model checks does not hold; nothing is written.
        """
        with LOCK.call():
            weights = None if self._weights is None else self._weights.values(interpret)
            inputs = self._inputs(arguments, state, weights)
            # The casts of autocast are part of the graph.
            around = without_autocast(t.device.type for t in inputs if isinstance(t, Tensor))
            if interpret is not None:
                with around:
                    found = list(interpret(self._module).run(*inputs))
                self._require(found)
                return found
            if self._overwritten and torch.is_grad_enabled():
                # The backward pass needs their old contents.
                inputs = [t.clone() if n in self._overwritten else t for n, t in enumerate(inputs)]
            with around, self._sharing():
                results = self._run(*inputs)
            self._require(results)
            targets = [target and target(arguments) for target in self._targets]
            writes = [(t, r) for t, r in zip(targets, results, strict=True) if t is not None]
            if later is None:
                change(writes)
            else:
                later += writes
            return [r if target is None else None for target, r in zip(targets, results, strict=True)]

    def _require(self, results: Sequence[Any]) -> None:
        for number, problem in self._checks:
            found = results[number]
            if not (all(found) if isinstance(found, list) else found):  # one condition, or one of each rank
                raise CheckError(problem)


_FAILED = {
    "check": "what the model checks at {} does not hold.",
    "shown": (
        "the attention at {} hides every key of a token by a finite number, so that the model weighs all "
        "tokens alike for it, later ones too, which a decoder does not know. Nothing was written.\nWhat to "
        "do: leave out padding by attention_mask=..., or let the model hide by -inf."
    ),
}  # fmt: skip
"""What is said where the condition of an output of this kind is not true; {} is its name, a line."""


def change(writes: Iterable[tuple[Tensor, Tensor]], attributes: Iterable[tuple[Any, Any, Any]] = ()) -> None:
    """Write to tensors, and set entries, of dictionaries of attributes say. Functions of C do it, between
    which no interrupt is handled, and which need no memory: a model has all of a call's effects or none."""
    copies = itertools.starmap(Tensor.copy_, writes)
    collections.deque(itertools.chain(copies, itertools.starmap(operator.setitem, attributes)), maxlen=0)


class _ValuesOfWeights:
    """The results of the weights stage, computed again when a weight changes.

    Changes are detected by address and version, as for buffers (`capture/guards.py`): writes through `.data`
    are not noticed. `fully_shard` collects weights at one address without counting, so there it is always.
    Weights that are kept in panels will not change, as the user has said: a change is an error.
    """

    def __init__(self, graph: ProgramGraph, owner: nn.Module) -> None:
        self.machine, self._owner, self._graph = Machine(graph, owner), owner, graph
        self._names = [output.name for output in graph.outputs]
        self._frozen = bool(graph.graph.find_nodes(op="call_function", target=in_panels))
        self._sources = [given.label for given in graph.inputs]
        self._stamps: list[Any] = []
        self._current: dict[str, Tensor] = {}

    def values(self, interpret: Interpret | None) -> dict[str, Tensor]:
        if interpret is not None:
            return self._named(self.machine((), None, interpret))
        weights = self.machine._inputs((), None, None)
        stamps = list(map(stamp_of, weights))
        is_counted = self._frozen or all(version is not None for _, version, *_ in stamps)
        if self._frozen and self._stamps and stamps != self._stamps:
            pairs = zip(self._sources, stamps, self._stamps, strict=True)
            changed = next(name for name, now, before in pairs if now != before)
            raise FrozenError(
                f"{changed} has changed since it was frozen (freeze=).\n"
                "What to do: compile the model again, or leave freeze out while its weights change."
            )
        if stamps != self._stamps or not is_counted or is_fully_sharded(self._owner):
            with torch.no_grad():
                self._current = self._named(self.machine(()))
            self._stamps = stamps
            self._give_up(weights)
        return self._current

    def own(self) -> list[Any]:
        """The model's tensors that the stage reads, after it has given up those that it may."""
        if self._frozen and not self._stamps:
            with LOCK.call():
                self.values(None)
        return self.machine.own()

    def _give_up(self, weights: Sequence[Tensor]) -> None:
        """Let the model do without the weights that the stage alone reads, if the user has said so."""
        graph = self._graph
        of = dict(zip(graph.placeholders(), zip(self._sources, weights, strict=True), strict=True))
        for node, name in zip(graph.results(), self._names, strict=True):
            if node.target is in_panels and node.args[3]:
                give_up(self._owner, *of[node.args[0]], self._current[name], node.args[1])

    def _named(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._names, values, strict=True))


def _target(output: Output, owner: nn.Module) -> Callable[[Any], Tensor] | None:
    """What gives the buffer or the argument that a result is written to; None for other results."""
    if output.kind == "argument":
        return lambda arguments: _plain(arguments[int(output.name)])
    if output.kind != "buffer":
        return None
    path, _, name = output.name.rpartition(".")
    module = owner.get_submodule(path)
    return lambda _: _plain(module.get_buffer(name))


def _plain(target: Tensor) -> Tensor:
    """The tensor as one that can be written to: gradients pass by a leaf."""
    return target.detach() if target.requires_grad and target.is_leaf else target


Fetch = Callable[[Any], Tensor]


class Inputs:
    """Collects the tensors of a call in the order of a graph's inputs.

    The model's own tensors, of which there are hundreds, are looked up by functions of C: what Python does
    for each of them is a noticeable part of a token's time.
    """

    __slots__ = ("_elsewhere", "_names", "_order", "_own", "_passed", "_reads", "_stores")

    def __init__(self, graph: ProgramGraph, owner: nn.Module, names: Sequence[str] | None) -> None:
        self._reads = not graph.graph.find_nodes(op="call_function", target=in_panels)
        """Whether its weights are read, and not only laid out: those that were given up are put together."""
        self._own: list[Fetch] = []
        """How the tensors in `_stores`, by `_names`, are looked up where they are no plain tensors."""
        self._stores: list[dict[str, Tensor | None]] = []
        self._names: list[str] = []
        self._elsewhere: list[Fetch] = []
        """How the model's other tensors are looked up: constants, and tensors inside of others."""
        self._passed: list[tuple[int, Fetch]] = []
        """Which source of a call has each other input, and the function that gets it from there."""
        placed, elsewhere, passed = list[int](), list[int](), list[int]()
        for number, given in enumerate(graph.inputs):
            if given.kind not in _OF_THE_MODEL:
                self._passed.append(_passed(given, names))
                passed.append(number)
                continue
            fetch = own_tensor(given, owner, graph.constants)
            _, store, (name, *inside) = _place(given, owner)
            if store is None or inside:
                self._elsewhere.append(fetch)
                elsewhere.append(number)
            else:
                self._own.append(fetch)
                self._stores.append(store)
                self._names.append(name)
                placed.append(number)
        numbers = [*placed, *elsewhere, *passed]
        self._order = sorted(range(len(numbers)), key=numbers.__getitem__)

    def own(self) -> list[Any]:
        """The model's tensors, as it has them now."""
        found: list[Any] = list(map(dict.get, self._stores, self._names))
        if type(None) in map(type, found):  # parametrized, say
            found = [fetch(None) for fetch in self._own]
        return found + [fetch(None) for fetch in self._elsewhere]

    def __call__(self, *sources: Any) -> list[Tensor]:
        """The inputs of a call with these arguments, this state and these values of the weights stage."""
        found: list[Any] = list(map(dict.get, self._stores, self._names))
        if not _PLAIN.issuperset(map(type, found)):
            found = [fetch(None) for fetch in self._own]
            if self._reads:
                found = [t.restored() if type(t) is GivenUp else t for t in found]
        found += [fetch(None) for fetch in self._elsewhere]
        found += [fetch(sources[source]) for source, fetch in self._passed]
        return [found[place] for place in self._order]


_PLAIN = frozenset({Tensor, nn.Parameter})
_OF_THE_MODEL = ("constant", "parameter", "buffer")
_ARGUMENTS, _STATE, _OF_WEIGHTS = range(3)


def _passed(given: Input, names: Sequence[str] | None) -> tuple[int, Fetch]:
    """Which source of a call has an input that is no tensor of the model, and what gets it from there."""
    if given.kind == "argument":
        place = int(given.name)
        return _ARGUMENTS, operator.itemgetter(place if names is None else names[place])
    source = _OF_WEIGHTS if given.kind == Rate.WEIGHTS.value else _STATE
    return source, operator.itemgetter(given.name)


def _place(given: Input, owner: nn.Module) -> tuple[nn.Module, Any, list[str]]:
    """The module that has a tensor, its dict of such (None for a constant), the name there, names inside."""
    module, names = owner, given.name.split(".")
    if given.kind == "constant":
        return module, None, names
    while names[0] in module._modules:
        module = module.get_submodule(names.pop(0))
    return module, module._parameters if given.kind == "parameter" else module._buffers, names


def own_tensor(
    given: Input, owner: nn.Module, constants: Mapping[str, Tensor], axis: Any = None
) -> Fetch:  # fmt: skip
    """The function that looks up a constant, a parameter or a buffer, or a tensor inside of one that wraps
    others: its name follows that of the weight. Of a DTensor it is what this rank has along `axis`, a mesh of
    one dimension, which must be all of it along others."""
    if given.kind == "constant":
        constant = constants[given.name]
        return lambda _: constant
    module, store, (name, *inside) = _place(given, owner)

    def fetch(_: Any) -> Tensor:
        tensor = store.get(name)
        tensor = getattr(module, name) if tensor is None else tensor
        return tensor if type(tensor) in _PLAIN else collected(tensor, given.name, axis)

    return (lambda source: functools.reduce(getattr, inside, fetch(source))) if inside else fetch


def require_own(given: Input, owner: nn.Module, constants: Mapping[str, Tensor], wanted: Any) -> None:
    """Check that a model has the tensor that an input names, by nothing but names of weights: no other
    attribute is looked up because a file says so; else it is a ValueError. `wanted`: a tensor of the type
    that the graph says, whose symbolic sizes may be any."""
    if given.kind != "constant":
        module, store, (name, *inside) = _place(given, owner)
        known = store.get(name) is not None or parametrize.is_parametrized(module, name)
        found: Any = getattr(module, name) if known else None
        for part in inside:
            parts = found.__tensor_flatten__()[0] if hasattr(found, "__tensor_flatten__") else ()
            found = getattr(found, part) if part in parts else None
        if not isinstance(found, Tensor):
            raise ValueError(f"the model has no {given.kind} {given.label!r:.80}")
    elif given.name not in constants:
        raise ValueError(f"there is no constant {given.name!r:.80}")
    found = own_tensor(given, owner, constants)(None)
    if wanted is None:
        return
    sizes = zip(found.shape, wanted.shape, strict=False)
    same = found.ndim == wanted.ndim and all(n == m for n, m in sizes if isinstance(m, int))
    if not same or found.dtype != wanted.dtype:
        types = (f"{t.dtype}{list(t.shape)}" for t in (found, wanted))
        raise ValueError(f"{given.label} is {', not '.join(types)}")
