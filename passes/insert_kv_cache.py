"""InsertKVCache: a graph of whole sequences becomes one that computes new tokens from what was kept.

Matches a fused graph whose logits are, token by token, computed from the token, its place, fixed values
and attention that hides all later tokens (`meaning/tokens.py`). Right because token-wise operations give a
token the same whatever stands beside it: the graph is given the new tokens of all sequences as one packed
sequence, `[1, N]`, and only three things are rewritten. What follows from a token's place is computed
from a vector of positions (`shift_positions`); attention looks at pages of what was kept and at the new
tokens (`attngraph::cached_attention`, the score program unchanged); what does not depend on the tokens at
all (an encoder, keys computed from it) moves into a prelude that runs once for a prompt. What is kept is a
minimum cut (`meaning/keep.py`); the new share of it is a result, written to the pages after the step.
Refuses, naming the operation, its line and a pair of tokens, where a token can see a later one.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from attngraph.errors import NoDecoderError
from attngraph.ir import expr as E
from attngraph.ir.cache import CachePlan, Fixed, Store
from attngraph.ir.expr import Expr
from attngraph.ir.graph import Input, Level, Output, ProgramGraph, is_size, op_name, part_of
from attngraph.ir.nodes import ATTENTION, CACHED, parts
from attngraph.ir.parser import parse
from attngraph.ir.score import ScoreProgram
from attngraph.ir.source import module_of, source_of
from attngraph.meaning.element import evaluate_size, size_expression
from attngraph.meaning.keep import bytes_per_token, choose_kept
from attngraph.meaning.tokens import Fact, Kind, Tokens
from attngraph.passes import shift_positions
from attngraph.passes.build import Builder, NoSize, built
from attngraph.passes.pick_results import pick_results
from attngraph.pipeline import Outcome

aten = torch.ops.aten
ROWS = ("starts", "first", "row")
"""Inputs that say which tokens are whose, besides the positions, the tables and how much is held."""


@dataclasses.dataclass(frozen=True)
class InsertKVCache:
    """`argument` is the number of the input that holds the tokens; `result` that of the logits."""

    argument: int = 0
    result: int = 0
    name: str = "insert-kv-cache"
    requires: Level = Level.FUSED
    yields: Level = Level.CACHED

    def run(self, graph: ProgramGraph) -> Outcome:
        _only_result(graph, self.result)
        ids = next(
            node for node, given in zip(graph.placeholders(), graph.inputs, strict=True)
            if given.kind == "argument" and int(given.name) == self.argument
        )  # fmt: skip
        tokens = _analyse(graph, ids)
        outcome = Outcome()
        _Step(graph, ids, tokens, outcome).run()
        return outcome


def _only_result(graph: ProgramGraph, result: int) -> None:
    """Keep the logits alone of what the model returns. A model that writes to its inputs has no decoder."""
    written = [o for o in graph.outputs if o.kind != "value"]
    if written:
        raise NoDecoderError(f"the model writes to a {written[0].kind} ({written[0].name}) in its forward.")
    output = graph.graph.output_node()
    values: Any = output.args[0]
    output.args = ((values[result],),)
    graph.outputs = (graph.outputs[result],)
    graph.clean()


def _analyse(graph: ProgramGraph, ids: fx.Node) -> Tokens:
    """The analysis: tokens are the second dimension of the input, the sequences of the batch the first.

    Raises:
        NoDecoderError: the input has another shape, or a token sees a later one.
    """
    shape = ids.meta["val"].shape
    rank = len(shape) - (1 if ids.meta["val"].is_floating_point() else 0)
    if rank != 2:
        raise NoDecoderError(f"its tokens have shape {tuple(shape)}, not [batch, tokens].")
    for dim, what in enumerate(("sequences", "tokens")):
        if isinstance(shape[dim], int):
            raise NoDecoderError(f"it fixes how many {what} there are to {shape[dim]}.")
    found = Tokens(graph, str(shape[1].node.expr), str(shape[0].node.expr))
    _require_token_wise(graph, found)
    return found


def _require_token_wise(graph: ProgramGraph, tokens: Tokens) -> None:
    """Raise unless the logits are a value of each token.

    Raises:
        NoDecoderError: with the first operation that mixes tokens, its line, and a pair of tokens.
    """
    (result,) = graph.graph.output_node().args[0]  # type: ignore[union-attr, misc, str-unpack]
    assert isinstance(result, fx.Node)
    fact = tokens[result]
    if fact.kind is Kind.MIXING:
        culprit = tokens.cause(result)
        source = source_of(culprit) or "an unknown line"
        pair = tokens.witness(culprit) or tokens.witness(result)
        seen = f" Token {pair[0]} sees token {pair[1]}." if pair else ""
        name = culprit.name if culprit.op == "placeholder" else op_name(culprit)
        raise NoDecoderError(
            f"{name} at {source}: {tokens[culprit].reason}.{seen}\n"
            "A decoder needs every token to be computed from itself and earlier tokens alone, where only "
            "attention looks at earlier ones."
        )
    if fact.kind is not Kind.TOKEN or tokens.space.place(fact.axes, tokens.space.token) is None:
        raise NoDecoderError("its result is not computed token by token from the tokens.")


class _Step:
    """One rewriting."""

    def __init__(self, graph: ProgramGraph, ids: fx.Node, tokens: Tokens, outcome: Outcome) -> None:
        self.graph, self.ids, self.tokens, self.outcome = graph, ids, tokens, outcome
        self.space, self.meaning = tokens.space, tokens.meaning
        self.fake = graph.fake_mode()
        self.last_input = graph.placeholders()[-1]
        self.inputs: dict[str, fx.Node] = {}
        self.stores: dict[fx.Node, Store] = {}
        self.row_dims: dict[fx.Node, int] = {}
        self.fixed: dict[fx.Node, Fixed] = {}
        self.expanded = 0
        self.needed = self._needed()

    def run(self) -> None:
        most_tokens = self.tokens.most_tokens()
        attentions = [n for n in self.graph.attentions() if n in self.needed and self._looks_at_tokens(n)]
        self._choose_stores(attentions)
        for node in list(self.graph.graph.nodes):
            fact = self.tokens.facts.get(node)
            if fact is not None and fact.formula is not None and node in self.needed:
                self._shift(node, fact)
        kept = list(self.stores)
        for node in attentions:
            self._look_at_pages(node)
        self._take_fixed()
        pick_results(self.graph, self.tokens, self.ids, kept, self._rows("picked"))
        output = self.graph.graph.output_node()
        values: Any = output.args[0]
        output.args = ((*values, *kept),)
        self.graph.outputs = (*self.graph.outputs, *(Output("pages", self.stores[n].name) for n in kept))
        self.graph.cache = CachePlan(
            tuple(self.stores.values()),
            tuple(self.fixed.values()),
            self.expanded,
            len(attentions),
            str(self.space.tokens.value),
            most_tokens,
        )
        self.graph.clean()
        self._drop_unused_inputs()
        self._annotate()
        self._note(attentions)

    def _needed(self) -> set[fx.Node]:
        found: set[fx.Node] = set()
        stack = list(self.graph.graph.output_node().all_input_nodes)
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += node.all_input_nodes
        return found

    def _looks_at_tokens(self, node: fx.Node) -> bool:
        return self.tokens[node].kind is Kind.ATTENTION

    # --- what is kept ---

    def _choose_stores(self, attentions: Sequence[fx.Node]) -> None:
        operands = [o for node in attentions for o in self._kept_operands(node)]
        kept = choose_kept(self.tokens, operands)
        for number, value in enumerate(kept):
            users = [n for n in attentions for o in self._kept_operands(n) if value in self._path(o, kept)]
            windows = [self.tokens[n].causality.window for n in users]  # type: ignore[union-attr]
            window = None if None in windows else max(w for w in windows if w is not None)
            space = self.space
            fact = self.tokens[value]
            row, token = space.place(fact.axes, space.row), space.place(fact.axes, space.token)
            if token is None or bytes_per_token(self.tokens, value) is None:
                raise NoDecoderError(
                    f"{op_name(value)} at {source_of(value)}: what attention looks at does not have the "
                    "tokens as a dimension of their own."
                )
            counted = [isinstance(n, int) and not digits for n, digits in
                       zip(value.meta["val"].shape, fact.axes, strict=True)]  # fmt: skip
            shape = [int(n) if own else 0 for n, own in zip(value.meta["val"].shape, counted, strict=True)]
            if row is None:  # a model without a batch: pages come first
                shape, row, token = [0, *shape], 0, token + 1
            label = module_of(users[0]) or source_of(value) if users else source_of(value)
            name = f"kept{number}"
            self.stores[value] = Store(
                name, tuple(shape), row, token, value.meta["val"].dtype, window, label, len(users)
            )

    def _kept_operands(self, node: fx.Node) -> list[fx.Node]:
        """What later tokens need of a token: keys, values, and what the scores read at positions."""
        _, keys, _, reads, *_ = parts(node)
        reads_tokens = [r for r in reads if any(self.space.token in d for d in self.tokens[r].axes)]
        return [*([] if self.tokens[keys[0]].kind is Kind.FIXED else keys), *reads_tokens]

    def _path(self, operand: fx.Node, kept: Iterable[fx.Node]) -> list[fx.Node]:
        """The kept values that an operand is a view of."""
        stop, found, stack = set(kept), [], [operand]
        while stack:
            node = stack.pop()
            if node in stop:
                found.append(node)
            else:
                stack += [n for n in node.all_input_nodes if n in self.tokens.facts]
        return found

    # --- inputs ---

    def _input(self, kind: str, name: str, shape: Sequence[Any], dtype: torch.dtype = torch.int64) -> fx.Node:
        """A new placeholder, or the one of that name."""
        if name in self.inputs:
            return self.inputs[name]
        with self.graph.graph.inserting_after(self.last_input):
            node = self.graph.graph.placeholder(f"{kind}_{name.replace('.', '_')}")
        device = self.last_input.meta["val"].device
        with self.fake:
            sizes = [self.fake.shape_env.create_unbacked_symint() if s is None else s for s in shape]
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    torch._check(size >= 2)
            node.meta["val"] = torch.empty(sizes, dtype=dtype, device=device)
        self.graph.inputs = (*self.graph.inputs, Input(kind, name))
        self.last_input = self.inputs[name] = node
        return node

    def _rows(self, name: str) -> fx.Node:
        """A vector about rows, or about tokens: as long as there are tokens then."""
        if name not in ("positions", "row"):
            return self._input("rows", name, [None])
        made = self._input("rows", name, [])
        extents = self.ids.meta["val"].shape
        place = self.space.place(self.tokens[self.ids].axes, self.space.token)
        with self.fake:
            made.meta["val"] = torch.empty(
                [extents[place]], dtype=torch.int64, device=made.meta["val"].device
            )
        return made

    def _table(self, window: int | None) -> fx.Node:
        return self._input("rows", f"table.{window or 'all'}", [None, None])

    def _pages(self, value: fx.Node) -> fx.Node:
        store = self.stores[value]
        shape = [n or None for n in store.shape]
        return self._input("pages", store.name, shape, store.dtype)

    # --- positions ---

    def _shift(self, node: fx.Node, fact: Fact) -> None:
        builder = Builder(self.graph, node)
        try:
            new = shift_positions.emit(builder, self.meaning, self.space, node, fact, self._rows("positions"))
        except (shift_positions.NoFormula, NoSize) as problem:
            raise NoDecoderError(
                f"{op_name(node)} at {source_of(node)}: it follows from a token's place as {fact.formula!r}, "
                f"and {problem} cannot be computed for other places."
            ) from problem
        self.tokens.facts[new] = dataclasses.replace(fact, formula=None)
        node.replace_all_uses_with(new)
        self.outcome.notes.append(f"{op_name(node)} at {source_of(node)} is computed from positions")

    # --- attention ---

    def _look_at_pages(self, node: fx.Node) -> None:
        whole = parts(node)
        builder = Builder(self.graph, node)
        if self.tokens[whole.keys[0]].kind is Kind.FIXED:
            window: int | None = None
            pages = [self._fixed(n) for n in whole.keys]
            none = [builder.call(aten.narrow.default, n, 2, 0, 0) for n in pages]
            new = [self._one_row(builder, n) for n in none]
            table, held = self._rows_of_fixed(builder, pages[0])
        else:
            about = node.meta["attention"]
            width = about.heads * (about.head_dim + about.value_dim)
            self.expanded += width * whole.q.meta["val"].dtype.itemsize
            stores = [self.stores[n] for o in whole.keys for n in self._path(o, self.stores)]
            window = stores[0].window if len({s.window for s in stores}) == 1 else None
            if window is None:
                self._widen(stores)
            pages = [self._replay(builder, n) for n in whole.keys]
            new, table, held = list(whole.keys), self._table(window), self._rows("first")
        self._note_rows(parse(whole.program), whole.reads)
        made = builder.call(
            CACHED[node.target], whole.q,  # type: ignore[index]
            *new, *pages, *whole.weights,
            [self._read(builder, r) for r in whole.reads], list(whole.sizes), whole.program,
            table, self._rows("starts"), self._rows("first"), held, *whole.chosen,
        )  # fmt: skip
        made.meta["attention"] = node.meta["attention"]
        for user in list(node.users) if node.target is ATTENTION else [node]:
            user.replace_all_uses_with(made)
            if user is not node:
                assert user.target is operator.getitem and user.args[1] == 0
                self.graph.graph.erase_node(user)
        self.tokens.facts[made] = self.tokens[node]
        self.graph.graph.erase_node(node)

    def _note_rows(self, program: ScoreProgram, reads: Sequence[fx.Node]) -> None:
        """Scores that read a fixed value at `b` say which of its dimensions is the batch, also where the
        trace does not say that it is as long."""
        for node in (n for e in program.expressions for n in E.walk(e) if n.op == "read"):
            for dim, index in enumerate(node.args):
                if index.op == "var" and index.value == "b":
                    self.row_dims[reads[node.value]] = dim

    def _widen(self, stores: Sequence[Store]) -> None:
        """Operands of one attention are kept for equally long."""
        for value, store in self.stores.items():
            if store in stores:
                self.stores[value] = dataclasses.replace(store, window=None)

    def _replay(self, builder: Builder, operand: fx.Node) -> fx.Node:
        """An operand as a view of pages: the steps from the kept value to it, on pages instead of rows and
        on the tokens of a page instead of all."""
        done: dict[fx.Node, fx.Node] = {}

        def replay(node: fx.Node) -> fx.Node:
            if node in done:
                return done[node]
            if node in self.stores:
                done[node] = self._pages(node)
                return done[node]
            copies = {n: replay(n) for n in node.all_input_nodes if n in self.tokens.facts}
            first = next(iter(copies))
            sizes = self._page_sizes(builder, done, first)
            for size in (n for n in node.all_input_nodes if is_size(n)):
                copies[size] = built(builder, self.meaning.renamed(size_expression(size.meta["val"])), sizes)
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: copies.get(n, n))
            done[node] = builder.call(node.target, *args, **kwargs)
            return done[node]

        return replay(operand)

    def _page_sizes(
        self, builder: Builder, done: dict[fx.Node, fx.Node], node: fx.Node
    ) -> dict[Expr, fx.Node]:
        fact = self.tokens[node]
        row, token = (
            self.space.place(fact.axes, self.space.row),
            self.space.place(fact.axes, self.space.token),
        )
        assert token is not None
        shift = 1 if self.space.row is None else 0
        found = {self.space.tokens: builder.call(aten.sym_size.int, done[node], token + shift)}
        if row is not None:
            found[self.space.rows] = builder.call(aten.sym_size.int, done[node], row)
        return found

    def _read(self, builder: Builder, node: fx.Node) -> fx.Node:
        """A tensor that the scores read: over all positions of each row where it follows the tokens."""
        fact = self.tokens[node]
        token = self.space.place(fact.axes, self.space.token)
        if token is not None:
            value = next(iter(self._path(node, self.stores)))
            if value is not node:
                raise NoDecoderError(f"what scores read at {source_of(node)} is a view of something kept.")
            store = self.stores[value]
            if self.space.row is None:
                raise NoDecoderError(
                    f"scores read a value of each token ({source_of(node)}) without a batch."
                )
            return builder.call(
                torch.ops.attngraph.history.default, self._pages(value), node, self._table(store.window),
                self._rows("starts"), self._rows("first"), store.token_dim,
            )  # fmt: skip
        return node

    # --- what does not depend on the tokens ---

    def _fixed(self, node: fx.Node) -> fx.Node:
        """A value of the prelude."""
        if node not in self.fixed:
            fact = self.tokens[node]
            place = self.space.place(fact.axes, self.space.row) if self.space.row is not None else None
            own, together = 1, True
            if place is None:
                place = self.row_dims.get(node)
            elif len(fact.axes[place]) > 1:
                digits = fact.axes[place]
                rest = next(d for d in digits if d is not self.space.row)
                own = int(evaluate_size(rest.args[0], self.graph.hints))
                together = digits[0] is self.space.row
            self.fixed[node] = Fixed(f"fixed{len(self.fixed)}", place, own, together)
        value = node.meta["val"]
        made = self._input("fixed", self.fixed[node].name, [], value.dtype)
        made.meta["val"] = value
        return made

    def _one_row(self, builder: Builder, node: fx.Node) -> fx.Node:
        """Without tokens, so of whatever row."""
        return builder.call(aten.narrow.default, node, 0, 0, 1)

    def _rows_of_fixed(self, builder: Builder, pages: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Each row's keys are a page of their own, full from the start."""
        first = self._rows("first")
        rows = builder.call(aten.sym_size.int, first, 0)
        table = builder.call(aten.arange.default, rows, device=first.meta["val"].device)
        if self.space.row is None:
            table = builder.call(aten.zeros_like.default, table)
        keys = builder.call(aten.sym_size.int, pages, 2)
        held = builder.call(aten.full_like.default, first, keys)
        return builder.call(aten.unsqueeze.default, table, 1), held

    def _take_fixed(self) -> None:
        """Cut the graph where values that do not depend on the tokens are used with ones that do, as far
        as they depend on other arguments; what weights alone give stays."""
        kinds = dict(zip(self.graph.placeholders(), self.graph.inputs, strict=False))
        arguments = {
            n for n, given in kinds.items()
            if given.kind == "argument" and n in self.tokens.facts and not self.tokens.depends_on_tokens(n)
        }  # fmt: skip
        dynamic: set[fx.Node] = set(arguments)
        for node in self.graph.graph.nodes:
            if any(n in dynamic for n in node.all_input_nodes) and self._is_fixed(node):
                dynamic.add(node)
        for node in list(self.graph.graph.nodes):
            if node in dynamic or node.op == "output" or node.op == "placeholder":
                continue
            for operand in node.all_input_nodes:
                if operand not in dynamic:
                    continue
                node.replace_input_with(operand, self._taken(node, operand))
        if self.fixed:
            self.graph.prelude = part_of(self.graph, list(self.fixed))

    def _is_fixed(self, node: fx.Node) -> bool:
        fact = self.tokens.facts.get(node)
        return is_size(node) if fact is None else fact.kind is Kind.FIXED

    def _taken(self, node: fx.Node, operand: fx.Node) -> fx.Node:
        """What stands for a fixed operand in the graph of a step."""
        if is_size(operand):
            size = self.meaning.renamed(size_expression(operand.meta["val"]))
            found: fx.Node = built(Builder(self.graph, node), size, self._known_sizes())
            return found
        fact = self.tokens[operand]
        made = self._fixed(operand)
        place = self.fixed[operand].row_dim
        if place is None or node.target in CACHED.values():
            return made
        # A value of each sequence beside values of tokens: each token takes its own sequence's.
        own, wanted = self.tokens.facts.get(node), self.space.token
        if own is None or self.fixed[operand].own != 1 or len(own.axes) < len(fact.axes):
            raise NoDecoderError(f"{op_name(node)} at {source_of(node)}: uses a value of each sequence.")
        builder = Builder(self.graph, node)
        for _ in range(len(own.axes) - len(fact.axes)):
            made, place = builder.call(aten.unsqueeze.default, made, 0), place + 1
        target = self.space.place(own.axes, wanted)
        if target is None or made.meta["val"].shape[target] != 1 or len(own.axes[target]) > 1:
            raise NoDecoderError(f"{op_name(node)} at {source_of(node)}: uses a value of each sequence.")
        made = builder.call(aten.index_select.default, made, place, self._rows("row"))
        return builder.call(aten.transpose.int, made, place, target)

    def _known_sizes(self) -> dict[Expr, Any]:
        """Sizes that the tokens and fixed values have, and where."""
        axes = self.tokens[self.ids].axes
        found: dict[Expr, Any] = {self.space.tokens: (self.ids, self.space.place(axes, self.space.token))}
        if self.space.row is not None:
            found[self.space.rows] = (self.ids, self.space.place(axes, self.space.row))
        for node, fixed in self.fixed.items():
            made = self.inputs[fixed.name]
            for dim, extent in enumerate(node.meta["val"].shape):
                if not isinstance(extent, int) and dim != fixed.row_dim:
                    found.setdefault(self.meaning.renamed(size_expression(extent)), (made, dim))
        return found

    # --- at the end ---

    def _drop_unused_inputs(self) -> None:
        pairs = list(zip(self.graph.placeholders(), self.graph.inputs, strict=True))
        kept: list[Input] = []
        for node, given in pairs:
            if node.users or given.kind in ("parameter", "buffer", "constant"):
                kept.append(given)
                if given.kind == "argument" and not self.tokens.depends_on_tokens(node):
                    user = source_of(next(iter(node.users)))
                    raise NoDecoderError(f"a size of input {given.name} is needed for every token ({user}).")
            else:
                self.graph.graph.erase_node(node)
        self.graph.inputs = tuple(kept)
        self.graph.module.recompile()

    def _annotate(self) -> None:
        for node, fact in self.tokens.facts.items():
            node.meta["tokens"] = fact.describe(self.space)

    def _note(self, attentions: Sequence[fx.Node]) -> None:
        plan = self.graph.cache
        assert plan is not None
        self.outcome.notes.insert(
            0,
            f"{len(attentions)} attention(s) look at {len(plan.stores)} kept value(s) of "
            f"{plan.bytes_per_token} bytes per token (keys and values by query head: {plan.expanded})",
        )
        if plan.fixed:
            self.outcome.notes.append(f"{len(plan.fixed)} value(s) are computed once for a prompt")
