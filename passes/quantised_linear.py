"""QuantisedLinear: products with a weight of integers become `attngraph::linear_q`.

Matches products whose one factor is computed from a matrix of integers among the model's own tensors, element
by element: the integer itself or a digit of 4 bits of it, or (integer - zero) * scale with a scale for each
output or for each group of inputs. Found by the element rules, so it does not matter how the model writes
that: rows or columns, groups as a dimension of their own or scales repeated, digits by shifts or quotients,
in one expression or an operation of torchao. Digits become `attngraph::unpack` of the integers. Right because
it is the same formula, with the integers read where they lie; each claim is checked in float64. What follows
the product, a scale for each output included, stays as it is. Refuses a weight whose scales differ from input
to input, and integers that are computed otherwise: nothing would be gained by reading them in place of
floating values.

Digits: an element is a formula of integers that are read, `b[o, d // 2] // 2**(4 * (d % 2)) % 16 - 8` say.
One index is taken apart, `d = (block * count + n) * run + place`: if all elements that differ in n alone read
the same integer, the formula for each n is a function of that one integer, and its values say which digit it
is and what the digit stands for. So it does not matter how the model writes that.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from attngraph.ir.graph import Level, ProgramGraph, source_of
from attngraph.ir.language import E, Expr, Packed
from attngraph.ir.language.packed import BITS
from attngraph.ir.ops.quantised import linear_q, unpack
from attngraph.ir.walk import reached
from attngraph.meaning import Category, M, Meaning, Unliftable, recombined, split_digits
from attngraph.meaning.attention import layout
from attngraph.meaning.attention.layout import NoView, ViewOp
from attngraph.meaning.check.check import Checks
from attngraph.passes.build import Builder
from attngraph.passes.proposal import Proposal
from attngraph.pipeline import Outcome

_INTEGERS = (torch.int8, torch.uint8)
_CONTAINERS = (*_INTEGERS, torch.int16, torch.int32, torch.int64)
"""Of digits of 4 bits."""
_KEEPS_ORDER = ("unflatten", "unsqueeze", "reshape")
_TABLE = 16
"""So many integers at most may say by how much others are shifted."""
_TRIED = 200
"""So many integers of several bytes are tried; of one byte all are."""
_LARGEST_OFFSET = 64
"""What may be subtracted from a digit."""
_ELEMENT = E.read("an element", (), "int")


class _Seen(NamedTuple):
    """A tensor of the graph, and the views that present it as wanted; `packed`: the matrix of its digits."""

    base: fx.Node
    steps: tuple[ViewOp, ...]
    packed: Packed | None = None


Operands = tuple[_Seen, _Seen, _Seen | None, _Seen | None, _Seen | None]
"""Of linear_q: the value, the weight, its scales, its zeros, the bias."""


@dataclasses.dataclass(frozen=True)
class QuantisedLinear:
    name: str = "quantised-linear"
    requires: Level = Level.CACHED
    yields: Level = Level.CACHED

    def run(self, graph: ProgramGraph) -> Outcome:
        outcome = Outcome()
        found, checks, done = _Products(graph), Checks(graph), 0
        for node in list(graph.graph.nodes):
            with Proposal(graph, node, checks, survives=True) as proposal:
                operands = found.operands(node)
                if operands is None:
                    continue
                outs = int(node.meta["val"].shape[-1])
                given = (None if o is None else _built(proposal, o, outs) for o in operands)
                new = proposal.call(linear_q, *given)
                proposal.replace(node, new, [o.base for o in operands if o is not None])
                new.meta |= {key: value for key, value in node.meta.items() if key != "val"}
            graph.assumed |= {n.name for n in found.meaning.assumed}
            done += proposal.done
            if proposal.problem:
                outcome.notes.append(f"left as it is: {source_of(node)}: {proposal.problem}")
        if done:
            outcome.notes.append(f"{done} product(s) read the weight's integers")
            graph.clean()
        return outcome


class _Products:
    """Finds the products of a graph."""

    def __init__(self, graph: ProgramGraph) -> None:
        values = graph.known_values().items()
        tables = {n: v for n, v in values if v.numel() <= _TABLE and not v.is_floating_point()}
        self.meaning = Meaning(tables, graph.conditions)
        self.own = {n for n, i in graph.given().items() if i.kind in ("parameter", "buffer", "constant")}
        self.has_integers = any(_dtype(n) in _CONTAINERS for n in self.own)

    def operands(self, node: fx.Node) -> Operands | None:
        """Of what a node is the product, if it is a product with a weight of integers."""
        value = node.meta.get("val")
        if not self.has_integers or not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return None
        if value.dtype != torch.float32 or self.meaning.category(node) is not Category.CONTRACTION:
            return None
        try:
            _, at = self.meaning.places(node)
            element = self.meaning.element(node, at)
            terms = E.parts(element, "add")
            (total,) = (t for t in terms if t.op == "sum")
            (bias,) = (t for t in terms if t is not total) if len(terms) > 1 else (None,)
            return self._product(at, total, bias)
        except (Unliftable, NoView, ValueError):  # not one product and a bias
            return None

    def _product(self, at: Sequence[Expr], total: Expr, bias: Expr | None) -> Operands | None:
        over, body = total.args
        if body.op != "mul" or len(body.args) != 2 or not at or at[-1].op != "var":
            return None
        out = at[-1]
        for left, right in (body.args, body.args[::-1]):
            if left.op != "read" or right.op != "read" or out in left.free or over not in left.free:
                continue
            factors = None if self._is_narrowed(right.value) else self._factors(right, out, over)
            if factors is None or _dtype(left.value) != torch.float32:
                continue
            x = self._seen(left, (*((i,) if i.op == "var" else () for i in at[:-1]), (over,)))
            if bias is not None and (bias.op != "read" or bias.free != {out}):
                return None
            return x, *factors, (None if bias is None else self._seen(bias, ((out,),)))
        return None

    def _factors(self, read: Expr, out: Expr, over: Expr) -> tuple[_Seen, _Seen | None, _Seen | None] | None:
        """The weight, its scales and its zeros, if an element of it is `(integer - zero) * scale`."""
        value = self.meaning.elementwise(read)
        parts = list(value.args) if value.op == "mul" else [value]
        whole, *scales = sorted(parts, key=lambda p: not any(map(self._is_whole, E.parts(p, "add"))))
        if len(scales) > 1 or any(not _is_read(p, torch.float32) or p.value not in self.own for p in scales):
            return None
        scale = scales[0] if scales else None
        found = self._integers(whole, out, over)
        if found is None:
            return None
        weight, zeros = found
        zero = _subtracted(zeros[0]) if zeros else None
        if len(zeros) > 1 or (zeros and (zero is None or scale is None)):
            return None
        dtypes = (torch.float32, torch.int32, *_INTEGERS)
        if zero is not None and not (_is_read(zero, *dtypes) and zero.value in self.own):
            return None
        digit = _digit([part for part in (scale, zero) if part is not None], over)
        return weight, *(None if p is None else self._by_group(p, out, digit) for p in (scale, zero))  # type: ignore[return-value]

    def _integers(self, whole: Expr, out: Expr, over: Expr) -> tuple[_Seen, list[Expr]] | None:
        """The matrix of integers in a sum, and the other terms of it."""
        terms = E.parts(whole, "add")
        integer, *others = sorted(terms, key=lambda t: not self._is_weight(t))
        if self._is_weight(integer):
            return (self._seen(integer, ((out,), (over,))), others) if integer.free == {out, over} else None
        sources = {n.value for n in E.reads(whole) if _is_read(n, *_CONTAINERS) and n.value in self.own}
        source = max(sources, key=lambda n: int(n.meta["val"].numel()), default=None)
        own = [t for t in terms if t.op == "const" or any(n.value is source for n in E.reads(t))]
        dtype = None if source is None else _dtype(source)
        digits = None if dtype is None else _find_digits(M.add(*own), out, over, dtype)
        if digits is None or digits[1].value is not source:
            return None
        packed, read, *roles = digits
        bytes_ = self._seen(read, tuple(roles))
        if any(step.op not in _KEEPS_ORDER for step in bytes_.steps):
            return None
        return _Seen(bytes_.base, (), packed), [t for t in terms if t not in own]

    def _is_narrowed(self, node: fx.Node) -> bool:
        """Whether a value was rounded to 16 bits on its way from the model's tensors: formulas do not say."""
        way = reached([node], lambda n: () if n in self.own else n.all_input_nodes)
        dtypes = (dtype for n in way if (dtype := _dtype(n)) is not None)
        return any(dtype.is_floating_point and dtype.itemsize < 4 for dtype in dtypes)

    def _is_weight(self, node: Expr) -> bool:
        return _is_read(node, *_INTEGERS) and node.value in self.own and len(node.free) == 2

    def _is_whole(self, node: Expr) -> bool:
        """Whether a term is made of integers of a weight."""
        if node.op == "read" or len(node.free) != 2:
            return self._is_weight(node)
        return any(_is_read(n, *_CONTAINERS) for n in E.walk(node))

    def _by_group(self, read: Expr, out: Expr, digit: Expr | None) -> _Seen:
        """A tensor as `[out, groups]`."""
        if digit is None:
            return self._seen(read, ((out,), ()))
        group = E.var("group", M.floordiv(digit.args[0].args[0], digit.args[1]))
        return self._seen(M.substitute(read, {digit: group}), ((out,), (group,)))

    def _seen(self, read: Expr, roles: tuple[tuple[Expr, ...], ...]) -> _Seen:
        """The tensor of a read, with a dimension for each of the roles."""
        if not read.free <= {variable for role in roles for variable in role}:
            raise NoView
        digits = split_digits(read.free, read.args) or {}
        index = M.substitute(read, {v: recombined(d) for v, d in digits.items()}).args
        roles = tuple(tuple(d for v in role for d in digits.get(v, (v,))) for role in roles)
        return _Seen(read.value, layout.solve(self.meaning.shape(read.value), index, roles))


