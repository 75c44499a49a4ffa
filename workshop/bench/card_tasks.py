"""What one task of a run on a GPU does, in a process of its own (`card.py` has the run).

check: a cell of the scorecard at a length that no tile divides, forward, backward or over a cache, against
PyTorch's operations in float32. measure: a cell of `gpu.py` beside its alternatives. tune: block sizes for
such a cell, stored for this user. tuned: measured once more, with them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import platform
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

import attngraph
from attngraph.codegen import triton
from attngraph.codegen.triton import attempts
from attngraph.codegen.triton import device as devices
from attngraph.codegen.triton.decode import Decode
from attngraph.codegen.triton.launch import Forward, Grouped
from attngraph.codegen.triton.plan import Blocks
from attngraph.codegen.triton.tuning import difference
from attngraph.ir.ops import kernels
from attngraph.ir.ops.cached_attention import Rows, row_by_row
from attngraph.ir.ops.kernels import Operands
from workshop.bench import gpu
from workshop.bench.clock import Clock
from workshop.bench.scorecard.budgets import triton_version
from workshop.bench.scorecard.cells import CELLS, DOCUMENTS, Cell
from workshop.harness import short
from workshop.processes import wait_for_turn

CHECK, MEASURE, TUNE, TUNED = "check", "measure", "tune", "tuned"
CHECKED_SMALL = ("causal 64", "backward, causal 64", "backward, T5 64", "decode 64")
"""Cells that a dry run checks."""
_SHARE = 0.8
"""Of a task's seconds, for a cell's choices of blocks."""
_SLOW = ("flex tuned",)
"""Candidates that are left out where there is little time."""
_OTHERS = (
    *gpu.GROUPS,
    "unfused",
    "torch.compile",
    "flex tuned",
    "sdpa flash",
    "sdpa efficient",
    "flex",
    "sdpa",
)


def work(name: str, answer: Connection, device: str, small: bool, seconds: float) -> None:
    """Run a task and send its row: `outcome` is done, differs (a check found wrong answers) or failed.
    `seconds`: for the preparations of this and other tasks that begin now."""
    stage, _, cell = name.partition(": ")
    config: Any = importlib.import_module("torch._inductor.config")
    config.compile_threads = 1  # other tasks compile, too
    try:
        turn = functools.partial(wait_for_turn, answer)
        if stage == CHECK:
            found = _check(cell, device, small)
        elif stage == TUNE:
            found = _tune(cell, device, small, 1.0 if small else _SHARE * seconds, turn)
        else:
            found = _measure(cell, device, small, _SLOW if stage == MEASURE else _OTHERS, turn)
        row = {"task": name, "outcome": "done", **found}
    except Exception as problem:
        row = {"task": name, "outcome": "failed", "reason": short(problem, 400)}
    answer.send(row)


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float16


# --- checks ---


def _check(name: str, device: str, small: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    cell, tokens = CELLS[name], 70 if small else 1031
    wrong = (_check_cached if cell.step == "decode" else _check_whole)(cell, device, tokens)
    found: dict[str, Any] = {"outcome": "differs", "reason": wrong} if wrong else {}
    remarks = attempts.remarks(cell.program)
    return {**found, "remarks": [text[:400] for text in remarks]} if remarks else found


def _random(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(_dtype(device))


def _check_whole(cell: Cell, device: str, tokens: int) -> str:
    heads = 2 * cell.group
    q, k = _random(device, 1, heads, tokens, cell.width), _random(device, 1, 2, tokens, cell.width)
    operands = q, k, _random(device, 1, 2, tokens, cell.values)
    reads = [
        _read(rank, kind, heads, tokens, device) for rank, kind in ((r.rank, r.kind) for r in cell.reads)
    ]
    grouped = Grouped()
    checked = [Forward(), *([grouped] if grouped.refuse(cell.program, operands) is None else [])]
    wrong = ((kernel.name, _check_kernel(kernel, cell, operands, reads, device)) for kernel in checked)
    return "; ".join(f"{name}: {text}" for name, text in wrong if text)


def _check_kernel(
    kernel: Forward, cell: Cell, operands: Operands, reads: Sequence[Tensor], device: str
) -> str:  # fmt: skip
    exact, program = kernels.KERNELS["cpu.tiled"], cell.program
    found, wanted = (one.forward(program, operands, reads, ()) for one in (kernel, exact))
    if cell.step == "forward":
        return _differences(("out", "lse"), found, wanted)
    grads = _random(device, *found[0].shape), torch.zeros_like(found[1])
    mine, theirs = (one.backward(program, operands, reads, (), found, grads) for one in (kernel, exact))
    return _differences(("dq", "dk", "dv", *(f"dr{n}" for n in range(len(reads)))), mine, theirs)


def _read(rank: int, kind: str, heads: int, tokens: int, device: str) -> Tensor:
    """A tensor that a cell reads: documents, numbers of heads, or a table of 32 buckets for each."""
    if kind == "int":
        return (torch.arange(tokens, device=device) * DOCUMENTS // tokens)[None]
    return torch.rand((32, heads) if rank == 2 else (heads,), device=device)


def _check_cached(cell: Cell, device: str, tokens: int) -> str:
    rows, heads = 2, 2 * cell.group if not cell.shared else cell.group
    keys = heads // cell.group
    pages = _random(device, rows, keys, tokens, cell.width)
    values = pages[..., : cell.values] if cell.shared else _random(device, rows, keys, tokens, cell.values)
    q, new = _random(device, 1, heads, rows, cell.width), _random(device, 1, keys, rows, cell.width)
    new_values = new[..., : cell.values] if cell.shared else _random(device, 1, keys, rows, cell.values)
    where = Rows(*gpu._rows(rows, tokens, device))
    program, both = cell.program, (pages, values)
    found = Decode().attend(program, q, (new, new_values), both, [], [], where)
    if found is None:
        return "the kernel does not serve this call"
    wanted = row_by_row(program, q, (new, new_values), both, [], [], where, "reference")
    return _differences(("out",), [found], [wanted])


def _differences(
    names: Sequence[str], found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]
) -> str:
    eps = max((torch.finfo(t.dtype).eps for t in wanted if t is not None), default=0.0)
    told = [
        f"{name}: {text}"
        for name, one, other in zip(names, found, wanted, strict=True)
        if (text := difference(one, other, eps))
    ]
    return "; ".join(told)


# --- measurements ---


def _measure(
    name: str, device: str, small: bool, without: Sequence[str], turn: Callable[[], None]
) -> dict[str, Any]:
    """The cell of that name and, of attention, its backward pass: both are made ready, then timed."""
    how, clock = gpu.How(device, small, without), Clock(device, turn)
    ready = [(work.name, work.prepare()) for work in gpu.works(how) if name in work.name]
    limit = gpu.limits(clock, how.dtype, 256 if small else 8192)
    rows = [
        {"cell": cell, "name": candidate, **figures}
        for cell, one in ready for candidate, figures in one.timed(clock, limit).items()
    ]  # fmt: skip
    about = gpu.about(how) | {
        "date": time.strftime("%Y-%m-%d"), "limits": dataclasses.asdict(limit), "triton": triton_version(),
        "attngraph": attngraph.__version__, "python": platform.python_version(),
    }  # fmt: skip
    return {"about": about, "rows": rows}


def _tune(name: str, device: str, small: bool, seconds: float, turn: Callable[[], None]) -> dict[str, Any]:
    """Block sizes for a cell of `gpu.py`, on its operands; no candidate is run."""
    if devices.no_triton() or (device == "cpu" and not devices.is_interpreted()):
        raise RuntimeError("block sizes are measured on a GPU, or with TRITON_INTERPRET=1")
    times: dict[str, dict[Any, float]] = {}
    given: dict[str, Any] = {"seconds": seconds, "turn": turn, "times": times}
    if device == "cpu":
        given |= {"timer": Clock(device).once, "name": "interpreter"}
    found: dict[str, Blocks] = {}

    def tune(program: str, operands: Any, **more: Any) -> None:
        found.update(triton.tune(program, operands, **more, **given))

    how = gpu.How(device, small, gpu.NAMES, tune, narrow=True)
    next(work for work in gpu.works(how) if work.name == name).prepare()
    return {
        "blocks": {line: list(dataclasses.astuple(blocks)) for line, blocks in found.items()},
        "times": {
            line: [[_plain(option), taken] for option, taken in by.items()] for line, by in times.items()
        },
    }


def _plain(option: Blocks | tuple[Blocks, int]) -> list[Any]:
    """A choice as numbers: those of its blocks, and how many programs share a multiprocessor."""
    return list(
        dataclasses.astuple(option) if isinstance(option, Blocks) else (*_plain(option[0]), option[1])
    )
