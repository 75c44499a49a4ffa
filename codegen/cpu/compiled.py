"""Attention compiled from its score program: one pass over keys and values, as flash attention does.

On the first call that is large enough, the program is emitted as C (`source.py`), compiled and loaded
(`call.py`); the backward pass likewise. Smaller calls run PyTorch's operations, because
compiling would cost more than it saves. Scores are float32. Calls that the C does not support (sizes beyond
28 bits, reads of other dtypes, an index out of range) go to the other CPU kernels. Failed compilations are
logged once. Where ATen's kernel serves numbers of 16 bits, the one that takes less time here is used
(`chosen.py`).
"""

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from attngraph.codegen.cpu import chosen, native, source, toolchain
from attngraph.codegen.cpu.call import BLOCK_K, BLOCK_Q, Library, Run, compile_seconds, is_loaded, library
from attngraph.codegen.cpu.flash import Flash
from attngraph.codegen.cpu.native import numbers, struct
from attngraph.codegen.cpu.source import BackwardPlan, Plan
from attngraph.codegen.cpu.tiled import Tiled
from attngraph.codegen.remarks import Remarks, UnsupportedError
from attngraph.codegen.scalar.read_gradients import Totals, read_gradients, wanted_gradients
from attngraph.codegen.scalar.read_ranges import require_in_range
from attngraph.ir.dtypes import FLOATS
from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops.kernels import Kernel, Operands, Reads, Results, Sizes, empty_result

WORTH = 1 << 20
"""Calls with at least this many scores are compiled: PyTorch needs about 10 ms for them, C about 1 ms. A
library that is there serves smaller calls, too, of programs that hide nothing: C does not look at tiles that
are hidden, where PyTorch finds a NaN."""
PACKED = 1 << 20
"""About how many bytes of keys and values are packed per round (there are two buffers): at least those of
one head, and enough to keep all threads busy."""
LEFT = "its gradients are computed by PyTorch's operations, in blocks"
_log = logging.getLogger("attngraph.codegen.cpu")
_remarks = Remarks()
_Result = TypeVar("_Result")


def is_worth_compiling(operands: Operands) -> bool:
    q, k, _ = operands
    return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] >= WORTH


def is_compiled(plan: Plan, operands: Operands) -> bool:
    """Whether a call is computed by C, which is compiled for it if it is not yet."""
    has_work = operands[0].numel() > 0 and operands[2].numel() > 0
    return has_work and (is_worth_compiling(operands) or (not plan.program.keeps and is_loaded(plan)))


class Compiled(Kernel):
    """`cpu.compiled`."""

    name = "cpu.compiled"

    def __init__(self) -> None:
        self._flash, self._tiled = Flash(), Tiled()

    def refuse(self, program: ScoreProgram, operands: Operands) -> str | None:
        q = operands[0]
        if q.device.type != "cpu":
            return f"runs on the CPU, the tensors are on {q.device.type}"
        if q.dtype not in FLOATS:
            return f"no dtype {q.dtype}"
        try:
            toolchain.compiler()
            most = max(program.reads, default=-1) + 1
            source.write(Plan(program.without_scale, q.dtype, (torch.float32,) * most))
        except (toolchain.CompilerError, UnsupportedError) as error:
            return str(error)
        return None

    def forward(self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes) -> Results:
        given = program, operands, reads, sizes
        return self._faster("forward", self._flash.forward, self._forward, given)

    def _faster(
        self, step: str, flash: Callable[..., _Result], ours: Callable[..., _Result], given: tuple[Any, ...]
    ) -> _Result:
        """The result of the kernel that takes less time here, where there are two for numbers of 16 bits."""
        program, operands, *_ = given
        short = operands[0].dtype in (torch.bfloat16, torch.float16)
        if not (short and is_worth_compiling(operands) and self._flash.refuse(program, operands) is None):
            return ours(*given)
        both = (self._flash.name, flash), (self.name, ours)
        ways = {name: functools.partial(way, *given) for name, way in both}
        return chosen.fastest(chosen.kind_of(step, program, operands), ways, _remarks, program)

    def _forward(self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes) -> Results:
        plan = Plan(program.without_scale, operands[0].dtype, tuple(r.dtype for r in reads))
        if is_compiled(plan, operands):
            require_in_range(program, operands, reads, sizes)
            found = library(plan)
            if isinstance(found, Library):
                results = attend(Run(found, program, operands, reads, tuple(sizes)))
                if results is not None:
                    return results
        return self._otherwise(program, operands).forward(program, operands, reads, sizes)

    def backward(
        self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes,
        results: Results, grads: Results,
    ) -> list[Tensor | None]:  # fmt: skip
        given = program, operands, reads, sizes, results, grads
        return self._faster("backward", self._flash.backward, self._backward, given)

    def _backward(
        self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes,
        results: Results, grads: Results,
    ) -> list[Tensor | None]:  # fmt: skip
        reason, plan = "", plan_gradients(program, operands, reads)
        if is_compiled(plan, operands):
            found = library(plan)
            reason = found if isinstance(found, str) else "sizes or reads that the C is not written for"
            if isinstance(found, Library):
                run = Run(found, program, operands, reads, tuple(sizes))
                gradients = differentiate(run, plan, operands, results, grads)
                if gradients is not None:
                    return gradients
        kernel = self._otherwise(program, operands)
        if reason and kernel is self._tiled and _remarks.add(program, f"{LEFT}: {reason}"):
            _log.info("%s: %s; for\n%s", LEFT, reason, program)
        return kernel.backward(program, operands, reads, sizes, results, grads)

    def remarks(self, program: ScoreProgram) -> tuple[str, ...]:
        """What came up, and what the C compiler took, which works in the first call."""
        seconds = compile_seconds(program)
        took = f"the C compiler took {seconds:.1f} s, once: what it makes is kept on disk"
        return (*_remarks.of(program), took) if seconds else _remarks.of(program)

    def source(self, program: ScoreProgram, operands: Operands, reads: Reads) -> str:
        """The C source for a call that is large enough to be compiled."""
        try:
            plan = Plan(program.without_scale, operands[0].dtype, tuple(r.dtype for r in reads))
            return source.write(plan).text if plan.dtype in FLOATS else ""
        except UnsupportedError:
            return ""

    def prepare(self, program: ScoreProgram, operands: Operands, reads: Reads, scores: float) -> None:
        if scores >= WORTH and (text := self.source(program, operands, reads)):
            toolchain.begin(text)

    def _otherwise(self, program: ScoreProgram, operands: Operands) -> Kernel:
        return self._flash if self._flash.refuse(program, operands) is None else self._tiled


