"""`python -m workshop mutants`: draw mutants, write them into a copy, count what its tests catch."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workshop.mutants import copies
from workshop.mutants.places import Mutant, Place, drawn, found

Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """The command; the exit code is 0."""
    parser = argparse.ArgumentParser("python -m workshop mutants", description=__doc__)
    parser.add_argument("--drawn", type=Path, required=True, help="file of mutants; drawn if there is none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument(
        "--tree", type=Path, required=True, help="the copy: made as a git worktree if need be"
    )
    parser.add_argument("--commit", default="HEAD", help="what the copy is of")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutants")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="that may catch them")
    parser.add_argument("--seconds", type=float, default=60, help="of tests of a mutant, the shortest first")
    parser.add_argument("--again", action="store_true", help="once more those that survived")
    parser.add_argument("--json", type=Path, required=True, help="verdicts; a run goes on from its file")
    given = parser.parse_args(argv)
    if not given.drawn.exists():
        given.drawn.write_text(
            json.dumps([dataclasses.asdict(m) for m in drawn(Path(), given.seed, given.count)], indent=1)
        )
    mutants = [Mutant(**one) for one in json.loads(given.drawn.read_text())]
    numbers = given.only if given.only is not None else list(range(len(mutants)))
    top = _copy(given.tree.absolute(), given.commit, mutants, numbers)
    placed = {int(n) for n in json.loads((top / "placed.json").read_text())}
    rows: dict[str, Row] = json.loads(given.json.read_text()) if given.json.exists() else {}
    again = ("survived",) if given.again else ()
    left = [n for n in numbers if str(n) not in rows or rows[str(n)]["verdict"] in again]
    for number, row in verdicts(top, [n for n in left if n in placed], given.tests, given.seconds):
        rows[str(number)] = row
        given.json.write_text(json.dumps(rows, indent=1))
        print(number, mutants[number].file, mutants[number].function, row, flush=True)
    rows |= {str(n): {"verdict": "gone"} for n in left if n not in placed}
    given.json.write_text(json.dumps(rows, indent=1))
    print(dict(collections.Counter(row["verdict"] for row in rows.values())))
    return 0


def _copy(top: Path, commit: str, mutants: Sequence[Mutant], numbers: Sequence[int]) -> Path:
    """The copy, with those mutants that have a place in it (`placed.json`)."""
    if not (top / "placed.json").exists():
        if not top.exists():
            subprocess.run(["git", "worktree", "add", "--detach", str(top), commit], check=True)
        places: Mapping[int, Place] = {n: p for n, p in found(top, mutants).items() if n in numbers}
        copies.write(top, places)
        (top / "placed.json").write_text(json.dumps(sorted(places)))
    return top


def verdicts(
    top: Path, numbers: Sequence[int], tests: Sequence[str], seconds: float
) -> Iterator[tuple[int, Row]]:  # fmt: skip
    """Each mutant with its verdict: a test that passes without it, and fails with it, catches it."""
    noted = copies.note(top, tests)
    server = copies.Server(top, tests)

    @functools.cache
    def passes(*some: str) -> bool:
        return bool(server.run(-1, some, limit)["verdict"] == "survived")

    limit = 40 + 5 * seconds
    for number in numbers:
        wanted = chosen(noted, number, seconds)
        row: Row = {"verdict": "not reached"}
        while wanted:
            row = server.run(number, wanted, limit)
            if row["verdict"] == "survived" and number in noted["outside"]:  # it runs in imports, too
                row = copies.Server(top, (), number).alone(number, wanted, limit)
            row["tests"] = len(wanted)
            by = row.get("by")
            if by is None or passes(*([by] if by in wanted else wanted)):
                break
            if by not in wanted:
                row["verdict"] = "unclear"
                break
            wanted.remove(by)
        yield number, row
    server.close()


def chosen(noted: Row, number: int, seconds: float) -> list[str]:
    """The tests that meet a mutant and pass without it, the shortest first, and then the others of their
    files, which may use what those made: as many as take `seconds`, and one at least."""
    passed = {name: test for name, test in noted["tests"].items() if test["outcome"] == "passed"}
    files = {name.partition("::")[0] for name, test in passed.items() if number in test["met"]}
    if number in noted["outside"]:
        files = {name.partition("::")[0] for name in passed}
    near = [name for name in passed if name.partition("::")[0] in files]
    near.sort(key=lambda name: (number not in passed[name]["met"], passed[name]["seconds"]))
    most, spent = 0, 0.0
    while most < len(near) and (most == 0 or spent + passed[near[most]]["seconds"] <= seconds):
        spent += passed[near[most]]["seconds"]
        most += 1
    return near[:most]
