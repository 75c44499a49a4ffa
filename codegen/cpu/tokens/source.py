"""A token program as the source of a C library: loops for the definitions of each phase, and tables of the
phases, which the functions of `c/phases.h` share among threads."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from attngraph.codegen.cpu.expression import Writer
from attngraph.codegen.cpu.native import header
from attngraph.codegen.cpu.source import indented
from attngraph.codegen.cpu.tokens import products
from attngraph.codegen.cpu.tokens.indices import RANKS, divided, require_in_range
from attngraph.codegen.cpu.tokens.schedule import Group, facts
from attngraph.codegen.remarks import UnsupportedError
from attngraph.codegen.scalar.form import Lowering, Place, Scalar
from attngraph.ir.dtypes import NAMED
from attngraph.ir.language import E, Expr, operation
from attngraph.ir.language.token_program import Definition, TokenProgram, extent, index, parse
from attngraph.meaning.algebra.intervals import Interval

UNCONTRACTED = """\
#pragma GCC optimize ("fp-contract=off")
#pragma STDC FP_CONTRACT OFF
"""
"""A product and a sum are rounded one after the other: in vectors and in what is left of them alike."""


@functools.lru_cache(maxsize=1024)
def write(text: str) -> str:
    """The source of a program. Raises UnsupportedError: the program has an operation that cannot be emitted
    as C."""
    program = parse(text)
    require_in_range(program)
    products.require_whole_groups(program)
    head = "".join(f"// {line}\n" for line in ("attngraph, for each token", *text.splitlines()))
    headers = (header(f"{name}.h") for name in (*products.HEADERS, "phases"))
    dtypes = {g.dtype for g in program.given} | {r.dtype for r in program.results}
    before = products.preamble(dtypes != {"float32"}, program.in_order) + UNCONTRACTED * program.in_order
    return "\n".join([f"{head}{before}", *headers, *map(indented, _Emitter(program).parts())])


def kinds_of_products(program: TokenProgram) -> list[products.Kind]:
    """The kinds of products whose libraries a program's library is given."""
    numbers = facts(program).products
    return sorted({products.kind(program, n) for n in numbers}, key=lambda kind: kind.name)


