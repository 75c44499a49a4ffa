"""Machine code as both vendors' readers give it, and the loops in it.

A reader (`nvidia.py`, `amd.py`) makes `Code`; `tile_loops` returns the loops that multiply tiles and contain
no other such loop; `Work` is what one warp does in one turn of a loop, counted by the reader.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

import networkx as nx


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction. `target`: the label that a branch goes to; `ends`: whether nothing after it is
    executed next (an unconditional branch, the end of the program)."""

    name: str
    operands: str = ""
    target: str = ""
    ends: bool = False


@dataclasses.dataclass(frozen=True)
class Code:
    """Instructions in order, and where labels stand: the number of the instruction that follows."""

    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Step:
    """What a warp executes up to the next product by warp groups, or the next wait for such products.

    Attributes:
        instructions, fused, integer, special, shared_bytes: as in `Work`; the product or wait included.
        flops, operand_bytes: of the product. closes: whether the product ends a group of products, for which
            warps may wait. waits: how many groups may still be under way after the wait; None: no wait.
    """

    instructions: int
    fused: int
    integer: int
    special: int
    shared_bytes: int
    flops: int
    operand_bytes: int
    closes: bool = False
    waits: int | None = None


@dataclasses.dataclass(frozen=True)
class Work:
    """What one warp does in one turn of a loop.

    Attributes:
        instructions: all of them. products: those for tensor cores (`by_groups`: that four warps execute
            together), which multiply and add `flops` times and read factors of `operand_bytes` from shared
            memory. exponentials: of base 2. special: all that the unit for transcendental functions executes.
            fused: additions, multiplications and both of floats.
        shared_bytes: otherwise moved between registers and shared memory, spilled registers included.
        loaded_bytes: from global memory. stops: waits for products and barriers. groups: of loads begun.
        pending: those of them that may be under way while the warp goes on after the strictest wait for them;
            None: it waits for none, or in another way (copies of blocks, which a barrier counts).
        beside: exponentials that are computed after products were asked for and before these are waited for.
        barriers: where warps meet, arrive or wait at barriers of any kind.
        steps: the turn in order, where products are by groups, which go on while the warp executes other
            instructions.
    """

    instructions: int
    products: int
    flops: int
    operand_bytes: int
    by_groups: bool
    exponentials: int
    special: int
    fused: int
    integer: int
    shared_bytes: int
    loaded_bytes: int
    stops: int
    pending: int | None
    groups: int
    beside: int = 0
    barriers: int = 0
    steps: tuple[Step, ...] = ()

    @property
    def waits_at_once(self) -> bool:
        """Whether what it loads is asked for, waited for, and only then computed with."""
        return bool(self.loaded_bytes) and not self.pending and not (self.groups and self.pending is None)


COUNTS = tuple(
    f.name
    for f in dataclasses.fields(Work)
    if f.type == "int" and f.name not in ("instructions", "beside", "barriers")
)
"""What a reader counts, instruction by instruction."""

Loop = tuple[Instruction, ...]


def parse(
    text: str, label: re.Pattern[str], instruction: Callable[[str], Instruction | None]
) -> Code:  # fmt: skip
    """Code from a listing: `label` finds the lines that name a place, `instruction` reads the others (None:
    it is none)."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if (named := label.match(line)) is not None:
            labels[named[1]] = len(instructions)
        elif (found := instruction(line)) is not None:
            instructions.append(found)
    return Code(tuple(instructions), labels)


def tile_loops(code: Code, multiplies: Callable[[Instruction], bool]) -> list[Loop]:
    """The innermost loops among those with products, in the order of their first instruction."""
    blocks = _blocks(code)
    found: dict[int, set[int]] = {}
    for header, body in _natural_loops(code, blocks):
        if any(multiplies(i) for start in body for i in code.instructions[start : blocks[start]]):
            found[header] = found.get(header, set()) | body
    inner = [b for h, b in sorted(found.items()) if not any(o < b for o in found.values())]
    return [tuple(i for start in sorted(b) for i in code.instructions[start : blocks[start]]) for b in inner]


def _blocks(code: Code) -> dict[int, int]:
    """Basic blocks: from the number of the first instruction to the number after the last."""
    count = len(code.instructions)
    cuts = {0, *code.labels.values()}
    cuts |= {n + 1 for n, i in enumerate(code.instructions) if i.target or i.ends}
    places = sorted(cut for cut in cuts if cut < count)
    return dict(zip(places, [*places[1:], count], strict=True))


def _natural_loops(code: Code, blocks: Mapping[int, int]) -> list[tuple[int, set[int]]]:
    """For each branch back to a block that dominates it, the loop that it closes (Aho et al. 2006, 9.6)."""
    graph = nx.DiGraph()
    graph.add_nodes_from(blocks)
    for start, end in blocks.items():
        last = code.instructions[end - 1]
        if last.target in code.labels and code.labels[last.target] in blocks:
            graph.add_edge(start, code.labels[last.target])
        if not last.ends and end in blocks:
            graph.add_edge(start, end)
    above = {**nx.immediate_dominators(graph, 0), 0: 0}

    def dominates(header: int, block: int) -> bool:
        while block not in (header, 0):
            block = above[block]
        return block == header

    found = []
    for block, header in graph.edges:
        if block in above and dominates(header, block):
            without = graph.subgraph(n for n in graph if n != header)
            body = {header} if block == header else {header, block, *nx.ancestors(without, block)}
            found.append((header, body & set(above)))
    return found
