"""Expressions of the score language as C: one formula in, lines of source and a term out.

A tile is a loop over queries `q` around a loop over keys `k`, both counted from the tile's corner by
`i` and `j`. What does not depend on the key is computed once for a row or for the whole tile; what
depends on the key alone goes into an array of the tile first. Names are made from numbers, literals by
`repr`: nothing that a user named can get here.
"""

from __future__ import annotations

import collections

import torch

from attngraph.codegen.cpu.terms import (
    READS,
    TYPES,
    Term,
    as_number,
    bits,
    bounds,
    cast,
    is_number,
    join,
    kind_of_number,
    number,
    truth,
)  # fmt: skip
from attngraph.codegen.unsupported import UnsupportedError
from attngraph.ir.language import evaluate
from attngraph.ir.language import expr as E
from attngraph.ir.language import score as S
from attngraph.ir.language.expr import Expr

GROUP, ROW, TILE, INNER = range(4)
"""Where a value is computed: once, for each query, for each key, for each pair."""
_FUNCTIONS = {
    "exp": "exp_", "exp2": "exp2_", "log": "logf", "log2": "log2f", "tanh": "tanh_", "sigmoid": "sigmoid_",
    "sqrt": "sqrtf", "rsqrt": "rsqrt_", "sin": "sinf", "cos": "cosf", "erf": "erff",
}  # fmt: skip
_ROUNDING = {"floor": "floorf", "ceil": "ceilf", "trunc": "truncf", "round": "rintf"}
_CHEAP = frozenset({"var", "const", "add", "sub", "neg", "and", "or", "not"}) | E.COMPARISONS
_NUMBERS = evaluate.Environment(
    evaluate.Tile((0, 1), (0, 1), (0, 1), (0, 1)), (), (), torch.float32, torch.device("cpu")
)


