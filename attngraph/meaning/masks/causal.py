"""What an attention's mask lets a token see: whether all later tokens are hidden, and how far back it looks.

Shown, not assumed: `k = q + 1 + d` is put into the mask's predicate, and the algebra must find it false for
every q and d. Where it does not, a pair of positions is looked for that the mask keeps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr, format_expr
from attngraph.ir.language.score import Keep, ScoreProgram, Statement
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.masks import words as masks
from attngraph.meaning.masks.fold import HiddenPairs, fold, is_low

_TRIED = 24
Q, K = E.var("q"), E.var("k")


@dataclasses.dataclass(frozen=True)
class Causality:
    """`window`: how many tokens a query sees at most, itself included (None: all before it). `problem`: why
    later tokens are not hidden; `witness`: a query and a later key that it sees."""

    window: int | None = None
    problem: str = ""
    witness: tuple[int, int] | None = None

    def describe(self) -> str:
        if self.window is None:
            return "a token looks at itself and at earlier ones"
        return f"a token looks at itself and at {self.window - 1} earlier one(s)"


@functools.lru_cache(maxsize=256)
def examine(program: ScoreProgram, keys_are_tokens: bool, counted: frozenset[str]) -> Causality:
    """What the program lets a token see.

    Args:
        keys_are_tokens: False where the keys are the same for all tokens (cross-attention).
        counted: the program's sizes whose value depends on how many tokens there are.
    """
    nodes = [n for e in program.expressions for n in E.walk(e)]
    named = sorted({str(n.value) for n in nodes if n.op == "size"} & counted)
    if named:
        return Causality(None, f"its scores depend on how many tokens there are ({', '.join(named)})")
    if any(n.op == "random" for n in nodes):
        return Causality(None, "it drops weights at random; call model.eval() first")
    if not keys_are_tokens:
        return Causality()
    statements = [
        Keep(canonical(s.predicate), s.fill) if isinstance(s, Keep) else s for s in program.statements
    ]
    soft, hard = seen(statements, soft=True), seen(statements, soft=False)
    blind = _is_false(soft, {Q: E.ZERO, K: E.ZERO})
    if _hides_later(soft) and not blind:
        return Causality(_window(soft))
    if _hides_later(hard):
        return Causality(_window(hard))
    if _hides_later(soft):
        why = "the first token sees nothing, and a finite fill then makes it see all tokens alike"
        return Causality(None, why, (0, 1))
    return _not_hidden(program, soft)


def seen(statements: Iterable[Statement], soft: bool) -> Expr:
    """A predicate that is false only for hidden pairs; with `soft` also for those behind a low finite fill."""
    return fold(statements, _Predicates(soft))


class _Predicates(HiddenPairs[Expr, Expr]):
    """Joined without simplifying, since `s` may have another value in each statement."""

    shown, hidden = E.TRUE, E.FALSE

    def __init__(self, soft: bool) -> None:
        self.soft = soft

    def hides(self, fill: Expr) -> bool:
        return is_low(fill)

    def truth(self, predicate: Expr) -> Expr:
        return predicate

    def choose(self, kept: Expr, yes: Expr, no: Expr) -> Expr:
        if no is yes:
            return yes
        if no is E.FALSE:
            return kept if yes is E.TRUE else E.make("and", (yes, kept), None, "bool")
        return E.make("or", (yes, M.not_(kept)), None, "bool")


def _hides_later(predicate: Expr) -> bool:
    """Whether the predicate is false for every key behind its query."""
    later = M.add(Q, E.ONE, E.var("d"))
    return _is_false(predicate, {K: later})


def _is_false(predicate: Expr, mapping: dict[Expr, Expr]) -> bool:
    if predicate.op == "and":
        return any(_is_false(a, mapping) for a in predicate.args)
    if predicate.op == "or":
        return all(_is_false(a, mapping) for a in predicate.args)
    return M.substitute(predicate, mapping) is E.FALSE


def _not_hidden(program: ScoreProgram, predicate: Expr) -> Causality:
    shown = _masks_in_words(program)
    for q in range(_TRIED):
        for k in range(q + 1, _TRIED + 1):
            if not _is_false(predicate, {Q: E.const(q), K: E.const(k)}):
                return Causality(None, f"it sees later tokens ({shown})", (q, k))
    return Causality(None, f"it could not be shown to hide all later tokens ({shown})")


def _masks_in_words(program: ScoreProgram) -> str:
    """What of a program may hide keys: its masks with their fills, else all of it, if places count in it."""
    if program.keeps:
        fills = ("" if k.is_hard else f" else {format_expr(k.fill)}" for k in program.keeps)
        return " and ".join(
            f"{format_expr(k.predicate)}{fill}" for k, fill in zip(program.keeps, fills, strict=True)
        )
    places = {n for e in program.expressions for n in E.walk(e)} & {Q, K}
    return "; ".join(str(program).splitlines()) if places else "no mask"


def _window(predicate: Expr) -> int | None:
    """The most tokens that the predicate keeps at or before a query, counted back from it."""
    if predicate.op in ("and", "or"):
        parts = [_window(a) for a in predicate.args]
        if predicate.op == "or":
            return None if None in parts else max(p for p in parts if p is not None)
        return min((p for p in parts if p is not None), default=None)
    limit = masks.distance_limit(predicate)
    if limit is None or limit[0] != "behind" or limit[1].op != "const":
        return None
    return max(int(limit[1].value) + 1, 1)


def canonical(node: Expr) -> Expr:
    """A program's expression in the algebra's canonical form."""
    return E.rebuild(node, _canonical)


def _canonical(node: Expr, args: tuple[Expr, ...]) -> Expr:
    match node.op:
        case "sub":
            return M.sub(*args)
        case "neg":
            return M.neg(*args)
        case "div":
            return M.div(*args)
        case "ge":
            return M.le(args[1], args[0])
        case "gt":
            return M.lt(args[1], args[0])
        case "ne":
            return M.ne(*args)
        case "const" if node.kind == "float" and isinstance(node.value, float) and math.isfinite(node.value):
            return node
    return M.construct(node, args) if args else node
