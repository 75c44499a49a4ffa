"""Learned values before the first token (soft prompts, prefixes of keys, memory and register tokens).

A model that puts c values before those of its n tokens computes with n + c places from there on. Its graph
becomes one of places: tokens are given for the learned places too, whatever they are, and where the model
puts a learned value before those of tokens, the place chooses (`where(place < c, learned, of_token)`). What
the model computes of tokens alone is computed for the learned places as well, and is read by nothing. So such
a model is an ordinary one whose rows begin with c tokens that nobody gives (`runtime/step.py`).

Nothing is proved here: `api/derive.py` compares what was derived with the model itself, and takes the graph
of tokens where this one does not serve.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph import ProgramGraph, argument, infer, is_size
from attngraph.ir.graph.body import symbols_of
from attngraph.ir.language import E, Expr
from attngraph.ir.ops import nodes
from attngraph.meaning import M, Meaning, is_part, size_expression, tried
from attngraph.meaning.tokens import opaque
from attngraph.passes.build import Builder, NoSize
from attngraph.passes.insert_kv_cache.write_formula import NotWritten, Writer

aten = torch.ops.aten
_VIEWS = frozenset({
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.expand.default, aten.alias.default,
    aten.permute.default, aten.transpose.int, aten._to_copy.default, aten.slice.Tensor, aten.cat.default,
})  # fmt: skip
"""Operations that move elements, or convert them."""


class _NotOfPlaces(Exception):
    """The graph cannot be written as one of places."""


def learned_places(graph: ProgramGraph, length: str) -> int:
    """How many keys more than tokens the attentions of a fused graph have; 0 if these are not one number.
    `length`: the symbol of the number of tokens."""
    tokens = E.size(length)
    views = (nodes.whole(node) for node in graph.attentions())
    keys = {size_expression(v.k.meta["val"].shape[2]) for v in views if isinstance(v, nodes.Attention)}
    more = {M.sub(n, tokens) for n in keys if tokens in n.free or tokens in set(E.walk(n))}
    found = more.pop() if len(more) == 1 else E.ZERO
    return int(found.value) if found.op == "const" and int(found.value) > 0 else 0


def of_places(captured: ProgramGraph, length: str, count: int) -> tuple[ProgramGraph, dict[str, Any]] | None:
    """The captured graph as one of places, `count` learned ones first, and the new symbol of each of its
    sizes, by its name; that of `length` counts places. None: the model puts its values elsewhere, or does
    something else with them."""
    graph = captured.copy()
    rewriting = _Rewriting(captured, graph, length, count)
    try:
        rewriting.run()
    except (_NotOfPlaces, NoSize, RuntimeError):
        return None
    new = {old: size.node.expr for old, size in rewriting.symbols.items()}
    sizes = {old: formula - count if old == length else formula for old, formula in new.items()}
    told = (c.xreplace({s: sizes[str(s)] for s in c.free_symbols}) for c in graph.conditions)
    graph.conditions = tuple(told)
    hints = {**graph.hints, length: graph.hints[length] + count}
    graph.hints = {str(new[old]): hint for old, hint in hints.items()}
    graph.clean()
    return graph, new


class _Rewriting:
    """One rewriting, of `graph`, which is a copy of the captured one."""

    def __init__(self, captured: ProgramGraph, graph: ProgramGraph, length: str, count: int) -> None:
        self.graph, self.count = graph, count
        self.meaning = Meaning.of(captured)
        self.captured = dict(zip(graph.graph.nodes, captured.graph.nodes, strict=True))
        self.old, self.places = E.size(length), M.add(E.size(length), E.const(count))
        """How many tokens and places the captured graph has, in its sizes."""
        self.shapes = {n: self._shape(n) for n in graph.graph.nodes}
        self.of_tokens: set[fx.Node] = set()
        """Values that follow from tokens."""
        self._sizes: dict[tuple[Any, bool], Any] = {}
        self._padded: dict[fx.Node, fx.Node] = {}
        self._alone: dict[fx.Node, fx.Node] = {}
        self.joined = 0
        self.mode, self.symbols = symbols_of({**graph.hints, length: graph.hints[length] + count})
        new = {E.size(old): size_expression(size) for old, size in self.symbols.items()}
        self.places_now = new[self.old]
        self.now = {**new, self.old: M.sub(self.places_now, E.const(count))}
        """The captured graph's sizes in those of the new one, for what does not follow from tokens."""
        self.of_places = {**self.now, self.old: self.places_now, self.places: self.places_now}
        """The same for what does: the number of tokens is that of the places."""

    def _shape(self, node: fx.Node) -> tuple[Any, ...]:
        value = node.meta.get("val")
        return tuple(map(size_expression, value.shape)) if isinstance(value, Tensor) else ()

    def run(self) -> None:
        for node, given in self.graph.given().items():
            self._placeholder(node)
            if given.kind == "argument" and self.old in self.shapes[node]:
                self.of_tokens.add(node)
        body = [n for n in self.graph.graph.nodes if n.op == "call_function"]
        self.top = Builder(self.graph, body[0])
        ids = next(iter(self.of_tokens), None)
        if ids is None:
            raise _NotOfPlaces
        self.rows, self._rows_before = size_expression(ids.meta["val"].shape[0]), self.shapes[ids][0]
        self.all = self.top.call(aten.sym_size.int, ids, self.shapes[ids].index(self.old))
        for node in body:
            if not is_size(node):
                self._node(node)
        if not self.joined:
            raise _NotOfPlaces

    def _placeholder(self, node: fx.Node) -> None:
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            raise _NotOfPlaces
        shape = [self._extent(n) for n in value.shape]
        is_given = any(isinstance(n, torch.SymInt) for n in shape)
        with self.mode:
            made = (
                torch.empty(shape, dtype=value.dtype, device=value.device)
                if is_given
                else torch.empty_strided(shape, value.stride(), dtype=value.dtype, device=value.device)
            )
        node.meta["val"] = made

    def _extent(self, extent: Any) -> Any:
        if isinstance(extent, int):
            return extent
        formula = extent.node.expr
        if formula.is_number:
            return int(formula)
        if str(formula) not in self.symbols:
            raise _NotOfPlaces
        return self.symbols[str(formula)]

    def _node(self, node: fx.Node) -> None:
        operands = [n for n in node.all_input_nodes if not is_size(n)]
        if not self.of_tokens.isdisjoint(operands):
            self.of_tokens.add(node)
            if node.target is aten.cat.default and self._join(node):
                return
            if node.target is aten.slice.Tensor and self._leave_out(node):
                return
            self._require_own(node, operands)
            for other in operands:
                if other not in self.of_tokens and self.old in self.shapes[other]:
                    node.replace_input_with(other, self._pad(other, node))
        sizes = [n for n in node.all_input_nodes if is_size(n)]
        readings = (True, False) if sizes and node in self.of_tokens else (node in self.of_tokens,)
        args, kwargs = node.args, node.kwargs
        for of_tokens in readings:
            made = {size: self._size(size, of_tokens) for size in sizes}
            node.args, node.kwargs = fx.map_arg((args, kwargs), lambda n: made.get(n, n))  # noqa: B023
            try:
                node.meta["val"] = infer(node.target, node.args, dict(node.kwargs), self.mode)
                return self._require(node, node.meta["val"], node in self.of_tokens)
            except (_NotOfPlaces, RuntimeError):
                if of_tokens is readings[-1]:
                    raise
        return None

    def _now(self, size: fx.Node) -> Any:
        """A size in the new graph that counts the tokens' places, as one that counts all."""
        formula = size_expression(size.meta["val"])
        return self.top.size(_with(formula, {self.now[self.old]: self.places_now}))

    def _require_own(self, node: fx.Node, operands: Sequence[fx.Node]) -> None:
        """That of what is computed of tokens alone an element of a token reads that of its own: the learned
        places have what follows from tokens that nobody gave."""
        own = {self.captured[n]: self._counts(self.shapes[n]) for n in operands if n in self.of_tokens}
        own = {n: dims for n, dims in own.items() if dims}
        if not own or is_part(node):
            return
        for result in (self.captured[n] for n in [n for n in node.users if is_part(n)] or [node]):
            at = tuple(E.var(f"place {d}", extent) for d, extent in enumerate(self._shape(result)))
            element = tried(self.meaning.element, result, at)
            element = tried(opaque.element, self.meaning, result, at) if element is None else element
            dims = self._counts(self._shape(result))
            if element is None or len(dims) != 1:
                raise _NotOfPlaces
            token = self._token(at[dims[0]])
            reads = [n for n in E.reads(element) if n.value in own]
            if any(self._token(n.args[dim]) is not token for n in reads for dim in own[n.value]):
                raise _NotOfPlaces

    def _counts(self, shape: Sequence[Expr]) -> list[int]:
        """The dimensions that hold tokens, alone or behind rows, in the captured graph."""
        behind = self.old, M.mul(self._rows_before, self.old)
        return [d for d, extent in enumerate(shape) if extent in behind]

    def _token(self, place: Expr) -> Expr:
        """The token at a place of such a dimension."""
        return M.mod(place, self.old)

    def _size(self, node: fx.Node, of_tokens: bool) -> Any:
        """A size in the new graph."""
        formula = size_expression(node.meta["val"])
        if (formula, of_tokens) not in self._sizes:
            made = self.top.size(_with(formula, self.of_places if of_tokens else self.now))
            if not isinstance(made, fx.Node):
                raise _NotOfPlaces
            self._sizes[formula, of_tokens] = made
        return self._sizes[formula, of_tokens]

    def _require(self, node: fx.Node, value: Any, of_tokens: bool) -> None:
        """That a value of tokens has as many places as there are, in the dimension of either; and others what
        they had."""
        if not isinstance(value, Tensor):
            return
        for extent, before in zip(map(size_expression, value.shape), self.shapes[node], strict=True):
            one = _with(before, self.of_places if of_tokens else self.now)
            of_both = of_tokens and before not in self.of_places
            if extent is not one and not (of_both and extent is _with(before, self.now)):
                raise _NotOfPlaces

    def _join(self, node: fx.Node) -> bool:
        """Learned values before those of tokens: each place has the one or the other."""
        parts, dim = list(node.args[0]), int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
        dim %= len(self.shapes[node])
        *before, last = parts
        joins = last in self.of_tokens and self.of_tokens.isdisjoint(before)
        if not joins or self.shapes[last][dim] is not self.old or self.shapes[node][dim] is not self.places:
            return False
        dtype, build = node.meta["val"].dtype, Builder(self.graph, node)
        made = build.side_by_side([self._of_one_row(n) for n in before], dim)
        place = build.call(aten.arange.default, self.all, device=node.meta["val"].device)
        own = build.call(aten.clamp.default, place, None, self.count - 1)
        learned = build.to(build.call(aten.index_select.default, made, dim, own), dtype)
        is_learned = build.call(aten.lt.Scalar, place, self.count)
        is_learned = build.unsqueezed(is_learned, *range(1, len(self.shapes[node]) - dim))
        self._replace(node, build.call(aten.where.self, is_learned, learned, build.to(last, dtype)))
        self.joined += 1
        return True

    def _of_one_row(self, value: fx.Node) -> fx.Node:
        """A learned value that is repeated for each sequence, for one; itself if it is not, or is given."""
        extents = map(size_expression, getattr(value.meta["val"], "shape", ()))
        if value.op != "call_function" or not any(self.rows in set(E.walk(n)) for n in extents):
            return value
        if value not in self._alone:
            build, made = Builder(self.graph, value), dict[fx.Node, Any]()
            for n in value.all_input_nodes:
                if is_size(n):
                    made[n] = self.top.size(_with(size_expression(n.meta["val"]), {self.rows: E.ONE}))
                else:
                    made[n] = self._of_one_row(n)
            self._alone[value] = build.again(value, lambda n: made[n])
        return self._alone[value]

    def _leave_out(self, node: fx.Node) -> bool:
        """The values of tokens alone: those of the learned places stay, and are read by nothing."""
        source, dim, start = (argument(node, name) for name in ("self", "dim", "start"))
        dim %= len(self.shapes[node])
        of_places = source in self.of_tokens and self.shapes[source][dim] is self.places
        if not of_places or self.shapes[node][dim] is not self.old:
            return False
        begin = size_expression(start.meta["val"]) if isinstance(start, fx.Node) else E.const(start or 0)
        if begin is not E.const(self.count):
            raise _NotOfPlaces  # the first tokens of a sequence, which are other places
        self._replace(node, Builder(self.graph, node).call(aten.alias.default, source))
        return True

    def _replace(self, node: fx.Node, made: fx.Node) -> None:
        self._require(node, made.meta["val"], True)
        self.of_tokens.add(made)
        self.shapes[made], self.captured[made] = self.shapes[node], self.captured[node]
        node.replace_all_uses_with(made)

    def _pad(self, value: fx.Node, user: fx.Node) -> fx.Node:
        """A value of the tokens' places, at all places, before `user`. At the learned ones it is anything:
        it is what its formula gives for places before the first, so that masks hide later places there, too;
        else what the first token has."""
        if self.old not in self.shapes[value]:
            return value
        if value not in self._padded:
            build = Builder(self.graph, user)
            place = build.call(aten.arange.default, self.all, device=value.meta["val"].device)
            own = build.call(aten.sub.Tensor, place, self.count)
            made: fx.Node | None
            if value.target is aten.arange.default and len(value.args) == 1:
                made = build.to(own, value.meta["val"].dtype)
            else:
                made = self._extended(value, user)
            if made is None:
                made, first = value, build.call(aten.clamp.default, own, 0)
                for dim, extent in enumerate(self.shapes[value]):
                    if extent is self.old:
                        made = build.call(aten.index_select.default, made, dim, first)
            self._padded[value] = made
        return self._padded[value]

    def _extended(self, value: fx.Node, user: fx.Node) -> fx.Node | None:
        """The same at all places: by its own operation where that looks at no other place, and of numbers and
        conditions that are exact by their formula; None where neither is known."""
        build = Builder(self.graph, user)
        if value.target not in _VIEWS and torch.Tag.pointwise not in getattr(value.target, "tags", ()):
            return self._by_formula(value, build)
        now = {n: self._now(n) if is_size(n) else self._pad(n, user) for n in value.all_input_nodes}
        try:
            made = build.again(value, now.__getitem__)
            self.shapes[made] = self.shapes[value]
            self._require(made, made.meta["val"], True)
        except (_NotOfPlaces, RuntimeError):
            return self._by_formula(value, build)
        return made

    def _by_formula(self, value: fx.Node, build: Builder) -> fx.Node | None:
        at = tuple(E.var(f"place {dim}", extent) for dim, extent in enumerate(self.shapes[value]))
        node = self.captured.get(value)
        element = node and tried(lambda: self.meaning.lift(self.meaning.read(node, at), lambda _: True))
        floats = (n for n in E.walk(element or E.ZERO) if n.kind == "float")
        if not element or any(n.op not in ("const", "where") for n in floats):
            return None
        vectors = []
        for extent in self.shapes[value]:
            vector = build.call(aten.arange.default, self._count(extent), device=value.meta["val"].device)
            vectors.append(build.call(aten.sub.Tensor, vector, self.count) if extent is self.old else vector)
        dtype = value.meta["val"].dtype
        try:
            writer = _AtPlaces(build, at, vectors, dtype, value.meta["val"].device)
            made = writer.as_tensor(writer.value(M.substitute(element, self.now)), ())
        except NotWritten:
            return None
        extents = [self._count(extent) for extent in self.shapes[value]]
        return build.call(aten.expand.default, build.to(made, dtype), extents)

    def _count(self, extent: Expr) -> Any:
        """How many entries a dimension has at all places."""
        return self.top.size(_with(extent, self.of_places))


class _AtPlaces(Writer):
    """Writes a formula of the places along a value's dimensions, which are `vectors`."""

    def __init__(
        self, builder: Builder, at: Sequence[Expr], vectors: Sequence[fx.Node], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(builder, len(at), dtype, device)
        self.vectors = dict(zip(at, vectors, strict=True))

    def index(self, variable: Expr) -> fx.Node:
        if variable not in self.vectors:
            raise NotWritten(f"{variable!r}")
        return self.along(self.vectors[variable], [*self.vectors].index(variable))

    def read(self, node: Expr) -> fx.Node:
        raise NotWritten(f"{node!r}")


def _with(formula: Expr, sizes: Mapping[Expr, Expr]) -> Expr:
    """A formula with other sizes in the place of these, which may be sums."""
    return sizes[formula] if formula in sizes else M.substitute(formula, sizes)
