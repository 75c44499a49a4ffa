"""The command: what kernels cost, from their machine code, beside what there is to compare with.

    python -m workshop scorecard [--only causal] [--target sm_90] [--json card.json]
    python -m workshop scorecard --rewrite-budgets       with --only and --target some

A cell is a kernel on a target, and its candidates are parts of kernels. Predicted, not measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Sequence

from attngraph.cli.terminal import TargetError
from attngraph.codegen.triton import device
from workshop import harness
from workshop.bench.scorecard import budgets
from workshop.bench.scorecard.cards import CARDS
from workshop.bench.scorecard.cells import CELLS
from workshop.bench.scorecard.figures import Figures
from workshop.bench.scorecard.joins import KEPT, Join, joins
from workshop.bench.scorecard.nvidia import ToolError
from workshop.bench.scorecard.run import Row, run
from workshop.harness import Cell, Options, Suite, markdown

TARGETS = ("sm_90", "sm_80", "gfx942")
"""GPUs that kernels are compiled for; the first two if none is named."""
LEGEND = """\
blocks: queries x keys, warps, stages; programs: on one multiprocessor; tensor: operations of tensor cores
over the fewest; exponentials: for each score; others: other instructions for each score and lane, edge:
under a mask; stops: waits for products and barriers in a tile; pending: tiles' loads under way during a tile
(not seen of copies by blocks); beside: the part of the exponentials that is computed while products are;
barriers: where warps meet, arrive or wait in a tile; fewest, most: registers of warps that share them anew;
serialised: remarks of ptxas that products wait for each other; cycles: of a multiprocessor for 64 x 64
scores; predicted: TFLOP/s, for a cache GB/s. Predicted, not measured."""


def flat(row: Row) -> harness.Row:
    """A row of the harness; `row_of` gives it back."""
    found = {key: value for key, value in dataclasses.asdict(row).items() if key not in ("figures", "cell")}
    if row.figures is not None:
        q, k, warps, stages = row.figures.blocks
        found |= {**dataclasses.asdict(row.figures), "blocks": f"{q}x{k},{warps},{stages}"}
    return found


def row_of(given: harness.Row) -> Row:
    names = [field.name for field in dataclasses.fields(Figures)]
    figures = None
    if "blocks" in given:
        blocks = tuple(map(int, given["blocks"].replace("x", ",").split(",")))
        figures = Figures(**{**{name: given[name] for name in names}, "blocks": blocks})
    own = {key: given[key] for key in ("target", "who", "part", "predicted", "problem")}
    return Row(given["cell"].rpartition(" on ")[0], figures=figures, **own)


def _measured(name: str, target: str) -> dict[str, harness.Row]:
    try:
        found = run([name], [target])
        return {", ".join(filter(None, (row.who, row.part))): flat(row) for row in found}
    except ToolError as problem:
        raise TargetError(f"scorecard: {problem}") from problem


def cells(options: Options) -> Iterator[Cell]:
    reason = device.no_triton()
    if reason is not None or device.is_interpreted():
        raise TargetError(f"scorecard compiles kernels: {reason or 'TRITON_INTERPRET is set'}.")
    for target in options.target:
        for name in list(CELLS)[:1] if options.small else CELLS:
            yield Cell(f"{name} on {target}", functools.partial(_measured, name, target))


def after(options: Options, given: Sequence[harness.Row]) -> str:
    """Legend and tables; what is worse than its budget, or the new budgets."""
    rows = list(map(row_of, given))
    told = [LEGEND, f"Predicted TFLOP/s side by side:\n\n{side_by_side(rows)}"]
    decoding = joins(rows)
    if decoding:
        told.append(f"Predicted, a token over {KEPT} kept ones:\n\n{joins_table(decoding)}")
    if options.rewrite_budgets:
        budgets.rewrite(rows)
        told.append(f"These are the budgets now: {budgets.PATH}")
    return "\n\n".join([*told, *(f"worse than its budget: {text}" for text in worse(given))])


def worse(given: Sequence[harness.Row]) -> list[str]:
    return budgets.regressions(list(map(row_of, given)), budgets.known())


def side_by_side(rows: Sequence[Row]) -> str:
    """Predicted speeds as a table of Markdown: a line for each cell, a column for each candidate."""
    columns = list(dict.fromkeys((row.target, row.who) for row in rows if row.figures is not None))
    speeds = {(r.cell, r.target, r.who): r.predicted for r in rows if r.predicted is not None}
    lines = [["", *(f"{CARDS[target].name}: {who}" for target, who in columns)]]
    for cell in dict.fromkeys(row.cell for row in rows):
        unit = " (GB/s)" if CELLS[cell].step == "decode" else ""
        found = [speeds.get((cell, *column)) for column in columns]
        lines.append([cell + unit, *("" if one is None else f"{one:.0f}" for one in found)])
    return markdown(lines)


def joins_table(found: Sequence[Join]) -> str:
    """Predicted times of a token over a long cache as a table of Markdown."""
    lines = [["", "parts", "keys, us", "join, us"]]
    for one in found:
        name = f"{CARDS[one.target].name}: {one.cell}"
        lines.append([name, str(one.parts), f"{one.keys:.1f}", f"{one.join:.1f}"])
    return markdown(lines)


def _facts(options: Options) -> harness.Row:
    return {"triton": budgets.triton_version()}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", nargs="+", choices=TARGETS, default=list(TARGETS[:2]),
        help=f"GPUs to compile for (default: {', '.join(TARGETS[:2])})",
    )  # fmt: skip
    parser.add_argument(
        "--rewrite-budgets", action="store_true", help="make the figures found those that may not get worse"
    )


MAIN = Suite(
    "scorecard", __doc__, cells, _arguments, _facts, bar="predicted", after=after,
    fails=lambda rows: bool(worse(rows)),
).main  # fmt: skip
