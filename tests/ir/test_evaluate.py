"""The evaluator of score programs against the definition, spelled out as loops over Python floats, and
the random numbers that dropout draws."""

import math
import types
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attngraph.ir.language import evaluate
from attngraph.ir.language.evaluate import Environment, Tile
from attngraph.ir.language.parser import parse
from attngraph.ir.ops import kernels

B, Hq, Hkv, Sq, Skv, D, Dv = 2, 4, 2, 3, 5, 2, 2
SIZES = (3, 2)
WHOLE = Tile((0, B), (0, Hq), (0, Sq), (0, Skv))


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, Dv))
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return q, k, v


def environment(
    tile: Tile = WHOLE, reads: tuple[Tensor, ...] = (), sizes: tuple[int, ...] = SIZES
) -> Environment:
    return Environment(tile, reads, sizes, torch.float64, torch.device("cpu"))


def value(text: str, *reads: Tensor, sizes: tuple[int, ...] = SIZES, tile: Tile = WHOLE) -> Tensor:
    """The score that the expression `text` gives on a tile, for a dot of zero."""
    dot = torch.zeros(tile.shape, dtype=torch.float64)
    return evaluate.scores(parse(f"s = {text}"), dot, environment(tile, reads, sizes))


def assert_same(found: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@given(data=st.data())
@settings(max_examples=100)
def test_the_reference_equals_loops_over_python_floats(
    data: st.DataObject, language: types.SimpleNamespace, by_loops: Callable[..., Tensor]
) -> None:
    program = data.draw(language.programs())
    reads = language.reads(B, Hq, Sq, Skv)
    reads[0] = reads[0][:2].repeat(2)  # r0 is read at h < 4 and at computed places below 2
    q, k, v = operands()
    out, _ = kernels.KERNELS["reference"].forward(program, (q, k, v), reads, SIZES)
    assert_same(out, by_loops(program, q, k, v, reads, SIZES))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s = 0.125 * dot",
        "s = dot / sqrt(n0)",
        "s = dot * (1 / 3)",
        "s = dot + (k - q) / 7",
        "s = dot * 2 ** (0 - h)",
        "s = dot * 2 ** -1",
        "s = dot + 2 ** (h - 3) * (k - q)",
        "s = dot + exp(-(q + 1))",
        "s = dot + tanh(k)",
        "s = dot + log(k + 1) * sin(q)",
        "s = dot / n0",
        "s = dot + log(3) + exp(1) + sqrt(2)",
        "s = dot + (q - 2) // 2 + (q - 2) % 2",
        "s = dot + q // -2 + q % -2",
        "s = dot + floor(-1.5 + q) + ceil(q / 2)",
        "s = dot + round(q / 2) + trunc((q - 1) / 2) + sign(q - 1)",
        "keep q - k",
        "keep k",
        "keep 2.5",
        "keep 0",
        "s = dot + (k <= q)",
        "s = dot + ((k <= q) + (k <= q))",
        "s = dot - (k <= q)",
        "s = dot + -(k <= q)",
        "s = dot + abs(k <= q)",
        "s = dot + min(k <= q, 0.5)",
        "s = (k <= q) * dot",
        "s = dot + int(2.7 * q) + float(k)",
        "s = 50 * tanh(dot / 50)",
        "keep k <= q else -5",
        "keep k <= q else s - 5",
        "keep k < q",
        "sink 0.3",
        "keep k < q\nsink q / 3",
        "keep k < q\np = where(isnan(p), 0, p)",
        "p = p * (k + 1) / 3",
        "s = abs(dot)\nkeep k <= q\np = p * sign(dot)",
        "s = 3 * dot\np = p * dot",
        "s = where(k <= q, dot, -inf)",
        "s = where(k < q, dot, nan)\nkeep not isnan(s)",
        "keep k <= q\ns = s * 2 + 1",
        "s = q",
        "s = 1",
        "s = -inf",
        "sink -inf",
        "keep true",
        "keep false",
        "keep dot > 0",
        "keep s > 0\nkeep s < 1",
    ],
)
def test_a_program_means_what_its_text_says(text: str, by_loops: Callable[..., Tensor]) -> None:
    program, (q, k, v) = parse(text), operands()
    out, _ = kernels.KERNELS["reference"].forward(program, (q, k, v), (), SIZES)
    assert_same(out, by_loops(program, q, k, v, (), SIZES), 1e-12)


