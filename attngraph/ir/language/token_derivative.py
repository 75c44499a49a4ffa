"""The derivative of a token program is a token program: from the gradients of its results to those of what it
is given.

In reverse order each definition hands the gradient of its value on to what it reads, by the chain rule
(`derivative.py`). Values of definitions are computed again from what is given, or read where they are results
of the program. Only elements that are read at their own indices are differentiated: then the gradient of an
element is a sum over the indices of the definition that the read does not name.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from attngraph.ir.language import expr as E
from attngraph.ir.language.derivative import ZERO, UnsupportedError, added, derivative, multiplied
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.parser import operation
from attngraph.ir.walk import reached

from attngraph.ir.language.token_program import (  # isort: skip
    TOKEN, Definition, Extent, Given, Result, TokenProgram, extent, index, parse,
)  # fmt: skip

GIVEN, RESULT, GRADIENT = "given", "result", "gradient"
"""What the backward program is given: what the program is, its results, and their gradients."""
_MADE = "made"


class Found(NamedTuple):
    """Where the gradient of a given tensor is (`kind`): a result of the backward program, or the gradient of
    a result of the program. `sums`: it is still to be summed over the tokens, which all share the tensor."""

    kind: str
    place: int
    sums: bool


class Backward(NamedTuple):
    """`program` is the text of the backward program, "" if there is nothing to compute; `given` what it is
    given, by kind and place; `gradients` where those of the wanted tensors are. (Those of others are 0.)"""

    program: str
    given: tuple[tuple[str, int], ...]
    gradients: dict[int, Found]


@functools.lru_cache(maxsize=1024)
def backward(text: str, wanted: frozenset[int]) -> Backward:
    """The backward program of a program, for the given tensors of these numbers; UnsupportedError where an
    operation has no derivative, or an element is read at another index."""
    return _Reverse(parse(text), wanted).backward()


def is_own(args: Sequence[Expr], shape: Sequence[Extent], variables: Sequence[Expr]) -> bool:
    """Whether a read names elements by different variables, each of the extent of its dimension."""
    used = [a for a in args if a.op == "var" and a is not TOKEN]
    return len(set(used)) == len(used) and all(
        (a is TOKEN) if n is None else (E.is_const(a, 0) if n == 1 else a in variables and extent(a) == n)
        for a, n in zip(args, shape, strict=True)
    )


class _Reverse:
    def __init__(self, program: TokenProgram, wanted: frozenset[int]) -> None:
        self.program, self.wanted, self.first = program, wanted, len(program.given)
        self.saved = {r.number: place for place, r in reversed(list(enumerate(program.results)))
                      if r.dtype == "float32"}  # fmt: skip
        self.definitions: list[Definition] = []
        self.made: dict[Definition, int] = {}
        self.again: dict[int, int] = {}
        self.parts: dict[int, Expr] = dict.fromkeys(range(self.first + len(program.definitions)), ZERO)

    def backward(self) -> Backward:
        for place, result in enumerate(self.program.results):
            own = self.program.definitions[result.number - self.first].indices
            read = E.read((GRADIENT, place), _places(result.shape, own))
            self.parts[result.number] = added(self.parts[result.number], read)
        for number in range(self.first + len(self.program.definitions) - 1, self.first - 1, -1):
            if self.parts[number] is not ZERO:
                self._hand_on(number)
        found, results = dict[int, Found](), list[Result]()
        for number in sorted(self.wanted):
            if self.parts[number] is not ZERO:
                found[number] = self._found(number, results)
        return self._numbered(results, found)

    # --- the chain rule ---

    def _hand_on(self, number: int) -> None:
        """Hand the gradient of a definition's value on to what the definition reads."""
        made = self.program.definitions[number - self.first]
        if made.fold == "amax":
            raise UnsupportedError("the derivative of `amax`")
        slopes = {
            read: slope
            for read in E.reads(made.value)
            if (read.value >= self.first or read.value in self.wanted)
            and (slope := derivative(made.value, read)) is not ZERO
        }
        gradient = self.parts[number]
        if len(slopes) > 1 or made.fold:
            gradient = self._defined(made.indices, gradient)
        variables = (*made.indices, *(() if made.over is None else (made.over,)))
        for read, slope in slopes.items():
            value = multiplied(gradient, E.rebuild(slope, self._forward))
            self._add(read.value, read.args, variables, value)

    def _add(self, number: int, args: tuple[Expr, ...], variables: tuple[Expr, ...], value: Expr) -> None:
        """Add a gradient, which has these variables, to that of a value that is read at `args`."""
        shape = self._shape(number)
        if not is_own(args, shape, variables):
            raise UnsupportedError("the derivative of elements that are read at other places")
        for over in (v for v in variables if v not in args):
            if over in value.free:
                kept = tuple(v for v in variables if v in value.free and v is not over)
                value = self._defined(kept, value, over)
            else:
                value = operation("mul", value, E.const(float(extent(over))))
        own = dict(zip(args, _places(shape, self._indices(number)), strict=True))
        self.parts[number] = added(self.parts[number], E.replaced(value, own))

    def _found(self, number: int, results: list[Result]) -> Found:
        """Where the gradient of a given tensor is; makes it a result, unless it is the gradient of one."""
        value, about = self.parts[number], self.program.given[number]
        shared = about.token_dim is None
        shape = (None, *about.shape) if shared else about.shape
        if value.op == "read" and value.value[0] == GRADIENT:
            of = self.program.results[value.value[1]]
            if of == Result(of.number, shape, about.dtype) and value.args == _places(
                shape, self._indices(number)
            ):
                return Found(GRADIENT, value.value[1], shared)
        made = self._defined(self._indices(number), value, whole=True)
        result = Result(made.value[1], shape, "float32" if shared else about.dtype)
        if result not in results:
            results.append(result)
        return Found(RESULT, results.index(result), shared)

    # --- values ---

    def _shape(self, number: int) -> tuple[Extent, ...]:
        made = self.program.definition(number)
        return self.program.given[number].shape if made is None else made.extents

    def _indices(self, number: int) -> tuple[Expr, ...]:
        """Names of the indices of a value."""
        made = self.program.definition(number)
        if made is not None:
            return made.indices
        extents = (n for n in self._shape(number) if n not in (None, 1))
        return tuple(index(f"i{place}", n) for place, n in enumerate(extents) if n is not None)

    def _forward(self, node: Expr, args: tuple[Expr, ...]) -> Expr:
        """An element of a value of the program, for `E.rebuild`."""
        if node.op != "read":
            return E.with_args(node, args)
        made = self.program.definition(node.value)
        if made is None:
            return E.read((GIVEN, node.value), args)
        if node.value in self.saved:
            place = self.saved[node.value]
            return E.read((RESULT, place), _places(self.program.results[place].shape, args))
        if node.value not in self.again:
            value = E.rebuild(made.value, self._forward)
            self.again[node.value] = self._define(Definition(made.indices, value, made.fold, made.over))
        return E.read((_MADE, self.again[node.value]), args)

    def _defined(
        self, indices: tuple[Expr, ...], value: Expr, over: Expr | None = None, whole: bool = False
    ) -> Expr:
        """The element of a definition of this value, or the value if it is an element already, unless the
        `whole` definition is wanted."""
        is_made = over is None and value.op == "read" and value.value[0] == _MADE and value.args == indices
        if is_made or (value.op == "read" and over is None and not whole):
            return value
        names = {v: index(f"i{place}", extent(v)) for place, v in enumerate(indices)}
        own = tuple(names.values())
        if over is not None:
            names[over] = index("j", extent(over))
        value = E.replaced(value, names)
        made = Definition(own, value, "" if over is None else "sum", names.get(over) if over else None)
        return E.read((_MADE, self._define(made)), indices)

    def _define(self, made: Definition) -> int:
        if made not in self.made:
            self.made[made] = len(self.definitions)
            self.definitions.append(made)
        return self.made[made]

    # --- the program ---

    def _numbered(self, results: Sequence[Result], found: dict[int, Found]) -> Backward:
        def read_by(name: tuple[str, int]) -> list[Any]:
            return [n.value for n in E.reads(self.definitions[name[1]].value)] if name[0] == _MADE else []

        used = set(reached([(_MADE, r.number) for r in results], read_by))
        order = [n for n in range(len(self.definitions)) if (_MADE, n) in used]
        given = sorted(name for name in used if name[0] != _MADE)
        numbers = {name: number for number, name in enumerate((*given, *((_MADE, n) for n in order)))}

        def leaf(node: Expr, args: tuple[Expr, ...]) -> Expr:
            return E.read(numbers[node.value], args) if node.op == "read" else E.with_args(node, args)

        if not results:
            return Backward("", (), found)
        made = tuple(
            Definition(d.indices, E.rebuild(d.value, leaf), d.fold, d.over)
            for d in (self.definitions[n] for n in order)
        )
        named = tuple(Result(numbers[_MADE, r.number], r.shape, r.dtype) for r in results)
        abouts = tuple(self._about(*name) for name in given)
        return Backward(TokenProgram(abouts, made, named).text, tuple(given), found)

    def _about(self, kind: str, place: int) -> Given:
        if kind == GIVEN:
            return self.program.given[place]
        result = self.program.results[place]
        return Given(result.shape, result.dtype)


def _places(shape: Sequence[Extent], indices: Sequence[Expr]) -> tuple[Expr, ...]:
    """Where an element lies in a tensor of this shape, given its indices in dimensions of more than one."""
    left = iter(indices)
    return tuple(TOKEN if n is None else E.ZERO if n == 1 else next(left) for n in shape)
