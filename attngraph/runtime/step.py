"""A derived decoder as two runnable graphs: one that runs once per prompt, one for new tokens."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.capture.state.scope import EVERYTHING, Scope
from attngraph.errors import CacheError
from attngraph.ir.graph.formula import are_few
from attngraph.ir.graph.program_graph import ProgramGraph, Rate
from attngraph.ir.ops.token_program import prepare
from attngraph.ir.versions import version_of
from attngraph.report.report import CompileReport
from attngraph.runtime.devices import OneRank
from attngraph.runtime.kv_cache import KVCache
from attngraph.runtime.machine import Interpret, Machine, Run
from attngraph.runtime.step_sizes import StepSizes


class Step:
    """One derived decoder.

    Args:
        graph: lowered, with a cache plan.
        owner: the module whose parameters and buffers the graph's inputs name.
        run: makes the function that computes a graph's results.
        sizes: the arguments of its calls, and for which of them it is right.
        scope: what of the state around a call the decoder depends on.
        ranks: what this process computes of a graph for several ranks (None: all of it).

    Attributes:
        name: the model's argument that takes the tokens. names: the argument of each tensor of a call.
        report: what was done; set once it is known.
    """

    def __init__(
        self, graph: ProgramGraph, owner: nn.Module, run: Callable[[ProgramGraph], Run], sizes: StepSizes,
        scope: Scope = EVERYTHING, ranks: OneRank | None = None,
    ) -> None:  # fmt: skip
        assert graph.state is not None
        self.ranks = OneRank(graph.state) if ranks is None else ranks
        self.graph, self.plan, self.report = graph, self.ranks.plan, CompileReport()
        self._keeps = graph.state  # the part of one rank
        self.sizes, self.owner, self.scope = sizes, owner, scope
        self.name, self.names, self.spread, self.limit = sizes.tokens, sizes.names, sizes.spread, sizes.limit
        self.traced: Any = None
        """What its trace depended on, for saving it."""
        given = ((n.meta["val"], i) for n, i in graph.given().items() if i.kind == "argument")
        self._tokens = [value for value, i in given if self.names[int(i.name)] == self.name]
        self._step = Machine(graph, owner, run, self.names)
        prompt = graph.stages.get(Rate.PROMPT)
        self._prompt = None if prompt is None else Machine(prompt, owner, run, self.names)
        for each in (graph, *graph.stages.values()):
            prepare_programs(each)

    @property
    def arguments(self) -> frozenset[str]:
        """The model's arguments that have an entry for every token."""
        return frozenset(self._step.arguments)

    @property
    def prompt_arguments(self) -> frozenset[str]:
        """The model's arguments that are needed once for a prompt."""
        return frozenset(() if self._prompt is None else self._prompt.arguments)

    def takes(self, ids: Tensor) -> bool:
        """Whether the graph takes tokens of this kind: numbers, or embeddings of that width."""
        same = (v.is_floating_point() == ids.is_floating_point() for v in self._tokens)
        return all(same) and all(v.shape[2:] == ids.shape[2:] for v in self._tokens)

    def traced_few(self) -> bool:
        """Whether the graph was traced for a few numbers of tokens, which say nothing of smaller or larger
        ones, as for a loop over blocks. (One that holds up to some number is used up to that number.)"""
        name = self.plan.length
        limits = [c for c in self.graph.conditions if {str(s) for s in c.free_symbols} == {name}]
        return name.isdecimal() or are_few(limits, name)

    def is_valid(self) -> bool:
        """Whether the buffers whose values the graph relies on still hold them."""
        return self._step.is_valid() and (self._prompt is None or self._prompt.is_valid())

    def weights(self) -> tuple[list[Any], list[int | None]]:
        """The model's tensors that the graph reads, and how often each has been written to."""
        found = [t for machine in (self._step, self._prompt) if machine is not None for t in machine.own()]
        return found, [*map(version_of, found)]

    def begin(self, state: KVCache, arguments: Mapping[str, Tensor], run: Interpret | None = None) -> None:
        """Compute the state's fixed values, which do not depend on the tokens."""
        if self._prompt is not None:
            values = self._prompt(arguments, self.ranks.own(), run)
            names = (about.name for about in self._keeps.fixed)
            state.begin(self.ranks.kept(dict(zip(names, values, strict=True))))

    def advance(
        self, state: KVCache, counts: Sequence[int], arguments: Mapping[str, Tensor],
        picked: Tensor | None = None, run: Interpret | None = None, unfinished: Collection[int] = (),
    ) -> Tensor:  # fmt: skip
        """Process the new tokens of each row, packed into one sequence, and cache what later ones need.

        Args:
            picked: the indices of the packed tokens whose results are returned; None: all.
            run: an interpreter to run the graph with instead.
            unfinished: rows whose results nobody asks for yet, because more of their prompt follows.

        Raises:
            CacheError: the tokens do not fit, the graph is not right for so many, or a buffer has changed
                whose values the graph relies on; nothing is written.
        """
        if run is None and not self.is_valid():
            raise CacheError(
                "a buffer of the model that this decoder relies on (a mask, or a table) has changed since "
                "the prompt, so what is kept of the prompt does not go with it.\n"
                "What to do: call prefill again."
            )
        state.longest(counts)
        if run is None and self.sizes.asks:
            fault = self.sizes.fault(state.call(counts, unfinished))
            if fault:
                raise CacheError(
                    f"{fault}. What is kept of the tokens before does not go with it. Nothing was written.\n"
                    "What to do: call prefill with all tokens of these rows."
                )
        state.reserve(counts)
        rows = state.inputs(counts)
        if picked is None:  # all: where each row has one token, its number is the row's
            one_each = min(counts, default=0) == 1 == max(counts, default=0)
            picked = rows["row"] if one_each else torch.arange(sum(counts), device=state.device)
        kept = self.ranks.taken({**rows, **state.kept()})
        result, *news = self._step(arguments, {"picked": picked, **kept, **self.ranks.own()}, run)
        keeps: tuple[Any, ...] = (*self._keeps.stores, *self._keeps.carried)
        names = [about.name for about in keeps]
        state.write(self.ranks.kept(dict(zip(names, news, strict=True))), rows, counts)
        return self.ranks.one(result)  # type: ignore[no-any-return]

    def nothing(self, state: KVCache, shape: Sequence[int]) -> Tensor:
        """The logits (zeros) for a call without real tokens, whose mask has this shape."""
        value: Tensor = self.graph.results()[0].meta["val"]
        return torch.zeros((*shape, int(value.shape[-1])), dtype=value.dtype, device=state.device)


def prepare_programs(graph: ProgramGraph) -> None:
    """Begin what the graph's token programs need, such as compiled code, while other things are done."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.attngraph.token_program.default:
            given, program = node.args
            prepare([value.meta["val"] for value in given], program)
