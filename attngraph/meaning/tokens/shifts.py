"""Scores that the number of tokens shifts by the same amount for all keys of a query.

ALiBi counted back from the last token, `(k - (n - 1)) * slope`, names how many tokens there are; its softmax
does not depend on it. The scores of a decoder are then those of the sequence that ends with the query: `n` is
`q + 1`. Nothing is changed where the number decides anything else.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.score import SCORE, Keep, Score, ScoreProgram, Statement, Weight, formulas
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.attention.program import rewritten
from attngraph.meaning.masks.fold import added_to_score, is_of_row, low_fill

ENDS = M.add(E.var("q"), E.ONE)
"""How many tokens there are in the sequence that ends with the query."""
_TERMS = 64
"""Terms of a formula that are looked at."""


def ending_at_query(program: ScoreProgram, counted: Collection[str]) -> ScoreProgram:
    """The program without the sizes in `counted`, numbers of tokens, where its weights do not depend on them;
    else the program itself."""
    numbers = {E.size(name): ENDS for name in counted}
    if any(n.op == "random" for e in program.expressions for n in E.walk(e)):
        return program
    found: list[Statement] = []
    shifted = False
    for statement in program.statements:
        if not any(n in numbers for e in formulas(statement) for n in E.walk(e)):
            if shifted and not _keeps_shift(statement):
                return program
            found.append(statement)
            continue
        if not isinstance(statement, Score) or (shifted and not _keeps_shift(statement)):
            return program
        value = M.canonical(statement.value)
        terms = _terms(value)
        if terms is None or not all(is_of_row(t) for t in terms if any(n in numbers for n in E.walk(t))):
            return program
        found.append(dataclasses.replace(statement, value=rewritten(M.substitute(value, numbers), program)))
        shifted = True
    return ScoreProgram(tuple(found))


def _keeps_shift(statement: Statement) -> bool:
    """Whether scores that were shifted by one number for all keys of a query are shifted so, or have the same
    weights, after this statement."""
    match statement:
        case Keep(predicate, fill):
            is_relative = added_to_score(fill) < math.inf
            return all(n is not SCORE for n in E.walk(predicate)) and (is_relative or low_fill(fill))
        case Score(value):
            terms = _terms(M.canonical(value))
            return terms is not None and all(
                M.coefficient(t)[1] is SCORE or all(n is not SCORE for n in E.walk(t)) for t in terms
            )
        case Weight():
            return True
    return False


def _terms(node: Expr) -> list[Expr] | None:
    """The terms of a formula, its products of sums multiplied out; None if they are many."""
    if node.op == "add":
        parts = [_terms(a) for a in node.args]
        terms = [t for part in parts if part is not None for t in part]
        return None if None in parts or len(terms) > _TERMS else terms
    if node.op != "mul":
        return [node]
    factors = [_terms(a) for a in node.args]
    known = [f for f in factors if f is not None]
    if len(known) < len(factors) or math.prod(map(len, known)) > _TERMS:
        return None
    return [M.mul(*chosen) for chosen in itertools.product(*known)]
