"""Kernels with groups of warps, in Gluon, without a GPU: their source, when they serve, and what they use if
compiled ahead of time."""

import ast
import dataclasses
import re
from collections.abc import Callable

import pytest
import torch

import attngraph.codegen  # noqa: F401  (registers the kernels)
from attngraph.codegen.triton import attempts, blocks, device, launch, store, tuned, tuning
from attngraph.codegen.triton.emit import emit, emit_backward_by_groups
from attngraph.codegen.triton.plan import BackwardPlan, Blocks, Plan, Read
from attngraph.errors import BackendError
from attngraph.ir.language.parser import parse
from attngraph.ir.ops import kernels
from workshop.bench.scorecard import ahead_of_time, nvidia
from workshop.bench.scorecard.ahead_of_time import TARGETS
from workshop.bench.scorecard.cells import CELLS, with_groups

HOPPER, BEFORE = (9, 0), (8, 0)
SM_90 = TARGETS["sm_90"]
SERVED = {name: made for name, cell in CELLS.items() if (made := with_groups(cell, SM_90)) is not None}
OFTEN = {"causal 128", "full 64", "documents 128", "backward, causal 128"}
pytestmark = pytest.mark.skipif(device.no_triton() is not None, reason="needs triton")
needs_compiler = pytest.mark.usefixtures("triton_compiler", "cache")


def operands(D: int = 128, Dv: int = 128, dtype: torch.dtype = torch.bfloat16) -> launch.Operands:
    q, k = (torch.empty(1, 4, 2048, D, dtype=dtype, device="meta") for _ in "qk")
    return q, k, torch.empty(1, 4, 2048, Dv, dtype=dtype, device="meta")


def source_of(plan: Plan) -> str:
    return (emit_backward_by_groups(plan) if isinstance(plan, BackwardPlan) else emit(plan)).source


# --- the source -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "file"), [("causal 128", "groups"), ("backward, causal 128", "groups_backward")]
)
def test_causal_kernels_read_as_golden_files_say(
    cell: str, file: str, golden: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "triton_version", lambda: (3, 8))
    made = with_groups(CELLS[cell], SM_90)
    assert made is not None
    golden(f"{file}.py.txt", source_of(made))


@pytest.mark.parametrize("name", SERVED)
def test_every_name_in_a_kernel_is_one_that_it_has(name: str) -> None:
    tree = ast.parse(source_of(SERVED[name]))
    there = {alias.asname or alias.name for n in tree.body if isinstance(n, ast.Import) for alias in n.names}
    there |= {n.name for n in tree.body if isinstance(n, ast.FunctionDef)} | {"range", "float"}
    there |= {n.targets[0].id for n in tree.body if isinstance(n, ast.Assign)}  # type: ignore[attr-defined]
    for function in (f for f in tree.body if isinstance(f, ast.FunctionDef)):
        used = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
        own = {n.id for n in used if isinstance(n.ctx, ast.Store)} | {a.arg for a in function.args.args}
        assert {n.id for n in used} <= own | there


@pytest.mark.parametrize(
    ("version", "copy", "barrier"),
    [
        ((3, 6), "async_copy_global_to_shared", "thread_barrier"),
        ((3, 8), "async_copy_global_to_shared", "barrier"),
        ((3, 9), "async_load", "barrier"),
    ],
)
def test_names_are_those_of_the_installed_version(
    version: tuple[int, int], copy: str, barrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "triton_version", lambda: version)
    source = emit(SERVED["finite fill 128"]).source
    assert set(re.findall(r"tma\.(\w+)\(", source)) == {copy}
    assert set(re.findall(r"gl\.(\w*barrier)\(", source)) == {barrier}


