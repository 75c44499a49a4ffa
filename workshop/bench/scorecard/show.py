"""`python -m workshop bench --suite scorecard`: what kernels cost, from their machine code; needs no GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from attngraph.cli.terminal import Progress, TargetError, check_writable
from attngraph.codegen.triton import device, store
from workshop.bench.scorecard import budgets
from workshop.bench.scorecard.cells import CELLS
from workshop.bench.scorecard.joins import KEPT, joins
from workshop.bench.scorecard.nvidia import ToolError
from workshop.bench.scorecard.run import run
from workshop.bench.scorecard.table import joins as joins_table
from workshop.bench.scorecard.table import side_by_side, table


def show(options: argparse.Namespace, file: Path | None) -> int:
    """Print the scorecard; 1 if a figure of ours is worse than its budget.

    Args:
        file: where the figures are written as JSON.

    Raises:
        TargetError: there is no Triton compiler or disassembler here, or no cell of that name.
    """
    check_writable(file, "--json")
    reason = device.no_triton()
    if reason is not None or device.is_interpreted():
        raise TargetError(f"--suite scorecard compiles kernels: {reason or 'TRITON_INTERPRET is set'}.")
    names = [name for name in CELLS if all(text in name for text in options.only)]
    if not names:
        raise TargetError(
            f"--only {' '.join(options.only)}: no cell of the scorecard has all of that in its name; there "
            f"are {', '.join(CELLS)}."
        )
    tell = Progress()
    try:
        rows = list(run(names, options.target, tell))
        decoding = joins(rows)
    except ToolError as problem:
        raise TargetError(f"--suite scorecard: {problem}") from problem
    finally:
        tell.done()
    if file is not None:
        found = {"triton": budgets.triton_version(), "rows": [dataclasses.asdict(row) for row in rows]}
        store.write(file, json.dumps(found, indent=1) + "\n")
    print(table(rows))
    print(f"\nPredicted TFLOP/s side by side:\n\n{side_by_side(rows)}")
    if decoding:
        print(f"\nPredicted, a token over {KEPT} kept ones:\n\n{joins_table(decoding)}")
    if options.rewrite_budgets:
        budgets.rewrite(rows)
        print(f"\nThese are the budgets now: {budgets.PATH}")
        return 0
    worse = budgets.regressions(rows, budgets.known())
    print("".join(f"\nworse than its budget: {text}" for text in worse))
    return int(bool(worse))
