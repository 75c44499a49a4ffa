"""The warp-specialised schedule in Triton's interpreter, against the reference.

The interpreter knows tensor descriptors; that loops are divided among warps means nothing to
it.
"""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from conformance.compare import assert_results
from conformance.programs import CASES, CORE, IN_OTHER_DTYPES, Call, Shape
from frames import DOCUMENTS, LISTED, agree, bias, operands
from torch import Tensor

from attngraph.codegen.triton import attempts, isolated, launch, schedule
from attngraph.codegen.triton.launch import Forward
from attngraph.codegen.triton.plan import Blocks
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.kernels import Operands

BLOCKS = Blocks(64, 16, 4, 2, specialised=True)
KERNEL = Forward(BLOCKS)


def halves(**shape: int) -> tuple[Tensor, Tensor, Tensor]:
    return operands(**shape, dtype=torch.float16)  # type: ignore[arg-type]


def is_specialised(
    text: str, tensors: Operands, reads: Sequence[Tensor] = (), sizes: Sequence[int] = ()
) -> bool:
    return launch.plan_forward(parse(text), tensors, reads, sizes, BLOCKS).blocks.specialised


def call_of(name: str) -> Call:
    return CASES[name].of(Shape(2, 2, 1, 70, 16, 16, 70, 37), torch.float16)


NAMES = sorted(n for n in {*CORE, *IN_OTHER_DTYPES["forward"]} if not {"D", "Dv"} & CASES[n].shape.keys())
CALLS = {name: call_of(name) for name in NAMES}
OURS = [n for n, c in CALLS.items() if is_specialised(c.text, c.operands, c.reads, c.sizes)]


@pytest.mark.parametrize("name", OURS)
def test_programs_agree_with_the_reference(name: str) -> None:
    assert_results(KERNEL, call_of(name), has_lse_of_nothing=False)


def test_most_programs_can_be_specialised_and_the_others_say_why() -> None:
    assert len(OURS) >= 20
    for name in sorted(set(NAMES) - set(OURS)):
        call = CALLS[name]
        plan = launch.plan_forward(parse(call.text), call.operands, call.reads, call.sizes, BLOCKS)
        (remark,) = attempts.remarks(parse(call.text))
        assert "r0[" in call.text and "is read" in remark
        assert schedule.obstacle(plan) in remark
        assert f"# Not warp-specialised: {schedule.obstacle(plan)}." in launch.emit(plan).source


@pytest.mark.parametrize(
    "shape",
    [
        {"Hq": 4}, {"Hq": 4, "Hkv": 1}, {"Sq": 1}, {"Skv": 1}, {"Sq": 1, "Skv": 1, "B": 1, "Hq": 1, "Hkv": 1},
        {"Sq": 7, "Skv": 53}, {"Sq": 53, "Skv": 7}, {"Sq": 64, "Skv": 64}, {"Sq": 133, "Skv": 17},
        {"D": 24}, {"D": 24, "Dv": 8}, {"D": 8, "Dv": 40}, {"D": 64, "Dv": 32},
    ],
    ids=str,
)  # fmt: skip
def test_shapes_agree_with_the_reference(shape: dict[str, int]) -> None:
    text, tensors = "s = 0.3 * dot; keep k <= q + 20", halves(**{"B": 1, **shape})
    assert is_specialised(text, tensors)
    agree(text, tensors, kernel=KERNEL)


@pytest.mark.usefixtures("all_listed")
@pytest.mark.parametrize("lengths", [(80, 80), (50, 71)])
def test_what_is_visited_by_lists_agrees(lengths: tuple[int, int]) -> None:
    count = 0
    for text, reads in LISTED:
        tensors = halves(B=2, Hkv=1, Sq=lengths[0], Skv=lengths[1])
        plan = launch.plan_forward(parse(text), tensors, reads, (), BLOCKS)
        if plan.blocks.specialised:
            assert (
                plan.listed and "for i in tl.range(0, stop, warp_specialize=True)" in launch.emit(plan).source
            )
            agree(text, tensors, reads, kernel=KERNEL)
            count += 1
    assert count >= 4


def test_a_row_that_keeps_no_key_is_nan_and_others_are_not() -> None:
    out, lse = agree("keep k < q and k > q - 4", halves(), kernel=KERNEL)
    assert out[:, :, 0].isnan().all()
    assert not out[:, :, 1:].isnan().any()
    assert (lse[:, :, 0] == -torch.inf).all()


