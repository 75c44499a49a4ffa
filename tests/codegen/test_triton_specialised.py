"""Warp-specialised kernels without a GPU: who gets one, its source, its binary, and compilations that crash.

What they compute is tested by `interpreted/test_specialised.py`.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from attngraph.codegen.remarks import Remarks
from attngraph.codegen.triton import (
    ahead_of_time,
    attempts,
    compiler,
    device,
    isolated,
    launch,
    schedule,
    store,
    tuned,
)
from attngraph.codegen.triton.compiler import Request
from attngraph.codegen.triton.emit_forward import emit
from attngraph.codegen.triton.plan import Blocks, Plan, Read
from attngraph.codegen.unsupported import UnsupportedError
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.kernels import KERNELS, Operands

CheckUsage = Callable[[str, str, Blocks, ahead_of_time.Usage], None]
BLOCKS = Blocks(128, 64, 4, 2, specialised=True)
needs_compiler = pytest.mark.usefixtures("triton_compiler", "cache")


def plan(text: str, D: int = 64, reads: tuple[Read, ...] = (), **changes: Any) -> Plan:
    found = Plan(parse(text), torch.bfloat16, D, D, 1, reads, BLOCKS)
    return dataclasses.replace(found, **changes)


# --- who gets one ---------------------------------------------------------------------------------------

HEAD, ROW, KEY, PAIR = (Read(0, rank, "float") for rank in (1, 2, 2, 3))


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (plan("s = 0.125 * dot; keep k <= q"), None),
        (plan("s = dot + r0[h] * (k - q); keep q - k < 9", reads=(HEAD,), listed=True), None),
        (plan("sink r0[h]", D=80, reads=(HEAD,)), None),
        (plan("s = dot + r0[b, k]", reads=(KEY,)), "`r0[b, k]` is read in the loop over keys"),
        (plan("s = dot + r0[h, k - q]", reads=(KEY,)), "`r0[h, k - q]` is read in the loop over keys"),
        (plan("keep k < r0[b, q]", reads=(ROW,)), "`r0[b, q]` is read for every query"),
        (plan("s = r0[int(dot)]", reads=(HEAD,)), "is read in the loop over keys"),
        (plan("", dtype=torch.float32), "float32 operands"),
        (plan("", D=320), "wider than 256"),
        (plan("", wide=True), "32 bits"),
    ],
    ids=str,
)
def test_a_plan_says_why_it_is_not_specialised(made: Plan, reason: str | None) -> None:
    found = schedule.obstacle(made)
    if reason is None:
        assert found is None and "warp_specialize=True" in emit(made).source
        return
    assert found is not None and reason in found
    with pytest.raises(UnsupportedError, match="warp specialisation"):
        emit(made)
    classic = dataclasses.replace(made, blocks=Blocks(64, 64))
    assert f"# Not warp-specialised: {found}." in emit(classic).source


@pytest.mark.parametrize("blocks", [Blocks(128, 64, 8, 2, True), Blocks(32, 64, 4, 2, True)])
def test_tiles_that_do_not_work_are_refused(blocks: Blocks) -> None:
    with pytest.raises(UnsupportedError, match="4 warps and 64 or 128 queries"):
        emit(plan("", blocks=blocks))


def fake(length: int = 4096, width: int = 64) -> Operands:
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k = (torch.empty(1, heads, length, width, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
        return q, k, k


def chosen(operands: Operands, text: str = "keep k <= q", blocks: Blocks | None = None) -> Blocks:
    return launch.plan_forward(parse(text), operands, (), (), blocks).blocks


def test_without_a_table_every_kernel_is_classic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the two schedules have been measured."""
    monkeypatch.setattr(device, "capability", lambda where: (9, 0))
    assert schedule.UNTUNED == () and not chosen(fake()).specialised
    monkeypatch.setattr(schedule, "UNTUNED", ((9, 0),))
    assert chosen(fake()) == Blocks(128, 128, 4, 2, specialised=True)
    assert chosen(fake(width=128)) == Blocks(128, 64, 4, 2, specialised=True)
    assert not chosen(fake(length=64)).specialised
    monkeypatch.setattr(device, "capability", lambda where: (8, 0))
    assert not chosen(fake()).specialised


