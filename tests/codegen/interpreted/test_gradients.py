"""The backward kernels against the reference in float64."""

from typing import Any

import pytest
import torch
from frames import REFERENCE, SMALL, Results, compare_gradients, operands, quarters
from hypothesis import assume, given, settings
from torch import Tensor

from attngraph.codegen.scalar import read_gradients
from attngraph.codegen.triton import launch_backward
from attngraph.codegen.triton.launch import Forward
from attngraph.codegen.triton.plan import Blocks
from attngraph.ir.language.parser import parse
from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops import attention as ops

DIFFERENTIATED = (
    "s = 0.25 * dot",
    "s = 0.25 * dot; keep k <= q",
    "s = 5.0 * tanh(dot / 5.0); keep k <= q",
    "s = 0.3 * dot - 0.1 * (q - k); keep k <= q + 2",
    "keep q - k < 7 and k - q < 5",
    "s = dot * 0.3; keep k <= q else -10000.0",
    "s = 0.3 * dot; keep k <= q else s - 50.0",
    "s = 0.2 * dot; p = 0.5 * p",
    "keep r0[b, k]",
    "s = 0.2 * dot; keep r1[b, q] == r1[b, k]; sink 0.5",
    "s = 0.2 * dot; p = where(random(r2[], b, h, q, k) < 0.3, 0.0, p / 0.7)",
    "s = dot ** 2 / 4 + exp(s / 9)",
    "s = sigmoid(dot) * abs(dot); keep k <= q + n0",
    "s = sin(dot) + log(1.5 + cos(s)) + erf(s / 2)",
    "keep k <= q and k >= 20",
    "keep k <= q and k >= 20; p = where(isnan(p), 0.0, p)",
)


@pytest.mark.parametrize("text", DIFFERENTIATED)
@pytest.mark.parametrize(
    "sizes",
    [pytest.param((2, 2, 2, 40, 40, 16, 16), marks=pytest.mark.slow), (1, 4, 2, 33, 50, 24, 10)],
    ids=str,
)
def test_gradients_are_those_of_the_reference(text: str, sizes: tuple[int, ...]) -> None:
    b, hq, hkv, sq, skv, d, dv = sizes
    program, tensors = parse(text), operands(b, hq, hkv, sq, skv, d, dv)
    length = max(sq, skv)
    documents = torch.arange(length).div(9, rounding_mode="floor").expand(b, length)
    reads = [torch.rand(b, skv) < 0.8, documents, torch.tensor(123)]
    results = REFERENCE.forward(program, tensors, reads, [2])
    grads = (torch.randn_like(results[0]), 0.3 * torch.randn_like(results[1]))
    plan = SMALL._plan_backward(program, tensors, reads, [2])
    assert plan is not None, "this program has kernels of its own"
    found = SMALL.backward(program, tensors, reads, [2], results, grads)
    exact = (tuple(t.double() for t in tensors), reads, [2])
    wanted = REFERENCE.backward(
        program, *exact, tuple(t.double() for t in results), tuple(t.double() for t in grads)
    )  # fmt: skip
    for mine, theirs in zip(found[:3], wanted[:3], strict=True):
        assert mine is not None
        assert theirs is not None
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=2e-4, equal_nan=True)


def test_gradients_in_half_precision_and_through_the_op() -> None:
    tensors = [t.requires_grad_() for t in operands(1, 4, 2, 40, 40, 16, 16, torch.float16)]
    text = "s = 0.25 * dot\nkeep k <= q"
    out = ops.attention(*tensors, text, kernel="triton.forward")
    weight = torch.randn_like(out)
    found = torch.autograd.grad((out * weight).sum(), tensors)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    other = ops.attention(*exact, text, kernel="reference")
    wanted = torch.autograd.grad((other * weight.double()).sum(), exact)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=5e-3, atol=1e-2)