def _subtracted(term: Expr) -> Expr | None:
    """What a term of a sum subtracts."""
    return term.args[1] if term.op == "mul" and len(term.args) == 2 and E.is_const(term.args[0], -1) else None


def _is_read(value: Expr, *dtypes: torch.dtype) -> bool:
    return value.op == "read" and _dtype(value.value) in dtypes


def _digit(parts: Sequence[Expr], over: Expr) -> Expr | None:
    """The index `over // group` in these reads, None for one group; NoView where they use it otherwise."""
    found = {n for p in parts for n in E.walk(p) if n.op == "floordiv" and n.args[0] is over}
    if any(over in M.substitute(p, dict.fromkeys(found, E.ZERO)).free for p in parts) or len(found) > 1:
        raise NoView
    digit = next(iter(found), None)
    depth = over.args[0]
    if digit is not None and (
        any(digit not in set(E.walk(p)) for p in parts)
        or digit.args[1].op != "const" or depth.op != "const" or depth.value % digit.args[1].value
    ):  # fmt: skip
        raise NoView
    return digit


def _dtype(node: Any) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _built(builder: Builder, seen: _Seen, outs: int) -> fx.Node:
    if seen.packed is not None:
        return builder.call(unpack, seen.base, outs, str(seen.packed))
    return builder.view(seen.base, seen.steps)


