"""The backward pass of a call: gradients of q, k, v and of the tensors that scores read, by a compiled
library.

Memory is linear in the tokens: the queries and the output's gradient are copied once to packed float32
buffers, and the gradient of q is summed in one. Only gradients that are asked for are computed.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.cpu import native
from attngraph.codegen.cpu.call import BLOCK_K, BLOCK_Q, Run
from attngraph.codegen.cpu.native import numbers, struct
from attngraph.codegen.cpu.source_backward import BackwardPlan
from attngraph.codegen.scalar.read_gradients import (
    COLUMNS,
    PAIRS,
    ROWS,
    Totals,
    read_gradients,
    wanted_gradients,
)
from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops.kernels import Operands

Gradients = struct("base.h", "Gradients")
_WANTED = tuple(numbers("backward.h")[f"OF_{name}"] for name in "QKV")
_TURNED = -(-BLOCK_K // numbers("tile.h")["STEP_Q"]) * numbers("tile.h")["STEP_Q"]
"""BLOCK_K rounded up to rows of a register block, as in c/backward.h."""


def plan_gradients(program: ScoreProgram, operands: Operands, reads: Sequence[Tensor]) -> BackwardPlan:
    """The plan of a call's backward pass."""
    numbers = tuple(n for n in wanted_gradients(operands, reads)[1] if n in program.reads)
    dtypes = tuple(r.dtype for r in reads)
    return BackwardPlan(program.without_scale, operands[0].dtype, dtypes, numbers)


def differentiate(
    run: Run, plan: BackwardPlan, operands: Operands, results: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
) -> list[Tensor | None] | None:  # fmt: skip
    """Gradients of q, k, v and of every floating-point read (zeros where none is wanted), or None where the
    library does not support the call's arguments."""
    both = results[0], grads[0].to(results[0].dtype)
    out, grad = (t if t.stride(-1) == 1 else t.contiguous() for t in both)
    lse, grad_lse = (t.to(torch.float32).contiguous() for t in (results[1], grads[1]))
    if not run.set_all(out, lse):
        return None
    call, g = run.call, Gradients()
    B, H, Sq, D = run.q.shape
    Hkv, Sk, Dv = run.k.shape[1], run.k.shape[2], run.v.shape[3]
    each, _ = wanted_gradients(operands, run.reads)
    found = [_gradient(t, is_wanted) for t, is_wanted in zip(operands, each, strict=True)]
    if each[0]:
        found[0] = torch.empty((B, H, Sq, D), dtype=torch.float32)
    summed = read_gradients(plan.program, plan.wanted)
    lengths = {ROWS: Sq, COLUMNS: Sk}
    sums = [torch.empty((B, H, lengths[s.kind])) if s.kind in lengths else None for s in summed]
    items, width = B * H * -(-Sq // BLOCK_Q), run.padded(D)
    g.grad, g.grad_lse, g.grad_stride = grad.data_ptr(), grad_lse.data_ptr(), grad.stride()[:3]
    g.wanted = sum(bit for bit, is_wanted in zip(_WANTED, each, strict=True) if is_wanted)
    g.grad_q, g.grad_k, g.grad_v = (t.data_ptr() for t in found)
    g.q_packed, g.grad_packed = (run.floats(items * BLOCK_Q * wide) for wide in (width, call.wide))
    rows = torch.empty((B, H, -(-Sq // BLOCK_Q), 3, BLOCK_Q), dtype=torch.float32)
    g.rows = run.hold(rows)
    g.choice = run.hold(torch.empty(items, dtype=torch.uint8))
    g.added, g.counters = run.zeros(items), run.zeros(4)
    for place, total in enumerate(sums):
        g.sums[place] = None if total is None else total.data_ptr()
    members = max(1, min(torch.get_num_threads(), B * Hkv * -(-Sk // BLOCK_K)))
    call.scratch_size = (2 * BLOCK_Q + BLOCK_K + _TURNED) * width + BLOCK_K * (D + Dv) + _TURNED * call.wide
    call.scratch = run.floats(members * call.scratch_size)
    call.gradients = ctypes.cast(ctypes.byref(g), ctypes.c_void_p)
    native.run(run.made.code.attngraph_differentiate, call, members)
    totals = Totals(plan.wanted, run.reads, run.sizes, (B, H, Sq, Sk))
    for number, one in enumerate(summed):
        total = sums[number]
        if one.kind == PAIRS:
            compute = functools.partial(_sum_pairs, run, g, members, number, one.owned)
            totals.add_pairs(one, BLOCK_Q, compute)
        elif one.kind == ROWS and total is not None:
            totals.add_rows(one, total)
        elif total is not None:
            totals.add_columns(one, total)
    if call.bad:
        return None
    if run.program.sink is not None:
        delta = (grad.float() * out.float()).sum(-1) - grad_lse
        totals.add_sink(run.program, _exactly(rows, lse), delta)
    return [*(t.to(like.dtype) for t, like in zip(found, operands, strict=True)), *totals.results()]


def _gradient(like: Tensor, is_wanted: bool) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype) if is_wanted else like.new_zeros(()).expand(like.shape)


def _exactly(rows: Tensor, lse: Tensor) -> Tensor:
    """The log-sum-exp of rows in float64. A weight is exp(score - base) * unit; where scores are far from
    zero, base and unit hold digits of the sum that the float32 `lse` has lost."""
    base, unit, _ = (part.flatten(2)[..., : lse.shape[2]].double() for part in rows.unbind(3))
    return torch.where(lse.isfinite(), base - unit.log(), lse.double())


def _sum_pairs(
    run: Run, g: Any, members: int, number: int, owned: tuple[bool, bool], here: Tensor, batch: int,
    row: int,
) -> None:  # fmt: skip
    """Write a read's sums `[batches or 1, H or 1, rows, Sk]`, starting at `batch` and `row`."""
    g.pairs, g.owner_stride, g.row_stride = here.data_ptr(), here.stride(1), here.stride(2)
    g.first, g.count, g.batch, g.number = row, here.shape[2], batch, number
    g.owners = here.shape[0] * here.shape[1]
    g.each_batch, g.each_head = owned
    g.counters = run.zeros(4)
    run.call.slot = 0
    native.run(run.made.code.attngraph_sum_pairs, run.call, members)
