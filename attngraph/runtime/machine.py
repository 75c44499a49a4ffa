"""Runs a program graph: fetches its inputs, recomputes stages when needed, copies writes back.

All graphs run on this class: compiled calls (`executable.py`), a decoder's step and its prompt stage
(`step.py`), and models converted to fewer heads (`api/convert.py`).
"""

import collections
import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from attngraph.capture.guards import ValueGuard
from attngraph.capture.instead import LOCK
from attngraph.errors import CheckError
from attngraph.ir.graph.program_graph import Output, ProgramGraph, Rate
from attngraph.ir.modes import without_autocast
from attngraph.ir.ops.declare import one_run
from attngraph.ir.versions import version_of
from attngraph.runtime.inputs import Inputs, own_tensor
from attngraph.runtime.parallel.fully_sharded import is_fully_sharded

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
        self._sharing: Callable[[], contextlib.AbstractContextManager[None]] = (
            one_run if is_plain else contextlib.nullcontext
        )
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
        self._checks = [(n, o.name) for n, o in enumerate(graph.outputs) if o.kind == "check"]
        self._targets = [_target(output, owner) for output in graph.outputs]

    def is_valid(self) -> bool:
        """Whether the buffers whose values the graph relies on still hold them."""
        if self._weights is not None and not self._weights.machine.is_valid():
            return False
        return self._values.holds([fetch(None) for fetch in self._assumed])

    def own(self) -> list[Any]:
        """The model's tensors that the graph and its weights stage read, as the model has them now."""
        stage = [] if self._weights is None else self._weights.machine.own()
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
            if interpret is not None:
                with without_autocast(_devices(inputs)):
                    return list(interpret(self._module).run(*inputs))
            if self._overwritten and torch.is_grad_enabled():
                # The backward pass needs their old contents.
                inputs = [t.clone() if n in self._overwritten else t for n, t in enumerate(inputs)]
            with without_autocast(_devices(inputs)), self._sharing():
                results = self._run(*inputs)
            for number, line in self._checks:
                if not results[number]:
                    raise CheckError(f"what the model checks at {line} does not hold.")
            targets = [target and target(arguments) for target in self._targets]
            writes = [(t, r) for t, r in zip(targets, results, strict=True) if t is not None]
            if later is None:
                change(writes)
            else:
                later += writes
            return [r if target is None else None for target, r in zip(targets, results, strict=True)]


def change(writes: Iterable[tuple[Tensor, Tensor]], attributes: Iterable[tuple[Any, Any, Any]] = ()) -> None:
    """Write to tensors, and set entries, of dictionaries of attributes say. Functions of C do it, between
    which no interrupt is handled, and which need no memory: a model has all of a call's effects or none."""
    copies = itertools.starmap(Tensor.copy_, writes)
    collections.deque(itertools.chain(copies, itertools.starmap(operator.setitem, attributes)), maxlen=0)


class _ValuesOfWeights:
    """The results of the weights stage, computed again when a weight changes.

    Changes are detected by address and version, as for buffers (`capture/guards.py`): writes through `.data`
    are not noticed. `fully_shard` collects weights at one address without counting, so there it is always.
    """

    def __init__(self, graph: ProgramGraph, owner: nn.Module) -> None:
        self.machine, self._owner = Machine(graph, owner), owner
        self._names = [output.name for output in graph.outputs]
        self._stamps: list[Any] = []
        self._current: dict[str, Tensor] = {}

    def values(self, interpret: Interpret | None) -> dict[str, Tensor]:
        if interpret is not None:
            return self._named(self.machine((), None, interpret))
        weights = self.machine._inputs((), None, None)
        stamps = [(w.data_ptr(), _stamp(w), w.dtype, w.device, w.shape) for w in weights]
        if stamps != self._stamps or is_fully_sharded(self._owner):
            with torch.no_grad():
                self._current = self._named(self.machine(()))
            self._stamps = stamps
        return self._current

    def _named(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._names, values, strict=True))


def _stamp(tensor: Tensor) -> object:
    """What changes when a tensor is written to; where torch does not count, it is new each time."""
    version = version_of(tensor)
    return object() if version is None else version


def _devices(inputs: Sequence[Any]) -> Iterator[str]:
    """The kinds of devices that tensors are on. (The casts of autocast are part of the graph.)"""
    yield from {t.device.type for t in inputs if isinstance(t, Tensor)}


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
