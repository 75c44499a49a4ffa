"""What an attention's mask lets a token see: whether all later tokens are hidden, and how far back it looks.

Proved, not assumed: `k = q + 1 + d` is put into the mask's predicate, and the algebra must find it false for
every q and d. Where it does not, it looks for a pair of positions that the mask keeps.

A finite number hides keys only beside one that it does not hide. Where data may hide every key of a token,
it has to be seen in each call that they do not (`Shown`).
"""

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Sequence

from attngraph.ir import budgets
from attngraph.ir.language import E, Expr, Keep, Score, ScoreProgram, Statement, format_statement, formulas
from attngraph.meaning.algebra import M
from attngraph.meaning.masks import words as masks
from attngraph.meaning.masks.fold import UNDERFLOWS, OfData, hiding_fills, highest_fill, lowered, seen

Q, K = E.var("q"), E.var("k")
_LATER = M.add(Q, E.ONE, E.var("d"))
"""Any key that comes after its query."""


_LOOP = (
    "as a Python loop over tokens writes them, and what later tokens see cannot be read from these (what to "
    "do: build the mask by comparing torch.arange(T)[:, None] with torch.arange(T))"
)


class Shown(enum.Enum):
    """Of which tokens it has to be seen that data do not hide them from themselves, so that each token sees a
    key beside which a finite number hides the others."""

    NONE = "none"
    FIRST = "the first one"  # which then all later tokens see, too
    EACH = "each"


@dataclasses.dataclass(frozen=True)
class Causality:
    """`window`: how many tokens a query sees at most, itself included (None: all before it). `problem`: why
    it is not known that later tokens are hidden; `witness`: a query and a later key that it may see, and
    `masks` those that do not hide it, as text. `program`: the one that was examined. `shown`: which tokens'
    scores of themselves must be more than `above`."""

    program: ScoreProgram
    window: int | None = None
    problem: str = ""
    witness: tuple[int, int] | None = None
    masks: str = ""
    shown: Shown = Shown.NONE
    above: float = 0.0

    def describe(self) -> str:
        if self.window is None:
            return "a token looks at itself and at earlier ones"
        return f"a token looks at itself and at {self.window - 1} earlier one(s)"


@functools.lru_cache(maxsize=256)
def examine(
    program: ScoreProgram, keys_are_tokens: bool, counted: frozenset[str], data: OfData | None = None
) -> Causality:
    """What the program lets a token see.

    Args:
        keys_are_tokens: False where the keys are the same for all tokens (cross-attention).
        counted: the program's sizes whose value depends on how many tokens there are.
        data: what it reads that follows from tokens.
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
    fills, hard = hiding_fills(statements), seen(statements)
    soft = [seen(statements, hides) for hides in fills]
    itself = {Q: E.ZERO, K: E.ZERO}  # the first token
    seeing = [(p, hides) for p, hides in zip(soft, fills, strict=True) if not _is_false(p, itself)]
    is_hard = _is_false(hard, {K: _LATER})
    for predicate, hides in seeing[:1]:
        window = _window(predicate)
        if _is_false(predicate, {K: _LATER}) and not (is_hard and window == _window(hard)):
            found = Causality(program, window)
            of_data = data or OfData()
            return found if predicate is hard else _asking(found, statements, predicate, hides, of_data)
    if is_hard:
        return Causality(program, _window(hard))
    if seeing or not _is_false(soft[0], {K: _LATER}):
        return _not_hidden(program, seeing[0][0] if seeing else soft[0])
    why = "the first token sees nothing, and a finite fill then makes it see all tokens alike"
    return Causality(program, None, why, (0, 1))


def _asking(
    found: Causality, statements: Sequence[Statement], predicate: Expr, hides: Callable[[Expr], bool],
    data: OfData,
) -> Causality:  # fmt: skip
    """What was found, where these finite fills hide all pairs but those of the predicate; with what has to be
    seen in each call of the data."""
    low = [n for s in statements if isinstance(s, Score) for n in lowered(s.value, data)]
    own, first = (M.substitute(predicate, {K: key}) for key in (Q, E.ZERO))
    if not low and (own is E.TRUE or not any(n.value in data.reads for n in E.reads(own))):
        return found
    is_first = Q not in first.free and not any(Q in n.free for n in low)
    of_own = (M.substitute(f, {K: Q}) for s in statements for f in formulas(s))
    if not is_first and any(Q in E.rebuild(f, _read_anywhere).free for f in of_own):
        why = "data may hide every key of a token, and a finite number then makes it see all tokens alike"
        return Causality(found.program, problem=why)
    above = highest_fill(statements, hides) + UNDERFLOWS
    return dataclasses.replace(found, shown=Shown.FIRST if is_first else Shown.EACH, above=above)


def _read_anywhere(node: Expr, args: tuple[Expr, ...]) -> Expr:
    return M.construct(node, tuple(E.ZERO for _ in args) if node.op == "read" else args)


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
