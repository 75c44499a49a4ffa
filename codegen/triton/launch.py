"""`triton.forward`: from a call of the attention op to a launched kernel.

Makes the plan of a call; emits, imports and compiles its source (once per plan); and launches it with one
program per block of queries of one head. Triton is imported when a kernel is first needed, so importing
this module does not require it.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.cpu.tiled import Tiled
from attngraph.codegen.remarks import UnsupportedError
from attngraph.codegen.scalar.form import SMALL
from attngraph.codegen.scalar.read_gradients import COLUMNS, PAIRS, Totals, read_gradients, wanted_gradients
from attngraph.codegen.scalar.read_ranges import reads_by_data, require_in_range
from attngraph.codegen.scalar.weights import weight_multiple
from attngraph.codegen.triton import attempts, store, tuned, visits
from attngraph.codegen.triton import blocks as rules
from attngraph.codegen.triton import device as gpu
from attngraph.codegen.triton import plan as P
from attngraph.codegen.triton.attempts import KeptPlans, key_of
from attngraph.codegen.triton.emit import (
    OF_KEYS,
    OF_QUERIES,
    OF_READ,
    emit,
    emit_backward,
    emit_backward_by_groups,
)
from attngraph.codegen.triton.plan import DTYPES, WIDEST, BackwardPlan, Blocks, Plan, Read
from attngraph.codegen.triton.store import described, is_describable, is_wide, launch_kernel, loading
from attngraph.ir.language import ScoreProgram
from attngraph.ir.ops.kernels import Kernel, Operands, Reads, Results, Sizes, empty_result

UNCHECKED = (
    "computed by PyTorch's operations: r{} holds whole numbers or truth values and is read at an index that "
    "follows from data, and a kernel could not show that such an index is out of range"
)
UNDESCRIBED = (
    "computed without groups of warps: the machine's own copies (TMA) read tensors whose rows are dense and "
    "begin at multiples of 16 bytes, at positions below 2**31"
)


class Forward(Kernel):
    """`triton.forward`. The forward pass is one Triton kernel. The backward pass is two, and one more for
    each floating-point tensor that scores read at both a query and a key. For very wide heads, and where a
    derivative cannot be emitted, `cpu.tiled` computes the backward pass in blocks of plain PyTorch
    operations.

    `cpu.tiled` also computes calls with nothing to compute, and programs that read tensors of dtypes that
    kernels do not support (8- and 16-bit integers), or whole numbers and truth values at an index that
    follows from data: a kernel cannot show that such an index is out of range (`scalar/read_ranges.py`).

    Args:
        blocks: tile sizes; None: chosen for the widths, the dtype and the GPU.
    """

    name = "triton.forward"

    def __init__(self, blocks: Blocks | None = None) -> None:
        self._blocks = blocks
        self._otherwise = Tiled()
        self._plans: KeptPlans[Plan | None] = KeptPlans()
        self._backward_plans: KeptPlans[BackwardPlan | None] = KeptPlans()

    def refuse(self, program: ScoreProgram, operands: Operands) -> str | None:
        q = operands[0]
        reason = gpu.no_device(q)
        if reason is not None:
            return reason
        if q.dtype is torch.bfloat16 and gpu.is_interpreted():
            return "the interpreter of Triton computes products of bfloat16 wrongly"
        return self._unserved(program, operands)

    def _unserved(self, program: ScoreProgram, operands: Operands) -> str | None:
        """Why no kernel can be emitted, on any device, or None."""
        q, _, v = operands
        if q.dtype not in DTYPES:
            return f"no dtype {q.dtype}; there are {', '.join(DTYPES.values())}"
        if max(q.shape[3], v.shape[3]) > WIDEST:
            return f"heads wider than {WIDEST}"
        return unsupported(program)

    def forward(self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes) -> Results:
        key = key_of(program, operands, reads, sizes)
        plan = self._plans.get(key, lambda: self._plan(program, operands, reads, sizes))
        if plan is None:
            return self._otherwise.forward(program, operands, reads, sizes)
        require_in_range(program, operands, reads, sizes)
        return attempts.run(
            plan, operands[0].device,
            lambda plan: launch_forward(plan, operands, reads, sizes),
            lambda: self._otherwise.forward(program, operands, reads, sizes),
        )  # fmt: skip

    def backward(
        self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes,
        results: Results, grads: Results,
    ) -> list[Tensor | None]:  # fmt: skip
        """By kernels; calls that these do not support by blocks of plain PyTorch."""
        key = key_of(program, operands, reads, sizes, gradients=True)
        found = self._backward_plans.get(key, lambda: self._plan_backward(program, operands, reads, sizes))

        def otherwise() -> list[Tensor | None]:
            return self._otherwise.backward(program, operands, reads, sizes, results, grads)

        if found is None:
            attempts.note(program, "its gradients are computed by PyTorch's operations, in blocks")
            return otherwise()
        return attempts.run(
            found, operands[0].device,
            lambda plan: differentiate(plan, operands, reads, sizes, results, grads),
            otherwise,
        )  # fmt: skip

    def _chosen(self, program: ScoreProgram, operands: Operands) -> Blocks | None:
        """The forward kernel's blocks, if they do not follow from what was measured, or from rules."""
        return self._blocks

    def _plan(self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes) -> Plan | None:
        """The plan of a call; None for one that is left to `cpu.tiled`. Raises ValueError: no kernel serves
        the call, or a tensor that it reads is too short."""
        reason = self.refuse(program, operands)
        if reason is not None:
            raise ValueError(f"{self.name} does not serve this attention: {reason}.")
        if self._is_left(program, operands, reads):
            for number in reads_by_data(program):
                if not reads[number].is_floating_point():
                    attempts.note(program, UNCHECKED.format(number))
            return None
        _check_reads(program, operands[0], operands[1], reads)
        return plan_forward(program, operands, reads, sizes, self._chosen(program, operands))

    @staticmethod
    def _is_left(program: ScoreProgram, operands: Operands, reads: Reads) -> bool:
        """Whether a call is left to `cpu.tiled`."""
        q, k, v = operands
        nothing = min(*q.shape, *k.shape, v.shape[3]) == 0
        return nothing or not all(is_served(program, number, reads[number].dtype) for number in program.reads)

    def source(self, program: ScoreProgram, operands: Operands, reads: Reads) -> str:
        """The source of the forward kernel's module. Emitting it needs neither a GPU nor Triton."""
        if self._unserved(program, operands) is not None or self._is_left(program, operands, reads):
            return ""
        return emit(plan_forward(program, operands, reads, (), self._chosen(program, operands))).source

    def remarks(self, program: ScoreProgram) -> tuple[str, ...]:
        return attempts.remarks(program)

    def _plan_backward(
        self, program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes
    ) -> BackwardPlan | None:
        q, _, v = operands
        if self.refuse(program, operands) is not None or max(q.shape[3], v.shape[3]) > rules.WIDEST_BACKWARD:
            return None
        if self._is_left(program, operands, reads):
            return None
        has_reads = any(reads[number].is_floating_point() for number in program.reads)
        line = tuned.key_of_call("backward", program, operands)
        blocks = self._blocks if self._blocks and not self._blocks.groups else None
        blocks = blocks or tuned.find(gpu.name_of(q.device), line, q.shape[2])
        blocks = blocks or blocks_of_gradients(program, operands, has_reads)
        plan = plan_call(program, operands, reads, sizes, blocks)
        of_operands, of_reads = wanted_gradients(operands, reads)
        wanted = tuple(n for n in of_reads if n in program.reads)
        fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
        found = BackwardPlan(**fields, wanted=wanted, operands=of_operands)
        try:
            emit_backward(found)
        except UnsupportedError:
            return None
        return self._in_the_end(found, operands)

    def _in_the_end(self, plan: BackwardPlan, operands: Operands) -> BackwardPlan:
        """The plan, or another that computes the same."""
        return plan


