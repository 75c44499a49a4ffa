"""The command: export all classes, print how many are of each outcome, and write the table."""

from __future__ import annotations

import argparse
import collections
import sys
from pathlib import Path

from attngraph.benchmark.exports.classes import DECODERS, ENCODERS
from attngraph.benchmark.exports.one import NEW, work
from attngraph.benchmark.exports.table import write
from attngraph.benchmark.processes import Tasks

TASKS = Tasks("class", work, "attngraph.benchmark.exports.preload")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m attngraph.benchmark.exports", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="these classes (default: the list)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON lines; a run goes on where it ended")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables at its end")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of a class (default: 300)")
    options = parser.parse_args()
    rows = TASKS.run(
        options.only or (*DECODERS, *ENCODERS), options.json, options.seconds,
        lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    for outcome, count in collections.Counter(row["outcome"] for row in rows).most_common():
        print(f"{count:>4} of {len(rows)} {outcome}")
    if options.page:
        write(options.page, rows, NEW)
    return 1 if any(row["outcome"] in ("wrong", "failed") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
