"""What an attention's mask lets a token see: whether all later tokens are hidden, and how far back it looks.

Proved, not assumed: `k = q + 1 + d` is put into the mask's predicate, and the algebra must find it false for
every q and d. Where it does not, it looks for a pair of positions that the mask keeps.
"""

import dataclasses
import functools
import itertools

from attngraph.ir import budgets
from attngraph.ir.language import E, Expr, Keep, ScoreProgram, format_statement
from attngraph.meaning.algebra import M
from attngraph.meaning.masks import words as masks
from attngraph.meaning.masks.fold import hiding_fills, seen

Q, K = E.var("q"), E.var("k")
_LATER = M.add(Q, E.ONE, E.var("d"))
"""Any key that comes after its query."""


_LOOP = (
    "as a Python loop over tokens writes them, and what later tokens see cannot be read from these (what to "
    "do: build the mask by comparing torch.arange(T)[:, None] with torch.arange(T))"
)


@dataclasses.dataclass(frozen=True)
class Causality:
    """`window`: how many tokens a query sees at most, itself included (None: all before it). `problem`: why
    it is not known that later tokens are hidden; `witness`: a query and a later key that it may see, and
    `masks` those that do not hide it, as text. `program`: the one that was examined."""

    program: ScoreProgram
    window: int | None = None
    problem: str = ""
    witness: tuple[int, int] | None = None
    masks: str = ""

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
    if named := sorted({str(n.value) for n in nodes if n.op == "size"} & counted):
        why = f"its scores depend on how many tokens there are ({', '.join(named)})"
        return Causality(program, problem=why)
    if any(n.op == "random" for n in nodes):
        return Causality(program, problem="it drops weights at random; call model.eval() first")
    if not keys_are_tokens:
        return Causality(program)
    statements = [
        Keep(M.canonical(s.predicate), s.fill) if isinstance(s, Keep) else s for s in program.statements
    ]
    low, hard = [seen(statements, hides) for hides in hiding_fills(statements)], seen(statements)
    seeing = [soft for soft in low if not _is_false(soft, {Q: E.ZERO, K: E.ZERO})]  # itself, the first token
    for predicate in (*seeing[:1], hard):
        if _is_false(predicate, {K: _LATER}):
            return Causality(program, _window(predicate))
    if seeing or not _is_false(low[0], {K: _LATER}):
        return _not_hidden(program, seeing[0] if seeing else low[0])
    why = "the first token sees nothing, and a finite fill then makes it see all tokens alike"
    return Causality(program, None, why, (0, 1))


def _is_false(predicate: Expr, mapping: dict[Expr, Expr]) -> bool:
    if predicate.op == "and":
        return any(_is_false(a, mapping) for a in predicate.args)
    if predicate.op == "or":
        return all(_is_false(a, mapping) for a in predicate.args)
    return M.substitute(predicate, mapping) is E.FALSE


def _not_hidden(program: ScoreProgram, predicate: Expr) -> Causality:
    nodes = [n for e in program.expressions for n in E.walk(e)]
    cases = {n for n in nodes if n.op == "eq" and Q in n.args and any(map(E.is_const, n.args))}
    if len(cases) > budgets.SELECTIONS:
        why = f"its scores have a case of their own for each of {len(cases)} tokens, {_LOOP}"
        return Causality(program, None, why)
    uses_places = {Q, K} & set(nodes)
    statements = program.keeps or (program.statements if uses_places else ())
    shown = "; ".join(map(format_statement, statements)) or "no mask"
    pairs = itertools.combinations(range(budgets.TOKEN_PAIRS + 1), 2)
    visible = ((q, k) for q, k in pairs if not _is_false(predicate, {Q: E.const(q), K: E.const(k)}))
    witness = next(visible, None)
    why = f"it could not be shown to hide all later tokens ({shown})"
    return Causality(program, None, why, witness, shown)


def _window(predicate: Expr) -> int | None:
    """The most tokens that the predicate keeps at or before a query, counted back from it."""
    if predicate.op in ("and", "or"):
        parts = [p for p in map(_window, predicate.args) if p is not None]
        if predicate.op == "or":
            return max(parts) if len(parts) == len(predicate.args) else None
        return min(parts, default=None)
    limit = masks.distance_limit(predicate)
    if limit is None or limit[0] != "behind" or limit[1].op != "const":
        return None
    return max(int(limit[1].value) + 1, 1)
