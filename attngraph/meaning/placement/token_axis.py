"""Which values ranks can compute for their own tokens alone, and what that takes of the operands.

By the element rules, as for decoders (`meaning/tokens`), but a token may see any other: what is computed from
tokens side by side needs the same tokens of its operands, attention needs its own queries and other keys, and
everything else needs all tokens. Every value is one of these:

    known       it follows from sizes, constants, positions and the numbers that the model is called with, or
                from weights alone: every rank computes all of it, or its own tokens of it, without asking
    divided     each rank has its own tokens
    whole       every rank computes all of it, because it mixes tokens or has none

A value that is whole is divided again as soon as something is computed from it token by token.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from attngraph.ir.graph.program_graph import ProgramGraph, is_size
from attngraph.ir.language import E, Expr
from attngraph.ir.ops import nodes
from attngraph.ir.ops.collectives import COLLECTIVES
from attngraph.meaning.algebra.sizes import evaluate_size, size_expression
from attngraph.meaning.check.region import shape_at
from attngraph.meaning.element import Meaning
from attngraph.meaning.placement.demand import Unplaced
from attngraph.meaning.placement.elements import attention_of, category, element, independent_dims
from attngraph.meaning.rule import Category, Indices, Unliftable, is_part, tried
from attngraph.meaning.tokens.facts import Axes, Space, outside_reads

QUERIES = 2
"""The dimension of an attention's operands that counts tokens."""


@dataclasses.dataclass(frozen=True)
class Uses:
    """What a rank's tokens of a value are computed from: its tokens of some operands, by the axes that they
    have there, and all of the others (None). `counts`: the value depends on how many tokens there are."""

    operands: Mapping[fx.Node, Axes | None]
    counts: bool = False


