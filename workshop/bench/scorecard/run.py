"""The scorecard's cells, one after another: ours, and what there is to compare with."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attngraph.codegen.triton import store
from attngraph.codegen.triton.plan import Blocks
from workshop.bench.scorecard import flex, plain
from workshop.bench.scorecard.ahead_of_time import TARGETS, Request, Target, requests
from workshop.bench.scorecard.cells import (
    CELLS,
    HEADS,
    TOKENS,
    Cell,
    least,
    plan,
    skips,
    useful,
    visited,
    with_groups,
)
from workshop.bench.scorecard.figures import Figures, Part, compile_and_read, figures, seconds
from workshop.bench.scorecard.nvidia import ToolError

OURS, GROUPS, FLEX, PLAIN = "attngraph", "groups of warps", "flex", "plain"
"""Whose kernels: ours with the blocks of rules, ours in Gluon, FlexAttention's template, and a plain one."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A part of a kernel in a cell, or why there are no figures. `predicted`: TFLOP/s of the whole cell
    (decoding: GB/s), counting what its mask keeps."""

    cell: str
    target: str
    who: str
    part: str = ""
    figures: Figures | None = None
    predicted: float | None = None
    problem: str = ""

    @property
    def key(self) -> str:
        return ", ".join(filter(None, (self.cell, self.who, self.part)))


def run(
    names: Sequence[str], targets: Sequence[str], who: Sequence[str] = (OURS, GROUPS, FLEX, PLAIN)
) -> Iterator[Row]:  # fmt: skip
    """The rows of these cells on these targets. A kernel that does not compile has a row that says why.

    Raises:
        ToolError: the disassembler is missing.
    """
    makers = {OURS: _ours, GROUPS: _groups, FLEX: _flex, PLAIN: _plain}
    for target in targets:
        for name in names:
            for one in who:
                yield from _rows(CELLS[name], target, one, makers[one])


Made = list[tuple[Any, Request, list[Part]]]
"""Kernels, what to compile them for, and their parts."""


def _rows(cell: Cell, target: str, who: str, make: Callable[[Cell, Target, str], Made]) -> list[Row]:
    try:
        made = make(cell, TARGETS[target], target)
        found = [
            (parts, figures(compile_and_read(kernel, request), parts, target))
            for kernel, request, parts in made
        ]
    except ToolError:
        raise
    except Exception as problem:  # compilers fail in many ways
        text = (str(problem).strip().splitlines() or [""])[0][:200]
        return [Row(cell.name, target, who, problem=f"{type(problem).__name__}: {text}")]
    needed, room = (
        max((one.shared for _, several in found for one in several), default=0),
        TARGETS[target].shared,
    )
    if needed > room:
        lacking = f"takes {needed} bytes of shared memory, of which there are {room}"
        return [Row(cell.name, target, who, problem=lacking)]
    time = sum(seconds(one, parts, target) for parts, one in found)
    if not found:
        return []
    if cell.step == "decode":
        amount = sum(part.tile_bytes * (part.whole + part.edge) for parts, _ in found for part in parts) / 1e9
    else:
        amount = useful(cell) / 1e12
    return [
        Row(cell.name, target, who, part.name, one, amount / time)
        for parts, several in found for part, one in zip(parts, several, strict=True)
    ]  # fmt: skip


def _ours(cell: Cell, target: Target, name: str) -> Made:
    made = plan(cell, target)
    mask = "" if not skips(made) else cell.mask
    found: Made = []
    for kernel, request in requests(made, target):
        part = {"gradient_of_queries": "queries", "gradients_of_keys": "keys"}.get(request.name, "")
        part = "read" if request.name.startswith("gradient_of_read") else part
        found.append((kernel, request, [_part(cell, part, made.blocks, mask)]))
    return found


def _groups(cell: Cell, target: Target, name: str) -> Made:
    made = with_groups(cell, target)
    if made is None:
        return []
    name = "all" if cell.step == "backward" else ""  # besides what is prepared of rows
    part = _part(cell, name, made.blocks, cell.mask if skips(made) else "")
    own = dataclasses.replace(made.blocks, q=made.blocks.q // 2)
    part = dataclasses.replace(
        part, blocks=own, least=least(cell, name, own), tile_bytes=part.tile_bytes // 2, whole=2 * part.whole,
        edge=2 * part.edge, groups=2,
    )  # fmt: skip
    return [(kernel, request, [part]) for kernel, request in requests(made, target)]


def _part(cell: Cell, name: str, blocks: Blocks, mask: str, grain: int = 0) -> Part:
    """A part of a kernel's work. `grain`: masks leave out squares of so many queries and keys; 0: tiles."""
    row = 2 * (cell.width + (0 if cell.shared else cell.values))
    if cell.step == "decode":
        readers = -(-cell.group // blocks.q)
        whole, edge = 0.0, float(TOKENS // blocks.k)  # kept tokens; the other loop is for a few new ones
    else:
        square = dataclasses.replace(blocks, q=grain or blocks.q, k=grain or blocks.k)
        tiles = square.q * square.k / (blocks.q * blocks.k)
        readers, (whole, edge) = 0, (count * tiles for count in visited(cell, mask, square))
    return Part(name, blocks, least(cell, name, blocks), blocks.k * row, whole, edge, readers)


def _flex(cell: Cell, target: Target, name: str) -> Made:
    if cell.mods is None:
        return []
    made = flex.render(cell.mods, cell.width, cell.values, HEADS, cell.group, TOKENS, target, cell.step)
    parts = [_part(cell, "queries" if made.second else "", made.blocks, cell.mask, flex.GRAIN)]
    parts += [_part(cell, "keys", made.second, cell.mask, flex.GRAIN)] if made.second else []
    return [(*_from_source(made.source, flex.NAME, made.arguments, parts[0], target), parts)]


def _plain(cell: Cell, target: Target, name: str) -> Made:
    if not cell.is_plain:
        return []
    blocks = plain.blocks_for(cell.width, name)
    part = _part(cell, "", blocks, cell.mask)
    text = plain.source(cell.width, bool(cell.mask), blocks)
    return [(*_from_source(text, plain.NAME, plain.ARGUMENTS, part, target), [part])]


def _from_source(
    source: str, name: str, arguments: Sequence[tuple[str, str]], part: Part, target: Target
) -> tuple[Any, Request]:
    module = store.import_source(source, name, importlib.import_module("triton").__version__)
    kernel, blocks = getattr(module, name), part.blocks
    pointers = tuple(
        place for place, (_, kind) in enumerate(arguments) if kind.startswith("*") or kind == "i32"
    )
    return kernel, Request(
        str(module.__file__), name, tuple(arguments), pointers, target.backend, target.architecture,
        target.warp,
        (("num_warps", blocks.warps), ("num_stages", blocks.stages)),
    )  # fmt: skip
