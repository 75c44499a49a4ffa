"""What one kernel must know before it is written: the plan, and the facts that follow from it.

A plan fixes everything that changes the source: the score program, dtypes, widths, block sizes. What
it leaves open (lengths, strides, tensors) are arguments of the kernel. Equal plans give equal source.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from attngraph.codegen.unsupported import UnsupportedError
from attngraph.ir.language import expr as E
from attngraph.ir.language import score as S
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.parser import parse
from attngraph.ir.language.score import DOT, SCORE, Keep, Score, ScoreProgram, Statement, Weight
from attngraph.ir.ops.kernels import TRUSTED
from attngraph.meaning.masks.fold import seen
from attngraph.meaning.masks.score_bounds import score_bounds

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""Dtypes of queries, keys and values, and Triton's names of them."""

READS = {
    torch.bool: "bool", torch.int32: "int", torch.int64: "int", torch.float16: "half",
    torch.bfloat16: "half", torch.float32: "float", torch.float64: "double",
}  # fmt: skip
"""How a read tensor of a dtype is computed with. Narrow integers are missing because PyTorch wraps
them around where a kernel, which computes in wider ones, would not."""

WIDEST = 512
"""Widths of heads beyond this do not fit in the registers of one program."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A tile's rows (queries) and columns (keys), and how the GPU works on it: with how many warps, with how
    many tiles of keys on their way, and whether some warps fetch while others compute (`schedule.py`)."""

    q: int
    k: int
    warps: int = 4
    stages: int = 2
    specialised: bool = False


@dataclasses.dataclass(frozen=True)
class Read:
    """A tensor that the program reads as `r<number>`: its rank, its kind (a value of `READS`), and
    whether its elements lie so far apart that offsets need 64 bits."""

    number: int
    rank: int
    kind: str
    wide: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """One kernel.

    Args:
        D, Dv: widths of keys and of values. group: query heads per key head.
        wide: whether some extent or size reaches `SMALL`, so that integers need 64 bits throughout.
        listed: whether the kernel is given lists of the tiles that it visits (`visits.py`).

    Raises:
        UnsupportedError: the program is not what its own text says, so its text cannot be trusted.
    """

    program: ScoreProgram
    dtype: torch.dtype
    D: int
    Dv: int
    group: int
    reads: tuple[Read, ...]
    blocks: Blocks
    wide: bool = False
    listed: bool = False

    def __post_init__(self) -> None:
        # The program's text ends up in the source, so it must be nothing but the score language.
        if parse(self.program.text) != self.program:
            raise UnsupportedError("a program that was not made by the parser")

    @functools.cached_property
    def statements(self) -> tuple[Score | Keep, ...]:
        """What is computed of each score, masks in their smallest parts; without the scale where
        `rate` holds it."""
        program = self.program.without_scale if self.is_linear else self.program
        return tuple(s for s in conjuncts(program) if isinstance(s, (Score, Keep)))

    @property
    def is_linear(self) -> bool:
        return is_linear(self.program)

    @property
    def rate(self) -> float:
        """What a linear score is multiplied by to be an exponent of 2."""
        return (self.program.scale or 1.0) * math.log2(math.e)

    def guarded_axes(self, number: int) -> tuple[int, ...]:
        """The axes of a read tensor along which the kernel compares indices with the extent."""
        nodes = [n for e in self.program.expressions for n in E.walk(e) if n.op == "read"]
        own = [n for n in nodes if n.value == number]
        axes = {i for n in own for i, arg in enumerate(n.args) if not is_checked_at_launch(arg)}
        return tuple(sorted(axes))

    @property
    def keeps_of_whole_tiles(self) -> tuple[Statement, ...]:
        """The masks that hide nothing in the tiles of the first loop."""
        if self.listed:
            return tuple(s for s in self.statements if isinstance(s, Keep))
        return () if self.diagonal is None else (self.diagonal[0],)

    @functools.cached_property
    def diagonal(self) -> tuple[Statement, Expr] | None:
        return diagonal(conjuncts(self.program))


@dataclasses.dataclass(frozen=True)
class BackwardPlan(Plan):
    """`wanted`: numbers of the reads whose gradients are asked for."""

    wanted: tuple[int, ...] = ()


def is_checked_at_launch(index: Expr) -> bool:
    """Whether an index of a read is in range for every element of a tile, once it is for the call."""
    return index.op == "const" or index in (S.index("b"), S.index("h"))


def conjuncts(program: ScoreProgram) -> tuple[Statement, ...]:
    """The statements with `keep a and b` taken apart into `keep a`, `keep b` where nothing else
    than minus infinity stands for what is not kept."""
    found: list[Statement] = []
    for statement in program.statements:
        if isinstance(statement, Keep) and statement.is_hard:
            found += [Keep(p) for p in _split(statement.predicate) if p is not E.TRUE]
        else:
            found.append(statement)
    return tuple(found)


def _split(predicate: Expr) -> list[Expr]:
    if predicate.op == "and":
        return [part for arg in predicate.args for part in _split(arg)]
    return [predicate]


@functools.lru_cache(maxsize=1024)
def is_linear(program: ScoreProgram) -> bool:
    """Whether scores are a positive multiple of the dot wherever they are kept. Then the multiple and
    log2(e) are one factor, and a score and its maximum meet in one multiply-add. Elsewhere scores
    may be as large as floats get (a fill of -3.4e38), and the factor would make infinities of them."""
    if program.scale is None or not 0 < program.scale < math.inf:
        return False
    predicates = [n for s in program.keeps for n in E.walk(s.predicate)]
    return all(s.is_hard for s in program.keeps) and DOT not in predicates and SCORE not in predicates


