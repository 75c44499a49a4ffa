"""A token program as the source of a C library: loops for the definitions of each phase, and tables of the
phases, which the functions of `c/phases.h` share among threads."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from attngraph.codegen.cpu.native import header, numbers
from attngraph.codegen.cpu.source import indented
from attngraph.codegen.cpu.tokens import products
from attngraph.codegen.cpu.tokens.formula import Formula
from attngraph.codegen.cpu.tokens.indices import RANKS, divided, require_in_range
from attngraph.codegen.cpu.tokens.schedule import Group, local, phases
from attngraph.codegen.remarks import UnsupportedError
from attngraph.ir.dtypes import NAMED
from attngraph.ir.language import E, Expr, operation
from attngraph.ir.language.token_program import Definition, TokenProgram, extent, index, parse

PLACES = numbers("tokens.h")
"""Places of numbers in a call: those from PHASE on are counters."""
SAME_LINES, APART = 512, 16
"""Values whose length is a multiple of the one have so many elements between two tokens."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a call has what: addresses of the given tensors, their strides, addresses of the values, and of
    results in 16 bits."""

    phases: int
    given: int
    values: int
    results: int

    @property
    def given_at(self) -> int:
        return PLACES["COUNTERS"] + self.phases

    @property
    def strides_at(self) -> int:
        return self.given_at + self.given

    @property
    def values_at(self) -> int:
        return self.strides_at + self.given * RANKS

    @property
    def results_at(self) -> int:
        return self.values_at + self.values

    @property
    def length(self) -> int:
        return self.results_at + self.results


def short_results(program: TokenProgram) -> list[tuple[int, str]]:
    """The definitions that are returned in 16 bits, each with the dtype, once."""
    return list(dict.fromkeys((r.number, r.dtype) for r in program.results if r.dtype != "float32"))


def row_lengths(program: TokenProgram) -> list[int]:
    """For each definition the elements from one token's to the next one's. Values in between are spread so
    that the same element of several tokens does not fall into the same lines of a cache."""
    returned = {r.number - len(program.given) for r in program.results}
    widths = [math.prod(d.extents) for d in program.definitions]
    return [n if place in returned or n % SAME_LINES else n + APART for place, n in enumerate(widths)]


def layout(program: TokenProgram) -> Layout:
    short = len(short_results(program))
    return Layout(len(phases(program)), len(program.given), len(program.definitions), short)


@functools.lru_cache(maxsize=1024)
def write(text: str) -> str:
    """The source of a program.

    Raises:
        UnsupportedError: the program has an operation that cannot be emitted as C.
    """
    program = parse(text)
    require_in_range(program)
    products.require_whole_groups(program)
    head = "".join(f"// {line}\n" for line in ("attngraph, for each token", *text.splitlines()))
    headers = (header(f"{name}.h") for name in (*products.HEADERS, "phases"))
    dtypes = {g.dtype for g in program.given} | {r.dtype for r in program.results}
    before = products.preamble(dtypes != {"float32"})
    return "\n".join([f"{head}{before}", *headers, *map(indented, _Emitter(program).parts())])


def kinds_of_products(program: TokenProgram) -> list[products.Kind]:
    """The kinds of products whose libraries a program's library is given."""
    numbers = [n for phase in phases(program) for group in phase.groups for n in group.products]
    return sorted({products.kind(program, n) for n in numbers}, key=lambda kind: kind.name)


