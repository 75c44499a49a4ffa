"""The command: run all classes, print how many are of each outcome, and write the table."""

from __future__ import annotations

import argparse
import collections
import sys
from pathlib import Path

from attngraph.benchmark.causal_models.classes import classes, version
from attngraph.benchmark.causal_models.one import NEW, work
from attngraph.benchmark.causal_models.table import table
from attngraph.benchmark.processes import Tasks

TASKS = Tasks("class", work, "attngraph.benchmark.causal_models.preload")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m attngraph.benchmark.causal_models", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="these classes (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON lines; a run goes on where it ended")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table here")
    parser.add_argument("--seconds", type=float, default=240, help="time limit of a class (default: 240)")
    options = parser.parse_args()
    rows = TASKS.run(
        options.only or classes(), options.json, options.seconds,
        lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    for outcome, count in collections.Counter(row["outcome"] for row in rows).most_common():
        print(f"{count:>4} of {len(rows)} {outcome}")
    if options.table:
        options.table.write_text(table(sorted(rows, key=lambda row: row["class"].lower()), version(), NEW))
    return 1 if any(row["outcome"] == "wrong" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
