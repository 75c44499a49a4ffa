"""A borrowed GPU, in one command: check the kernels, measure them, tune them, and write everything down in
time.

    python -m workshop card --json card.json             half an hour, on a GPU
    TRITON_INTERPRET=1 python -m workshop card --small --device cpu --json card.json       a dry run

Each task is a process of its own with a time limit (`card_tasks.py` has what they do), so that a kernel that
crashes or hangs costs its task alone. Some are begun at a time, since most of it is compilation: checks run
together; measurements are prepared together, and then made one after another, with nothing else on the GPU.
The file is written after each such batch. Each stage has a share of the time; what is not begun in time is
listed as such, and `--resume` goes on with it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attngraph.cli.arguments import at_least
from attngraph.cli.terminal import Progress, TargetError, check_writable
from attngraph.ir.records import write_whole
from workshop.bench import card_tasks, gpu
from workshop.bench.card_tasks import CHECK, MEASURE, TUNE, TUNED
from workshop.bench.scorecard.cells import CELLS
from workshop.harness import table as table_of
from workshop.processes import Tasks

MINUTES = 28.0
"""By default. With what starts and ends a run, it is less than half an hour."""
SHARES = {CHECK: 0.2, MEASURE: 0.55, TUNE: 0.88, TUNED: 1.0}
"""The share of the time after which a stage begins no task; in the order of the stages."""
LIMITS = {CHECK: 150.0, MEASURE: 240.0, TUNE: 420.0, TUNED: 180.0}
"""Seconds after which a task is ended."""
_ATTENTION = (
    ("causal", 8192, 128), ("causal", 8192, 64), ("full", 8192, 128), ("full", 8192, 64),
    ("window", 8192, 128), ("softcap", 8192, 128), ("alibi", 8192, 64), ("causal", 16384, 128),
    ("causal", 4096, 128), ("causal", 16384, 64), ("causal", 4096, 64), ("full", 16384, 128),
    ("window", 16384, 128),
)  # fmt: skip
_DECODE = ((64, 4096), (8, 16384), (1, 65536))
_MLA = ((64, 128, 4096), (16, 128, 16384), (16, 16, 16384))
SMALL = ("causal, 2 heads, 64 tokens, width 16", "decode, 2 rows, 64 kept, 4 heads on 2, width 16")
Say = Callable[[str], None]


def cells(small: bool) -> tuple[str, ...]:
    """The names of the cells of `gpu.py` that are measured, the most telling first."""
    if small:
        return SMALL
    return (
        *(f"{case}, 16 heads, {tokens} tokens, width {width}" for case, tokens, width in _ATTENTION[:4]),
        *(f"decode, {rows} rows, {held} kept, 32 heads on 4, width 128" for rows, held in _DECODE),
        *(f"mla, {rows} rows, {held} kept, {heads} heads, latent 512 + 64" for rows, heads, held in _MLA),
        *(f"{case}, 16 heads, {tokens} tokens, width {width}" for case, tokens, width in _ATTENTION[4:]),
    )  # fmt: skip


def tasks(small: bool) -> list[str]:
    """All tasks in order: "check: causal 128" and so on."""
    checked = [name for name in CELLS if not small or name in card_tasks.CHECKED_SMALL]
    measured = cells(small)
    return [
        *(f"{CHECK}: {name}" for name in checked), *(f"{MEASURE}: {name}" for name in measured),
        *(f"{TUNE}: {name}" for name in measured[:10]),
        *(f"{TUNED}: {name}" for name in measured[:10]),
    ]  # fmt: skip


def run(
    device: str, small: bool, minutes: float, file: Path | None, resume: bool, only: Sequence[str], say: Say
) -> dict[str, Any]:
    """Run the tasks, and return what the file holds: `about` the machine, and a row for each task."""
    found: dict[str, Any] = {"about": {}, "tasks": {}}
    if resume and file is not None and file.exists():
        found = json.loads(file.read_text(encoding="utf-8"))
    begin, done = time.monotonic(), found["tasks"]
    wanted = [
        name
        for name in tasks(small)
        if all(text in name for text in only) and done.get(name, {}).get("outcome") not in ("done", "differs")
    ]
    for stage in SHARES:
        own = [name for name in wanted if name.startswith(f"{stage}:")]
        for names in (own[i : i + at_once(stage)] for i in range(0, len(own), at_once(stage))):
            spent = time.monotonic() - begin
            left = 60 * minutes - spent
            if spent >= SHARES[stage] * 60 * minutes or left <= 0:
                for name in names:
                    reason = "there was no time left for it"
                    done[name] = {"task": name, "outcome": "not begun", "reason": reason}
            else:
                for name in names:
                    say(name)
                limit = min(LIMITS[stage], left)
                work = functools.partial(card_tasks.work, device=device, small=small, seconds=limit)
                processes = Tasks(work, card_tasks.__name__)
                for row in processes.in_turns(names, limit, begin + 60 * minutes):
                    done[row["task"]] = row
                    found["about"] = found["about"] or row.get("about", {})
            _keep(file, found)
    return found


def at_once(stage: str) -> int:
    """How many tasks are begun at a time. Measurements share the GPU's memory, of which matrices of scores
    may take much."""
    return min(16 if stage in (CHECK, TUNE) else 8, os.cpu_count() or 1)


def _keep(file: Path | None, found: Mapping[str, Any]) -> None:
    if file is not None:
        write_whole(file, json.dumps(found, indent=1) + "\n")


def is_right(found: Mapping[str, Any]) -> bool:
    """Whether every check that ran found the answers right."""
    return not any(row["outcome"] == "differs" for row in found["tasks"].values())


def table(found: Mapping[str, Any]) -> str:
    """What was checked and measured, as text."""
    rows = list(found["tasks"].values())
    checks = [row for row in rows if row["task"].startswith(f"{CHECK}:")]
    good = sum(row["outcome"] == "done" for row in checks)
    lines = [f"{good} of {len(checks)} kernels checked and right"]
    lines += [
        f"  {row['task']}: {row['outcome']}: {row['reason']}" for row in rows if row["outcome"] != "done"
    ]
    lines += [f"  {row['task']}: {text}" for row in checks for text in row.get("remarks", ())]
    for row in (row for row in rows if row["task"].startswith(f"{TUNE}:") and row["outcome"] == "done"):
        lines += [f"  {row['task']}: {line}: {blocks}" for line, blocks in row["blocks"].items()]
    for stage in (MEASURE, TUNED):
        own = [one for row in rows if row["task"].startswith(f"{stage}:") for one in row.get("rows", ())]
        if own:
            lines += ["", f"{stage}, {gpu.told(found['about'])}", "", table_of(own, "attngraph")]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Check, measure and tune within the time; 1 if a kernel gives wrong answers."""
    import torch

    parser = argparse.ArgumentParser(
        "python -m workshop card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here)
    parser.add_argument(
        "--small", action="store_true", help="tiny cells; with TRITON_INTERPRET=1 it needs no GPU"
    )
    parser.add_argument("--minutes", type=at_least(0, float), default=MINUTES)
    parser.add_argument("--json", type=Path, metavar="FILE", help="what is found, written after each batch")
    parser.add_argument("--resume", action="store_true", help="go on from that file")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="tasks with all of these texts")
    given = parser.parse_args(argv)
    check_writable(given.json, "--json")
    if given.device == "cpu" and not given.small:
        raise TargetError("card needs a GPU; with --small and TRITON_INTERPRET=1 a dry run needs none.")
    tell = Progress()
    found = run(given.device, given.small, given.minutes, given.json, given.resume, given.only, tell)
    tell.done()
    print(table(found))
    return int(not is_right(found))
