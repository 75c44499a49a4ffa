"""A derived decoder as two runnable graphs: one that runs once per prompt, one for new tokens; and for which
calls these are right: how many sequences, how many tokens in each, and other sizes.

What a trace decided about the number of tokens is asked of a row's whole length after each call: a row that
crosses to the other side of a branch cannot go on with what was kept, because the model computes all of its
tokens in another way there. The number of sequences is that of the call's rows; an engine's requests are
alone."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from attngraph.capture.guards import size_value
from attngraph.capture.sides import Sides, assumed, bound_above, in_words
from attngraph.capture.state.scope import EVERYTHING, Scope
from attngraph.capture.structure import Layout
from attngraph.errors import CacheError
from attngraph.ir.graph import holds
from attngraph.ir.graph.formula import are_few
from attngraph.ir.graph.program_graph import ProgramGraph, Rate
from attngraph.ir.ops import nodes
from attngraph.ir.ops.kernels import KERNELS
from attngraph.ir.ops.token_program import prepare
from attngraph.ir.versions import version_of
from attngraph.report.report import CompileReport
from attngraph.runtime.devices import OneRank
from attngraph.runtime.kv_cache import Call, KVCache
from attngraph.runtime.machine import Interpret, Machine, Run
from attngraph.runtime.verify import tensors_of


class StepSizes:
    """The sizes that a decoder's graph is for.

    Args:
        graph: of the step.
        names, shapes: the argument that each tensor belongs to which it was captured with, and their shapes.
        tokens: the argument that has the tokens. layouts: of those that calls give in another layout
            than `[B, T, ...]`.
        sides: what its trace decided about sizes. single: whether it is for calls of one sequence alone.
    """

    def __init__(
        self, graph: ProgramGraph, names: Sequence[str], shapes: Sequence[Sequence[Any]], tokens: str,
        layouts: Mapping[str, Layout], sides: Sides, single: bool,
    ) -> None:  # fmt: skip
        assert graph.state is not None
        begins, tables = graph.state.begins, graph.state.most_tokens
        self.names, self.shapes, self.sides, self.single = list(names), shapes, sides, single
        self.tokens, self.layouts = tokens, dict(layouts)
        self.rows, self.length = (str(n) for n in shapes[self.names.index(tokens)][:2])
        # Sizes here count tokens, those of the graph learned places, too.
        self._conditions = [*assumed([of_tokens(c, self.length, begins) for c in graph.conditions])]
        tables = None if tables is None else tables - begins
        self._told = {self.rows: "sequences", self.length: "tokens"}
        self.asks = bool(self._conditions or sides.decisions or single)
        """Whether any call is to be looked at."""
        self._fault_of = functools.lru_cache(4096)(self._fault)
        traced = self._most_traced()
        self._whole_table = tables if traced is not None and traced + 1 == tables else None
        """A length that the trace excludes, because a slice of the whole table would be the table itself."""
        self._tables = tables
        limits = (tables, traced if self._whole_table is None else None)
        self.limit = min((n for n in limits if n is not None), default=None)
        self.others = graph.state.others
        self.least = graph.state.least if self.others else 0
        """Rows of a length, from `others` on, that the conditions leave out are right where one of up to
        `least` more is."""

    @property
    def depends(self) -> bool:
        """Whether a row may come to a length for which the graph is not right, but for its limit."""
        every = (*self._conditions, *(d.relation for d in self.sides.decisions))
        own = [c for c in every if self.length in {str(s) for s in c.free_symbols}]
        return any(bound_above(c) is None or bound_above(c) != self.limit for c in own)

    @property
    def is_final(self) -> bool:
        """Whether the model takes no longer sequences than `limit`, in whatever graph."""
        longer = None if self.limit is None else self.sides.broken({self.length: self.limit + 1})
        return self.limit == self._tables or (longer is not None and longer.raises)

    def strictly(self) -> Iterator[Any]:
        """Conditions, besides the decisions, that hold for the sizes of the graph and for no others."""
        length, rows = (sympy.Symbol(name, integer=True) for name in (self.length, self.rows))
        if self.limit is not None:
            yield sympy.Le(length, self.limit)
        if self.single:
            yield sympy.Eq(rows, 1)
        table = self._whole_table
        for condition in self._conditions:
            if self._is_own(condition):
                at_table = table is not None and not holds(condition, {self.length: table})
                if at_table or bound_above(condition) is not None:
                    continue
            yield condition

    def _is_own(self, condition: Any) -> bool:
        """Whether a condition is one of the number of tokens alone."""
        return {str(s) for s in condition.free_symbols} == {self.length}

    def alike(self, call: Call, near: int) -> int | None:
        """A number of tokens about which the model would be given the same answers as about the longest row
        of a call, as far as it has asked: the nearest to `near`. None if there is no such number."""
        longest = max(call.lengths)

        def answers(tokens: int) -> list[bool]:
            sizes = {**call.others, self.rows: call.rows, self.length: tokens}
            return [holds(d.relation, sizes) for d in self.sides.decisions]

        tried = sorted(range(3, 4 * near), key=lambda n: (abs(n - near), n))
        return next((n for n in tried if answers(n) == answers(longest)), None)

    def of_inputs(self, inputs: Mapping[str, Any], rows: int, width: int) -> dict[str, int] | None:
        """The other sizes of a prompt's call, by symbol; None if the graph takes no inputs of this shape.
        `width`: the number of tokens in the longest row, padding included."""
        given = {name: tensors_of(value) for name, value in inputs.items()}
        sizes, formulas = {self.rows: rows, self.length: width}, list[tuple[Any, int]]()
        for name, shape in zip(self.names, self.shapes, strict=True):
            if name == self.tokens or name in self.layouts or name not in given:
                continue
            tensor = given[name].pop(0)
            if tensor.ndim != len(shape):
                return None
            for extent, number in zip(shape, tensor.shape, strict=True):
                if getattr(extent, "is_Symbol", False):
                    sizes.setdefault(str(extent), number)
                formulas.append((extent, number))
        for extent, number in formulas:
            if number != (extent if isinstance(extent, int) else size_value(extent, sizes)):
                return None
        return {name: size for name, size in sizes.items() if name not in (self.rows, self.length)}

    def take_others(self, least: int, others: int) -> None:
        """Take rows of any length from `others` on to be right where one of up to `least` more tokens is."""
        self.least, self.others = least, others
        self._fault_of.cache_clear()

    def is_border(self, tokens: int) -> bool:
        """Whether something that was asked for sizes has another answer for one token more, or less."""
        every = (*self._conditions, *(d.relation for d in self.sides.decisions))

        def answers(count: int) -> list[bool]:
            return [holds(c, {self.length: count, self.rows: 2}) for c in every]

        return not answers(tokens - 1) == answers(tokens) == answers(tokens + 1)

    def fault(self, call: Call) -> str:
        """Why the graph is not right for a call; "" if it is."""
        if not self.asks:
            return ""
        others = tuple(call.others.items())
        faults = (self._fault_of(call.rows, length, others) for length in sorted(call.lengths))
        return next(filter(None, faults), "")

    def _fault(self, rows: int, length: int, others: tuple[tuple[str, int], ...]) -> str:
        least = self.least if length >= self.others else 0
        more = (self._of_length(rows, length + n, others) for n in range(least + 1))
        found = self._of_length(rows, length, others)
        return "" if not found or not all(more) else found

    def _of_length(self, rows: int, length: int, others: tuple[tuple[str, int], ...]) -> str:
        if self.single and rows != 1:
            return f"the graph is for calls of one sequence, and there are {rows}"
        sizes = {**dict(others), self.length: length, self.rows: rows}
        decision = self.sides.broken(sizes)
        if decision is not None:
            does = "raises an error" if decision.raises else "does something else"
            return (
                f"the model asks at {decision.line} whether {in_words(decision.relation, self._told)}, and "
                f"{does} where that is not so, as for {_counted(rows, length)}"
            )
        shorter = {**sizes, self.length: length - 1}
        for condition in self._conditions:
            is_whole = length == self._whole_table and self._is_own(condition) and holds(condition, shorter)
            if not is_whole and not holds(condition, sizes):
                words = in_words(condition, self._told)
                return f"the graph is for sizes with {words}, which is not so for {_counted(rows, length)}"
        return ""

    def _most_traced(self) -> int | None:
        """The longest sequence the trace is valid for, unless the model treats longer ones otherwise."""
        own = [c for c in self._conditions if self._is_own(c)]
        found = min((n for c in own if (n := bound_above(c)) is not None), default=None)
        if found is None:
            return None
        while found > 0 and not all(holds(c, {self.length: found}) for c in own):
            found -= 1
        longer = self.sides.broken({self.length: found + 1})
        return found if longer is None or longer.raises else None


def of_tokens(condition: Any, length: str, begins: int) -> Any:
    """A condition on how many places a row has, as one on how many tokens."""
    symbols = (s for s in condition.free_symbols if str(s) == length)
    return condition.xreplace({s: s + begins for s in symbols}) if begins else condition


def _counted(rows: int, length: int) -> str:
    return f"{rows} sequence{'s' * (rows != 1)} of {length} token{'s' * (length != 1)}"


class Step:
    """One derived decoder.

    Args:
        graph: lowered, with a cache plan.
        owner, run: as for `Machine`.
        sizes: the arguments of its calls, and for which of them it is right.
        scope: what of the state around a call the decoder depends on.
        ranks: what this process computes of a graph for several ranks (None: all of it).

    Attributes:
        name: the model's argument that takes the tokens. names: the argument of each tensor of a call.
        arguments, prompt_arguments: those with an entry for every token; those needed once for a prompt.
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
        self.name, self.names, self.limit = sizes.tokens, sizes.names, sizes.limit
        self.traced: Any = None
        """What its trace depended on, for saving it."""
        given = [(n.meta["val"], i) for n, i in graph.given().items() if i.kind == "argument"]
        self._tokens = [value for value, i in given if self.names[int(i.name)] == self.name]
        self._dtypes = {self.names[int(i.name)]: value.dtype for value, i in given}
        self._step = Machine(graph, owner, run, self.names)
        prompt = graph.stages.get(Rate.PROMPT)
        self._prompt = None if prompt is None else Machine(prompt, owner, run, self.names)
        self.arguments = frozenset(self._step.arguments)
        self.prompt_arguments = frozenset(self._prompt.arguments if self._prompt else ())
        for each in (graph, *graph.stages.values()):
            prepare_programs(each)

    @property
    def asked(self) -> tuple[str, ...]:
        """The lines of attentions of which each call asks that data do not hide a token from itself."""
        return tuple(output.name for output in self.graph.outputs if output.kind == "shown")

    def takes(self, ids: Tensor) -> bool:
        """Whether the graph takes tokens of this kind: numbers, or embeddings of that width."""
        same = (v.is_floating_point() == ids.is_floating_point() for v in self._tokens)
        return all(same) and all(v.shape[2:] == ids.shape[2:] for v in self._tokens)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of an argument."""
        found: torch.dtype = self._dtypes[name]
        return found

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
        joined: bool = False,
    ) -> Tensor:  # fmt: skip
        """Process the new tokens of each row, packed into one sequence, and cache what later ones need.

        Args:
            picked: the indices of the packed tokens whose results are returned; None: all.
            run: an interpreter to run the graph with instead.
            unfinished: rows whose results nobody asks for yet, because more of their prompt follows.
            joined: whether what a draft is given stands behind the logits.

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
        state.require_room(counts)
        if run is None and self.sizes.asks:
            fault = self.sizes.fault(state.call(counts, unfinished))
            if fault:
                raise CacheError(
                    f"{fault}. What is kept of the tokens before does not go with it. Nothing was written.\n"
                    "What to do: call prefill with all tokens of these rows."
                )
        begins = [
            self.plan.begins * (not n) * bool(c) for n, c in zip(state.now.lengths, counts, strict=True)
        ]
        if any(begins):  # what is given at the learned places is read by nothing
            value, total = self._tokens[0], sum(begins)
            given = torch.zeros((1, total, *value.shape[2:]), dtype=value.dtype, device=state.device)
            self._advance(state, begins, {self.name: given}, given.new_zeros(1, dtype=torch.int64), run)
        found = self._advance(state, counts, arguments, picked, run)
        return found if joined or not self.plan.beside else found[..., : -self.plan.beside]

    def _advance(
        self, state: KVCache, counts: Sequence[int], arguments: Mapping[str, Tensor],
        picked: Tensor | None, run: Interpret | None,
    ) -> Tensor:  # fmt: skip
        """The same, of places."""
        state.reserve(counts)
        rows = state.inputs(counts)
        if picked is None:  # all: where each row has one token, its number is the row's
            one_each = min(counts, default=0) == 1 == max(counts, default=0)
            picked = rows["row"] if one_each else torch.arange(sum(counts), device=state.device)
        kept = self.ranks.taken({**rows, **state.kept()})
        result, *news = self._step(arguments, {"picked": picked, **kept, **self.ranks.own()}, run)
        keeps: tuple[Any, ...] = (*self._keeps.stores, *self._keeps.carried)
        names = [about.name for about in keeps]
        news = news[: len(names)]  # what follows are conditions, which hold
        state.write(self.ranks.kept(dict(zip(names, news, strict=True))), rows, counts)
        return self.ranks.one(result)  # type: ignore[no-any-return]

    def nothing(self, state: KVCache, shape: Sequence[int]) -> Tensor:
        """The logits (zeros) for a call without real tokens, whose mask has this shape."""
        value: Tensor = self.graph.results()[0].meta["val"]
        width = int(value.shape[-1]) - self.plan.beside
        return torch.zeros((*shape, width), dtype=value.dtype, device=state.device)


def prepare_programs(graph: ProgramGraph, scores: float = 0) -> None:
    """Begin what the graph's token programs need, such as compiled code, while other things are done; and its
    attentions, of about so many scores each."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.attngraph.token_program.default:
            given, program = node.args
            prepare([value.meta["val"] for value in given], program)
        elif isinstance(attention := nodes.view(node), nodes.Attention) and attention.kernel in KERNELS:
            q, k, v, *reads = (n.meta["val"] for n in (attention.q, *attention.keys, *attention.reads))
            KERNELS[attention.kernel].prepare(attention.program, (q, k, v), reads, scores)
