"""Rows in two tiles of different widths, in Triton's interpreter, against the reference."""

from collections.abc import Callable, Sequence

import pytest
import torch
from conformance.compare import assert_results
from conformance.programs import CASES, CORE, Call, Shape
from frames import LISTED, agree, compare_gradients, operands
from torch import Tensor

from attngraph.codegen.triton import launch
from attngraph.codegen.triton.launch import Forward
from attngraph.codegen.triton.plan import Blocks, in_two
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.kernels import Operands

KERNEL = Forward(Blocks(32, 16, split=True))
NAMES = sorted(CORE)


def test_two_tiles_are_powers_of_two_and_narrower_than_one() -> None:
    assert [in_two(n) for n in (80, 96, 72, 192, 160, 40, 576)] == [
        (64, 16), (64, 32), (64, 16), (128, 64), (128, 32), (32, 16), (512, 64)
    ]  # fmt: skip
    assert [in_two(n) for n in (8, 16, 20, 64, 112, 128, 200, 256)] == [
        (16, 0), (16, 0), (32, 0), (64, 0), (128, 0), (128, 0), (256, 0), (256, 0)
    ]  # fmt: skip


def call_of(name: str) -> Call:
    return CASES[name].of(Shape(2, 2, 1, 70, 48, 40, 50, 71), torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_programs_agree_with_the_reference(name: str) -> None:
    assert_results(KERNEL, call_of(name), has_lse_of_nothing=False)


@pytest.mark.parametrize(
    ("D", "Dv"), [(48, 48), (40, 40), (80, 80), (48, 16), (16, 48), (40, 48), (72, 20), (20, 72), (33, 33)]
)
def test_widths_agree_with_the_reference(D: int, Dv: int) -> None:
    tensors, kernel = operands(B=1, Hq=4, Hkv=2, Sq=50, Skv=71, D=D, Dv=Dv), KERNEL
    source = launch.emit(launch.plan_forward(parse(""), tensors, (), (), kernel._blocks)).source
    assert ("key_rest" in source) == (in_two(D)[1] > 0) and ("value_rest" in source) == (in_two(Dv)[1] > 0)
    for text in ("s = 0.3 * dot; keep k <= q", "s = tanh(0.3 * dot); keep k < q + 4; sink 0.5"):
        agree(text, tensors, kernel=kernel)


def test_rows_may_lie_in_any_layout(lay_out: Callable[[Operands], Operands]) -> None:
    agree("s = 0.3 * dot; keep k <= q", lay_out(operands(D=40, Dv=48)), kernel=KERNEL)


@pytest.mark.usefixtures("all_listed")
@pytest.mark.parametrize(("text", "reads"), LISTED, ids=[case[0] for case in LISTED])
def test_what_is_visited_by_lists_agrees(text: str, reads: Sequence[Tensor]) -> None:
    agree(text, operands(B=2, Hkv=1, Sq=50, Skv=71, D=40, Dv=48), reads, kernel=KERNEL)


def test_half_precision_agrees() -> None:
    tensors = operands(D=80, Dv=80, dtype=torch.float16)
    agree("s = 0.1 * dot; keep k <= q", tensors, kernel=KERNEL)


def test_what_no_query_sees_may_be_anything() -> None:
    q, k, v = operands(B=1, Sq=32, Skv=71, D=48, Dv=48)
    wanted = KERNEL.forward(parse("keep k <= q"), (q, k, v), (), ())
    k, v = k.clone(), v.clone()
    k[:, :, 32:], v[:, :, 32:] = torch.nan, torch.nan
    found = KERNEL.forward(parse("keep k <= q"), (q, k, v), (), ())
    torch.testing.assert_close(found, wanted)


def test_gradients_follow_such_a_forward_pass() -> None:
    """The backward kernels have rows in one tile."""
    compare_gradients("s = 0.25 * dot; keep k <= q", operands(Hq=4, D=40, Dv=48), [], (), KERNEL)