# --- when they serve --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "capability", "version", "reason"),
    [
        (operands(), HOPPER, (3, 8), None),
        (operands(64, 256, torch.float16), HOPPER, (3, 6), None),
        (operands(), None, (3, 8), "warps form groups on GPUs of compute capability 9.0"),
        (operands(), BEFORE, (3, 8), "warps form groups on GPUs of compute capability 9.0, this one has 8.0"),
        (operands(), HOPPER, (3, 5), "needs Triton 3.6, 3.5 is installed"),
        (operands(dtype=torch.float32), HOPPER, (3, 8), "numbers of 16 bits, these are torch.float32"),
        (operands(32), HOPPER, (3, 8), "needs widths of 64 to 256, multiples of 16; these are 32 and 128"),
        (operands(128, 72), HOPPER, (3, 8), "multiples of 16; these are 128 and 72"),
    ],
)
def test_why_they_do_not_serve_is_said(
    given: launch.Operands, capability: tuple[int, int] | None, version: tuple[int, int], reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(device, "triton_version", lambda: version)
    found = blocks.no_groups(given, capability)
    assert (found is None) if reason is None else (reason in (found or ""))


def backward_plan(text: str = "", D: int = 128, **changes: object) -> BackwardPlan:
    reads = tuple(Read(number, rank, "float") for number, rank in parse(text).reads.items())
    made = BackwardPlan(parse(text), torch.bfloat16, D, D, 1, reads, Blocks(128, 64))
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "version", "reason"),
    [
        (backward_plan("s = 0.1 * dot; keep k <= q"), (3, 8), None),
        (backward_plan("s = 5 * tanh(dot / 5)", 64), (3, 9), None),
        (backward_plan("s = dot + r0[h, q, k]", 64), (3, 8), None),
        (backward_plan(), (3, 7), "needs Triton 3.8"),
        (backward_plan(D=192), (3, 8), "64 or 128 wide there, these are 192 and 192"),
        (backward_plan(wide=True), (3, 8), "positions reach"),
        (backward_plan("keep q - k < 9", listed=True), (3, 8), None),
        (backward_plan("keep k <= q else -1e9"), (3, 8), "how large scores are"),
        (backward_plan(operands=(True, False, True)), (3, 8), "all gradients of queries, keys and values"),
        (backward_plan("s = dot + r0[h, q, k]", 64, wanted=(0,)), (3, 8), "none of what scores read"),
        (backward_plan("s = 5 * tanh(dot / 5)"), (3, 8), "no registers at a width of 128"),
    ],
)  # fmt: skip
def test_why_they_do_not_compute_gradients_is_said(
    plan: BackwardPlan, version: tuple[int, int], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In reports, too."""
    monkeypatch.setattr(device, "triton_version", lambda: version)
    found = blocks.no_backward_groups(plan)
    assert (found is None) if reason is None else (reason in (found or ""))
    kernel, given = launch.Grouped(ordered=False), operands()
    used = kernel._in_the_end(plan, given)
    assert used.blocks == (plan.blocks if reason else blocks.BACKWARD_OF_GROUPS)
    said = [one for one in kernel.remarks(plan.program) if "gradients are computed without groups" in one]
    assert any(reason in one for one in said) if reason else not used.ordered


def test_they_are_used_where_they_are_asked_for_by_name() -> None:
    assert [kernel.name for kernel in kernels.candidates("cuda", "gluon")] == ["gluon.forward"]
    assert [k.name for k in kernels.candidates("cuda", "gluon_unordered")] == ["gluon_unordered.forward"]
    names = [kernel.name for kernel in kernels.candidates("cuda")]
    assert names.index("triton.forward") < names.index("gluon.forward")
    reason = r"gluon\.forward: warps form groups on GPUs of compute capability 9\.0"
    with pytest.raises(BackendError, match=reason):
        kernels.choose(parse(""), operands(), "gluon")


def test_they_are_among_the_choices_that_are_measured() -> None:
    program = parse("s = 0.1 * dot; keep k <= q")
    found = list(tuning.group_choices(program, operands(), HOPPER))
    assert found == [Blocks(128, 128, 4, 2, groups=True), Blocks(128, 64, 4, 4, groups=True)]
    assert list(tuning.group_choices(program, operands(), BEFORE)) == []


@pytest.mark.usefixtures("cache")
def test_what_was_measured_is_kept_and_found_for_few_queries_too() -> None:
    found = Blocks(128, 64, 4, 3, groups=True)
    tuned.add("a GPU", {"some call": found})
    assert tuned.find("a GPU", "some call", 5) == found


def test_where_they_do_not_run_kernels_without_groups_follow() -> None:
    assert attempts.smaller(Blocks(128, 128, 4, 2, groups=True))[0] == Blocks(64, 128, 4, 2)


def described(*_: object) -> list[object]:
    return ["query", "key", "value"]


@pytest.mark.parametrize("odd", [False, True])
def test_tensors_that_cannot_be_copied_by_the_machine_are_read_by_addresses(
    odd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the report says so."""
    given: list[tuple[Plan, list[object]]] = []
    monkeypatch.setattr(store, "described_for_groups", described)
    monkeypatch.setattr(launch, "load", lambda plan: plan)
    monkeypatch.setattr(launch, "launch_kernel", lambda plan, grid, args, *_: given.append((plan, args)))
    q, k, v = (torch.zeros(1, 2, 200, 64, dtype=torch.float16) for _ in "qkv")
    if odd:
        k = torch.zeros(1, 2, 200, 65, dtype=torch.float16)[..., 1:]
    program = parse(f"s = {0.25 if odd else 0.5} * dot")
    plan = launch.plan_forward(program, (q, k, v), (), (), Blocks(128, 128, 4, 3, groups=True))
    launch.launch_forward(plan, (q, k, v), (), ())
    ((used, args),) = given
    assert used.blocks.groups == (not odd)
    assert (args[:3] == ["query", "key", "value"]) == (not odd)
    assert any("without groups of warps" in one for one in attempts.remarks(program)) == odd


# --- compiled ahead of time ---------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in OFTEN else [pytest.mark.slow]) for n in SERVED]
)
def test_nothing_spills_and_no_product_waits_for_another(name: str) -> None:
    """But for 8 bytes of some programs, with other versions of Triton than 3.8."""
    ((kernel, request),) = ahead_of_time.requests(SERVED[name], SM_90)
    binary = ahead_of_time.build(kernel, request)
    assert nvidia.serialised(nvidia.remarks(binary.asm["ptx"], "sm_90a")) == 0
    used = ahead_of_time.usage(binary, request)
    assert used.spilled <= (0 if device.triton_version() == (3, 8) else 8)
    assert used.shared <= SM_90.shared
    code = nvidia.read(nvidia.disassemble(binary.asm["cubin"]))
    assert nvidia.registers(code) == (24, 240)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "spilled"),
    [
        ("s = 0.1 * dot", 16),
        ("s = 0.1 * dot; keep k <= q and q - k < 1024", 8),
        ("s = 0.1 * dot; keep k <= q and r0[b, q] == r0[b, k]", 24),
        ("s = 0.1 * dot; keep k <= q; p = where(0.1 <= random(r0[], b, h, q, k), p / 0.9, 0)", 72),
    ],
)
def test_what_spills_in_the_backward_kernel_of_wide_rows_is_named(text: str, spilled: int) -> None:
    if device.triton_version() != (3, 8):
        pytest.skip("the bytes are those of Triton 3.8")
    reads = tuple(Read(number, rank, "int") for number, rank in parse(text).reads.items())
    made = backward_plan(text, blocks=blocks.BACKWARD_OF_GROUPS, listed=" and " in text, reads=reads)
    ((kernel, request),) = ahead_of_time.requests(made, SM_90)
    assert ahead_of_time.usage(ahead_of_time.build(kernel, request), request).spilled == spilled


