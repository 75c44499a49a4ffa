"""A token program as the source of a C library: a function for each phase, and one that runs them all."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

from attngraph.codegen.cpu.native import header, numbers
from attngraph.codegen.cpu.tokens import products
from attngraph.codegen.cpu.tokens.formula import Formula
from attngraph.codegen.cpu.tokens.ranges import divided
from attngraph.codegen.cpu.tokens.reads import RANKS as RANKS
from attngraph.codegen.cpu.tokens.reads import require_in_range
from attngraph.codegen.cpu.tokens.schedule import Group, Phase, phases
from attngraph.codegen.unsupported import UnsupportedError
from attngraph.ir.dtypes import NAMED
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.parser import operation
from attngraph.ir.language.token_program import Definition, Given, TokenProgram, extent, index, parse

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
    emitter = _Emitter(program)
    head = "".join(f"// {line}\n" for line in ("attngraph, for each token", *text.splitlines()))
    headers = (header(f"{name}.h") for name in products.HEADERS)
    dtypes = {g.dtype for g in program.given} | {r.dtype for r in program.results}
    before = products.preamble(dtypes != {"float32"})
    return "\n".join([f"{head}{before}", *headers, *emitter.functions()])


def kinds_of_products(program: TokenProgram) -> list[products.Kind]:
    """The kinds of products whose libraries a program's library is given."""
    numbers = [n for phase in phases(program) for group in phase.groups for n in group.products]
    return sorted({products.kind(program, n) for n in numbers}, key=lambda kind: kind.name)


