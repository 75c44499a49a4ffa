"""Masks with finite fills: tiles behind the fill are visited last, and only where they can have weight."""

from collections.abc import Sequence

import pytest
import torch
from frames import SMALL, agree, compare_gradients, operands
from torch import Tensor

from attngraph.codegen.triton import launch
from attngraph.codegen.triton.launch import Forward
from attngraph.codegen.triton.plan import Blocks, Plan
from attngraph.ir.language.parser import parse

KEPT = torch.arange(160).view(2, 80) % 80 > 20
"""Padding on the left: the first rows see no key under a causal mask."""
HEIGHTS = torch.zeros(80).index_fill(0, torch.tensor([3, 40, 41]), -997.0)
"""Scores of some queries lie near a fill of -1000."""
FAR = [
    ("keep k <= q else -3.4028234663852886e+38", ()),
    ("s = 0.3 * dot; keep k <= q + 3 else -1e9", ()),
    ("s = 0.3 * dot; keep k <= q - 20 else -1e9", ()),
    ("keep k <= q and r0[b, k] else -3.4028234663852886e+38", (KEPT,)),
    ("keep k <= q else -1e9; keep r0[b, k] else -3.4028234663852886e+38", (KEPT,)),
    ("keep q - k < 9 and k <= q else -1e9; sink 0.5", ()),
    ("keep k <= q else -1e9; keep r0[b, k]; p = p * 2", (KEPT,)),
    ("keep r0[b, k]; keep k <= q else -1e9", (KEPT,)),
]
NEAR = [
    ("s = dot - 998; keep k <= q else -1000.0", ()),
    ("s = dot + r0[q]; keep k <= q else -1000.0", (HEIGHTS,)),
    ("s = dot + r0[q]; keep k <= q and k > q - 9 else -1000.0", (HEIGHTS,)),
    ("s = dot + r0[q]; keep k <= q else -1e9; keep k > q - 5 else -1000.0", (HEIGHTS,)),
]
ALIKE = (FAR[1], FAR[3], NEAR[2])
"""Whose gradients take the way of another one: of FAR[2], FAR[4] and NEAR[1]. Slow tests."""
VISITED = [
    ("keep k <= q else -5.0", ()),  # not far from usual scores
    ("keep k <= q else s - 1e9", ()),  # depends on the score
    ("keep k <= q else -1e9; s = 1e-9 * s", ()),  # revealed
    ("keep k <= q else r0[q]", (HEIGHTS,)),
]


def planned(text: str, tensors: tuple[Tensor, Tensor, Tensor], reads: Sequence[Tensor]) -> Plan:
    return launch.plan_forward(parse(text), tensors, reads, (), Blocks(32, 16))


@pytest.mark.parametrize("lengths", [(50, 71), (71, 50)], ids=str)
@pytest.mark.parametrize(("text", "reads"), FAR + NEAR + VISITED, ids=lambda value: str(value)[:60])
def test_rows_near_a_fill_and_others_agree(
    text: str, reads: Sequence[Tensor], lengths: tuple[int, int], all_listed: None
) -> None:
    # Scores near a fill of -1000 round a dot to 2^-14: dots of few binary digits are exact there.
    q, k, v = operands(Hq=4, Sq=lengths[0], Skv=lengths[1])
    tensors = (q * 16).round() / 16, (k * 16).round() / 16, v
    assert (planned(text, tensors, reads).fill is None) == ((text, reads) in VISITED)
    agree(text, tensors, reads)


@pytest.mark.parametrize(
    ("text", "reads"),
    [pytest.param(*case, marks=pytest.mark.slow if case in ALIKE else []) for case in FAR + NEAR],
    ids=lambda value: str(value)[:60],
)
def test_gradients_of_rows_near_a_fill_and_others_agree(
    text: str, reads: Sequence[Tensor], all_listed: None
) -> None:
    compare_gradients(
        text, operands(Hq=4, Sq=50, Skv=71), list(reads), [], Forward(Blocks(32, 16)), tolerance=1e-3
    )


@pytest.mark.parametrize("text", ["keep k <= q else -1e9", "keep k <= q and k > q - 20 else -1e9"])
def test_tiles_behind_a_fill_are_not_read(text: str) -> None:
    program, (q, k, v) = parse(text), operands(Sq=64, Skv=64)
    k[:, :, 32:], v[:, :, 32:] = torch.nan, torch.inf
    out, lse = SMALL.forward(program, (q, k, v), (), ())
    assert bool(out[:, :, :32].isfinite().all())
    grad = torch.zeros_like(out)
    grad[:, :, :32] = torch.randn_like(grad[:, :, :32])
    out[:, :, 32:], lse[:, :, 32:], q[:, :, 32:] = 0, 0, 0
    found = SMALL.backward(program, (q, k, v), (), (), (out, lse), (grad, torch.zeros_like(lse)))
    assert found[0] is not None and bool(found[0][:, :, :32].isfinite().all())


def test_a_row_all_behind_the_fill_gives_every_key_the_same_weight() -> None:
    out, _ = agree("keep k < 0 else -1e9", operands(Sq=40, Skv=64), needed=True)
    assert bool(out.isfinite().all())
