"""Weights changed after the softmax (`p = ...`), where each change is a multiplication.

The softmax's denominator is known only after the last key, but a multiple of the weight can be
computed before: p * f = exp(s) * f / sum(exp(s)). So dropout, head gates and masks applied to weights enter
the online softmax as a factor. The other supported change is `where(isnan(p), 0, p)`: a weight is NaN
only if its whole row is, so it is decided once per row, at the end.
"""

import dataclasses

from attngraph.codegen.remarks import UnsupportedError
from attngraph.ir.language import DOT, WEIGHT, E, Expr, ScoreProgram, Weight, format_expr, operation

_ONE = E.const(1.0)


@dataclasses.dataclass(frozen=True)
class Multiple:
    """`factor` times the softmax's weight. `keeps_nan`: a NaN row stays NaN (otherwise it becomes zeros)."""

    factor: Expr = _ONE
    keeps_nan: bool = True

    @property
    def is_plain(self) -> bool:
        return self.factor is _ONE


_NOTHING = Multiple(E.const(0.0), keeps_nan=False)


def weight_multiple(program: ScoreProgram) -> Multiple:
    """The combined effect of all `p = ...` statements on a weight.

    A NaN row is taken to stay NaN if any branch of a `where` keeps it.

    Raises:
        UnsupportedError: one of them is not a multiple of p.
    """
    found = Multiple()
    refuse_dots(program)
    for statement in program.statements:
        if isinstance(statement, Weight):
            part = _part(statement.value, found)
            if part is None:
                raise _refusal(statement.value)
            found = part
    return found


def refuse_dots(program: ScoreProgram) -> None:
    """Raise UnsupportedError where weights depend on the dot: a tile holds exponentials in its place then."""
    for statement in program.statements:
        if isinstance(statement, Weight) and DOT in E.walk(statement.value):
            raise UnsupportedError(f"weights that depend on the dot: `{format_expr(statement.value)}`")


def is_multiple(node: Expr) -> bool:
    """Whether a changed weight is a multiple of the weight unless that is NaN: then the change can be applied
    before the division by the row's sum."""

    def of_numbers(n: Expr, args: tuple[Expr, ...]) -> Expr:
        if n.op == "where" and n.args[0].op == "isnan" and WEIGHT in E.walk(n.args[0]):
            return args[2]
        return E.with_args(n, args)

    try:
        return _part(E.rebuild(node, of_numbers), Multiple()) is not None
    except UnsupportedError:
        return False


def _part(node: Expr, p: Multiple) -> Multiple | None:
    """The node as a multiple of the weight, or None if p does not occur in it."""
    if node is WEIGHT:
        return p
    if WEIGHT not in E.walk(node):
        return _NOTHING if E.is_const(node, 0) else None
    if node.op == "where":
        return _choice(node, p)
    parts = [_part(arg, p) for arg in node.args]
    match node.op, parts:
        case "float", [Multiple() as a]:
            return a
        case "neg", [Multiple() as a]:
            return dataclasses.replace(a, factor=operation("neg", a.factor))
        case "mul", [Multiple() as a, None]:
            return dataclasses.replace(a, factor=operation("mul", a.factor, node.args[1]))
        case "mul", [None, Multiple() as a]:
            return dataclasses.replace(a, factor=operation("mul", a.factor, node.args[0]))
        case "div", [Multiple() as a, None]:
            return dataclasses.replace(a, factor=operation("div", a.factor, node.args[1]))
        case "add" | "sub", [Multiple() as a, Multiple() as b]:
            return Multiple(operation(node.op, a.factor, b.factor), a.keeps_nan or b.keeps_nan)
    raise _refusal(node)


def _choice(node: Expr, p: Multiple) -> Multiple:
    condition, *branches = node.args
    yes, no = (_part(branch, p) for branch in branches)
    if yes is None or no is None:
        raise _refusal(node)
    if WEIGHT not in E.walk(condition):
        return Multiple(operation("where", condition, yes.factor, no.factor), yes.keeps_nan or no.keeps_nan)
    if condition.op == "not":
        condition, yes, no = condition.args[0], no, yes
    asked = _part(condition.args[0], p) if condition.op == "isnan" else None
    if asked is None:
        raise _refusal(node)
    return Multiple(no.factor, yes.keeps_nan if asked.keeps_nan else no.keeps_nan)


def _refusal(node: Expr) -> UnsupportedError:
    return UnsupportedError(f"weights that are not a multiple of the softmax's: `{format_expr(node)}`")
