"""A copy of the tree in which all mutants stand, each behind a switch, and the processes that run tests."""

from __future__ import annotations

import ast
import collections
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workshop.mutants.places import Place

SWITCH = "mutant_switch"
_COMMAND = (sys.executable, "-c", f"import {SWITCH}; {SWITCH}.main()")


def write(top: Path, places: Mapping[int, Place]) -> None:
    """Put the switch and all mutants into a tree."""
    by_file: dict[str, list[tuple[int, Place]]] = collections.defaultdict(list)
    for number, place in places.items():
        by_file[place.mutant.file].append((number, place))
    for file, of in by_file.items():
        path = top / file
        text = switched(path.read_text(encoding="utf-8"), of)
        path.write_text(text, encoding="utf-8")
    (top / f"{SWITCH}.py").write_text(Path(__file__).with_name("inside.py").read_text(), encoding="utf-8")
    package = top / "attngraph/__init__.py"
    first = re.compile(r"(?m)^(?=import |from (?!__future__))")
    package.write_text(first.sub(f"import {SWITCH}; ", package.read_text(encoding="utf-8"), count=1))


def switched(text: str, places: Sequence[tuple[int, Place]]) -> str:
    """The text of a file with a switch around each place; no line moves.

    Raises:
        SyntaxError: a place cannot hold a switch.
    """
    parts: list[
        tuple[int, int, str]
    ] = []  # where, order of those at one place (what is wider is outside), what
    for number, place in places:
        width = place.end - place.start
        parts += [(place.start, -width, f"({place.value} if _mutant({number}) else (")]
        parts += [(place.end, width - len(text), "))")]
    end = len(text)
    for where, _, part in sorted(parts, key=lambda one: one[:2], reverse=True):
        text, end = text[:where] + part + text[where:], where
    assert end <= len(text)
    ast.parse(text)
    return text


def note(top: Path, tests: Sequence[str]) -> dict[str, Any]:
    """Which mutants each test meets, with none on: `outside` of tests, and by test; kept in the copy."""
    out, met = top / "noted.json", top / "met.txt"
    if not out.exists():
        met.unlink(missing_ok=True)
        environment = _environment(top) | {"ATTNGRAPH_MUTANTS_MET": str(met)}
        subprocess.run([*_COMMAND, "note", str(out), *tests], cwd=top, env=environment, check=True)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


class Server:
    """Runs tests of a copy with a mutant on. `preload`: tests that are imported before, with no mutant on."""

    def __init__(self, top: Path, preload: Sequence[str], number: int = -1) -> None:
        self.out = top / f"first{os.getpid()}"
        environment = _environment(top) | {"ATTNGRAPH_MUTANT": str(number)}
        self.process = subprocess.Popen(
            [*_COMMAND, "serve", *preload], cwd=top, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(top / "server.log").open("w"),
        )  # fmt: skip
        assert self.process.stdout and self.process.stdout.readline() == "ready\n"

    def run(self, number: int, tests: Sequence[str], limit: float) -> dict[str, Any]:
        """`verdict`, and which test it was that failed first: `by`."""
        assert self.process.stdin and self.process.stdout
        asked = {"number": number, "tests": list(tests), "limit": limit, "out": str(self.out)}
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def alone(self, number: int, tests: Sequence[str], limit: float) -> dict[str, Any]:
        """One run, and the process ends."""
        try:
            return self.run(number, tests, limit)
        finally:
            self.close()

    def close(self) -> None:
        """Let the process end."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def _environment(top: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(top), "PYTHONDONTWRITEBYTECODE": "1"}
