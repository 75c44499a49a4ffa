"""What a compiled kernel's loops cost: per tile, per score, and as a predicted speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from attngraph.codegen.triton.plan import Blocks
from workshop.bench.scorecard import ahead_of_time, amd, nvidia
from workshop.bench.scorecard.ahead_of_time import Request, build
from workshop.bench.scorecard.cards import ARRIVAL, CARDS, Card
from workshop.bench.scorecard.code import Work, tile_loops

_TILE = 64 * 64


class CodeError(Exception):
    """A kernel's machine code is not as expected."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One loop's work in a kernel: what a tile is, how much it takes at least, and how many are visited.

    Attributes:
        least: operations of products for a tile. tile_bytes: loaded for a tile. whole, edge: tiles of one
            head in which nothing is masked, and others. readers: programs that read the same tiles; 0: so
            many that the memory's speed does not matter. groups: of warps that share a program's tiles of
            keys, with a tile of queries each, which is what `blocks` are.
    """

    name: str
    blocks: Blocks
    least: int
    tile_bytes: int
    whole: float
    edge: float
    readers: int = 0
    groups: int = 1


@dataclasses.dataclass(frozen=True)
class Figures:
    """One part of one kernel on one target.

    Attributes:
        tensor: operations of tensor cores, over the fewest. exponentials: per score. others: instructions per
            score and lane besides products and exponentials; `edge`: in tiles under a mask. stops: waits for
            products and barriers, per tile. pending: loads that may be under way while a tile is computed
            (None: no such wait, or they are copied by blocks). beside: the part of the exponentials that is
            computed after products were asked for and before these are waited for. serialised: remarks of
            ptxas that products wait for each other. spilled:
            bytes (AMD: registers) per lane. registers: when the kernel begins; `fewest` and `most`: while it
            runs, where warps share them out anew (else 0). barriers: where warps meet, arrive or wait, per
            tile. programs: that share a multiprocessor. cycles: of a
            multiprocessor, for 64 x 64 scores.
    """

    blocks: tuple[int, int, int, int]
    tensor: float
    exponentials: float
    others: float
    edge: float
    stops: int
    pending: int | None
    beside: float
    serialised: int
    spilled: int
    shared: int
    registers: int
    programs: int
    cycles: float
    edge_cycles: float
    barriers: int = 0
    fewest: int = 0
    most: int = 0


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel as compiled: its loops, and what it uses."""

    loops: tuple[Work, ...]
    serialised: int
    spilled: int
    shared: int
    registers: int
    given: tuple[int, int] = (0, 0)


def compile_and_read(kernel: Any, request: Request) -> Compiled:
    """Compile a kernel and read the loops in its machine code.

    Raises:
        ToolError: the disassembler is missing. CodeError: no loop multiplies tiles. Errors of Triton.
    """
    if request.backend == "hip":  # as Triton does when it launches a kernel with such tensors
        pointers = (place for place, (_, kind) in enumerate(request.signature) if kind.startswith("*"))
        request = dataclasses.replace(request, small=tuple(pointers))
    binary, given = build(kernel, request), (0, 0)
    used = ahead_of_time.usage(binary, request)
    if request.backend == "cuda":
        said = nvidia.remarks(
            binary.asm["ptx"], f"sm_{request.architecture}{'a' * (request.architecture == 90)}"
        )
        code = nvidia.read(nvidia.disassemble(binary.asm["cubin"]))
        loops = [nvidia.count(loop) for loop in tile_loops(code, nvidia.multiplies)]
        serialised, given = nvidia.serialised(said), nvidia.registers(code)
    else:
        text = binary.asm["amdgcn"]
        loops = [amd.count(loop) for loop in tile_loops(amd.read(text), amd.multiplies)]
        serialised = 0
    if not loops:
        raise CodeError("no loop in the machine code multiplies tiles")
    return Compiled(tuple(loops), serialised, used.spilled, used.shared, used.registers, given)


def figures(found: Compiled, parts: Sequence[Part], target: str) -> list[Figures]:
    """The figures of each part of a kernel. Loops belong to the part whose products they hold: those of more
    operations to the part that takes more."""
    return [
        _figures(found, loops, part, target)
        for loops, part in zip(_share_out(found, parts), parts, strict=True)
    ]


def _share_out(found: Compiled, parts: Sequence[Part]) -> list[list[Work]]:
    """The loops of each part. Of loops that belong to one part, those with fewer products are not its main
    ones (a first look at rows, say)."""
    sizes = sorted({loop.flops for loop in found.loops})
    order = sorted(parts, key=lambda part: part.least)
    if len(sizes) < len(order):
        raise CodeError(f"{len(order)} parts, but loops of {len(sizes)} kinds")
    chosen = dict(zip([part.name for part in order], sizes[-len(order) :], strict=True))
    return [[loop for loop in found.loops if loop.flops == chosen[part.name]] for part in parts]


def _figures(found: Compiled, loops: Sequence[Work], part: Part, target: str) -> Figures:
    card, blocks = CARDS[target], part.blocks
    warps = blocks.warps * (3 if part.groups > 1 else 1)  # the producer's share of registers is a group's
    programs = part.groups * card.programs(found.registers, found.shared, warps)
    whole, edge = (f(loops, key=lambda loop: loop.instructions) for f in (min, max))
    scores, lanes = blocks.q * blocks.k, blocks.warps * card.lanes
    pending = [loop.pending for loop in loops if loop.pending is not None]

    def others(loop: Work) -> float:
        return (loop.instructions - loop.products - loop.exponentials) * lanes / scores

    return Figures(
        (blocks.q * part.groups, blocks.k, blocks.warps * part.groups, blocks.stages),
        blocks.warps * whole.flops / part.least,
        whole.exponentials * lanes / scores, others(whole), others(edge), whole.stops,
        min(pending, default=None), whole.beside / max(1, whole.exponentials),
        found.serialised, found.spilled, found.shared, found.registers, programs,
        _cycles(card, whole, part, programs) * _TILE / scores,
        _cycles(card, edge, part, programs) * _TILE / scores, whole.barriers, *found.given,
    )  # fmt: skip


def _cycles(card: Card, loop: Work, part: Part, programs: int) -> float:
    """Cycles of a multiprocessor for one tile of the part."""
    in_flight = 0.0
    if loop.pending is not None and loop.groups:
        in_flight = programs * part.tile_bytes * (loop.pending / loop.groups + 0.5)
    own = card.cycles(loop, part.blocks.warps, programs)
    if loop.waits_at_once:
        own += ARRIVAL / programs
    return max(own, card.delivery(part.tile_bytes, part.readers, in_flight))


def seconds(found: Sequence[Figures], parts: Sequence[Part], target: str) -> float:
    """Predicted time for one head's tiles of all parts, if the whole GPU works on such heads."""
    cycles = 0.0
    for one, part in zip(found, parts, strict=True):
        tiles = part.blocks.q * part.blocks.k / _TILE * max(1, part.readers)
        cycles += tiles * (one.cycles * part.whole + one.edge_cycles * part.edge)
    return 1 / CARDS[target].rate(1, cycles)
