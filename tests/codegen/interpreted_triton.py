"""The Triton kernels in Triton's interpreter, against the reference: run by `test_triton.py`.

Not collected by itself: the interpreter has to be chosen before triton is imported, and it must not be
chosen for the other tests. `TRITON_INTERPRET=1 pytest tests/codegen/interpreted_triton.py` runs it alone.
"""

import itertools
import os
import re

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("set TRITON_INTERPRET=1: these tests are for the interpreter")

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import triton
from hypothesis import assume, given, settings
from torch import Tensor
from triton.runtime import interpreter

import attngraph
import attngraph.codegen
from attngraph.codegen import read_gradients
from attngraph.codegen.remarks import Remarks
from attngraph.codegen.triton import attempts, decode, launch, launch_backward, store, tuned, visits
from attngraph.codegen.triton.decode import Decode
from attngraph.codegen.triton.emit_decode import DecodePlan
from attngraph.codegen.triton.launch import Forward
from attngraph.codegen.triton.plan import Blocks, Plan
from attngraph.ir import evaluate, kernels, ops
from attngraph.ir.cache import Rows
from attngraph.ir.evaluate import Tile
from attngraph.ir.parser import parse
from attngraph.ir.score import ScoreProgram
from attngraph.models.mla import MLAConfig, MLADecoder

SMALL = Forward(Blocks(32, 16))
REFERENCE = kernels.KERNELS["reference"]
TOLERANCE = {
    torch.float32: {"atol": 2e-5, "rtol": 1e-5},
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
}
Results = tuple[Tensor, Tensor]

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
    # Older interpreters make an index of an array of one element, which numpy forbids from 2.4 on.
    _patch = interpreter._patch_lang_tensor

    def _patch_tensor(tensor, scope):
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = _patch_tensor


@pytest.fixture(autouse=True, scope="session")
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    store.directory.cache_clear()


@pytest.fixture(autouse=True)
def no_attempt_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not run is an error here, not a reason to try others."""

    def fail(*said: object) -> None:
        raise AssertionError(said)

    monkeypatch.setattr(attempts._log, "warning", fail)


def operands(
    B: int = 2, Hq: int = 2, Hkv: int = 2, Sq: int = 40, Skv: int = 40, D: int = 16, Dv: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    torch.manual_seed(B + Hq + Sq + Skv + D)
    shapes = ((B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, Dv))
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    return q, k, v


def agree(
    text: str, tensors: tuple[Tensor, Tensor, Tensor], reads: Sequence[Tensor] = (),
    sizes: Sequence[int] = (), kernel: Forward = SMALL,
) -> Results:  # fmt: skip
    """Assert that the kernel gives the reference's output, NaN for NaN, and its log-sum-exp."""
    program = parse(text)
    found = kernel.forward(program, tensors, reads, sizes)
    wanted = REFERENCE.forward(program, tensors, reads, sizes)
    tolerance = TOLERANCE[tensors[0].dtype]
    torch.testing.assert_close(found[0], wanted[0], equal_nan=True, **tolerance)
    finite = wanted[1].isfinite()
    torch.testing.assert_close(found[1][finite], wanted[1][finite], **tolerance)
    return found


def quarters(tensor: Tensor) -> Tensor:
    return tensor.mul(4).round().div(4)


def bias(*shape: int) -> Tensor:
    return torch.linspace(-2, 2, torch.Size(shape).numel()).sin().view(shape)


SEED = torch.tensor(1 << 40 | 9)
FUTURE = torch.ones(40, 40).triu(1) > 0
FIRST_BATCH_EMPTY = torch.arange(80).view(2, 40) >= 43

