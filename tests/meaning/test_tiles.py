"""What is never computed must be nothing: the classes of tiles, the runs of keys and the bounds of
hidden scores, against the evaluation of every element."""

import contextlib
import dataclasses
import enum
import itertools
import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attngraph.ir.language import evaluate
from attngraph.ir.language import expr as E
from attngraph.ir.language.evaluate import Environment, Tile
from attngraph.ir.language.expr import Expr, format_expr
from attngraph.ir.language.parser import operation, parse
from attngraph.ir.language.score import Keep, ScoreProgram
from attngraph.meaning.algebra.intervals import bit, bounds
from attngraph.meaning.masks import tiles
from attngraph.meaning.masks.score_bounds import hidden_below
from attngraph.meaning.masks.tiles import Box, Cut, Grid, Run


class Fill(enum.Enum):
    """How much of a tile a predicate keeps."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


def classify(predicate: Expr, box: Box) -> Fill:
    """Whether the predicate is false, true or undecided on the box."""
    low, high = bit(bounds(predicate, box, {}))
    return Fill.FULL if bool(low >= 1) else Fill.EMPTY if bool(high <= 0) else Fill.PARTIAL


B, H, Sq, Skv = 2, 2, 7, 12
SIZES = (3, 2)
Ranges = tuple[tuple[int, int], ...]


def environment(ranges: Ranges, reads: list[Tensor]) -> Environment:
    return Environment(Tile(*ranges), reads, SIZES, torch.float64, torch.device("cpu"))


def box(ranges: Ranges, sizes: tuple[int, ...] = SIZES) -> Box:
    return Box(*((float(lo), float(hi - 1)) for lo, hi in ranges), sizes)


def grid(b: tuple[int, int], h: tuple[int, int], q: tuple[int, int], keys: int, step: int) -> Grid:
    """One block of queries against all keys in steps."""
    whole = (Cut(lo, hi, hi - lo) for lo, hi in (b, h, q))
    return Grid(*whole, Cut(0, keys, step), SIZES)


def evaluated(predicate: Expr, ranges: Ranges, reads: list[Tensor]) -> Tensor:
    env = environment(ranges, reads)
    return evaluate.as_bool(evaluate.evaluate(predicate, env, {}), env)


def check_class(predicate: Expr, ranges: Ranges, reads: list[Tensor]) -> None:
    found, truth = classify(predicate, box(ranges)), evaluated(predicate, ranges, reads)
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
    assert classify(parse(f"keep {text}").keeps[0].predicate, box(((0, 2), (0, 2), q, k))) is fill


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
    found = tiles.runs(program, grid(b, h, q, Skv, step))[0]
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
    assert tiles.runs(program, grid((0, 1), (0, 1), (4, 8), 16, 4))[0] == (
        Run(0, 4, frozenset({1})),
        Run(4, 8, frozenset({2})),
    )
    first, soft = grid((0, 1), (0, 1), (0, 4), 12, 4), parse("keep k <= q else -1e9")
    assert tiles.runs(soft, first)[0][-1].stop == 12
    assert tiles.runs(soft, first, soft=True)[0][-1].stop == 4
    last = grid((0, 1), (0, 1), (8, 12), 12, 4)
    assert tiles.runs(parse("keep k <= q"), last)[0][0] == Run(0, 8, frozenset({0}))


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
    found = tiles.runs(program, grid(b, h, q, Skv, step), soft=True)[0]
    dot = torch.randn(
        [hi - lo for lo, hi in (*ranges[:3], (0, Skv))],
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(0),
    )
    left_out = torch.ones(Skv, dtype=torch.bool)
    for run in found:
        left_out[run.start : run.stop] = False
    scores = evaluate.scores(program, dot, environment((b, h, q, (0, Skv)), reads))
    bound = hidden_below(program, float(dot.abs().max()), SIZES)
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


READS = (
    torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2], [5] * 12]),  # documents by key
    torch.tensor([[0, 0, 1, 1, 1, 2, 2], [5, 5, 5, 5, 4, 4, 4]]),  # documents by query
    torch.tensor([4, 12]),  # lengths
    torch.tensor([[True] * 5 + [False] * 7, [True] * 12]),  # padding
    torch.tensor([0.1, 0.2, 0.3, 0.3, 0.3, 0.3, float("nan"), 1.0, float("inf"), 2.0, 1e38, -1e38]),  # by key
    torch.tensor([1 << 53, (1 << 53) + 1, -3, 2, 2, 2, 2]),  # by query
    torch.tensor([0.5, 1000.0], dtype=torch.float16),  # by head
)


def evaluated_as(dtype: torch.dtype, predicate: Expr, ranges: Ranges) -> Tensor:
    env = Environment(Tile(*ranges), READS, SIZES, dtype, torch.device("cpu"))
    found = evaluate.as_bool(evaluate.evaluate(predicate, env, {}), env)
    return found.expand([hi - lo for lo, hi in ranges])


def whole_grid(steps: tuple[int, int, int, int]) -> Grid:
    cuts = (Cut(0, extent, step) for extent, step in zip((B, H, Sq, Skv), steps, strict=True))
    return Grid(*cuts, SIZES, READS)


def check_map(predicate: Expr, steps: tuple[int, int, int, int]) -> Tensor:
    """The map of `keep predicate`, each of its blocks held against all its elements."""
    found = tiles.block_map(ScoreProgram((Keep(predicate),)), whole_grid(steps))
    everywhere = tuple((0, extent) for extent in (B, H, Sq, Skv))
    for dtype in (torch.float32, torch.float64):
        truth = evaluated_as(dtype, predicate, everywhere)
        for place in itertools.product(*(range(-(-n // s)) for n, s in zip(truth.shape, steps, strict=True))):
            block = truth[tuple(slice(i * s, i * s + s) for i, s in zip(place, steps, strict=True))]
            kind = found[tuple(i if n > 1 else 0 for i, n in zip(place, found.shape, strict=True))]
            if kind == tiles.SKIP:
                assert not bool(block.any()), f"{format_expr(predicate)} keeps something in block {place}"
            elif kind == tiles.OPEN:
                assert bool(block.all()), f"{format_expr(predicate)} drops something in block {place}"
    return found


INDEX = {name: E.var(name) for name in "bhqk"}
READ = (
    E.read(0, (INDEX["b"], INDEX["k"])), E.read(1, (INDEX["b"], INDEX["q"])), E.read(2, (INDEX["b"],)),
    E.read(3, (INDEX["b"], INDEX["k"])), E.read(4, (INDEX["k"],)), E.read(5, (INDEX["q"],)),
    E.read(6, (INDEX["h"],)), E.read(0, (E.const(1), INDEX["k"])), E.read(2, (E.const(0),)),
    E.read(2, (operation("mod", INDEX["k"], E.const(2)),)),
)  # fmt: skip


def numbers(depth: int) -> st.SearchStrategy[Expr]:
    leaves = st.one_of(
        st.sampled_from([*INDEX.values(), *READ, E.size("n0"), E.size("n1")]),
        st.integers(-3, 9).map(E.const),
        st.sampled_from([0.1, 0.3, -0.5, 1e38, 2.5]).map(E.const),
    )
    if not depth:
        return leaves
    inner = numbers(depth - 1)
    two = ["add", "sub", "mul", "min", "max", "div"]
    one = ["neg", "abs", "sign", "floor", "ceil", "round", "trunc", "float", "tanh", "exp", "sqrt", "log"]
    return st.one_of(
        leaves,
        st.builds(operation, st.sampled_from(two), inner, inner),
        st.builds(operation, st.sampled_from(one), inner),
        st.builds(operation, st.sampled_from(["floordiv", "mod"]), inner, st.integers(1, 5).map(E.const)),
        st.builds(operation, st.just("where"), predicates(depth - 1), inner, inner),
    )


def predicates(depth: int) -> st.SearchStrategy[Expr]:
    values = numbers(max(depth - 1, 0))
    leaves = st.one_of(
        st.builds(operation, st.sampled_from(["eq", "ne", "le", "lt", "ge", "gt"]), values, values),
        st.just(READ[3]),
        st.builds(operation, st.just("isnan"), values),
    )
    if depth <= 0:
        return leaves
    inner = predicates(depth - 1)
    return st.one_of(
        leaves,
        st.builds(operation, st.sampled_from(["and", "or"]), inner, inner),
        st.builds(operation, st.just("not"), inner),
    )


@given(
    predicate=predicates(2),
    steps=st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.integers(1, 7), st.integers(1, 12)),
)
@settings(max_examples=400, deadline=None)
def test_maps_of_masks_that_read_data_are_true_of_every_element(
    predicate: Expr, steps: tuple[int, int, int, int]
) -> None:
    with contextlib.suppress(NotImplementedError):  # sign of a truth value, which PyTorch has not
        check_map(predicate, steps)


@given(data=st.data(), steps=st.tuples(st.integers(1, 3), st.integers(1, 5)))
@settings(max_examples=100, deadline=None)
def test_a_grid_says_of_each_block_what_classify_says_of_it(
    data: st.DataObject, steps: tuple[int, int], language: types.SimpleNamespace
) -> None:
    predicate = data.draw(language.booleans(("b", "h", "q", "k"), 2, False))
    found = tiles.block_map(
        ScoreProgram((Keep(predicate),)), dataclasses.replace(whole_grid((1, 1, *steps)), reads=())
    )
    kinds = {Fill.EMPTY: tiles.SKIP, Fill.PARTIAL: tiles.EVALUATE, Fill.FULL: tiles.OPEN}
    for b, h, i, j in itertools.product(range(B), range(H), *(range(n) for n in found.shape[2:])):
        spans = (i * steps[0], min((i + 1) * steps[0], Sq)), (j * steps[1], min((j + 1) * steps[1], Skv))
        expected = kinds[classify(predicate, box(((b, b + 1), (h, h + 1), *spans)))]
        assert found[min(b, found.shape[0] - 1), min(h, found.shape[1] - 1), i, j] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("r0[b, k] == r1[b, q]", [[[1, 1, 0], [1, 1, 1]], [[2, 2, 2], [0, 0, 0]]]),
        ("k < r2[b]", [[[2, 0, 0]] * 2, [[2, 2, 2]] * 2]),
        ("r3[b, k]", [[[2, 1, 0]] * 2, [[2, 2, 2]] * 2]),
        ("k <= q and k < r2[b]", [[[1, 0, 0], [2, 0, 0]], [[1, 0, 0], [2, 1, 0]]]),
        ("k <= q or k < r2[b]", [[[2, 0, 0], [2, 1, 0]], [[2, 2, 2]] * 2]),
        ("r4[k] < 0.5", [[[2, 1, 1]] * 2]),
        ("r4[k] <= 0.3", [[[1, 1, 1]] * 2]),  # the literal may round to either side
        ("r5[q] < 5", [[[1, 1, 1], [2, 2, 2]]]),
        ("r6[h] < 700", [[[1, 1, 1]] * 2]),  # half types compare in ways of their own
        ("r2[k % 2] < 20", [[[1, 1, 1]] * 2]),
    ],
)
def test_masks_that_read_data_are_decided_by_the_blocks_of_the_data(text: str, expected: list[Any]) -> None:
    predicate = parse(f"keep {text}").keeps[0].predicate
    found = check_map(predicate, (1, 1, 4, 4))
    assert found[:, 0].tolist() == expected


def test_documents_of_many_blocks_leave_out_all_others() -> None:
    documents = torch.arange(64).view(1, 64) // 8
    program = parse("keep k <= q and r0[b, k] == r0[b, q]")
    cuts = (Cut(0, 1, 1), Cut(0, 1, 1), Cut(0, 64, 4), Cut(0, 64, 4))
    found = tiles.block_map(program, Grid(*cuts, (), (documents,)))[0, 0]
    assert int((found != tiles.SKIP).sum()) == 8 * 3 and int((found == tiles.OPEN).sum()) == 8


def test_heads_with_windows_of_their_own_get_maps_of_their_own() -> None:
    cuts = (Cut(0, 3, 1), Cut(0, 2, 1), Cut(0, 8, 4), Cut(0, 8, 4))
    found = tiles.block_map(parse("keep abs(q - k) < 1 + 16 * h"), Grid(*cuts))
    assert found.tolist() == [[[[1, 0], [0, 1]], [[2, 2], [2, 2]]]]


def test_maps_of_positions_alone_are_kept_for_the_next_call() -> None:
    cuts = (Cut(0, 1, 1), Cut(0, 1, 1), Cut(0, 8, 4), Cut(0, 8, 4))
    program = parse("keep k <= q")
    assert tiles.block_map(program, Grid(*cuts)) is tiles.block_map(program, Grid(*cuts))


def test_a_read_that_is_expanded_is_looked_at_once() -> None:
    padding = torch.tensor([True] * 4 + [False] * 8).view(1, 1, 1, 12).expand(B, H, Sq, 12)
    cuts = (Cut(0, B, 1), Cut(0, H, 1), Cut(0, Sq, 4), Cut(0, 12, 4))
    found = tiles.block_map(parse("keep r0[b, h, q, k]"), Grid(*cuts, (), (padding,)))
    assert found.tolist() == [[[[2, 0, 0]] * 2]]