# --- digits ---


_Digits = tuple[Packed, Expr, tuple[Expr, ...], tuple[Expr, ...]]
"""How a matrix is packed, and the integer that is read for an element, at indices over rows and columns of
such integers."""


def _find_digits(value: Expr, out: Expr, over: Expr, dtype: torch.dtype) -> _Digits | None:
    """How the elements of a matrix `[out, over]` lie in integers of this dtype; None if they are no digits of
    them, or lie in another way than `Packed` can say."""
    each = torch.iinfo(dtype).bits // BITS
    for of_outputs in (False, True) if each == 2 else (False,):
        index, other = (out, over) if of_outputs else (over, out)
        for run in _runs(value, index, each):
            found = _taken_apart(value, index, run, each)
            if found is None:
                continue
            read, places, digits = found
            packed = _packed(digits, run, of_outputs, dtype) if read.free <= {other, *places} else None
            if packed is not None:
                rows, columns = (places, (other,)) if of_outputs else ((other,), places)
                return packed, read, rows, columns
    return None


def _runs(value: Expr, index: Expr, each: int) -> Iterator[int]:
    """How far apart the digits of one integer may be, by the numbers that occur in the formula."""
    if index.op != "var" or not index.args or index.args[0].op != "const":
        return
    numbers = {n.value for n in E.walk(value) if n.op == "const" and isinstance(n.value, int) and n.value > 0}
    runs = {1, *numbers, *(n // each for n in numbers)} if each == 2 else {1}
    yield from sorted(n for n in runs if n and index.args[0].value % (each * n) == 0)


_Apart = tuple[Expr, tuple[Expr, ...], tuple[Expr, ...]]


def _taken_apart(value: Expr, index: Expr, run: int, each: int) -> _Apart | None:
    """The integer that is read, at which places, and the formula of each of its digits, in terms of
    `_ELEMENT`."""
    block, place = (E.var(name, E.const(n)) for name, n in
                    (("block", index.args[0].value // (run * each)), ("place", run)))  # fmt: skip
    places = tuple(v for v in (block, place) if not E.is_const(v.args[0], 1))
    at = [v if v in places else E.ZERO for v in (block, place)]
    digits: list[Expr] = []
    read: Expr | None = None
    for n in range(each):
        whole = M.add(M.mul(M.add(M.mul(at[0], E.const(each)), E.const(n)), E.const(run)), at[1])
        element = M.substitute(value, {index: whole})
        reads = {node for node in E.walk(element) if node.op == "read"}
        if len(reads) != 1 or (read is not None and reads != {read}):
            return None
        (read,) = reads
        digits.append(M.substitute(element, {read: _ELEMENT}))
        if digits[-1].free:
            return None
    assert read is not None
    return read, places, tuple(digits)


@functools.lru_cache(maxsize=256)
def _packed(digits: tuple[Expr, ...], run: int, of_outputs: bool, dtype: torch.dtype) -> Packed | None:
    """How digits lie, by the values of their formulas."""
    limits = torch.iinfo(dtype)
    tried: Sequence[int] = range(limits.min, limits.max + 1)
    if limits.bits > 8:
        drawn = random.Random(0)
        tried = [limits.min, limits.max, *(drawn.randint(limits.min, limits.max) for _ in range(_TRIED))]
    for signed in (False, True):
        found = [_which_digit(formula, tried, signed, limits.bits // BITS) for formula in digits]
        for high_first in (False, True):
            wanted = [n ^ high_first for n in range(len(digits))]
            if [f and f[0] for f in found] == wanted and len({f and f[1] for f in found}) == 1:
                assert found[0] is not None
                return Packed(run, high_first, signed, found[0][1], of_outputs)
    return None


def _which_digit(formula: Expr, tried: Sequence[int], signed: bool, count: int) -> tuple[int, int] | None:
    """Which of an integer's digits a formula is, counted from the lowest, and what is subtracted from it."""
    values = []
    for number in tried:
        value = M.substitute(formula, {_ELEMENT: E.const(number)})
        if value.op != "const" or value.value != int(value.value):
            return None
        values.append(int(value.value))
    for place in range(count):
        plain = [number >> BITS * place & 15 for number in tried]
        if signed:
            plain = [(digit ^ 8) - 8 for digit in plain]
        apart = {digit - value for digit, value in zip(plain, values, strict=True)}
        if len(apart) == 1 and abs(less := apart.pop()) <= _LARGEST_OFFSET:
            return place, less
    return None
