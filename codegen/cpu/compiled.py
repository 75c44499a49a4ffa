"""Attention compiled from its score program: one pass over keys and values, as flash attention does.

The first call that is large enough has the program written as C (`source.py`), compiled and loaded
(`toolchain.py`); smaller ones run PyTorch's operations, so that nobody waits for a compiler in vain.
Scores are held in float32. What the C is not written for when a call comes (sizes beyond 28 bits, reads
of odd dtypes, an index out of range) is computed by the other CPU kernels, and logged once.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from attngraph.codegen.cpu import soft, source, team, toolchain
from attngraph.codegen.cpu.flash import Flash
from attngraph.codegen.cpu.source import MOST_NUMBERS, MOST_READS, Plan, Source
from attngraph.codegen.cpu.terms import SMALL
from attngraph.codegen.cpu.tiled import Tiled
from attngraph.codegen.unsupported import UnsupportedError
from attngraph.ir import evaluate
from attngraph.ir.kernels import Kernel, Operands
from attngraph.ir.score import ScoreProgram
from attngraph.meaning import tiles
from attngraph.meaning.tiles import Cut, Grid

BLOCK_Q, BLOCK_K = 48, 64
"""Queries and keys of a tile, as in c/base.h."""
WORTH = 1 << 20
"""Scores of a call from which on compiling pays: PyTorch needs about 10 ms for them, C about 1 ms."""
PACKED = 1 << 20
"""Bytes of keys and values that are laid out for one of two rounds, about: one head's at least, and
enough to keep all threads busy."""
_log = logging.getLogger("attngraph.codegen.cpu")


class _Read(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64 * 6), ("size", ctypes.c_int64 * 6))


class Call(ctypes.Structure):
    """`Call` of c/base.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse")),
        *((f"{name}_stride", ctypes.c_int64 * 3) for name in ("q", "k", "v", "out")),
        *((name, ctypes.c_int64) for name in ("B", "H", "Hkv", "Sq", "Sk", "D", "Dv", "wide")),
        ("map", ctypes.c_void_p * 2), ("map_stride", (ctypes.c_int64 * 3) * 2),
        ("hidden", ctypes.c_double), ("scale", ctypes.c_float),
        ("together", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("k_packed", "v_packed", "scratch")),
        ("scratch_size", ctypes.c_int64), ("rounds", ctypes.c_void_p),
        ("slot", ctypes.c_int64), ("bad", ctypes.c_int64),
        ("whole", ctypes.c_int64 * MOST_NUMBERS), ("real", ctypes.c_float * MOST_NUMBERS),
        ("read", _Read * MOST_READS),
        *((name, ctypes.c_void_p) for name in ("table", "starts", "first", "held")),
        *((name, ctypes.c_int64) for name in ("columns", "page", "window")),
        ("k_new", ctypes.c_void_p), ("v_new", ctypes.c_void_p),
        ("k_new_stride", ctypes.c_int64 * 2), ("v_new_stride", ctypes.c_int64 * 2),
        *((name, ctypes.c_int64) for name in ("step", "member", "parts")),
        ("partial", ctypes.c_void_p), ("arrived", ctypes.c_void_p),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Library:
    """A compiled plan: its functions, what it needs to be told, and the seconds spent compiling it (0
    where it came from the cache)."""

    code: ctypes.CDLL
    source: Source
    lanes: int
    seconds: float


_libraries: dict[Plan, Library | str] = {}
"""What was made of each plan: a library, or why there is none."""
_lock = threading.Lock()


def library(plan: Plan) -> Library | str:
    """The library of a plan, compiled if there is none yet, or why there is none (logged once)."""
    with _lock:
        found = _libraries.get(plan)
        if found is None:
            try:
                text = source.write(plan)
                code, seconds = toolchain.build(text.text)
                lanes = ctypes.c_int.in_dll(code, "attngraph_lanes").value
                found = Library(code, text, lanes, seconds)
            except (UnsupportedError, toolchain.CompilerError) as error:
                found = str(error)
                _log.warning("not compiled, PyTorch's operations instead: %s\n%s", error, plan.program)
            _libraries[plan] = found
    return found


