"""What is concluded from a program's statements, in every domain, against the evaluation of every pair."""

from __future__ import annotations

import math
import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attngraph.codegen.cpu.source import _bound
from attngraph.codegen.triton.plan import conjuncts, lasting_masks
from attngraph.ir.language import evaluate
from attngraph.ir.language import expr as E
from attngraph.ir.language.evaluate import Environment, Tile
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.parser import operation, parse
from attngraph.ir.language.score import DOT, SCORE, Keep, Score, ScoreProgram, Weight
from attngraph.meaning.masks import tiles
from attngraph.meaning.masks.causal import examine
from attngraph.meaning.masks.fold import HIDES, any_fill, low_fill, seen
from attngraph.meaning.masks.score_bounds import hidden_below, score_bounds
from attngraph.meaning.masks.tiles import Cut, Grid
from attngraph.meaning.masks.visible import FILLED, HIDDEN, KEPT, visible

B, H, S = 1, 2, 8
SIZES = (3, 2)
EVERYWHERE = Tile((0, B), (0, H), (0, S), (0, S))
FILLS = [
    "-inf", "-5", "-1e9", "-1e4", "0", "s - 2", "s + 2e4", "s - 1e9", "s - inf", "s", "-s", "max(s, -5)",
    "dot", "r0[h]", "where(k < 3, -inf, s)",
]  # fmt: skip
VALUES = ["s + 1", "-s", "tanh(s)", "dot", "max(s, -5)", "0.5 * s", "where(k < 3, s, dot)"]
WEIGHTS = [
    "0.5 * p",
    "p + 0.1",
    "where(isnan(p), 0, p)",
    "where(k < 5, p, 1)",
    "0 * p",
    "p / 2",
    "-p",
    "p * r0[h]",
]
MASKS = [
    "k <= q",
    "k < q",
    "k <= q and q - k < 4",
    "k < 4",
    "k >= 2",
    "q // 4 == k // 4",
    "s > 0",
    "not dot > 1",
]


def formula(text: str) -> Expr:
    return parse(f"s = {text}").statements[0].value  # type: ignore[union-attr]


@st.composite
def programs(draw: Any, language: types.SimpleNamespace, weights: bool = True) -> ScoreProgram:
    usual = st.sampled_from([formula(text) for text in MASKS])
    predicates = st.one_of(
        usual, usual, language.booleans(("q", "k"), 1, False), language.booleans(("b", "k"), 1)
    )
    keeps = st.builds(Keep, predicates, st.sampled_from([formula(text) for text in FILLS]))
    scores = st.sampled_from([Score(formula(text)) for text in VALUES])
    body = draw(st.lists(st.one_of(keeps, keeps, keeps, scores), min_size=1, max_size=4))
    last = [w for text in WEIGHTS for w in parse(f"p = {text}").statements]
    return ScoreProgram((*body, *draw(st.lists(st.sampled_from(last), max_size=int(weights)))))


