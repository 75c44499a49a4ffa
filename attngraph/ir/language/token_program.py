"""Token programs: what is computed from each token alone, as formulas of single elements.

    r0[1, t, 768]                               a tensor that is given; t counts the tokens
    r1[768]                                     one that all tokens share, a weight
    r1[768, 768] int8                           of another dtype; without a word, elements are float32
    r1[768, 768] int4 low first by 1            of 4 bits, in the bytes of integers (`packed.py`)
    r1[768, 768] in panels                      a weight `[out, in]` laid out for the machine's registers
    r2[] = sum[j < 768] r0[0, t, j]             a value of each token; this one is a single number
    r3[i0 < 768] = r0[0, t, i0] - r2[] / 768    one with an element for each i0
    return r3[1, t, 768]                        results, with their shapes, and with the dtype as above
    in order                                    at the end, if at all: a token's results are the same numbers,
                                                bit for bit, whatever tokens they are computed with

Values are numbered in the order in which they are given or defined; a definition reads given tensors and
earlier definitions (by its own indices alone: always for the same token). Definitions are float32, whatever
the dtypes of given tensors and results. A definition may begin with one `sum` or `amax` over an index. Each
extent is a number; only that of tokens is left open, so one program serves any number of tokens. Expressions
are those of the score language (`parser.py`).
"""

import dataclasses
import functools
import re
from typing import NamedTuple

from attngraph.ir import dtypes
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.packed import WORD, Packed
from attngraph.ir.language.parser import expression
from attngraph.ir.language.score import IN_ORDER

TOKEN = E.var("t")
"""The index of the token in given tensors and results."""
FOLDS = ("sum", "amax")
FLOATS = tuple(dtypes.DTYPES[dtype].name for dtype in dtypes.FLOATS)
"""Of results, and of given tensors that count tokens."""
DTYPES = (*FLOATS, "int8", "uint8", "int32")
"""Of given tensors."""
PANELS = "in panels"
"""Stands where a dtype may stand: float32 elements, as `ir/ops/panels.py` lays them out."""
GROUP = 16
"""So many elements of a weight's row, or a multiple, have one scale: whole vectors of every length."""
Extent = int | None
"""A number of elements; None: the number of tokens."""


@dataclasses.dataclass(frozen=True)
class Given:
    """A tensor that a program is given: its extents, and the name of its dtype. If elements are `packed`, the
    extents are those of the matrix of elements, and the tensor has them in integers of any shape and dtype.
    So are they `in_panels`, where only products read it.
    """

    shape: tuple[Extent, ...]
    dtype: str = "float32"
    packed: Packed | None = None
    in_panels: bool = False

    @property
    def word(self) -> str:
        if self.in_panels:
            return f" {PANELS}"
        return _word(self.dtype) if self.packed is None else f" {WORD} {self.packed}"

    @functools.cached_property
    def token_dim(self) -> int | None:
        """The dimension that counts the tokens; None if all tokens share the tensor."""
        return self.shape.index(None) if None in self.shape else None


@dataclasses.dataclass(frozen=True)
class Definition:
    """A value of each token: `value` for each combination of the `indices`, whose extents are above 1, folded
    over one more index if there is a `fold` ("sum" or "amax")."""

    indices: tuple[Expr, ...]
    value: Expr
    fold: str = ""
    over: Expr | None = None

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(extent(index) for index in self.indices)

    @property
    def reads(self) -> frozenset[int]:
        return frozenset(n.value for n in E.walk(self.value) if n.op == "read")


@dataclasses.dataclass(frozen=True)
class Result:
    """The value of a definition as a tensor: a dimension for each of its indices, in their order, one for
    the tokens, and any number of extent 1."""

    number: int
    shape: tuple[Extent, ...]
    dtype: str = "float32"

    @functools.cached_property
    def token_dim(self) -> int:
        return self.shape.index(None)


class Product(NamedTuple):
    """A definition that multiplies a value of each token by a weight: `sum[j] r<left>[j] * r<weight>[..]`,
    with the weight as `[out, in]`, or as `[in, out]` if it is `turned`."""

    left: int
    weight: int
    turned: bool


class Scales(NamedTuple):
    """What the integers of a weight are multiplied by, after the zeros are subtracted: tensors `[out, in //
    group]`."""

    scales: int
    zeros: int | None
    group: int