class Grouped(Forward):
    """`gluon.forward`: forward and backward pass by groups of warps (`kernels/gluon_forward.py`,
    `gluon_backward.py`), on GPUs that have them. What these do not serve `triton.forward` computes, and the
    report says why.

    Args:
        ordered: whether the same call gives the same gradients. Without order (`gluon_unordered.forward`)
            the kernel waits for no other.
    """

    def __init__(self, blocks: Blocks | None = None, ordered: bool = True) -> None:
        super().__init__(blocks)
        self._ordered = ordered
        self.name = "gluon.forward" if ordered else "gluon_unordered.forward"

    def refuse(self, program: ScoreProgram, operands: Operands) -> str | None:
        reason = rules.no_groups(operands, gpu.capability(operands[0].device))
        return reason or super().refuse(program, operands)

    def _chosen(self, program: ScoreProgram, operands: Operands) -> Blocks | None:
        return self._blocks or rules.blocks_of_groups(program, operands[0].shape[3], operands[2].shape[3])

    def _in_the_end(self, plan: BackwardPlan, operands: Operands) -> BackwardPlan:
        reason = rules.no_backward_groups(plan)
        if reason is not None:
            attempts.note(plan.program, f"its gradients are computed without groups of warps: {reason}")
            return plan
        return dataclasses.replace(plan, blocks=rules.BACKWARD_OF_GROUPS, ordered=self._ordered)


