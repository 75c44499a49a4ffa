"""Attention compiled to C beyond what `conformance` holds every kernel to: code as it is optimised for users,
every function of the language, the rounding of half types, threads, what is not looked at."""

import math
from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor

from attngraph.api.attention import attention
from attngraph.codegen.cpu import compiled, native
from attngraph.codegen.cpu.source import Plan
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.kernels import KERNELS, Operands

from .conformance.compare import assert_results
from .conformance.kernels import SUBJECTS
from .conformance.programs import CASES, Call

SERVED = [name for name, case in CASES.items() if 0 not in case.shape.values()]
pytestmark = pytest.mark.usefixtures("compiled_at_any_size", "served")


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


def check(program: str, given: Operands, reads: Sequence[Tensor] = (), sizes: Sequence[int] = ()) -> None:
    assert_results(KERNELS["cpu.compiled"], Call(program, given, list(reads), list(sizes)))


OPTIMISED = frozenset({"documents", "fill of finfo.min", "sink", "weights moved", "width 128, values 70"})
"""The cases of every run; the others are slow tests. (The sources of all are compiled quickly and run
in `conformance`.)"""


@pytest.mark.parametrize(
    "name", [n if n in OPTIMISED else pytest.param(n, marks=pytest.mark.slow) for n in SERVED]
)
def test_code_that_is_optimised_as_for_users_equals_the_reference(name: str, optimised: None) -> None:
    kernel, call = KERNELS["cpu.compiled"], CASES[name].of(SUBJECTS["cpu.compiled"].shape, torch.float32)
    assert_results(kernel, call)


UNARY = ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "sqrt", "rsqrt", "sin", "cos", "erf", "atan", "abs",
         "sign", "floor", "ceil", "trunc", "round", "float", "int", "-", "not ")  # fmt: skip
BINARY = ("+", "-", "*", "/", "//", "%", "**", "<", "<=", "==", "!=", ">=", ">", "and", "or")
ODD = torch.tensor([0.0, -0.0, 0.3, -0.3, 1.0, -1.0, 2.5, -2.5, 0.5, 1.5, 7.0, -7.0, 1e-4, 30.0, -30.0, 80.0])


def check_sum(formulas: Iterable[str], reads: Sequence[Tensor]) -> None:
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_results_are_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """One key: the output is the value itself, whatever it is. (Where the processor multiplies pairs of
    bfloat16, it takes numbers below the least normal one as zeros, in ATen's products too: there are none
    among these.)"""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    if dtype == torch.bfloat16:
        every = every.where(every.isnan() | (every.abs() >= torch.finfo(dtype).tiny), 0)
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


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    program, given = parse("s = 0.3 * dot; keep k <= q"), operands(B=2, Hq=4, Hkv=2, Sq=200, Skv=200)
    expected = KERNELS["cpu.compiled"].forward(program, given, [], [])
    torch.set_num_threads(threads)
    found = KERNELS["cpu.compiled"].forward(program, given, [], [])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_threads_of_python_do_where_there_is_no_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_start", lambda: None)
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


def test_a_library_that_is_there_serves_smaller_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows of later stages are fewer; they have the program of the first."""
    text = "s = 0.3 * dot + r0[h, k]"
    bias = torch.randn(2, 40)
    large, small = (torch.randn(3, n, 2, 40, 8).unbind() for n in (2, 1))
    monkeypatch.setattr(compiled, "WORTH", large[0].numel() // 8 * 40)
    plan = Plan(parse(text).without_scale, torch.float32, (torch.float32,))
    assert not compiled.is_compiled(plan, small)
    for operands in (large, small):
        assert compiled.is_compiled(plan, operands)
        found = attention(*operands, text, bias)
        exact = attention(*(t.double() for t in operands), text, bias.double())
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
