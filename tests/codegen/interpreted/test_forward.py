"""The forward kernels, in the classic schedule, beyond what `conformance` holds every kernel to."""

import re

import pytest
import torch
from frames import REFERENCE, SMALL, agree, bias, operands, quarters

import attngraph
import attngraph.codegen
from attngraph.codegen.cpu import compiled
from attngraph.codegen.triton import attempts
from attngraph.codegen.triton.launch import Forward
from attngraph.ir.language.parser import parse
from attngraph.ir.ops import attention as ops
from attngraph.ir.ops import kernels


@pytest.mark.parametrize(
    "text", ["keep k <= q", *(pytest.param(text, marks=pytest.mark.slow) for text in ("", "s = 2 * tanh(s)"))]
)
@pytest.mark.parametrize(
    "shape",
    [
        {"Hq": 4}, {"Hq": 4, "Hkv": 1}, {"Sq": 1}, {"Skv": 1}, {"Sq": 1, "Skv": 1, "B": 1, "Hq": 1, "Hkv": 1},
        {"Sq": 7, "Skv": 53}, {"Sq": 53, "Skv": 7}, {"Sq": 64, "Skv": 64}, {"Sq": 33, "Skv": 17},
        {"D": 20}, {"D": 20, "Dv": 5}, {"D": 1, "Dv": 40}, {"D": 64, "Dv": 32},
    ],
    ids=str,
)  # fmt: skip
def test_shapes_agree_with_the_reference(text: str, shape: dict[str, int]) -> None:
    agree(text, operands(**shape))


def test_a_row_that_keeps_no_key_is_nan_and_others_are_not() -> None:
    out, lse = agree("keep k < q and k > q - 4", operands(), needed=True)
    assert out[:, :, 0].isnan().all()
    assert not out[:, :, 1:].isnan().any()
    assert (lse[:, :, 0] == -torch.inf).all()