class _Emitter:
    def __init__(self, program: TokenProgram) -> None:
        self.program, self.facts = program, facts(program)
        self.depths = {n: self.facts.widths[product.left] for n, product in self.facts.products.items()}

    def parts(self) -> Iterator[Iterable[str]]:
        """The lines of each declaration and function."""
        yield [f"Product *{kind.name};" for kind in kinds_of_products(self.program)]
        table: list[str] = []
        for number, phase in enumerate(self.facts.phases):
            if phase.definitions:
                yield self._function(f"tokens_{number}", phase.definitions, False)
                table.append(f"{{0, 0, tokens_{number}}}")
                continue
            groups = []
            for place, group in enumerate(phase.groups):
                name = f"{number}_{place}"
                if group.following:
                    yield self._function(f"follow_{name}", group.following, True)
                factors = ",".join(map(self._factor, group.products))
                yield [f"static const Factor factors_{name}[] = {{{factors}}};"]
                groups.append(self._group(name, group))
            yield [f"static const Products groups_{number}[] = {{{', '.join(groups)}}};"]
            table.append(f"{{groups_{number}, {len(groups)}, 0}}")
        yield [f"static const Phase phases[] = {{{', '.join(table)}}};"]
        if self.facts.short:
            yield self._results()
        yield from self._exported()

    # --- products ---

    def _factor(self, number: int) -> str:
        """A product as a row of its group's table."""
        about, by, facts = self.facts.products[number], self.program.scales(number), self.facts
        zeros = None if by is None else by.zeros
        of_scales = 0 if by is None else facts.given_at + by.scales
        of_zeros = 0 if zeros is None else facts.given_at + zeros
        depth, weight = facts.widths[about.left], facts.given_at + about.weight
        rows = ", ".join(str(facts.rows[n]) for n in (about.left, number))
        left, result = map(facts.place_of, (about.left, number))
        name = products.kind(self.program, number).name
        return f"{{&{name}, {depth}, {rows}, {left}, {weight}, {of_scales}, {of_zeros}, {result}}}"

    def _group(self, name: str, group: Group) -> str:
        """A group as a row of its phase's table. Threads may share the depth if all weights are turned."""
        kinds = [products.kind(self.program, n) for n in group.products]
        width = self.facts.widths[group.products[0]]
        depth = max(self.depths[n] for n in group.products)
        turned, across = max(k.turned for k in kinds), all(k.goes_across for k in kinds)
        deep = all(k.turned and not k.in_panels for k in kinds) and not self.program.in_order
        numbers = f"{len(kinds)}, {width}, {depth}, {turned}, {across:d}, {deep:d}"
        return f"{{factors_{name}, {numbers}, {f'follow_{name}' if group.following else '0'}}}"

    def _exported(self) -> Iterator[Iterable[str]]:
        """The functions that are called: how much room a call needs, and what each thread runs."""
        given = {n: self.program.given[p.weight] for n, p in self.facts.products.items()}
        depths = {n: d for n, d in self.depths.items() if not given[n].in_panels}
        packed = [d for n, d in depths.items() if given[n].packed is not None]
        count, results = len(self.facts.phases), "results" if self.facts.short else "0"
        room = f"room_of({max(depths.values())})" if depths else "0"
        most = max(packed, default=0)
        arranged = f"room_of_group({most})" if packed and self.program.in_order else f"tokens * {most}"
        yield [
            f"int64_t attngraph_room(void) {{ return {room}; }}",
            f"int64_t attngraph_arranged(int64_t tokens) {{ return {arranged}; }}",
            "int64_t attngraph_panel(void) { return PANEL; }",
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
        for place, (number, dtype) in enumerate(self.facts.short):
            width, row, kind = self.facts.widths[number], self.facts.rows[number], NAMED[dtype].c
            yield f"const float *v{place} = {self._value(number)};"
            yield f"{kind} *to{place} = ({kind} *)c[{self.facts.results_at + place}];"
            yield "for (int64_t t = t0; t < t1; ++t) {"
            yield f"for (int64_t i = 0; i < {width}; ++i) {{"
            yield f"to{place}[t * {width} + i] = to_{dtype}(v{place}[t * {row} + i]);"
            yield from ("}", "}")
        yield "}"

    def _function(self, name: str, numbers: Sequence[int], columns: bool) -> Iterator[str]:
        """A function that computes definitions for tokens `t0 .. t1 - 1`, or columns `c0 .. c1 - 1` of what
        follows from products."""
        more = ", int64_t c0, int64_t c1" * columns
        yield f"static void {name}(const int64_t *c, int64_t t0, int64_t t1{more}) {{"
        yield from self._pointers(numbers)
        yield "for (int64_t t = t0; t < t1; ++t) {"
        for number in numbers:
            made = self.facts.made[number]
            if columns:
                yield from self._loops(number, made, made.value, [("c0", "c1")], lambda names: names[0])
                continue
            made, flat = _with_digits(made)
            for ranges, value in divided(made):
                yield from self._loops(number, made, value, ranges, flat)
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
            yield from (*formula.inside, f"{target} = {formula.text};")
        else:
            j, is_sum = made.over.value, made.fold == "sum"
            yield from ("{", *formula.before, f"float all = {'0.0f' if is_sum else '-INFINITY'};")
            yield from ["#pragma omp simd reduction(+:all)"] * is_sum
            yield f"for (int64_t {j} = 0; {j} < {extent(made.over)}; ++{j}) {{"
            added = f"all + {formula.text}" if is_sum else f"maximum(all, {formula.text})"
            yield from (*formula.inside, f"all = {added};", "}", f"{target} = all;", "}")
        yield from ["}"] * closing

    # --- memory ---

    def _value(self, number: int) -> str:
        return f"((float *)c[{self.facts.place_of(number)}])"

    def _pointers(self, numbers: Sequence[int]) -> Iterator[str]:
        used = sorted({n for number in numbers for n in self.facts.made[number].reads} | set(numbers))
        for n in used:
            if n in self.facts.local:
                yield f"float v{n}[{self.facts.widths[n]}] __attribute__((aligned(64)));"
                continue
            if n in self.facts.made:
                yield f"float *const v{n} = {self._value(n)};"
                continue
            given, place = self.program.given[n], self.facts.given_at + n
            element = "uint8_t" if given.packed is not None else NAMED[given.dtype].c
            yield f"const {element} *const g{n} = ((const {element} *)c[{place}]);"
            if given.token_dim is not None:
                at = self.facts.strides_at + n * RANKS
                names = ", ".join(f"s{n}_{d} = c[{at + d}]" for d in range(len(given.shape)))
                yield f"const int64_t {names};"

    def _element(self, number: int, place: str) -> str:
        row = self.facts.rows[number]
        if number in self.facts.local:
            return f"v{number}[{place}]"
        return f"v{number}[t]" if row == 1 else f"v{number}[t * {row} + {place}]"

    def _read(self, node: Expr, indices: list[str]) -> str:
        number = node.value
        if number in self.facts.made:
            return self._element(number, _flattened(indices, self.facts.made[number].extents))
        about = self.program.given[number]
        if about.packed is not None or about.in_panels:
            raise UnsupportedError(f"single elements of {about.word.strip()}")
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
    value = E.replaced(made.value, digits)
    return Definition((high, low), value), lambda names: f"{names[0]} * {divisor} + {names[1]}"


class _Lowering(Lowering):
    """Lowers the formulas of a token: what the index `inner` does not change is of the whole loop over it."""

    def __init__(self, inner: Expr | None) -> None:
        super().__init__(lambda number: "float", index="long")
        self.inner = inner

    def _lower(self, node: Expr) -> Scalar:
        if node.op != "var":
            return super()._lower(node)
        place = Place.GROUP if self.inner not in (None, node) else Place.INNER
        return Scalar("name", (), self.index, place, node)

    def bounds(self, node: Expr) -> Interval:
        return -math.inf, math.inf


class Formula(Writer):
    """A formula as an expression of C. What it mentions more than once has a name. So has what the innermost
    loop does not change: it is computed before that loop. Within the branches of a selection nothing has a
    name: only the branch that is chosen may be evaluated, because in the other an index may be out of range.

    Args:
        read: the C of a read, given the C of its indices.
        inner: the index of the innermost loop around the formula, if there is a loop.

    Attributes:
        text: the expression. before: declarations that must stand before the innermost loop.
        inside: declarations that must stand before the expression.
    """

    prefix = "x"

    def __init__(self, value: Expr, read: Callable[[Expr, list[str]], str], inner: Expr | None) -> None:
        super().__init__((), {}, set())
        self.lower, self._read, self._has_loop = _Lowering(inner), read, inner is not None
        choices = (n for n in E.walk(value) if n.op == "where")
        self._conditional = {n for choice in choices for branch in choice.args[1:] for n in E.walk(branch)}
        self.text = self.real(value)
        self.before, self.inside = self.lines[Place.GROUP], self.lines[Place.INNER]
        if inner is None:
            self.inside = self.before + self.inside

    def cast(self, value: Scalar) -> tuple[str, int]:
        (arg,) = value.args
        return self.leaf(arg) if value.is_whole and arg.op == "const" else super().cast(value)

    def read(self, value: Scalar) -> str:
        return self._read(value.source, [self.code(index) for index in value.args])

    def is_named(self, value: Scalar) -> bool:
        if value.is_leaf or value.source in self._conditional or self.lower(value.source) is not value:
            return False
        is_before = self._has_loop and value.place is Place.GROUP
        return is_before or (value.op != "read" and self.uses(value) > 1)

    def atom(self, value: Scalar) -> str:
        return self.code(value) if value.source in self._conditional else super().atom(value)
