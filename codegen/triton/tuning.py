"""Measuring block sizes: `tune`, which nothing calls but who asks for it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from attngraph.codegen.triton import device, launch, launch_backward, tuned
from attngraph.codegen.triton.plan import Blocks, padded
from attngraph.ir.kernels import Operands
from attngraph.ir.parser import parse
from attngraph.ir.score import ScoreProgram

_log = logging.getLogger("attngraph.codegen.triton")
_NUMBERS = 1 << 16
"""Registers of a multiprocessor: tiles beyond it are not tried."""
Timer = Callable[[Callable[[], object]], float]
"""Seconds (or any unit) that a call takes."""


def tune(
    program: ScoreProgram | str, operands: Operands, reads: Sequence[Tensor] = (),
    sizes: Sequence[int] = (), *,
    gradients: bool = False, timer: Timer | None = None, name: str | None = None,
) -> dict[str, Blocks]:  # fmt: skip
    """Measure choices of block sizes for such calls, and store the fastest for this user and device.

    Args:
        operands: q, k, v, as for the op, on the device. gradients: also those of the backward pass.
        timer: by default Triton's own. name: the device's, by default as PyTorch says it.

    Returns:
        The lines of the table that were stored. A choice that does not run is left out; where none runs, so
        is the line.
    """
    parsed = parse(program) if isinstance(program, str) else program
    q, _, v = operands
    name = device.name_of(q.device) if name is None else name
    clock: Timer = timer or importlib.import_module("triton.testing").do_bench
    options = list(choices(max(q.shape[3], v.shape[3]), q.dtype, device.shared_memory(q.device)))
    line = functools.partial(tuned.key, program=parsed, D=q.shape[3], Dv=v.shape[3], dtype=q.dtype)
    found: dict[str, Blocks] = {}

    def measure(step: str, call: Callable[[Blocks], object]) -> None:
        times: dict[Blocks, float] = {}
        for blocks in options:
            try:
                times[blocks] = clock(functools.partial(call, blocks))
            except Exception as problem:  # it does not compile, or does not fit
                _log.info("%s do not run %s: %s: %s", blocks, step, type(problem).__name__, problem)
        if times:
            found[line(step)] = min(times, key=lambda blocks: times[blocks])

    plan = launch.plan_forward(parsed, operands, reads, sizes)

    def forward(blocks: Blocks) -> tuple[Tensor, Tensor]:
        return launch.launch_forward(dataclasses.replace(plan, blocks=blocks), operands, reads, sizes)

    measure("forward", forward)
    back = launch_backward.plan_gradients(plan, operands, reads)
    if gradients and back is not None and found:
        results = forward(next(iter(found.values())))
        grads = torch.ones_like(results[0]), torch.zeros_like(results[1])
        measure("backward", lambda blocks: launch_backward.differentiate(
            dataclasses.replace(back, blocks=blocks), operands, reads, sizes, results, grads
        ))  # fmt: skip
    if found:
        tuned.add(name, found)
    return found


def choices(width: int, dtype: torch.dtype, shared: int) -> Iterator[Blocks]:
    """Block sizes that may be any good for a width."""
    row = padded(width) * dtype.itemsize
    for q in (32, 64, 128):
        for k in (32, 64, 128):
            for warps in (4, 8):
                for stages in (1, 2, 3):
                    fits = (q + 2 * stages * k) * row <= shared
                    if fits and q * (padded(width) + k) <= _NUMBERS // 2 * (warps // 4):
                        yield Blocks(q, k, warps, stages)