class _Emitter:
    def __init__(self, program: TokenProgram) -> None:
        self.program, self.layout, self.phases = program, layout(program), phases(program)
        self.first = len(program.given)
        self.rows, self.local = row_lengths(program), local(program)

    def parts(self) -> Iterator[Iterable[str]]:
        """The lines of each declaration and function."""
        yield [f"Product *{kind.name};" for kind in kinds_of_products(self.program)]
        table: list[str] = []
        for number, phase in enumerate(self.phases):
            if phase.definitions:
                yield self._tokens(f"tokens_{number}", phase.definitions)
                table.append(f"{{0, 0, tokens_{number}}}")
                continue
            groups = []
            for place, group in enumerate(phase.groups):
                name = f"{number}_{place}"
                if group.following:
                    yield self._following(f"follow_{name}", group.following)
                factors = ",".join(map(self._factor, group.products))
                yield [f"static const Factor factors_{name}[] = {{{factors}}};"]
                groups.append(self._group(name, group))
            yield [f"static const Products groups_{number}[] = {{{', '.join(groups)}}};"]
            table.append(f"{{groups_{number}, {len(groups)}, 0}}")
        yield [f"static const Phase phases[] = {{{', '.join(table)}}};"]
        if self.layout.results:
            yield self._results()
        yield from self._exported()

    # --- products ---

    def _factor(self, number: int) -> str:
        """A product as a row of its group's table."""
        about, by = products.factors(self.program, number), self.program.scales(number)
        zeros = None if by is None else by.zeros
        of_scales = 0 if by is None else self.layout.given_at + by.scales
        of_zeros = 0 if zeros is None else self.layout.given_at + zeros
        depth, weight = self._width(about.left), self.layout.given_at + about.weight
        rows = ", ".join(str(self.rows[n - self.first]) for n in (about.left, number))
        left, result = (self.layout.values_at + n - self.first for n in (about.left, number))
        name = products.kind(self.program, number).name
        return f"{{&{name}, {depth}, {rows}, {left}, {weight}, {of_scales}, {of_zeros}, {result}}}"

    def _group(self, name: str, group: Group) -> str:
        """A group as a row of its phase's table. Threads may share the depth if all weights are turned."""
        kinds = [products.kind(self.program, n) for n in group.products]
        width = self._width(group.products[0])
        depth = max(self._width(products.factors(self.program, n).left) for n in group.products)
        turned, across = any(k.turned for k in kinds), all(k.goes_across for k in kinds)
        flags = ", ".join(str(int(flag)) for flag in (turned, across, all(k.turned for k in kinds)))
        follow = f"follow_{name}" if group.following else "0"
        return f"{{factors_{name}, {len(kinds)}, {width}, {depth}, {flags}, {follow}}}"

    def _exported(self) -> Iterator[Iterable[str]]:
        """The functions that are called: how much room a call needs, and what each thread runs."""
        every = [n for phase in self.phases for group in phase.groups for n in group.products]
        depths = {n: self._width(products.factors(self.program, n).left) for n in every}
        packed = [d for n, d in depths.items() if products.weight(self.program, n).packed is not None]
        across = [2 * d for n, d in depths.items() if products.kind(self.program, n).goes_across]
        count, results = len(self.phases), "results" if self.layout.results else "0"
        room = f"room_of({max(depths.values())})" if depths else "0"
        yield [
            f"int64_t attngraph_room(void) {{ return {room}; }}",
            f"int64_t attngraph_arranged(void) {{ return {max([*packed, *across], default=0)}; }}",
            "int64_t attngraph_sums(int64_t tokens, int64_t members) {",
            f"return room_for_parts(phases, {count}, tokens, members);",
            "}",
            f"void attngraph_tokens(int64_t *c) {{ all_phases(c, phases, {count}, {results}); }}",
            "void attngraph_part(int64_t *c) { one_phase(c, phases + c[PHASE]); }",
        ]

    # --- definitions ---

    def _results(self) -> Iterator[str]:
        """A function that rounds the results in 16 bits of tokens `t0 .. t1 - 1`."""
        yield "static void results(const int64_t *c, int64_t t0, int64_t t1) {"
        for place, (number, dtype) in enumerate(short_results(self.program)):
            width, row, kind = self._width(number), self.rows[number - self.first], NAMED[dtype].c
            yield f"const float *v{place} = {self._value(number)};"
            yield f"{kind} *to{place} = ({kind} *)c[{self.layout.results_at + place}];"
            yield "for (int64_t t = t0; t < t1; ++t) {"
            yield f"for (int64_t i = 0; i < {width}; ++i) {{"
            yield f"to{place}[t * {width} + i] = to_{dtype}(v{place}[t * {row} + i]);"
            yield from ("}", "}")
        yield "}"

    def _tokens(self, name: str, numbers: Sequence[int]) -> Iterator[str]:
        """A function that computes definitions for tokens `t0 .. t1 - 1`."""
        yield f"static void {name}(const int64_t *c, int64_t t0, int64_t t1) {{"
        yield from self._pointers(numbers)
        yield "for (int64_t t = t0; t < t1; ++t) {"
        for number in numbers:
            made, flat = _with_digits(self._definition(number))
            for ranges, value in divided(made):
                yield from self._loops(number, made, value, ranges, flat)
        yield from ("}", "}")

    def _following(self, name: str, numbers: Sequence[int]) -> Iterator[str]:
        """A function that computes columns `c0 .. c1 - 1` of what follows from products."""
        yield f"static void {name}(const int64_t *c, int64_t t0, int64_t t1, int64_t c0, int64_t c1) {{"
        yield from self._pointers(numbers)
        yield "for (int64_t t = t0; t < t1; ++t) {"
        for number in numbers:
            made = self._definition(number)
            yield from self._loops(number, made, made.value, [("c0", "c1")], lambda names: names[0])
        yield from ("}", "}")

    def _loops(
        self, number: int, made: Definition, value: Expr, ranges: Sequence[tuple[int | str, int | str]],
        flat: Callable[[Sequence[str]], str],
    ) -> Iterator[str]:  # fmt: skip
        """The loops that compute one definition for token `t` in these ranges of its indices. `flat`: the
        place of an element from their names."""
        names = [i.value for i in made.indices]
        inner = made.over or (made.indices[-1] if names else None)
        formula = Formula(value, self._read, inner)
        closing = 0
        for name, (low, high) in zip(names, ranges, strict=True):
            if inner is not None and name == inner.value:
                yield from ("{", *formula.before, "#pragma omp simd")
                closing += 1
            yield f"for (int64_t {name} = {low}; {name} < {high}; ++{name}) {{"
            closing += 1
        target = self._element(number, flat(names))
        if made.over is None:
            yield from (*formula.lines, f"{target} = {formula.code};")
        else:
            yield from _fold(made, formula, target)
        yield from ["}"] * closing

    def _definition(self, number: int) -> Definition:
        return self.program.definitions[number - self.first]

    def _width(self, number: int) -> int:
        return math.prod(self._definition(number).extents)

    # --- memory ---

    def _value(self, number: int) -> str:
        return f"((float *)c[{self.layout.values_at + number - self.first}])"

    def _pointers(self, numbers: Sequence[int]) -> Iterator[str]:
        used = sorted({n for number in numbers for n in self._definition(number).reads} | set(numbers))
        for n in used:
            if n in self.local:
                yield f"float v{n}[{self._width(n)}] __attribute__((aligned(64)));"
                continue
            if n >= self.first:
                yield f"float *const v{n} = {self._value(n)};"
                continue
            given, place = self.program.given[n], self.layout.given_at + n
            element = "uint8_t" if given.packed is not None else NAMED[given.dtype].c
            yield f"const {element} *const g{n} = ((const {element} *)c[{place}]);"
            if given.token_dim is not None:
                at = self.layout.strides_at + n * RANKS
                names = ", ".join(f"s{n}_{d} = c[{at + d}]" for d in range(len(given.shape)))
                yield f"const int64_t {names};"

    def _element(self, number: int, place: str) -> str:
        row = self.rows[number - self.first]
        if number in self.local:
            return f"v{number}[{place}]"
        return f"v{number}[t]" if row == 1 else f"v{number}[t * {row} + {place}]"

    def _read(self, node: Expr, indices: list[str]) -> str:
        number = node.value
        if number >= self.first:
            return self._element(number, _flattened(indices, self._definition(number).extents))
        about = self.program.given[number]
        if about.packed is not None:
            raise UnsupportedError("single elements of 4 bits")
        widened = "{}" if about.dtype not in ("bfloat16", "float16") else f"from_{about.dtype}({{}})"
        if about.token_dim is None:
            shape = [n for n in about.shape if n is not None]
            return widened.format(f"g{number}[{_flattened(indices, shape)}]")
        last = len(indices) - 1  # its elements are contiguous, unless it counts the tokens
        terms = [
            place if d == last != about.token_dim else f"({place}) * s{number}_{d}"
            for d, place in enumerate(indices) if place != "0"
        ]  # fmt: skip
        return widened.format(f"g{number}[{' + '.join(terms) or '0'}]")


