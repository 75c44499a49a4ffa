"""Run Gluon kernels in the simulator, without a GPU: `python -m workshop simulate orders` or `... mutants`.

`orders` runs each kernel in so many random orders and compares its results with float64. `mutants` writes
faults of synchronisation into each, one at a time, and lists those that no order shows: with the reason where
they are harmless. The exit code is 1 if a kernel is wrong, or if less than 95 % of the faults are noticed.
"""

from __future__ import annotations

import argparse
import collections
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from attngraph.cli.arguments import POSITIVE
from workshop.harness import Cell, Options, Row, Suite, short
from workshop.simulator.cases import Case, cases
from workshop.simulator.mutants import mutants, noticed
from workshop.simulator.order import Wrong

ENOUGH = 0.95


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("orders", "mutants"))
    parser.add_argument("--orders", type=POSITIVE, help="of each kernel, or of each mutant: 50, or 4")


def _cells(options: Options) -> Iterator[Cell]:
    for case in cases():
        if options.what == "orders":
            yield Cell(case.name, partial(in_orders, case, options.orders or 50))
        else:
            yield Cell(case.name, partial(of_mutants, case, options.orders or 4))


def in_orders(case: Case, count: int) -> Mapping[str, Row]:
    """Whether a kernel is right in all of them."""
    start = time.perf_counter()
    try:
        case.orders(count)
    except (Wrong, AssertionError) as problem:
        return {"orders": {"problem": short(problem)}}
    return {"orders": {"orders": count, "seconds": (time.perf_counter() - start) / count}}


def of_mutants(case: Case, orders: int) -> Mapping[str, Row]:
    """By kind of fault: how many there are, how many are noticed, how many are harmless, and what is left."""
    rows: dict[str, Row] = collections.defaultdict(
        lambda: {"mutants": 0, "noticed": 0, "harmless": 0, "missed": []}
    )
    for mutant in mutants(case.text):
        row = rows[mutant.kind]
        row["mutants"] += 1
        if noticed(case, mutant, orders):
            row["noticed"] += 1
            continue
        why = case.why_harmless(mutant.name)
        row["harmless"] += why is not None
        row["missed"].append(f"{mutant.name} (line {mutant.line}): {why or 'MISSED'}")
    return rows


def _after(options: Options, rows: Sequence[Row]) -> str:
    if options.what == "orders":
        return ""
    told = [f"  {row['cell']}: {each}" for row in rows for each in row["missed"]]
    all_of, harmless, seen = (sum(row[key] for row in rows) for key in ("mutants", "harmless", "noticed"))
    return "\n".join(
        [
            f"{seen} of {all_of} mutants are noticed; {harmless} of the others are harmless: "
            f"{seen / max(1, all_of - harmless):.1%} of the faults.",
            *told,
        ]
    )


def _fails(rows: Sequence[Row]) -> bool:
    faults = sum(row["mutants"] - row["harmless"] for row in rows if "mutants" in row)
    return any(row.get("problem") for row in rows) or (
        sum(row.get("noticed", 0) for row in rows) < ENOUGH * faults
    )


MAIN: Any = Suite("simulate", __doc__, _cells, _arguments, after=_after, fails=_fails).main