# Programs that read floating tensors, and the shapes of these: letters are extents of the call, `d` the
# number of distances, digits themselves; `q:9` is a table of integers below 9.
FAMILIES = (
    ("s = 0.3 * dot + r0[b, h, q, k]", "bhqk"),
    ("s = 0.3 * dot + r0[h, q, k]; keep k <= q + 3", "hqk"),
    ("s = 0.3 * dot + r0[b, q, k] * r1[q, k]", "bqk qk"),
    ("s = dot * r0[h]; keep k <= q", "h"),
    ("s = 0.3 * dot + r0[h] * (k - q); keep k <= q", "h"),
    ("s = 0.3 * dot + r0[b, k]; keep q - k < 9", "bk"),
    ("s = 0.3 * dot + r0[h, k] + r1[q, h]", "hk qh"),
    ("s = 0.3 * dot + r0[k - q + n0, h]; keep k <= q", "dh"),
    ("s = 0.3 * dot + r0[h, r1[k - q + n0]]", "h7 d:7"),
    ("s = 0.3 * dot + r0[b, min(abs(k - q), 12)]", "b13"),
    ("s = 0.3 * dot + r0[r1[q, k], h]", "9h qk:9"),
    ("s = 0.3 * dot + r0[h, q // 8, k % 4]", "h94"),
    ("s = 0.3 * dot + r0[r1[b, k], q]", "5q bk:5"),
    ("s = 0.3 * dot * r0[]; s = s + r0[]", "_"),
    ("s = 0.3 * dot; sink r0[h]; keep k <= q", "h"),
    ("s = dot * r1[]; keep k < q; sink r0[b, q] + r1[]", "bq _"),
    ("keep k <= q - 6; p = p * r0[h]", "h"),
    ("keep k <= q - 6; p = p * sigmoid(r0[b, k])", "bk"),
    ("keep k <= q - 6; p = p * r0[q, k]", "qk"),
    ("keep k <= q - 6; p = where(isnan(p), 0.0, p); p = p * r0[h]", "h"),
    ("s = 4 * tanh((dot + r0[h, k]) / 4); keep k <= q else r1[h] - 3", "hk h"),
    ("s = r0[b, q] * 2 + max(dot, r1[k]); s = 0.1 * s + dot * r1[k] ** 2; keep k <= q", "bq k"),
    ("s = dot * rsqrt(1 + r0[k] ** 2) + min(r0[k], r1[q]) * abs(r1[q]) ** r0[k] % 3", "k q"),
    ("keep r0[b, k] > 0; s = 0.5 * s", "bk"),
    ("keep k > 100; s = s + r0[h]", "h"),
)