def compile_seconds(program: ScoreProgram) -> float:
    """Seconds spent in the C compiler for a program so far in this process."""
    plans = {p: made for p, made in _libraries.items() if p.program == program.without_scale}
    return sum(made.seconds for made in plans.values() if isinstance(made, Library))


class Compiled(Kernel):
    """`cpu.compiled`."""

    name = "cpu.compiled"

    def __init__(self) -> None:
        self._flash, self._tiled = Flash(), Tiled()

    def refuse(self, program: ScoreProgram, operands: Operands) -> str | None:
        q = operands[0]
        if q.device.type != "cpu":
            return f"runs on the CPU, the tensors are on {q.device.type}"
        if q.dtype not in source.ELEMENTS:
            return f"no dtype {q.dtype}"
        try:
            toolchain.compiler()
            most = max(program.reads, default=-1) + 1
            source.write(Plan(program.without_scale, q.dtype, (torch.float32,) * most))
        except (toolchain.CompilerError, UnsupportedError) as error:
            return str(error)
        return None

    def forward(
        self, program: ScoreProgram, operands: Operands, reads: Sequence[Tensor], sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        q, k, v = operands
        if q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] >= WORTH and v.shape[3] > 0:
            plan = Plan(program.without_scale, q.dtype, tuple(r.dtype for r in reads))
            found = library(plan)
            if isinstance(found, Library):
                results = Run(found, program, operands, reads, tuple(sizes)).forward()
                if results is not None:
                    return results
        return self._otherwise(program, operands).forward(program, operands, reads, sizes)

    def backward(
        self, program: ScoreProgram, operands: Operands, reads: Sequence[Tensor], sizes: Sequence[int],
        results: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor],
    ) -> list[Tensor | None]:  # fmt: skip
        kernel = self._otherwise(program, operands)
        return kernel.backward(program, operands, reads, sizes, results, grads)

    def source(self, program: ScoreProgram, operands: Operands, reads: Sequence[Tensor]) -> str:
        """The C of a call that is large enough to be compiled."""
        try:
            plan = Plan(program.without_scale, operands[0].dtype, tuple(r.dtype for r in reads))
            return source.write(plan).text if plan.dtype in source.ELEMENTS else ""
        except UnsupportedError:
            return ""

    def _otherwise(self, program: ScoreProgram, operands: Operands) -> Kernel:
        return self._flash if self._flash.refuse(program, operands) is None else self._tiled


