"""`triton.forward`: from a call of the attention op to a launched kernel.

Makes the plan of a call, has its source emitted, imported and compiled (once per plan), and launches
it: one program per block of queries of one head. Triton is imported when a kernel is first wanted, so
nothing here needs it to be installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.cpu.tiled import Tiled
from attngraph.codegen.triton import store
from attngraph.codegen.triton.emit import emit
from attngraph.codegen.triton.emit_backward import OF_KEYS, OF_QUERIES, emit_backward
from attngraph.codegen.triton.plan import (
    DTYPES,
    READS,
    SMALL,
    WIDEST,
    WIDEST_BACKWARD,
    Blocks,
    Plan,
    Read,
    UnsupportedError,
    backward_blocks,
)
from attngraph.codegen.triton.plan import blocks_for as choose_blocks
from attngraph.ir import expr as E
from attngraph.ir.kernels import Kernel, Operands
from attngraph.ir.score import ScoreProgram


class Forward(Kernel):
    """`triton.forward`. A program whose forward pass is one Triton kernel and whose backward pass is two.
    Where scores read floating tensors, whose gradients are wanted too, where heads are very wide and where
    a derivative is not written, the backward pass is the blocks of plain PyTorch operations of `cpu.tiled`.

    Calls with nothing to compute, and programs that read tensors of a dtype that kernels do not
    compute with (8- and 16-bit integers), are served by `cpu.tiled` too.

    Args:
        blocks: tile sizes; None: chosen for the widths, the dtype and the GPU.
    """

    name = "triton.forward"

    def __init__(self, blocks: Blocks | None = None) -> None:
        self._blocks = blocks
        self._otherwise = Tiled()

    def refuse(self, program: ScoreProgram, operands: Operands) -> str | None:
        q = operands[0]
        reason = no_device(q)
        if reason is not None:
            return reason
        if q.dtype is torch.bfloat16 and is_interpreted():
            return "the interpreter of Triton computes products of bfloat16 wrongly"
        return self._unserved(program, operands)

    def _unserved(self, program: ScoreProgram, operands: Operands) -> str | None:
        """Why no kernel can be written, wherever it would run, or None."""
        q, _, v = operands
        if q.dtype not in DTYPES:
            return f"no dtype {q.dtype}; there are {', '.join(DTYPES.values())}"
        if max(q.shape[3], v.shape[3]) > WIDEST:
            return f"heads wider than {WIDEST}"
        return unsupported(program)

    def forward(
        self, program: ScoreProgram, operands: Operands, reads: Sequence[Tensor], sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        reason = self.refuse(program, operands)
        if reason is not None:
            raise ValueError(f"{self.name} does not serve this attention: {reason}.")
        q, k, v = operands
        if self._is_left(program, operands, reads):
            return self._otherwise.forward(program, operands, reads, sizes)
        _check_reads(program, q, k, reads)
        plan = plan_call(program, operands, reads, sizes, self._blocks)
        # The heads of a token side by side, as the op returns them.
        B, Hq, Sq, _ = q.shape
        out = torch.empty((B, Sq, Hq, v.shape[3]), dtype=v.dtype, device=q.device).transpose(1, 2)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        arguments = [q, k, v, out, lse, Hq, Sq, k.shape[2]]
        arguments += [stride for tensor in operands for stride in tensor.stride()]
        arguments += read_arguments(plan, reads)
        arguments += sizes[: program.sizes]
        programs = -(-Sq // plan.blocks.q) * B * Hq
        with torch.cuda.device(q.device) if q.device.type == "cuda" else contextlib.nullcontext():
            load(plan)[(programs,)](*arguments, **launch_options(plan))
        return out, lse

    def backward(
        self, program: ScoreProgram, operands: Operands, reads: Sequence[Tensor], sizes: Sequence[int],
        results: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor],
    ) -> list[Tensor | None]:  # fmt: skip
        """Two kernels (`emit_backward.py`); block by block in plain PyTorch what they do not serve."""
        plan = self._plan_backward(program, operands, reads, sizes)
        if plan is None:
            return self._otherwise.backward(program, operands, reads, sizes, results, grads)
        (q, k, v), (out, lse), (grad, grad_lse) = operands, results, grads
        delta = (grad.float() * out.float()).sum(-1) - grad_lse
        sees = lse.isfinite().all(-1).view(k.shape[0], k.shape[1], -1).all(-1)
        unseen = torch.where(sees, 0.0, math.nan).float()
        found = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in operands]
        arguments: list[Any] = [q, k, v, grad, lse.contiguous(), delta.contiguous(), unseen, *found]
        arguments += [q.shape[1], q.shape[2], k.shape[2]]
        arguments += [stride for tensor in (q, k, v, grad) for stride in tensor.stride()]
        arguments += [*read_arguments(plan, reads), *sizes[: program.sizes]]
        of_queries, of_keys = load_backward(plan)
        tall, wide = -(-q.shape[2] // plan.blocks.q), -(-k.shape[2] // plan.blocks.k)
        with torch.cuda.device(q.device) if q.device.type == "cuda" else contextlib.nullcontext():
            of_queries[(tall * q.shape[0] * q.shape[1],)](*arguments, **launch_options(plan))
            of_keys[(wide * k.shape[0] * k.shape[1],)](*arguments, **launch_options(plan))
        return [*found, *(None for _ in reads)]

    @staticmethod
    def _is_left(program: ScoreProgram, operands: Operands, reads: Sequence[Tensor]) -> bool:
        """Whether a call is left to `cpu.tiled`: nothing to compute, or reads of a dtype of no kernel."""
        q, k, v = operands
        nothing = min(*q.shape, *k.shape, v.shape[3]) == 0
        return nothing or any(reads[number].dtype not in READS for number in program.reads)

    def source(self, program: ScoreProgram, operands: Operands, reads: Sequence[Tensor]) -> str:
        """The forward kernel's module. Writing it needs neither a GPU nor Triton."""
        if self._unserved(program, operands) is not None or self._is_left(program, operands, reads):
            return ""
        return emit(plan_call(program, operands, reads, (), self._blocks)).source

    def _plan_backward(
        self, program: ScoreProgram, operands: Operands, reads: Sequence[Tensor], sizes: Sequence[int]
    ) -> Plan | None:
        q, _, v = operands
        if self.refuse(program, operands) is not None or max(q.shape[3], v.shape[3]) > WIDEST_BACKWARD:
            return None
        if self._is_left(program, operands, reads) or any(r.is_floating_point() for r in reads):
            return None
        blocks = self._blocks or backward_blocks(max(q.shape[3], v.shape[3]), q.dtype)
        plan = plan_call(program, operands, reads, sizes, blocks)
        return plan if has_backward(plan) else None


