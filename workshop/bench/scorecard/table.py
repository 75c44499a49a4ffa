"""The scorecard as text: a line for each part of a kernel, candidates of a cell below each other."""

from __future__ import annotations

from collections.abc import Sequence

from workshop.bench.scorecard.cards import CARDS
from workshop.bench.scorecard.cells import CELLS
from workshop.bench.scorecard.joins import Join
from workshop.bench.scorecard.run import Row

_HEAD = (
    "", "tile", "prog", "tensor", "exp2", "other", "edge", "stops", "loads", "beside", "serial", "spill",
    "shared", "regs", "cycles", "predicted",
)  # fmt: skip
LEGEND = """\
tile: queries x keys, warps, stages; prog: programs on one multiprocessor; tensor: operations of tensor cores
over the fewest; exp2: exponentials for each score; other: other instructions for each score and lane, edge:
under a mask; stops: waits for products and barriers in a tile; loads: tiles' loads under way during a tile
(not seen of copies by blocks); beside: the part of the exponentials that is computed while products are;
serial: remarks of ptxas that products wait for each other; cycles: of a multiprocessor for 64 x 64 scores.
Predicted, not measured."""


def table(rows: Sequence[Row]) -> str:
    lines: list[str] = []
    for target in dict.fromkeys(row.target for row in rows):
        own = [row for row in rows if row.target == target]
        lines += ["", f"{target} ({CARDS[target].name})", ""]
        lines += _aligned([_HEAD, *(_line(row, row.cell) for row in _with_cells(own))])
        lines += [f"  {row.key}: {row.problem}" for row in own if row.problem]
    return "\n".join([*lines[1:], "", LEGEND])


def side_by_side(rows: Sequence[Row]) -> str:
    """Predicted speeds as a table of Markdown: a line for each cell, a column for each candidate."""
    columns = list(dict.fromkeys((row.target, row.who) for row in rows if row.figures is not None))
    known = (row for row in rows if row.predicted is not None)
    speeds = {(row.cell, row.target, row.who): row.predicted for row in known}
    lines = [
        ["", *(f"{CARDS[target].name}: {who}" for target, who in columns)], ["---"] * (len(columns) + 1)
    ]  # fmt: skip
    for cell in dict.fromkeys(row.cell for row in rows):
        found = [speeds.get((cell, *column)) for column in columns]
        unit = " (GB/s)" if CELLS[cell].step == "decode" else ""
        lines.append([cell + unit, *("" if one is None else f"{one:.0f}" for one in found)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def joins(found: Sequence[Join]) -> str:
    """Predicted times of a token over a long cache as a table of Markdown."""
    lines = [["", "parts", "keys, us", "join, us"], ["---"] * 4]
    lines += [
        [f"{CARDS[one.target].name}: {one.cell}", str(one.parts), f"{one.keys:.1f}", f"{one.join:.1f}"]
        for one in found
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _with_cells(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.figures is not None]


def _line(row: Row, cell: str) -> tuple[str, ...]:
    found = row.figures
    assert found is not None and row.predicted is not None
    q, k, warps, stages = found.blocks
    unit = "GB/s" if CELLS[row.cell].step == "decode" else "TFLOP/s"
    return (
        f"{cell}, {row.who}{', ' if row.part else ''}{row.part}", f"{q}x{k},{warps},{stages}",
        str(found.programs),
        f"{found.tensor:.2f}", f"{found.exponentials:.2f}", f"{found.others:.1f}", f"{found.edge:.1f}",
        str(found.stops), "-" if found.pending is None else str(found.pending), f"{found.beside:.2f}",
        str(found.serialised or "-"),
        str(found.spilled or "-"), f"{found.shared / 1024:.0f}K", str(found.registers), f"{found.cycles:.0f}",
        f"{row.predicted:.0f} {unit}",
    )  # fmt: skip


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            text.ljust(w) if n == 0 else text.rjust(w)
            for n, (text, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
