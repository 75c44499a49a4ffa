"""The token program of a region: which values of a token are kept while it runs, and their formulas.

Operations that only move elements, or whose elements are used once, are computed where they are used. The
others are definitions: products, sums, and values that are used more than once or at several places.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import fx

from attngraph.ir.language import E, Expr
from attngraph.ir.language import token_program as language
from attngraph.ir.language.packed import WORD
from attngraph.ir.language.token_program import TOKEN, Definition, Given, Result, TokenProgram
from attngraph.ir.walk import reached

from attngraph.passes.fuse_token_wise.formulas import (  # isort: skip
    Formula, Formulas, name_of, packing, placed, spelled, split_product,
)  # fmt: skip


class Region:
    """The program of some nodes.

    Args:
        formulas: the formula of each node of the region.
        wanted: the nodes whose values are used elsewhere.

    Attributes:
        given: the values that the program is given, in order.
        program: the program, with a result for each wanted node.
    """

    def __init__(
        self, facts: Formulas, formulas: Mapping[fx.Node, Formula], wanted: Sequence[fx.Node]
    ) -> None:
        self.facts, self.formulas = facts, formulas
        self.given: list[fx.Node] = []
        self._definitions: list[Definition] = []
        self._of: dict[fx.Node, int] = {}
        self._inlined: dict[fx.Node, Expr] = {}
        self._made: dict[Any, int] = {}
        self._kept = _kept(formulas, wanted)
        results = [Result(self._defined(n), self._of_rows(n), name_of(n)) for n in wanted]
        self.program = self._numbered(results)

    def _of_rows(self, node: fx.Node) -> tuple[int | None, ...]:
        """The extents of a value as the program has it, None for its rows."""
        shape, place = self.facts.shape(node), self.facts.rows.of(node)
        assert shape is not None and place is not None
        return tuple(None if n is TOKEN else int(n.value) for n in place.flat(shape))

    # --- formulas ---

    def _element(self, node: fx.Node, at: Sequence[Expr]) -> Expr:
        """An element of a value, in terms of given tensors and definitions."""
        formula = self.formulas.get(node)
        if formula is None:
            if node not in self.given:
                self.given.append(node)
            return E.read(node, tuple(at), "float")
        if node in self._kept:
            own = tuple(a for a, of in zip(at, formula.at, strict=True) if of.op == "var" and of is not TOKEN)
            return E.read(("defined", self._defined(node)), own, "float")
        places = {own: index for own, index in zip(formula.at, at, strict=True) if own.op == "var"}
        if node not in self._inlined:
            self._inlined[node] = self._resolved(formula.value)
        return placed(self._inlined[node], places)

    def _resolved(self, value: Expr) -> Expr:
        def leaf(node: Expr, args: tuple[Expr, ...]) -> Expr:
            if node.op == "read" and isinstance(node.value, fx.Node):
                return self._element(node.value, args)
            if node.op in language.FOLDS:
                return self._folded(node, args[1])
            return E.with_args(node, args)

        return E.rebuild(value, leaf)

    def _folded(self, fold: Expr, body: Expr) -> Expr:
        """A fold as a definition of its own, and the element of it."""
        over = fold.args[0]
        found = split_product(body, over, self.facts.is_weight)
        if found is not None and fold.op == "sum":
            left, weight = found
            if not self._is_whole(left, (over,)):
                number = self._define((over,), left)
                left = E.read(("defined", number), (over,), "float")
            body = E.make("mul", (left, weight), None, "float")
        indices = tuple(sorted(body.free - {over, TOKEN}, key=lambda v: v.order))
        return E.read(("defined", self._define(indices, body, fold.op, over)), indices, "float")

    # --- definitions ---

    def _defined(self, node: fx.Node) -> int:
        if node not in self._of:
            formula = self.formulas[node]
            indices = tuple(a for a in formula.at if a.op == "var" and a is not TOKEN)
            self._of[node] = self._define(indices, self._resolved(formula.value))
        return self._of[node]

    def _define(
        self, indices: tuple[Expr, ...], value: Expr, fold: str = "", over: Expr | None = None
    ) -> int:
        made = tuple(language.index(f"i{n}", language.extent(index)) for n, index in enumerate(indices))
        names: dict[Expr, Expr] = dict(zip(indices, made, strict=True))
        if over is not None:
            names[over] = language.index("j", language.extent(over))
        value = placed(value, names)
        if self._is_whole(value, made) and not fold:
            number: int = value.value[1]
            return number
        definition = Definition(made, value, fold, None if over is None else names[over])
        if definition not in self._made:
            self._made[definition] = len(self._definitions)
            self._definitions.append(definition)
        return self._made[definition]

    def _is_whole(self, value: Expr, indices: tuple[Expr, ...]) -> bool:
        """Whether it is an earlier definition, all of it (and not the first of its elements)."""
        if value.op != "read" or value.args != indices or not isinstance(value.value, tuple):
            return False
        return self._definitions[value.value[1]].extents == tuple(map(language.extent, indices))

    def _numbered(self, results: Sequence[Result]) -> TokenProgram:
        """The program, its values numbered: given tensors first."""
        used = self._used(results)
        self.given = [node for node in self.given if node in used]
        places: dict[Any, int] = {node: number for number, node in enumerate(self.given)}
        order = [n for n in range(len(self._definitions)) if n in used]
        places |= {("defined", n): len(self.given) + place for place, n in enumerate(order)}

        def leaf(node: Expr, args: tuple[Expr, ...]) -> Expr:
            if node.op == "read":
                return E.read(places[node.value], args, "any")
            return E.with_args(node, args)

        definitions = [
            dataclasses.replace(made, value=spelled(E.rebuild(made.value, leaf)))
            for made in (self._definitions[number] for number in order)
        ]
        given = []
        for node in self.given:
            shape = self.facts.weight_shape(node) or ()
            own = self.facts.rows.of(node) is not None
            extents = self._of_rows(node) if own else tuple(int(n.value) for n in shape)
            packed = packing(node)
            given.append(Given(extents, name_of(node) if packed is None else WORD, packed))
        self.given = [node if packing(node) is None else node.all_input_nodes[0] for node in self.given]
        named = [Result(places["defined", r.number], r.shape, r.dtype) for r in results]
        return TokenProgram(tuple(given), tuple(definitions), tuple(named))

    def _used(self, results: Sequence[Result]) -> set[Any]:
        def read(used: Any) -> list[Any]:
            values = (n.value for n in E.reads(self._definitions[used].value)) if type(used) is int else ()
            return [value[1] if isinstance(value, tuple) else value for value in values]

        return set(reached((r.number for r in results), read))


def _kept(formulas: Mapping[fx.Node, Formula], wanted: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes whose values are definitions. Users come after what they use in the order of `formulas`.
    A sum of which only a part is used is computed whole: so it is a product with a whole weight."""
    uses: dict[fx.Node, int] = dict.fromkeys(formulas, 0)
    kept: set[fx.Node] = set()
    for node in reversed(list(formulas)):
        value = formulas[node].value
        if value.op != "read" and (uses[node] > 1 or node in wanted):
            kept.add(node)
        bound = {n.args[0] for n in E.walk(value) if n.op in language.FOLDS}
        times = 1 if node in kept or node in wanted else max(1, uses[node])
        for read in (n for n in E.reads(value) if n.value in uses):
            uses[read.value] += 2 if read.free & bound or _is_part(read, formulas[read.value]) else times
    return kept


def _is_part(read: Expr, of: Formula) -> bool:
    """Whether a sum is read at some of its places alone."""
    some = any(own.op == "var" and at.op != "var" for own, at in zip(of.at, read.args, strict=True))
    return some and any(n.op in language.FOLDS for n in E.walk(of.value))
