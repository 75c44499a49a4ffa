"""The formulas of a score program as lines of Triton, for each kind of tile that a kernel takes.

Index variables keep their names: `b` and `h` are scalars, `q` is a column `[BLOCK_Q, 1]`, `k` a row
`[1, BLOCK_K]` (or the reverse, where tiles are transposed), and everything else broadcasts as it does in
`ir/language/evaluate.py`. Each read has a line of its own, before the loop over keys if it does not depend on
the key.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import torch

from attngraph.codegen.remarks import UnsupportedError
from attngraph.codegen.scalar.form import Lowering, Place, Scalar
from attngraph.codegen.scalar.read_gradients import ReadGradient
from attngraph.codegen.scalar.read_ranges import follows_from_data
from attngraph.codegen.scalar.weights import Multiple, weight_multiple
from attngraph.codegen.scalar.writer import ATOM, COMPARE, PRODUCT, SIGN, SUM, Chain, use_score
from attngraph.codegen.scalar.writer import Writer as Common
from attngraph.codegen.triton import fold
from attngraph.codegen.triton.fold import NOTHING
from attngraph.codegen.triton.plan import Plan, is_checked_at_launch
from attngraph.ir.language import E, Expr, Operation, S
from attngraph.ir.language.derivative import derivative
from attngraph.ir.language.score import DOT, SCORE, Keep, Score, formulas

_TYPES = {"int": "tl.int32", "long": "tl.int64", "float": "tl.float32", "double": "tl.float64"}
_READS = {"bool": "bool", "int": "long", "half": "float", "float": "float", "double": "double"}
"""The kind in which elements of a read are computed with."""
_MEETING = E.COMPARISONS | {
    "add", "sub", "mul", "min", "max", "where", "quotient", "remainder", "floordiv", "mod",
}  # fmt: skip
"""Operations in which Triton converts the narrower operand; the last two only for integers."""


class Writer(Common):
    """Writes the formulas of one kernel. `before` collects lines that come before the loop over
    keys, `inside` those of the current loop body, `calls` the functions used of `kernels/functions.py`."""

    binds: Mapping[str, int] = {
        "or": 2, "and": 4, "add": SUM, "sub": SUM, "mul": PRODUCT, "div": PRODUCT, "quotient": PRODUCT,
        "remainder": PRODUCT, "neg": SIGN, "not": SIGN, **dict.fromkeys(E.COMPARISONS, COMPARE),
    }  # fmt: skip

    choice = "tl.where({}, {}, {})"

    def __init__(self, plan: Plan, blank: str) -> None:
        """`blank`: a tile of zeros."""
        self.plan, self.blank = plan, blank
        self.reads = {read.number: read for read in plan.reads}
        index = "long" if plan.wide else "int"
        super().__init__(Lowering(lambda n: _READS[self.reads[n].kind], index, powers_by_exp2=True))
        self.before: list[str] = []
        self.inside: list[str] = []
        self.calls: set[str] = set()
        self._labels: dict[Scalar, str] = {}

    def begin_body(self) -> None:
        self.inside = []
        self.names = {v: code for v, code in self.names.items() if not v.place & Place.TILE}

    def forget(self) -> None:
        """Start another kernel, without lines or names."""
        self.inside, self.before, self.names = [], [], {}

    def line(self, code: str) -> None:
        self.inside.append(code)

    def declare(self, name: str, code: str, is_truth: bool = False) -> None:
        self.line(f"{name} = {code}")

    def score(self, formula: Expr) -> str:
        """A formula as a tile of scores."""
        code = self.real(formula)
        return code if use_score(formula) else f"{self.blank} + {code}"

    def leaf(self, value: Scalar) -> tuple[str, int]:
        node = value.source
        if value.op == "name":
            if node.op == "p":
                raise UnsupportedError("the weight `p` inside this expression")
            return str(node.value or node.op), ATOM
        if value.kind == "long":
            return f"tl.cast({node.value!r}, tl.int64)", ATOM
        number = float(node.value) if value.kind == "float" else node.value
        is_finite = value.kind != "float" or math.isfinite(number)
        code = repr(number) if is_finite else f'float("{number!r}")'
        return code, SIGN if code.startswith("-") else ATOM

    def cast(self, value: Scalar) -> tuple[str, int]:
        (arg,) = value.args
        if arg.op == "const" and value.kind == "float":
            return self.leaf(Scalar("const", (), "float", value.place, arg.source))
        return f"tl.cast({self.code(arg)}, {_TYPES[value.kind]})", ATOM

    def operand(self, parent: Scalar, value: Scalar, level: int) -> str:
        """An operand's source, without a cast that Triton's operation makes by itself."""
        own = [self.lower(a.source) is a for a in parent.args[parent.op == "where" :]]
        meets = parent.op in _MEETING and (parent.is_whole or parent.op not in ("floordiv", "mod"))
        if value.op == "cast" and self.lower(value.source) is not value and value.args[0].kind != "bool":
            value = value.args[0] if parent.op == "div" or (meets and any(own)) else value
        return self.code(value, level)

    def spell(self, value: Scalar) -> tuple[str, int]:
        truths = [a.op == "cast" and a.args[0].kind == "bool" for a in value.args]
        if value.op in ("add", "sub", "mul") and all(truths):
            formula = E.format_expr(value.source)
            raise UnsupportedError(f"arithmetic of two truth values: `{formula}`")
        return super().spell(value)

    def spelling(self, row: Operation, is_whole: bool) -> str:
        found = row.triton if isinstance(row.triton, str) else row.triton[is_whole]
        if row.triton_half and self.plan.dtype is not torch.float32:
            found = row.triton_half
        known = fold.read("functions.py").functions
        self.calls |= known.keys() & set(re.findall(r"(?<![.\w])\w+(?=\()", found))
        return found

    def is_named(self, value: Scalar) -> bool:
        return value.op == "read" or (not value.is_leaf and self.uses(value) > 1)

    def name(self, value: Scalar, code: str) -> str:
        """Write a line before the loop over keys, or inside it. A value keeps its name in another body."""
        if value not in self._labels:
            self._label(value, f"r{value.source.value}_at" if value.op == "read" else "t")
        label = self._labels[value]
        (self.inside if value.place & Place.TILE else self.before).append(f"{label} = {code}")
        return label

    def _label(self, value: Scalar, prefix: str) -> None:
        taken = sum(label.rstrip("0123456789") == prefix for label in self._labels.values())
        self._labels.setdefault(value, f"{prefix}{taken}")

    def read(self, value: Scalar) -> str:
        """A masked load: nothing is loaded for an index out of range. One that follows from positions is out
        of range only where the value is not used (`read_ranges.py`); for one that follows from data the value
        is NaN, so that the result shows it."""
        read = self.reads[value.source.value]
        name = f"r{read.number}"
        address, inside, other = [name], [], "0"
        for axis, (node, index) in enumerate(zip(value.source.args, value.args, strict=True)):
            if node.op == "const" and node.value < 0:
                raise UnsupportedError(f"a negative index: `{E.format_expr(value.source)}`")
            if not index.is_leaf and index.op != "read":
                self._label(index, "i")
            code = self.atom(index)
            if node.op not in ("var", "const") and self.lower.bounds(node)[0] < 0:
                inside.append(f"({code} >= 0)")
            place = f"tl.cast({code}, tl.int64)" if read.wide else code
            address.append(f"{place} * {name}_stride{axis}")
            if follows_from_data(node):
                other = 'float("nan")' if read.kind in ("half", "float", "double") else other
            if not is_checked_at_launch(node):
                inside.append(f"({code} < {name}_size{axis})")
        mask = f", mask={' & '.join(inside)}, other={other}" if inside else ""
        load = f"tl.load({' + '.join(address)}{mask})"
        wider = {"int": f"tl.cast({load}, tl.int64)", "half": f"tl.cast({load}, tl.float32)"}
        return f"{load} != 0" if read.kind == "bool" else wider.get(read.kind, load)


@dataclasses.dataclass(frozen=True)
class Tile:
    """The formulas of a tile of scores.

    Attributes:
        scores: lines that make scores of dots. multiple: the factor by which the program changes weights.
        uses_dot: whether formulas mention the dot; uses_both: beside the score.
    """

    is_edge: bool
    scores: Sequence[str]
    multiple: str
    uses_k: bool = True
    uses_dot: bool = True
    uses_both: bool = True


@dataclasses.dataclass(frozen=True)
class GradientTile(Tile):
    """A tile of which gradients are computed, too.

    Attributes:
    within: where the tile is cut off, by the causal mask too if it has a comparison for that ("": nowhere).
        turned: keys are the rows of the tile. gradients: lines that make gradients of dots and reads of those
        of scores. reaches_dot: some reach the dot directly. cut_off: names of what is zero outside.
        before: lines that the tile needs for its rows alone.
    """

    within: str = ""
    turned: bool = False
    gradients: Sequence[str] = ()
    reaches_dot: bool = False
    cut_off: Sequence[str] = ()
    before: Sequence[str] = ()


class Formulas:
    """Writes the formulas of one module. Names of values are given in the order in which tiles are asked for.

    Args:
        blank: the source of a tile of zeros.
    """

    def __init__(self, plan: Plan, blank: str) -> None:
        self.plan, self.writer = plan, Writer(plan, blank)
        self.change: Multiple = weight_multiple(plan.program)

    @property
    def before(self) -> list[str]:
        """The lines before loops that formulas need so far."""
        return list(self.writer.before)

    def scores(self, statements: Sequence[Score | Keep]) -> list[str]:
        self.writer.begin_body()
        for statement in statements:
            self.writer.assign("s", statement)
        return list(self.writer.inside)

    def kept(self, masks: Sequence[Keep]) -> tuple[list[str], str]:
        """Which pairs hard masks keep ("": all): lines of their own, and what they lead to."""
        writer = self.writer
        writer.forget()
        found = " & ".join(f"({writer.truth(mask.predicate)})" for mask in masks)
        lines = [*writer.before, *writer.inside]
        writer.forget()
        return lines, found

    def multiple(self) -> str:
        return NOTHING if self.change.is_plain else self.writer.real(self.change.factor)

    def tile(self, skipped: Sequence[object], is_edge: bool) -> Tile:
        """A tile without the masks `skipped`."""
        statements = [s for s in self.plan.statements if s not in skipped]
        self.scores(statements)
        multiple = self.multiple()  # whose lines are among those of the scores
        shown = [p for s in statements for p in formulas(s)] + [self.change.factor]
        uses_k = any(S.index("k") in formula.free for formula in shown)
        mentions = any(_mentions(s, DOT) for s in statements)
        replaces = mentions and isinstance(statements[0], Score) and not _mentions(statements[0], SCORE)
        return Tile(is_edge, tuple(self.writer.inside), multiple, uses_k, mentions, mentions and not replaces)

    def gradients(
        self, reads: Sequence[ReadGradient], skipped: Sequence[object], wanted: Sequence[int],
        within: str = "", turned: bool = False,
    ) -> GradientTile:  # fmt: skip
        """A tile with the gradients of the dot, without the scale of a linear program, and of the wanted
        reads."""
        writer = self.writer
        writer.begin_body()
        chain = Chain(writer, reads)
        statements = [(n, s) for n, s in enumerate(self.plan.statements) if s not in skipped]
        for number, statement in statements:
            chain.forward(number, statement)
        multiple = self.multiple()
        scores = tuple(writer.inside)
        writer.inside.clear()
        for number in wanted:
            chain.add(f"of_read{number}", "p * weighed", derivative(self.change.factor, reads[number].node))
        for number, statement in reversed(statements):
            chain.backward(number, statement, wanted)
        return GradientTile(
            bool(within), scores, multiple, within=within, turned=turned, gradients=tuple(writer.inside),
            reaches_dot="of_dot" in chain.written, before=self.before,
            cut_off=["ds", *sorted(chain.written - {"of_dot"})] if within else [],
        )  # fmt: skip

    def sink(self) -> str:
        """The rows' sink, in units of scores."""
        if self.plan.program.sink is None:
            return NOTHING
        unit, scale = self.writer.real(self.plan.program.sink, PRODUCT), self.plan.program.scale
        return f"{unit} / {scale!r}" if self.plan.is_linear and scale != 1 else unit

    def shift(self) -> str:
        """How many keys after its own place a query sees."""
        offset = self.plan.offset
        return NOTHING if offset is None or offset is E.ZERO else self.writer.integer(offset, PRODUCT)


def _mentions(statement: Score | Keep, name: Expr) -> bool:
    return any(n is name for formula in formulas(statement) for n in E.walk(formula))