class Weight(NamedTuple):
    """The elements of a weight as a product has them: of a matrix, or of integers as `(w - zero) * scale`."""

    matrix: Expr
    scale: Expr | None = None
    zero: Expr | None = None


def weight_of(factor: Expr) -> Weight | None:
    """How a factor of a product reads a weight; None if it does not."""
    scale: Expr | None = None
    zero: Expr | None = None
    if factor.op == "mul" and factor.args[1].op == "read":
        factor, scale = factor.args
        if factor.op == "sub":
            factor, zero = factor.args
            if zero.op == "float":
                (zero,) = zero.args
            if zero.op != "read":
                return None
        if factor.op != "float":
            return None
    if factor.op == "float":
        (factor,) = factor.args
    return Weight(factor, scale, zero) if factor.op == "read" else None


@dataclasses.dataclass(frozen=True)
class TokenProgram:
    """`given` have the first numbers, `definitions` those that follow."""

    given: tuple[Given, ...]
    definitions: tuple[Definition, ...]
    results: tuple[Result, ...]
    in_order: bool = False

    def definition(self, number: int) -> Definition | None:
        """The definition of this number; None if it is a given tensor."""
        return self.definitions[number - len(self.given)] if number >= len(self.given) else None

    def product(self, number: int) -> Product | None:
        """How a definition is a product with a weight; None if it is not."""
        found = self._multiplied(number)
        return None if found is None else found[0]

    def scales(self, number: int) -> Scales | None:
        """The scales by which a product multiplies the elements of its weight; None if there are none."""
        found = self._multiplied(number)
        return None if found is None else found[1]

    def _multiplied(self, number: int) -> tuple[Product, Scales | None] | None:
        made = self.definition(number)
        if made is None or made.fold != "sum" or made.value.op != "mul" or len(made.indices) != 1:
            return None
        (out,), over = made.indices, made.over
        assert over is not None
        for left, factor in (made.value.args, made.value.args[::-1]):
            found = weight_of(factor)
            vector = None if left.op != "read" else self.definition(left.value)
            if found is None or vector is None or left.args != (over,):
                continue
            weight, turned = found.matrix, found.matrix.args == (over, out)
            if self.definition(weight.value) is not None or not (turned or weight.args == (out, over)):
                continue
            shape = self.given[weight.value].shape
            if vector.extents != (extent(over),) or shape != tuple(map(extent, weight.args)):
                continue  # with some of the elements only
            scales = None if found.scale is None else self._scales(found, out, over)
            if found.scale is None or (scales is not None and not turned):
                return Product(left.value, weight.value, turned), scales
        return None

    def _scales(self, weight: Weight, out: Expr, over: Expr) -> Scales | None:
        """The scales and zeros of a weight; None unless neighbours in its rows have the same."""
        assert weight.scale is not None
        depth, read = extent(over), weight.scale.args
        parts = [weight.scale, *([] if weight.zero is None else [weight.zero])]
        if len(read) != 2 or read[0] is not out:
            return None
        if E.is_const(read[1], 0):
            group = depth
        elif read[1].op == "floordiv" and read[1].args[0] is over and read[1].args[1].op == "const":
            group = int(read[1].args[1].value)
        else:
            return None
        shape = extent(out), depth // group if group and depth % group == 0 else 0
        if any(p.args != read or self.definition(p.value) for p in parts):
            return None
        if any(self.given[p.value].shape != shape for p in parts):
            return None
        return Scales(weight.scale.value, None if weight.zero is None else weight.zero.value, group)

    @functools.cached_property
    def text(self) -> str:
        lines = [f"r{number}[{_shape(given.shape)}]{given.word}" for number, given in enumerate(self.given)]
        for number, made in enumerate(self.definitions, start=len(self.given)):
            indices = ", ".join(_index(i) for i in made.indices)
            fold = f"{made.fold}[{_index(made.over)}] " if made.over is not None else ""
            lines.append(f"r{number}[{indices}] = {fold}{E.format_expr(made.value)}")
        results = ", ".join(f"r{r.number}[{_shape(r.shape)}]{_word(r.dtype)}" for r in self.results)
        return "\n".join([*lines, f"return {results}", *([IN_ORDER] if self.in_order else [])])

    def __str__(self) -> str:
        return self.text

    def __hash__(self) -> int:
        return hash(self.text)


def extent(index: Expr) -> int:
    """The number of values of an index."""
    return int(index.args[0].value)


def index(name: str, count: int) -> Expr:
    return E.var(name, E.const(count))


