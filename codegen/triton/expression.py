"""Expressions of the score language as Triton: one formula in, lines of source and a term out.

Index variables keep their names: `b` and `h` are scalars, `q` is a column `[BLOCK_Q, 1]`, `k` a row
`[1, BLOCK_K]`, and everything else broadcasts as it does in `ir/language/evaluate.py`. Reads get a line of
their own, before the loop over keys where they do not depend on the key. Nothing that a user named
can get here: names are made from numbers, literals by `repr`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math

import torch

from attngraph.codegen.triton.plan import SMALL, Plan, is_checked_at_launch
from attngraph.codegen.unsupported import UnsupportedError
from attngraph.ir.language import evaluate
from attngraph.ir.language import expr as E
from attngraph.ir.language import score as S
from attngraph.ir.language.expr import Expr
from attngraph.meaning.masks import tiles

_COMPARE, _OR, _AND, _SUM, PRODUCT, _SIGN, _ATOM = 1, 2, 4, 6, 7, 8, 9
"""How tightly Python's operations bind."""
_ARITHMETIC = {"add": ("+", _SUM), "sub": ("-", _SUM), "mul": ("*", PRODUCT)}
_FUNCTIONS = frozenset({"exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "sigmoid"})
_ROUNDING = {"floor": "tl.floor", "ceil": "tl.ceil", "trunc": "truncate", "round": "round_even"}
_VALUES = frozenset({"dot", "s"})
_OPEN = _VALUES | {"p", "read", "size", "random"}
_CONSTANTS = evaluate.Environment(
    evaluate.Tile((0, 1), (0, 1), (0, 1), (0, 1)), (), (), torch.float32, torch.device("cpu")
)


_Key = tuple[Expr, str]
"""A node, and what was made of it."""


@dataclasses.dataclass(frozen=True)
class Term:
    """Source of an expression, how tightly it binds, and its kind: "bool", "int" (32 bits), "long"
    or "float"."""

    code: str
    level: int
    kind: str

    def at(self, level: int) -> str:
        return self.code if self.level >= level else f"({self.code})"

    @property
    def is_integer(self) -> bool:
        return self.kind != "float"


@functools.lru_cache(maxsize=4096)
def follows_score(node: Expr) -> bool:
    """Whether the expression depends on the dot or the score."""
    return any(n.op in _VALUES for n in E.walk(node))


def bounds(node: Expr) -> tiles.Interval:
    """Bounds of an integer expression whose indices and sizes lie in [0, SMALL)."""
    q = S.index("q")  # sizes lie in the same range as indices, and intervals know no identity
    same = E.rebuild(node, lambda n, args: q if n.op == "size" else E.make(n.op, args, n.value, n.kind))
    span = (0.0, float(SMALL - 1))
    return tiles.interval(same, tiles.Box(span, span, span, span), {})


class Writer:
    """Writes the formulas of one kernel. `before` collects lines that come before the loop over
    keys, `inside` those of the loop body begun last, `calls` the helpers used."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.reads = {read.number: read for read in plan.reads}
        self.before: list[str] = []
        self.inside: list[str] = []
        self.calls: set[str] = set()
        self._labels: dict[_Key, str] = {}
        self._outer: dict[_Key, Term] = {}
        self._inner: dict[_Key, Term] = {}
        self._uses: collections.Counter[Expr] = collections.Counter()

    def begin_body(self) -> None:
        self.inside = []
        self._inner = {}

    def forget(self) -> None:
        """Begin another kernel: nothing is written yet."""
        self.begin_body()
        self.before = []
        self._outer = {}

    def expression(self, node: Expr) -> Term:
        """The term of a statement's expression; the lines that it needs are written on the way."""
        # A value made from the score is another one in each statement.
        self._inner = {key: term for key, term in self._inner.items() if not follows_score(key[0])}
        self._uses = collections.Counter(arg for n in E.walk(node) for arg in n.args)
        return self._term(node)

    def truth(self, node: Expr) -> str:
        return self._truth(self.expression(node))

    def _term(self, node: Expr) -> Term:
        known = self._outer.get((node, "t")) or self._inner.get((node, "t"))
        if known is not None:
            return known
        if node.args and all(not n.free and n.op not in _OPEN for n in E.walk(node)):
            return self._constant(E.const(evaluate.evaluate(node, _CONSTANTS, {})))  # type: ignore[arg-type]
        term = self._build(node)
        if self._uses[node] > 1 and node.args and node.op != "read":
            return self._bind(node, term)
        return term

    def _bind(self, node: Expr, term: Term, prefix: str = "t") -> Term:
        """Give a term made of the node a name, by a line before the loop or inside it. Under the
        prefix "t" it is the node's own value."""
        key = node, prefix
        if key not in self._labels:
            self._labels[key] = f"{prefix}{sum(other == prefix for _, other in self._labels)}"
        label = self._labels[key]
        inside = follows_score(node) or S.index("k") in node.free
        known = self._inner if inside else self._outer
        if key not in known:
            (self.inside if inside else self.before).append(f"{label} = {term.code}")
            known[key] = Term(label, _ATOM, term.kind)
        return known[key]

    def _call(self, name: str, *args: str, kind: str = "float") -> Term:
        if not name.startswith("tl."):
            self.calls.add(name)
        return Term(f"{name}({', '.join(args)})", _ATOM, kind)

    def _build(self, node: Expr) -> Term:
        op, args = node.op, node.args
        match op:
            case "const":
                return self._constant(node)
            case "var" | "size":
                return Term(str(node.value), _ATOM, "long" if self.plan.wide else "int")
            case "dot" | "s":
                return Term(op, _ATOM, "float")
            case "read":
                return self._read(node)
            case "p":
                raise UnsupportedError("the weight `p` inside this expression")
        terms = [self._term(arg) for arg in args]
        if op in _ARITHMETIC or op == "neg":
            return self._arithmetic(node, terms)
        if op in E.COMPARISONS:
            left, right = (self._number(t) for t in terms)
            return Term(f"{left.at(_OR)} {E.BINARY[op][0]} {right.at(_OR)}", _COMPARE, "bool")
        if op in _FUNCTIONS:
            return self._call(f"tl.{op}", self._real(terms[0]))
        if op in _ROUNDING:
            return terms[0] if terms[0].is_integer else self._call(_ROUNDING[op], terms[0].code)
        match op, terms:
            case "and" | "or", [a, b]:
                sign, level = ("&", _AND) if op == "and" else ("|", _OR)
                return Term(f"{self._truth(a, level)} {sign} {self._truth(b, level + 1)}", level, "bool")
            case "not", [a]:
                return Term(f"~{self._truth(a, _SIGN)}", _SIGN, "bool")
            case "div", [a, b]:
                left, right = self._number(a), self._number(b)
                return Term(f"{left.at(PRODUCT)} / {right.at(_SIGN)}", PRODUCT, "float")
            case "floordiv" | "mod", [a, b]:
                return self._divide(node, self._number(a), self._number(b))
            case "min" | "max", [a, b]:
                name = "tl.minimum" if op == "min" else "tl.maximum"
                kind = _join(self._number(a), self._number(b))
                nan = ["propagate_nan=tl.PropagateNan.ALL"] if kind == "float" else []
                return self._call(name, self._number(a).code, self._number(b).code, *nan, kind=kind)
            case "abs", [a]:
                return self._call("tl.abs", self._number(a).code, kind=self._number(a).kind)
            case "sign", [a]:
                x = self._number(self._atom(args[0], a))
                one, zero = ("1", "0") if x.is_integer else ("1.0", "0.0")
                negative = f"tl.where({x.code} < 0, -{one}, {zero})"
                return Term(f"tl.where({x.code} > 0, {one}, {negative})", _ATOM, x.kind)
            case "isnan", [a]:
                x = self._atom(args[0], a)
                return Term(f"{x.code} != {x.code}", _COMPARE, "bool")
            case "tanh", [a]:
                half = self.plan.dtype is not torch.float32
                return self._call("tanh_half" if half else "tanh", self._real(a))
            case "where", [c, a, b]:
                return self._where(c, a, b)
            case "pow", [a, b]:
                return self._power(node, a, b)
            case "float", [a]:
                return self._call("tl.cast", a.code, "tl.float32")
            case "int", [a]:
                return self._call("tl.cast", a.code, "tl.int64", kind="long")
            case "random", _:
                return self._call("uniform", *(self._integer(t) for t in terms))
        raise UnsupportedError(f"`{op}`")

    def _constant(self, node: Expr) -> Term:
        value = node.value
        if node.kind == "bool":
            return Term(repr(bool(value)), _ATOM, "bool")
        if node.kind == "int":
            if abs(value) >= 1 << 63:
                raise UnsupportedError("an integer of more than 64 bits")
            small = abs(value) < 1 << 31
            code = repr(int(value)) if small else f"tl.cast({int(value)!r}, tl.int64)"
            return Term(code, _SIGN if value < 0 and small else _ATOM, "int" if small else "long")
        number = float(value)
        code = repr(number) if math.isfinite(number) else f'float("{number!r}")'
        return Term(code, _SIGN if code.startswith("-") else _ATOM, "float")

    def _number(self, term: Term) -> Term:
        return self._call("tl.cast", term.code, "tl.int32", kind="int") if term.kind == "bool" else term

    def _real(self, term: Term) -> str:
        return f"tl.cast({term.code}, tl.float32)" if term.is_integer else term.code

    def _integer(self, term: Term) -> str:
        return self._number(term).code if term.is_integer else f"tl.cast({term.code}, tl.int64)"

    def _truth(self, term: Term, level: int = 0) -> str:
        if term.kind != "bool":
            term = Term(f"{term.at(_OR)} != 0", _COMPARE, "bool")
        return term.at(level)

    def _atom(self, node: Expr, term: Term, prefix: str = "t") -> Term:
        """The term if it is a name or a number, else a name for it."""
        return term if term.level == _ATOM and "(" not in term.code else self._bind(node, term, prefix)

    def _arithmetic(self, node: Expr, terms: list[Term]) -> Term:
        if len(terms) == 2 and all(t.kind == "bool" for t in terms):
            raise UnsupportedError(f"arithmetic of two truth values: `{E.format_expr(node)}`")
        terms = [self._number(t) for t in terms]
        kind = _join(*terms)
        if kind == "int" and not _fits(bounds(node)):
            kind = "long"
            terms = [self._call("tl.cast", t.code, "tl.int64", kind="long") for t in terms]
        if node.op == "neg":
            return Term(f"-{terms[0].at(_SIGN)}", _SIGN, kind)
        sign, level = _ARITHMETIC[node.op]
        return Term(f"{terms[0].at(level)} {sign} {terms[1].at(level + 1)}", level, kind)

    def _divide(self, node: Expr, a: Term, b: Term) -> Term:
        kind = _join(a, b)
        whole = node.op == "floordiv"
        if kind == "float":
            return self._call("floor_divide_real" if whole else "floor_modulo", self._real(a), self._real(b))
        positive = node.args[1].op == "size" or bounds(node.args[1])[0] >= 1
        if bounds(node.args[0])[0] >= 0 and positive:
            return Term(f"{a.at(PRODUCT)} {'//' if whole else '%'} {b.at(_SIGN)}", PRODUCT, kind)
        return self._call("floor_divide" if whole else "floor_modulo", a.code, b.code, kind=kind)

    def _where(self, condition: Term, a: Term, b: Term) -> Term:
        if a.kind == b.kind == "bool":
            return self._call("tl.where", self._truth(condition), a.code, b.code, kind="bool")
        a, b = self._number(a), self._number(b)
        return self._call("tl.where", self._truth(condition), a.code, b.code, kind=_join(a, b))

    def _power(self, node: Expr, a: Term, b: Term) -> Term:
        base, exponent = node.args
        whole = exponent.op == "const" and exponent.value == exponent.value and exponent.value in range(2, 5)
        if whole:
            x = self._atom(base, Term(self._real(a), _ATOM if a.is_integer else a.level, "float"), "x")
            return Term(" * ".join([x.code] * int(exponent.value)), PRODUCT, "float")
        if base.op == "const" and base.value == base.value and 0 < base.value < math.inf:
            rate = "" if base.value == 2 else f" * {math.log2(base.value)!r}"
            return self._call("tl.exp2", f"{Term(self._real(b), b.level, 'float').at(PRODUCT)}{rate}")
        return self._call("power", self._real(a), self._real(b))

    def _read(self, node: Expr) -> Term:
        """A masked load: an index out of range reads nothing, and its value is not used."""
        known = self._outer.get((node, f"r{node.value}_at")) or self._inner.get((node, f"r{node.value}_at"))
        if known is not None:
            return known
        name, read = f"r{node.value}", self.reads[node.value]
        address, inside = [name], []
        for axis, arg in enumerate(node.args):
            term = self._number(self._term(arg))
            if not term.is_integer:
                term = self._call("tl.cast", term.code, "tl.int64", kind="long")
            if arg.op == "const" and arg.value < 0:
                raise UnsupportedError(f"a negative index: `{E.format_expr(node)}`")
            if arg.op not in ("var", "const"):
                term = self._atom(arg, term, "i")
                inside += [f"({term.code} >= 0)"] if bounds(arg)[0] < 0 else []
            place = f"tl.cast({term.code}, tl.int64)" if read.wide else term.code
            address.append(f"{place} * {name}_stride{axis}")
            if not is_checked_at_launch(arg):
                inside.append(f"({term.code} < {name}_size{axis})")
        mask = f", mask={' & '.join(inside)}, other=0" if inside else ""
        load = f"tl.load({' + '.join(address)}{mask})"
        code = {
            "bool": f"{load} != 0",
            "int": f"tl.cast({load}, tl.int64)",
            "half": f"tl.cast({load}, tl.float32)",
        }.get(read.kind, load)
        kind = {"bool": "bool", "int": "long"}.get(read.kind, "float")
        return self._bind(node, Term(code, _COMPARE if kind == "bool" else _ATOM, kind), f"{name}_at")


def _join(*terms: Term) -> str:
    """The kind in which these meet."""
    kinds = {t.kind for t in terms}
    return "float" if "float" in kinds else "long" if "long" in kinds else "int"


def _fits(interval: tiles.Interval) -> bool:
    return interval[0] >= -(1 << 31) and interval[1] < 1 << 31