PROGRAMS = [
    ("", (), ()),
    ("s = dot / 4", (), ()),
    ("s = -0.5 * dot", (), ()),
    ("s = 0 * dot", (), ()),
    ("s = 0.25 * dot; keep k <= q", (), ()),
    ("keep k <= q and k > q - 7", (), ()),
    ("keep k < q", (), ()),
    ("keep k % 3 == 0 or k == q", (), ()),
    ("keep (k - q) % 3 != 1; keep (k - q) // 5 > -4", (), ()),
    ("keep not (k > q and q > 4)", (), ()),
    ("keep k <= q + 5", (), ()),
    ("keep k <= q - 5", (), ()),
    ("keep k <= q + n0", (), (3,)),
    ("keep k <= q - n0 and k < n1", (), (1, 30)),
    ("s = 0.25 * dot; keep k <= q else -1000000000.0", (), ()),
    ("keep k <= q else -3.4028234663852886e+38", (), ()),
    ("keep k <= q else -2.5", (), ()),
    ("keep k <= q else s - 3", (), ()),
    ("keep r0[b, k]; keep k <= q else -10000", (FIRST_BATCH_EMPTY,), ()),
    ("keep r0[b, k] else -3.4028234663852886e+38", (FIRST_BATCH_EMPTY,), ()),
    ("keep k <= q; s = s + r0[h, q, k]", (bias(2, 40, 40),), ()),
    ("s = s + r0[h, k - q + 127]", (bias(2, 255),), ()),
    ("s = s + r0[h] * (k - q); keep k <= q", (bias(2),), ()),
    ("s = s + r0[b, h, q, k]", (bias(2, 2, 40, 40).half(),), ()),
    ("s = s + r0[b, h, q, k]", (bias(2, 2, 40, 40).masked_fill(FUTURE, -torch.inf),), ()),
    ("s = s + where(r0[b, k], 0.0, -10000.0)", (FIRST_BATCH_EMPTY,), ()),
    ("keep r0[b, k]", (torch.arange(80).view(2, 40) % 3 > 0,), ()),
    ("keep r0[b, q] == r0[b, k] and k <= q", (torch.arange(80).view(2, 40) // 9,), ()),
    ("keep r0[b, k] > 0", (bias(2, 40).double(),), ()),
    ("keep k < r0[b]", (torch.tensor([17, 40], dtype=torch.int32),), ()),
    ("s = 50 * tanh(s / 50)", (), ()),
    ("s = 0.1 * dot; s = 2 * tanh(s / 2); keep k <= q", (), ()),
    ("s = 0.5 * s + tanh(dot)", (), ()),
    ("s = r0[k, q]", (bias(40, 40),), ()),
    ("s = 3", (), ()),
    ("sink r0[h]", (bias(2),), ()),
    ("s = dot / 3; sink 1 - r0[h]", (bias(2),), ()),
    ("s = 0.5 * dot; keep k < q; sink r0[h]", (bias(2),), ()),
    ("s = tanh(s); sink r0[b, q] + 1", (bias(2, 40),), ()),
    ("keep k < q; sink where(h == 0, -inf, 0.5)", (), ()),
    ("keep k <= q; p = where(random(r0[], b, h, q, k) < 0.3, 0.0, p / 0.7)", (SEED,), ()),
    ("p = p * r0[h]; p = where(k <= q, p, 0)", (bias(2),), ()),
    ("keep r0[b, k]; p = where(isnan(p), 0, p)", (FIRST_BATCH_EMPTY & (torch.arange(2) > 0)[:, None],), ()),
    ("keep k < q; p = where(not isnan(p), 2 * p - p / 4, 0.0)", (), ()),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reads", "sizes"), PROGRAMS, ids=[p[0] or "plain" for p in PROGRAMS])
def test_programs_agree_with_the_reference(text: str, reads: Sequence[Tensor], sizes: Sequence[int]) -> None:
    agree(text, operands(), reads, sizes)


@pytest.mark.parametrize(
    "text", ["s = 0.25 * dot", "keep k <= q", "s = 5 * tanh(s / 5); keep k <= q else -1e9"]
)
def test_programs_agree_in_half_precision(text: str) -> None:
    agree(text, operands(dtype=torch.float16))


@pytest.mark.parametrize("text", ["", "keep k <= q", "s = 2 * tanh(s)"])
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


def test_tensors_may_lie_in_memory_as_they_like() -> None:
    q, k, v = operands(Hq=4, D=16, Dv=16)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    k = k.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    v = torch.cat([v, v], -1)[..., ::2]
    read = bias(80, 4).t()[:, ::2]
    agree("s = s + r0[h, k]; keep r1[q, k]", (q, k, v), (read, (torch.arange(40) > 3).expand(40, 40)))


def test_heads_may_be_broadcast() -> None:
    q, k, v = operands(Hkv=1)
    agree("keep k <= q", (q, k.expand(2, 2, 40, 16), v.expand(2, 2, 40, 16)))


def test_a_row_that_keeps_no_key_is_nan_and_others_are_not() -> None:
    out, lse = agree("keep k < q and k > q - 4", operands())
    assert out[:, :, 0].isnan().all()
    assert not out[:, :, 1:].isnan().any()
    assert (lse[:, :, 0] == -torch.inf).all()


def test_tiles_of_the_default_size_agree() -> None:
    agree("s = 0.125 * dot; keep k <= q", operands(B=1, Sq=200, Skv=150, D=32, Dv=32), kernel=Forward())


def test_integers_may_need_64_bits() -> None:
    agree("keep (k * n0 - q * n0) // n0 > -9", operands(), sizes=(1 << 27,))
    agree("keep k * n0 <= q * n0 + r0[q]", operands(), (torch.arange(40) << 40,), (1 << 40,))
    agree("keep k + 3000000000 <= q + 3000000003", operands())
    agree("keep k <= q + n0", operands(), sizes=(1 << 40,))


# --- tiles that are not visited ---

DOCUMENTS = torch.arange(160).view(2, 80) // 23
LENGTHS = torch.tensor([17, 66])
LISTED = [
    ("keep q - k < 9 and k <= q", ()),
    ("keep q - k < 9", ()),
    ("s = 0.3 * dot + r0[h]; keep abs(q - k) < 1 + 30 * h", (bias(2),)),
    ("keep r0[b, q] == r0[b, k]", (DOCUMENTS,)),
    ("s = 0.2 * dot; keep r0[b, q] == r0[b, k]; keep k <= q", (DOCUMENTS,)),
    ("keep k < r0[b] and q < r0[b]", (LENGTHS,)),
    ("keep k <= q or k < r0[b]; sink r1[h]", (LENGTHS, bias(2))),
    ("keep r0[b, k]; keep k % 3 > 0; p = p * 2", (torch.arange(160).view(2, 80) % 80 < 41,)),
    ("keep r0[b, h, q, k]; keep k >= q - 40", (torch.rand(2, 2, 80, 80) < 0.8,)),
    ("keep k <= q else s - 2; keep r0[b, k]", (torch.arange(160).view(2, 80) % 80 < 41,)),
]


@pytest.fixture
def all_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "WORTH", 1)


def is_listed(text: str, tensors: tuple[Tensor, Tensor, Tensor], reads: Sequence[Tensor]) -> bool:
    return launch.plan_forward(parse(text), tensors, reads, (), Blocks(32, 16)).listed


@pytest.mark.usefixtures("all_listed")
@pytest.mark.parametrize(("text", "reads"), LISTED, ids=[text for text, _ in LISTED])
@pytest.mark.parametrize("lengths", [(80, 80), (50, 71)])
def test_what_is_visited_by_lists_agrees(
    text: str, reads: Sequence[Tensor], lengths: tuple[int, int]
) -> None:
    tensors = operands(Hkv=1, Sq=lengths[0], Skv=lengths[1])
    assert is_listed(text, tensors, reads)
    agree(text, tensors, reads)


@pytest.mark.usefixtures("all_listed")
@pytest.mark.parametrize(("text", "reads"), LISTED, ids=[text for text, _ in LISTED])
def test_gradients_by_lists_agree(text: str, reads: Sequence[Tensor]) -> None:
    tensors, kernel = operands(Hkv=1, Sq=50, Skv=71), Forward(Blocks(32, 16))
    plan = kernel._plan_backward(parse(text), tensors, reads, ())
    assert plan is not None and plan.listed
    compare_gradients(text, tensors, list(reads), [], kernel)


@pytest.mark.usefixtures("all_listed")
def test_keys_and_queries_of_tiles_that_are_not_visited_have_no_part_in_gradients() -> None:
    lengths = torch.tensor([16, 48])
    program, (q, k, v) = parse("keep k < r0[b] and q < r0[b]"), operands(Sq=48, Skv=48)
    results = SMALL.forward(program, (q, k, v), [lengths], ())
    grads = torch.randn_like(results[0]), torch.zeros_like(results[1])
    grads[0][0, :, 32:] = 0  # the rows of the last block of queries see no key
    k[0, :, 16:], q[0, :, 32:] = torch.nan, torch.inf
    found = SMALL.backward(program, (q, k, v), [lengths], (), results, grads)
    assert found[0] is not None and found[1] is not None
    assert bool(found[0].isfinite().all()) and bool(found[1].isfinite().all())


@pytest.mark.usefixtures("all_listed")
@pytest.mark.parametrize(("text", "reads"), LISTED[:8], ids=[text for text, _ in LISTED[:8]])
def test_only_tiles_with_a_kept_score_are_visited(text: str, reads: Sequence[Tensor]) -> None:
    program, tensors, blocks = parse(text), operands(Sq=70, Skv=80), Blocks(32, 16)
    q, k, _ = tensors
    env = kernels.environment(program, Tile((0, 2), (0, 2), (0, 70), (0, 80)), reads, (), q)
    kept = evaluate.scores(program, q @ k.mT, env).isfinite()
    padded = torch.nn.functional.pad(kept, (0, 0, 0, 26)).view(2, 2, 3, 32, 5, 16).transpose(3, 4)
    found = visits.find(program, blocks, tensors, reads, ())
    for b, h, row in itertools.product(range(2), range(2), range(3)):
        place = b * found.b + h * found.h + row
        whole, count = found.counts[place].tolist()
        needed = padded[b, h, row].flatten(1).any(1).nonzero().flatten().tolist()
        hidden_in_parts = "k % 3" in text
        assert sorted(found.tiles[place, :count].tolist()) == needed
        for tile in found.tiles[place, :whole].tolist():
            rows = min(32, 70 - 32 * row)
            assert not hidden_in_parts and bool(padded[b, h, row, tile, :rows].all())


@pytest.mark.usefixtures("all_listed")
def test_keys_of_tiles_that_are_not_visited_are_not_read() -> None:
    lengths = torch.tensor([16, 48])
    q, k, v = operands(Sq=48, Skv=48)
    k[0, :, 16:], v[0, :, 16:] = torch.nan, torch.inf
    for text, reads in (
        ("keep k < r0[b]", (lengths,)),
        ("keep r0[b, k]", (torch.arange(48) < lengths[:, None],)),
    ):
        out, _ = SMALL.forward(parse(text), (q, k, v), reads, ())
        assert bool(out.isfinite().all())


@pytest.mark.usefixtures("all_listed")
def test_lists_are_kept_while_tensors_stay_as_they_are() -> None:
    tensors, lengths = operands(), torch.tensor([17, 40])
    program, blocks = parse("keep k < r0[b]"), Blocks(32, 16)

    def find(reads: Tensor) -> visits.Visits:
        return visits.find(program, blocks, tensors, [reads], ())

    first = find(lengths)
    assert find(lengths) is first
    assert find(lengths.clone()) is not first
    lengths += 5
    second = find(lengths)
    assert second is not first
    assert second.counts.tolist() == [[1, 2], [1, 2], [2, 3], [2, 3]]
    with torch.inference_mode():
        unversioned = lengths.clone()
        assert find(unversioned) is not find(unversioned)


def test_small_calls_do_not_look_at_masks_beforehand() -> None:
    assert not is_listed("keep r0[b, q] == r0[b, k]", operands(), (DOCUMENTS,))
    assert not is_listed("keep k <= q", operands(), ())
    assert is_listed("keep q - k < 9", operands(), ())


# With one key the log-sum-exp of a row is its score, so every number a formula gives can be seen.
FORMULAS = [
    "exp(x)", "exp2(x)", "log(abs(x) + 1)", "log2(abs(x) + 0.5)", "tanh(x)", "tanh(x / 20)",
    "sigmoid(x)", "sqrt(abs(x))", "rsqrt(abs(x) + 0.1)", "sin(x)", "cos(x)", "erf(x)", "abs(x)",
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
    agree(f"s = {text}", operands(Skv=1), (x, integers), (3,))


def agree_on_random_programs(language: Any, examples: int) -> None:
    """Twice the reference's own error is allowed, by the reference in float64."""
    tensors = operands(Hq=4, Sq=18, Skv=21)
    reads, sizes = language.reads(2, 4, 18, 21, torch.float32), (21, 3)
    kernel = Forward(Blocks(16, 16))

    @settings(max_examples=examples)
    @given(language.programs(weights=True))
    def check(program: ScoreProgram) -> None:
        assume(kernel.refuse(program, tensors) is None)
        found = kernel.forward(program, tensors, reads, sizes)[0]
        eager = REFERENCE.forward(program, tensors, reads, sizes)[0]
        double = [r.double() if r.is_floating_point() else r for r in reads]
        q, k, v = (t.double() for t in tensors)
        exact = REFERENCE.forward(program, (q, k, v), double, sizes)[0]
        assert torch.equal(found.isnan(), eager.isnan())
        error, own = ((t - exact).nan_to_num().abs().amax().item() for t in (found, eager))
        assert error <= 2 * own + 1e-4 * max(1.0, exact.nan_to_num().abs().amax().item())

    check()


def test_random_programs_agree(language: Any) -> None:
    agree_on_random_programs(language, 30)


@pytest.mark.slow
def test_many_random_programs_agree(language: Any) -> None:
    agree_on_random_programs(language, 300)


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


# --- attention over a cache ---

DECODED = (
    "keep k <= q",
    "s = 0.25 * dot; keep k <= q else s - 3.4028234663852886e+38",
    "s = 0.125 * dot + r0[h] * (k - q); keep k <= q",
    "s = 5.0 * tanh(dot / 5.0); keep k <= q; sink r0[h]",
    "keep k <= q and r1[b, q] == r1[b, k]",
    "keep k <= q and q - k < 4",
    "keep k <= q; p = 0.5 * p",
    "keep k < 4 and q < 6 else -1e9; keep k <= q",
)


def over_pages(
    text: str, lengths: Sequence[tuple[int, int]], heads: tuple[int, int], widths: tuple[int, int],
    splits: int | None, ring: int = 0, latent: bool = False, dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Assert that new tokens over pages get what they get in whole sequences, in float64."""
    g = torch.Generator().manual_seed(len(lengths) + sum(widths))
    (hq, hkv), (d, dv), page = heads, widths, 3
    total, rows = max(h + n for h, n in lengths), len(lengths)
    q = torch.randn(rows, hq, total, d, generator=g).to(dtype)
    k = torch.randn(rows, hkv, total, d, generator=g).to(dtype)
    v = k[..., :dv] if latent else torch.randn(rows, hkv, total, dv, generator=g).to(dtype)
    reads = [torch.randn(hq, generator=g).to(dtype), torch.randint(0, 2, (rows, total), generator=g)]
    columns = -(-(ring or total) // page)
    table = torch.randperm(rows * columns, generator=g).view(rows, columns)
    pages = [torch.full((rows * columns, hkv, page, w), torch.nan, dtype=dtype) for w in widths]
    if latent:
        pages[1] = pages[0][..., :dv]
    for row, (held, _) in enumerate(lengths):
        for p in range(max(0, held - columns * page), held):
            slot = p % (columns * page)
            place = table[row, slot // page], slice(None), slot % page
            pages[0][place] = k[row, :, p]
            pages[1][place] = v[row, :, p]

    def packed(whole: Tensor) -> Tensor:
        return torch.cat([whole[r, :, h : h + n] for r, (h, n) in enumerate(lengths)], 1).unsqueeze(0)

    starts = torch.tensor([0, *[n for _, n in lengths]]).cumsum(0)
    held = torch.tensor([h for h, _ in lengths])
    new_k = packed(k)
    new = (new_k, new_k[..., :dv] if latent else packed(v))
    program = parse(text)
    kernel = Decode(Blocks(16, 16), splits)
    found = kernel.attend(
        program, packed(q), new, (pages[0], pages[1]), reads, (), Rows(table, starts, held, held)
    )  # fmt: skip
    assert found is not None
    exact = [r.double() if r.is_floating_point() else r for r in reads]
    wanted = packed(REFERENCE.forward(program, (q.double(), k.double(), v.double()), exact, ())[0])
    tolerance = {torch.float32: 3e-5, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("text", DECODED)
@pytest.mark.parametrize("splits", [1, 3])
def test_new_tokens_over_pages(text: str, splits: int) -> None:
    ring = 8 if "q - k < 4" in text else 0
    over_pages(text, [(5, 1), (0, 3), (37, 2), (9, 1)], (4, 2), (16, 16), splits, ring)


@pytest.mark.parametrize("heads", [(4, 4), (6, 1), (40, 1)])
@pytest.mark.parametrize("widths", [(16, 16), (24, 10), (10, 24), (80, 80)])
def test_heads_of_a_group_and_widths_over_pages(heads: tuple[int, int], widths: tuple[int, int]) -> None:
    over_pages("s = 0.3 * dot; keep k <= q", [(21, 1), (3, 4), (0, 1)], heads, widths, 2)


@pytest.mark.parametrize("widths", [(24, 16), (20, 13), (16, 16), (72, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_latents_are_keys_and_values_at_once(widths: tuple[int, int], dtype: torch.dtype) -> None:
    for splits in (1, 2):
        over_pages(
            "s = 0.2 * dot; keep k <= q", [(21, 1), (0, 2), (9, 3)], (20, 1), widths, splits, 0, True, dtype
        )  # fmt: skip


def test_a_row_that_brings_nothing_and_one_that_sees_nothing() -> None:
    over_pages("keep k <= q", [(7, 0), (33, 16), (2, 0)], (2, 2), (16, 16), 2)
    over_pages("keep k <= q and k >= 9", [(3, 2), (20, 1)], (2, 2), (16, 16), 2)


def test_fixed_keys_are_seen_by_every_token() -> None:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 5, 16, generator=g)
    k, v = (torch.randn(2, 2, 7, 16, generator=g) for _ in "kv")
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    rows = Rows(torch.tensor([[0], [1]]), torch.tensor([0, 2, 5]), torch.tensor([9, 3]), torch.tensor([7, 7]))
    none = q.new_empty(1, 2, 0, 16)
    program = parse("keep r0[b, k]")
    found = Decode(Blocks(16, 16), 2).attend(program, q, (none, none), (k, v), [mask], (), rows)
    assert found is not None
    for row, place in enumerate((slice(0, 2), slice(2, 5))):
        one = slice(row, row + 1)
        wanted, _ = REFERENCE.forward(program, (q[:, :, place], k[one], v[one]), [mask[one]], ())
        torch.testing.assert_close(found[:, :, place], wanted, rtol=3e-5, atol=3e-5)


def test_long_prompts_and_what_it_cannot_read_are_left_to_others() -> None:
    g = torch.Generator().manual_seed(0)
    rows = Rows(torch.tensor([[0]]), torch.tensor([0, 20]), torch.tensor([0]), torch.tensor([0]))
    q = k = v = torch.randn(1, 2, 20, 16, generator=g)
    pages = torch.empty(1, 2, 20, 16)
    assert Decode().attend(parse("keep k <= q"), q, (k, v), (pages, pages), [], (), rows) is None
    few = Rows(torch.tensor([[0]]), torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([0]))
    odd = torch.zeros(20, dtype=torch.int8)
    one = (q[:, :, :1], (k[:, :, :1], v[:, :, :1]), (pages, pages))
    assert Decode().attend(parse("s = dot + r0[k]"), *one, [odd], (), few) is None
    half = tuple(t.double() for t in (pages, pages))
    assert Decode().attend(parse("keep k <= q"), one[0], one[1], half, [], (), few) is None  # type: ignore[arg-type]


def test_a_decoder_of_latent_attention_by_these_kernels_which_the_report_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = MLAConfig(
        layers=1, width=24, heads=4, latent=16, nope=6, rope=4, value=5, query_rank=8, hidden=16
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = MLADecoder(config).eval(), torch.randint(0, 256, (2, 5))
    decoder = attngraph.compile(model, cache=True, backend="triton", absorb="always")
    plans: list[DecodePlan] = []
    real = decode.launch_decode
    monkeypatch.setattr(decode, "launch_decode", lambda p, *rest: (plans.append(p), real(p, *rest))[1])
    found, whole = decoder.generate(ids, 3), ids
    with torch.no_grad():
        for _ in range(3):
            whole = torch.cat([whole, model(whole)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, whole)
    (entry,) = decoder.report.attention
    assert entry.kernel.name == "triton.decode for few new tokens"
    assert plans[-1].shared and entry.kernel.source == decode.emit_decode(plans[-1]).source


# --- what does not run, and what was measured ---


def break_kernels(monkeypatch: pytest.MonkeyPatch, runs: Callable[[Plan], bool]) -> list[str]:
    """Make kernels of other plans fail; what the log says."""
    said: list[str] = []
    real, back, few = launch.launch_forward, launch_backward.differentiate, decode.launch_decode

    def checked(plan: Any) -> None:
        if not runs(plan):
            raise RuntimeError("out of resources: shared memory")

    monkeypatch.setattr(launch, "launch_forward", lambda plan, *rest: (checked(plan), real(plan, *rest))[1])
    monkeypatch.setattr(
        launch_backward, "differentiate", lambda plan, *rest: (checked(plan), back(plan, *rest))[1]
    )
    monkeypatch.setattr(decode, "launch_decode", lambda plan, *rest: (checked(plan), few(plan, *rest))[1])
    monkeypatch.setattr(attempts, "_failed", set())
    monkeypatch.setattr(attempts, "_said", Remarks())
    monkeypatch.setattr(attempts._log, "warning", lambda text, *rest: said.append(text % rest))
    return said


def test_where_tiles_do_not_fit_smaller_ones_serve_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = break_kernels(monkeypatch, lambda plan: plan.blocks.q < 32)
    agree("keep k <= q", operands())
    assert [line.split(",")[0] for line in said] == ["Blocks(q=32", "Blocks(q=32"]
    assert "RuntimeError: out of resources: shared memory" in said[0]
    agree("keep k <= q", operands())
    compare_gradients("keep k <= q", operands(), [], [])
    assert len(said) == 4, "each failure is said once"
    over_pages("keep k <= q", [(37, 2), (9, 1)], (4, 2), (16, 16), 2)


def test_where_no_tiles_run_pytorch_serves_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said = break_kernels(monkeypatch, lambda plan: False)
    agree("s = 2 * dot; keep k <= q", operands())
    assert "PyTorch's operations instead; for\ns = 2 * dot" in said[-1]
    remarks = attempts.remarks(parse("s = 2 * dot; keep k <= q"))
    assert len(remarks) == len(said) and "PyTorch's operations instead" in remarks[-1]
    count = len(said)
    agree("s = 2 * dot; keep k <= q", operands())
    assert len(said) == count
    compare_gradients("s = 2 * dot; keep k <= q", operands(), [], [])


def test_gradients_that_no_kernel_computes_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_said", Remarks())
    monkeypatch.setattr(SMALL, "_plan_backward", lambda *_: None)
    program, tensors = parse("keep k <= q"), operands()
    results = REFERENCE.forward(program, tensors, [], ())
    for _ in range(2):
        SMALL.backward(program, tensors, [], (), results, results)
    assert attempts.remarks(program) == ("its gradients are computed by PyTorch's operations, in blocks",)


def test_errors_of_the_caller_are_not_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    said = break_kernels(monkeypatch, lambda plan: True)
    reads = [torch.randn(4), torch.arange(40) + 40]
    results = REFERENCE.forward(parse(""), operands(), [], ())
    with pytest.raises(IndexError, match="in range"):
        SMALL.backward(parse("s = dot + r0[r1[r1[q]]]"), operands(), reads, (), results, results)
    assert not said


def test_what_was_measured_is_stored_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, fastest = [], Blocks(32, 64, 8, 2)

    def timer(call: Callable[[], object]) -> float:
        blocks = call.args[0]  # type: ignore[attr-defined]
        tried.append(str(blocks))
        if blocks == fastest:
            call()
            return 0.5
        if blocks.stages == 1:
            raise RuntimeError("no such schedule")
        return 1.0 + len(tried)

    tensors = operands(B=1, Sq=70, Skv=70)
    found = attngraph.codegen.triton.tune("keep k <= q", tensors, gradients=True, timer=timer, name="A GPU/1")
    assert set(found) == {
        "forward, float32, 16 wide, values 16, causal", "backward, float32, 16 wide, values 16, causal"
    }  # fmt: skip
    assert set(found.values()) == {fastest} and len(tried) > 20
    monkeypatch.setattr(launch, "name_of", lambda device: "A GPU/1")
    program = parse("keep k <= q")
    assert launch.plan_forward(program, tensors, (), ()).blocks == fastest
    backward = Forward()._plan_backward(program, tensors, (), ())
    assert backward is not None and backward.blocks == fastest
    short = operands(B=1, Sq=7, Skv=70)
    assert launch.plan_forward(program, short, (), ()).blocks == Blocks(16, 64, 4, 2)
    other = parse("keep k < q")
    assert launch.plan_forward(other, tensors, (), ()).blocks != fastest
    agree("keep k <= q", tensors, kernel=Forward())


def test_both_schedules_are_measured_where_a_call_can_have_both() -> None:
    tried: list[Blocks] = []

    def timer(call: Callable[[], object]) -> float:
        tried.append(call.args[0])  # type: ignore[attr-defined]
        return 1.0 - tried[-1].specialised - tried[-1].k / 1000

    tensors = operands(B=1, Sq=70, Skv=70, dtype=torch.float16)
    found = attngraph.codegen.triton.tune("keep k <= q", tensors, timer=timer, name="Another GPU")
    fastest = found["forward, float16, 16 wide, values 16, causal"]
    assert fastest.specialised and fastest.k == 128 and not all(b.specialised for b in tried)
    assert tuned.find("Another GPU", "forward, float16, 16 wide, values 16, causal", 4096) == fastest
    tried.clear()
    attngraph.codegen.triton.tune("keep k <= q", operands(B=1), timer=timer, name="Another GPU")
    assert tried and not any(b.specialised for b in tried)


def test_tiles_and_splits_over_a_cache_are_measured_stored_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands(B=1, Hq=4, Sq=2, Skv=2)
    pages = tuple(torch.randn(6, 2, 64, 16) for _ in "kv")
    held = torch.tensor([150, 180])
    rows = Rows(torch.arange(6).view(2, 3), torch.tensor([0, 1, 2]), held, held)
    monkeypatch.setattr(decode, "multiprocessors", lambda where: 3)
    tried, fastest, plans = [], (Blocks(16, 16, 8, 2), 8), []

    def timer(call: Callable[[], object]) -> float:
        choice = call.args[0]  # type: ignore[attr-defined]
        tried.append(choice)
        if choice[0].stages == 1:
            raise RuntimeError("out of resources: shared memory")
        if choice == fastest:
            call()
        return 0.5 if choice == fastest else 1.0

    found = attngraph.codegen.triton.tune(
        "keep k <= q", (q, k, v), cache=((pages[0], pages[1]), rows), timer=timer, name="A GPU/2"
    )
    line = "decode of 16 queries, float32, 16 wide, values 16, causal"
    assert found == {line: fastest[0]} and len(set(tried)) == len(tried) > 20
    assert tuned.programs("A GPU/2") == {line: 8}
    real = decode.launch_decode
    monkeypatch.setattr(decode, "name_of", lambda where: "A GPU/2")
    monkeypatch.setattr(decode, "launch_decode", lambda *a: (plans.append((a[0], a[-1])), real(*a))[1])
    program, whole = parse("keep k <= q"), [t[:3].transpose(0, 1).flatten(1, 2) for t in pages]
    out = Decode().attend(program, q, (k, v), (pages[0], pages[1]), [], (), rows)
    assert out is not None and plans[0][0].blocks == fastest[0] and plans[0][1] == 2
    one = [torch.cat([w[:, :150], n[0, :, :1]], 1).unsqueeze(0) for w, n in zip(whole, (k, v), strict=True)]
    wanted = REFERENCE.forward(parse("keep k <= q + n0"), (q[:, :, :1], one[0], one[1]), [], (150,))[0]
    torch.testing.assert_close(out[:, :, :1], wanted, rtol=3e-5, atol=3e-5)


# --- gradients ---

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
@pytest.mark.parametrize("sizes", [(2, 2, 2, 40, 40, 16, 16), (1, 4, 2, 33, 50, 24, 10)], ids=str)
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
    again = SMALL.backward(program, tensors, reads, [2], results, grads)
    for mine, twice in zip(found[:3], again[:3], strict=True):
        torch.testing.assert_close(mine, twice, rtol=0, atol=0, equal_nan=True)


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


def compare_gradients(
    text: str, tensors: tuple[Tensor, Tensor, Tensor], reads: list[Tensor], sizes: Sequence[int],
    kernel: Forward = SMALL, tolerance: float = 2e-4,
) -> list[Tensor | None]:  # fmt: skip
    """Assert that a kernel's own gradients are those of the reference in float64, NaN for NaN."""
    program = parse(text)
    results = REFERENCE.forward(program, tensors, reads, sizes)
    grads = torch.randn_like(results[0]), 0.3 * torch.randn_like(results[1])
    assert kernel._plan_backward(program, tensors, reads, sizes) is not None, "it has kernels of its own"
    found = kernel.backward(program, tensors, reads, sizes, results, grads)
    q, k, v, g, g_lse, *others = (
        t.double() if t.is_floating_point() else t for t in (*tensors, *grads, *reads)
    )
    exact = REFERENCE.forward(program, (q, k, v), others, sizes)
    wanted = REFERENCE.backward(program, (q, k, v), others, sizes, exact, (g, g_lse))
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            scale = max(1.0, theirs.nan_to_num().abs().amax().item())
            close = {"rtol": tolerance, "atol": tolerance * scale, "equal_nan": True}
            torch.testing.assert_close(mine.double(), theirs, **close)
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
    agree_on_random_gradients(language, 15)


@pytest.mark.slow
def test_gradients_of_many_random_programs_agree(language: Any) -> None:
    agree_on_random_gradients(language, 100)


@pytest.mark.parametrize("family", [0, 1, 7, 8, 18])
def test_gradients_of_pairs_are_summed_some_rows_at_a_time(
    family: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, shapes = FAMILIES[family]
    sizes, kernel = (3, 2, 1, 34, 19, 16, 16), Forward(Blocks(16, 32))
    for at_once in (1, 2 * 2 * 19 * 16, 2 * 19 * 32):
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


@pytest.mark.parametrize("kernel", ["reference", "cpu.tiled"])
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
