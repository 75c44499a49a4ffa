"""What happens where kernels do not run, and how block sizes are measured, stored and found again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from frames import REFERENCE, SMALL, agree, compare_gradients, operands, over_pages

import attngraph
import attngraph.codegen
from attngraph.codegen.remarks import Remarks
from attngraph.codegen.triton import attempts, decode, device, launch, tuned, tuning
from attngraph.codegen.triton.decode import Decode
from attngraph.codegen.triton.launch import Forward
from attngraph.codegen.triton.plan import Blocks, Plan
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.cached_attention import Rows


def break_kernels(monkeypatch: pytest.MonkeyPatch, runs: Callable[[Plan], bool]) -> list[str]:
    """Make kernels of other plans fail; what the log says."""
    said: list[str] = []
    real, back, few = launch.launch_forward, launch.differentiate, decode.launch_decode

    def checked(plan: Any) -> None:
        if not runs(plan):
            raise RuntimeError("out of resources: shared memory")

    monkeypatch.setattr(launch, "launch_forward", lambda plan, *rest: (checked(plan), real(plan, *rest))[1])
    monkeypatch.setattr(launch, "differentiate", lambda plan, *rest: (checked(plan), back(plan, *rest))[1])
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
    kernel = Forward(Blocks(32, 16))
    monkeypatch.setattr(kernel, "_plan_backward", lambda *_: None)
    program, tensors = parse("keep k <= q"), operands()
    results = REFERENCE.forward(program, tensors, [], ())
    for _ in range(2):
        kernel.backward(program, tensors, [], (), results, results)
    assert attempts.remarks(program) == ("its gradients are computed by PyTorch's operations, in blocks",)


def test_errors_of_the_caller_are_not_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    said = break_kernels(monkeypatch, lambda plan: True)
    reads = [torch.randn(4), torch.arange(40) + 40]
    results = REFERENCE.forward(parse(""), operands(), [], ())
    with pytest.raises(IndexError, match="in range"):
        SMALL.backward(parse("s = dot + r0[r1[r1[q]]]"), operands(), reads, (), results, results)
    assert not said


def test_an_error_during_the_capture_of_a_graph_is_told_and_says_nothing_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capturing = [True]
    said = break_kernels(monkeypatch, lambda plan: not capturing)
    monkeypatch.setattr(attempts, "is_captured", lambda device: bool(capturing))
    with pytest.raises(RuntimeError, match="out of resources") as found:
        SMALL.forward(parse("keep k <= q"), operands(), (), ())
    assert "once before the capture" in "".join(found.value.__notes__)
    capturing.clear()
    agree("keep k <= q", operands())
    assert not said and not attempts._failed


def test_kernels_are_never_dropped_because_captured_graphs_hold_their_addresses() -> None:
    for load in (launch.load, launch.load_backward, decode.load):
        assert load.cache_info().maxsize is None


@pytest.fixture
def some_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles alone: all take the interpreter minutes."""
    for name in ("choices", "decode_choices"):
        real = getattr(tuning, name)

        def few(*args: Any, real: Any = real) -> list[Blocks]:
            return [one for one in real(*args) if one.q <= 32 and one.k <= 64 and one.stages < 3]

        monkeypatch.setattr(tuning, name, few)
    monkeypatch.setattr(tuning, "_PROGRAMS", (1, 8))


@pytest.mark.usefixtures("some_choices")
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
        f"{step}, float32, 16 wide, values 16, causal, up to 128 queries" for step in ("forward", "backward")
    }  # fmt: skip
    assert set(found.values()) == {fastest} and len(tried) > 10
    monkeypatch.setattr(device, "name_of", lambda where: "A GPU/1")
    program = parse("keep k <= q")
    assert launch.plan_forward(program, tensors, (), ()).blocks == fastest
    backward = Forward()._plan_backward(program, tensors, (), ())
    assert backward is not None and backward.blocks == fastest
    short = operands(B=1, Sq=7, Skv=70)
    assert launch.plan_forward(program, short, (), ()).blocks == Blocks(16, 64, 4, 2)
    other = parse("keep k < q")
    assert launch.plan_forward(other, tensors, (), ()).blocks != fastest
    agree("keep k <= q", tensors, kernel=Forward())


def damage(results: Any, how: str) -> None:
    """Change results as a wrong kernel might."""
    first, last = next(t for t in results if t is not None), results[-1]
    if how == "a row":
        first[0, 0, -1] *= 1.5
    elif how == "unwritten":
        first[0, 0, -1] = torch.nan
    else:
        last[..., -1:] += 1.0


