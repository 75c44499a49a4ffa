"""What runs in a copy of the tree that holds mutants, where this file is `mutant_switch.py`: the switch, a
run of the tests that notes which mutants each of them meets, and a server that runs tests with one mutant on.

The server imports the tests once, and a copy of its process runs those that are asked for.
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ACTIVE, MET = "ATTNGRAPH_MUTANT", "ATTNGRAPH_MUTANTS_MET"
"""Environment variables, which the processes that a test starts see: the number of the mutant that is on, and
the file in which those that are met are noted."""
_active = int(os.environ.get(ACTIVE, -1))
_met = os.environ.get(MET)
_noted: set[int] = set()


def is_on(number: int) -> bool:
    """Whether a mutant is on; it is noted that the running test met it."""
    if _met and number not in _noted:
        _noted.add(number)
        with open(_met, "a") as file:
            file.write(f"{number}\n")
    return number == _active


builtins._mutant = is_on  # type: ignore[attr-defined]


class Meetings:
    """A pytest plugin: seconds, outcome and met mutants of each test, and what was met outside of tests."""

    def __init__(self) -> None:
        assert _met
        self.notes = open(_met, "a+")  # noqa: SIM115
        self.tests: dict[str, dict[str, Any]] = {}
        self.outside: set[int] = set()

    def _new(self) -> set[int]:
        _noted.clear()
        return {int(line) for line in self.notes}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outside |= self._new()
        self.tests[nodeid] = {"seconds": 0.0, "outcome": "passed", "met": []}

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = self.tests[report.nodeid]
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        if report.outcome != "passed":
            test["outcome"] = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.tests[nodeid]["met"] = sorted(self._new())


class First:
    """A pytest plugin: which test failed first."""

    def __init__(self, out: str) -> None:
        self.out = Path(out)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.out.exists():
            self.out.write_text(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        self.pytest_runtest_logreport(report)


def note(out: str, *tests: str) -> None:
    """Run tests and write what each meets."""
    import pytest

    plugin = Meetings()
    pytest.main(["-q", "-p", "no:cacheprovider", "--tb=short", *tests], plugins=[plugin])
    Path(out).write_text(json.dumps({"outside": sorted(plugin.outside), "tests": plugin.tests}))


def serve(*tests: str) -> None:
    """Import tests, and answer questions from the standard input, one a line, until there are no more."""
    import pytest

    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if tests:
        pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "-m", "", *tests])
    if torch := sys.modules.get("torch"):  # and what it imports late; threads do not live on in a copy
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)).run_decompositions()
        torch.set_num_threads(threads)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(**json.loads(line))), file=answers, flush=True)


def _answer(number: int, tests: list[str], limit: float, out: str) -> dict[str, Any]:
    begun = time.monotonic()
    Path(out).unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _child(number, tests, out)
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < begun + limit:
        time.sleep(0.02)
    about = {"seconds": round(time.monotonic() - begun, 1)}
    if ended == (0, 0):
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return {"verdict": "caught", "by": "a test that does not end", **about}
    code = os.waitstatus_to_exitcode(ended[1])
    if code == 0:
        return {"verdict": "survived", **about}
    by = Path(out).read_text() if Path(out).exists() else f"the process, which ended with {code}"
    return {"verdict": "caught", "by": by, **about}


def _child(number: int, tests: list[str], out: str) -> None:
    global _active
    try:
        import pytest

        os.setsid()
        _active, os.environ[ACTIVE] = number, str(number)
        words = os.open(out + ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(words, 1)
        os.dup2(words, 2)
        options = ["-x", "-q", "-m", "", "--tb=short", "-p", "no:cacheprovider"]
        code = int(pytest.main([*options, *tests], plugins=[First(out)]))
        sys.stdout.flush()
        os._exit(code)
    finally:
        os._exit(70)


def main() -> None:
    """`note OUT TESTS...` or `serve TESTS...`."""
    note(*sys.argv[2:]) if sys.argv[1] == "note" else serve(*sys.argv[2:])