def _index(variable: Expr) -> str:
    return f"{variable.value} < {extent(variable)}"


def _word(dtype: str) -> str:
    return "" if dtype == FLOATS[0] else f" {dtype}"


def _shape(shape: tuple[Extent, ...]) -> str:
    return ", ".join("t" if n is None else str(n) for n in shape)


class TokenProgramError(ValueError):
    """A text that is no token program; says which line is not, and why."""


_LINE = re.compile(
    r"r(\d+)\[([^\]]*)\](?:\s*=\s*(?:(sum|amax)\[\s*(\w+)\s*<\s*(\d+)\s*\]\s*)?(.+)|\s+(\w[\w -]*))?"
)
_RESULT = re.compile(r"r(\d+)\[([^\]]*)\](?:\s+(\w+))?")


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> TokenProgram:
    """The token program that `text` spells; `parse(program.text) == program`. A TokenProgramError has the
    line and what is wrong with it."""
    given: list[Given] = []
    definitions: list[Definition] = []
    results: list[Result] = []
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    in_order = lines[-1:] == [IN_ORDER]
    for line in lines[: len(lines) - in_order]:
        if results:
            raise TokenProgramError(f"nothing may follow the results: {line}")
        if line.startswith("return "):
            results = [_result(n, s, d, given, definitions, line) for n, s, d in _RESULT.findall(line)]
            continue
        found = _LINE.fullmatch(line)
        if found is None or int(found[1]) != len(given) + len(definitions):
            raise TokenProgramError(f"expected r{len(given) + len(definitions)}[..] or results: {line}")
        if found[6] is None:
            if definitions:
                raise TokenProgramError(f"given tensors stand before definitions: {line}")
            given.append(_given(_extents(found[2], line), found[7] or DTYPES[0], line))
            continue
        indices = tuple(_variable(part, line) for part in found[2].split(",") if part.strip())
        over = index(found[4], int(found[5])) if found[3] else None
        names = {v.value: v for v in (*indices, *(() if over is None else (over,)))}
        value = expression(found[6], t=TOKEN, **names)
        made = Definition(indices, value, found[3] or "", over)
        late = [n for n in made.reads if n >= len(given) + len(definitions)]
        if late:
            raise TokenProgramError(f"r{late[0]} is read before it is defined: {line}")
        definitions.append(made)
    if not results:
        raise TokenProgramError("it returns nothing")
    return TokenProgram(tuple(given), tuple(definitions), tuple(results), in_order)


def _given(shape: tuple[Extent, ...], words: str, line: str) -> Given:
    if words.startswith(f"{WORD} ") and len(shape) == 2 and None not in shape:
        try:
            return Given(shape, WORD, Packed.of(words.removeprefix(f"{WORD} ")))
        except ValueError as problem:
            raise TokenProgramError(f"{problem}: {line}") from None
    if words == PANELS and len(shape) == 2 and None not in shape:
        return Given(shape, in_panels=True)
    if words not in (FLOATS if None in shape else DTYPES):
        allowed = f"weights may be {', '.join(DTYPES)}, other tensors {', '.join(FLOATS)}"
        raise TokenProgramError(f"{allowed}: {line}")
    return Given(shape, words)


def _variable(part: str, line: str) -> Expr:
    name, _, count = (p.strip() for p in part.partition("<"))
    if not count.isdigit() or not name.isidentifier():
        raise TokenProgramError(f"expected `index < extent`, found `{part.strip()}`: {line}")
    return index(name, int(count))


def _extents(text: str, line: str) -> tuple[Extent, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if parts.count("t") > 1 or any(not (p == "t" or p.isdigit()) for p in parts):
        raise TokenProgramError(f"a shape has numbers and at most one t: {line}")
    return tuple(None if p == "t" else int(p) for p in parts)


def _result(
    number: str, shape: str, dtype: str, given: list[Given], definitions: list[Definition], line: str
) -> Result:
    place, extents = int(number) - len(given), _extents(shape, line)
    if not 0 <= place < len(definitions) or None not in extents:
        raise TokenProgramError(f"r{number} is no value of each token: {line}")
    if dtype and dtype not in FLOATS:
        raise TokenProgramError(f"results may be {', '.join(FLOATS)}: {line}")
    if definitions[place].extents != tuple(n for n in extents if n not in (None, 1)):
        raise TokenProgramError(f"r{number} has other extents: {line}")
    return Result(int(number), extents, dtype or FLOATS[0])