class Evaluated:
    """Each pair of a program with small scores."""

    def __init__(self, program: ScoreProgram, reads: list[Tensor]) -> None:
        self.env = Environment(EVERYWHERE, reads, SIZES, torch.float64, torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        self.dot = torch.randn(EVERYWHERE.shape, dtype=torch.float64, generator=generator)
        self.scores = evaluate.scores(program, self.dot, self.env)
        self.weights = evaluate.weights(program, self.scores.softmax(-1), self.env)
        # The rows of which something is promised: a row of NaN is one whichever keys are looked at.
        self.usable = ~self.scores.isnan().any(-1, keepdim=True) & (
            self.scores.amax(-1, keepdim=True) < math.inf
        )

    def is_true(self, predicate: Expr) -> Tensor:
        value = evaluate.evaluate(predicate, self.env, {"dot": self.dot})
        return evaluate.as_bool(value, self.env).expand(EVERYWHERE.shape)

    def may_be_seen(self, program: ScoreProgram, hides: Any = None) -> Tensor:
        """Where `seen` is true or asks for scores, as the C of a call evaluates it."""
        return self.is_true(_bound(seen(program.statements, hides), True))

    def has_weight(self) -> Tensor:
        sees_nothing = (self.scores == -math.inf).all(-1, keepdim=True)
        return (self.weights != 0) & self.usable & ~sees_nothing


def states(program: ScoreProgram, at: Evaluated) -> Tensor:
    """What becomes of each pair, by the values of scores after each statement."""
    found = torch.full(EVERYWHERE.shape, KEPT, dtype=torch.uint8)
    for number, statement in enumerate(program.statements):
        before = evaluate.scores(ScoreProgram(program.statements[:number]), at.dot, at.env)
        after = evaluate.scores(ScoreProgram(program.statements[: number + 1]), at.dot, at.env)
        masked = torch.where(after == -math.inf, HIDDEN, FILLED).to(torch.uint8)
        if isinstance(statement, Keep):
            kept = evaluate.evaluate(statement.predicate, at.env, {"dot": at.dot, "s": before})
            found = torch.where(evaluate.as_bool(kept, at.env), found, masked)
        elif isinstance(statement, Score):
            uses_score = any(n is SCORE for n in E.walk(statement.value))
            found = (
                torch.where(found == HIDDEN, masked, found) if uses_score else torch.full_like(found, KEPT)
            )
    return found


def check(program: ScoreProgram, language: types.SimpleNamespace) -> None:
    at = Evaluated(program, language.reads(B, H, S, S))
    hidden = ~at.may_be_seen(program)
    assert not bool((hidden & at.has_weight()).any()), f"`seen` is false of a key with weight in\n{program}"
    for step in (1, 3):
        cuts = Cut(0, B, 1), Cut(0, H, 1), Cut(0, S, 1), Cut(0, S, step)
        skipped = tiles.block_map(program, Grid(*cuts, SIZES, at.env.reads)) == tiles.SKIP
        by_key = skipped.repeat_interleave(step, -1)[..., :S].expand(EVERYWHERE.shape)
        assert not bool((by_key & at.has_weight()).any()), f"a tile with weight is left out of\n{program}"
    behind = ~at.may_be_seen(program, any_fill) & ~at.scores.isnan()
    bound = hidden_below(program, float(at.dot.abs().max()), SIZES)
    assert bool((at.scores[behind] <= bound).all()), f"a hidden score exceeds {bound} in\n{program}"
    low = ~at.may_be_seen(program, low_fill) & ~at.scores.isnan()
    assert bool((at.scores[low] < 100 - HIDES).all()), f"a low fill does not hide in\n{program}"
    least, greatest = score_bounds(program, float(at.dot.abs().max()), SIZES).score
    numbers = at.scores[at.scores > -math.inf]
    assert bool(((numbers >= least - 1e-9) & (numbers <= greatest + 1e-9)).all()), (
        f"out of bounds in\n{program}"
    )
    scored = ScoreProgram(tuple(s for s in program.statements if not isinstance(s, Weight)))
    for keep in lasting_masks(conjuncts(scored)):
        if not any(n in (DOT, SCORE) for n in E.walk(keep.predicate)):
            away = at.scores[~at.is_true(keep.predicate)]
            assert bool((away == -math.inf).all()), f"`{keep.predicate}` does not hide for good in\n{program}"


def check_causality(program: ScoreProgram, language: types.SimpleNamespace) -> None:
    """A row of which every key that it may see lies behind a fill is promised only to the first token."""
    at, found = Evaluated(program, language.reads(B, H, S, S)), examine(program, True, frozenset())
    q, k = torch.arange(S).view(S, 1), torch.arange(S)
    if not found.problem:
        reach = S if found.window is None else found.window
        outside = (k > q) | (q - k >= reach)
        inside = torch.where(outside, -math.inf, at.scores).amax(-1, keepdim=True) > -HIDES / 2
        inside |= (at.scores == -math.inf).all(-1, keepdim=True)
        assert not bool((outside & inside & at.has_weight()).any()), f"{found} of\n{program}"


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_every_domain_agrees_with_the_evaluation_of_each_pair(
    data: st.DataObject, language: types.SimpleNamespace
) -> None:
    program = data.draw(programs(language))
    check(program, language)
    check_causality(program, language)


@pytest.mark.parametrize(
    "text",
    [
        "keep k < 4; keep k <= q else -s",
        "keep k < 4; s = -s; keep k <= q else s - 1.0",
        "keep k < 4 else -1e9; keep k <= q else -s",
        "keep k < 4 else 7.0; s = 2 * s; keep k <= q else s - 1e9",
        "keep s > 0; keep k < 4 else s - 5; keep s <= 0",
    ],
)
def test_scores_that_were_masked_are_not_taken_for_small_ones(
    text: str, language: types.SimpleNamespace
) -> None:
    check(parse(text), language)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_what_is_possible_for_a_pair_includes_what_becomes_of_it(
    data: st.DataObject, language: types.SimpleNamespace
) -> None:
    check_pairs(data.draw(programs(language, weights=False)), language)


def check_pairs(program: ScoreProgram, language: types.SimpleNamespace) -> None:
    at = Evaluated(program, language.reads(B, H, S, S))
    found = visible(program, at.env)
    assert bool((found & states(program, at) > 0).all()), f"{found} of\n{program}"


def test_a_hidden_pair_turned_to_plus_infinity_stays_unknown(language: types.SimpleNamespace) -> None:
    check_pairs(parse("keep k <= q; s = -s; keep r1[b, k] else s - inf"), language)


@pytest.mark.parametrize(
    ("text", "hard", "low", "every"),
    [
        ("keep k < 4", True, True, True),
        ("keep k < 4 else -1e9", False, True, True),
        ("keep k < 4 else s - 1e9", False, True, True),
        ("keep k < 4 else -5", False, False, True),
        ("keep k < 4; keep k < 6 else -5", False, False, True),
        ("keep k < 4; keep k < 9 else s - 5", True, True, True),
        ("keep k < 4; keep k < 6 else s + 5", True, False, True),
        ("keep k < 4 else -1e9; keep k < 6 else s + 5", False, False, True),
        ("keep k < 4; keep k < 6 else -s", False, False, True),
        ("keep k < 4; keep k < 6 else s - nan", False, False, True),
        ("keep k < 4; s = s + 1", False, False, False),
        ("keep k < 4; p = 0.5 * p", True, True, True),
        ("keep k < 4; p = -p", True, True, True),
        ("keep k < 4; p = -p * (exp(r0[]) - 0.5)", True, True, True),
        ("keep k < 4; p = p + 1", False, False, False),
        ("keep k < 4; sink 1", True, True, True),
    ],
)
def test_the_rules_say_when_the_seventh_key_is_hidden(text: str, hard: bool, low: bool, every: bool) -> None:
    there = Environment(Tile((0, 1), (0, 1), (7, 8), (7, 8)), (), (), torch.float64, torch.device("cpu"))
    for hides, expected in ((None, hard), (low_fill, low), (any_fill, every)):
        found = evaluate.evaluate(seen(parse(text).statements, hides), there, {})
        assert bool(found) is not expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("keep k <= q; keep k < 4 else 5.0", "it could not be shown to hide all later tokens"),
        ("keep k <= q; keep k < 4 else s - 5.0", ""),
        ("keep k <= q else -1e9; keep k < 4 else s + 2e9", "it could not be shown to hide all later tokens"),
        ("keep k < q; keep k <= q else -1e9", "the first token sees nothing"),
        ("keep k <= q and k >= 3 else -1e9", "the first token sees nothing"),
        ("keep k != q else -5e4; keep k <= q else -1e9", ""),
        ("keep k != q else s - 5e4; keep k <= q else s - 1e9", ""),
        ("keep k != q else -5e4; keep k <= q else -5.5e4", "the first token sees nothing"),
        ("keep k != q else -1e9; keep k <= q else -1e9", "the first token sees nothing"),
        (
            "keep k != q else s - 5e4; keep k != q else s - 7e4; keep k <= q else -1e5",
            "the first token sees nothing",
        ),
        ("keep k != q else -1e9; keep k <= q else -5e4", "the first token sees nothing"),
        ("keep k <= q else -1e9; keep k < q", ""),
        ("keep k <= q else -1e4", ""),
        ("keep k <= q else -9999.0", "it could not be shown to hide all later tokens"),
    ],
)
def test_causality_follows_every_statement(text: str, problem: str, language: types.SimpleNamespace) -> None:
    check_causality(parse(text), language)
    found = examine(parse(text), True, frozenset()).problem
    assert found.startswith(problem) and bool(found) == bool(problem)


def test_formulas_that_are_evaluated_beforehand_leave_open_what_asks_for_scores() -> None:
    predicate = operation("and", formula("k <= q"), operation("not", formula("s > 0")))
    assert _bound(predicate, True) is operation("and", formula("k <= q"), operation("not", E.FALSE))
    assert _bound(predicate, False) is operation("and", formula("k <= q"), operation("not", E.TRUE))
    assert _bound(DOT, True) is E.TRUE
