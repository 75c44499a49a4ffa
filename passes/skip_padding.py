"""SkipPadding: what is computed for each token alone is not computed for tokens that a mask hides.

Matches stretches of operations with a product, of values of tokens, each element of which reads its own token
of the others, where no result of the graph needs what they give for hidden tokens: every attention hides
these from its queries by one predicate (`keep r0[b, k] != 0`), and what else reads them gives them no weight
(a mean by the mask), or reads one place, the first say, which is computed in any case. Such a stretch runs on
the real tokens of all rows, one after the other (`ir/ops/real_tokens.py`) [packed batch, nested tensors].
Right because an element that reads its own token alone is the same in either form. That, and who reads hidden
tokens, follows from the element rules. Refuses where a result has values of tokens (unless the user says that
those of hidden ones are unused), and operations that draw random numbers.

Where a hidden token has a weight of zero, the model's result is NaN if its value is infinite; here it is not.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from attngraph.ir.graph import Level, ProgramGraph, is_random, is_size, source_of
from attngraph.ir.graph.program_graph import RESULTS, is_assertion, sort
from attngraph.ir.language import E, Expr, Keep, Weight
from attngraph.ir.ops import nodes
from attngraph.ir.ops.real_tokens import packed, real_tokens, unpacked
from attngraph.ir.walk import connected, reached
from attngraph.meaning.algebra import M, size_expression
from attngraph.meaning.element import Meaning
from attngraph.meaning.masks.fold import low_fill, seen
from attngraph.meaning.rule import Category, is_part, tried
from attngraph.meaning.tokens import opaque
from attngraph.passes.build import Builder, NoSize
from attngraph.passes.insert_kv_cache.write_formula import Writer
from attngraph.pipeline import Outcome

aten = torch.ops.aten
_B, _Q, _K = (E.var(name) for name in "bqk")
_TAKES_A_SHAPE = (aten.view.default, aten.reshape.default, aten.expand.default)
_WORDS = 400
"""The longest formula that is searched for a factor that is zero at hidden tokens."""


class Layout(NamedTuple):
    """The dimensions of a value that hold rows and tokens. Where they are one, it has all tokens of a row
    beside each other (`rows_first`), or all rows of a token."""

    row: int
    token: int
    rows_first: bool = True

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(sorted({self.row, self.token}))

    @property
    def text(self) -> str:
        """As `real_tokens.py` writes it."""
        if self.row == self.token:
            return "(b t)" if self.rows_first else "(t b)"
        return "b t" if self.row < self.token else "t b"

    @property
    def is_first(self) -> bool:
        """Whether they are the first dimensions, as operations have them that run on some tokens."""
        return self.dims in ((0,), (0, 1))


@dataclasses.dataclass(frozen=True)
class SkipPadding:
    """`unused`: whether the user says that results of hidden tokens are not used."""

    unused: bool = False
    name: str = "skip-padding"
    requires: Level = Level.FUSED
    yields: Level = Level.FUSED

    def run(self, graph: ProgramGraph) -> Outcome:
        meaning = Meaning.of(graph)
        found = _hidden(graph, meaning)
        return Outcome() if found is None else _Skipping(graph, meaning, *found).run(self.unused)


def _hidden(graph: ProgramGraph, meaning: Meaning) -> tuple[Expr, dict[fx.Node, bool]] | None:
    """The predicate of real tokens, of `b` and `k`, by which most attentions hide all others, as a formula of
    nodes; and those attentions, with whether hidden tokens see no hidden ones either."""
    by: dict[Expr, dict[fx.Node, bool]] = collections.defaultdict(dict)
    for node in graph.attentions():
        view = nodes.view(node)
        if isinstance(view, nodes.Attention) and view.q.meta["val"].device.type == "cpu":
            parts, always = _hiding(view)
            for part in parts:
                named = {n: E.read(view.reads[n.value], n.args, meaning.kind(view.reads[n.value]))
                         for n in E.reads(part)}  # fmt: skip
                by[E.replaced(part, named)][node] = always
    return max(by.items(), key=lambda item: len(item[1]), default=None)


def _hiding(view: nodes.Attention) -> tuple[list[Expr], bool]:
    """The predicates of a row and a key alone by which an attention hides keys from queries of real tokens,
    and whether from all queries."""
    statements = view.program.statements
    parts = E.parts(M.canonical(seen(statements, low_fill)), "and")
    of_keys = [p for p in parts if _K in p.free and p.free <= {_B, _K} and E.reads(p)]
    others = M.and_(*(p for p in parts if p not in of_keys))
    if others is E.TRUE:
        return of_keys, True
    fills = {s.is_hard for s in statements if isinstance(s, Keep)}
    weights = [n for s in statements if isinstance(s, Weight) for n in E.walk(s.value)]
    if True in fills and not any(n.op == "isnan" for n in weights):
        return [], False  # a hidden token that sees no real one is NaN, and so is what gives it no weight
    if False not in fills:
        return of_keys, True
    # Where a finite number hides all keys of a query, it weighs them alike. A real token must see itself.
    return of_keys if M.substitute(others, {_K: _Q}) is E.TRUE else [], False


def _value_that_hides(real: Expr) -> tuple[Expr, Expr] | None:
    """What is read of a mask, if that is one element, and its value where a token is hidden: 0, or of
    booleans either."""
    reads = E.reads(real)
    if len(reads) != 1:
        return None
    zero = E.const(0.0) if reads[0].kind == "float" else E.ZERO
    values = (E.FALSE, E.TRUE) if reads[0].kind == "bool" else (zero,)
    return next(((reads[0], v) for v in values if M.substitute(real, {reads[0]: v}) is E.FALSE), None)


class _Skipping:
    """One graph. `hidden`: the attentions that hide all tokens but those that are `real`."""

    def __init__(
        self, graph: ProgramGraph, meaning: Meaning, real: Expr, hidden: Mapping[fx.Node, bool]
    ) -> None:  # fmt: skip
        self.graph, self.meaning, self.real, self.hidden = graph, meaning, real, hidden
        self.masks = {n.value for n in E.reads(real)}
        self.mask = _value_that_hides(real)
        if self.mask is not None and self.mask[0].kind != "bool":
            self.real = M.or_(real, M.ne(*self.mask))  # tokens of other values are computed, too
        self.rows, _, self.tokens, _ = meaning.shape(nodes.AttentionOp.of(next(iter(hidden))).keys[0])
        self.row = E.ZERO if E.is_const(self.rows, 1) else E.var("row", self.rows)
        self.token = E.var("token", self.tokens)
        self.need: dict[fx.Node, Layout | None] = {}
        """Where the rows and tokens are in what is needed of real tokens alone; None: all of it is needed."""
        self.always: dict[Expr, None] = {}
        """Tokens that are needed of each row."""
        self.as_it_is: set[fx.Node] = set()
        """What takes away the values of hidden tokens: of all tokens, whatever it is given for these."""
        self.packed: dict[fx.Node, fx.Node] = {}

    def run(self, unused: bool) -> Outcome:
        for node, output in zip(self.graph.results(), self.graph.outputs, strict=True):
            self._ask(node, self._own(node) if unused and output.kind in RESULTS else None)
        for node in self.graph.graph.nodes:
            is_measured = is_size(node) and node.target is not aten.sym_size.int
            if is_assertion(node) or is_measured:
                for operand in node.all_input_nodes:
                    self._ask(operand, None)
        for node in reversed(self.graph.graph.nodes):
            if node in self.need and node.op == "call_function" and not is_size(node):
                self._ask_operands(node, self.need[node])
        able = {n: operands for n in self.graph.graph.nodes if (operands := self._operands(n))}
        groups = connected(list(able), lambda n: [n, *(o for o in able[n] if o in able)])
        kept = {n for group in groups if any(map(self._is_product, group)) for n in group}
        where, every = source_of(next(iter(self.hidden))), sum(map(self._cost, self.graph.graph.nodes))
        if not kept or 2 * sum(map(self._cost, kept)) < every:
            # Few products alone are not worth it: each is computed apart from the others of its input.
            told = (
                f"tokens that are hidden at {where} are computed: most products are of values that results "
                "need, or that cannot be computed of some tokens alone"
            )
            return Outcome(
                [told + " (padding='unused': results of hidden tokens are not used)" * (not unused)]
            )
        self._pack({n: operands for n, operands in able.items() if n in kept})
        many = sum(map(self._is_product, self.packed))
        return Outcome([f"{many} product(s) leave out the tokens that are hidden at {where}"] * bool(many))

    def _cost(self, node: fx.Node) -> int:
        """How many numbers the weights of a product of tokens have."""
        both = M.mul(self.rows, self.tokens)
        if not self._is_product(node) or not (self._own(node) or both in self._shape(node)):
            return 0
        weights = [n.meta["val"] for n in node.all_input_nodes if self.meaning.is_tensor(n)]
        sizes = (list(w.shape) for w in weights if w.ndim == 2)
        return sum(math.prod(shape) for shape in sizes if all(isinstance(n, int) for n in shape))

    def _is_product(self, node: fx.Node) -> bool:
        return self.meaning.category(node) is Category.CONTRACTION

    def _shape(self, node: fx.Node) -> tuple[Expr, ...]:
        return self.meaning.shape(node) if self.meaning.is_tensor(node) else ()

    # --- what is needed of hidden tokens ---

    def _ask(self, node: fx.Node, layout: Layout | None) -> None:
        if self.need.setdefault(node, layout) != layout:
            self.need[node] = None

    def _own(self, node: fx.Node) -> Layout | None:
        """Where a value has rows and tokens in dimensions of their own."""
        shape = self._shape(node)
        rows, tokens = ([d for d, n in enumerate(shape) if n is of] for of in (self.rows, self.tokens))
        return Layout(rows[0], tokens[0]) if len(rows) == len(tokens) == 1 else None

    def _ask_operands(self, node: fx.Node, layout: Layout | None) -> None:
        view = nodes.view(node)
        if view is not None:
            return self._ask_of_attention(node, view, layout)
        if is_part(node) and nodes.view(node.args[0]) is not None:  # type: ignore[arg-type]
            of_queries = layout is not None and (layout.row, layout.token) == (0, 2)
            return self._ask(node.args[0], layout if of_queries else None)  # type: ignore[arg-type]
        element, _ = self._element(node, layout)
        if element is None:
            for operand in node.all_input_nodes:
                self._ask(operand, None)
            return None
        before = [n.value for n in E.reads(element)]
        element = self._weighed(element)
        after = {n.value for n in E.reads(element)}
        looked_through = reached(before, lambda n: () if n in after else n.all_input_nodes)
        self.as_it_is |= set(looked_through) - after
        hidden = self._read_at_hidden(element)
        for read in E.reads(element):
            self._ask(read.value, self._needed(read, hidden))
        return None

    def _element(self, node: fx.Node, layout: Layout | None) -> tuple[Expr | None, tuple[Expr, ...]]:
        """Any one element of a node (that of `row` and `token`, where it has such), and its place."""
        if not self.meaning.is_tensor(node):
            return None, ()
        at = list(self.meaning.places(node)[1])
        if layout is not None and len(layout.dims) == 2:
            at[layout.row], at[layout.token] = self.row, self.token
        elif layout is not None:
            at[layout.row] = self._joined(layout.rows_first)
        found = tried(self.meaning.element, node, tuple(at))
        return tried(opaque.element, self.meaning, node, tuple(at)) if found is None else found, tuple(at)

    def _joined(self, rows_first: bool) -> Expr:
        outer, inner, many = (
            (self.row, self.token, self.tokens) if rows_first else (self.token, self.row, self.rows)
        )
        return M.add(M.mul(outer, many), inner)

    def _layout(self, read: Expr) -> Layout | None:
        """Where what is read has the row and the token; None if it is not read there."""
        shape, at = self._shape(read.value), read.args
        rows, tokens = (
            [d for d, (n, i) in enumerate(zip(shape, at, strict=True)) if (n, i) == pair]
            for pair in ((self.rows, self.row), (self.tokens, self.token))
        )
        if rows and tokens:
            return Layout(rows[0], tokens[0])
        both = M.mul(self.rows, self.tokens)
        found = (Layout(d, d, way) for d, n in enumerate(shape) for way in (True, False)
                 if n is both and at[d] is self._joined(way))  # fmt: skip
        return next(found, None)

    def _weighed(self, element: Expr) -> Expr:
        """An element that sums over tokens, as a formula of what its terms are computed from."""
        bound = self._bound(element)
        sums = any(self._token_of(n) in bound for n in E.reads(element))
        found = tried(self.meaning.elementwise, element, _WORDS) if sums else None
        return element if found is None else found

    def _bound(self, element: Expr) -> set[Expr]:
        """The variables of sums over tokens."""
        binders = (n for n in E.walk(element) if n.op in E.BINDERS)
        return {n.args[0] for n in binders if n.args[0].args[0] is self.tokens}

    def _token_of(self, read: Expr) -> Expr | None:
        """The token of which a read has a value, if there is one."""
        own = self._own(read.value)
        return None if own is None else read.args[own.token]

    def _row_of(self, read: Expr) -> Expr:
        own = self._own(read.value)
        assert own is not None
        return read.args[own.row]

    def _read_at_hidden(self, element: Expr) -> set[Expr]:
        """What a formula needs of tokens where they are hidden, of the tokens that it sums over."""
        found = set(E.reads(element))
        for variable in self._bound(element):
            reads = [n for n in E.reads(element) if self._token_of(n) is variable]
            known: dict[Expr, Expr] = {}
            for read in reads:
                known |= self._when_hidden({_B: self._row_of(read), _K: variable})
            found -= set(reads) - set(E.reads(M.substitute(element, known)))
        return found

    def _when_hidden(self, place: Mapping[Expr, Expr]) -> dict[Expr, Expr]:
        """What is known of a hidden token: what its mask is, or that it is not real."""
        if self.mask is None:
            return {M.substitute(self.real, place): E.FALSE}
        read, value = self.mask
        return {M.substitute(read, place): value}

    def _needed(self, read: Expr, hidden: set[Expr]) -> Layout | None:
        """How much is needed of what is read for an element of `row` and `token`, or of any."""
        if read.value in self.masks:
            return None
        layout, own = self._layout(read), self._own(read.value)
        if layout is not None or own is None:
            return layout
        token = read.args[own.token]
        if not token.free and not E.reads(token) and all(self.hidden.values()):
            self.always[token] = None
            return own
        return None if read in hidden else own

    def _ask_of_attention(self, node: fx.Node, view: nodes.AttentionOp, layout: Layout | None) -> None:
        of_queries = layout if isinstance(view, nodes.Attention) else None
        is_hidden = node in self.hidden and (layout is not None or self.hidden[node])
        of_keys = Layout(0, 2) if is_hidden else None
        self._ask(view.q, of_queries)
        for operand in (*view.keys, *view.projections):
            self._ask(operand, of_keys)
        for read in (n for e in view.program.expressions for n in E.reads(e)):
            value, needed = view.reads[read.value], None
            own = None if value in self.masks else self._own(value)
            if own is not None and read.args[own.row] is _B:
                index = read.args[own.token]
                needed = own if (index is _Q and of_queries) or (index is _K and of_keys) else None
            self._ask(value, needed)

    # --- what is computed of real tokens alone ---

    def _operands(self, node: fx.Node) -> dict[fx.Node, Layout | None] | None:
        """Of a node that can be computed of some tokens alone, where its operands have the tokens: None of
        what has none. (Of what is spread over them it is where the result has them.)"""
        layout = self.need.get(node)
        if layout is None or not layout.is_first or node.op != "call_function" or is_part(node):
            return None
        if nodes.view(node) is not None or node in self.as_it_is or is_random(node.target, node.args):
            return None
        element, at = self._element(node, layout)
        if element is None or self._counts(reached([element], lambda n: () if n.op == "read" else n.args)):
            return None
        found: dict[fx.Node, Layout | None] = {}
        for operand in (n for n in node.all_input_nodes if not is_size(n)):
            reads = [n for n in E.reads(element) if n.value is operand]
            layouts = set(map(self._layout, reads))
            if len(layouts) == 1 and (own := next(iter(layouts))) is not None and own.is_first:
                found[operand] = own
            elif not self._counts(n for read in reads for i in read.args for n in E.walk(i)):
                found[operand] = None
            elif all(self._is_spread(read, node, at) for read in reads) and len(layout.dims) == 2:
                found[operand] = layout
            else:
                return None
        return found if any(found.values()) else None

    def _is_spread(self, read: Expr, node: fx.Node, at: Sequence[Expr]) -> bool:
        """Whether what is read is broadcast to a node."""
        of, to = zip(read.args, self._shape(read.value), strict=True), zip(at, self._shape(node), strict=True)
        pairs = zip(list(of)[::-1], list(to)[::-1], strict=False)
        return all(own == wanted or E.is_const(own[1], 1) for own, wanted in pairs)

    def _counts(self, parts: Iterator[Expr]) -> bool:
        """Whether a formula has the row, the token, or how many there are, as numbers."""
        return not {self.row, self.token, self.rows, self.tokens}.isdisjoint({*parts} - {E.ZERO})

    def _pack(self, able: Mapping[fx.Node, Mapping[fx.Node, Layout | None]]) -> None:
        places, count = self._places()
        given: dict[fx.Node, fx.Node] = {}
        for node, operands in able.items():
            layout = self.need[node]
            assert layout is not None
            builder, made = Builder(self.graph, node), dict[fx.Node, fx.Node]()
            for value, of in operands.items():
                if of is not None and value not in self.packed and value not in given:
                    whole = self._spread(builder, value, node, of)
                    given[value] = builder.call(packed, whole, places, of.text, *self.sizes)
                made[value] = value if of is None else self.packed.get(value) or given[value]
            again = self._again(node, layout, made, count)
            if again is not None:
                self.packed[node] = again
        for node, few in self.packed.items():
            others = [user for user in node.users if user not in self.packed and not is_size(user)]
            if others:
                layout = self.need[node]
                assert layout is not None
                whole = Builder(self.graph, node).call(unpacked, few, places, layout.text, *self.sizes)
                for user in others:
                    user.replace_input_with(node, whole)
        sort(self.graph.graph)
        self.graph.clean()

    def _spread(self, builder: Builder, value: fx.Node, user: fx.Node, layout: Layout) -> fx.Node:
        """An operand of a pointwise operation with all the dimensions of rows and tokens."""
        shape, rank = self._shape(value), len(self._shape(user))
        if all(n in shape for n in (self.rows, self.tokens)) or len(layout.dims) == 1:
            return value
        sizes = [E.ONE] * (rank - len(shape)) + list(shape)
        sizes[layout.row], sizes[layout.token] = self.rows, self.tokens
        wanted = [
            builder.size(n, dict(zip((self.rows, self.tokens), self.sizes, strict=True))) for n in sizes
        ]
        return builder.trace(lambda x: x.expand(wanted), value)  # type: ignore[no-any-return]

    def _again(
        self, node: fx.Node, layout: Layout, operands: Mapping[fx.Node, fx.Node], count: fx.Node
    ) -> fx.Node | None:
        """The node on some tokens; None where it asks for how many there are."""
        builder, moves = Builder(self.graph, node), self._moves_alone(node, layout)
        extents = [count] if len(layout.dims) == 1 else [1, count]
        shape = [*extents, *node.meta["val"].shape[len(extents) :]]
        wanted = [n.meta["val"] if isinstance(n, fx.Node) else n for n in shape]

        def operand(value: Any) -> Any:
            if isinstance(value, (list, tuple)) and node.target in _TAKES_A_SHAPE:
                return [*extents, *map(operand, value[len(extents) :])]
            if isinstance(value, (list, tuple)):
                return [operand(v) for v in value]
            if not isinstance(value, fx.Node) or value in operands:
                return operands.get(value, value) if isinstance(value, fx.Node) else value
            if self._counts(E.walk(self.meaning.renamed(size_expression(value.meta["val"])))):
                raise NoSize
            return value

        try:
            if moves:
                (few,) = (n for n in operands.values())
                same = list(map(str, few.meta["val"].shape)) == list(map(str, wanted))
                made = few if same else builder.trace(lambda x, shape: x.reshape(shape), few, shape)
            else:
                kwargs = {name: operand(value) for name, value in node.kwargs.items()}
                made = builder.call(node.target, *map(operand, node.args), **kwargs)
        except (NoSize, RuntimeError):
            builder.discard()
            return None
        if list(map(str, made.meta["val"].shape)) == list(map(str, wanted)):
            return made  # type: ignore[no-any-return]
        builder.discard()
        return None

    def _moves_alone(self, node: fx.Node, layout: Layout) -> bool:
        """Whether a node does no more than to lay rows and tokens out in another way."""
        element, at = self._element(node, layout)
        of = self._layout(element) if element is not None and element.op == "read" else None
        if element is None or of is None or sum(not is_size(n) for n in node.all_input_nodes) > 1:
            return False
        both = (element.args, of, self._shape(element.value)), (at, layout, self._shape(node))
        rest = [[(i, shape[d]) for d, i in enumerate(at) if d not in way.dims] for at, way, shape in both]
        return rest[0] == rest[1]

    def _places(self) -> tuple[fx.Node, fx.Node]:
        """The places of the real tokens, and how many they are."""
        last = next(n for n in reversed(self.graph.graph.nodes) if n in self.masks or n.op == "placeholder")
        builder = Builder(self.graph, last.next)
        self.sizes = [builder.size(n) for n in (self.rows, self.tokens)]
        mask = _Mask(builder, self.sizes, last.meta["val"].device).value(self.real)
        mask = builder.trace(lambda m, sizes: m.expand(sizes), mask, self.sizes)
        places = builder.call(real_tokens, mask, [builder.size(n) for n in self.always])
        return places, builder.trace(lambda p: p.size(0), places)


class _Mask(Writer):
    """Writes a predicate of rows and tokens, of which there are `sizes`, as a tensor."""

    def __init__(self, builder: Builder, sizes: Sequence[Any], device: torch.device) -> None:
        super().__init__(builder, 2, torch.float32, device)
        self.sizes = sizes

    def index(self, variable: Expr) -> fx.Node:
        dim = (_B, _K).index(variable)
        return self.along(self.builder.call(aten.arange.default, self.sizes[dim], device=self.device), dim)

    def read(self, node: Expr) -> fx.Node:
        indices = [self.as_tensor(self.value(place), []) for place in node.args]
        return self.builder.call(aten.index.Tensor, node.value, indices)
