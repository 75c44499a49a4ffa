"""The command: run all models, print how many are of each outcome, and write the table."""

from __future__ import annotations

import sys

from workshop.bench.packages.description import version
from workshop.bench.packages.models import MODELS
from workshop.bench.packages.one import COMPILERS, work
from workshop.bench.packages.table import page, summary
from workshop.bench.processes import Tasks

TASKS = Tasks("task", work, "workshop.bench.packages.preload")


def main() -> int:
    parser = TASKS.parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="models whose title has one of these texts")
    parser.add_argument("--of", nargs="+", choices=COMPILERS, default=COMPILERS, help="default: both")
    options = parser.parse_args()
    models = [m for m in MODELS if not options.only or any(text in m.title for text in options.only)]
    installed = [m.title for m in models if version(m.package) is not None]
    found = TASKS.run([f"{compiler}: {title}" for compiler in options.of for title in installed], options)
    rows = {row["task"]: row for row in found}
    print(summary(models, rows))
    if options.table:
        options.table.write_text(page(models, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