def launch_forward(plan: Plan, operands: Operands, reads: Reads, sizes: Sizes) -> Results:
    """The output and the log-sum-exp, by the plan's kernel."""
    q, k, v = operands
    copied = operands if plan.blocks.groups else (k, v) if plan.blocks.ahead else ()
    if copied and (plan.wide or not all(map(is_describable, copied))):
        if plan.blocks.groups:
            attempts.note(plan.program, UNDESCRIBED)
        plan = by_addresses(plan, blocks_by_rule(plan.program, operands))
    B, Hq, Sq, _ = q.shape
    out = empty_result(v, (B, Hq, Sq, v.shape[3]))
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    arguments: list[Any] = [q, k, v, out, lse, Hq, Sq, k.shape[2]]
    if plan.blocks.groups:
        arguments[:3] = store.described_for_groups(plan, operands)
    else:
        if plan.blocks.ahead:
            arguments[1:3] = (described(t, plan.blocks.k) for t in (k, v))
        arguments += [stride for tensor in operands for stride in tensor.stride()]
    arguments += _lists(plan, operands, reads, sizes)
    arguments += [*store.read_arguments(plan, reads), *sizes[: plan.program.sizes]]
    programs = -(-Sq // plan.blocks.q) * B * Hq
    launch_kernel(load(plan), (programs,), arguments, store.launch_options(plan), q.device)
    return out, lse


@functools.cache
def by_addresses(plan: Plan, blocks: Blocks) -> Plan:
    """The plan with a kernel that reads keys and values by their addresses, wherever they lie. `blocks`: for
    a plan with groups of warps."""
    chosen = blocks if plan.blocks.groups else plan.blocks
    return dataclasses.replace(plan, blocks=dataclasses.replace(chosen, ahead=False))


def plan_forward(
    program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes, blocks: Blocks | None = None
) -> Plan:
    """The plan of the forward kernel that serves one call."""
    q, line = operands[0], tuned.key_of_call("forward", program, operands)
    found = blocks or tuned.find(gpu.name_of(q.device), line, q.shape[2])
    return plan_call(program, operands, reads, sizes, found)


def blocks_by_rule(program: ScoreProgram, operands: Operands) -> Blocks:
    """Block sizes by rule, without measurements."""
    q, _, v = operands
    shared, generation = gpu.shared_memory(q.device), gpu.capability(q.device)
    return rules.blocks_for(program, q.shape[3], v.shape[3], q.dtype, q.shape[2], shared, generation)


def blocks_of_gradients(program: ScoreProgram, operands: Operands, has_reads: bool) -> Blocks:
    """The same of the backward kernels."""
    q, _, v = operands
    width, about = max(q.shape[3], v.shape[3]), (gpu.shared_memory(q.device), has_reads, P.is_linear(program))
    return rules.backward_blocks(width, q.dtype, *about, gpu.capability(q.device))


def plan_call(
    program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes, blocks: Blocks | None = None
) -> Plan:
    """What the kernels that serve one call have in common."""
    q, k, v = operands
    return Plan(
        program, q.dtype, q.shape[3], v.shape[3], q.shape[1] // k.shape[1],
        tuple(Read(n, rank, P.READS[reads[n].dtype], is_wide(reads[n])) for n, rank in program.reads.items()),
        blocks or blocks_by_rule(program, operands),
        wide=max(*q.shape[:3], k.shape[2], *map(abs, sizes[: program.sizes])) >= SMALL,
        listed=visits.are_listed(program, operands), exact=gpu.is_exact(q),
    )  # fmt: skip


load = loading(emit, getattr)
"""A plan's kernel, a Triton function."""
load_backward_by_groups = loading(emit_backward_by_groups, getattr)
load_backward = loading(emit_backward, lambda module, _: module)
"""The module of a plan's backward kernels."""


def is_served(program: ScoreProgram, number: int, dtype: torch.dtype) -> bool:
    """Whether kernels can read elements of that dtype as the program reads `r<number>`."""
    return dtype in P.READS and (dtype.is_floating_point or number not in reads_by_data(program))


@functools.lru_cache(maxsize=1024)
def unsupported(program: ScoreProgram) -> str | None:
    """What the emitter cannot write in a program, or None. Dtypes of reads are not known yet, so the program
    must be writable both for integers and for real numbers."""
    try:
        for kind in ("float", "int"):
            reads = tuple(Read(number, rank, kind) for number, rank in program.reads.items())
            emit(Plan(program, torch.float16, 64, 64, 1, reads, Blocks(64, 64)))
    except UnsupportedError as problem:
        return f"not written yet: {problem}"
    return None


def _check_reads(program: ScoreProgram, q: Tensor, k: Tensor, reads: Reads) -> None:
    """Raise ValueError where a tensor that is read by a plain index is too short."""
    extents = dict(zip("bhqk", (*q.shape[:3], k.shape[2]), strict=True))
    for node, axis, index in program.places:
        needed = extents[index.value] if index.op == "var" else index.value + 1 if index.op == "const" else 0
        if reads[node.value].shape[axis] < needed:
            raise ValueError(
                f"attention: `{node}` needs {needed} elements along axis {axis}, "
                f"r{node.value} has shape {tuple(reads[node.value].shape)}."
            )


def differentiate(
    plan: BackwardPlan, operands: Operands, reads: Reads, sizes: Sizes, results: Results, grads: Results
) -> list[Tensor | None]:
    """Gradients of q, k, v and of every floating-point read (zeros where none is wanted)."""
    (q, k, v), (out, lse), (grad, grad_lse) = operands, results, grads
    B, Hq, Sq, Skv = *q.shape[:3], k.shape[2]
    unseen = torch.zeros((B, k.shape[1]), dtype=torch.float32, device=q.device)
    found = [
        (torch.empty if is_wanted else torch.zeros)(t.shape, dtype=t.dtype, device=t.device)
        for t, is_wanted in zip(operands, plan.operands, strict=True)
    ]
    summed = read_gradients(plan.program, plan.wanted)
    totals = Totals(plan.wanted, reads, sizes, (B, Hq, Sq, Skv), lse)
    sums = totals.places(summed)
    delta = torch.empty((B, Hq, Sq), dtype=torch.float32, device=q.device)
    rows = [lse.contiguous(), grad_lse.contiguous(), delta]
    if not P.stays_trusted(plan.program):
        rows += [torch.empty((B, Hq, Sq), dtype=torch.float32, device=q.device) for _ in range(2)]
    first: list[Any] = [q, k, v, grad, out, *rows, unseen, *found, Hq, Sq, Skv]
    first += [stride for tensor in (q, k, v, grad, out) for stride in tensor.stride()]
    last = [*store.read_arguments(plan, reads), *sizes[: plan.program.sizes]]
    rest = prepares(plan, operands) if plan.blocks.groups else plan
    lists = [one for turned in (False, True) for one in _lists(rest, operands, reads, sizes, turned)]
    kernels, blocks, options = load_backward(rest), rest.blocks, store.launch_options(rest)
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
    if plan.blocks.groups:
        turned = _lists(plan, operands, reads, sizes, turned=True)
        found[0] = _by_groups(plan, operands, grad, rows, unseen, found, turned, last)
    elif any(plan.operands[1:]) or any(s.kind == COLUMNS for s in summed):
        run(OF_KEYS, (-(-Skv // blocks.q) * B * k.shape[1],), sums)  # rows of tiles are keys
    for number, one in enumerate(summed):
        totals.add(one, sums[number], blocks.q, functools.partial(of_pairs, number))
    if plan.program.sink is not None:
        totals.add_sink(plan.program, _exactly(plan, *rows[3:]) if rows[3:] else lse, delta)
    return [*found, *totals.results()]


def _lists(
    plan: Plan, operands: Operands, reads: Reads, sizes: Sizes, turned: bool = False
) -> Sequence[Any]:  # fmt: skip
    """Lists of the tiles that blocks of queries visit, as arguments; `turned`: that blocks of keys do."""
    if not plan.listed:
        return []
    own, other = plan.blocks.q, plan.blocks.k
    tile = dataclasses.replace(plan.blocks, q=other, k=own) if turned else plan.blocks
    return visits.find(plan.program, tile, operands, reads, sizes, turned)


def _ranks(tiles: Tensor, counts: Tensor, keys: int, blocks: Blocks) -> Tensor:
    """For each block of keys and tile of queries that it visits, how many blocks of keys before it do."""
    there = torch.arange(tiles.shape[1], device=tiles.device) < counts[:, 2:]
    visited = torch.zeros_like(tiles).scatter_(1, tiles.long(), there.to(tiles.dtype))
    visited = visited.view(-1, -(-keys // blocks.q), tiles.shape[1])
    return visited.cumsum(1, dtype=torch.int32) - visited


def prepares(plan: BackwardPlan, operands: Operands) -> BackwardPlan:
    """The plan whose first kernel makes what that of groups of warps needs of rows, and no gradients."""
    blocks = blocks_of_gradients(plan.program, operands, has_reads=False)
    return dataclasses.replace(plan, blocks=blocks, operands=(False, False, False))


def _by_groups(
    plan: BackwardPlan, operands: Operands, grad: Tensor, rows: Sequence[Tensor], unseen: Tensor,
    found: Sequence[Tensor], lists: Sequence[Any], last: Sequence[Any],
) -> Tensor:  # fmt: skip
    """Gradients of keys and values, into `found`, by groups of warps; and those of queries, which are added
    up in float32."""
    (q, k, v), blocks, (lse, _, delta) = operands, plan.blocks, rows[:3]
    B, Hq, Sq, D = q.shape
    sums = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    turns = torch.zeros((B, Hq, -(-Sq // blocks.k)), dtype=torch.int32, device=q.device)
    of_rows = [delta, lse] if P.stays_trusted(plan.program) else [delta, *rows[3:]]
    tiles = [(q, blocks.k), (k, blocks.q // 2), (v, blocks.q // 2), (grad, blocks.k)]
    given = [
        *(store.described_to_gluon(_copyable(t), [1, 1, n, t.shape[3]]) for t, n in tiles),
        *(store.described_to_gluon(_copyable(t.view(-1)), [blocks.k]) for t in of_rows),
        store.described_to_gluon(sums, [1, 1, blocks.k, D]), *([turns] if plan.ordered else []),
        *([_ranks(lists[0], lists[1], k.shape[2], blocks)] if plan.ordered and lists else []),
        *([unseen] if weight_multiple(plan.program).keeps_nan else []), *found[1:],
        Hq, Sq, k.shape[2], *lists, *last,
    ]  # fmt: skip
    programs = -(-k.shape[2] // blocks.q) * k.shape[0] * k.shape[1]
    launch_kernel(load_backward_by_groups(plan), (programs,), given, store.launch_options(plan), q.device)
    scale = plan.program.scale if plan.is_linear else None
    return (sums if scale is None else sums.mul_(scale)).to(q.dtype)


def _copyable(tensor: Tensor) -> Tensor:
    """The tensor, where the machine's own copies can read it; else a copy."""
    return tensor if is_describable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _exactly(plan: BackwardPlan, tops: Tensor, totals: Tensor) -> Tensor:
    """The log-sum-exp of rows in float64, from `tops` and `totals`: float32 has too few digits."""
    scale = plan.program.scale or 1.0 if plan.is_linear else 1.0
    return tops.double() * scale + totals.double() * math.log(2)