@pytest.mark.parametrize(
    ("capability", "serves"), [((9, 0), True), ((10, 0), True), ((8, 0), False), ((12, 0), False)]
)
def test_only_gpus_that_it_is_made_for_are_given_it(
    capability: tuple[int, int], serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "_said", Remarks())
    monkeypatch.setattr(device, "capability", lambda where: capability)
    assert chosen(fake(), blocks=BLOCKS).specialised == serves
    wanted = () if serves else (
        "the classic schedule instead of the warp-specialised one: "
        f"it is not made for compute capability {capability[0]}.{capability[1]}",
    )  # fmt: skip
    assert attempts.remarks(parse("keep k <= q")) == wanted


def test_a_report_shows_the_schedule_that_a_table_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.tuned, "find", lambda *_: BLOCKS)
    source = KERNELS["triton.forward"].source(parse("keep k <= q"), fake(), ())
    assert "# Warp-specialised: some warps fetch tiles while others compute." in source


@pytest.mark.usefixtures("cache")
def test_a_table_keeps_the_schedule() -> None:
    tuned.add("A GPU", {"a": BLOCKS, "b": Blocks(64, 32, 4, 2)})
    assert tuned.table("A GPU") == {"a": BLOCKS, "b": Blocks(64, 32, 4, 2)}
    text = json.loads(tuned._own("A GPU").read_text())
    assert text["blocks"] == {"a": [128, 64, 4, 2, "warp-specialised"], "b": [64, 32, 4, 2]}


# --- source and binary -------------------------------------------------------------------------------


def test_the_source_of_a_specialised_kernel(golden: Callable[..., None]) -> None:
    text = "s = 30.0 * tanh(dot / 240.0); keep q - k < 1024 and k <= q"
    golden("specialised.py.txt", emit(plan(text, group=4, listed=True)).source)


CAPABILITIES = {"sm_90": (9, 0), "sm_100": (10, 0)}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("s = 0.125 * dot", {}),
    "causal": ("s = 0.125 * dot; keep k <= q", {}),
    "shifted": ("s = 0.125 * dot; keep k <= q + n0", {}),
    "window": ("s = 0.125 * dot; keep q - k < 256 and k <= q", {"listed": True}),
    "softcap": ("s = 50.0 * tanh(dot * 0.0025); keep k <= q", {}),
    "slopes": ("s = 0.125 * dot + r0[h] * (k - q); keep k <= q", {"reads": (HEAD,)}),
    "sink": ("s = 0.125 * dot; keep k <= q; sink r0[h]", {"reads": (HEAD,)}),
    "lengths": ("s = 0.125 * dot; keep k < r0[b]", {"reads": (Read(0, 1, "int"),), "listed": True}),
    "dropout": (
        "s = 0.125 * dot; p = where(random(r0[], b, h, q, k) < 0.1, 0.0, p / 0.9)",
        {"reads": (Read(0, 0, "int"),)},
    ),
}


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "D", "target"),
    [
        pytest.param(k, d, t, marks=[] if (k, d, t) == ("softcap", 128, "sm_90") else pytest.mark.slow)
        for k in KINDS
        for d in (64, 128)
        for t in ("sm_90", "sm_100")
    ],
)
def test_warps_are_given_different_work_and_the_table_says_what_it_takes(
    kind: str, D: int, target: str, check_usage: CheckUsage
) -> None:
    """That nothing is spilled holds for every Triton."""
    text, changes = KINDS[kind]
    made, gpu = plan(text, D, **changes), ahead_of_time.TARGETS[target]
    made = dataclasses.replace(made, blocks=schedule.specialised_blocks(made, CAPABILITIES[target]))
    usage = ahead_of_time.compile_ahead(made, gpu)
    assert usage.specialised and 0 < usage.shared <= gpu.shared
    assert usage.spilled == 0, usage
    check_usage("specialised_usage.json", f"{target}, {D} wide, {kind}", made.blocks, usage)


# --- compilations that fail -----------------------------------------------------------------------------


