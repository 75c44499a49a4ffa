"""What is never computed must be nothing: the classes of tiles, the runs of keys and the bounds of
hidden scores, against the evaluation of every element."""

import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attngraph.ir import evaluate
from attngraph.ir.evaluate import Environment, Tile
from attngraph.ir.expr import Expr
from attngraph.ir.parser import parse
from attngraph.ir.score import ScoreProgram
from attngraph.meaning import tiles
from attngraph.meaning.tiles import Box, Fill, Run

B, H, Sq, Skv = 2, 2, 7, 12
SIZES = (3, 2)
Ranges = tuple[tuple[int, int], ...]


def environment(ranges: Ranges, reads: list[Tensor]) -> Environment:
    return Environment(Tile(*ranges), reads, SIZES, torch.float64, torch.device("cpu"))


def box(ranges: Ranges, sizes: tuple[int, ...] = SIZES) -> Box:
    return Box(*((float(lo), float(hi - 1)) for lo, hi in ranges), sizes)


def evaluated(predicate: Expr, ranges: Ranges, reads: list[Tensor]) -> Tensor:
    env = environment(ranges, reads)
    return evaluate.as_bool(evaluate.evaluate(predicate, env, {}), env)


def check_class(predicate: Expr, ranges: Ranges, reads: list[Tensor]) -> None:
    found, truth = tiles.classify(predicate, box(ranges)), evaluated(predicate, ranges, reads)
    if found is Fill.FULL:
        assert bool(truth.all()), predicate
    elif found is Fill.EMPTY:
        assert not bool(truth.any()), predicate


@st.composite
def boxes(draw: Any) -> Ranges:
    found = []
    for extent in (B, H, Sq, Skv):
        lo = draw(st.integers(0, extent - 1))
        found.append((lo, draw(st.integers(lo + 1, extent))))
    return tuple(found)


@given(data=st.data(), ranges=boxes())
@settings(max_examples=400)
def test_full_and_empty_are_true_of_every_element(
    data: st.DataObject, ranges: Ranges, language: types.SimpleNamespace
) -> None:
    kind = data.draw(st.sampled_from(["booleans", "integers", "floats"]))
    names = ("b", "h", "q", "k")
    predicate = {
        "booleans": language.booleans(names, 3),
        "integers": language.integers(names, 2),
        "floats": language.floats(names, (), 2),
    }[kind]
    check_class(data.draw(predicate), ranges, language.reads(B, H, Sq, Skv))


@pytest.mark.parametrize(
    "text",
    [
        "q - 6",
        "q - k",
        "-1",
        "0.5 * (q - 6)",
        "min(q, 0) - 1",
        "q * 0.5 % 1 <= 0",
        "(q + k) * 0.25 % 1 < 0.25",
        "q / 2 % 1 == 0",
        "k * 0.5 // 1 == k // 2",
        "tanh(100 + q) < 1",
        "tanh(30 * q) < 1",
        "q % -3 <= 0",
        "q // -2 <= 0",
        "abs(q - 3) <= 3",
        "(q - 3) % 4 < 4",
        "not (q - 9)",
        "q - 9 and k <= 12",
        "where(q - 9, k >= 0, k < 0)",
        "random(1, b, h, q, k) < 1",
        "random(1, b, h, q, k) <= 0",
        "q * k <= 66",
        "where(k <= q, q, k) >= k",
        "floor(q * 0.5) <= 3",
        "(k <= q) + (k <= q) <= 1",
        "(k <= q) * 3 - 1",
        "q == k",
        "q != k + 20",
        "max(q - 9, -2)",
        "inf * (q - 3) <= 5",
        "inf - inf <= 0",
        "nan <= 1",
        "not (nan <= 1)",
        "min(nan, 3) <= 5",
        "nan * 0 <= 1",
        "isnan(q)",
        "not isnan(q)",
    ],
)
def test_classes_of_awkward_predicates_are_true_of_every_element(text: str) -> None:
    predicate = parse(f"keep {text}").keeps[0].predicate
    for q, k in (
        ((0, 7), (0, 12)),
        ((0, 5), (0, 5)),
        ((0, 1), (0, 1)),
        ((3, 4), (2, 9)),
        ((0, 3), (6, 12)),
        ((5, 7), (0, 3)),
    ):
        check_class(predicate, ((0, 1), (0, 1), q, k), [])


@pytest.mark.parametrize(
    "text",
    [
        "min(r0[k], 3) <= 5",
        "r0[k] * 0 <= 1",
        "abs(r0[k]) >= 0",
        "tanh(r0[k]) <= 2",
        "max(r0[k], 1) > 0",
        "r0[k] == r0[k]",
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e308])
def test_what_is_read_may_be_anything(text: str, value: float) -> None:
    ranges = ((0, 1), (0, 1), (0, 2), (0, 3))
    check_class(
        parse(f"keep {text}").keeps[0].predicate,
        ranges,
        [torch.tensor([0.0, value, 1.0], dtype=torch.float64)],
    )


