"""The graphs of a decoder with what their calls need: a prelude for each prompt, a step for new tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from attngraph.capture.guards import ValueGuard
from attngraph.ir.graph.program_graph import Input, ProgramGraph, holds
from attngraph.report.report import CompileReport
from attngraph.runtime.executable import ahead_of, fetcher
from attngraph.runtime.kv_cache import KVCache

Run = Callable[..., Sequence[Any]]
Interpret = Callable[[fx.GraphModule], fx.Interpreter]


class Step:
    """One derived decoder.

    Args:
        graph: lowered, with a cache plan.
        owner: the module whose parameters and buffers the graph's inputs name.
        name: the model's argument that takes the tokens. names: its argument of each number.
        run: what computes a graph's results (the graph itself, or compiled further), for step and prelude.
    """

    def __init__(
        self, graph: ProgramGraph, owner: nn.Module, name: str, names: Sequence[str], report: CompileReport,
        run: Callable[[ProgramGraph], Run],
    ) -> None:  # fmt: skip
        assert graph.cache is not None
        self.graph, self.plan, self.report = graph, graph.cache, report
        self.name, self.names, self.owner = name, list(names), owner
        self._step = _Call(graph, owner, names, run(graph))
        self._prelude = (
            None if graph.prelude is None else _Call(graph.prelude, owner, names, run(graph.prelude))
        )
        self.limit = self._limit()

    @property
    def arguments(self) -> frozenset[str]:
        """The model's arguments that bring something for every token."""
        return frozenset(self._step.arguments)

    @property
    def prompt_arguments(self) -> frozenset[str]:
        """The model's arguments that are needed once for a prompt."""
        return frozenset(() if self._prelude is None else self._prelude.arguments)

    def is_valid(self) -> bool:
        """Whether the buffers whose values the graph relies on still hold them."""
        return self._step.is_valid() and (self._prelude is None or self._prelude.is_valid())

    def fetch(self, given: Input, arguments: Mapping[str, Tensor]) -> Tensor:
        """What an input of the captured model stands for."""
        if given.kind == "argument":
            return arguments[self.names[int(given.name)]]
        return fetcher(given, self.owner, self.graph.constants)(())

    def begin(self, state: KVCache, arguments: Mapping[str, Tensor], run: Interpret | None = None) -> None:
        """Compute what does not depend on the tokens."""
        if self._prelude is not None:
            values = self._prelude(arguments, {}, run)
            state.fixed = {about.name: v for about, v in zip(self.plan.fixed, values, strict=True)}

    def advance(
        self, state: KVCache, counts: Sequence[int], arguments: Mapping[str, Tensor],
        picked: Tensor | None = None, run: Interpret | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute the new tokens of each row, packed into one sequence, and keep what later ones need.

        Args:
            picked: the places, among the packed tokens, whose result is wanted; None: all.
            run: an interpreter of the graph, to compute it in another way.

        Raises:
            CacheError: they do not fit; nothing is changed.
        """
        state.reserve(counts)
        rows = state.inputs(counts)
        if picked is None:
            picked = torch.arange(rows["row"].shape[0], device=state.device)
        given = {**rows, "picked": picked, **state.stores(), **state.fixed}
        result: Tensor
        result, *news = self._step(arguments, given, run)
        state.write({s.name: n for s, n in zip(self.plan.stores, news, strict=True)}, rows, counts)
        return result

    def nothing(self, state: KVCache, shape: Sequence[int]) -> Tensor:
        """The logits of no tokens, for a mask of this shape."""
        results: Any = self.graph.graph.output_node().args[0]
        value: Tensor = results[0].meta["val"]
        return torch.zeros((*shape, int(value.shape[-1])), dtype=value.dtype, device=state.device)

    def _limit(self) -> int | None:
        """The most tokens of a sequence: as the trace and the tables allow."""
        traced, tables = self._most_tokens(), self.plan.most_tokens
        if traced is not None and traced + 1 == tables:
            return tables  # a slice that is all of a table is traced apart, and is no other computation
        return min((n for n in (traced, tables) if n is not None), default=None)

    def _most_tokens(self) -> int | None:
        """The longest sequence for which the trace is valid."""
        name = self.plan.length
        limits = [c for c in self.graph.conditions if {str(s) for s in c.free_symbols} == {name}]
        low, high = 8, 1 << 24
        if not limits or all(holds(c, {name: high}) for c in limits):
            return None
        if not all(holds(c, {name: low}) for c in limits):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if all(holds(c, {name: middle}) for c in limits):
                low = middle
            else:
                high = middle
        return low


class _Call:
    """A graph and where each of its inputs comes from."""

    def __init__(self, graph: ProgramGraph, owner: nn.Module, names: Sequence[str], run: Run) -> None:
        self.run, self.module = run, graph.module
        self.fetch: list[tuple[str, Any]] = []
        self.ahead = ahead_of(graph, owner)
        for given in graph.inputs:
            if given.kind == "argument":
                self.fetch.append(("argument", names[int(given.name)]))
            elif given.kind in ("parameter", "buffer", "constant"):
                self.fetch.append(("own", fetcher(given, owner, graph.constants)))
            else:
                self.fetch.append(("state", given.name))
        self.arguments = [what for kind, what in self.fetch if kind == "argument"]
        known = dict(zip((p.name for p in graph.placeholders()), self.fetch, strict=True))
        self._assumed = [known[n][1] for n in sorted(graph.assumed) if n in known]
        self._values = ValueGuard([fetch([]) for fetch in self._assumed])

    def is_valid(self) -> bool:
        return self._values.holds([fetch([]) for fetch in self._assumed])

    def __call__(
        self, arguments: Mapping[str, Tensor], given: Mapping[str, Tensor], run: Interpret | None = None
    ) -> Sequence[Any]:
        if self.ahead is not None:
            given = {**given, **self.ahead.values(run)}
        inputs = [
            what(()) if kind == "own" else arguments[what] if kind == "argument" else given[what]
            for kind, what in self.fetch
        ]
        return self.run(*inputs) if run is None else run(self.module).run(*inputs)