OUT_OF_RANGE = [
    ("s = dot + r0[k - q]; keep k >= q", (bias(40),), ()),
    ("s = dot + r0[k - q + n0]", (bias(79),), (40,)),
    ("s = dot + r0[where(k <= q, q - k, 40)]", (bias(40),), ()),
    ("keep r0[q // 7, k // 8]", (torch.ones(5, 5, dtype=torch.bool),), ()),
    ("s = dot + r0[h, int(log(float(q + 1)) * 10)]", (bias(2, 36),), ()),
    ("keep r0[r1[q]] == r0[r1[k]]", (torch.arange(5), torch.arange(40) // 7), ()),
]
IN_RANGE = [
    ("s = dot + r0[k - q + n0]", (bias(79),), (39,)),
    ("s = dot + r0[where(k <= q, q - k, 39)]; keep k <= q", (bias(40),), ()),
    ("s = dot + r0[(k - q) % 5]; keep r1[min(abs(k - q), 7)]", (bias(5), torch.arange(8) > 3), ()),
    ("s = dot + r0[h, int(log(float(q + 1)) * 10)]", (bias(2, 37),), ()),
    ("keep r0[r1[q]] == r0[r1[k]]", (torch.arange(6), torch.arange(40) // 7), ()),
]
KERNELS = {
    "triton.forward": SMALL,
    "cpu.compiled": kernels.KERNELS["cpu.compiled"],
    "cpu.tiled": kernels.KERNELS["cpu.tiled"],
}


@pytest.mark.parametrize("name", ["reference", *KERNELS])
@pytest.mark.parametrize(("text", "reads", "sizes"), OUT_OF_RANGE, ids=[case[0] for case in OUT_OF_RANGE])
def test_an_index_out_of_range_is_an_error_whatever_computes_the_call(
    name: str,
    text: str,
    reads: tuple[torch.Tensor, ...],
    sizes: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "WORTH", 1)
    kernel = KERNELS.get(name, REFERENCE)
    with pytest.raises(IndexError, match=r"of a dimension of \d+; an index must be in range, also where"):
        kernel.forward(parse(text), operands(), reads, sizes)


@pytest.mark.parametrize(("text", "reads", "sizes"), IN_RANGE, ids=[case[0] for case in IN_RANGE])
def test_an_index_that_only_looks_as_if_it_were_out_of_range_is_none(
    text: str, reads: tuple[torch.Tensor, ...], sizes: tuple[int, ...]
) -> None:
    agree(text, operands(), reads, sizes)


def test_whole_numbers_at_an_index_from_data_are_left_to_pytorch_which_the_report_says() -> None:
    program = parse("keep r0[r1[q]] == r0[r1[k]]; s = 3 * s")
    agree(str(program), operands(), (torch.arange(6), torch.arange(40) // 7))
    (remark,) = attempts.remarks(program)
    assert remark.startswith("computed by PyTorch's operations: r0 holds whole numbers or truth values")


def test_what_is_read_out_of_range_at_an_index_from_data_shows_in_the_result() -> None:
    places = torch.arange(40) // 8
    out, _ = SMALL.forward(parse("s = dot + r0[r1[q]]"), operands(), (bias(4), places), ())
    assert torch.equal(out.isnan().any(-1), (places == 4).expand(2, 2, 40))
    with pytest.raises(IndexError):
        REFERENCE.forward(parse("s = dot + r0[r1[q]]"), operands(), (bias(4), places), ())


def test_tiles_of_the_default_size_agree() -> None:
    agree("s = 0.125 * dot; keep k <= q", operands(B=1, Sq=200, Skv=150, D=32, Dv=32), kernel=Forward())


def test_integers_may_need_64_bits() -> None:
    agree("keep (k * n0 - q * n0) // n0 > -9", operands(), sizes=(1 << 27,))
    agree("keep k * n0 <= q * n0 + r0[q]", operands(), (torch.arange(40) << 40,), (1 << 40,))
    agree("keep k + 3000000000 <= q + 3000000003", operands())
    agree("keep k <= q + n0", operands(), sizes=(1 << 40,))


# With one key the log-sum-exp of a row is its score, so every number a formula gives can be seen.
FORMULAS = [
    "exp(x)", "exp2(x)", "log(abs(x) + 1)", "log2(abs(x) + 0.5)", "tanh(x)", "tanh(x / 20)",
    "sigmoid(x)", "sqrt(abs(x))", "rsqrt(abs(x) + 0.1)", "sin(x)", "cos(x)", "erf(x)", "atan(x)", "abs(x)",
    "sign(x)", "floor(x)", "ceil(x)", "trunc(x)", "round(x)", "round(x * 2) / 2", "-x", "x - -x",
    "min(x, 0.5)", "max(x, i / 3)", "where(x > 0, x, i)", "where(isnan(log(x)), -1.0, x)",
    "float(i) / 2", "int(x) + i", "x ** 2", "x ** 3", "2 ** x", "0.5 ** (x / 2)", "abs(x) ** x",
    "x ** (i / 10)", "x ** (i - i)", "i ** (i // 9)", "2 ** (i - 20)", "i ** 2", "(i - 20) ** 3",
    "i // 7", "(i - 20) // 7", "i % 7", "(i - 20) % 7", "(i - 20) % -7", "(3 - i) // (i + 1)",
    "x // 0.7", "x % 0.7", "x % -0.7", "x // -1.5", "i / 7", "1 / (x + 100)", "min(i, 3)", "abs(i - 20)",
    "sign(i - 20)", "floor(i)", "i * i + 1", "random(7, b, h, q, k)", "random(i, q, 0, 0, 0)",
    "random(n0, 1, 2, 3, 4)", "(i < 20) * 3", "where(i < 20 and not x > 0 or i == 31, 1, 2)",
    "where(i, 1.0, 2.0)", "where(true, x, 0)", "sqrt(2) * x", "x * n0 - 2 ** -0.5",
    "where(q < 20, r0[q], r0[39 - q])", "r0[(q * 7) % 40]", "r0[min(q, 11)]",
    "(x + 1) * (x + 1) / (x * x + 2)", "3 - (2 - x)", "6 / (3 / (x + 100))", "-(x + 1)", "1 - x * 2",
]  # fmt: skip


@pytest.mark.parametrize("formula", FORMULAS)
def test_formulas_mean_what_the_evaluator_says(formula: str) -> None:
    x = torch.linspace(-5, 5, 40)
    x[:6] = torch.tensor([0.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    text = re.sub(r"\bi\b", "r1[q]", re.sub(r"\bx\b", "r0[q]", formula))
    integers = torch.arange(40).roll(5)
    agree(f"s = {text}", operands(B=1, Skv=1), (x, integers), (3,))


def test_elements_may_lie_further_apart_than_32_bits_count() -> None:
    room = torch.empty((1 << 31) + 4096, dtype=torch.bool)  # of which little is ever touched
    mask = room.as_strided((2, 40), (100, (1 << 31) // 39)).copy_(torch.rand(2, 40) < 0.7)
    agree("s = 0.25 * dot; keep r0[b, k]", operands(), (mask,))


def test_the_op_runs_the_kernel_that_is_named_and_differentiates_it() -> None:
    results = []
    for kernel in ("triton.forward", "reference"):
        inputs = [t.requires_grad_() for t in operands(Hq=4, Dv=24)]
        read = bias(4, 79).requires_grad_()
        out = ops.attention(*inputs, "s = s / 4 + r0[h, k - q + 39]; keep k <= q", read, kernel=kernel)
        out.square().sum().backward()
        results.append([out, *(t.grad for t in inputs), read.grad])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["triton.forward", "cpu.tiled"])
def test_the_op_gives_the_tensor_that_the_kernel_wrote(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a copy of it, with gradients or without."""
    made, kernel = [], kernels.KERNELS[name]
    forward = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda *given: made.append(forward(*given)) or made[-1])
    out = ops.attention(*(t.requires_grad_() for t in operands()), "keep k <= q", kernel=name)
    assert out.data_ptr() == made[0][0].data_ptr()
    assert not out._is_view()


def test_on_a_cpu_it_serves_only_when_asked_for() -> None:
    assert attngraph.codegen.triton is not None
    program, tensors = parse("s = tanh(s)"), operands()
    assert kernels.choose(program, tensors).name.startswith("cpu.")
    assert kernels.choose(program, tensors, "triton").name == "triton.forward"


def test_the_interpreter_refuses_bfloat16() -> None:
    reason = SMALL.refuse(parse(""), operands(dtype=torch.bfloat16))
    assert reason is not None and "bfloat16" in reason


def test_empty_tensors_and_narrow_integers_are_served_otherwise() -> None:
    agree("", operands(Skv=0))
    agree("keep k <= q", operands(B=0))
    agree("keep r0[k] - 1 < 9", operands(), (torch.arange(40, dtype=torch.uint8),))


def test_a_tensor_too_short_for_a_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs 40 elements along axis 1"):
        SMALL.forward(parse("keep r0[b, k]"), operands(), (torch.ones(2, 39, dtype=torch.bool),), ())
    with pytest.raises(ValueError, match="needs 2 elements along axis 0"):
        SMALL.forward(parse("keep r0[b, k]"), operands(), (torch.ones(1, 40, dtype=torch.bool),), ())


def test_a_named_kernel_that_cannot_serve_says_why() -> None:
    with pytest.raises(ValueError, match=r"triton\.forward does not serve.*float64"):
        SMALL.forward(parse(""), operands(dtype=torch.float64), (), ())


# Scores that float32 has exactly, so large that each digit of an exponent counts.
@pytest.mark.parametrize("height", [-1e6, 1e4, 1e6])
@pytest.mark.parametrize(
    "text", ["", "s = 0.125 * dot; keep k <= q", "sink r0[h]", "s = 0.25 * dot + r1[]; sink r0[h] + r1[]"]
)
def test_scores_far_from_zero_lose_nothing(text: str, height: float) -> None:
    q, k, v = operands(D=17)
    q, k = q.mul(2).round(), quarters(k)
    if "r1" not in text:
        q[..., 0], k[..., 0] = height, 1.0  # what is large is the same for all keys of a row
    sinks = torch.tensor([0.5, 2.0]) + (0 if "r1" in text else height)
    program, reads = parse(text), [sinks, torch.tensor(height)]
    found = SMALL.forward(program, (q, k, v), reads, ())[0]
    exact = (q.double(), k.double(), v.double())
    wanted = REFERENCE.forward(program, exact, [r.double() for r in reads], ())[0]
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=1e-5)
