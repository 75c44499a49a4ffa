"""Kernels whose products are a tile ahead of weights, in Triton's interpreter, against the reference."""

from collections.abc import Callable, Sequence

import pytest
import torch
from conformance.compare import assert_results
from conformance.programs import CASES, CORE, Call, Shape
from frames import LISTED, agree, operands
from torch import Tensor

from attngraph.codegen.triton import launch
from attngraph.codegen.triton.launch import Forward
from attngraph.codegen.triton.plan import Blocks
from attngraph.codegen.triton.store import is_describable
from attngraph.ir.ops.kernels import Operands

KERNEL = Forward(Blocks(32, 16, ahead=True))
NAMES = sorted(CORE)


def call_of(name: str) -> Call:
    return CASES[name].of(Shape(2, 2, 1, 70, 48, 40, 50, 71), torch.float32)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors that kernels are given descriptors of."""
    found: list[Tensor] = []
    original = launch.described

    def spy(tensor: Tensor, rows: int) -> object:
        found.append(tensor)
        return original(tensor, rows)

    monkeypatch.setattr(launch, "described", spy)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_programs_agree_with_the_reference(name: str, described: list[Tensor]) -> None:
    call = call_of(name)
    assert_results(KERNEL, call, has_lse_of_nothing=False)
    assert bool(described) == all(map(is_describable, call.operands[1:]))


@pytest.mark.parametrize("lengths", [(1, 1), (1, 16), (16, 17), (32, 15), (33, 32), (50, 71), (3, 200)])
def test_lengths_agree_with_the_reference(lengths: tuple[int, int], described: list[Tensor]) -> None:
    """Also where a row sees no key, or one tile alone."""
    tensors = operands(B=1, Hq=4, Hkv=2, Sq=lengths[0], Skv=lengths[1], D=48, Dv=32)
    for text in (
        "s = 0.3 * dot",
        "s = 0.3 * dot; keep k <= q",
        "s = 0.3 * dot; keep k <= q - 20",
        "s = tanh(0.3 * dot); keep k < q + 4; sink 0.5",
        "s = 0.3 * dot; keep k <= q else -3e38",
    ):
        agree(text, tensors, kernel=KERNEL)  # fmt: skip
    assert described


def test_rows_may_lie_in_any_layout(lay_out: Callable[[Operands], Operands]) -> None:
    agree("s = 0.3 * dot; keep k <= q", lay_out(operands(D=40, Dv=48)), kernel=KERNEL)


def test_tensors_that_cannot_be_described_are_read_by_addresses(described: list[Tensor]) -> None:
    q, k, v = operands(Skv=71, D=40, Dv=48)
    gaps = torch.zeros(*k.shape, 2)
    gaps[..., 0] = k
    odd = torch.zeros(*k.shape[:3], 41)
    odd[..., 1:] = k
    for keys in (gaps[..., 0], odd[..., 1:]):
        assert not is_describable(keys)
        agree("s = 0.3 * dot; keep k <= q", (q, keys, v), kernel=KERNEL)
    assert described == []
    assert is_describable(k.transpose(1, 2).contiguous().transpose(1, 2))
    assert is_describable(k[:1].expand_as(k))


@pytest.mark.usefixtures("all_listed")
@pytest.mark.parametrize(("text", "reads"), LISTED, ids=[case[0] for case in LISTED])
def test_what_is_visited_by_lists_agrees(text: str, reads: Sequence[Tensor], described: list[Tensor]) -> None:
    agree(text, operands(B=2, Hkv=1, Sq=50, Skv=71, D=40, Dv=48), reads, kernel=KERNEL)
    assert described


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_a_query_that_is_no_number_spoils_its_own_row_alone(value: float) -> None:
    """Also where its scores are numbers again."""
    q, k, v = operands(Sq=50, Skv=71, D=32, Dv=32)
    k = k.abs() + 0.1
    q[0, 0, 3] = value
    for text in ("s = 0.3 * dot; keep k <= q", "s = 5 * tanh(0.3 * dot); keep k <= q"):
        agree(text, (q, k, v), kernel=KERNEL)