def attend(run: Run) -> Results | None:
    """The output and the log-sum-exp of a call, or None where the library does not support its arguments."""
    (b, h, sq, d), dv = run.q.shape, run.v.shape[3]
    out = empty_result(run.v, (b, h, sq, dv))
    lse = torch.empty((b, h, sq), dtype=torch.float32)
    if not run.set_all(out, lse):
        return None
    call, hkv = run.call, run.k.shape[1]
    pairs, length, items = b * hkv, -(-run.k.shape[2] // BLOCK_K) * BLOCK_K, h // hkv * -(-sq // BLOCK_Q)
    members = max(1, min(torch.get_num_threads(), pairs * items))
    enough = max(PACKED // (4 * length * (d + call.wide)), -(-4 * members // items))
    call.together = together = max(1, min(pairs, enough))
    buffers = min(2, -(-pairs // together))
    call.k_packed = run.floats(buffers * together * length * d)
    call.v_packed = run.floats(buffers * together * length * call.wide)
    call.rounds = run.zeros(-(-pairs // together) * 4)
    call.scratch_size = BLOCK_Q * (d + call.wide) + 64
    call.scratch = run.floats(members * call.scratch_size)
    native.run(run.made.code.attngraph_attend, call, members)
    return None if call.bad else (out, lse)


# --- gradients ---

Gradients = struct("base.h", "Gradients")
_WANTED = tuple(numbers("backward.h")[f"OF_{name}"] for name in "QKV")
_TURNED = -(-BLOCK_K // numbers("tile.h")["STEP_Q"]) * numbers("tile.h")["STEP_Q"]
"""BLOCK_K rounded up to rows of a register block, as in c/backward.h."""


def plan_gradients(program: ScoreProgram, operands: Operands, reads: Reads) -> BackwardPlan:
    """The plan of a call's backward pass."""
    numbers = tuple(n for n in wanted_gradients(operands, reads)[1] if n in program.reads)
    dtypes = tuple(r.dtype for r in reads)
    return BackwardPlan(program.without_scale, operands[0].dtype, dtypes, numbers)


def differentiate(
    run: Run, plan: BackwardPlan, operands: Operands, results: Results, grads: Results
) -> list[Tensor | None] | None:
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
    found = [
        torch.empty(t.shape, dtype=t.dtype) if is_wanted else t.new_zeros(()).expand(t.shape)
        for t, is_wanted in zip(operands, each, strict=True)
    ]
    if each[0]:
        found[0] = torch.empty((B, H, Sq, D), dtype=torch.float32)
    summed = read_gradients(plan.program, plan.wanted)
    totals = Totals(plan.wanted, run.reads, run.sizes, (B, H, Sq, Sk))
    sums = totals.places(summed)
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
        g.sums[place] = total.data_ptr()
    members = max(1, min(torch.get_num_threads(), B * Hkv * -(-Sk // BLOCK_K)))
    call.scratch_size = (2 * BLOCK_Q + BLOCK_K + _TURNED) * width + BLOCK_K * (D + Dv) + _TURNED * call.wide
    call.scratch = run.floats(members * call.scratch_size)
    call.gradients = ctypes.cast(ctypes.byref(g), ctypes.c_void_p)
    native.run(run.made.code.attngraph_differentiate, call, members)
    for number, one in enumerate(summed):
        compute = functools.partial(_sum_pairs, run, g, members, number, one.owned)
        totals.add(one, sums[number], BLOCK_Q, compute)
    if call.bad:
        return None
    if run.program.sink is not None:
        delta = (grad.float() * out.float()).sum(-1) - grad_lse
        totals.add_sink(run.program, _exactly(rows, lse), delta)
    return [*(t.to(like.dtype) for t, like in zip(found, operands, strict=True)), *totals.results()]


def _exactly(rows: Tensor, lse: Tensor) -> Tensor:
    """The log-sum-exp of rows in float64. A weight is exp(score - base) * unit; where scores are far from
    zero, base and unit hold digits of the sum that the float32 `lse` has lost."""
    base, unit, _ = (part.flatten(2)[..., : lse.shape[2]].double() for part in rows.unbind(3))
    return torch.where(lse.isfinite(), base - unit.log(), lse.double())


def _sum_pairs(
    run: Run, g: Any, members: int, number: int, owned: tuple[bool, bool], here: Tensor, batch: int, row: int
) -> None:
    """Write a read's sums `[batches or 1, H or 1, rows, Sk]`, starting at `batch` and `row`."""
    g.pairs, g.owner_stride, g.row_stride = here.data_ptr(), here.stride(1), here.stride(2)
    g.first, g.count, g.batch, g.number = row, here.shape[2], batch, number
    g.owners = here.shape[0] * here.shape[1]
    g.each_batch, g.each_head = owned
    g.counters = run.zeros(4)
    run.call.slot = 0
    native.run(run.made.code.attngraph_sum_pairs, run.call, members)
