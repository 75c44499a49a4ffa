"""The command: export all classes, print how many are of each outcome, and write the table."""

from __future__ import annotations

import collections
import sys

from workshop.bench.exports.classes import DECODERS, ENCODERS
from workshop.bench.exports.one import NEW, work
from workshop.bench.exports.table import write
from workshop.bench.processes import Tasks

TASKS = Tasks("class", work, "workshop.bench.exports.preload")


def main() -> int:
    parser = TASKS.parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="these classes (default: the list)")
    options = parser.parse_args()
    rows = TASKS.run(options.only or (*DECODERS, *ENCODERS), options)
    for outcome, count in collections.Counter(row["outcome"] for row in rows).most_common():
        print(f"{count:>4} of {len(rows)} {outcome}")
    if options.table:
        write(options.table, rows, NEW)
    return 1 if any(row["outcome"] in ("wrong", "failed") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
