"""The table of operations: what its rows say of bounds and derivatives is true, and one row is all that a new
function takes. (Triton's interpreter runs the same function in `interpreted/test_functions.py`.)"""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import attngraph.codegen  # noqa: F401  (registers the kernels)
from attngraph.codegen.cpu import source
from attngraph.codegen.triton.emit import emit
from attngraph.codegen.triton.plan import Blocks, Plan
from attngraph.ir.language import evaluate
from attngraph.ir.language import expr as E
from attngraph.ir.language.derivative import derivative
from attngraph.ir.language.evaluate import Environment, Tile
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.functions import FUNCTIONS, OPERATORS
from attngraph.ir.language.parser import operation, parse
from attngraph.ir.language.score import DOT, SCORE, WEIGHT
from attngraph.ir.ops.kernels import KERNELS
from attngraph.meaning.algebra import intervals

WRITTEN = ("quotient", "remainder")  # by kernels alone
NAMES = {"dot": DOT, "s": SCORE, "p": WEIGHT}
ROWS = {**FUNCTIONS, **{name: row for name, row in OPERATORS.items() if name not in WRITTEN}}
POINT = Tile((0, 1), (0, 1), (0, 1), (0, 1))


def applied(name: str, integers: bool = False) -> Expr:
    """The operation of the score language's values."""
    args = [*NAMES.values(), *[E.ZERO] * 2][: ROWS[name].arity]
    return operation(name, *(operation("int", a) if integers else a for a in args))


def value(node: Expr, dtype: torch.dtype, *values: Tensor) -> Tensor:
    env = Environment(POINT, (), (), dtype, torch.device("cpu"))
    found = evaluate.evaluate(node, env, dict(zip(NAMES, values, strict=False)))
    assert isinstance(found, Tensor)
    return found


def check_bounds(node: Expr, spans: list[tuple[float, float]], points: list[float]) -> None:
    """Values at the ends of the spans, and at places between, lie within the bounds."""
    box = intervals.Box((0, 0), (0, 0), (0, 0), (0, 0))
    low, high = intervals.interval(node, box, dict(zip(NAMES, spans, strict=False)))
    if math.isinf(low) or math.isinf(high):
        return
    for dtype in (torch.float32, torch.float64):
        between = [
            [min(max(a + (b - a) * p, a), b) for p in points] for a, b in spans
        ]  # rounding may pass an end
        at = [
            torch.tensor([a, *inside, b], dtype=dtype) for (a, b), inside in zip(spans, between, strict=True)
        ]
        found = value(node, dtype, *torch.meshgrid(*at, indexing="ij"))
        assert bool(((found >= low) & (found <= high)).all()), (
            f"{node} over {spans} is not in {low} .. {high}"
        )


@pytest.mark.parametrize("integers", [False, True], ids=["reals", "integers"])
@pytest.mark.parametrize("name", ROWS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_bounds_of_every_operation_hold(name: str, integers: bool, data: st.DataObject) -> None:
    ends = st.one_of(st.sampled_from([-1.0, 0.0, 1.0, 2.5]), st.floats(-300, 300, width=32))
    spans = [tuple(sorted(data.draw(st.tuples(ends, ends)))) for _ in range(3)]
    check_bounds(applied(name, integers), spans, data.draw(st.lists(st.floats(0, 1), max_size=5)))


def check_slope(name: str, at: tuple[float, float], by: Expr) -> None:
    node = applied(name)
    x, y = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in at)
    result = value(node, torch.float64, x, y)
    (wanted,) = torch.autograd.grad(result, x if by is DOT else y)
    slope = derivative(node, by)
    found = torch.tensor(slope.value) if slope.op == "const" else value(slope, torch.float64, x, y)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "by"),
    [
        (name, by)
        for name, row in ROWS.items()
        if name not in ("int", "random")  # no gradient in PyTorch
        for by, _ in zip((DOT, SCORE), row.slopes, strict=False)
    ],
)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_derivative_of_every_operation_is_that_of_autograd(
    name: str, by: Expr, data: st.DataObject
) -> None:
    positive = name in ("log", "log2", "sqrt", "rsqrt", "pow", "mod")
    ends = st.floats(0.01 if positive else -20, 20)
    x, y = data.draw(st.tuples(ends, ends))
    assume(abs(y) > 1e-3 and abs(x) > 1e-3)
    if name in ("min", "max") and data.draw(st.booleans()):
        y = x
    check_slope(name, (x, y), by)


# --- one row is a function ---


def test_a_new_row_is_read_printed_evaluated_bounded_and_differentiated(
    softsign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"s = 3 * {softsign}(dot / 2)"
    assert str(parse(text)) == text
    monkeypatch.setitem(ROWS, softsign, FUNCTIONS[softsign])
    node, x = operation(softsign, DOT), torch.linspace(-9, 9, 50, dtype=torch.float64)
    assert torch.equal(value(node, torch.float64, x), x / (1 + x.abs()))
    check_bounds(node, [(-2.0, 7.0)], [0.2, 0.6])
    for at in (-3.0, -0.1, 0.5, 8.0):
        check_slope(softsign, (at, 0.0), DOT)
        step = 1e-6
        near = value(node, torch.float64, torch.tensor([at + step, at - step], dtype=torch.float64))
        slope = value(derivative(node, DOT), torch.float64, torch.tensor(at, dtype=torch.float64))
        assert float(slope) == pytest.approx(float(near[0] - near[1]) / (2 * step), rel=1e-6)


def test_a_new_row_is_written_in_both_languages(softsign: str) -> None:
    program = parse(f"s = 3 * {softsign}(dot + q)")
    c = source.write(source.Plan(program, torch.float32, ())).text
    assert "const float t0 = (dot + ((float)q));" in c and "(t0 / (1.0f + fabsf(t0)))" in c
    triton = emit(Plan(program, torch.float16, 64, 64, 1, (), Blocks(64, 64))).source
    assert "t0 = dot + q\n" in triton and "3 * (t0 / (1.0 + tl.abs(t0)))" in triton


@pytest.mark.usefixtures("compiled_at_any_size", "served")
def test_a_new_row_is_compiled_with_its_gradients(softsign: str) -> None:
    program, kernel, reference = (
        parse(f"s = 3 * {softsign}(dot); keep k <= q"),
        KERNELS["cpu.compiled"],
        KERNELS["reference"],
    )
    given = tuple(torch.randn(1, 2, 70, 16) for _ in range(3))
    results = reference.forward(program, given, [], ())
    for found, wanted in zip(kernel.forward(program, given, [], ()), results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    grads = torch.randn_like(results[0]), torch.randn_like(results[1])
    found, wanted = (k.backward(program, given, [], (), results, grads) for k in (kernel, reference))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