def read_arguments(plan: Plan, reads: Sequence[Tensor]) -> list[Any]:
    """What a kernel is told of the tensors that its program reads."""
    found: list[Any] = []
    for read in plan.reads:
        tensor = reads[read.number]
        # Triton has no pointers to single bits.
        found.append(tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor)
        found += tensor.stride()
        found += [tensor.shape[axis] for axis in plan.guarded_axes(read.number)]
    return found


def launch_options(plan: Plan) -> dict[str, Any]:
    """Options of a compilation. Multiplications and additions may fuse, as they do in PyTorch's own
    kernels."""
    return {"num_warps": plan.blocks.warps, "num_stages": plan.blocks.stages, "enable_fp_fusion": True}


def plan_call(
    program: ScoreProgram, operands: Operands, reads: Sequence[Tensor], sizes: Sequence[int],
    blocks: Blocks | None = None,
) -> Plan:  # fmt: skip
    """The plan of the kernel that serves one call."""
    q, k, v = operands
    widths = (q.shape[3], v.shape[3])
    return Plan(
        program, q.dtype, *widths, q.shape[1] // k.shape[1],
        tuple(Read(n, rank, READS[reads[n].dtype], is_wide(reads[n])) for n, rank in program.reads.items()),
        blocks or choose_blocks(program, *widths, q.dtype, q.shape[2], shared_memory(q.device)),
        wide=max(*q.shape[:3], k.shape[2], *map(abs, sizes[: program.sizes])) >= SMALL,
    )  # fmt: skip


