"""Attention compiled to C against the reference: values, log-sum-exp, NaN patterns, gradients, dtypes,
layouts, threads; and what becomes of calls that the C is not made for."""

import math
import types
from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attngraph.codegen.cpu import compiled, team
from attngraph.ir.language import evaluate
from attngraph.ir.language.evaluate import Tile
from attngraph.ir.language.parser import parse
from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops import kernels
from attngraph.ir.ops.kernels import KERNELS, Operands

op = torch.ops.attngraph.attention.default
Reads = tuple[Tensor, ...] | list[Tensor]
EPS = torch.finfo(torch.float32).eps


pytestmark = pytest.mark.usefixtures("compiled_quickly", "served")


def operands(
    B: int = 2, Hq: int = 2, Hkv: int = 2, Sq: int = 130, Skv: int = 130, D: int = 20, Dv: int = 20,
    dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 3,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, Dv))
    q, k, v = (scale * torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)


def double(reads: Reads) -> list[Tensor]:
    return [r.double() if r.is_floating_point() else r for r in reads]


def magnitude(program: ScoreProgram, q: Tensor, k: Tensor, reads: Reads, sizes: tuple[int, ...]) -> float:
    """The largest finite score, for the rounding that any way of computing it has."""
    group = q.shape[1] // k.shape[1]
    dot = q.double() @ k.double().repeat_interleave(group, 1).mT
    tile = Tile((0, q.shape[0]), (0, q.shape[1]), (0, q.shape[2]), (0, k.shape[2]))
    env = kernels.environment(tile, double(reads), sizes, q.double())
    kept = ScoreProgram(tuple(s for s in program.statements if not hasattr(s, "predicate")))
    both = [evaluate.scores(p, dot, env) for p in (program, kept)]
    return max(float(s.nan_to_num(0, 0, 0).abs().max()) for s in both)


def check(
    program: str | ScoreProgram, given: tuple[Tensor, ...], reads: Reads = (), sizes: tuple[int, ...] = ()
) -> None:
    """The compiled answer is as near to float64 as the reference's in the same dtype, twice at most, and
    has NaN where that has."""
    parsed = parse(program) if isinstance(program, str) else program
    q, k, v = given
    found = KERNELS["cpu.compiled"].forward(parsed, (q, k, v), list(reads), sizes)
    same = KERNELS["reference"].forward(parsed, (q, k, v), list(reads), sizes)
    exact = KERNELS["reference"].forward(parsed, (q.double(), k.double(), v.double()), double(reads), sizes)
    amplitude = magnitude(parsed, q, k, reads, sizes)
    for name, a, b, c in zip(("out", "lse"), found, same, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.isnan(), b.isnan()), f"{name}: NaN elsewhere\n{parsed}"
        # What is infinite in the narrow type is not in float64.
        usable = a.isfinite() & b.isfinite() & c.isfinite()
        assert torch.equal(a.isfinite(), b.isfinite()), f"{name}: infinite elsewhere\n{parsed}"
        ours, theirs = ((x.double() - c)[usable].abs() for x in (a, b))
        if not ours.numel():
            continue
        eps = torch.finfo(a.dtype).eps
        scale = float(c[usable].abs().max()) + (1 if name == "lse" else 0)
        allowed = 2 * float(theirs.max()) + 4 * eps * scale + 32 * EPS * amplitude * scale
        assert float(ours.max()) <= allowed, f"{name}: error {float(ours.max())}, allowed {allowed}\n{parsed}"


PAD = torch.ones(2, 130, dtype=torch.bool)
PAD[0, 100:], PAD[1, :66] = False, False
DOCUMENTS = torch.tensor([0] * 30 + [1] * 70 + [2] * 30).expand(2, 130)
EMPTY = torch.zeros(2, 130, dtype=torch.bool)
EMPTY[0, 70:90], EMPTY[1] = True, True