def _fold(made: Definition, formula: Formula, target: str) -> Iterator[str]:
    assert made.over is not None
    j, is_sum = made.over.value, made.fold == "sum"
    yield from ("{", *formula.before, f"float all = {'0.0f' if is_sum else '-INFINITY'};")
    if is_sum:
        yield "#pragma omp simd reduction(+:all)"
    yield f"for (int64_t {j} = 0; {j} < {extent(made.over)}; ++{j}) {{"
    yield from formula.lines
    yield f"all = {f'all + {formula.code}' if is_sum else f'maximum(all, {formula.code})'};"
    yield from ("}", f"{target} = all;", "}")


def _flattened(indices: Sequence[str], extents: Sequence[int]) -> str:
    """The place of an element in contiguous memory."""
    terms, stride = [], 1
    for place, count in zip(reversed(indices), reversed(extents), strict=True):
        if place != "0":
            terms.append(place if stride == 1 else f"({place}) * {stride}")
        stride *= count
    return " + ".join(reversed(terms)) or "0"


def _with_digits(made: Definition) -> tuple[Definition, Callable[[Sequence[str]], str]]:
    """The definition with an index of two digits as two indices (`i // 64` and `i % 64` become loops), and
    the function that gives the place of an element from the names of its indices."""
    extents = made.extents

    def flat(names: Sequence[str]) -> str:
        return _flattened(names, extents)

    if len(made.indices) != 1 or made.fold:
        return made, flat
    (whole,) = made.indices
    digits_of = (n for n in E.walk(made.value) if n.op in ("floordiv", "mod") and n.args[0] is whole)
    divisors = {n.args[1].value for n in digits_of if n.args[1].op == "const"}
    if len(divisors) != 1 or extents[0] % next(iter(divisors)):
        return made, flat
    (divisor,) = divisors
    high, low = index("i1", extents[0] // divisor), index("i2", divisor)
    digits = {
        operation("floordiv", whole, E.const(divisor)): high, operation("mod", whole, E.const(divisor)): low,
        whole: operation("add", operation("mul", high, E.const(divisor)), low),
    }  # fmt: skip

    value = _replaced(made.value, digits)
    return Definition((high, low), value), lambda names: f"{names[0]} * {divisor} + {names[1]}"


def _replaced(value: Expr, places: dict[Expr, Expr]) -> Expr:
    """The formula with these parts replaced, the largest first."""
    if value in places:
        return places[value]
    if value.op == "var" or not value.args:
        return value
    args = tuple(_replaced(a, places) for a in value.args)
    return value if args == value.args else E.make(value.op, args, value.value, value.kind)
