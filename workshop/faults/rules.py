"""The rules by which a model's source gets a fault: each changes one expression as ports get it wrong."""

from __future__ import annotations

import ast
import copy
import dataclasses
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Fault:
    """One change of a source: `rule`, the line of `before`, which becomes `after`, the lines of the function
    that holds it, and of the statement (of a compound one, its first lines). `text`: the whole source with
    it; no line moves."""

    rule: str
    line: int
    before: str
    after: str
    function: tuple[int, int]
    statement: tuple[int, int]
    text: str = dataclasses.field(repr=False)


COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OTHER = {
    "sin": "cos", "cos": "sin", "gelu": "relu", "relu": "gelu", "silu": "gelu", "tanh": "sigmoid",
    "sigmoid": "tanh", "rsqrt": "sqrt", "triu": "tril", "tril": "triu", "repeat_interleave": "repeat",
}  # fmt: skip
"""Functions, and what is taken for them."""


def _edge(node: ast.AST) -> ast.AST | None:
    """A comparison off by one."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        return ast.Compare(node.left, [COMPARED[type(node.ops[0])]()], node.comparators)
    return None


def _sign(node: ast.AST) -> ast.AST | None:
    """A sum that becomes a difference, or the other way round."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        return ast.BinOp(node.left, ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(), node.right)
    return None


def _minus(node: ast.AST) -> ast.AST | None:
    """A minus that is left out."""
    plain = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    return node.operand if plain and not isinstance(node.operand, ast.Constant) else None  # type: ignore[attr-defined]


def _not(node: ast.AST) -> ast.AST | None:
    """A mask that is not turned."""
    return node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert) else None


def _joined(node: ast.AST) -> ast.AST | None:
    """Masks joined in the other way."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        return ast.BinOp(
            node.left, ast.BitOr() if isinstance(node.op, ast.BitAnd) else ast.BitAnd(), node.right
        )
    return None


def _part(node: ast.AST) -> ast.AST | None:
    """A summand that is left out: a residual, a mask, a bias."""
    return node.left if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) else None


def _factor(node: ast.AST) -> ast.AST | None:
    """A factor that is left out: a scale, a gate, a norm's weight."""
    return node.left if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) else None


def _power(node: ast.AST) -> ast.AST | None:
    """Another power: a scale by the width instead of its root."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return ast.BinOp(node.left, ast.Pow(), ast.BinOp(node.right, ast.Mult(), ast.Constant(2)))
    return None


def _number(node: ast.AST) -> ast.AST | None:
    """A number a little too large: a base, an epsilon, a cap."""
    whole = isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value != 0
    return ast.Constant(node.value * 1.01) if whole else None  # type: ignore[attr-defined]


def _unmasked(node: ast.AST) -> ast.AST | None:
    """A mask that is left out."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "masked_fill"
    ):
        return node.func.value
    return None


def _function(node: ast.AST) -> ast.AST | None:
    """Another function of the same arguments."""
    if isinstance(node, ast.Attribute) and node.attr in OTHER:
        return ast.Attribute(node.value, OTHER[node.attr], node.ctx)
    return None


def _axis(node: ast.AST) -> ast.AST | None:
    """The axis before the last in place of the last."""
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if named and node.func.attr in ("softmax", "mean", "var", "chunk", "cat"):  # type: ignore[attr-defined]
        found = copy.deepcopy(node)
        for part in ast.walk(found):
            if isinstance(part, ast.UnaryOp) and ast.unparse(part) == "-1":
                part.operand = ast.Constant(2)
                return found
    return None


def _unnormed(node: ast.AST) -> ast.AST | None:
    """A norm that is left out."""
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 1
    return node.args[0] if named and "norm" in node.func.attr else None  # type: ignore[attr-defined]


def _unturned(node: ast.AST) -> ast.AST | None:
    """A transposition that is left out."""
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.value if named and node.func.attr == "transpose" else None  # type: ignore[attr-defined]


def _bias(node: ast.AST) -> ast.AST | None:
    """A bias that is left out of a product."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Linear"):
        return ast.Call(node.func, node.args[:2], [ast.keyword("bias", ast.Constant(False))])
    return None


RULES: dict[str, Callable[[ast.AST], ast.AST | None]] = {
    "comparison off by one": _edge, "sign": _sign, "minus left out": _minus, "mask not turned": _not,
    "masks joined otherwise": _joined, "summand left out": _part, "factor left out": _factor, "power": _power,
    "number 1 % larger": _number, "mask left out": _unmasked, "another function": _function,
    "another axis": _axis, "norm left out": _unnormed, "not transposed": _unturned, "no bias": _bias,
}  # fmt: skip


def faults(source: str) -> Iterator[Fault]:
    """Every fault that the rules give a source, in functions, but for conditions and what is raised."""
    tree, lines = ast.parse(source), source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        for node in _values(function):
            if isinstance(node, ast.expr) and node.lineno == node.end_lineno:
                begin, end = (starts[n - 1] + c for n, c in ((node.lineno, node.col_offset),
                              (node.end_lineno or 0, node.end_col_offset or 0)))  # fmt: skip
                for rule, change in RULES.items():
                    changed = change(node)
                    if changed is not None:
                        after = ast.unparse(ast.fix_missing_locations(changed))
                        text = source.encode()[:begin] + f"({after})".encode() + source.encode()[end:]
                        first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
                        held = first, function.end_lineno or first
                        statement = _statement(function, node.lineno)
                        said = ast.unparse(node)
                        yield Fault(rule, node.lineno, said, after, held, statement, text.decode())


def _statement(function: ast.AST, line: int) -> tuple[int, int]:
    """The lines of the smallest statement with this line; of one that has a body, those before it."""
    found = (line, line)
    for node in ast.walk(function):  # outer ones come first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = [inner.lineno for inner in getattr(node, "body", ()) if isinstance(inner, ast.stmt)]
            last = min(body) - 1 if body else node.end_lineno or 0
            if line <= max(last, node.lineno):
                found = node.lineno, max(last, node.lineno)
    return found


def _values(node: ast.AST) -> Iterator[ast.AST]:
    """What a function computes: no annotations, decorators, conditions, raises, or functions within."""
    skipped = (ast.Raise, ast.Assert, ast.FunctionDef, ast.Lambda, ast.JoinedStr)
    fields = ("annotation", "returns", "decorator_list", "test", "args", "slice")
    plain = not isinstance(node, ast.Call)
    for name, value in ast.iter_fields(node):
        if name in fields and (plain or name != "args"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, skipped):
                yield child
                yield from _values(child)
