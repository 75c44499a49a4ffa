"""Which block sizes a call gets where its user has measured none: rules, by widths, dtype, program and GPU.

A choice is compiled ahead of time (`workshop/bench/scorecard/`): the first choice for a width spills no
registers, or few; what is left is said where it is chosen.
"""

import torch

from attngraph.codegen.scalar.read_gradients import read_gradients
from attngraph.codegen.triton import device
from attngraph.codegen.triton import plan as P
from attngraph.codegen.triton.plan import Blocks
from attngraph.ir.language import S, ScoreProgram
from attngraph.ir.ops.kernels import Operands

# (128, 64) at width 256 spills on sm_100, and 128 keys on sm_100 and with the masks of padded widths.
_HALF = {
    64: Blocks(128, 64, 8, 3),
    128: Blocks(128, 64, 8, 3),
    256: Blocks(128, 32, 8, 2),
    512: Blocks(32, 32, 8, 2),
}
_SINGLE = {
    64: Blocks(64, 32, 8, 2),
    128: Blocks(32, 16, 4, 2),
    256: Blocks(32, 16, 8, 2),
    512: Blocks(16, 16, 8, 1),
}
_SINGLE_PADDED = {**_SINGLE, 128: Blocks(32, 16, 8, 2)}
"""Masks of padded widths take registers: with four warps up to 128 bytes of them spill on sm_90."""
_IN_LITTLE = {64: (128, 64), 128: (128, 32), 256: (128, 32)}
"""Queries and keys of tiles where a program has little shared memory (AMD GPUs)."""
_LITTLE = 100_000
"""Bytes of shared memory of a program: AMD's GPUs have less. With four warps each has more registers there,
and none computes a part twice."""
_SOME = 120_000
"""Bytes of shared memory, of which two programs with small tiles find enough on a multiprocessor."""
_MUCH = 200_000
"""Bytes of shared memory of a program, from which on there is room for three stages of wide tiles."""


