"""The schedule with products a tile ahead, in Triton's interpreter, against the reference.

The interpreter does one thing after another; what it shows is that each tile meets its own products.
"""

from collections.abc import Sequence

import pytest
import torch
from conformance.compare import assert_results
from conformance.programs import CASES, CORE, IN_OTHER_DTYPES, Call, Shape
from frames import LISTED, REFERENCE, agree, compare_gradients, operands
from torch import Tensor

from attngraph.codegen.triton import launch
from attngraph.codegen.triton.launch import Forward
from attngraph.codegen.triton.plan import Blocks
from attngraph.ir.language.parser import parse

BLOCKS = Blocks(32, 16, ahead=True)
KERNEL = Forward(BLOCKS)
NAMES = sorted({*CORE, *IN_OTHER_DTYPES["forward"]})


def call_of(name: str) -> Call:
    return CASES[name].of(Shape(2, 2, 1, 70, 16, 16, 50, 71), torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_programs_agree_with_the_reference(name: str) -> None:
    assert_results(KERNEL, call_of(name), has_lse_of_nothing=False)


@pytest.mark.parametrize(
    "shape",
    [
        {"Hq": 4, "Hkv": 1}, {"Sq": 1}, {"Skv": 1}, {"Sq": 7, "Skv": 53}, {"Sq": 53, "Skv": 7},
        {"Sq": 64, "Skv": 64}, {"Skv": 16}, {"Skv": 17}, {"D": 20, "Dv": 5}, {"D": 64, "Dv": 32},
    ],
    ids=str,
)  # fmt: skip
def test_shapes_agree_with_the_reference(shape: dict[str, int]) -> None:
    for text in ("s = 0.3 * dot; keep k <= q", "s = 0.3 * dot; keep k <= q - 9", "keep k < q + 4"):
        tensors = operands(**{"B": 1, **shape})
        assert launch.plan_forward(parse(text), tensors, (), (), BLOCKS).blocks.ahead
        agree(text, tensors, kernel=KERNEL)


@pytest.mark.usefixtures("all_listed")
@pytest.mark.parametrize(("text", "reads"), LISTED, ids=[case[0] for case in LISTED])
def test_what_is_visited_by_lists_agrees(text: str, reads: Sequence[Tensor]) -> None:
    tensors = operands(B=2, Hkv=1, Sq=50, Skv=71)
    plan = launch.plan_forward(parse(text), tensors, reads, (), BLOCKS)
    assert plan.listed and "tl.minimum(i + 2, last)" in launch.emit(plan).source
    agree(text, tensors, reads, kernel=KERNEL)


@pytest.mark.parametrize("fill", ["-1e9", "-5.0", "-3.4028234663852886e+38"])
@pytest.mark.parametrize(
    "text", ["keep k <= q else {}", "keep k <= q and k > q - 20 else {}", "keep k < 0 else {}"]
)
def test_tiles_behind_a_fill_come_with_their_own_products(text: str, fill: str, all_listed: None) -> None:
    agree(text.format(fill), operands(Sq=50, Skv=71), kernel=KERNEL)


def test_what_no_query_sees_may_be_anything() -> None:
    """The keys after the last tile that a block visits are multiplied, and their products not used."""
    q, k, v = operands(B=1, Sq=32, Skv=71)
    wanted = REFERENCE.forward(parse("keep k <= q"), (q, k, v), (), ())
    k, v = k.clone(), v.clone()
    k[:, :, 32:], v[:, :, 32:] = torch.nan, torch.nan
    found = KERNEL.forward(parse("keep k <= q"), (q, k, v), (), ())
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)


def test_gradients_follow_such_a_forward_pass() -> None:
    compare_gradients("s = 0.25 * dot; keep k <= q", operands(Hq=4), [], (), KERNEL)