class Run:
    """One call of a library."""

    def __init__(
        self, made: Library, program: ScoreProgram, operands: Operands, reads: Sequence[Tensor],
        sizes: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.made, self.reads, self.sizes = made, reads, sizes
        self.scale = 1.0 if program.scale is None else program.scale
        self.program = program.without_scale
        self.q, self.k, self.v = (t if t.stride(-1) == 1 else t.contiguous() for t in operands)
        self.call = Call()
        self.held: list[Tensor] = []

    def forward(self) -> tuple[Tensor, Tensor] | None:
        """The output and the log-sum-exp, or None where the library cannot serve these arguments."""
        if not (self.set_numbers() and self.set_reads()):
            return None
        q, k, v, call = self.q, self.k, self.v, self.call
        b, h, sq, d = q.shape
        hkv, sk, dv = k.shape[1], k.shape[2], v.shape[3]
        out = v.new_empty_strided((b, h, sq, dv), (sq * h * dv, dv, h * dv, 1))
        lse = torch.empty(q.shape[:3], dtype=torch.float32)
        for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
            setattr(call, name, tensor.data_ptr())
            setattr(call, f"{name}_stride", (ctypes.c_int64 * 3)(*tensor.stride()[:3]))
        call.lse = lse.data_ptr()
        call.B, call.H, call.Hkv, call.Sq, call.Sk, call.D, call.Dv = b, h, hkv, sq, sk, d, dv
        call.wide = -(-dv // self.made.lanes) * self.made.lanes
        call.scale = self.scale
        self._set_maps()
        pairs, length, items = b * hkv, -(-sk // BLOCK_K) * BLOCK_K, h // hkv * -(-sq // BLOCK_Q)
        members = max(1, min(torch.get_num_threads(), pairs * items))
        enough = max(PACKED // (4 * length * (d + call.wide)), -(-4 * members // items))
        call.together = together = max(1, min(pairs, enough))
        buffers = min(2, -(-pairs // together))
        call.k_packed = self.floats(buffers * together * length * d)
        call.v_packed = self.floats(buffers * together * length * call.wide)
        self.held.append(torch.zeros(-(-pairs // together), 4, dtype=torch.int64))
        call.rounds = self.held[-1].data_ptr()
        call.scratch_size = BLOCK_Q * (d + call.wide) + 64
        call.scratch = self.floats(members * call.scratch_size)
        team.run(self.made.code.attngraph_attend, call, members)
        return None if call.bad else (out, lse)

    def floats(self, count: int) -> int:
        self.held.append(torch.empty(count, dtype=torch.float32))
        return self.held[-1].data_ptr()

    def set_numbers(self) -> bool:
        """Values of the expressions of sizes; False if one does not fit the C that was written."""
        one = evaluate.Tile((0, 1), (0, 1), (0, 1), (0, 1))
        env = evaluate.Environment(one, (), self.sizes, torch.float32, torch.device("cpu"))
        if max(*self.q.shape, *self.k.shape) >= SMALL:
            return False
        for place, (node, kind) in enumerate(self.made.source.numbers):
            value = evaluate.evaluate(node, env, {})
            assert isinstance(value, (int, float))
            is_float = isinstance(value, float)
            if is_float != (kind == "float") or (node in self.made.source.divisors and value < 1):
                return False
            if is_float:
                self.call.real[place] = value
            elif abs(value) >= SMALL:
                return False
            else:
                self.call.whole[place] = int(value)
        return True

    def set_reads(self) -> bool:
        """Where the read tensors are; False for one whose places do not fit 32 bits."""
        for number in self.program.reads:
            read, entry = self.reads[number], self.call.read[number]
            if read.ndim > 6 or read.numel() == 0:
                return False
            last = sum((n - 1) * stride for n, stride in zip(read.shape, read.stride(), strict=True))
            if last >= 1 << 31 or min(read.stride(), default=0) < 0:
                return False
            entry.data = read.data_ptr()
            for axis in range(read.ndim):
                entry.stride[axis], entry.size[axis] = read.stride(axis), read.shape[axis]
        return True

    def _set_maps(self) -> None:
        """Maps of blocks: `map[1]` without what is masked, `map[0]` also without what finite fills hide."""
        if not self.program.keeps:
            return
        reads = self.reads if tiles.reads_data(self.program) else ()
        (b, h, sq, _), sk = self.q.shape, self.k.shape[2]
        cuts = (Cut(0, b, 1), Cut(0, h, 1), Cut(0, sq, BLOCK_Q), Cut(0, sk, BLOCK_K))
        find = functools.partial(tiles.block_map, self.program, Grid(*cuts, self.sizes, reads))
        maps: list[Tensor | None] = [None, find()]
        if soft.has_finite_fill(self.program):
            dot = soft.largest_score(self.program, self.scale, self.q, self.k, self.reads)
            self.call.hidden = tiles.hidden_below(self.program, dot, self.sizes)
            if not math.isinf(self.call.hidden):
                maps[0] = find(soft=True)
        for place, found in enumerate(maps):
            if found is not None:
                self.held.append(found)
                self.call.map[place] = found.data_ptr()
                for axis in range(3):
                    single = axis < 2 and found.shape[axis] == 1
                    self.call.map_stride[place][axis] = 0 if single else found.stride(axis)