RICH = (
    "s = 0.125 * dot; s = 50 * tanh(s / 50) + r0[h, k - q + n0]; keep k <= q and r1[b, k]; sink r2[b, q]; "
    "p = where(random(r3[], b, h, q, k) < 0.1, 0, p / 0.9)"
)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("widths", [(64, 64), (80, 96), (112, 256), (160, 192), (256, 64)])
def test_a_program_with_everything_compiles_at_all_widths(widths: tuple[int, int]) -> None:
    reads = (Read(0, 2, "float"), Read(1, 2, "bool"), Read(2, 2, "half"), Read(3, 0, "int"))
    program = parse(RICH)
    chosen = blocks.blocks_of_groups(program, *widths)
    made = Plan(program, torch.float16, *widths, 2, reads, chosen, listed=True)
    used = ahead_of_time.compile_ahead(made, SM_90)
    assert used.shared <= SM_90.shared


# --- on a card ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128)], ids=str)
@pytest.mark.parametrize(
    "text",
    [
        "s = 0.1 * dot",
        "s = 0.1 * dot; keep k <= q",
        "s = 0.1 * dot; keep k <= q and q - k < 200",
        "s = 0.1 * dot; keep k <= q else -3e38",
        "s = 0.1 * dot; s = 5 * tanh(s / 5); keep k <= q; sink 0.5",
        "s = 0.1 * dot; keep k <= q; p = where(0.1 <= random(5, b, h, q, k), p / 0.9, 0)",
    ],
)
def test_a_card_agrees_with_pytorch(text: str, widths: tuple[int, int], ordered: bool) -> None:
    """And gives the same gradients again, if they are ordered."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that PyTorch can use")
    D, Dv = widths
    torch.manual_seed(0)
    q, k = (torch.randn(2, heads, 1031, D, device="cuda", dtype=torch.bfloat16) for heads in (8, 2))
    given, program = (q, k, torch.randn_like(k[..., :Dv])), parse(text)
    kernel, exact = launch.Grouped(ordered=ordered), kernels.KERNELS["cpu.tiled"]
    if (reason := kernel.refuse(program, given)) is not None:
        pytest.skip(reason)
    found, wanted = (one.forward(program, given, (), ()) for one in (kernel, exact))
    assert not any(tuning.difference(a, b, 2**-8) for a, b in zip(found, wanted, strict=True))
    grads = torch.randn_like(found[0]), torch.zeros_like(found[1])
    mine, again, theirs = (
        one.backward(program, given, (), (), found, grads) for one in (kernel, kernel, exact)
    )
    assert not any(tuning.difference(a, b, 2**-8) for a, b in zip(mine, theirs, strict=True))
    assert not ordered or all(torch.equal(a, b) for a, b in zip(mine, again, strict=True) if a is not None)
    assert not any("does not run" in one for one in kernel.remarks(program))
