"""From the gradients of a call's results to launched backward kernels, and from their sums to gradients."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.scalar.read_gradients import (
    COLUMNS,
    PAIRS,
    ROWS,
    Totals,
    read_gradients,
    wanted_gradients,
)
from attngraph.codegen.triton import store, visits
from attngraph.codegen.triton.call import launch_kernel, launch_options, read_arguments
from attngraph.codegen.triton.emit import OF_KEYS, OF_QUERIES, OF_READ, emit_backward
from attngraph.codegen.triton.plan import BackwardPlan, Plan, stays_trusted
from attngraph.codegen.unsupported import UnsupportedError
from attngraph.ir.ops.kernels import Operands


def plan_gradients(plan: Plan, operands: Operands, reads: Sequence[Tensor]) -> BackwardPlan | None:
    """The plan of a call's backward kernels, or None if they do not support it."""
    _, wanted = wanted_gradients(operands, reads)
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(Plan)}
    found = BackwardPlan(**fields, wanted=tuple(n for n in wanted if n in plan.program.reads))
    return found if has_backward(found) else None


def differentiate(
    plan: BackwardPlan, operands: Operands, reads: Sequence[Tensor], sizes: Sequence[int],
    results: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of q, k, v and of every floating-point read (zeros where none is wanted)."""
    (q, k, v), (out, lse), (grad, grad_lse) = operands, results, grads
    B, Hq, Sq, Skv = *q.shape[:3], k.shape[2]
    unseen = torch.zeros((B, k.shape[1]), dtype=torch.float32, device=q.device)
    found = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in operands]
    summed = read_gradients(plan.program, plan.wanted)
    totals = Totals(plan.wanted, reads, sizes, (B, Hq, Sq, Skv), lse)
    lengths = {ROWS: Sq, COLUMNS: Skv, PAIRS: 0}
    sums = [torch.empty((B, Hq, lengths[s.kind]), dtype=torch.float32, device=q.device) for s in summed]
    delta = torch.empty((B, Hq, Sq), dtype=torch.float32, device=q.device)
    rows = [lse.contiguous(), grad_lse.contiguous(), delta]
    if not stays_trusted(plan.program):
        rows += torch.empty((2, B, Hq, Sq), dtype=torch.float32, device=q.device)
    first: list[Any] = [q, k, v, grad, out, *rows, unseen, *found, Hq, Sq, Skv]
    first += [stride for tensor in (q, k, v, grad, out) for stride in tensor.stride()]
    lists: list[Any] = []
    for turned in (False, True) if plan.listed else ():
        own, other = plan.blocks.q, plan.blocks.k
        tile = dataclasses.replace(plan.blocks, q=other, k=own) if turned else plan.blocks
        found_lists = visits.find(plan.program, tile, operands, reads, sizes, turned)
        lists += [found_lists.tiles, found_lists.counts, found_lists.b, found_lists.h]
    last = [*read_arguments(plan, reads), *sizes[: plan.program.sizes]]
    kernels, blocks, options = load_backward(plan), plan.blocks, launch_options(plan)
    has_pairs = any(s.kind == PAIRS for s in summed)

    def run(name: str, grid: tuple[int, ...], sums: Sequence[Tensor], *pairs: int) -> None:
        given = (pairs or (B, 0, 0, 0, 0)) if has_pairs else ()
        arguments = [*first, *lists, *sums, *given, *last]
        launch_kernel(getattr(kernels, name), grid, arguments, options, q.device)

    def of_pairs(number: int, here: Tensor, batch: int, row: int) -> None:
        owners = here.shape[0] * here.shape[1]
        grid = owners, -(-Skv // blocks.k), here.shape[2] // blocks.q
        places = [here if n == number else s for n, s in enumerate(sums)]
        run(f"{OF_READ}{number}", grid, places, B, batch, row, here.stride(1), here.stride(2))

    run(OF_QUERIES, (-(-Sq // blocks.q) * B * Hq,), sums)
    run(OF_KEYS, (-(-Skv // blocks.q) * B * k.shape[1],), sums)  # rows of tiles are keys
    for number, one in enumerate(summed):
        if one.kind == ROWS:
            totals.add_rows(one, sums[number])
        elif one.kind == COLUMNS:
            totals.add_columns(one, sums[number])
        else:
            totals.add_pairs(one, blocks.q, functools.partial(of_pairs, number))
    if plan.program.sink is not None:
        totals.add_sink(plan.program, _exactly(plan, *rows[3:]) if rows[3:] else lse, delta)
    return [*found, *totals.results()]


def _exactly(plan: BackwardPlan, tops: Tensor, totals: Tensor) -> Tensor:
    """The log-sum-exp of rows in float64, from `tops` and `totals`: float32 has too few digits."""
    scale = plan.program.scale or 1.0 if plan.is_linear else 1.0
    return tops.double() * scale + totals.double() * math.log(2)


@functools.cache
def load_backward(plan: BackwardPlan) -> Any:
    """The module of the plan's backward kernels, imported from its file and never dropped (`launch.load`)."""
    kernel = emit_backward(plan)
    return store.import_source(kernel.source, kernel.name, importlib.import_module("triton").__version__)


@functools.lru_cache(maxsize=1024)
def has_backward(plan: BackwardPlan) -> bool:
    """Whether the backward kernels of a plan can be emitted."""
    try:
        emit_backward(plan)
    except UnsupportedError:
        return False
    return True