def request_of(path: Path, content: str) -> Request:
    path.write_text(content)
    return Request(str(path), "kernel", (), (), "cuda", 90, 32, ())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("import os; os.abort()", "was ended by signal 6"),
        ("raise ValueError('no such layout')", "failed: ValueError: no such layout"),
        ("import sys; sys.exit(3)", "failed: it said nothing"),
    ],
)
def test_a_compilation_that_crashes_is_a_reason_and_is_not_tried_again(
    content: str, problem: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(tmp_path / "emitted.py", content)
    for _ in range(2):
        with pytest.raises(isolated.CompilationError, match=problem):
            isolated.compile_isolated(request)
        monkeypatch.setattr(subprocess, "run", None)  # the second time, nothing is run
    other = dataclasses.replace(request, architecture=100)
    with pytest.raises(TypeError):
        isolated.compile_isolated(other)


def test_what_may_pass_is_tried_again(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = request_of(tmp_path / "emitted.py", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(isolated.CompilationError, match="signal 9"):
        isolated.compile_isolated(killed)
    monkeypatch.setattr(isolated, "SECONDS", 0.01)
    with pytest.raises(isolated.CompilationError, match="timed out"):
        isolated.compile_isolated(killed)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no_python"))
    with pytest.raises(isolated.CompilationError, match=r"did not end: .*no_python"):
        isolated.compile_isolated(killed)
    assert list(store.directory().glob("compiled_*")) == []


def test_a_file_that_is_no_answer_is_not_believed(cache: Path, tmp_path: Path) -> None:
    request = request_of(tmp_path / "emitted.py", "raise ValueError('no such layout')")
    path = store.directory() / f"compiled_{isolated._key(request)}.json"
    for content in ("", "[]", '{"shared": 1}', "{"):
        path.write_text(content)
        with pytest.raises(isolated.CompilationError, match="no such layout"):
            isolated.compile_isolated(request)
        assert "no such layout" in json.loads(path.read_text())["problem"]


@pytest.fixture
def hopper(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: (9, 0))
    monkeypatch.setattr(device, "shared_memory", lambda where: 232_448)


def launched(made: Plan) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """What `launch_forward` gives to a kernel."""
    q, out = torch.empty(2, 4, 300, 64, dtype=torch.bfloat16), torch.empty(2, 4, 300)
    arguments = [q, q, q, q, out, 4, 300, 300, *q.stride(), *q.stride(), *q.stride()]
    return launch.load(made), arguments, launch.launch_options(made)


@needs_compiler
@pytest.mark.usefixtures("hopper")
def test_before_its_first_launch_a_kernel_is_compiled_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    isolated.require_specialised(*launched(plan("keep k <= q")))
    monkeypatch.setattr(subprocess, "run", None)
    isolated.require_specialised(*launched(plan("keep k <= q")))
    isolated._problem.cache_clear()
    monkeypatch.setattr(device, "shared_memory", lambda where: 65_536)
    with pytest.raises(isolated.CompilationError, match="bytes of shared memory, of which there are 65536"):
        isolated.require_specialised(*launched(plan("keep k <= q")))


@needs_compiler
@pytest.mark.usefixtures("hopper")
def test_a_kernel_whose_warps_all_do_the_same_is_told() -> None:
    with pytest.raises(isolated.CompilationError, match="it compiled, but its warps all do the same"):
        isolated.require_specialised(*launched(plan("keep k <= q", blocks=Blocks(64, 32, 4, 2))))


@needs_compiler
def test_arguments_are_seen_as_the_launcher_of_triton_sees_them() -> None:
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import native_specialize_impl

    room = torch.empty(64, dtype=torch.bfloat16)
    values: list[Any] = [
        0,
        1,
        2,
        16,
        24,
        -1,
        -32,
        (1 << 31) - 1,
        1 << 31,
        -(1 << 31),
        1 << 40,
        room,
        room[1:],
    ]
    values += [torch.empty(4, dtype=dtype) for dtype in isolated._POINTERS]
    for value in values:
        for is_fixed in (False, True):
            if is_fixed and isinstance(value, torch.Tensor):
                continue
            kind, key = native_specialize_impl(BaseBackend, value, False, not is_fixed, not is_fixed)
            assert isolated._fact(value, is_fixed) == (kind, key == "D"), (value, is_fixed)


def test_the_program_that_compiles_knows_nothing_of_ours() -> None:
    """It runs beside modules of ours whose names others may have."""
    source = Path(compiler.__file__).read_text()
    assert "attngraph." not in source and "import torch" not in source


@pytest.mark.skipif(device.no_triton() is not None, reason="needs triton")
def test_what_the_caller_told_triton_about_memory_stays() -> None:
    import triton
    from triton.runtime import _allocation

    given: list[torch.Tensor] = []

    def mine(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        raise AssertionError

    triton.set_allocator(mine)
    device.with_scratch(
        torch.device("cpu"), lambda: given.append(_allocation._allocator.get()(384, 128, None))
    )
    assert given[0].nbytes == 384 and _allocation._allocator.get() is mine