class _Emitter:
    def __init__(self, program: TokenProgram) -> None:
        self.program, self.layout, self.phases = program, layout(program), phases(program)
        self.first = len(program.given)
        self.rows = row_lengths(program)

    def functions(self) -> Iterator[str]:
        numbers = [n for phase in self.phases for group in phase.groups for n in group.products]
        yield from (kind.pointer for kind in kinds_of_products(self.program))
        yield from self._room(numbers)
        for number, phase in enumerate(self.phases):
            if phase.groups:
                for place, group in enumerate(phase.groups):
                    yield self._following(f"follow_{number}_{place}", group)
                yield self._columns(number, phase)
            elif phase.definitions:
                yield self._tokens(f"tokens_{number}", phase.definitions)
        yield self._results()
        yield self._all()
        yield self._part()

    def _room(self, numbers: Sequence[int]) -> Iterator[str]:
        """Functions that tell how many elements a thread needs for panels, and for a token's row that is
        arranged as packed elements lie, or turned to vectors of which more than half is filled; and how many
        all threads need for sums of parts of the depth."""
        depths = {n: self._width(f.left) for n in numbers if (f := self.program.product(n)) is not None}
        depth = max(depths.values(), default=0)
        packed = [d for n, d in depths.items() if products.weight(self.program, n).packed is not None]
        turned = [2 * d for n, d in depths.items() if products.kind(self.program, n).goes_across]
        yield f"int64_t attngraph_room(void) {{ return {f'room_of({depth})' if depth else '0'}; }}\n"
        yield f"int64_t attngraph_arranged(void) {{ return {max([*packed, *turned], default=0)}; }}\n"
        yield "int64_t attngraph_sums(int64_t tokens, int64_t members) {\n    int64_t most = 0;"
        for phase in self.phases:
            deep = [group for group in phase.groups if self._is_deep(group)]
            if deep:
                rooms = [
                    f"{len(group.products)} * room_of_sums({width}, {depth}, tokens, members)"
                    for group in deep
                    for width, depth in [self._sizes(group)]
                ]
                yield f"    most = larger(most, {' + '.join(rooms)});"
        yield "    return most;\n}\n"

    # --- phases ---

    def _results(self) -> str:
        """A function that rounds the results in 16 bits of tokens `t0 .. t1 - 1`."""
        lines = [
            "static void results(const int64_t *c, int64_t t0, int64_t t1) {",
            "    (void)c, (void)t0, (void)t1;",
        ]
        for place, (number, dtype) in enumerate(short_results(self.program)):
            width, row = self._width(number), self.rows[number - self.first]
            kind, at = NAMED[dtype].c, self.layout.results_at + place
            lines += [
                f"    const float *v{place} = {self._value(number)};",
                f"    {kind} *to{place} = ({kind} *)c[{at}];",
                "    for (int64_t t = t0; t < t1; ++t)",
                f"        for (int64_t i = 0; i < {width}; ++i)",
                f"            to{place}[t * {width} + i] = to_{dtype}(v{place}[t * {row} + i]);",
            ]
        return "\n".join([*lines, "}", ""])

    def _tokens(self, name: str, numbers: Sequence[int]) -> str:
        """A function that computes definitions for tokens `t0 .. t1 - 1`."""
        lines = [f"static void {name}(const int64_t *c, int64_t t0, int64_t t1) {{"]
        lines += [f"    {line}" for line in self._pointers(numbers)]
        lines += ["    for (int64_t t = t0; t < t1; ++t) {"]
        for number in numbers:
            made = self._definition(number)
            lines += [f"        {line}" for line in self._loops(number, made)]
        return "\n".join([*lines, "    }", "}", ""])

    def _following(self, name: str, group: Group) -> str:
        """A function that computes columns `c0 .. c1 - 1` of what follows from products."""
        lines = [f"static void {name}(const int64_t *c, int64_t t0, int64_t t1, int64_t c0, int64_t c1) {{"]
        if group.following:
            lines += [f"    {line}" for line in self._pointers(group.following)]
            lines += ["    for (int64_t t = t0; t < t1; ++t) {"]
            for number in group.following:
                made = self._definition(number)
                formula = Formula(made.value, self._read, made.indices[0])
                place = made.indices[0].value
                lines += [
                    f"        {line}"
                    for line in (
                        "{",
                        *formula.before,
                        "#pragma omp simd",
                        f"for (int64_t {place} = c0; {place} < c1; ++{place}) {{",
                        *(f"    {line}" for line in formula.lines),
                        f"    {self._element(number, [place])} = {formula.code};",
                        "}",
                        "}",
                    )
                ]
            lines += ["    }"]
        return "\n".join([*lines, "}", ""])

    def _sizes(self, group: Group) -> tuple[int, int]:
        """The outputs of products, and the most elements that they add up."""
        factors = [f for n in group.products if (f := self.program.product(n)) is not None]
        return self._width(group.products[0]), max(self._width(f.left) for f in factors)

    def _is_deep(self, group: Group) -> bool:
        """Whether threads may share the depth of a group's products."""
        return all(products.kind(self.program, n).turned for n in group.products)

    def _columns(self, number: int, phase: Phase) -> str:
        """A function that takes columns of the products of a phase until there are none left."""
        lines = [
            f"static void columns_{number}(int64_t *c, int64_t member, int64_t *met) {{",
            "    (void)met;",
            "    float *panels = c[PANELS] ? (float *)c[PANELS] + member * attngraph_room() : 0;",
            "    float *arranged = (float *)c[ARRANGED] + member * c[TOKENS] * attngraph_arranged();",
            "    const int64_t tokens = c[TOKENS];",
        ]
        room = ["(float *)c[SUMS]"]  # and what is taken of it
        deep = {place: group for place, group in enumerate(phase.groups) if self._is_deep(group)}
        for place, group in enumerate(phase.groups):
            width, depth = self._sizes(group)
            kinds = [products.kind(self.program, n) for n in group.products]
            turned, across = int(any(k.turned for k in kinds)), int(all(k.goes_across for k in kinds))
            sizes = f"{width}, {depth}, c, {turned}, {across}, {int(place in deep)}"
            lines.append(f"    const Items items_{place} = items_of({sizes});")
            for n in group.products if place in deep else ():
                lines.append(f"    float *const sums_{n} = {' + '.join(room)};")
                room.append(f"(items_{place}.parts > 1 ? items_{place}.parts * tokens * {width} : 0)")
        count = " + ".join(f"items_{place}.count" for place in range(len(phase.groups)))
        lines += [f"    for (int64_t item; (item = take(c + COUNTERS + {number})) < {count};) {{"]
        for place, group in enumerate(phase.groups):
            width = self._width(group.products[0])
            lines += [
                f"        if (item < items_{place}.count) {{",
                f"            const Items of = items_{place};",
                "            const int64_t c0 = item % of.shares * of.columns;",
                "            const int64_t part = item / of.shares % of.parts;",
                "            const int64_t t0 = item / of.shares / of.parts * of.rows;",
                f"            const int64_t c1 = smaller(c0 + of.columns, {width});",
                "            const int64_t t1 = smaller(t0 + of.rows, tokens);",
                *(f"            {line}" for n in group.products for line in self._product(n, place in deep)),
                f"            if (of.parts == 1) follow_{number}_{place}(c, t0, t1, c0, c1);",
                "            continue;",
                "        }",
                f"        item -= items_{place}.count;",
            ]
        lines += ["    }"]
        if deep:
            lines += [
                f"    if ({' && '.join(f'items_{place}.parts == 1' for place in deep)}) return;",
                "    meet(c, ++*met);",
            ]
        for place, group in deep.items():
            width = self._width(group.products[0])
            lines += [
                f"    if (items_{place}.parts > 1) {{",
                f"        const int64_t c0 = column_of(member, c[MEMBERS], {width});",
                f"        const int64_t c1 = column_of(member + 1, c[MEMBERS], {width});",
                *(
                    f"        add_parts(sums_{n}, items_{place}.parts, tokens, {width}, c0, c1, "
                    f"{self._value(n)}, {self.rows[n - self.first]});"
                    for n in group.products
                ),
                f"        follow_{number}_{place}(c, 0, tokens, c0, c1);",
                "    }",
            ]
        return "\n".join([*lines, "}", ""])

    def _product(self, number: int, is_deep: bool) -> Iterator[str]:
        about = self.program.product(number)
        assert about is not None
        function = products.kind(self.program, number).name
        scales = products.scales(self.program, number, self._given)
        ldx, ldy = (str(self.rows[n - self.first]) for n in (about.left, number))
        width, depth = self._width(number), self._width(about.left)
        x, y = f"{self._value(about.left)} + t0 * {ldx}", f"{self._value(number)} + t0 * {ldy} + c0"
        begin, end = "0", str(depth)
        if is_deep:
            yield "{"
            yield f"const int64_t d0 = {depth} * part / of.parts, d1 = {depth} * (part + 1) / of.parts;"
            yield f"float *const to = of.parts > 1 ? sums_{number} + part * tokens * {width} + c0 : {y};"
            begin, end, y, ldy = "d0", "d1", "to", f"of.parts > 1 ? {width} : {ldy}"
        yield (
            f"{function}({x}, {ldx}, {self._given(about.weight)}, {scales}, c0, {y}, {ldy}, t1 - t0, "
            f"c1 - c0, {begin}, {end}, panels, arranged);"
        )
        if is_deep:
            yield "}"

    def _all(self) -> str:
        """The function that each thread runs."""
        lines = [
            "void attngraph_tokens(int64_t *c) {",
            "    const int64_t tokens = c[TOKENS], members = c[MEMBERS], member = take(c + MEMBER);",
            "    const int64_t t0 = tokens * member / members, t1 = tokens * (member + 1) / members;",
            "    int64_t met = 0;",
        ]
        for number, phase in enumerate(self.phases):
            if number:
                lines.append("    meet(c, ++met);")
            call = f"columns_{number}(c, member, &met)" if phase.groups else f"tokens_{number}(c, t0, t1)"
            lines.append(f"    {call};")
        if self.layout.results:
            lines += ["    meet(c, ++met);", "    results(c, t0, t1);"]
        return "\n".join([*lines, "}", ""])

    def _part(self) -> str:
        """The function that each thread runs for one phase of many tokens, whose products are computed
        already."""
        lines = [
            "void attngraph_part(int64_t *c) {",
            "    const int64_t tokens = c[TOKENS], members = c[MEMBERS], member = take(c + MEMBER);",
            "    const int64_t t0 = tokens * member / members, t1 = tokens * (member + 1) / members;",
            "    switch (c[PHASE]) {",
        ]
        for number, phase in enumerate(self.phases):
            calls = [f"tokens_{number}(c, t0, t1);"] if phase.definitions else [
                f"follow_{number}_{place}(c, t0, t1, 0, {self._width(group.products[0])});"
                for place, group in enumerate(phase.groups) if group.following
            ]  # fmt: skip
            lines.append(f"    case {number}: {' '.join([*calls, 'break;'])}")
        return "\n".join([*lines, "    }", "}", ""])

    # --- definitions ---

    def _definition(self, number: int) -> Definition:
        found = self.program.definition(number)
        assert found is not None
        return found

    def _width(self, number: int) -> int:
        return math.prod(self._definition(number).extents)

    def _loops(self, number: int, made: Definition) -> Iterator[str]:
        """The loops that compute one definition for token `t`."""
        made, flat = _with_digits(made)
        for ranges, value in divided(made):
            names = [i.value for i in made.indices]
            inner = made.over or (made.indices[-1] if names else None)
            formula = Formula(value, self._read, inner)
            indent, closing = "", []
            for name, (low, high) in zip(names, ranges, strict=True):
                if inner is not None and name == inner.value:
                    yield from (indent + line for line in ("{", *formula.before, "#pragma omp simd"))
                    closing.append(indent + "}")
                yield f"{indent}for (int64_t {name} = {low}; {name} < {high}; ++{name}) {{"
                closing.append(indent + "}")
                indent += "    "
            target = self._element(number, [flat(names)])
            if made.over is None:
                yield from (f"{indent}{line}" for line in formula.lines)
                yield f"{indent}{target} = {formula.code};"
            else:
                yield from (f"{indent}{line}" for line in self._fold(made, formula, target))
            yield from reversed(closing)

    @staticmethod
    def _fold(made: Definition, formula: Formula, target: str) -> Iterator[str]:
        assert made.over is not None
        j, count = made.over.value, extent(made.over)
        is_sum = made.fold == "sum"
        yield "{"
        yield from formula.before
        yield f"float all = {'0.0f' if is_sum else '-INFINITY'};"
        if is_sum:
            yield "#pragma omp simd reduction(+:all)"
        yield f"for (int64_t {j} = 0; {j} < {count}; ++{j}) {{"
        yield from (f"    {line}" for line in formula.lines)
        yield f"    all = {f'all + {formula.code}' if is_sum else f'maximum(all, {formula.code})'};"
        yield "}"
        yield f"{target} = all;"
        yield "}"

    # --- memory ---

    def _given(self, number: int) -> str:
        return f"((const {_element_of(self.program.given[number])} *)c[{self.layout.given_at + number}])"

    def _value(self, number: int) -> str:
        return f"((float *)c[{self.layout.values_at + number - self.first}])"

    def _pointers(self, numbers: Sequence[int]) -> Iterator[str]:
        used = sorted({n for number in numbers for n in self._definition(number).reads} | set(numbers))
        for n in used:
            if n >= self.first:
                yield f"float *const v{n} = {self._value(n)};"
                continue
            yield f"const {_element_of(self.program.given[n])} *const g{n} = {self._given(n)};"
            if self.program.given[n].token_dim is not None:
                rank = len(self.program.given[n].shape)
                at = self.layout.strides_at + n * RANKS
                names = ", ".join(f"s{n}_{d} = c[{at + d}]" for d in range(rank))
                yield f"const int64_t {names};"

    def _element(self, number: int, indices: Sequence[str]) -> str:
        row = self.rows[number - self.first]
        return f"v{number}[t]" if row == 1 else f"v{number}[t * {row} + {indices[0]}]"

    def _read(self, node: Expr, indices: list[str]) -> str:
        number = node.value
        if number >= self.first:
            return self._element(number, [_flattened(indices, self._definition(number).extents)])
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


def _element_of(given: Given) -> str:
    """The C type of a given tensor's elements, or of the bytes in which they are packed."""
    return "uint8_t" if given.packed is not None else NAMED[given.dtype].c


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