class Writer:
    """Writes the formulas of one function over a tile. `lines[place]` are the lines to compute at each
    place; `numbers` the expressions of sizes whose values a call must bring, with their kinds."""

    def __init__(self, dtypes: tuple[torch.dtype, ...], numbers: dict[Expr, str]) -> None:
        self.dtypes = dtypes
        self.numbers = numbers
        self.divisors: set[Expr] = set()
        self.lines: dict[int, list[str]] = {place: [] for place in (GROUP, ROW, TILE, INNER)}
        self._terms: dict[Expr, Term] = {}
        self._uses: collections.Counter[Expr] = collections.Counter()
        self._count = 0

    def expression(self, node: Expr) -> Term:
        """The term of a statement's expression; the lines that it needs are written on the way. A
        statement that then changes the score or the weight must say so by calling `changed`."""
        self._uses = collections.Counter(arg for n in E.walk(node) for arg in n.args)
        return self.term(node)

    def changed(self, op: str) -> None:
        """Forget what was made of the score or the weight: it has another value from here on."""
        self._terms = {n: t for n, t in self._terms.items() if all(m.op != op for m in E.walk(n))}

    def place_of(self, node: Expr) -> int:
        names = {v.value for v in node.free}
        if any(n.op in ("dot", "s", "p") for n in E.walk(node)):
            return INNER
        return (INNER if "q" in names else TILE) if "k" in names else ROW if "q" in names else GROUP

    def term(self, node: Expr) -> Term:
        known = self._terms.get(node)
        if known is not None:
            return known
        if node.op == "const":
            return self._constant(node)
        if is_number(node):
            return self._number(node)
        if node.op in ("var", "dot", "s", "p"):
            return Term(node.value or node.op, "int" if node.op == "var" else "float")
        built = self._read(node) if node.op == "read" else self._build(node)
        place = self.place_of(node)
        expensive = any(n.op not in _CHEAP for n in E.walk(node))
        if place == INNER and self._uses[node] < 2:
            return built
        if place == TILE and not expensive:
            return built
        return self._keep(node, built, place)

    def _keep(self, node: Expr, built: Term, place: int) -> Term:
        name = f"t{self._count}"
        self._count += 1
        if place == TILE:
            self.lines[GROUP].append(f"{TYPES[built.kind]} {name}[BLOCK_K];")
            self.lines[TILE].append(f"{name}[j] = {built.code};")
            name += "[j]"
        else:
            self.lines[place].append(f"const {TYPES[built.kind]} {name} = {built.code};")
        self._terms[node] = Term(name, built.kind)
        return self._terms[node]

    def _constant(self, node: Expr) -> Term:
        if node.kind == "bool":
            return Term(str(int(node.value)), "bool")
        if node.kind == "int":
            if abs(node.value) >= 1 << 63:
                raise UnsupportedError("an integer of more than 64 bits")
            if abs(node.value) < 1 << 31:
                return Term(f"({node.value!r})" if node.value < 0 else repr(node.value), "int")
            return Term(f"INT64_C({node.value!r})", "long")
        return Term(number(float(node.value)), "float")

    def _number(self, node: Expr) -> Term:
        """A constant expression is worked out here; one of sizes becomes an argument of the call."""
        if all(n.op != "size" for n in E.walk(node)):
            return self._constant(E.const(evaluate.evaluate(node, _NUMBERS, {})))  # type: ignore[arg-type]
        kind = kind_of_number(node)
        self.numbers.setdefault(node, kind)
        place = list(self.numbers).index(node)
        return Term(f"c->real[{place}]" if kind == "float" else f"(int)c->whole[{place}]", kind)

    def _build(self, node: Expr) -> Term:
        op, args = node.op, node.args
        terms = [self.term(arg) for arg in args]
        if op in ("add", "sub", "mul", "neg"):
            kind = self._wide_enough(node, terms)
            if op == "neg":
                return Term(f"(-{cast(terms[0], kind)})", kind)
            return Term(f"({cast(terms[0], kind)} {E.BINARY[op][0]} {cast(terms[1], kind)})", kind)
        if op in E.COMPARISONS:
            kind = join(*terms)
            return Term(f"({cast(terms[0], kind)} {E.BINARY[op][0]} {cast(terms[1], kind)})", "bool")
        if op in _FUNCTIONS:
            return Term(f"{_FUNCTIONS[op]}({cast(terms[0], 'float')})", "float")
        if op in _ROUNDING:
            whole = terms[0].kind != "float"
            return as_number(terms[0]) if whole else Term(f"{_ROUNDING[op]}({terms[0].code})", "float")
        match op, terms:
            case "and" | "or", [a, b]:
                return Term(f"({truth(a)} {'&' if op == 'and' else '|'} {truth(b)})", "bool")
            case "not", [a]:
                return Term(f"(!{truth(a)})", "bool")
            case "div", [a, b]:
                return Term(f"({cast(a, 'float')} / {cast(b, 'float')})", "float")
            case "floordiv" | "mod", [a, b]:
                return self._divide(node, a, b)
            case "min" | "max", [a, b]:
                kind = join(a, b)
                if kind == "float":
                    name = "minimum" if op == "min" else "maximum"
                    return Term(f"{name}({cast(a, kind)}, {cast(b, kind)})", kind)
                sign = "<" if op == "min" else ">"
                left, right = self._atoms(node, a, b)
                return Term(f"({left} {sign} {right} ? {left} : {right})", kind)
            case "abs", [a]:
                if a.kind == "float":
                    return Term(f"fabsf({a.code})", "float")
                (x,) = self._atoms(node, a)
                return Term(f"({x} < 0 ? -{x} : {x})", as_number(a).kind)
            case "sign", [a]:
                if a.kind == "float":
                    return Term(f"sign_({a.code})", "float")
                (x,) = self._atoms(node, a)
                return Term(f"(({x} > 0) - ({x} < 0))", "int")
            case "isnan", [a]:
                return Term(f"(isnan({a.code}) != 0)" if a.kind == "float" else "0", "bool")
            case "where", [condition, a, b]:
                kind = "bool" if a.kind == b.kind == "bool" else join(a, b)
                return Term(f"({truth(condition)} ? {cast(a, kind)} : {cast(b, kind)})", kind)
            case "pow", [a, b]:
                return self._power(node, a, b)
            case "float", [a]:
                return Term(cast(a, "float"), "float")
            case "int", [a]:
                return Term(f"((int64_t){a.code})", "long")
            case "random", _:
                return Term(f"uniform({', '.join(bits(t) for t in terms)})", "float")
        raise UnsupportedError(f"`{op}`")

    def _wide_enough(self, node: Expr, terms: list[Term]) -> str:
        kind = join(*terms)
        low, high = bounds(node)
        return "long" if kind == "int" and not (low > -(1 << 31) and high < 1 << 31) else kind

    def _atoms(self, node: Expr, *terms: Term) -> list[str]:
        """The terms' code for a formula that names each twice: long ones get a name first."""
        kind = join(*terms)
        found = []
        for arg, term in zip(node.args, terms, strict=True):
            if len(term.code) > 24 and arg not in self._terms and self.place_of(arg) != TILE:
                term = self._keep(arg, term, self.place_of(arg))
            found.append(cast(term, kind))
        return found

    def _divide(self, node: Expr, a: Term, b: Term) -> Term:
        kind, divisor = join(a, b), node.args[1]
        whole = node.op == "floordiv"
        if kind == "float":
            name = "floor_divide_float" if whole else "floor_modulo_float"
            return Term(f"{name}({cast(a, 'float')}, {cast(b, 'float')})", "float")
        if not is_number(divisor) or (divisor.op == "const" and divisor.value in (0, -1)):
            raise UnsupportedError(f"a whole division by what may be 0 or -1: `{E.format_expr(node)}`")
        if divisor in self.numbers:
            self.divisors.add(divisor)
        positive = divisor in self.numbers or bounds(divisor)[0] >= 1
        if bounds(node.args[0])[0] >= 0 and positive:
            return Term(f"({cast(a, kind)} {'/' if whole else '%'} {cast(b, kind)})", kind)
        name = f"floor_{'divide' if whole else 'modulo'}_{kind}"
        return Term(f"{name}({cast(a, kind)}, {cast(b, kind)})", kind)

    def _power(self, node: Expr, a: Term, b: Term) -> Term:
        exponent = node.args[1]
        if E.is_const(exponent, 2):
            if self.place_of(node.args[0]) != TILE:
                a = self._keep(node.args[0], a, self.place_of(node.args[0]))
            return Term(f"({cast(a, 'float')} * {cast(a, 'float')})", "float")
        return Term(f"powf({cast(a, 'float')}, {cast(b, 'float')})", "float")

    def _read(self, node: Expr) -> Term:
        """An element of a read tensor. Plain indices were checked when the call began; one that is
        computed is kept in range, and noted in `bad` if it was not."""
        if self.dtypes[node.value] not in READS:
            raise UnsupportedError(f"a read tensor of {self.dtypes[node.value]}")
        held, conversion, kind = READS[self.dtypes[node.value]]
        source = f"c->read[{node.value}]"
        with_key = [
            axis for axis, arg in enumerate(node.args) if S.index("k") in arg.free or self._varies(arg)
        ]
        rests = [_without_key(node.args[axis]) for axis in with_key]
        in_a_row = len(with_key) == 1 and rests[0] is not None
        fixed = [
            f"(int64_t){self._in_range(node, axis, self.place_of(arg))} * {source}.stride[{axis}]"
            for axis, arg in enumerate(node.args)
            if axis not in with_key
        ]
        base = " + ".join([f"(const {held} *){source}.data", *fixed])
        if not with_key:
            return Term(f"from_{conversion}(*({base}))", kind)
        free = set().union(*(a.free for i, a in enumerate(node.args) if i not in with_key))
        free |= rests[0].free if in_a_row and rests[0] is not None else set()
        place = ROW if S.index("q") in free else GROUP
        pointer, self._count = f"p{self._count}", self._count + 1
        self.lines[place].append(f"const {held} *const {pointer} = {base};")
        if in_a_row:
            return self._read_row(node, with_key[0], rests[0], place, pointer)
        inner = [
            f"{self._in_range(node, axis, self.place_of(node))} * (int){source}.stride[{axis}]"
            for axis in with_key
        ]
        return Term(f"from_{conversion}({pointer}[{' + '.join(inner)}])", kind)

    def _varies(self, node: Expr) -> bool:
        return any(n.op in ("dot", "s", "p") for n in E.walk(node))

    def _read_row(self, node: Expr, axis: int, rest: Expr | None, place: int, pointer: str) -> Term:
        """Neighbours along an axis, for neighbouring keys: copied to an array of the tile or the row."""
        assert rest is not None
        _, conversion, kind = READS[self.dtypes[node.value]]
        name, source = f"t{self._count}", f"c->read[{node.value}]"
        self._count += 1
        first = "k0"
        if rest is not E.ZERO:
            first = f"in_range_row(k0 + {cast(self.term(rest), 'long')}, keys, {source}.size[{axis}], &bad)"
        self.lines[GROUP].append(f"{TYPES[kind]} {name}[BLOCK_K] = {{0}};")
        self.lines[place].append(
            f"COPY({name}, from_{conversion}, {pointer} + ({first}) * {source}.stride[{axis}], "
            f"{source}.stride[{axis}], keys);"
        )
        self._terms[node] = Term(f"{name}[j]", kind)
        return self._terms[node]

    def _in_range(self, node: Expr, axis: int, place: int) -> str:
        arg = node.args[axis]
        term = self.term(arg)
        if arg.op in ("var", "const"):
            return term.code
        size = f"(int)c->read[{node.value}].size[{axis}]"
        name, self._count = f"i{self._count}", self._count + 1
        held = "int64_t" if term.kind in ("long", "float") else "int"
        self.lines[place].append(f"const {held} {name} = ({held}){term.code};")
        outside = f"({name} < 0) | ({name} >= {size})"
        if place in (TILE, INNER):
            outside = f"({outside}) & (j < keys)"
        self.lines[place].append(f"bad |= {outside};")
        self.lines[place].append(
            f"const int {name}_kept = {name} < 0 ? 0 : {name} >= {size} ? {size} - 1 : (int){name};"
        )
        return f"{name}_kept"


def _without_key(index: Expr) -> Expr | None:
    """What is left of an index that grows by one from each key to the next, or None if it does not."""
    key = S.index("k")
    if index is key:
        return E.ZERO
    if index.op == "add" and key in index.free:
        left, right = index.args
        if key not in right.free:
            rest, other = _without_key(left), right
        elif key not in left.free:
            rest, other = _without_key(right), left
        else:
            return None
        return None if rest is None else E.make("add", (rest, other), None, index.kind)
    if index.op == "sub" and key in index.free and key not in index.args[1].free:
        rest = _without_key(index.args[0])
        return None if rest is None else E.make("sub", (rest, index.args[1]), None, index.kind)
    return None