@pytest.mark.usefixtures("some_choices")
@pytest.mark.parametrize("how", ["a row", "unwritten", "the last result"])
@pytest.mark.parametrize("step", ["forward", "backward", "decode"])
def test_a_choice_that_is_fast_but_wrong_is_not_kept(
    step: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(attempts._log, "warning", lambda text, *rest: said.append(text % rest))
    wrong, right = Blocks(32, 64, 8, 2), Blocks(32, 32, 4, 2)
    if step == "decode":
        wrong, right = Blocks(16, 16, 8, 2), Blocks(16, 32, 4, 2)
    module, name = {
        "forward": (launch, "launch_forward"), "backward": (launch, "differentiate"),
        "decode": (decode, "launch_decode"),
    }[step]  # fmt: skip
    real = getattr(module, name)

    def wrongly(plan: Any, *rest: Any) -> Any:
        found = real(plan, *rest)
        if plan.blocks == wrong:
            damage([found] if step == "decode" else found, how)
        return found

    def timer(call: Callable[[], object]) -> float:
        option = call.args[0]  # type: ignore[attr-defined]
        blocks = option[0] if step == "decode" else option
        return {wrong: 1.0, right: 2.0}.get(blocks, 3.0)

    monkeypatch.setattr(module, name, wrongly)
    if step == "decode":
        pages, held = tuple(torch.randn(6, 2, 64, 16) for _ in "kv"), torch.tensor([150, 180])
        rows = Rows(torch.arange(6).view(2, 3), torch.tensor([0, 1, 2]), held, held)
        found = attngraph.codegen.triton.tune(
            "keep k <= q", operands(B=1, Hq=4, Sq=2, Skv=2), cache=((pages[0], pages[1]), rows), timer=timer,
            name="A GPU/3",
        )  # fmt: skip
    else:
        found = attngraph.codegen.triton.tune(
            "keep k <= q", operands(B=1, Sq=70, Skv=70), gradients=True, timer=timer, name="A GPU/3"
        )
    kept = next(blocks for line, blocks in found.items() if line.startswith(step))
    assert kept == right
    assert said and all(f"{wrong}" in line and "are fast but wrong" in line for line in said)


def test_gradients_that_nobody_asks_for_are_not_compared() -> None:
    q, k, v = operands(B=1, Sq=70, Skv=70)
    table = torch.randn(2)
    for asking in (q.clone().requires_grad_(), q):
        found = attngraph.codegen.triton.tune(
            "s = dot + r0[0] * k", (asking, k, v), [table.clone().requires_grad_(asking is q)],
            gradients=True, timer=lambda call: 1.0, name="A GPU/5", seconds=0,
        )  # fmt: skip
        assert [line.split(",")[0] for line in found] == ["forward", "backward"]


def test_measuring_ends_with_the_time_and_the_first_choice_is_the_rules() -> None:
    tried: list[Blocks] = []

    def timer(call: Callable[[], object]) -> float:
        tried.append(call.args[0])  # type: ignore[attr-defined]
        return 1.0

    tensors = operands(B=1, Sq=70, Skv=70)
    found = attngraph.codegen.triton.tune("", tensors, timer=timer, name="A GPU/4", seconds=0)
    assert list(found.values()) == tried == [launch.blocks_by_rule(parse(""), tensors)]


def test_few_queries_have_an_entry_of_their_own() -> None:
    tensors = operands(B=1, Sq=70, Skv=70, dtype=torch.float16)
    found = attngraph.codegen.triton.tune(
        "keep k <= q", tensors, timer=lambda call: call.args[0].k, name="Another GPU", seconds=0.1
    )
    line = "forward, float16, 16 wide, values 16, causal"
    fastest = found[f"{line}, up to 128 queries"]
    assert tuned.find("Another GPU", f"{line}, up to 128 queries", 128) == fastest
    assert tuned.find("Another GPU", line, 4096) is None


@pytest.mark.slow
@pytest.mark.usefixtures("some_choices")
def test_tiles_and_splits_over_a_cache_are_measured_stored_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands(B=1, Hq=4, Sq=2, Skv=2)
    pages = tuple(torch.randn(6, 2, 64, 16) for _ in "kv")
    held = torch.tensor([150, 180])
    rows = Rows(torch.arange(6).view(2, 3), torch.tensor([0, 1, 2]), held, held)
    monkeypatch.setattr(device, "multiprocessors", lambda where: 3)
    monkeypatch.setattr(decode, "LEAST_KEYS", 64)
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
    assert tuned.measured("A GPU/2").programs == {line: 8}
    real = decode.launch_decode
    monkeypatch.setattr(device, "name_of", lambda where: "A GPU/2")
    monkeypatch.setattr(decode, "launch_decode", lambda *a: (plans.append((a[0], a[2])), real(*a))[1])
    program, whole = parse("keep k <= q"), [t[:3].transpose(0, 1).flatten(1, 2) for t in pages]
    out = Decode().attend(program, q, (k, v), (pages[0], pages[1]), [], (), rows)
    assert out is not None and plans[0][0].blocks == fastest[0] and plans[0][1] == 2
    one = [torch.cat([w[:, :150], n[0, :, :1]], 1).unsqueeze(0) for w, n in zip(whole, (k, v), strict=True)]
    wanted = REFERENCE.forward(parse("keep k <= q + n0"), (q[:, :, :1], one[0], one[1]), [], (150,))[0]
    torch.testing.assert_close(out[:, :, :1], wanted, rtol=3e-5, atol=3e-5)
