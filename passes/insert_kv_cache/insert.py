"""InsertKVCache: a graph of whole sequences becomes one that computes new tokens over a cache.

Matches a fused graph whose logits are computed, for each token, from the token, its position, fixed values
and attention that masks all later tokens (`meaning/tokens/tokens.py`). Right because token-wise operations
give a token the same result whatever its neighbours: the graph gets the new tokens of all sequences as one
packed sequence, `[1, N]`, and only three things are rewritten. Values that depend on positions are computed
from a vector of positions (`write_formula`); attention reads cached pages and the new tokens
(`attngraph::cached_attention`, with the score program unchanged); values that do not depend on the tokens (an
encoder, keys computed from it) move into a stage that runs once per prompt. The cached values are a
minimum cut (`step.py`); those of the new tokens are results, written to the pages after
the step. Refuses, naming the operation, its line and a pair of tokens, where a token can see a later one.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from attngraph.errors import NoDecoderError
from attngraph.ir import budgets
from attngraph.ir.graph import RESULTS, Level, Output, ProgramGraph, op_name, source_of
from attngraph.ir.language import E, ScoreProgram
from attngraph.ir.ops.cached_attention import CachePlan
from attngraph.ir.ops.history import history
from attngraph.ir.ops.nodes import Attention, AttentionOp
from attngraph.ir.walk import operands_first
from attngraph.meaning.masks.causal import Shown
from attngraph.meaning.tokens.facts import Fact, Kind, Scan
from attngraph.meaning.tokens.loops import TokenLoop
from attngraph.meaning.tokens.recurrence import Sums
from attngraph.meaning.tokens.streams import Stream
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.meaning.tokens.windows import History, RunningFold, Window
from attngraph.passes.build import Builder, NoSize
from attngraph.passes.canonicalize import forget_operands_of_dtype
from attngraph.passes.insert_kv_cache.analyse import analyse, require_no_places
from attngraph.passes.insert_kv_cache.carry import carry, fold, take_steps
from attngraph.passes.insert_kv_cache.every_token import pick_results
from attngraph.passes.insert_kv_cache.free_tokens import free_tokens
from attngraph.passes.insert_kv_cache.join_pieces import join_pieces, leave_out_own_places
from attngraph.passes.insert_kv_cache.look_back import add_blocks, look_back, run_again, with_program
from attngraph.passes.insert_kv_cache.step import KeptValues, RefutedError, Rewrite, Step, StepInputs
from attngraph.passes.insert_kv_cache.take_fixed import FixedValues
from attngraph.passes.insert_kv_cache.write_formula import ByIndex, NotWritten
from attngraph.pipeline import Outcome

aten = torch.ops.aten
STEP_KINDS = ("rows", "pages", "carried")
"""Kinds of inputs that a step gets."""


@dataclasses.dataclass(frozen=True)
class InsertKVCache:
    """`argument` is the number of the input that holds the tokens; `result` that of the logits. `number`: how
    many tokens the graph was traced for, if it may be a graph of that number alone and the number is a size
    of nothing else (`free_tokens.py`). `compared`: its sizes were found by comparing traces. `assume_causal`:
    whether it is taken from the user that no token sees a later one, where this cannot be shown."""

    argument: int = 0
    result: int = 0
    number: int = 0
    compared: bool = False
    assume_causal: bool = False
    name: str = "insert-kv-cache"
    requires: Level = Level.FUSED
    yields: Level = Level.CACHED

    def run(self, graph: ProgramGraph) -> Outcome:
        only_result(graph, self.result)
        forget_operands_of_dtype(graph)
        given = graph.given().items()
        ids = next(n for n, i in given if i.kind == "argument" and int(i.name) == self.argument)
        refuted: dict[fx.Node, str] = {}
        joined = [*leave_out_own_places(graph), *join_pieces(graph)]
        while True:
            outcome = Outcome(list(joined))
            tokens = analyse(graph, ids, self.number, outcome, refuted, self.assume_causal)
            try:
                _Insertion(graph, ids, tokens, outcome).run()
            except RefutedError as problem:
                graph.clean()
                graph.drop_inputs(lambda _, given: given.kind in STEP_KINDS)
                refuted[problem.node] = problem.reason
            else:
                if self.compared:
                    outcome.notes.append(
                        "the code asks for numbers of sequences or tokens; what follows from them was found "
                        "by comparing traces of several sizes, and is compared with the model at others"
                    )
                return outcome


def only_result(graph: ProgramGraph, result: int) -> None:
    """Of the model's results keep only the logits; attributes that its forward sets are not set, and
    conditions on values not checked. A model that writes to its inputs has no decoder."""
    written = [o for o in graph.outputs if o.kind not in (*RESULTS, "check")]
    if written:
        raise NoDecoderError(f"the model writes to a {written[0].kind} ({written[0].name}) in its forward.")
    graph.graph.output_node().args = ((graph.results()[result],),)
    graph.outputs = (graph.outputs[result],)
    graph.clean()


_REWRITES: dict[type[Scan], Rewrite] = {
    Window: look_back, Sums: carry, RunningFold: fold, TokenLoop: take_steps, History: run_again,
    Stream: add_blocks,
}  # fmt: skip
"""What makes values that follow from earlier tokens a part of a step."""


class _Insertion:
    """One rewriting."""

    def __init__(self, graph: ProgramGraph, ids: fx.Node, tokens: Tokens, outcome: Outcome) -> None:
        self.graph, self.ids, self.tokens, self.outcome = graph, ids, tokens, outcome
        self.inputs = StepInputs(graph, ids, tokens)
        self.fixed = FixedValues(graph, ids, tokens, self.inputs)
        self.kept = KeptValues(tokens, self.inputs)
        self.step = Step(tokens, self.inputs, self.kept)
        self.made: dict[fx.Node, fx.Node] = {}
        """What replaces a value, once all of them are made."""
        self.asked: dict[fx.Node, str] = {}
        """Conditions on new tokens that must be true, with the lines of the attentions that rely on them."""
        self.expanded = 0
        streams = [f.scan.streams for f in tokens.facts.values() if isinstance(f.scan, History)]
        tokens.facts |= {node: s.fact(tokens.facts) for of in streams for node, s in of.items()}
        self.needed = self._needed()

    def run(self) -> None:
        most_tokens = self.tokens.most_tokens()
        needed = {n: f for n, f in self.tokens.facts.items() if n in self.needed}
        attentions = [n for n in self.graph.attentions() if n in needed and needed[n].kind is Kind.ATTENTION]
        if any(isinstance(f.scan, History) for f in needed.values()):
            self.step.least = self._least()
        scans = {n: scan for n in sorted(needed) if (scan := needed[n].scan) is not None}
        for node, scan in scans.items():
            if isinstance(scan, History):
                with self._replaced(node, f"it is {scan.reason}", "a few new tokens"):
                    scans[node] = with_program(self.step, Builder(self.graph, node), node, scan)
                    self.tokens.facts[node] = dataclasses.replace(needed[node], scan=scans[node])
        require_no_places(self.tokens, needed)
        self.kept.choose([*attentions, *scans])
        for node in list(self.graph.graph.nodes):
            fact = self.tokens.facts.get(node)
            if fact is not None and fact.formula is not None and node in self.needed:
                self._shift(node, fact)
        for node, scan in scans.items():
            self._rewrite(node, scan)
        for node, new in self.made.items():
            node.replace_all_uses_with(new)
        self.kept.move(self.made)
        for node in attentions:
            self._ask(node)
            self._look_at_pages(node)
        kept = list(self.kept.stores)
        self.fixed.take()
        pick_results(self.graph, self.tokens, kept, self.inputs.rows("picked"))
        results = (*self.graph.results(), *kept, *self.step.carried, *self.asked)
        self.graph.graph.output_node().args = (results,)
        stores = self.kept.stores
        pages = (Output("pages", store.name) for store in stores.values())
        carried = (Output("carried", about.name) for about in self.step.carried.values())
        asked = (Output("shown", line) for line in self.asked.values())
        self.graph.outputs = (*self.graph.outputs, *pages, *carried, *asked)
        self.graph.clean()
        tokens = length = str(self.tokens.space.tokens.value)
        if self.tokens.space.is_of_one_length:
            vectors = tuple(self.inputs.rows(name) for name in ("positions", "row"))
            tokens = str(free_tokens(self.graph, self.ids, self.tokens.traced, vectors))
        self.graph.state = CachePlan(
            tuple(stores.values()), tuple(self.fixed.found.values()), self.expanded, len(attentions),
            length, tokens, most_tokens, tuple(self.step.carried.values()), self.step.rounding,
            tuple(self.step.anew), tuple(self.step.assumed), least=self.step.least,
        )  # fmt: skip
        self.inputs.drop_unused()
        for node, fact in self.tokens.facts.items():
            node.meta["tokens"] = fact.describe(self.tokens.space)
        self._note(len(attentions), self.graph.state)

    def _least(self) -> int:
        """The fewest tokens for which the graph's operations are right; 0 if they are for any number."""
        rows, tokens = (str(n.value) for n in (self.tokens.space.rows, self.tokens.space.tokens))
        counts = range(1, budgets.LEAST_TOKENS)
        return next((n for n in counts if self.graph.admits({rows: 2, tokens: n})), 0)

    def _needed(self) -> set[fx.Node]:
        def operands(node: fx.Node) -> Sequence[fx.Node]:
            fact = self.tokens.facts.get(node)
            return node.all_input_nodes if fact is None or fact.scan is None else fact.scan.reads

        return set(operands_first(self.graph.graph.output_node().all_input_nodes, operands))

    # --- positions ---

    def _shift(self, node: fx.Node, fact: Fact) -> None:
        positions = self.inputs.rows("positions")
        with self._replaced(node, f"it follows from a token's place as {fact.formula!r}", "other places"):
            new = ByIndex(Builder(self.graph, node), self.tokens, node, fact, positions).write()
            self.tokens.facts[new], self.made[node] = dataclasses.replace(fact, formula=None), new
            self.outcome.notes.append(f"{op_name(node)} at {source_of(node)} is computed from positions")

    # --- what follows from earlier tokens ---

    def _rewrite(self, node: fx.Node, scan: Scan) -> None:
        whence = "computed from " * (type(scan) is Window) + scan.reason
        with self._replaced(node, f"it is {whence}", "a few new tokens"):
            new, note = _REWRITES[type(scan)](self.step, Builder(self.graph, node), node, scan)
            self.tokens.facts[new], self.made[node] = self.tokens[node], new
            self.outcome.notes.append(note)

    @contextlib.contextmanager
    def _replaced(self, node: fx.Node, what: str, of: str) -> Iterator[None]:
        """Refuse where something cannot be written that would take the place of a value."""
        try:
            yield
        except (NotWritten, NoSize) as problem:
            where = f"{op_name(node)} at {source_of(node)}"
            raise NoDecoderError(f"{where}: {what}, and {problem} cannot be computed for {of}.") from problem

    # --- attention ---

    def _ask(self, node: fx.Node) -> None:
        """A condition, where data may hide each token from itself: that its score of itself, or that of the
        first token of a row, is not as low as what hides the others. The scores of single tokens, with
        queries and keys of zeros."""
        whole, causality = AttentionOp.of(node), self.tokens[node].causality
        builder = Builder(self.graph, node)
        assert causality is not None
        if causality.shown is Shown.NONE:
            return
        program, reads = causality.program, list(whole.reads)
        for number, read in enumerate(reads):
            token, row = self.tokens.token_dim(read), self.tokens.row_dim(read)
            if token is not None and row is not None:
                reads[number] = builder.call(aten.transpose.int, read, row, token)
            elif row is not None:
                reads[number] = builder.call(aten.index_select.default, read, row, self.inputs.rows("row"))
        like = whole.q.meta["val"]
        positions = self.inputs.rows("positions")

        def zeros(positions: Any) -> Any:
            none = torch.zeros_like(positions, dtype=torch.float32, device=like.device)
            return none.reshape(-1, 1, 1, 1).expand(-1, like.shape[1], 1, 1)

        none, sizes = builder.trace(zeros, positions), whole.sizes[: program.sizes]
        alone = Attention(q=none, k=none, v=none, reads=reads, sizes=sizes, program=program)
        scores = builder.attention(alone)
        shown = builder.call(aten.gt.Scalar, builder.results(scores)[1], causality.above)
        if causality.shown is Shown.FIRST:
            later = builder.unsqueezed(builder.call(aten.gt.Scalar, positions, 0), -1, -1)
            shown = builder.call(aten.logical_or.default, shown, later)
        condition = builder.call(aten.all.default, shown)
        self.asked[condition] = source_of(node)
        self.outcome.notes.append(
            f"that data do not hide a token from itself at {source_of(node)} is asked in each call, of "
            f"{causality.shown.value} of a row"
        )

    def _look_at_pages(self, node: fx.Node) -> None:
        whole, causality = AttentionOp.of(node), self.tokens[node].causality
        assert causality is not None
        program = causality.program
        whole = whole.replace(program=program, sizes=whole.sizes[: program.sizes])
        builder = Builder(self.graph, node)
        if self.tokens[whole.keys[0]].kind is Kind.FIXED:
            pages = [self.fixed.value(n) for n in whole.keys]
            none = [builder.call(aten.narrow.default, n, 2, 0, 0) for n in pages]
            new = [builder.call(aten.narrow.default, n, 0, 0, 1) for n in none]  # the same for all rows
            table, held = self.fixed.rows_of(builder, pages[0])
        else:
            about = node.meta["attention"]
            width = about.heads * (about.head_dim + about.value_dim)
            self.expanded += width * whole.q.meta["val"].dtype.itemsize
            found = [self.kept.pages_of(builder, n) for n in whole.keys]
            pages, table = [n for n, _ in found], self.inputs.table(found[0][1])
            new, held = list(whole.keys), self.inputs.rows("first")
        self._note_rows(whole.program, whole.reads)
        cached = whole.over_cache(
            new, pages, reads=[self._read(builder, r) for r in whole.reads],
            table=table, starts=self.inputs.rows("starts"), first=self.inputs.rows("first"), held=held,
        )  # fmt: skip
        made = builder.attention(cached)
        made.meta.update((key, node.meta[key]) for key in ("attention", "key_heads") if key in node.meta)
        for user in [n for n in node.users if n.target is operator.getitem] or [node]:
            user.replace_all_uses_with(made)
            self.kept.move({user: made})  # another attention may look at its results
            if user is not node:
                assert user.args[1] == 0
                self.graph.graph.erase_node(user)
        self.tokens.facts[made] = self.tokens[node]
        self.graph.graph.erase_node(node)

    def _note_rows(self, program: ScoreProgram, reads: Sequence[fx.Node]) -> None:
        """Record the batch dimension of fixed values that scores read at index `b`, also where the trace does
        not show that it has the size of the batch."""
        for node in (n for e in program.expressions for n in E.reads(e)):
            for dim, index in enumerate(node.args):
                if index.op == "var" and index.value == "b":
                    self.fixed.row_dims[reads[node.value]] = dim

    def _read(self, builder: Builder, node: fx.Node) -> fx.Node:
        """A tensor that the scores read: over all positions of each row if it depends on the tokens."""
        token = self.tokens.token_dim(node)
        if token is None:
            return node
        if self.kept.of(node) is not node:
            raise NoDecoderError(f"what scores read at {source_of(node)} is a view of something kept.")
        store, rows = self.kept.stores[node], self.inputs.rows
        if self.tokens.space.row is None:
            raise NoDecoderError(f"scores read a value of each token ({source_of(node)}) without a batch.")
        return builder.call(
            history, self.inputs.pages(store), node, self.inputs.table(store), rows("starts"),
            rows("first"), store.token_dim,
        )  # fmt: skip

    def _note(self, attentions: int, plan: CachePlan) -> None:
        self.outcome.notes.insert(
            0,
            f"{attentions} attention(s) look at {len(plan.stores)} kept value(s) of "
            f"{plan.bytes_per_token} bytes per token (keys and values by query head: {plan.expanded})",
        )
        if plan.fixed:
            self.outcome.notes.append(f"{len(plan.fixed)} value(s) are computed once for a prompt")
