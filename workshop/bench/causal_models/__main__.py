"""The command: run all classes, print how many are of each outcome, and write the table."""

from __future__ import annotations

import collections
import sys

from workshop.bench.causal_models.classes import classes, version
from workshop.bench.causal_models.one import NEW, work
from workshop.bench.causal_models.table import table
from workshop.bench.processes import Tasks

TASKS = Tasks("class", work, "workshop.bench.causal_models.preload")


def main() -> int:
    parser = TASKS.parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="these classes (default: all)")
    options = parser.parse_args()
    rows = TASKS.run(options.only or classes(), options)
    for outcome, count in collections.Counter(row["outcome"] for row in rows).most_common():
        print(f"{count:>4} of {len(rows)} {outcome}")
    if options.table:
        options.table.write_text(table(sorted(rows, key=lambda row: row["class"].lower()), version(), NEW))
    return 1 if any(row["outcome"] == "wrong" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