def test_the_other_half_of_a_joined_projection_is_fetched_from_where_it_lies() -> None:
    """Heads of a token side by side, queries, keys and values in one tensor."""
    whole = torch.randn(2, 40, 3, 2, 16).half()
    q, k, v = (whole[:, :, i].transpose(1, 2) for i in range(3))
    assert is_specialised("keep k <= q", (q, k, v))
    agree("keep k <= q", (q, k, v), kernel=KERNEL)
    shared = k[:, :1].expand(2, 2, 40, 16)
    assert is_specialised("keep k <= q", (q, shared, v))
    agree("keep k <= q", (q, shared, v), kernel=KERNEL)


def shifted(tensor: Tensor) -> Tensor:
    """The same numbers, a little further on in memory."""
    room = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return room[1:].view(tensor.shape).copy_(tensor)


def test_what_descriptors_cannot_fetch_is_left_to_the_classic_schedule() -> None:
    q, k, v = halves()
    columns = torch.cat([v, v], -1)[..., ::2]
    twenty = torch.randn(2, 2, 40, 20).half()
    one = k[:, :, :1].expand(2, 2, 40, 16)
    for text, tensors, reason in (
        ("keep k <= q", (shifted(q), k, v), "the rows of query do not begin at multiples of 16 bytes"),
        ("keep k < q", (q, k, columns), "the rows of value have strides"),
        ("keep k <= q + 1", (twenty, twenty, v), "the rows of query do not begin at multiples"),
        ("keep k < q + 3", (q, one, v), "the rows of key have strides"),
    ):
        agree(text, tensors, kernel=KERNEL)
        (remark,) = attempts.remarks(parse(text))
        assert reason in remark and remark.startswith("the classic schedule instead")


def test_single_precision_and_wide_heads_are_left_to_the_classic_schedule() -> None:
    agree("keep k <= q", operands(), kernel=KERNEL)
    assert "float32 operands" in attempts.remarks(parse("keep k <= q"))[0]
    agree("keep k < q", halves(D=264), kernel=KERNEL)
    assert "wider than 256" in attempts.remarks(parse("keep k < q"))[0]


def test_gradients_follow_a_specialised_forward_pass() -> None:
    q, k, v = (t.requires_grad_() for t in halves(Hkv=1))
    text, table = "s = 0.25 * dot + r0[h]; keep k <= q", bias(2).requires_grad_()
    program = parse(text)
    results = KERNEL.forward(program, (q, k, v), [table], ())
    grads = torch.ones_like(results[0]), torch.zeros_like(results[1])
    found = KERNEL.backward(program, (q, k, v), [table], (), results, grads)
    wanted = Forward().backward(program, (q, k, v), [table], (), results, grads)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_where_it_does_not_run_the_classic_schedule_does(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(attempts, "_failed", set())
    monkeypatch.setattr(attempts._log, "warning", lambda text, *rest: said.append(text % rest))
    asked = []

    def require_specialised(kernel: object, arguments: Sequence[object], options: dict[str, int]) -> None:
        asked.append((len(arguments), options["num_warps"]))
        raise isolated.CompilationError("its compilation was ended by signal 11: stack dump")

    monkeypatch.setattr(isolated, "require_specialised", require_specialised)
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    for _ in range(2):
        agree("keep k <= q + 2", halves(), kernel=KERNEL)
    assert asked == [(20, 4)]
    (remark,) = attempts.remarks(parse("keep k <= q + 2"))
    assert "the classic schedule is tried" in remark and "signal 11" in remark and len(said) == 1


def test_a_table_may_say_warp_specialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.tuned, "find", lambda *_: BLOCKS)
    plan = launch.plan_forward(parse("keep k <= q"), halves(), (), ())
    assert plan.blocks == BLOCKS
    reads = [DOCUMENTS[:, :40]]
    documents = launch.plan_forward(parse("keep r0[b, q] == r0[b, k]"), halves(), reads, ())
    assert documents.blocks == launch.classic_blocks(parse("keep r0[b, q] == r0[b, k]"), halves())
    short = dataclasses.replace(BLOCKS, q=16)
    monkeypatch.setattr(launch.tuned, "find", lambda *_: short)
    assert not launch.plan_forward(parse("keep k <= q"), halves(Sq=9), (), ()).blocks.specialised
