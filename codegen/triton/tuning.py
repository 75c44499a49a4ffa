"""Measuring block sizes, schedules and splits: `tune`, which runs only if the user calls it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from attngraph.codegen.triton import decode, device, launch, launch_backward, schedule, tuned
from attngraph.codegen.triton.plan import Blocks, Plan, padded
from attngraph.ir.language.parser import parse
from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops.cached_attention import Rows, counts
from attngraph.ir.ops.kernels import Operands

_log = logging.getLogger("attngraph.codegen.triton")
_NUMBERS = 1 << 16
"""Registers of a multiprocessor: larger tiles are not tried."""
_PROGRAMS = (1, 2, 4, 8)
"""The numbers of programs per multiprocessor that are measured, over a cache."""
Timer = Callable[[Callable[[], object]], float]
"""Seconds (or any unit) that a call takes."""
C = TypeVar("C")


def tune(
    program: ScoreProgram | str, operands: Operands, reads: Sequence[Tensor] = (),
    sizes: Sequence[int] = (), *,
    gradients: bool = False, cache: tuple[tuple[Tensor, Tensor], Sequence[Tensor]] | None = None,
    timer: Timer | None = None, name: str | None = None,
) -> dict[str, Blocks]:  # fmt: skip
    """Measure block sizes for calls like this one, and store the fastest for this user and device.

    Args:
        operands: q, k, v, as for the op, on the device. gradients: also those of the backward pass.
        cache: pages of keys and of values, and rows (`ir/ops/cached_attention.py`): attention
            over a cache is measured, with `operands` as the new tokens.
        timer: by default Triton's own. name: of the device; by default PyTorch's name.

    Returns:
        The table entries that were stored. Choices that do not run are left out; if none runs, there is no
        entry.
    """
    parsed = parse(program) if isinstance(program, str) else program
    name = device.name_of(operands[0].device) if name is None else name
    clock: Timer = timer or importlib.import_module("triton.testing").do_bench
    if cache is not None:
        return _tune_decode(parsed, operands, cache[0], Rows(*cache[1]), reads, sizes, clock, name)
    q, k, v = operands
    line = functools.partial(
        tuned.key, program=parsed, D=q.shape[3], Dv=v.shape[3], dtype=q.dtype,
        group=q.shape[1] // k.shape[1], queries=q.shape[2],
    )  # fmt: skip
    options = list(choices(max(q.shape[3], v.shape[3]), q.dtype, device.shared_memory(q.device)))
    plan = launch.plan_forward(parsed, operands, reads, sizes)
    found: dict[str, Blocks] = {}

    def forward(blocks: Blocks) -> tuple[Tensor, Tensor]:
        return launch.launch_forward(dataclasses.replace(plan, blocks=blocks), operands, reads, sizes)

    best = _fastest([*options, *specialised_choices(plan, operands)], forward, clock, "forward")
    if best is not None:
        found[line("forward")] = best
    back = launch_backward.plan_gradients(plan, operands, reads)
    if gradients and back is not None and best is not None:
        results = forward(best)
        grads = torch.ones_like(results[0]), torch.zeros_like(results[1])
        best = _fastest(options, lambda blocks: launch_backward.differentiate(
            dataclasses.replace(back, blocks=blocks), operands, reads, sizes, results, grads
        ), clock, "backward")  # fmt: skip
        if best is not None:
            found[line("backward")] = best
    if found:
        tuned.add(name, found)
    return found


def _tune_decode(
    program: ScoreProgram, operands: Operands, pages: tuple[Tensor, Tensor], rows: Rows,
    reads: Sequence[Tensor], sizes: Sequence[int], clock: Timer, name: str,
) -> dict[str, Blocks]:  # fmt: skip
    """Measure tiles, and the number of parts of the keys (as programs per multiprocessor)."""
    q, *new = operands
    about = counts(rows)
    lanes, width = q.shape[1] // pages[0].shape[1] * max(about.new), max(q.shape[3], pages[1].shape[3])
    first = decode.decode_blocks(lanes, width, q.dtype, device.shared_memory(q.device))
    options = [(blocks, count) for blocks in decode_choices(first, width) for count in _PROGRAMS]

    def attend(choice: tuple[Blocks, int]) -> Tensor:
        kernel = decode.Decode(choice[0], programs=choice[1])
        plan, splits = kernel.plan(program, q, (new[0], new[1]), pages, reads, sizes, about)
        return decode.launch_decode(plan, q, (new[0], new[1]), pages, reads, sizes, rows, splits)

    best = _fastest(options, attend, clock, "decode")
    if best is None:
        return {}
    line = decode.tuned_line(program, lanes, q.shape[3], pages[1].shape[3], q.dtype)
    tuned.add(name, {line: best[0]}, {line: best[1]})
    return {line: best[0]}


def _fastest(options: Sequence[C], call: Callable[[C], object], clock: Timer, what: str) -> C | None:
    times: dict[C, float] = {}
    for option in options:
        try:
            times[option] = clock(functools.partial(call, option))
        except Exception as problem:  # it does not compile, or does not fit
            _log.info("%s do not run %s: %s: %s", option, what, type(problem).__name__, problem)
    return min(times, key=lambda option: times[option]) if times else None


def run_specialised(program: ScoreProgram | str, operands: Operands) -> Tensor:
    """The output by the warp-specialised schedule, with a table's blocks if it has such, else by rule.

    Raises:
        ValueError: the call cannot be warp-specialised; says why. CompilationError: it does not compile.
    """
    parsed = parse(program) if isinstance(program, str) else program
    plan = launch.plan_forward(parsed, operands, (), ())
    reason = device.no_device(operands[0]) or schedule.obstacle(plan) or schedule.obstacle_of_call(operands)
    if reason is not None:
        raise ValueError(reason)
    capability = device.capability(operands[0].device)
    blocks = plan.blocks if plan.blocks.specialised else schedule.specialised_blocks(plan, capability)
    return launch.launch_forward(dataclasses.replace(plan, blocks=blocks), operands, (), ())[0]


def choices(width: int, dtype: torch.dtype, shared: int) -> Iterator[Blocks]:
    """Block sizes worth measuring for a width."""
    row = padded(width) * dtype.itemsize
    for q in (32, 64, 128):
        for k in (32, 64, 128):
            for warps in (4, 8):
                for stages in (1, 2, 3):
                    fits = (q + 2 * stages * k) * row <= shared
                    if fits and q * (padded(width) + k) <= _NUMBERS // 2 * (warps // 4):
                        yield Blocks(q, k, warps, stages)


def specialised_choices(plan: Plan, operands: Operands) -> Iterator[Blocks]:
    """Warp-specialised block sizes, if the call can be warp-specialised."""
    if schedule.obstacle(plan) is not None or schedule.obstacle_of_call(operands) is not None:
        return
    row, room = padded(max(plan.D, plan.Dv)) * plan.dtype.itemsize, device.shared_memory(operands[0].device)
    for q in (64, 128):
        for k in (64, 128):
            for stages in (2, 3):
                if (q + 2 * stages * k) * row <= room:
                    yield Blocks(q, k, 4, stages, specialised=True)


def decode_choices(first: Blocks, width: int) -> Iterator[Blocks]:
    """Block sizes worth measuring over a cache, besides those of the rule: of the same height, since the
    number of queries of a group is given."""
    for k in (16, 32, 64, 128):
        for warps in (4, 8):
            for stages in (1, 2, 3):
                if k * padded(width) <= _NUMBERS // 2:
                    yield dataclasses.replace(first, k=k, warps=warps, stages=stages)
