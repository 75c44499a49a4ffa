"""From a plan to a loaded library, once a process, and the arguments of a call, filled from tensors."""

import ctypes
import dataclasses
import logging
import math
import threading

import torch
from torch import Tensor

from attngraph.codegen.cpu import soft, source, toolchain
from attngraph.codegen.cpu.native import numbers, struct
from attngraph.codegen.cpu.source import Plan, Source
from attngraph.codegen.remarks import UnsupportedError
from attngraph.codegen.scalar.form import SMALL
from attngraph.ir.language import ScoreProgram, evaluate
from attngraph.ir.ops.kernels import Operands, Reads
from attngraph.meaning.masks import tiles
from attngraph.meaning.masks.score_bounds import hidden_below
from attngraph.meaning.masks.tiles import Cut, Grid

Call, BLOCK_Q, BLOCK_K = struct("base.h", "Call"), numbers("base.h")["BLOCK_Q"], numbers("base.h")["BLOCK_K"]
"""The arguments of a call; queries and keys of a tile."""
_log = logging.getLogger("attngraph.codegen.cpu")


@dataclasses.dataclass(frozen=True)
class Library:
    """A compiled plan: its functions, the source (which lists the arguments it needs), and the seconds spent
    compiling it (0 where it came from the cache)."""

    code: ctypes.CDLL
    source: Source
    lanes: int
    seconds: float


_libraries: dict[Plan, Library | str] = {}
"""The library of each plan, or the reason why there is none."""
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


def is_loaded(plan: Plan) -> bool:
    """Whether the library of a plan is there already: then calls of every size are faster by it."""
    return isinstance(_libraries.get(plan), Library)


def compile_seconds(program: ScoreProgram) -> float:
    """Seconds spent in the C compiler for a program so far in this process."""
    plans = {p: made for p, made in _libraries.items() if p.program == program.without_scale}
    return sum(made.seconds for made in plans.values() if isinstance(made, Library))


class Run:
    """One call of a library."""

    def __init__(
        self, made: Library, program: ScoreProgram, operands: Operands, reads: Reads, sizes: tuple[int, ...]
    ) -> None:
        self.made, self.reads, self.sizes = made, reads, sizes
        self.scale = 1.0 if program.scale is None else program.scale
        self.program = program.without_scale
        self.q, self.k, self.v = (t if t.stride(-1) == 1 else t.contiguous() for t in operands)
        self.call = Call()
        self.held: list[Tensor] = []

    def hold(self, tensor: Tensor) -> int:
        """The address of a tensor, which is kept alive as long as this call."""
        self.held.append(tensor)
        return tensor.data_ptr()

    def floats(self, count: int) -> int:
        return self.hold(torch.empty(count, dtype=torch.float32))

    def zeros(self, count: int) -> int:
        return self.hold(torch.zeros(count, dtype=torch.int64))

    def set_all(self, out: Tensor, lse: Tensor) -> bool:
        """Set the arguments that forward and backward share; False where the library does not support
        them."""
        if not (self.set_numbers() and self.set_reads()):
            return False
        call = self.call
        self.place(q=self.q, k=self.k, v=self.v, out=out)
        call.lse = lse.data_ptr()
        call.B, call.H, call.Sq, call.D = self.q.shape
        call.Hkv, call.Sk, call.Dv = self.k.shape[1], self.k.shape[2], self.v.shape[3]
        call.wide = self.padded(call.Dv)
        call.scale = self.scale
        self.set_maps()
        return True

    def place(self, **operands: Tensor) -> None:
        """Set where these lie, with their strides."""
        for name, tensor in operands.items():
            setattr(self.call, name, tensor.data_ptr())
            setattr(self.call, f"{name}_stride", tensor.stride()[:3])

    def padded(self, width: int) -> int:
        """A width rounded up to a multiple of the vector length."""
        return -(-width // self.made.lanes) * self.made.lanes

    def set_numbers(self) -> bool:
        """Set the values of the expressions of sizes; False if one is out of the range that the C
        supports."""
        if max(*self.q.shape, *self.k.shape) >= SMALL:
            return False
        for place, (node, kind) in enumerate(self.made.source.numbers):
            value = evaluate.number(node, self.sizes)
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
        """Set addresses and strides of the read tensors; False where an offset does not fit 32 bits."""
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

    def set_maps(self) -> None:
        """Set the maps of blocks: `map[1]` leaves out masked blocks, `map[0]` also those hidden by finite
        fills. Where masks read tensors, only what follows from sizes is set, and the library completes the
        maps."""
        if not self.program.keeps:
            return
        self._set_map(1)
        if soft.has_finite_fill(self.program):
            dot = soft.largest_score(self.program, self.scale, self.q, self.k, self.reads)
            self.call.hidden = hidden_below(self.program, dot, self.sizes)
            if not math.isinf(self.call.hidden):
                self._set_map(0)

    def _set_map(self, place: int) -> None:
        (b, h, sq, _), sk, call = self.q.shape, self.k.shape[2], self.call
        cuts = (Cut(0, b, 1), Cut(0, h, 1), Cut(0, sq, BLOCK_Q), Cut(0, sk, BLOCK_K))
        found = tiles.block_map(self.program, Grid(*cuts, self.sizes), soft=place == 0)
        if tiles.reads_data(self.program):
            call.known[place], call.known_stride[place] = self.hold(found), _steps(found)
            rows, columns = found.shape[2:]
            free = self.made.source.masks
            b, h = (b if "b" in free else 1), (h if "h" in free else 1)
            call.lines[place][0], call.lines[place][1] = b, h
            found = torch.empty((b, h, rows, columns), dtype=torch.uint8)
        call.map[place], call.map_stride[place] = self.hold(found), _steps(found)


def _steps(found: Tensor) -> tuple[int, ...]:
    """Strides of a map; 0 where all batches or heads share one line."""
    strides = found.stride()
    return tuple(0 if axis < 2 and found.shape[axis] == 1 else strides[axis] for axis in range(3))