@given(data=st.data())
@settings(max_examples=60)
def test_a_part_of_the_whole_is_what_its_tile_evaluates_to(
    data: st.DataObject, language: types.SimpleNamespace
) -> None:
    program = data.draw(language.programs())
    reads = language.reads(B, Hq, Sq, Skv)
    ranges = []
    for extent in (B, Hq, Sq, Skv):
        lo = data.draw(st.integers(0, extent - 1))
        ranges.append((lo, data.draw(st.integers(lo + 1, extent))))
    tile, part = Tile(*ranges), tuple(slice(*r) for r in ranges)
    dot = torch.randn(WHOLE.shape, dtype=torch.float64)
    env, env_of_tile = environment(WHOLE, reads), environment(tile, reads)
    whole, found = evaluate.scores(program, dot, env), evaluate.scores(program, dot[part], env_of_tile)
    assert_same(found, whole[part], 1e-14)
    p = whole.softmax(-1)
    assert_same(
        evaluate.weights(program, p[part], env_of_tile), evaluate.weights(program, p, env)[part], 1e-14
    )


def test_numbers_of_the_score_language_are_as_precise_as_the_environment() -> None:
    """Integer operands of `/` and of functions must not pass through float32."""
    for text, exact in {
        "1 / 3": 1 / 3,
        "n0 / 7": 3 / 7,
        "sqrt(n0)": math.sqrt(3),
        "exp(1)": math.e,
        "log(n1)": math.log(2),
        "rsqrt(3)": 3**-0.5,
        "2 ** -3": 0.125,
        "2 ** 0.5": math.sqrt(2),
        "0.1 + 0.2": 0.1 + 0.2,
        "1e-30 * 1": 1e-30,
        "tanh(1)": math.tanh(1),
        "sin(1) + cos(1)": math.sin(1) + math.cos(1),
        "erf(1)": math.erf(1),
        "sigmoid(1)": 1 / (1 + math.exp(-1)),
        "exp2(-2)": 0.25,
        "log2(3)": math.log2(3),
        "float(3) / 7": 3 / 7,
    }.items():
        assert float(value(text).flatten()[0]) == pytest.approx(exact, rel=1e-15), text


def test_integer_variables_are_as_precise_as_the_environment() -> None:
    tile = Tile((0, 1), (0, 1), (3, 4), (7, 8))
    for text, exact in {
        "q / k": 3 / 7,
        "sqrt(q)": math.sqrt(3),
        "exp(q - 2)": math.e,
        "2 ** (q - k)": 0.0625,
        "log(k)": math.log(7),
        "1 / q * 0.1": 1 / 3 * 0.1,
        "q ** 0.5": math.sqrt(3),
        "tanh(q / k)": math.tanh(3 / 7),
        "0.1 * q": 0.1 * 3,
        "where(q <= k, q, 0.5) / k": 3 / 7,
        "float(q) / k": 3 / 7,
        "min(q, 0.1)": 0.1,
        "max(q, 0.1) / k": 3 / 7,
    }.items():
        assert float(value(text, tile=tile)) == pytest.approx(exact, rel=1e-15), text