class TokenAxis:
    """The token axis of one graph.

    Args:
        token: the size that counts tokens. group: the process group of the ranks that divide them.

    Attributes:
        axes: of every divided value, its dimensions as digits. uses: what it is computed from, if it is no
            attention. rows: the axes of queries and keys.
        whole: of values with tokens that are computed whole, why.
    """

    def __init__(self, graph: ProgramGraph, meaning: Meaning, token: Expr, group: str) -> None:
        self.graph, self.meaning, self.group = graph, meaning, group
        self.space = Space(E.var("t", token), None)
        self.axes: dict[fx.Node, Axes] = {}
        self.uses: dict[fx.Node, Uses] = {}
        self.rows: Axes = ((), (), (self.space.token,), ())
        self.whole: dict[fx.Node, str] = {}
        self._called: set[fx.Node] = set()
        self._learned: set[fx.Node] = set()
        self._computed: set[fx.Node] = set()
        given = graph.given()
        for node in graph.graph.nodes:
            if node.op == "call_function" and not is_size(node):
                self._note(node)
            elif node.op == "placeholder" and given[node].kind == "argument":
                self._called.add(node)
            elif node.op == "placeholder" and given[node].kind in ("parameter", "shard", "weights"):
                self._learned.add(node)

    def _note(self, node: fx.Node) -> None:
        operands = [n for n in node.all_input_nodes if not is_size(n)]
        for kind in (self._called, self._learned):
            if any(n in kind for n in operands):
                kind.add(node)
        makes = nodes.view(node) is not None or self.is_product(node)
        work = node in self._called and (makes or node in self._learned)
        if work or any(n in self._computed for n in operands):
            self._computed.add(node)
        elif sum(map(self.space.counts_tokens, tried(self.meaning.shape, node) or ())) < 2:
            return  # no entry for every pair of tokens, of which a rank would compute its rows alone
        if not self.meaning.is_tensor(node):
            return  # an operation of several results is judged by each of them
        try:
            self._divide(node)
        except Unplaced as reason:
            if node in self._computed:
                self.whole[node] = str(reason)

    def place(self, axes: Axes) -> int:
        """The dimension of a divided value that holds the tokens."""
        found = self.space.place(axes, self.space.token)
        assert found is not None
        return found

    def is_known(self, node: fx.Node) -> bool:
        """Whether every rank computes the value without asking, where it needs all of it."""
        return node not in self._computed

    def is_product(self, node: fx.Node) -> bool:
        """Whether a value is a product, such as one with weights."""
        return category(self.meaning, node) is Category.CONTRACTION

    def _shape(self, node: fx.Node) -> Indices:
        try:
            return self.meaning.shape(node)
        except Unliftable as problem:
            raise Unplaced(f"{node.target} has sizes that attngraph cannot follow") from problem

    def _divide(self, node: fx.Node) -> None:
        """Find how ranks compute their own tokens of a value; Unplaced where that is not known."""
        if node.target in COLLECTIVES and node.args[-1] == self.group:
            raise Unplaced("queries of another sequence see it")
        dropped = dropout_of(node)
        source: Any = None if dropped is None else dropped.args[0]
        if source in self.axes:
            # Random numbers are drawn in the order in which elements lie in memory.
            value, hints = source.meta["val"], self.graph.hints
            strides = [evaluate_size(size_expression(s), hints) for s in value.stride()]
            if torch.empty_strided(shape_at(value, hints), strides, device="meta").is_contiguous():
                self.axes[node] = self.axes[source]
                self.uses[node] = Uses({source: self.axes[source]})
                return
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise Unplaced("it draws random numbers, which are those of one device")
        attention = attention_of(node)
        if attention is not None:
            view = nodes.AttentionOp.of(attention)
            if isinstance(view, nodes.Cached):
                raise Unplaced("attention over a cache")
            if self._shape(view.q)[QUERIES] is not self.space.tokens:
                raise Unplaced("queries of another sequence see it")
            if self.axes.get(view.q, self.rows) != self.rows:
                raise Unplaced("its queries are not arranged as [batch, heads, tokens, width]")
            self.axes[node] = self.rows[: len(self._shape(node))]
            return
        problem = "its result is one for all tokens"
        for axes in self._divided(node):
            try:
                self.uses[node] = self._token_wise(node, axes)
            except Unplaced as reason:
                problem = str(reason)
                continue
            self.axes[node] = axes
            return
        raise Unplaced(problem)

    def _divided(self, node: fx.Node) -> Iterator[Axes]:
        """What the dimensions of a value may stand for, if it has tokens."""
        candidates = self.space.candidates(self._shape(node))
        return (axes for axes in candidates if self.space.place(axes, self.space.token) is not None)

    # --- token by token ---

    def _token_wise(self, node: fx.Node, axes: Axes) -> Uses:
        at = self.space.indices(axes, self._shape(node))
        try:
            value = element(self.meaning, node, at)
        except Unliftable as problem:
            return self._independent(node, axes, problem)
        if any(n is self.space.token for n in outside_reads(value)):
            raise Unplaced("it is computed from the token's place")
        uses: dict[fx.Node, Axes | None] = {}
        for read in (n for n in E.reads(value) if isinstance(n.value, fx.Node)):
            wanted = self._needed(read.value, read.args)
            if uses.setdefault(read.value, wanted) != wanted:
                raise Unplaced("it reads a value at two tokens")
        return Uses(uses, any(map(self.space.is_count, outside_reads(value))))

    def _needed(self, operand: fx.Node, indices: Indices) -> Axes | None:
        """The axes of an operand by which an element reads its own token; None if it reads any."""
        if operand in self.axes:
            if self.space.follows(self.axes[operand], indices):
                return self.axes[operand]
            raise Unplaced("it mixes tokens")
        if not any(map(self.space.moves, indices)):
            return None
        for axes in self._divided(operand):
            if self.space.follows(axes, indices):
                return axes
        raise Unplaced("it reads a table at the token's place")

    def _independent(self, node: fx.Node, axes: Axes, problem: Exception) -> Uses:
        """An operation of which only leading dimensions are known to be independent of each other."""
        first = independent_dims(node)
        if first is None:
            raise Unplaced(f"attngraph has no rule for the elements of {node.target}") from problem
        if self.place(axes) >= first:
            raise Unplaced("it is normalised over tokens")
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        mine = (*axes[:first], *((),) * (len(self._shape(source)) - first))
        if self.axes.get(source, mine) != mine:
            raise Unplaced("it mixes tokens")
        weights = dict.fromkeys((n for n in node.all_input_nodes if not is_size(n) and n is not source), None)
        return Uses({**weights, source: mine})

    def own_reads(self, attention: nodes.AttentionOp) -> Iterator[tuple[int, Axes]]:
        """The divided tensors that scores read at the query's own place, of which a rank needs its rows."""
        query = E.var("q")
        for number, tensor in enumerate(attention.reads):
            place = self.space.place(self.axes.get(tensor, ()), self.space.token)
            if place is None or self.axes[tensor][place] != (self.space.token,):
                continue
            reads = {r for r, _, _ in attention.program.places if r.value == number}
            others = (i for r in reads for d, i in enumerate(r.args) if d != place)
            if all(r.args[place] is query for r in reads) and not any(query in i.free for i in others):
                yield number, self.axes[tensor]


def dropout_of(node: fx.Node) -> fx.Node | None:
    """The call of dropout whose result a node is, if nothing else is used of it; None for another node."""
    if str(node.target) == "aten.dropout.default":
        return node
    source: Any = node.args[0] if is_part(node) else None
    if str(getattr(source, "target", "")) != "aten.native_dropout.default" or node.args[1] != 0:
        return None
    return source if len(source.users) == 1 else None  # type: ignore[no-any-return]
