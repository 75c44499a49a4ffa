"""`gluon.forward` in the simulator of Gluon's kernels (`workshop/simulator`), in a random order of its warps.

What the first kernel of the backward pass prepares for that of groups of warps (`delta`, and of rows whose
log-sum-exp is far from zero `tops` and `totals`) is computed here by PyTorch: it is one of Triton's kernels.
What groups of warps leave to such kernels is left to `cpu.tiled` here.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attngraph.codegen.triton import launch
from attngraph.codegen.triton import plan as P
from attngraph.codegen.triton.blocks import no_backward_groups, no_groups
from attngraph.codegen.triton.emit import OF_QUERIES, Kernel, emit, emit_backward_by_groups
from attngraph.codegen.triton.plan import Plan
from attngraph.codegen.triton.store import is_describable
from attngraph.ir.language import evaluate
from attngraph.ir.language.evaluate import Tile
from attngraph.ir.language.parser import parse
from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops import kernels
from attngraph.ir.ops.kernels import Operands, Reads, Results, Sizes

from .programs import Call

SM_90 = (9, 0)
_seeds = itertools.count()


def simulate(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: dict[str, Any], ordered: bool
) -> None:
    from workshop.simulator import launch as run

    names = inspect.signature(kernel).parameters
    given = dict(zip(names, arguments, strict=True))
    run(kernel, grid, given, seed=next(_seeds), maxnreg=options["maxnreg"], ordered=ordered)


@functools.cache
def loaded(kernel: Kernel) -> Any:
    from workshop.simulator import load

    return getattr(load(kernel.source, kernel.name), kernel.name)


class Simulated(launch.Grouped):
    """The kernel, as if on a GPU of compute capability 9.0."""

    def __init__(self, blocks: P.Blocks | None = None, ordered: bool = True) -> None:
        super().__init__(blocks, ordered)

    def _leave(self) -> None:
        """A call is left to other kernels."""

    def refuse(self, program: ScoreProgram, operands: Operands) -> str | None:
        return no_groups(operands, SM_90) or self._unserved(program, operands)

    def forward(self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes) -> Results:
        if not all(map(is_describable, operands)):
            self._leave()
            return self._otherwise.forward(program, operands, reads, sizes)
        with self._in_the_simulator(program, operands, reads, sizes):
            return super().forward(program, operands, reads, sizes)

    def backward(
        self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes,
        results: Results, grads: Results,
    ) -> list[Tensor | None]:  # fmt: skip
        if why_left(self, Call(program.text, operands, list(reads), list(sizes))):
            self._leave()
            return self._otherwise.backward(program, operands, reads, sizes, results, grads)
        with self._in_the_simulator(program, operands, reads, sizes):
            return super().backward(program, operands, reads, sizes, results, grads)

    def _in_the_simulator(self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes) -> Any:
        call = Call(program.text, operands, list(reads), list(sizes))

        def run(kernel: Any, grid: Any, arguments: Any, options: Any, device: Any) -> None:
            if isinstance(kernel, Plan):
                prepare(kernel, call, arguments)
            else:
                simulate(kernel, grid, arguments, options, self._ordered)

        def first_of(plan: Plan) -> SimpleNamespace:
            return SimpleNamespace(**{OF_QUERIES: plan})

        return mock.patch.multiple(
            launch, launch_kernel=run, load=lambda plan: loaded(emit(plan)), load_backward=first_of,
            load_backward_by_groups=lambda plan: loaded(emit_backward_by_groups(plan)),
        )  # fmt: skip


def why_left(kernel: Simulated, call: Call) -> str | None:
    """Why the gradients of a call are left to other kernels, or None."""
    plan = kernel._plan_backward(parse(call.text), call.operands, call.reads, call.sizes)
    if plan is None:
        return "no kernel is planned"
    if not all(map(is_describable, call.operands)):
        return "its tensors cannot be copied by the machine"
    return None if plan.blocks.groups else no_backward_groups(plan)


def prepare(plan: Plan, call: Call, arguments: Sequence[Any]) -> None:
    """What the kernel of queries makes of rows, besides gradients."""
    (q, k, _), (grad, out, lse, grad_lse, delta) = arguments[:3], arguments[3:8]
    delta.copy_((grad.float() * out.float()).sum(-1) - grad_lse)
    rest = list(arguments[8:])
    if not P.stays_trusted(plan.program):
        tops, totals = rest.pop(0), rest.pop(0)
        tile = Tile((0, q.shape[0]), (0, q.shape[1]), (0, q.shape[2]), (0, k.shape[2]))
        env = kernels.environment(tile, call.reads, call.sizes, q)
        scores = evaluate.scores(plan.program, kernels.dot(q.float(), k.float()), env).double()
        far = (lse.abs() > kernels.TRUSTED) & lse.isfinite()
        top = torch.where(far, scores.amax(-1), 0.0)
        total = (scores - top.unsqueeze(-1)).exp().sum(-1)
        sink = evaluate.sink(plan.program, env)
        if sink is not None:
            total = total + (sink.squeeze(-1) - top).exp()
        tops.copy_(top / (plan.program.scale or 1.0 if plan.is_linear else 1.0))
        totals.copy_(torch.where(far, total.log2(), lse.double() * math.log2(math.e)))
    lost = ~lse.isfinite().view(q.shape[0], k.shape[1], -1)
    rest[0][lost.any(-1)] = math.nan
