"""Expressions of the score language as C.

A tile is a loop over queries `q` around a loop over keys `k`, both counted from the tile's corner by
`i` and `j`. Values that do not depend on the key are computed once per row or per tile; values that
depend on the key alone are computed first, into an array.
"""

import math
import struct

import torch

from attngraph.codegen.remarks import UnsupportedError
from attngraph.codegen.scalar.form import Lowering, Place, Scalar, joined
from attngraph.codegen.scalar.writer import ATOM
from attngraph.codegen.scalar.writer import Writer as Common
from attngraph.ir.dtypes import DTYPES
from attngraph.ir.language import E, Expr, Operation, S

GROUP, TILE, INNER = Place.GROUP, Place.TILE, Place.INNER
_TYPES = {"bool": "int", "int": "int", "long": "int64_t", "float": "float"}
"""How values of each kind are held."""
_CHEAP = frozenset({"var", "const", "add", "sub", "neg", "and", "or", "not"}) | E.COMPARISONS
_KEY = S.index("k")


class Writer(Common):
    """Writes the formulas of one function over a tile. `lines[place]` are the lines to compute at each
    place; `numbers` the expressions of sizes whose values a call must pass, with their kinds; `divisors`
    those of them that must be positive."""

    zero = "0.0f"
    choice = "({} ? {} : {})"
    prefix = "t"

    def __init__(
        self, dtypes: tuple[torch.dtype, ...], numbers: dict[Expr, str], divisors: set[Expr]
    ) -> None:
        super().__init__(Lowering(self._kind_of_read, brings_numbers=True))
        self.dtypes, self.numbers, self.divisors = dtypes, numbers, divisors
        self.lines: dict[Place, list[str]] = {place: [] for place in Place}
        self._count = 0

    def line(self, code: str) -> None:
        self.lines[INNER].append(f"{code};")

    def declare(self, name: str, code: str, is_truth: bool = False) -> None:
        self.line(f"{'int' if is_truth else 'float'} {name} = {code}")

    def leaf(self, value: Scalar) -> tuple[str, int]:
        node = value.source
        if value.op == "name":
            code = str(node.value or node.op)
        elif value.op == "number":
            self.numbers.setdefault(node, value.kind)
            place = list(self.numbers).index(node)
            code = f"c->real[{place}]" if value.kind == "float" else f"(int)c->whole[{place}]"
        elif value.kind == "float":
            code = number_literal(node)
        elif value.kind == "long":
            code = f"INT64_C({node.value!r})"
        else:
            code = f"({node.value!r})" if node.value < 0 else str(int(node.value))
        return code, ATOM

    def cast(self, value: Scalar) -> tuple[str, int]:
        (arg,) = value.args
        if value.kind == "float" and arg.op == "const":
            return number_literal(arg.source), ATOM
        held = _TYPES[value.kind]
        return self.code(arg) if held == _TYPES[arg.kind] else f"(({held}){self.code(arg)})", ATOM

    def spelling(self, row: Operation, is_whole: bool) -> str:
        return row.c if isinstance(row.c, str) else row.c[is_whole]

    def spell(self, value: Scalar) -> tuple[str, int]:
        if value.op in ("floordiv", "mod", "quotient", "remainder") and value.is_whole:
            divisor = value.args[1].args[0] if value.args[1].op == "cast" else value.args[1]
            if divisor.op not in ("const", "number") or divisor.source.value in (0, -1):
                formula = E.format_expr(value.source)
                raise UnsupportedError(f"a whole division by what may be 0 or -1: `{formula}`")
            if divisor.op == "number":
                self.divisors.add(divisor.source)
        return super().spell(value)

    def is_named(self, value: Scalar) -> bool:
        if value.is_leaf or self.lower(value.source) is not value:
            return False
        if value.place is TILE:
            return any(n.op not in _CHEAP for n in E.walk(value.source))
        return value.place is not INNER or self.uses(value) > 1

    def name(self, value: Scalar, code: str) -> str:
        held = _TYPES[value.kind]
        if value.place is TILE:
            name = self._array(value, "")
            self.lines[TILE].append(f"{name} = {code};")
            return name
        name = self._fresh(self.prefix)
        self.lines[value.place].append(f"const {held} {name} = {code};")
        return name

    def atom(self, value: Scalar) -> str:
        # Given a name before the loop over rows, it would need an array.
        return self.code(value) if value.place is TILE else super().atom(value)

    def _fresh(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count - 1}"

    def _array(self, value: Scalar, start: str) -> str:
        """Declare an array over the tile's keys, and return its element for the current key."""
        name = self._fresh(self.prefix)
        self.lines[GROUP].append(f"{_TYPES[value.kind]} {name}[BLOCK_K]{start};")
        return f"{name}[j]"

    # --- reads ---

    def _kind_of_read(self, number: int) -> str:
        about = DTYPES.get(self.dtypes[number])
        if about is None or about.kind not in _TYPES:
            raise UnsupportedError(f"a read tensor of {self.dtypes[number]}")
        return about.kind

    def _elements(self, value: Scalar) -> tuple[str, str]:
        """The C type of a read tensor's elements, and the function that makes a number of one."""
        about = DTYPES[self.dtypes[value.source.value]]
        return about.c, f"from_{'float' if about.torch is torch.float32 else about.name}"

    def read(self, value: Scalar) -> str:
        """An element of a read tensor. Plain indices were checked when the call began; a computed
        index is clamped to the range, and `bad` is set if it was outside."""
        held, number_from = self._elements(value)
        source = f"c->read[{value.source.value}]"
        with_key = [axis for axis, index in enumerate(value.args) if index.place & TILE]
        others = [axis for axis in range(len(value.args)) if axis not in with_key]
        fixed = [
            f"(int64_t){self._in_range(value, axis, value.args[axis].place)} * {source}.stride[{axis}]"
            for axis in others
        ]
        base = " + ".join([f"(const {held} *){source}.data", *fixed])
        if not with_key:
            return f"{number_from}(*({base}))"
        rest = _without_key(value.source.args[with_key[0]]) if len(with_key) == 1 else None
        shift = [] if rest is None else [self.lower(rest)]
        place = joined(index.place for index in (*(value.args[axis] for axis in others), *shift))
        pointer = self._fresh("p")
        self.lines[place].append(f"const {held} *const {pointer} = {base};")
        if rest is not None:
            return self._read_row(value, with_key[0], rest, place, pointer)
        inner = [
            f"{self._in_range(value, axis, value.place)} * (int){source}.stride[{axis}]" for axis in with_key
        ]
        return f"{number_from}({pointer}[{' + '.join(inner)}])"

    def _read_row(self, value: Scalar, axis: int, rest: Expr, place: Place, pointer: str) -> str:
        """Neighbouring elements for neighbouring keys: copied to an array for the tile or the row."""
        number_from, source = self._elements(value)[1], f"c->read[{value.source.value}]"
        first, name = "k0", self._array(value, " = {0}")
        if rest is not E.ZERO:
            shift = self.code(self.lower.cast(self.lower(rest), "long"))
            first = f"in_range_row(k0 + {shift}, keys, {source}.size[{axis}], &bad)"
        self.lines[place].append(
            f"COPY({name.removesuffix('[j]')}, {number_from}, {pointer} + ({first}) * "
            f"{source}.stride[{axis}], {source}.stride[{axis}], keys);"
        )
        self.names[value] = name
        return name

    def _in_range(self, value: Scalar, axis: int, place: Place) -> str:
        index = value.args[axis]
        code = self.code(index)
        if value.source.args[axis].op in ("var", "const"):
            return code
        size, name = f"(int)c->read[{value.source.value}].size[{axis}]", self._fresh("i")
        outside = f"({name} < 0) | ({name} >= {size})"
        if place & TILE:
            outside = f"({outside}) & (j < keys)"
        self.lines[place] += [
            f"const {_TYPES[index.kind]} {name} = {code};",
            f"bad |= {outside};",
            f"const int {name}_kept = {name} < 0 ? 0 : {name} >= {size} ? {size} - 1 : (int){name};",
        ]
        return f"{name}_kept"


def number_literal(node: Expr) -> str:
    """A float32 literal of a constant, rounded to nearest."""
    value = math.nan if node is E.NAN else float(node.value)
    try:
        single = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        single = math.copysign(math.inf, value)
    if not math.isfinite(single):
        return "NAN" if math.isnan(single) else "INFINITY" if single > 0 else "(-INFINITY)"
    return f"({single!r}f)" if math.copysign(1.0, single) < 0 else f"{single!r}f"


def _without_key(index: Expr) -> Expr | None:
    """What is left of an index that grows by one from each key to the next, or None if it does not."""
    if index is _KEY:
        return E.ZERO
    if index.op not in ("add", "sub"):
        return None
    left, right = index.args
    if index.op == "add" and _KEY not in left.free:
        left, right = right, left
    rest = _without_key(left) if _KEY in left.free and _KEY not in right.free else None
    return None if rest is None else E.with_args(index, (rest, right))
