"""What one element of a graph value equals.

`Meaning` answers, for a node of a program graph and index expressions, the expression of that element in
terms of elements of the node's operands, by the element rules in `meaning/rules/`. `lift` repeats that
through chosen nodes. Views, layouts, operand order and broadcasting disappear on the way: they only ever
change indices.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import ProgramGraph, op_name
from attngraph.ir.kept import kept
from attngraph.ir.language import E, Expr
from attngraph.ir.walk import filled
from attngraph.meaning.algebra import M, SizeNames, is_example, ranges, size_expression
from attngraph.meaning.constants import ConstantFolding, describe
from attngraph.meaning.masks.fold import UNDERFLOWS
from attngraph.meaning.wrapping import NARROW, wrapped

from attngraph.meaning.rule import (  # isort: skip
    ELEMENTWISE, PARTS, RULES, Category, TooLong, Unliftable, UnliftableBecause, category_of, is_part,
)  # fmt: skip

Indices = tuple[Expr, ...]
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


_EXACT = {
    f"aten.{name}.{overload}": name
    for name in ("add", "sub", "mul", "div", "log", "exp", "sqrt", "abs", "neg", "pow")
    for overload in ("Tensor", "Scalar", "default", "Tensor_Scalar")
}
"""ATen operations that score programs have too, with their name there: programs can repeat them exactly."""


class Meaning:
    """The element meaning of one graph.

    Args:
        values: tensors that are known when compiling (buffers, constants), by placeholder. A
            placeholder whose values form a recognised pattern is lifted to that pattern, and is
            then listed in `assumed`: those values must not change (`of` has the graph guard them).
        conditions: sympy relations between sizes that hold; sizes that are equal by them get one name.
        complex_too: follow complex values as well, as long as they are only moved.
        along_tokens: follow convolutions over several places and running sums as well.
        numbers: sizes that are taken to be these numbers, and examples of sizes to be what they are.

    `obstacles` collects the names of sizes for which a shape could not be followed.
    `required` collects pairs of sizes that a rule took to be equal because the op demands it, where
    the trace did not say so.
    """

    def __init__(
        self, values: Mapping[fx.Node, Tensor] | None = None, conditions: Iterable[Any] = (),
        complex_too: bool = False, along_tokens: bool = False, numbers: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.numbers = {E.size(name): E.const(n) for name, n in (numbers or {}).items()}
        self._of_numbers = numbers is not None
        self.complex_too, self.along_tokens = complex_too, along_tokens
        self._names = SizeNames(conditions)
        self.values = dict(values or {})
        self._constants = ConstantFolding(self.values)
        self.assumed: set[fx.Node] = set()
        self._guarded: set[str] = set()
        self.obstacles: set[str] = set()
        self.required: set[tuple[Expr, Expr]] = set()
        self._fresh = itertools.count()
        self._elements: dict[tuple[fx.Node, Indices], Expr] = {}
        self._contracts: dict[fx.Node, bool] = {}
        self._long: set[fx.Node] = set()

    @classmethod
    def of(
        cls, graph: ProgramGraph, complex_too: bool = False, along_tokens: bool = False,
        numbers: Mapping[str, int] | None = None,
    ) -> "Meaning":  # fmt: skip
        """The meaning of a graph whose executable guards what is `assumed`."""
        found = cls(graph.known_values(), graph.conditions, complex_too, along_tokens, numbers)
        found._guarded = graph.assumed
        return found

    def rely_on(self, nodes: Iterable[fx.Node]) -> None:
        """Something was found with the values of these nodes: list those that are known in `assumed`."""
        found = {n for n in nodes if n in self.values}
        self.assumed |= found
        self._guarded |= {n.name for n in found}

    def forget_elements(self) -> None:
        """Forget what elements equal: nodes that they were computed from have been replaced."""
        self._elements.clear()

    # --- facts about nodes ---

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor)

    def kind(self, node: Any) -> str:
        dtype = node.meta["val"].dtype
        if dtype == torch.bool:
            return "bool"
        if dtype in _INTEGERS:
            return "int"
        if dtype.is_complex and self.complex_too:
            return "any"
        if not dtype.is_floating_point:
            raise Unliftable(f"values of dtype {dtype}")
        return "float"

    @kept
    def shape(self, node: Any) -> Indices:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            raise UnliftableBecause(f"{node} is no tensor")
        return tuple(self.renamed(size_expression(s)) for s in value.shape)

    def named(self, size: Expr) -> Expr:
        """The name that stands for all sizes that are equal to this one by the conditions."""
        size = self._names.of(size)
        if self._of_numbers and is_example(size):
            return E.const(int(size.value))
        return self.numbers.get(size, size)

    def renamed(self, extent: Expr) -> Expr:
        """An expression of sizes with each size replaced by `named` of it."""
        whole = self.named(extent)
        if not (self._names or self._of_numbers) or whole.op in ("size", "const"):
            return whole
        sizes = {n: self.named(n) for n in E.walk(whole) if n.op == "size"}
        return M.substitute(whole, sizes)

    def places(self, node: fx.Node) -> tuple[Indices, Indices]:
        """A variable for each dimension of a node, and the index of any one of its elements."""
        output = tuple(E.var(f"o{d}", length) for d, length in enumerate(self.shape(node)))
        return output, tuple(E.ZERO if E.is_const(v.args[0], 1) else v for v in output)

    def part_shape(self, node: fx.Node, part: int) -> Indices:
        return tuple(self.renamed(size_expression(s)) for s in node.meta["val"][part].shape)

    def category(self, node: fx.Node) -> Category | None:
        """The category of the op that computes this node; None where it has no element rule."""
        if node.op == "placeholder":
            return Category.INDEX if node in self.values else None
        found = category_of(node)
        if found is None and not is_part(node) and self._constants.writers(node) is not None:
            return Category.INDEX
        return found

    def contracts(self, node: fx.Node) -> bool:
        """Whether the node is a contraction, or is computed from one by elementwise ops alone."""

        def inputs(at: fx.Node) -> Sequence[fx.Node]:
            elementwise = self.category(at) in (Category.MOVEMENT, Category.POINTWISE)
            return at.all_input_nodes if elementwise else ()

        def contracts(at: fx.Node) -> bool:
            return self.category(at) is Category.CONTRACTION or any(self._contracts[n] for n in inputs(at))

        return filled(self._contracts, node, inputs, contracts)

    def require_equal(self, a: Expr, b: Expr) -> None:
        if a is not b:
            self.required.add((a, b))

    # --- expressions ---

    def fresh(self, extent: Expr) -> Expr:
        """A new index variable."""
        return E.var(f"bound {next(self._fresh)}", extent)

    def read(self, node: Any, at: Indices) -> Expr:
        """The element of `node` at `at`, with no rule applied. A dimension of extent 1 is read at 0."""
        shape = self.shape(node)
        places = zip(shape, at, strict=True)
        at = tuple(E.ZERO if E.is_const(extent, 1) else place for extent, place in places)
        return E.read(node, at, self.kind(node))

    def read_broadcast(self, node: Any, at: Indices) -> Expr:
        """The element of `node` that broadcasting puts at `at`."""
        if not self.is_tensor(node):
            return self.scalar(node)
        return self.read(node, at[len(at) - len(self.shape(node)) :])

    def scalar(self, value: Any) -> Expr:
        """A number, or an element of a tensor of rank 0."""
        if self.is_tensor(value):
            return self.read(value, ())
        if isinstance(value, fx.Node):
            value = value.meta.get("val")
        if isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat)):
            return self.renamed(size_expression(value))
        raise Unliftable(f"an operand of type {type(value).__name__}")

    def integer(self, value: Any) -> Expr:
        found = self.scalar(value)
        if found.kind != "int":
            raise Unliftable("a size that is no integer")
        return found

    def element(self, node: fx.Node, at: Indices) -> Expr:
        """One element of `node` by its op's rule, in terms of elements of the operands.

        Raises:
            Unliftable: the op has no rule for this use.
        """
        key = (node, at)
        if key not in self._elements:
            self._elements[key] = self._element(node, at)
        return self._elements[key]

    def _element(self, node: fx.Node, at: Indices) -> Expr:
        found = self._by_rule(node, at)
        dtype = node.meta["val"].dtype
        moved = found.op == "read" and found.value.meta["val"].dtype == dtype
        if dtype in NARROW and not moved and node.op != "placeholder":
            return wrapped(found, self.elementwise(found), torch.iinfo(dtype))
        return found

    def _by_rule(self, node: fx.Node, at: Indices) -> Expr:
        writers = self._constants.writers(node)
        if writers is None:
            return self._by_its_rule(node, at)
        if node.op != "placeholder" and len(writers) <= budgets.TABLE_OPS_BY_RULE:
            with contextlib.suppress(Unliftable):
                return self._by_its_rule(node, at)
        values = self._constants.values(node)
        found = None if values is None else describe(values, at)
        if found is not None:
            self.rely_on(self._constants.sources(node))
            return found
        if node.op == "placeholder" or len(writers) > budgets.TABLE_OPS:
            raise Unliftable("a tensor whose values follow no known pattern")
        return self._by_its_rule(node, at)

    def known(self, node: fx.Node) -> Tensor | None:
        """The values of a tensor that depends on no input, which are then taken not to change."""
        values = self._constants.values(node)
        if values is not None:
            self.rely_on(self._constants.sources(node))
        return values

    def _by_its_rule(self, node: fx.Node, at: Indices) -> Expr:
        if is_part(node):
            source: Any = node.args[0]
            if str(source.target) in PARTS:
                return PARTS[str(source.target)][1](self, source, int(node.args[1]), at)  # type: ignore[arg-type]
        elif node.op == "call_function" and str(node.target) in RULES:
            return RULES[str(node.target)].element(self, node, at)
        made_by = cast(fx.Node, node.args[0] if is_part(node) else node)
        raise UnliftableBecause(f"the operation {op_name(made_by)} is not looked into")

    def lift(
        self, node: Expr, through: Callable[[Expr], bool], into_sums: bool = True, most: int | None = None,
        done: dict[Expr, Expr | None] | None = None,
    ) -> Expr:  # fmt: skip
        """Replace every read that `through` allows by its element rule, again and again; keep the others.
        Without `into_sums`, reads below a sum are kept as well. `done`: what was found before with the same
        answers of `through`, None of what was too long; it is added to.

        Raises:
            TooLong: the result has more than `most` words, or more than `most` reads were replaced.
        """
        done = {} if done is None else done
        looked_through, too_long = 0, f"its weights are a formula of more than {most} words"

        def resolve(current: Expr) -> Expr:
            nonlocal looked_through
            known = done.get(current, current)
            if known is None:
                raise TooLong(too_long)
            if known is not current or current in done:
                return known
            if current.op == "var" or (not current.args and current.op != "read"):
                return current
            if current.op in E.BINDERS and not into_sums:
                return current
            args = tuple(resolve(a) for a in current.args)
            result = M.construct(current, args)
            if result.op == "read" and isinstance(result.value, fx.Node) and through(result):
                looked_through += 1
                try:
                    result = resolve(self.element(result.value, result.args))
                except TooLong:
                    done[current] = None
                    raise
                except Unliftable:
                    pass
            if most is not None and max(result.words, looked_through) > most:
                done[current] = None
                raise TooLong(too_long)
            done[current] = result
            return result

        return resolve(node)

    def narrowed(self, read: Expr, dtype: torch.dtype) -> Expr:
        """An element converted to `dtype`: numbers beyond its range become infinite."""
        source = read.value.meta["val"].dtype
        if not (dtype.is_floating_point and source.is_floating_point):
            return read
        limit = torch.finfo(dtype).max
        return read if torch.finfo(source).max <= limit else self._limited(read, limit)

    def exponent(self, read: Expr) -> Expr:
        """The argument of an exponential from which the model subtracts no maximum: where it is a mask's
        large negative number the exponential is exactly zero, even in a row where all keys are masked."""
        limited = self._limited(read, UNDERFLOWS)
        reductions = [n for n in E.reads(limited) if (self.category(n.value) is Category.REDUCTION)]
        return read if reductions or any(n.op in E.BINDERS for n in E.walk(limited)) else limited

    def _limited(self, read: Expr, limit: float) -> Expr:
        lifted = self.elementwise(read)
        limited = M.narrow(lifted, limit)
        return read if limited is lifted else limited

    def elementwise(self, node: Expr, most: int | None = None) -> Expr:
        """An expression in terms of contractions, reductions and data; `most` limits it as in `lift`."""
        return self.lift(node, lambda r: self.category(r.value) in ELEMENTWISE, most=most)

    def moved_from(self, node: Expr) -> Expr:
        """An expression in terms of what its elements are only moved from."""
        return self.lift(node, lambda r: self.category(r.value) is Category.MOVEMENT)

    def exactly(self, node: Any, at: Indices) -> Expr:
        """The element of a floating tensor as the model computes it, operation by operation, without
        rearranging: if it is rounded to an integer afterwards, the result may depend on the last digit."""
        if not self.is_tensor(node):
            return self.scalar(node)
        at = at[len(at) - len(self.shape(node)) :]
        category = self.category(node)
        if self.kind(node) != "float" or node.op == "placeholder":
            return self.read(node, at)
        if category is Category.MOVEMENT:
            found = self.element(node, at)
            return self.exactly(found.value, found.args) if found.op == "read" else found
        name = _EXACT.get(str(node.target))
        if category is not Category.POINTWISE or name is None or node.kwargs:
            return self.read(node, at)
        found = M.raw(name, *(self.exactly(a, at) for a in node.args))
        lifted = self.elementwise(found)
        if not lifted.free and not has_data(lifted):
            raise Unliftable("a number that the model computes in its own dtype")  # here it would be a double
        return found

    def compared(self, value: Any, at: Indices) -> Expr:
        """An operand of a comparison.

        Raises:
            Unliftable: a formula of the index that the model rounds, so that its last digit decides.
        """
        if not self.is_tensor(value):
            return self.scalar(value)
        read = self.read_broadcast(value, at)
        if read.kind == "float":
            lifted = self.elementwise(read)
            if not has_data(lifted) and not is_exact(lifted, value.meta["val"].dtype):
                raise Unliftable("a comparison of rounded numbers")
        return read

    def index_expression(self, node: Any, at: Indices) -> Expr | None:
        """The element as a formula of its index alone, or None where it depends on data, or where a formula
        of one of the node's elements is longer than `budgets.FORMULA_WORDS`."""
        if node in self._long:
            return None
        try:
            lifted = self.lift(
                self.read(node, at), lambda r: self.category(r.value) is not None, most=budgets.FORMULA_WORDS
            )
        except TooLong:
            self._long.add(node)
            return None
        return None if has_data(lifted) else lifted


def is_exact(node: Expr, dtype: torch.dtype) -> bool:
    """Whether `dtype` computes this without rounding: selections, and sums and products of integers."""
    if node.kind == "bool":
        return True
    if node.kind == "int":
        largest = 2 / torch.finfo(dtype).eps
        limits = [x for x in ranges.bounds(ranges.polynomial(node)) if x is not None and set(x) <= {()}]
        bounded = len(limits) == 2 and all(abs(x.get((), 0)) <= largest for x in limits)
        return largest >= 1 << 24 or bounded  # positions of tokens stay below 2**24
    if node.op == "const":
        return node is E.NAN or float(torch.tensor(node.value, dtype=dtype)) == node.value
    if node.op == "read":
        return True
    if node.op == "where":
        return all(is_exact(a, dtype) for a in node.args[1:])
    rounds = any(n.op == "read" and n.kind == "float" for a in node.args for n in E.walk(a))
    return node.op in ("add", "mul") and not rounds and all(is_exact(a, dtype) for a in node.args)


def has_data(node: Expr) -> bool:
    return any(n.op in ("read", "random") for n in E.walk(node))