CASES: dict[str, tuple[str, dict[str, int], Reads, tuple[int, ...]]] = {
    "plain": ("s = 0.5 * dot", {}, (), ()),
    "causal": ("s = 0.5 * dot; keep k <= q", {}, (), ()),
    "causal by division": ("s = dot / 3; keep k <= q", {}, (), ()),
    "causal, few queries": ("keep k <= q", {"Sq": 3}, (), ()),
    "causal, many queries": ("keep k <= q", {"Skv": 3}, (), ()),
    "across": ("s = 0.5 * dot", {"Sq": 5, "Skv": 300}, (), ()),
    "aligned at the end": ("keep k <= q + n0", {"Sq": 50, "Skv": 200}, (), (150,)),
    "grouped": ("keep k <= q", {"Hq": 6, "Hkv": 2}, (), ()),
    "multi-query": ("s = 0.25 * dot", {"Hq": 4, "Hkv": 1}, (), ()),
    "wide values": ("keep k <= q", {"Dv": 70}, (), ()),
    "narrow values": ("keep k <= q", {"Dv": 1}, (), ()),
    "width 1": ("keep k <= q", {"D": 1, "Dv": 1}, (), ()),
    "width 64": ("s = 0.125 * dot; keep k <= q", {"D": 64, "Dv": 64}, (), ()),
    "width 128": ("s = 0.08 * dot; keep k <= q", {"D": 128, "Dv": 128}, (), ()),
    "one query": ("keep k <= q + n0", {"Sq": 1}, (), (129,)),
    "one key": ("keep k <= q", {"Skv": 1}, (), ()),
    "one of each": ("", {"Sq": 1, "Skv": 1}, (), ()),
    "whole blocks": ("keep k <= q", {"Sq": 96, "Skv": 128}, (), ()),
    "a key more than whole blocks": ("keep k <= q", {"Sq": 97, "Skv": 129}, (), ()),
    "fill of -1e9": ("s = 0.5 * dot; keep k <= q else -1e9", {}, (), ()),
    "fill of finfo.min": (f"s = 0.5 * dot; keep k <= q else {-3.4028234663852886e38!r}", {}, (), ()),
    "added finfo.min": (f"s = 0.5 * dot; keep k <= q else s - {3.4028234663852886e38!r}", {}, (), ()),
    "fill that leaks": ("s = 0.5 * dot; keep k <= q else -5", {}, (), ()),
    "fill above the scores": ("keep k <= q else 5", {}, (), ()),
    "fill relative to the score": ("keep k <= q else s - 5", {}, (), ()),
    "fill that is read": ("keep k <= q else r0[h]", {}, (random(2),), ()),
    "fill where every row is filled": ("keep k < 0 else -1e9", {}, (), ()),
    "fill where some rows are filled": ("keep r0[b, q] else -1e9", {}, (PAD,), ()),
    "fill before a hard mask": ("keep k <= q else -1e9; keep k > q - 80", {}, (), ()),
    "hard mask, then a fill that uncovers": ("keep k < 64; keep k < 60 else -5", {}, (), ()),
    "hard mask, then a fill where undecided": ("keep k < 64; keep r0[b, k] else -5", {}, (PAD,), ()),
    "hard mask, then a score": ("keep k <= q; s = max(s, -5)", {}, (), ()),
    "several masks": ("keep k <= q; keep r0[b, k]; keep q - k < 40", {}, (PAD,), ()),
    "window": ("keep k <= q and k > q - 8", {}, (), ()),
    "window of n0": ("keep k <= q and q - k < n0", {}, (), (65,)),
    "window on both sides": ("keep abs(q - k) <= 20", {}, (), ()),
    "window and the first keys": ("keep k <= q and (q - k < 16 or k < 4)", {}, (), ()),
    "chunks": ("keep q // 16 == k // 16", {}, (), ()),
    "chunks of n0": ("keep q // n0 == k // n0", {}, (), (16,)),
    "dilated": ("keep (q - k) % 4 == 0 and k <= q", {}, (), ()),
    "prefix": ("keep k <= q or k < r0[b]", {}, (torch.tensor([60, 3]),), ()),
    "a number as predicate": ("keep k - 64", {}, (), ()),
    "padding": ("keep r0[b, k]", {}, (PAD,), ()),
    "padding of a whole batch entry": ("keep not r0[b, k]", {}, (EMPTY,), ()),
    "lengths": ("keep k < r0[b]", {}, (torch.tensor([130, 7]),), ()),
    "a length of nothing": ("keep k < r0[b]", {}, (torch.tensor([0, 7]),), ()),
    "documents": ("keep k <= q and r0[b, q] == r0[b, k]", {}, (DOCUMENTS,), ()),
    "documents in 32 bits": ("keep r0[b, q] == r0[b, k]", {}, (DOCUMENTS.int(),), ()),
    "heads with masks of their own": ("keep k <= q and q - k < 16 * (h + 1)", {"Hq": 4, "Hkv": 2}, (), ()),
    "softcap": ("s = 5 * tanh(dot / 5); keep k <= q", {}, (), ()),
    "bias": ("s = dot + r0[b, h, q, k]", {}, (random(2, 2, 130, 130),), ()),
    "bias, bfloat16": ("s = dot + r0[h, q, k]", {}, (random(2, 130, 130, dtype=torch.bfloat16),), ()),
    "bias, float16": ("s = dot + r0[h, q, k]", {}, (random(2, 130, 130, dtype=torch.float16),), ()),
    "bias, turned": ("s = dot + r0[k, q]", {}, (random(130, 130),), ()),
    "bias, expanded": ("s = dot + r0[b, h, q, k]", {}, (random(2, 1, 1, 130).expand(2, 2, 130, 130),), ()),
    "relative bias": ("s = dot + r0[h, k - q + 129]", {}, (random(2, 259),), ()),
    "relative bias, kept in range": ("s = dot + r0[h, max(min(k - q, 8), -8) + 8]", {}, (random(2, 17),), ()),
    "relative bias, turned": ("s = dot + r0[q - k + 129, h]", {}, (random(259, 2),), ()),
    "slopes": ("s = dot + r0[h] * (k - q); keep k <= q", {}, (random(2),), ()),
    "slopes of the head's number": ("s = dot - 2 ** (-h - 1) * abs(k - q)", {}, (), ()),
    "a read of rank 0": ("s = dot * r0[]", {}, (random(),), ()),
    "reads of reads": ("s = dot + r0[r1[b, k]]", {}, (random(3), DOCUMENTS), ()),
    "sizes in numbers": ("s = dot / sqrt(n0) + n1 / 7 - n0 // n1", {}, (), (20, 3)),
    "sink": ("keep k <= q; sink r0[h]", {}, (random(2),), ()),
    "sink of each row": ("keep k <= q; sink r0[b, h, q]", {}, (random(2, 2, 130),), ()),
    "sink that dominates": ("keep k <= q else -50; sink 1000", {}, (), ()),
    "sink and nothing kept": ("keep false; sink 1", {}, (), ()),
    "sink of minus infinity": ("keep k < q; sink -inf", {}, (), ()),
    "sink of infinity": ("keep k < q; sink inf", {}, (), ()),
    "sink of NaN": ("sink nan", {}, (), ()),
    "dropout": ("p = where(0.1 <= random(r0[], b, h, q, k), p / 0.9, 0)", {}, (torch.tensor(2**32 - 5),), ()),
    "causal dropout": ("keep k <= q; p = where(0.1 <= random(5, b, h, q, k), p / 0.9, 0)", {}, (), ()),
    "rows without keys": ("keep k < q", {}, (), ()),
    "blocks without keys": ("keep k < q - 64", {}, (), ()),
    "rows without keys, NaN replaced": ("keep k < q; p = where(isnan(p), 0, p)", {}, (), ()),
    "rows without keys, mean instead": ("keep k < q; p = where(isnan(p), 1 / 130, p)", {}, (), ()),
    "rows without keys, weights masked": ("keep k < q; p = where(k < 70, p, 0)", {}, (), ()),
    "nothing kept": ("keep k > 1000", {}, (), ()),
    "weights moved": ("keep k <= q; p = p + 0.01", {}, (), ()),
    "weights squared": ("keep k <= q; p = p * p", {}, (), ()),
    "weights masked": ("p = where(k <= q, p, 0)", {}, (), ()),
    "weights read": ("keep k <= q; p = p * r0[q, k]", {}, (random(130, 130),), ()),
    "weights above a threshold": ("p = where(p > 0.01, p, 0)", {}, (), ()),
    "weights and a sink": ("sink 1; p = 2 * p; p = where(random(1, b, h, q, k) < 0.5, p, 0)", {}, (), ()),
    "scores of infinity": ("s = where(k == q, inf, dot)", {}, (), ()),
    "scores of NaN": ("s = where(k == q and q > 100, nan, dot)", {}, (), ()),
    "scores of minus infinity": ("s = where(k <= q, -inf, dot)", {}, (), ()),
    "large scores": ("s = 300 * dot; keep k <= q", {}, (), ()),
    "far below zero": ("s = dot - 1e30", {}, (), ()),
    "unequal scores": ("s = dot - 3 * k", {}, (), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_compiled_equals_the_reference(name: str) -> None:
    program, shape, reads, sizes = CASES[name]
    check(program, operands(**shape), reads, sizes)


OPTIMISED = frozenset({
    "causal", "softcap", "documents", "dropout", "fill of finfo.min", "rows without keys", "sink", "slopes",
    "weights moved", "bias, bfloat16", "width 128",
})  # fmt: skip
"""The cases of every run; the others are run with the slow tests."""


@pytest.mark.parametrize(
    "name", [n if n in OPTIMISED else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_code_that_is_optimised_as_for_users_equals_the_reference(name: str, optimised: None) -> None:
    test_compiled_equals_the_reference(name)


UNARY = ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "sqrt", "rsqrt", "sin", "cos", "erf", "abs", "sign",
         "floor", "ceil", "trunc", "round", "float", "int", "-", "not ")  # fmt: skip
BINARY = ("+", "-", "*", "/", "//", "%", "**", "<", "<=", "==", "!=", ">=", ">", "and", "or")
ODD = torch.tensor([0.0, -0.0, 0.3, -0.3, 1.0, -1.0, 2.5, -2.5, 0.5, 1.5, 7.0, -7.0, 1e-4, 30.0, -30.0, 80.0])


def check_sum(formulas: Iterable[str], reads: Reads) -> None:
    """All in one program, which is compiled once."""
    terms = (f"max(min(float({formula}), 9), -9)" for formula in formulas)
    check(f"s = dot + {' + '.join(terms)}", operands(Skv=70), reads)


@pytest.mark.parametrize("name", UNARY)
def test_every_function_of_one_argument(name: str) -> None:
    of_numbers = name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt")
    arguments = ("r0[k % 16]",) if of_numbers else ("r0[k % 16]", "q - k")
    check_sum((f"{name}({argument})" for argument in arguments), (ODD,))


@pytest.mark.parametrize("sign", [*BINARY, "min", "max"])
def test_every_function_of_two_arguments(sign: str) -> None:
    pairs = [
        ("r0[k % 16]", "r1[q % 16]"),
        ("(k - 60)", "3"),
        ("(k - 60)", "r1[q % 16]"),
        ("r0[k % 16]", "(q + 1)"),
    ]
    formulas = []
    for a, b in pairs:
        if sign in ("//", "%") and b == "r1[q % 16]":
            b = "(abs(r1[q % 16]) + 0.7)"
        if sign == "**":
            a, b = f"(abs({a}) + 0.1)", f"max(min({b}, 2), -2)"
        formulas.append(f"{sign}({a}, {b})" if sign in ("min", "max") else f"{a} {sign} {b}")
    check_sum(formulas, (ODD, ODD.flip(0)))


OTHERS = (
    "where(k < q, r0[k % 16], 2)", "isnan(r1[k % 16])", "random(3, b, h, q, k)",
    "where(isnan(r1[k % 16]), 1, r1[k % 16])", "(k <= q) + (k < 9) * 2", "where(k < 9, k < 3, q < 5)",
    "random(r2[], k, 5000000000, q - k, 3)", "(k * 65537 * q * 65537) % 7", "min(k, 5) // 2 - max(q, 7) % 3",
)  # fmt: skip


@pytest.mark.parametrize("text", OTHERS)
def test_other_functions(text: str) -> None:
    spoiled = ODD.clone()
    spoiled[5] = math.nan
    check(f"s = dot + {text}", operands(Skv=70), (ODD, spoiled, torch.tensor(-3)))


HALF = (
    "plain", "causal", "grouped", "softcap", "slopes", "window", "sink", "dropout", "fill of -1e9",
    "rows without keys", "documents", "wide values",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HALF)
def test_half_types_are_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    program, shape, reads, sizes = CASES[name]
    check(program, operands(**shape, dtype=dtype), reads, sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_results_are_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """One key: the output is the value itself, whatever it is."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    v = every.view(1, 1, 1, -1)
    q = torch.zeros(1, 1, 1, 4, dtype=dtype)
    out = KERNELS["cpu.compiled"].forward(parse("s = dot"), (q, q, v), [], [])[0]
    torch.testing.assert_close(out, v, rtol=0, atol=0, equal_nan=True)
    # Means of two values: rounded to the nearest, ties to even.
    pair = torch.stack([every.view(1, 1, -1), every.flip(0).view(1, 1, -1)], 2)
    found = KERNELS["cpu.compiled"].forward(parse("s = 0 * dot"), (q, q.expand(1, 1, 2, 4), pair), [], [])[0]
    mean = (pair.float().mean(2, keepdim=True)).to(dtype)
    assert torch.equal(found.isnan(), mean.isnan())
    torch.testing.assert_close(found.nan_to_num(0), mean.nan_to_num(0), rtol=0, atol=0)


@pytest.mark.parametrize("program", ["s = 0.5 * dot; keep k <= q", "s = 0.5 * dot", "keep k <= q else -1e9"])
def test_strides_do_not_matter(program: str, lay_out: Callable[[Operands], Operands]) -> None:
    check(program, lay_out(operands()))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["q", "k", "v"])
def test_nan_and_infinity_in_the_operands_come_out_where_the_reference_has_them(
    bad: float, place: str
) -> None:
    q, k, v = operands(Sq=60, Skv=60)
    {"q": q, "k": k, "v": v}[place][0, 1, 40, 2] = bad
    for program in ("keep k <= q", "s = 0.5 * dot", "keep k <= q else -1e9", "s = 5 * tanh(dot / 5)"):
        expected, found = (
            KERNELS[n].forward(parse(program), (q, k, v), [], [])[0] for n in ("reference", "cpu.compiled")
        )
        assert torch.equal(expected.isnan(), found.isnan()), program


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    program, given = parse("s = 0.3 * dot; keep k <= q"), operands(B=2, Hq=4, Hkv=2, Sq=200, Skv=200)
    before = torch.get_num_threads()
    expected = KERNELS["cpu.compiled"].forward(program, given, [], [])
    try:
        torch.set_num_threads(threads)
        found = KERNELS["cpu.compiled"].forward(program, given, [], [])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_threads_of_python_do_where_there_is_no_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_start", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    check("s = 0.3 * dot; keep k <= q", operands(Sq=300, Skv=300))


@pytest.mark.parametrize("program", ["keep k <= q", "s = dot + r0[h] * (k - q)"])
def test_rounds_of_a_few_heads_give_the_whole(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = (random(4),) if "r0" in program else ()
    for packed in (1, 1 << 16):
        monkeypatch.setattr(compiled, "PACKED", packed)
        check(program, operands(B=3, Hq=4, Hkv=2), reads)


def test_hidden_blocks_are_not_looked_at() -> None:
    """A NaN among keys that a mask hides is not met, where whole blocks are hidden."""
    q, k, v = operands(Sq=200, Skv=200)
    k[:, :, 128:], v[:, :, 128:] = math.nan, math.nan
    for program, reads in (("keep k < 128", ()), ("keep k < r0[b]", (torch.tensor([128, 64]),))):
        out = KERNELS["cpu.compiled"].forward(parse(program), (q, k, v), list(reads), [])[0]
        assert bool(out.isfinite().all())


@pytest.mark.parametrize("scale", [1.0, 30.0, 100.0, 300.0])
def test_a_fill_of_minus_ten_thousand_leaks_where_scores_are_large(scale: float) -> None:
    check("keep k <= q else -10000", operands(scale=scale))


def random_programs(data: st.DataObject, language: types.SimpleNamespace) -> None:
    B, H, Sq, Skv = 1, 2, 66, 130
    program = data.draw(language.programs(1, masks=True))
    check(program, operands(B, H, 1, Sq, Skv, 2, 2), language.reads(B, H, Sq, Skv, torch.float32), (100, 40))


@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_compiled_equals_the_reference_on_random_programs(
    data: st.DataObject, language: types.SimpleNamespace
) -> None:
    random_programs(data, language)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
def test_compiled_equals_the_reference_on_many_random_programs(
    data: st.DataObject, language: types.SimpleNamespace
) -> None:
    random_programs(data, language)