def is_wide(tensor: Tensor) -> bool:
    """Whether its elements lie so far apart that offsets need 64 bits."""
    return sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) >= 1 << 31


@functools.lru_cache(maxsize=512)
def load(plan: Plan) -> Any:
    """The plan's kernel, a function of Triton's, imported from its file."""
    kernel = emit(plan)
    version = importlib.import_module("triton").__version__
    return getattr(store.import_source(kernel.source, kernel.name, version), kernel.name)


@functools.lru_cache(maxsize=512)
def load_backward(plan: Plan) -> tuple[Any, Any]:
    """The plan's two backward kernels, imported from their file."""
    kernel = emit_backward(plan)
    version = importlib.import_module("triton").__version__
    module = store.import_source(kernel.source, kernel.name, version)
    return getattr(module, OF_QUERIES), getattr(module, OF_KEYS)


@functools.lru_cache(maxsize=1024)
def has_backward(plan: Plan) -> bool:
    """Whether the backward kernels of a plan can be written."""
    try:
        emit_backward(plan)
    except UnsupportedError:
        return False
    return True


@functools.lru_cache(maxsize=1024)
def unsupported(program: ScoreProgram) -> str | None:
    """What the emitter cannot write in a program, or None. Tensors are not at hand yet, so both what
    integers and what real numbers would make of it must be writable."""
    try:
        for kind in ("float", "int"):
            reads = tuple(Read(number, rank, kind) for number, rank in program.reads.items())
            emit(Plan(program, torch.float16, 64, 64, 1, reads, Blocks(64, 64)))
    except UnsupportedError as problem:
        return f"not written yet: {problem}"
    return None


@functools.cache
def is_interpreted() -> bool:
    """Whether Triton was imported with TRITON_INTERPRET=1, which makes every kernel plain Python."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return False
    language = importlib.import_module("triton.language")
    return not isinstance(language.sum, importlib.import_module("triton.runtime.jit").JITFunction)


@functools.cache
def _no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        importlib.import_module("triton.language")
    except Exception as problem:  # a broken installation fails in many ways
        return f"triton cannot be imported ({type(problem).__name__}: {problem})"
    return None


def no_device(q: Tensor) -> str | None:
    """Why no kernel can run where the tensor is, or None."""
    kind = q.device.type
    if kind != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"runs on a GPU, the tensors are on {kind} (TRITON_INTERPRET=1 runs it anywhere, slowly)"
    reason = _no_triton()
    if reason is not None:
        return reason
    if kind != "cuda":
        return None if is_interpreted() else "TRITON_INTERPRET=1 was set after triton had been imported"
    if torch.version.hip is None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(q.device)
        if major < 8:
            return f"needs compute capability 8.0, this GPU has {major}.{minor}"
    return None


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 65536
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or 65536)


def _check_reads(program: ScoreProgram, q: Tensor, k: Tensor, reads: Sequence[Tensor]) -> None:
    """Raise ValueError where a read by a plain index does not find a tensor long enough."""
    extents = dict(zip("bhqk", (*q.shape[:3], k.shape[2]), strict=True))
    for node in (n for e in program.expressions for n in E.walk(e) if n.op == "read"):
        for axis, (arg, extent) in enumerate(zip(node.args, reads[node.value].shape, strict=True)):
            needed = extents[arg.value] if arg.op == "var" else arg.value + 1 if arg.op == "const" else 0
            if extent < needed:
                raise ValueError(
                    f"attention: `{node}` needs {needed} elements along axis {axis}, "
                    f"r{node.value} has shape {tuple(reads[node.value].shape)}."
                )