def test_reads_gather_at_computed_places_and_view_at_plain_ones() -> None:
    table = torch.arange(Hq * 8, dtype=torch.float64).view(Hq, 8)
    found = value("r0[h, k - q + 2]", table)
    for h in range(Hq):
        for q in range(Sq):
            for k in range(Skv):
                assert float(found[0, h, q, k]) == float(table[h, k - q + 2])
    square = torch.randn(Skv, Sq, dtype=torch.float64)
    assert_same(value("r0[k, q]", square), square.mT.expand(B, Hq, Sq, Skv))
    assert_same(value("r0[q, q]", square), square.diagonal()[:Sq].view(1, 1, Sq, 1).expand(B, Hq, Sq, Skv))
    assert_same(value("r0[n1, q]", square), square[2, :Sq].view(1, 1, Sq, 1).expand(B, Hq, Sq, Skv))
    assert_same(value("r0[1, q]", square), square[1, :Sq].view(1, 1, Sq, 1).expand(B, Hq, Sq, Skv))


def test_a_read_of_a_read_follows_data() -> None:
    places = torch.tensor([4, 0, 3, 1, 2])
    table = torch.randn(5, dtype=torch.float64)
    assert_same(value("r1[r0[k]]", places, table), table[places].expand(B, Hq, Sq, Skv))


def test_an_index_out_of_range_is_refused_by_name() -> None:
    table = torch.randn(3, dtype=torch.float64)
    for text in (
        "r0[k - q]",
        "where(0 <= k - q and k - q < 3, r0[k - q], 7)",
        "r0[k]",
        "r0[q - 1]",
        "r0[5]",
        "r0[-1]",
    ):
        with pytest.raises(IndexError, match="r0"):
            value(text, table)


def drawn(tile: Tile, seed: int = 7) -> Tensor:
    return value(f"random({seed}, b, h, q, k)", tile=tile)


BIG = Tile((0, 2), (0, 4), (0, 128), (0, 128))


def test_random_numbers_are_uniform() -> None:
    found = drawn(BIG).flatten()
    assert float(found.min()) >= 0 and float(found.max()) < 1
    n = found.numel()
    assert abs(float(found.mean()) - 0.5) < 5 / math.sqrt(12 * n)
    assert abs(float(found.var()) - 1 / 12) < 0.001
    counts = torch.histc(found, 64, 0, 1)
    chi_squared = float(((counts - n / 64) ** 2 / (n / 64)).sum())
    assert chi_squared < 63 + 5 * math.sqrt(2 * 63)


def test_random_numbers_of_neighbours_seeds_and_dimensions_are_uncorrelated() -> None:
    found = drawn(BIG) - 0.5
    pairs = [
        (found[..., 1:], found[..., :-1]), (found[:, :, 1:], found[:, :, :-1]),
        (found[:, 1:], found[:, :-1]), (found[:1], found[1:]),
        (found, drawn(BIG, 8) - 0.5), (found, found.mT),
    ]  # fmt: skip
    for a, b in pairs:
        off = a != b if a.shape == b.shape else torch.ones_like(a, dtype=torch.bool)
        x, y = a[off], b[off]
        assert abs(float((x * y).mean())) < 5 * (1 / 12) / math.sqrt(x.numel())


def test_random_numbers_are_the_same_in_every_tile_and_every_time() -> None:
    whole = drawn(BIG)
    assert torch.equal(whole, drawn(BIG))
    part = Tile((1, 2), (2, 4), (17, 60), (100, 128))
    assert torch.equal(drawn(part), whole[1:2, 2:4, 17:60, 100:128])


def test_random_numbers_take_large_seeds_from_a_tensor() -> None:
    seeds = [torch.tensor(s) for s in (0, 1, 2**31 + 5, 2**32 - 1)]
    found = [value("random(r0[], b, h, q, k)", s, tile=BIG) for s in seeds]
    for i, one in enumerate(found):
        assert float(one.min()) >= 0 and float(one.max()) < 1
        for other in found[:i]:
            assert (one == other).double().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_numbers_stay_below_one_in_every_accumulation_dtype(dtype: torch.dtype) -> None:
    env = Environment(BIG, (), SIZES, dtype, torch.device("cpu"))
    found = evaluate.random([3, *(env.index(n) for n in "bhqk")], env)
    assert found.dtype == dtype
    assert float(found.max()) < 1
    assert torch.equal(found.double(), drawn(BIG, 3))
