"""A derived decoder as two runnable graphs: one that runs once per prompt, one for new tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.capture.state.scope import EVERYTHING, Scope
from attngraph.errors import CacheError
from attngraph.ir.graph.conditions import holds
from attngraph.ir.graph.program_graph import ProgramGraph, Rate
from attngraph.ir.ops.cached_attention import CachePlan
from attngraph.ir.ops.token_program import prepare
from attngraph.report.report import CompileReport
from attngraph.runtime.kv_cache import KVCache
from attngraph.runtime.machine import Interpret, Machine, Run
from attngraph.runtime.parallel.states import OneRank


class Step:
    """One derived decoder.

    Args:
        graph: lowered, with a cache plan.
        owner: the module whose parameters and buffers the graph's inputs name.
        name: the model's argument that takes the tokens. names: the names of all its arguments, in order.
        run: makes the function that computes a graph's results.
        scope: what of the state around a call the decoder depends on.
        spread: arguments that calls may give with dimensions of size 1 between rows and tokens.
        ranks: what this process computes of a graph for several ranks (None: all of it).
    """

    def __init__(
        self, graph: ProgramGraph, owner: nn.Module, name: str, names: Sequence[str], report: CompileReport,
        run: Callable[[ProgramGraph], Run], scope: Scope = EVERYTHING,
        spread: frozenset[str] = frozenset(), ranks: OneRank | None = None,
    ) -> None:  # fmt: skip
        assert graph.state is not None
        self.ranks = OneRank(graph.state) if ranks is None else ranks
        self.graph, self.plan, self.report = graph, self.ranks.plan, report
        self.name, self.names, self.owner, self.scope = name, list(names), owner, scope
        self.spread = spread
        self.traced: Any = None
        """What its trace depended on, for saving it."""
        self._step = Machine(graph, owner, run, names)
        prompt = graph.stages.get(Rate.PROMPT)
        self._prompt = None if prompt is None else Machine(prompt, owner, run, names)
        for each in (graph, *graph.stages.values()):
            _prepare(each)
        self.limit = self._limit()

    @property
    def _keeps(self) -> CachePlan:
        """What the graph keeps: the part of one rank."""
        assert self.graph.state is not None
        return self.graph.state

    @property
    def arguments(self) -> frozenset[str]:
        """The model's arguments that have an entry for every token."""
        return frozenset(self._step.arguments)

    @property
    def prompt_arguments(self) -> frozenset[str]:
        """The model's arguments that are needed once for a prompt."""
        return frozenset(() if self._prompt is None else self._prompt.arguments)

    def traced_few(self) -> bool:
        """Whether the graph was traced for a few numbers of tokens, which say nothing of smaller or larger
        ones, as for a loop over blocks. (One that holds up to some number is used up to that number.)"""
        name = self.plan.length
        limits = [c for c in self.graph.conditions if {str(s) for s in c.free_symbols} == {name}]
        few = [n for n in (8, 1 << 24) if not all(holds(c, {name: n}) for c in limits)]
        return name.isdecimal() or len(few) == 2

    def is_valid(self) -> bool:
        """Whether the buffers whose values the graph relies on still hold them."""
        return self._step.is_valid() and (self._prompt is None or self._prompt.is_valid())

    def begin(self, state: KVCache, arguments: Mapping[str, Tensor], run: Interpret | None = None) -> None:
        """Compute the state's fixed values, which do not depend on the tokens."""
        if self._prompt is not None:
            values = self._prompt(arguments, self.ranks.own(), run)
            names = (about.name for about in self._keeps.fixed)
            state.fixed = dict(self.ranks.kept(dict(zip(names, values, strict=True))))

    def advance(
        self, state: KVCache, counts: Sequence[int], arguments: Mapping[str, Tensor],
        picked: Tensor | None = None, run: Interpret | None = None,
    ) -> Tensor:  # fmt: skip
        """Process the new tokens of each row, packed into one sequence, and cache what later ones need.

        Args:
            picked: the indices of the packed tokens whose results are returned; None: all.
            run: an interpreter to run the graph with instead.

        Raises:
            CacheError: the tokens do not fit, or a buffer has changed whose values the graph relies on;
                nothing is written.
        """
        if run is None and not self.is_valid():
            raise CacheError(
                "a buffer of the model that this decoder relies on (a mask, or a table) has changed since "
                "the prompt, so what is kept of the prompt does not go with it.\n"
                "What to do: call prefill again."
            )
        state.reserve(counts)
        rows = state.inputs(counts)
        if picked is None:  # all: where each row has one token, its number is the row's
            one_each = min(counts, default=0) == 1 == max(counts, default=0)
            picked = rows["row"] if one_each else torch.arange(sum(counts), device=state.device)
        kept = self.ranks.taken({**rows, **state.stores(), **state.carried.values, **state.fixed})
        result, *news = self._step(arguments, {"picked": picked, **kept, **self.ranks.own()}, run)
        keeps = self._keeps
        names = [*(about.name for about in keeps.stores), *(about.name for about in keeps.carried)]
        state.write(self.ranks.kept(dict(zip(names, news, strict=True))), rows, counts)
        found: Tensor = self.ranks.one(result)
        return found

    def nothing(self, state: KVCache, shape: Sequence[int]) -> Tensor:
        """The logits (zeros) for a call without real tokens, whose mask has this shape."""
        results: Any = self.graph.graph.output_node().args[0]
        value: Tensor = results[0].meta["val"]
        return torch.zeros((*shape, int(value.shape[-1])), dtype=value.dtype, device=state.device)

    def _limit(self) -> int | None:
        """The longest sequence that the trace and the position tables allow."""
        traced, tables = self._most_tokens(), self.plan.most_tokens
        if traced is not None and traced + 1 == tables:
            return tables  # the trace excludes a slice of the whole table, but the computation is the same
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


def _prepare(graph: ProgramGraph) -> None:
    """Begin what the graph's token programs need, such as compiled code, while other things are done."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.attngraph.token_program.default:
            given, program = node.args
            prepare([value.meta["val"] for value in given], program)
