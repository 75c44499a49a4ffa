"""What a rank computes of a value that is divided by tokens: a twin of its node, on the rank's own tokens.

A twin takes the rank's tokens of the model's own operands; once the operands' twins are proved, they stand
in that place (`shard.py`). So every twin can be proved by itself. Attention has the rank's queries, and the
keys that it fetched in the places that they have among all tokens, so that its program stays the model's
with the query's number read from a table. A value that every rank has whole enters through `sum_gradients`.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph import Axis, ProgramGraph, is_size
from attngraph.ir.language import E, Expr, ScoreProgram, reindexed
from attngraph.ir.ops import nodes
from attngraph.ir.ops.token_collectives import ALL_TOKENS, FETCH_KEYS, OWN_TOKENS, Layout
from attngraph.meaning import is_part, size_expression
from attngraph.meaning.check.region import shape_at
from attngraph.meaning.masks.tiles import visible_keys
from attngraph.meaning.placement.demand import Unplaced
from attngraph.meaning.placement.elements import attention_of
from attngraph.meaning.placement.token_axis import TokenAxis, Uses, dropout_of
from attngraph.meaning.tokens.facts import Axes
from attngraph.passes.build import Builder
from attngraph.passes.shard import IMPOSSIBLE, RESIZED, Entering, on_parts, resized

aten = torch.ops.aten


class Twins:
    """Builds twins in one graph for the ranks of one axis.

    Attributes:
        taken: the rank's own tokens of a node of the model, by the node and its axes.
    """

    def __init__(self, graph: ProgramGraph, tokens: TokenAxis, layout: Layout, axis: Axis) -> None:
        self.graph, self.tokens, self.layout = graph, tokens, layout
        self.meaning, self.space = tokens.meaning, tokens.space
        self.entering = Entering(graph, axis)
        self.told = (layout.flat, layout.ranks, axis.group)
        self.taken: dict[tuple[fx.Node, Axes], fx.Node] = {}
        self.attentions: dict[fx.Node, fx.Node] = {}
        first = next(n for n in graph.graph.nodes if n.op != "placeholder")
        begin = Builder(graph, first)
        chunk = begin.call(operator.floordiv, begin.size(self.space.tokens), layout.count)
        self.own_tokens = begin.call(operator.mul, chunk, layout.count // layout.ranks)
        self.begin, self.positions = begin, dict[torch.device, fx.Node]()

    def twin(self, node: fx.Node) -> fx.Node:
        """What ranks compute for a divided node; Unplaced where it cannot be built."""
        builder = Builder(self.graph, node)
        try:
            attention = attention_of(node)
            if attention is None:
                return self._token_wise(builder, node, self.tokens.uses[node])
            if attention not in self.attentions:
                self.attentions[attention] = self._attention(Builder(self.graph, attention), attention)
            made = self.attentions[attention]
            return builder.call(operator.getitem, made, node.args[1]) if is_part(node) else made
        except IMPOSSIBLE as problem:
            raise Unplaced(f"{node.target} on a rank's tokens: {problem}") from problem

    def whole(self, builder: Builder, node: fx.Node, twin: fx.Node) -> fx.Node:
        """All tokens of a node of which `twin` has a rank's own."""
        return self._moved(builder, twin, node, self.tokens.axes[node], ALL_TOKENS)

    # --- operands ---

    def _own(self, builder: Builder, node: fx.Node, axes: Axes) -> fx.Node:
        """A rank's tokens of a node of the model."""
        key = (node, axes)
        if key not in self.taken:
            self.taken[key] = self._moved(builder, node, node, axes, OWN_TOKENS)
        return self.taken[key]

    def _moved(self, builder: Builder, x: fx.Node, node: fx.Node, axes: Axes, op: Any) -> fx.Node:
        """`op` along the token axis of a node, which may be one digit of a dimension."""
        place = self.tokens.place(axes)
        digits = axes[place]
        if len(digits) == 1:
            return builder.call(op, x, place, *self.told)
        shape, token = self.meaning.shape(node), place + digits.index(self.space.token)
        unfolded = [*shape[:place], *(d.args[0] for d in digits), *shape[place + 1 :]]
        begins, ends = (token, None) if op is ALL_TOKENS else (None, place)
        x = builder.call(aten.reshape.default, x, self._sizes(builder, unfolded, begins))
        x = builder.call(op, x, token, *self.told)
        return builder.call(aten.reshape.default, x, self._sizes(builder, shape, ends))

    def _sizes(self, builder: Builder, shape: Sequence[Expr], own: int | None) -> list[Any]:
        """Sizes as arguments; that of the dimension `own` for a rank's tokens."""
        return [self._size(builder, e, d == own) for d, e in enumerate(shape)]

    def _size(self, builder: Builder, extent: Expr, own: bool) -> Any:
        return builder.size(extent, {self.space.tokens: self.own_tokens}) if own else builder.size(extent)

    # --- token by token ---

    def _token_wise(self, builder: Builder, node: fx.Node, uses: Uses) -> fx.Node:
        shape, place = self.meaning.shape(node), self.tokens.place(self.tokens.axes[node])
        given = {
            operand: self.entering.enter(operand) if wanted is None else self._own(builder, operand, wanted)
            for operand, wanted in uses.operands.items()
        }
        if (dropped := dropout_of(node)) is not None:
            return self._dropped(builder, node, dropped, *given.values())
        if str(node.target) in RESIZED:
            (x,) = given.values()
            return resized(builder, node, x, self._sizes(builder, shape, place))
        problem: Exception = Unplaced("")
        for own in (False,) if uses.counts else (True, False):
            try:
                return self._called(builder, node, given, own, place)
            except (Unplaced, *IMPOSSIBLE) as found:
                problem = found
        raise Unplaced(str(problem))

    def _dropped(self, builder: Builder, node: fx.Node, dropped: fx.Node, x: fx.Node) -> fx.Node:
        """Dropout by the random numbers of one device: every rank draws those of all tokens."""
        value = node.meta["val"]
        sizes = self._sizes(builder, self.meaning.shape(node), None)
        ones = builder.call(aten.ones.default, sizes, dtype=value.dtype, device=value.device)
        scale = builder.call(dropped.target, ones, *dropped.args[1:], **dropped.kwargs)
        if dropped is not node:
            scale = builder.call(operator.getitem, scale, 0)
        own = self._moved(builder, scale, node, self.tokens.axes[node], OWN_TOKENS)
        return builder.call(aten.mul.Tensor, x, own)

    def _called(
        self, builder: Builder, node: fx.Node, given: dict[fx.Node, fx.Node], own: bool, place: int
    ) -> fx.Node:
        """The node's operation on a rank's tokens; sizes are those of the rank, or of all tokens."""

        def other(n: fx.Node) -> Any:
            if is_size(n):
                return self._size(builder, self.meaning.renamed(size_expression(n.meta["val"])), own)
            axes = self.tokens.axes.get(n)
            return self.entering.enter(n) if axes is None else self._own(builder, n, axes)

        made = on_parts(builder, node, given, other)
        if isinstance(node.meta["val"], Tensor):
            hints, layout = self.graph.hints, self.layout
            wanted, tokens = shape_at(node.meta["val"], hints), hints.get(str(self.space.tokens.value), 0)
            own_tokens = tokens // layout.count * (layout.count // layout.ranks)
            wanted[place] = wanted[place] // tokens * own_tokens
            if shape_at(made.meta["val"], hints) != wanted:
                raise Unplaced("it has another shape on a rank's tokens")
        return made

    # --- attention ---

    def _attention(self, builder: Builder, node: fx.Node) -> fx.Node:
        view: Any = nodes.view(node)
        rows, own_reads = self.tokens.rows, dict(self.tokens.own_reads(view))
        made: dict[str, Any] = {"q": self._own(builder, view.q, rows)}
        for name, key in zip(view.key_names, view.keys, strict=True):
            divided = self.tokens.axes.get(key) == rows
            made[name] = self._fetched(builder, view, key) if divided else self.entering.enter(key)
        weights = {name: getattr(view, name) for name in view.projection_names}
        made |= {name: self.entering.enter(w) for name, w in weights.items() if w is not None}
        reads = [
            self._own(builder, r, own_reads[n]) if n in own_reads else self.entering.enter(r)
            for n, r in enumerate(view.reads)
        ]
        program = reindexed(view.program, "q", E.read(len(reads), (E.var("q"),)), own_reads)
        if program is not view.program:
            device, call = view.q.meta["val"].device, self.begin.call
            if device not in self.positions:  # the numbers of a rank's tokens
                every = call(aten.arange.default, self.begin.size(self.space.tokens), device=device)
                self.positions[device] = call(OWN_TOKENS, every, 0, *self.told)
            reads.append(self.positions[device])
        found = builder.attention(view.replace(**made, reads=tuple(reads), program=program))
        if "attention" in node.meta:
            found.meta["attention"] = node.meta["attention"]
        return found

    def _fetched(self, builder: Builder, view: Any, key: fx.Node) -> fx.Node:
        """All keys that the rank's queries may see, in their places among all tokens."""
        program, used = visible_keys(view.program)
        if any(view.reads[n] in self.tokens.axes for n in used):
            program, used = ScoreProgram(()), ()
        own = self._own(builder, key, self.tokens.axes[key])
        reads = [view.reads[n] for n in used]
        return builder.call(FETCH_KEYS, own, reads, list(view.sizes), str(program), *self.told)