@functools.lru_cache(maxsize=1024)
def stays_trusted(program: ScoreProgram) -> bool:
    """Whether no row's log-sum-exp leaves what is trusted, whatever the operands (softcapped scores)."""
    exponents = [program] if program.sink is None else [program, ScoreProgram((Score(program.sink),))]
    bounds = [score_bounds(p, dot=3e38).score for p in exponents]
    # No sum has 2**64 terms.
    return all(low >= -TRUSTED and high <= TRUSTED - 64 * math.log(2) for low, high in bounds)


def diagonal(statements: tuple[Statement, ...]) -> tuple[Statement, Expr] | None:
    """The statement `keep k <= q + offset` and its offset, where it bounds the keys of a row."""
    offsets = [(keep, _offset(keep.predicate)) for keep in reversed(lasting_masks(statements))]
    return next(((keep, offset) for keep, offset in offsets if offset is not None), None)


def lasting_masks(statements: tuple[Statement, ...]) -> tuple[Keep, ...]:
    """Those of `conjuncts` that hide keys for good. Changed weights are multiples here, which keep zero."""
    lasting = _split(seen(s for s in statements if not isinstance(s, Weight)))
    hard = (s for s in statements if isinstance(s, Keep) and s.is_hard)
    return tuple(keep for keep in hard if keep.predicate in lasting)


def _offset(predicate: Expr) -> Expr | None:
    if predicate.op != "le" or predicate.args[0] is not S.index("k"):
        return None
    bound = predicate.args[1]
    if bound is S.index("q"):
        return E.ZERO
    if bound.op not in ("add", "sub") or bound.args[0] is not S.index("q"):
        return None
    offset = bound.args[1]
    if offset.op == "size" or (offset.op == "const" and offset.kind == "int"):
        return offset if bound.op == "add" else E.make("neg", (offset,), None, "int")
    return None


def padded(width: int) -> int:
    """The width of a tile that holds rows of this width: a power of two, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


# Of sizes that others found fast on sm_90 those that spill nothing here: (128, 128) with 4 warps at a width
# of 64 spills 112 bytes and more, (128, 64) at 256 some on sm_100. Which are fastest was not measured.
_HALF = {
    64: Blocks(128, 64, 8, 3),
    128: Blocks(128, 64, 8, 3),
    256: Blocks(128, 32, 8, 2),
    512: Blocks(32, 32, 8, 2),
}
_SINGLE = {
    64: Blocks(64, 32, 8, 2),
    128: Blocks(32, 16, 8, 2),
    256: Blocks(32, 16, 8, 2),
    512: Blocks(16, 16, 8, 1),
}


def blocks_for(program: ScoreProgram, D: int, Dv: int, dtype: torch.dtype, Sq: int, shared: int) -> Blocks:
    """Block sizes for a GPU that gives a program `shared` bytes of shared memory.

    The first choice for a width is one that keeps everything in registers (`ahead_of_time.py` tells). Where
    the pipeline of keys and values does not fit, it gets shorter, then the tile smaller.
    """
    width = max(64, padded(D), padded(Dv))
    wanted = (_SINGLE if dtype is torch.float32 else _HALF)[width]
    q, k, warps, stages = wanted.q, wanted.k, wanted.warps, wanted.stages
    if shared < 100_000 and width == 64:
        warps = 4  # AMD's GPUs: fewer warps have more registers
    if tiles_read(program) and width == 128:
        k = max(16, k // 2)
    if Sq < q:
        q, warps = padded(Sq), min(warps, 4)
    row = (padded(D) + padded(Dv)) * dtype.itemsize
    while q * padded(D) * dtype.itemsize + stages * k * (row + 4 * q * tiles_read(program)) > shared:
        if stages > 1:
            stages -= 1
        elif k > 16:
            k //= 2
        elif q > 16:
            q //= 2
        else:
            break
    return Blocks(q, k, warps, stages)


WIDEST_BACKWARD = 256
"""Wider heads do not leave room for the two sums of a block of keys."""
_HALF_BACKWARD = {64: Blocks(64, 64, 4, 2), 128: Blocks(64, 64, 8, 2), 256: Blocks(32, 32, 8, 1)}
_SINGLE_BACKWARD = {64: Blocks(32, 32, 8, 1), 128: Blocks(32, 32, 8, 1), 256: Blocks(16, 16, 8, 1)}
_HALF_SCORED = {**_HALF_BACKWARD, 128: Blocks(32, 64, 8, 2)}
_HALF_WITH_READS = {64: Blocks(32, 32, 8, 2), 128: Blocks(32, 32, 8, 2), 256: Blocks(16, 64, 8, 1)}
_HALF_IN_LITTLE = {64: Blocks(32, 64, 4, 1), 128: Blocks(32, 32, 4, 1), 256: Blocks(16, 32, 4, 1)}
"""Where a program has little shared memory: AMD's GPUs, on which fewer warps have more registers."""


def backward_blocks(
    width: int, dtype: torch.dtype, shared: int, has_reads: bool = False, linear: bool = True
) -> Blocks:
    """Block sizes of the backward kernels, such that up to a width of 128 nothing is spilled on NVIDIA's GPUs
    (`ahead_of_time.py` tells). `has_reads`: gradients of reads are summed too. `linear`: see `is_linear`."""
    if dtype is torch.float32:
        table = _SINGLE_BACKWARD
    elif shared < 100_000:
        table = _HALF_IN_LITTLE
    else:
        table = _HALF_WITH_READS if has_reads else _HALF_BACKWARD if linear else _HALF_SCORED
    return table[max(64, padded(width))]


def tiles_read(program: ScoreProgram) -> int:
    """How many numbers the program reads for every single score."""
    both = {S.index("q"), S.index("k")}
    return len({n for e in program.expressions for n in E.walk(e) if n.op == "read" and both <= n.free})