@pytest.mark.parametrize(
    ("text", "q", "k", "fill"),
    [
        ("k <= q", (4, 7), (0, 4), Fill.FULL),
        ("k <= q", (4, 7), (0, 5), Fill.FULL),
        ("k <= q", (4, 7), (0, 6), Fill.PARTIAL),
        ("k <= q", (0, 4), (4, 8), Fill.EMPTY),
        ("k <= q and k > q - 3", (6, 7), (0, 4), Fill.EMPTY),
        ("k <= q and k > q - 3", (6, 7), (4, 7), Fill.FULL),
        ("q // 4 == k // 4", (0, 4), (0, 4), Fill.FULL),
        ("q // 4 == k // 4", (0, 4), (4, 8), Fill.EMPTY),
        ("k < n0", (0, 7), (3, 12), Fill.EMPTY),
        ("r0[b, k]", (0, 7), (0, 3), Fill.PARTIAL),
        ("k <= q and r0[b, k]", (0, 4), (4, 8), Fill.EMPTY),
        ("k > q or r0[b, k]", (0, 4), (4, 8), Fill.FULL),
        ("abs(q - k) <= 2", (0, 2), (5, 9), Fill.EMPTY),
        ("not k > q", (4, 7), (0, 4), Fill.FULL),
        ("where(h == 0, k <= q, k <= q + 1)", (4, 7), (0, 4), Fill.FULL),
        ("true", (0, 7), (0, 12), Fill.FULL),
        ("false", (0, 7), (0, 12), Fill.EMPTY),
    ],
)
def test_the_usual_masks_are_decided(text: str, q: tuple[int, int], k: tuple[int, int], fill: Fill) -> None:
    assert tiles.classify(parse(f"keep {text}").keeps[0].predicate, box(((0, 2), (0, 2), q, k))) is fill


def weights_of(program: ScoreProgram, ranges: Ranges, reads: list[Tensor], dot: Tensor) -> Tensor:
    """The final weights of a block of queries over all keys, by the reference."""
    env = environment(ranges, reads)
    scores = evaluate.scores(program, dot, env)
    sink = evaluate.sink(program, env)
    extended = scores if sink is None else torch.cat([scores, sink.expand(*scores.shape[:3], 1)], -1)
    p = extended.softmax(-1)[..., : scores.shape[-1]]
    return evaluate.weights(program, p, env)


def check_runs(program: ScoreProgram, ranges: Ranges, reads: list[Tensor], step: int) -> tuple[Run, ...]:
    b, h, q, _ = ranges
    found = tiles.runs(program, b, h, q, Skv, step, SIZES, False)
    dot = torch.randn(
        [hi - lo for lo, hi in (*ranges[:3], (0, Skv))],
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(0),
    )
    whole = (b, h, q, (0, Skv))
    p = weights_of(program, whole, reads, dot)
    left_out = torch.ones(Skv, dtype=torch.bool)
    scores = evaluate.scores(program, dot, environment(whole, reads))
    for run in found:
        assert 0 <= run.start < run.stop <= Skv
        assert bool(left_out[run.start : run.stop].all()), "two runs overlap"
        left_out[run.start : run.stop] = False
        part = slice(run.start, run.stop)
        skipping = evaluate.scores(
            program, dot[..., part], environment((b, h, q, (run.start, run.stop)), reads), run.skip
        )
        torch.testing.assert_close(skipping, scores[..., part], equal_nan=True, rtol=0, atol=0)
    if bool(left_out.all()):
        return found  # the executor must look at something, and does
    empty_row = p.isnan().all(-1, keepdim=True)  # NaN comes out whichever keys are looked at
    hidden = torch.where(empty_row, 0.0, p)[..., left_out]
    assert bool((hidden == 0).all()), f"a key with weight is left out of\n{program}"
    return found


@given(data=st.data(), ranges=boxes(), step=st.sampled_from([1, 3, 4, 12]))
@settings(max_examples=300)
def test_no_key_that_has_weight_is_left_out(
    data: st.DataObject, ranges: Ranges, step: int, language: types.SimpleNamespace
) -> None:
    program = data.draw(language.programs(1, masks=True))
    check_runs(program, ranges, language.reads(B, H, Sq, Skv), step)


