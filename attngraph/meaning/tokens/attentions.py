"""What an attention is of the tokens: fixed, one of tokens that looks back alone, or one that mixes them.

Queries, keys and values must be arranged by row and token, what scores read must be read at the row's and
the token's own places, and the mask must hide all later tokens (`meaning/masks/causal.py`). Scores may name
how many tokens there are where that shifts them by the same amount for all keys of a query: ALiBi counted
back from the last token, `(k - (n - 1)) * slope`, has a softmax that does not depend on it. They are then
those of the sequence that ends with the query: `n` is `q + 1`.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection

from torch import fx

from attngraph.ir.language import SCORE, E, Expr, Keep, Score, ScoreProgram, Statement, Weight, formulas
from attngraph.ir.ops import nodes
from attngraph.meaning.algebra import M, size_expression
from attngraph.meaning.attention.program import rewritten
from attngraph.meaning.element import Meaning
from attngraph.meaning.masks.causal import examine
from attngraph.meaning.masks.fold import OfData, added_to_score, is_of_row, low_fill
from attngraph.meaning.tokens.facts import Axes, Fact, Facts, Kind, Space
from attngraph.meaning.tokens.low import is_chosen, may_be_low

ENDS = M.add(E.var("q"), E.ONE)
"""How many tokens there are in the sequence that ends with the query."""
_TERMS = 64
"""Terms of a formula that are looked at."""


def attention_fact(facts: Facts, view: nodes.AttentionOp) -> Fact:
    """What is known of an attention's result, `[B, H, S, D]`."""
    meaning, space = facts.meaning, facts.space
    q, k, v = (facts[n] for n in (view.q, view.keys[0], view.keys[-1]))
    reads, weights = ([facts[n] for n in group] for group in (view.reads, view.projections))
    if any(f.kind is Kind.MIXING for f in (q, k, v, *reads, *weights)):
        return Fact(Kind.MIXING, reason="computed from a value that mixes tokens")
    if not all(f.is_shared for f in weights):
        return Fact(Kind.MIXING, reason="its keys are projected by weights that follow the tokens")
    keys_are_tokens = Kind.FIXED not in (k.kind, v.kind)
    if q.kind is Kind.FIXED and k.kind is v.kind is Kind.FIXED:
        return Fact(Kind.FIXED, q.axes, "attention among fixed values")
    keys = meaning.shape(view.keys[0])[2]
    times = M.floordiv(keys, space.tokens)
    if times.op == "const" and times.value > 1 and M.mul(times, space.tokens) is keys:
        return Fact(Kind.MIXING, reason="it has several keys for each token, in parts one after the other")
    problem = _layout_problem(space, q, k, v)
    problem = problem or _reads_problem(space, view.program.expressions, reads, keys_are_tokens)
    if problem:
        return Fact(Kind.MIXING, reason=problem)
    extents = (s.meta["val"] if isinstance(s, fx.Node) else s for s in view.sizes)
    sizes = {f"n{n}": meaning.renamed(size_expression(s)) for n, s in enumerate(extents)}
    counted = frozenset(name for name, size in sizes.items() if space.counts(size))
    tokens = [name for name, size in sizes.items() if size is space.tokens and keys_are_tokens]
    of_tokens = frozenset(n for n, fact in enumerate(reads) if fact.is_of_token)
    low, chosen = (
        frozenset(n for n in of_tokens if is_so(facts, view.reads[n])) for is_so in (may_be_low, is_chosen)
    )
    program = ending_at_query(view.program, tokens)
    causality = examine(program, keys_are_tokens, counted, OfData(of_tokens, low, chosen))
    if causality.problem:
        return Fact(Kind.MIXING, reason=causality.problem, causality=causality)
    reason = causality.describe() if keys_are_tokens else "tokens look at fixed keys"
    return Fact(Kind.ATTENTION, q.axes, reason, causality=causality)


def part_fact(meaning: Meaning, node: fx.Node, whole: Fact) -> Fact:
    """What is known of one of an attention's results: its values, or the log-sum-exp."""
    if whole.kind is Kind.MIXING or whole.kind is Kind.FIXED:
        return dataclasses.replace(whole, axes=whole.axes[: len(meaning.shape(node))])
    if node.args[1] != 0:
        return Fact(Kind.MIXING, reason="the log-sum-exp of an attention is used")
    return Fact(Kind.TOKEN, whole.axes, "what attention gathered for the token")


def _layout_problem(space: Space, q: Fact, k: Fact, v: Fact) -> str:
    arranged = "are not arranged as [batch, heads, tokens, width]"
    row: tuple[Expr, ...] = () if space.row is None else (space.row,)
    wanted: Axes = (row, (), (space.token,), ())
    if q.kind is Kind.FIXED:
        return "its keys are tokens and its queries are not"
    if q.axes != wanted:
        return f"its queries {arranged}"
    if (k.kind is Kind.FIXED) != (v.kind is Kind.FIXED):
        return "one of its keys and values is computed from the tokens, the other is not"
    if k.kind is Kind.FIXED:
        own = any(f.axes[1:] != ((), (), ()) for f in (k, v))
        return f"its fixed keys {arranged}" if own else ""
    return f"its keys {arranged}" if k.axes != wanted or v.axes != wanted else ""


def _reads_problem(space: Space, expressions: tuple[Expr, ...], facts: list[Fact], keys: bool) -> str:
    """Why a tensor that the scores read cannot be followed token by token."""
    for node in (n for e in expressions for n in E.reads(e)):
        for digits, index in zip(facts[node.value].axes, node.args, strict=True):
            told = f"its scores read r{node.value} at {index!r}, which is"
            if not digits:
                if index.op != "var" and E.var("b") in index.free:
                    return f"{told} no sequence of the batch"
                continue
            own = False
            if space.row is not None and space.token not in digits:
                place = M.substitute(M.canonical(index), {E.var("b"): space.row})
                own = space.follows_digits(digits, place)
            names = {"q", "k"} if keys else {"q"}
            at_token = digits == (space.token,) and index.op == "var" and index.value in names
            if not own and not at_token:
                return f"{told} not the token's own place"
    return ""


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
    """Whether scores shifted alike for all keys of a query stay so, or weigh the same, after this."""
    match statement:
        case Keep(predicate, fill):
            is_relative = added_to_score(fill) < math.inf
            return all(n is not SCORE for n in E.walk(predicate)) and (is_relative or low_fill(fill))
        case Score(value):
            terms = _terms(M.canonical(value))
            others = [t for t in terms or () if M.coefficient(t)[1] is not SCORE]
            return terms is not None and all(n is not SCORE for t in others for n in E.walk(t))
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
