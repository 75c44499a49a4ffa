"""The backward kernels, beyond what `conformance` holds every kernel to."""

from typing import Any

import pytest
import torch
from conformance.programs import CASES, Shape
from conformance.programs import drawn as draw_read
from frames import REFERENCE, SMALL, compare_gradients, operands, quarters
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attngraph.codegen.scalar import read_gradients
from attngraph.codegen.triton import launch
from attngraph.codegen.triton.launch import Forward
from attngraph.codegen.triton.plan import Blocks
from attngraph.ir.language.parser import parse
from attngraph.ir.ops import attention as ops


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


def test_no_tensor_is_copied_in_single_precision() -> None:
    """The sums of gradients times results are taken in the kernel."""
    made: list[Tensor] = []

    class Records(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            made.extend(t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor))
            return result

    tensors, program = operands(1, 2, 2, 40, 40, 16, 16, torch.float16), parse("keep k <= q")
    results = SMALL.forward(program, tensors, (), ())
    with Records():
        SMALL.backward(program, tensors, (), (), results, (torch.ones_like(results[0]), results[1] * 0))
    assert not any(t.dtype is torch.float32 and t.shape == results[0].shape for t in made)


def test_a_tangent_goes_through_the_op_that_names_this_kernel() -> None:
    q, k, v = operands(1, 4, 2, 9, 9)
    found = {
        name: torch.func.jvp(
            lambda q, name=name: ops.attention(q, k, v, "s = 0.25 * dot; keep k <= q", kernel=name),
            (q,),
            (v.repeat(1, 2, 1, 1),),
        )
        for name in ("triton.forward", "reference")
    }
    torch.testing.assert_close(found["triton.forward"], found["reference"])
    assert float(found["triton.forward"][1].abs().amax()) > 0.01
    both = torch.func.vmap(lambda q: ops.attention(q, k, v, "keep k <= q", kernel="triton.forward"))(
        torch.stack([q, -q])
    )
    torch.testing.assert_close(both[1], ops.attention(-q, k, v, "keep k <= q", kernel="reference"))


def drawn(reads: str, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    b, hq, hkv, sq, skv, d, dv = sizes
    shape = Shape(b, hq, hkv, skv, d, dv, sq, skv)
    return [draw_read(read, shape, dtype) for read in reads.split()]


@pytest.mark.parametrize(
    ("name", "at_once"),
    [
        ("bias", 1), ("bias", 2 * 2 * 19 * 16), ("bias of all batches", 2 * 19 * 32), ("by distance", 1),
        ("by distance", 2 * 19 * 32), ("by a distance's bucket", 1), ("gates of pairs", 2 * 19 * 16),
    ],
)  # fmt: skip
def test_gradients_of_pairs_are_summed_some_rows_at_a_time(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = CASES[name].of(Shape(3, 2, 1, 19, 16, 16, 34, 19), torch.float32)
    monkeypatch.setattr(read_gradients, "PAIRS_AT_ONCE", at_once)
    compare_gradients(call.text, call.operands, call.reads, call.sizes, Forward(Blocks(16, 32)))


def test_the_same_call_gives_the_same_gradients() -> None:
    sizes = (2, 2, 1, 33, 40, 16, 16)
    text, tensors = "s = dot + r0[h, k - q + n0] + r1[b, k] * r2[h]; keep k <= q", operands(*sizes)
    program, reads = parse(text), drawn("h,d b,k h", sizes)
    results = SMALL.forward(program, tensors, reads, [32])
    grads = torch.randn_like(results[0]), torch.randn_like(results[1])
    first, second = (SMALL.backward(program, tensors, reads, [32], results, grads) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_reads_of_other_dtypes_have_gradients_of_theirs(dtype: torch.dtype) -> None:
    sizes = (1, 2, 2, 20, 24, 16, 16)
    reads = drawn("h,d b,k h", sizes, dtype)
    text = "s = 0.3 * dot + r0[h, k - q + n0] + r1[b, k]; sink r2[h]"
    found = compare_gradients(text, operands(*sizes), reads, [19], tolerance=2e-3, needed=True)
    assert [g.dtype for g in found[3:] if g is not None] == [dtype] * 3


def test_gradients_that_nobody_wants_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    load = launch.load_backward

    def loaded(plan: Any) -> Any:
        launched.extend(name for name in vars(load(plan)) if name.startswith("gradient"))
        return load(plan)

    monkeypatch.setattr(launch, "load_backward", loaded)
    sizes = (1, 2, 2, 20, 24, 16, 16)
    for wanted in (False, True):
        launched.clear()
        q, k, v = (t.requires_grad_() for t in operands(*sizes))
        bias, slopes = drawn("q,k h", sizes)
        bias.requires_grad_(wanted)
        slopes.requires_grad_()
        text = "s = dot + r0[q, k] * r1[h]"
        ops.attention(q, k, v, text, bias, slopes, kernel="triton.forward").sum().backward()
        assert (bias.grad is not None) == wanted and slopes.grad is not None
        assert any(name.startswith("gradient_of_read") for name in launched) == wanted


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
    ("keep k <= q - 9 else -1e9", "h"),
    ("keep k <= q - 9 else -3.4028234663852886e+38", "h"),
    ("keep k <= q - 9 else s - 1000000.0", "h"),
    ("keep k <= q - 9 else -1e9; keep k < 30; p = 0.5 * p", "h"),
    ("keep q - k < 9; keep k <= q - 9 else -1e9", "h"),
    ("s = 0.25 * dot + 10000.0 + r0[h, q, k]; keep k <= q", "h,q,k"),
    ("s = 1000000.0 - 0.25 * dot * r0[b, k]", "b,k"),
    ("s = dot * r0[h] - 1000000.0; keep k <= q + 3", "h"),
    ("s = 0.25 * dot + r1[b, q] - 10000.0; sink r0[h] - 10000.0", "h b,q"),
    ("s = 0.25 * dot + 1000000.0; keep k <= q; sink r0[h] + 1000000.0", "h"),
    ("keep k < q; sink r0[h] - 10000.0", "h"),
    ("keep k <= q - 9 else -1e9; keep k < q; p = where(isnan(p), 0.0, p)", "h"),
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