def drawn(shapes: str, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    b, h, _, q, k, _, _ = sizes
    extents = {"b": b, "h": h, "q": q, "k": k, "d": q + k - 1} | {str(n): n for n in range(10)}
    found = []
    for shape in shapes.split():
        letters, _, below = shape.partition(":")
        size = [extents[letter] for letter in letters.replace("13", "\0") if letter in extents]
        size += [13] if "13" in letters else []
        found.append(torch.randint(0, int(below), size) if below else torch.randn(size).to(dtype))
    return found


@pytest.mark.parametrize(("text", "shapes"), FAMILIES, ids=[text for text, _ in FAMILIES])
def test_gradients_of_what_scores_read(text: str, shapes: str) -> None:
    sizes = (2, 2, 1, 19, 34, 16, 24)
    kernel = Forward(Blocks(16, 32))
    compare_gradients(text, operands(*sizes), drawn(shapes, sizes), [sizes[3] - 1], kernel)


def agree_on_random_gradients(language: Any, examples: int) -> None:
    """Four times the reference's own error is allowed, by the reference in float64."""
    tensors = operands(Hq=4, Sq=18, Skv=21)
    reads, sizes = language.reads(2, 4, 18, 21, torch.float32), (21, 3)
    kernel = Forward(Blocks(16, 32))
    double = [t.double() if t.is_floating_point() else t for t in (*tensors, *reads)]

    @settings(max_examples=examples)
    @given(language.programs(weights=True))
    def check(program: ScoreProgram) -> None:
        assume(kernel.refuse(program, tensors) is None)
        assume(kernel._plan_backward(program, tensors, reads, sizes) is not None)
        torch.manual_seed(0)
        results = REFERENCE.forward(program, tensors, reads, sizes)
        grads = torch.randn_like(results[0]), torch.randn_like(results[1])
        found = kernel.backward(program, tensors, reads, sizes, results, grads)
        eager = REFERENCE.backward(program, tensors, reads, sizes, results, grads)
        q, k, v, *others = double
        exact = REFERENCE.forward(program, (q, k, v), others, sizes)
        wanted = REFERENCE.backward(
            program, (q, k, v), others, sizes, exact, (grads[0].double(), grads[1].double())
        )
        for mine, own, theirs in zip(found, eager, wanted, strict=True):
            if mine is None or own is None or theirs is None:
                continue
            assert torch.equal(mine.isnan(), own.isnan())
            error, usual = ((t - theirs).nan_to_num().abs().amax().item() for t in (mine, own))
            assert error <= 4 * usual + 2e-4 * max(1.0, theirs.nan_to_num().abs().amax().item())

    check()


def test_gradients_of_random_programs_agree(language: Any) -> None:
    agree_on_random_gradients(language, 6)


@pytest.mark.slow
def test_gradients_of_many_random_programs_agree(language: Any) -> None:
    agree_on_random_gradients(language, 100)


@pytest.mark.parametrize(
    ("family", "at_once"),
    [(0, 1), (0, 2 * 2 * 19 * 16), (1, 2 * 19 * 32), (7, 1), (7, 2 * 19 * 32), (8, 1), (18, 2 * 19 * 16)],
)
def test_gradients_of_pairs_are_summed_some_rows_at_a_time(
    family: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, shapes = FAMILIES[family]
    sizes, kernel = (3, 2, 1, 34, 19, 16, 16), Forward(Blocks(16, 32))
    monkeypatch.setattr(read_gradients, "PAIRS_AT_ONCE", at_once)
    compare_gradients(text, operands(*sizes), drawn(shapes, sizes), [sizes[3] - 1], kernel)


def test_the_same_call_gives_the_same_gradients() -> None:
    sizes = (2, 2, 1, 33, 40, 16, 16)
    text, tensors = "s = dot + r0[h, k - q + n0] + r1[b, k] * r2[h]; keep k <= q", operands(*sizes)
    program, reads = parse(text), drawn("hd bk h", sizes)
    results = SMALL.forward(program, tensors, reads, [32])
    grads = torch.randn_like(results[0]), torch.randn_like(results[1])
    first, second = (SMALL.backward(program, tensors, reads, [32], results, grads) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_reads_of_other_dtypes_have_gradients_of_theirs(dtype: torch.dtype) -> None:
    sizes = (1, 2, 2, 20, 24, 16, 16)
    reads = drawn("hd bk h", sizes, dtype)
    text = "s = 0.3 * dot + r0[h, k - q + n0] + r1[b, k]; sink r2[h]"
    found = compare_gradients(text, operands(*sizes), reads, [19], tolerance=2e-3)
    assert [g.dtype for g in found[3:] if g is not None] == [dtype] * 3


def test_reads_may_lie_in_memory_as_they_like() -> None:
    sizes = (2, 2, 2, 20, 24, 16, 16)
    reads = [torch.randn(24, 40, 2).permute(2, 1, 0)[:, ::2], torch.randn(1, 2).expand(2, 2)]
    compare_gradients("s = 0.3 * dot + r0[h, q, k] + r1[b, h]", operands(*sizes), reads, [])


def test_gradients_that_nobody_wants_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    load = launch_backward.load_backward

    def loaded(plan: Any) -> Any:
        launched.extend(name for name in vars(load(plan)) if name.startswith("gradient"))
        return load(plan)

    monkeypatch.setattr(launch_backward, "load_backward", loaded)
    sizes = (1, 2, 2, 20, 24, 16, 16)
    for wanted in (False, True):
        launched.clear()
        q, k, v = (t.requires_grad_() for t in operands(*sizes))
        bias, slopes = drawn("qk h", sizes)
        bias.requires_grad_(wanted)
        slopes.requires_grad_()
        text = "s = dot + r0[q, k] * r1[h]"
        ops.attention(q, k, v, text, bias, slopes, kernel="triton.forward").sum().backward()
        assert (bias.grad is not None) == wanted and slopes.grad is not None
        assert any(name.startswith("gradient_of_read") for name in launched) == wanted


CHECKED = [
    *FAMILIES,
    *((text, "bk:2 bk:3 _:9") for text in DIFFERENTIATED),
]


@pytest.mark.parametrize("kernel", ["reference", pytest.param("cpu.tiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("text", "shapes"), CHECKED, ids=[text for text, _ in CHECKED])
def test_gradients_are_the_slopes_of_results(text: str, shapes: str, kernel: str) -> None:
    """Of the kernels that the Triton kernels are compared with, by small differences in float64."""
    sizes = (2, 2, 1, 5, 5, 3, 2)
    torch.manual_seed(0)
    tensors = operands(*sizes, dtype=torch.float64)
    text = text.replace("k <= q - 6", "k <= q").replace("k >= 20", "k >= 0").replace("k > 100", "k > 0")
    text = text.replace("r0[b, k] > 0", "r0[b, k] > -9")  # a row that sees no key has no slopes
    reads = drawn(shapes, sizes, torch.float64)
    inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in (*tensors, *reads)]

    def call(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Results:
        found: Results = torch.ops.attngraph.attention(q, k, v, list(others), [4], text, kernel)
        seen = found[1].detach().isfinite()
        return torch.where(seen.unsqueeze(3), found[0], 0), torch.where(seen, found[1], 0)

    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize(
    "text",
    [
        "s = dot + r0[int(min(abs(dot), 5)), q]",
        "keep k < q; p = p * r0[h, q]; p = where(isnan(p), 0.0, p)",
    ],
)  # fmt: skip
def test_gradients_that_no_kernel_gives_are_computed_in_blocks(text: str) -> None:
    program, tensors, reads = parse(text), operands(), [torch.randn(40, 40)]
    assert SMALL._plan_backward(program, tensors, reads, ()) is None
    results = REFERENCE.forward(program, tensors, reads, ())
    grads = (torch.randn_like(results[0]), torch.randn_like(results[1]))
    found = SMALL.backward(program, tensors, reads, (), results, grads)
    wanted = REFERENCE.backward(program, tensors, reads, (), results, grads)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


# Scores that float32 has exactly, of which a row's log-sum-exp in float32 says nothing but the largest one.
FAR = (
    ("keep k <= q - 9 else -1e9", "_"),
    ("keep k <= q - 9 else -3.4028234663852886e+38", "_"),
    ("keep k <= q - 9 else s - 1000000.0", "_"),
    ("keep k <= q - 9 else -1e9; keep k < 30; p = 0.5 * p", "_"),
    ("keep q - k < 9; keep k <= q - 9 else -1e9", "_"),
    ("s = 0.25 * dot + 10000.0 + r0[h, q, k]; keep k <= q", "hqk"),
    ("s = 1000000.0 - 0.25 * dot * r0[b, k]", "bk"),
    ("s = dot * r0[h] - 1000000.0; keep k <= q + 3", "h"),
    ("s = 0.25 * dot + r1[b, q] - 10000.0; sink r0[h] - 10000.0", "h bq"),
    ("s = 0.25 * dot + 1000000.0; keep k <= q; sink r0[h] + 1000000.0", "h"),
    ("keep k < q; sink r0[h] - 10000.0", "h"),
    ("keep k <= q - 9 else -1e9; keep k < q; p = where(isnan(p), 0.0, p)", "_"),
)


@pytest.mark.usefixtures("all_listed")
@pytest.mark.parametrize(("text", "shapes"), FAR, ids=[text for text, _ in FAR])
def test_gradients_of_rows_whose_scores_are_all_far_from_zero(text: str, shapes: str) -> None:
    sizes = (2, 2, 1, 35, 50, 16, 24)
    torch.manual_seed(0)
    q, k, v = operands(*sizes)
    reads = [torch.randint(-2, 3, r.shape).float() for r in drawn(shapes, sizes)]
    compare_gradients(text, (q.round(), quarters(k), v), reads, [])


LARGE = ("", "s = 0.5 * dot", "s = 0.5 * dot; keep k <= q", "keep k <= q; sink -1.5")


@pytest.mark.parametrize("text", LARGE)
@pytest.mark.parametrize("height", [-1e4, 1e4, -1e6, 1e6])
def test_gradients_of_large_products(text: str, height: float) -> None:
    q, k, v = operands(1, 4, 2, 35, 50, 17, 24)
    q, k = q.mul(2).round(), quarters(k)  # float32 has their products exactly
    q[..., 0], k[..., 0] = height, 1.0  # what is large is the same for all keys of a row
    compare_gradients(text, (q, k, v), [], [])