@pytest.mark.parametrize(
    "text",
    [
        "keep k < 4; keep k < 2 else -5",
        "keep k < 4; keep k < 6 else -5",
        "keep k < 4; keep r1[b, k] else -5",
        "keep k < 4; keep k < 2 else s - 5",
        "keep k < 4; keep k < 2 else max(s, -5)",
        "keep k < 4; keep k < 2 else s * 0",
        "keep k < 4; keep r1[b, k] else -s",
        "keep k < 4; s = max(s, -5)",
        "keep k < 4; s = where(k < 6, s, 0)",
        "keep k < 4; s = dot",
        "keep k < 4; s = s + 1; keep k < 8",
        "keep k < 4; sink 1",
        "keep k < 4; p = p + 0.1",
        "keep k < 4; p = where(isnan(p), 0, p)",
        "keep k < 4 and k > q; p = where(isnan(p), 0.5, p)",
        "keep k < 4; p = exp(p)",
        "keep k < 4; p = where(k < 6, p, 1)",
        "keep k < 4; p = p * r0[h]",
        "keep k < 4; p = max(p, r4[])",
        "keep k < 4; p = r0[h]",
        "keep k - 4",
        "keep q - k",
        "keep 4 - k and k < 9",
        "keep k < 4 else -inf",
        "keep k < 4; keep k < 6 else -inf + 0",
        "s = -inf; keep k < 4",
        "keep k < 4; p = p / 0",
        "keep k < 4; p = 1 / p",
        "keep k < 4; p = log(p)",
    ],
)
def test_statements_after_a_hard_mask_may_uncover_what_it_hid(
    text: str, language: types.SimpleNamespace
) -> None:
    for q in ((0, 7), (5, 6)):
        check_runs(parse(text), ((0, 2), (0, 2), q, (0, 1)), language.reads(B, H, Sq, Skv), 2)


def test_keys_that_a_mask_hides_are_left_out_and_decided_masks_skipped() -> None:
    program = parse("s = 0.5 * dot; keep k <= q; keep k > q - 4")
    assert tiles.runs(program, (0, 1), (0, 1), (4, 8), 16, 4, (), False) == (
        Run(0, 4, frozenset({1})),
        Run(4, 8, frozenset({2})),
    )
    assert tiles.runs(parse("keep k <= q else -1e9"), (0, 1), (0, 1), (0, 4), 12, 4, (), False)[-1].stop == 12
    assert tiles.runs(parse("keep k <= q else -1e9"), (0, 1), (0, 1), (0, 4), 12, 4, (), True)[-1].stop == 4
    assert tiles.runs(parse("keep k <= q"), (0, 1), (0, 1), (8, 12), 12, 4, (), False)[0] == Run(
        0, 8, frozenset({0})
    )


@given(data=st.data(), ranges=boxes(), step=st.sampled_from([1, 4]))
@settings(max_examples=150)
def test_softly_hidden_scores_stay_below_their_bound(
    data: st.DataObject, ranges: Ranges, step: int, language: types.SimpleNamespace
) -> None:
    """Where keys are left out because of a finite fill, `hidden_below` bounds each of their scores."""
    program = data.draw(language.programs(1, weights=False, masks=True))
    check_soft(program, ranges, language.reads(B, H, Sq, Skv), step)


def check_soft(program: ScoreProgram, ranges: Ranges, reads: list[Tensor], step: int) -> None:
    b, h, q, _ = ranges
    found = tiles.runs(program, b, h, q, Skv, step, SIZES, True)
    dot = torch.randn(
        [hi - lo for lo, hi in (*ranges[:3], (0, Skv))],
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(0),
    )
    left_out = torch.ones(Skv, dtype=torch.bool)
    for run in found:
        left_out[run.start : run.stop] = False
    scores = evaluate.scores(program, dot, environment((b, h, q, (0, Skv)), reads))
    bound = tiles.hidden_below(program, float(dot.abs().max()), SIZES)
    assert bool((scores[..., left_out] <= bound).all()), f"a score above {bound} is left out of\n{program}"


@pytest.mark.parametrize(
    "text",
    [
        "keep k <= q else -1e9",
        "keep k <= q else -1e9; keep k < 4 else -1e9 - s",
        "keep k <= q else -1e9; keep k < 4 else -s",
        "keep k <= q else -1e9; keep k < 4 else s * -1",
        "keep k < 4; keep k <= q else -1e9 - s",
        "keep k <= q else s - 1e9",
        "s = s + 3; keep k <= q else s",
        "keep k <= q else r0[h]",
        "keep k <= q else -1e9; s = s + 2e9",
        "keep k <= q else -1e9; keep k < 9",
        "keep k < 4; keep k <= q else -1e9",
        "keep k <= q else -1e9; keep k < 4 else s + 1e9",
        "keep k <= q else -5 - q",
        "keep k <= q else k - 100",
        "keep k <= q else -1e9; keep not (k > q) else 5",
    ],
)
def test_bounds_of_hidden_scores_follow_every_statement(text: str, language: types.SimpleNamespace) -> None:
    for q in ((0, 7), (0, 2), (5, 7)):
        check_soft(parse(text), ((0, 2), (0, 2), q, (0, 1)), language.reads(B, H, Sq, Skv), 2)