def blocks_for(
    program: ScoreProgram, D: int, Dv: int, dtype: torch.dtype, Sq: int, shared: int,
    capability: tuple[int, int] | None = None,
) -> Blocks:  # fmt: skip
    """Block sizes for a GPU that gives a program `shared` bytes of shared memory.

    Up to a width of 128 the first choice spills no registers, or few (float32 on sm_80: up to 16 bytes with
    Triton 3.8, for padded widths and reads of pairs). Where the pipeline of keys and values does not fit,
    first its stages are reduced, then the tile.

    Args:
        capability: of an NVIDIA GPU; None: another, or unknown.
    """
    width = max(64, P.padded(D), P.padded(Dv))
    single = _SINGLE if _is_exact(D, Dv) else _SINGLE_PADDED
    wanted = (single if dtype is torch.float32 else _HALF)[width]
    q, k, warps, stages = wanted.q, wanted.k, wanted.warps, wanted.stages
    # Where a tile is computed with masks of its padding, or with a third loop over what a fill hides.
    takes_registers = not _is_exact(D, Dv) or P.largest_filled(program) is not None
    has_groups = dtype is not torch.float32 and shared > _MUCH and (capability or (9, 0))[0] < 10
    if has_groups and width < 512:
        q, k, warps, stages = _measured(program, D, Dv)
    elif width == 128 and (P.tiles_read(program) or (shared <= _MUCH and takes_registers)):
        k = max(16, k // (4 if P.tiles_read(program) and shared <= _MUCH else 2))
    elif width == 64 and shared <= _MUCH and dtype is not torch.float32:
        q, k, warps = 64, 32, 4  # room for two programs on a multiprocessor
        if not P.tiles_read(program):
            q, k = 64 if program.keeps or not P.is_linear(program) else 128, 64
    elif width == 256 and shared <= _MUCH and P.padded(Dv) > 128:
        q, k, warps = (32, 64, 4) if dtype is not torch.float32 else (q, k, warps)
    split = dtype is not torch.float32 and _lie_in_two(program, D, Dv, shared, capability)
    if split and shared >= _LITTLE:
        q, k, warps, stages = _in_two_tiles(program, D, Dv, shared)
    elif shared < _LITTLE:
        warps, stages = 4, 1
        if dtype is not torch.float32:
            q, k = _IN_LITTLE.get(width, (q, k))
            wider = width == 128 and not P.is_linear(program) and not P.tiles_read(program)
            k = 2 * k if wider or (width == 256 and (P.padded(Dv) <= 128 or split)) else k
    if Sq < q:
        q, warps = P.padded(Sq), min(warps, 4)
    own, of_values = (sum(P.in_two(n)) if split else P.padded(n) for n in (D, Dv))
    keys_read = sum(S.index("k") in n.free and S.index("q") not in n.free for n in P.reads_of(program))
    row = (own + of_values) * dtype.itemsize + 4 * q * P.tiles_read(program) + 16 * keys_read
    tile = own * dtype.itemsize

    def taken() -> int:
        """Queries and keys lie side by side, or, without a pipeline on AMD's GPUs, in the same place."""
        queries, keys = q * tile, stages * k * row
        return max(queries, keys) if shared < _LITTLE else queries + keys

    while taken() > shared:
        if stages > 1:
            stages -= 1
        elif k > 16:
            k //= 2
        elif q > 16:
            q //= 2
        else:
            break
    ahead = has_groups and not split and Sq >= _LONG and _gains_ahead(program, width)
    return Blocks(q, k, warps, stages, split=split, ahead=ahead)


def _lie_in_two(
    program: ScoreProgram, D: int, Dv: int, shared: int, capability: tuple[int, int] | None
) -> bool:
    """Whether rows lie in two tiles (`kernels/parts.py`) where these are narrower than one: it saves products
    and registers, and takes more instructions. On AMD's GPUs these cost more than is saved up to a width of
    128.
    Products of narrow tiles are slow, so rows of up to 64 lie in one. Not looked at: sm_100, rows wider than
    256, and reads for each score."""
    if not any(P.in_two(n)[1] for n in (D, Dv)) or (capability or (8, 0))[0] >= 10 or P.tiles_read(program):
        return False
    return (128 if shared < _LITTLE else 64) < max(P.padded(D), P.padded(Dv)) <= 256


def _in_two_tiles(program: ScoreProgram, D: int, Dv: int, shared: int) -> tuple[int, int, int, int]:
    """Queries, keys, warps and stages for rows in two tiles, on NVIDIA's GPUs. On sm_90 as measured (widths
    80, 96, 160 and 192, causal and softcap); with one tile for each row they take 1.1 to 1.3 times as long.
    """
    keys, values = sum(P.in_two(D)), sum(P.in_two(Dv))
    if shared > _MUCH and max(keys, values) <= 96:
        return 128 if P.is_linear(program) else 64, 64, 4, 3
    if shared > _MUCH:
        return 128, 64, 8, 3
    if max(keys, values) <= 96:
        return 64, 64, 4, 3
    return (64, 32, 4, 2) if values > 128 else (128, 32, 8, 2)


def _is_exact(D: int, Dv: int) -> bool:
    """Whether rows fill tiles of their width."""
    return P.padded(D) == D and P.padded(Dv) == Dv


def _measured(program: ScoreProgram, D: int, Dv: int) -> tuple[int, int, int, int]:
    """Queries, keys, warps and stages on sm_90: of some forty the fastest or nearly, measured on an H200 with
    Triton 3.6 and 3.8 (docs/gpu.md). Programs of four warps share a multiprocessor: one multiplies while
    another computes weights. With wide keys or values there is room for one."""
    width = max(64, P.padded(D), P.padded(Dv))
    if width > 128:
        return 128, 32 if P.tiles_read(program) else 64, 8, 3 if P.padded(Dv) <= 128 else 2
    if P.tiles_read(program):
        return 64, 32, 4, 3
    return 64, 128 if width == 64 and not P.window_of(program) else 64, 4, 3


_LONG = 1024
"""Queries from which on a kernel is worth the descriptors of its tensors (`kernels/forward.py`), which the
host makes for each call."""


def _gains_ahead(program: ScoreProgram, width: int) -> bool:
    """Whether a kernel of sm_90 is faster with products a tile ahead of weights. Measured on an H100 with
    Triton 3.6: at a width of 128 by 2 to 14 % for most programs, 1 or 2 % slower for full attention and
    documents; at 64 by 1 to 4 %, and not where scores are more than a multiple of the dot or windows are
    narrow. Wider rows leave no registers, and reads for each score take longer than what is gained."""
    if width == 64:
        return P.is_linear(program) and not P.window_of(program)
    return width == 128 and not P.tiles_read(program)


_GROUPS, _OLDEST = 9, (3, 6)
"""The generation of GPUs whose warps multiply in groups of four, and the oldest Triton with Gluon for it."""


def no_groups(operands: Operands, capability: tuple[int, int] | None) -> str | None:
    """Why no kernel with groups of warps (`kernels/gluon_forward.py`) computes such a call, or None."""
    (q, _, v), installed = operands, device.triton_version()
    if capability is None or capability[0] != _GROUPS:
        found = "" if capability is None else f", this one has {capability[0]}.{capability[1]}"
        return f"warps form groups on GPUs of compute capability {_GROUPS}.0{found}"
    if installed < _OLDEST:
        oldest, found = (".".join(map(str, each)) for each in (_OLDEST, installed))
        return f"needs Triton {oldest}, {found} is installed"
    if q.dtype.itemsize != 2:
        return f"groups of warps multiply numbers of 16 bits, these are {q.dtype}"
    if any(width % 16 or not 64 <= width <= 256 for width in (q.shape[3], v.shape[3])):
        return f"needs widths of 64 to 256, multiples of 16; these are {q.shape[3]} and {v.shape[3]}"
    return None


def blocks_of_groups(program: ScoreProgram, D: int, Dv: int) -> Blocks:
    """Block sizes of kernels with groups of warps: as many keys as registers hold scores and exponents of,
    beside the sums; and as many stages as memory holds. Nothing was measured."""
    keys, values = (sum(P.in_two(width)) for width in (D, Dv))
    holds_more = program.changes_weights or any(S.index("k") in n.free for n in P.reads_of(program))
    k = 64 if holds_more or values > 128 or keys + values > 320 else 128
    stages = (_MEMORY // 2 - 128 * keys) // (k * (keys + values))
    return Blocks(128, k, 4, min(stages, _MOST_STAGES), groups=True)


BACKWARD_OF_GROUPS = Blocks(128, 64, 4, 2, groups=True)
"""Keys that a program owns, and queries at a time: with more, registers spill."""
_ADDS = (3, 8)
"""The first version of Triton with the machine's own additions (TMA) in Gluon."""


def no_backward_groups(plan: P.BackwardPlan) -> str | None:
    """Why the kernel with groups of warps (`kernels/gluon_backward.py`) does not compute the gradients of a
    call whose forward pass such kernels serve, or None."""
    if device.triton_version() < _ADDS:
        return "needs Triton 3.8, which can let the machine add"
    if {plan.D, plan.Dv} - {64, 128}:
        return f"keys and values are 64 or 128 wide there, these are {plan.D} and {plan.Dv}"
    if plan.wide:
        return "positions reach 2**31"
    if plan.fill is not None:
        return "which tiles a finite fill hides follows from how large scores are"
    if not all(plan.operands) or read_gradients(plan.program, plan.wanted):
        return "all gradients of queries, keys and values are computed there, and none of what scores read"
    if plan.D == 128 and not plan.is_linear:
        return "formulas of scores leave no registers at a width of 128"
    return None


_MEMORY, _MOST_STAGES = 224_000, 4
"""Bytes of shared memory on sm_90 for tiles, and the most that are in flight."""

WIDEST_BACKWARD = 256
"""For wider heads the two accumulators of a block of keys do not fit."""
_HALF_BACKWARD = {64: Blocks(128, 32, 8, 2), 128: Blocks(64, 64, 8, 2), 256: Blocks(32, 32, 8, 1)}
_SINGLE_BACKWARD = {64: Blocks(32, 32, 8, 1), 128: Blocks(32, 16, 8, 1), 256: Blocks(16, 16, 8, 1)}
_HALF_SCORED = {**_HALF_BACKWARD, 128: Blocks(32, 64, 8, 2)}
_HALF_WITH_READS = {64: Blocks(32, 32, 8, 2), 128: Blocks(32, 32, 8, 2), 256: Blocks(16, 64, 8, 1)}
_HALF_BESIDE = {64: Blocks(64, 32, 4, 2), 128: Blocks(32, 64, 4, 2)}
"""Where two programs share a multiprocessor's memory (sm_80): each hides what the other waits for."""
_HALF_WITH_READS_BESIDE = {64: Blocks(64, 16, 4, 2)}
_HALF_IN_LITTLE = {64: Blocks(128, 32, 4, 1), 128: Blocks(128, 32, 4, 1), 256: Blocks(16, 32, 4, 1)}
"""Where a program has little shared memory: AMD GPUs, where fewer warps have more registers each."""


def backward_blocks(
    width: int, dtype: torch.dtype, shared: int, has_reads: bool = False, linear: bool = True,
    capability: tuple[int, int] | None = None,
) -> Blocks:  # fmt: skip
    """Block sizes of the backward kernels, that do not spill up to a width of 128 on NVIDIA GPUs with Triton
    3.8, but for 8 to 32 bytes of some programs in float32 and, where reads are summed, on sm_100. (On sm_90,
    at a width of 128, some programs do and are still predicted to be faster: of heads that share keys, by 120
    bytes, and with finite fills or lists of tiles, by 8 to 56.) `q` is how many queries (in the kernel of
    keys: keys) a program owns, `k` how many keys (queries) it takes at a time. `has_reads`: gradients of
    reads are summed too. `linear`: see `is_linear`. `capability`: as for `blocks_for`."""
    width = max(64, P.padded(width))
    if dtype is torch.float32:
        table = _SINGLE_BACKWARD
    elif shared < _LITTLE:
        table = _HALF_IN_LITTLE
    elif shared > _MUCH and width == 256 and (capability or (9, 0))[0] < 10:
        # It spills some 300 bytes, and is 3.4 times as fast as (32, 32) with one stage, which spills none, on
        # an H200. Sums for reads of pairs need memory: with them 64 keys do not fit (not measured).
        return Blocks(64, 32 if has_reads else 64, 8, 2)
    elif shared > _MUCH and width <= 128:
        if has_reads:
            return Blocks(128, 16, 8, 2) if width == 128 else Blocks(64, 32, 4, 2)
        if (capability or (9, 0))[0] >= 10:
            return Blocks(128, 32, 8, 3 if linear else 2)  # with the other number of stages it spills 8 bytes
        # Of the smaller ones, two programs share a multiprocessor.
        return Blocks(64, 64, 4, 3) if width == 64 else Blocks(128, 64, 8, 3)
    else:
        table = _HALF_WITH_READS if has_reads else _HALF_BACKWARD if linear else _HALF_SCORED
        beside = _HALF_WITH_READS_BESIDE if has_reads else _HALF_BESIDE
        table = {**table, **beside} if shared > _SOME else table
    return table[width]


_TALLEST = 64
"""The most rows of a tile over a cache: heads that share a key head, times their new tokens."""


def decode_blocks(
    lanes: int, width: int, dtype: torch.dtype, shared: int, narrow: bool = False,
    capability: tuple[int, int] | None = None,
) -> Blocks:  # fmt: skip
    """Block sizes of attention over a cache. Tiles are high enough for all heads of a group, as far as
    registers allow, and wide enough to stream keys through `shared` bytes: half as many keys wider than 128,
    and of 8 bits (`narrow`), because a tile of these passes registers and lies in shared memory twice, so it
    has no third stage. Widths beyond 256 are latents. On NVIDIA's GPUs nothing spills, but for latents of
    more than 16 heads. `capability`: as for `blocks_for`."""
    single, lanes = dtype is torch.float32, P.padded(lanes)
    if width > 256:
        if single or narrow:
            return Blocks(16, 16 if single or shared < _LITTLE else 32, 8, 2)
        return _blocks_of_latents(lanes, shared, capability)
    q, k = min(_TALLEST, lanes), 32 if single or shared < _LITTLE or width > 128 else 64
    if k == 64 and shared > _MUCH and not narrow:
        return Blocks(q, 128, 4, 2) if q <= 32 else Blocks(q, 64, 4, 3)  # measured on an H200
    return Blocks(q, k // (1 + narrow), 8 if q > 32 else 4, 3 if shared > 80_000 and not narrow else 2)


def _blocks_of_latents(lanes: int, shared: int, capability: tuple[int, int] | None) -> Blocks:
    """Where many heads share a latent, its products take longer than its loads, so the rows of a tile count:
    64 where warps multiply so many together (sm_90; 150 bytes spill, which take one in a hundred of its
    instructions) or where registers allow (AMD's GPUs, without a pipeline); else 32, with two programs on a
    multiprocessor (40 to 120 bytes spill). On sm_100 Triton 3.8 keeps three copies of 64 rows in shared
    memory, which do not fit."""
    if shared < _LITTLE:
        return Blocks(min(64, lanes), 16 if lanes > 16 else 32, 4, 1)
    measured = shared > _MUCH and (capability or (9, 0))[0] < 10
    if lanes > 16:
        return Blocks(64, 64, 8, 2) if measured and lanes > 32 else Blocks(32, 32, 4, 2)
    return Blocks(16, 32, 4, 3) if measured else Blocks(16, 64, 8, 2)
