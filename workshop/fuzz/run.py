"""Random attention-like functions against eager, in several processes, up to a time or a number.

    python -m workshop fuzz --minutes 5 --seed 7         a failure is made small and printed as a test
    python -m workshop fuzz --seed 7 --only 12           graph 12 of that seed alone, and its text

A thread drives each process: it takes the next number, sends the case and stores the outcome. The result of a
case does not depend on the process that runs it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attngraph.cli.arguments import POSITIVE, at_least
from attngraph.cli.problems import TargetError
from attngraph.cli.progress import Progress
from workshop.fuzz.compare import Outcome
from workshop.fuzz.grammar import Case
from workshop.fuzz.minimise import minimise, reproducer
from workshop.fuzz.sample import case_of
from workshop.fuzz.source import render
from workshop.fuzz.worker import Worker

PER_KIND = 3
"""Most failures of one kind that are reduced; the others are reported as they were found."""
MINIMISING = 180.0
"""Most seconds spent on reducing one failure."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How long to run (`minutes` or `graphs`, whichever is reached first) and where to write tests."""

    seed: int = 0
    minutes: float | None = None
    graphs: int | None = None
    jobs: int = 2
    out: Path | None = None
    first: int = 0


@dataclasses.dataclass(frozen=True)
class Failure:
    """A case that failed: what differed, the simplest case found that fails the same way, its test, and
    the file of the test, if it was written."""

    number: int
    kind: str
    detail: str
    case: str
    smallest: str
    test: str
    path: str = ""


@dataclasses.dataclass
class Unfused:
    """A reason of the compiler for not fusing an attention: how often, and numbers of such graphs."""

    reason: str
    count: int = 0
    examples: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Summary:
    """What a run found.

    `symbolic` counts graphs whose sizes are symbols, `attention` those that are attention by construction,
    `fused` those of them in which one was fused, `unfused` says why not the others; `eager_raises` counts
    graphs with nothing to compare with, `retraced` those that took another graph for the second call.
    """

    seed: int
    seconds: float = 0.0
    graphs: int = 0
    symbolic: int = 0
    attention: int = 0
    fused: int = 0
    eager_raises: int = 0
    retraced: int = 0
    unfused: list[Unfused] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """For json.dumps."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rate = 60 * self.graphs / self.seconds if self.seconds else 0.0
        share = f" ({self.fused / self.attention:.0%})" if self.attention else ""
        lines = [
            f"python -m workshop fuzz, seed {self.seed}: {self.graphs} graphs in {self.seconds:.0f} s "
            f"({rate:.0f} a minute), {len(self.failures)} failed",
            f"  sizes are symbols, as users have them, in {self.symbolic}; fixed numbers in the others",
            f"  attention by construction {self.attention}, of these fused {self.fused}{share}",
            f"  second call took another graph: {self.retraced}; eager itself raises: {self.eager_raises}",
        ]
        if self.unfused:
            lines += ["", "  attention that was not fused, by the compiler's reason"]
        for entry in self.unfused:
            examples = ", ".join(map(str, entry.examples[:5]))
            lines.append(f"  {entry.count:6}  {entry.reason}   (graph {examples})")
        for failure in self.failures:
            lines += ["", f"  FAILED graph {failure.number}: {failure.kind}: {failure.detail}"]
            lines += [f"      {failure.case}", f"      smallest: {failure.smallest}"]
            if failure.path:
                lines.append(f"      {failure.path}")
        for failure in self.failures:
            if failure.test and failure.smallest:
                lines += ["", f"# --- graph {failure.number} ---", failure.test]
        return "\n".join(lines)


@dataclasses.dataclass
class _Found:
    number: int
    case: Case
    outcome: Outcome


def run(options: Options, tell: Callable[[str], None] | None = None) -> Summary:
    """Fuzz until the time or the number of graphs is reached.

    `tell` gets a line of progress about once a second. An interrupt ends the run early and returns what was
    found so far.
    """
    return _Run(options, tell or (lambda line: None)).run()


def general(reason: str) -> str:
    """A reason without the sizes and values of its graph."""
    return re.sub(r"-?\b\d+(\.\d+)?(e[-+]\d+)?\b", "N", re.sub(r"\(s\d+=[^)]*\)", "(...)", reason))


def text_of(seed: int, number: int) -> str:
    """One graph: its choices, its function, and the inputs of each call."""
    case = case_of(seed, number)
    source = render(case)
    calls = "".join(
        f"# call {place}\n"
        + "".join(f"#   {name} = {text}\n" for name, text in source.expressions(s).items())
        for place, s in enumerate(case.calls, 1)
    )
    return f"# {case}\n\n{source.text}\n{calls}"


class _Run:
    def __init__(self, options: Options, tell: Callable[[str], None]) -> None:
        self.options, self.tell = options, tell
        self.start = time.perf_counter()
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.numbers = itertools.count(options.first)
        self.found: list[_Found] = []
        self.summary = Summary(options.seed)
        self.unfused: dict[str, Unfused] = {}

    def run(self) -> Summary:
        interrupted = False
        try:
            self._in_threads([self._fuzz] * self.options.jobs, self._progress)
        except KeyboardInterrupt:
            interrupted = True
        self.summary.seconds = time.perf_counter() - self.start
        self.summary.unfused = sorted(self.unfused.values(), key=lambda u: -u.count)
        self.found.sort(key=lambda f: f.number)
        small: dict[int, Case] = {}
        if self.found and not interrupted:
            small = self._minimise_all()
        self.summary.failures = [self._failure(f, small.get(f.number)) for f in self.found]
        return self.summary

    def _in_threads(self, tasks: list[Callable[[Worker], None]], progress: Callable[[], str]) -> None:
        """Run each task in a thread with a process of its own, which ends with the task."""
        workers = [Worker() for _ in tasks]
        try:
            with concurrent.futures.ThreadPoolExecutor(len(tasks)) as pool:
                waiting = {pool.submit(task, worker) for task, worker in zip(tasks, workers, strict=True)}
                try:
                    while waiting:
                        done, waiting = concurrent.futures.wait(waiting, timeout=1)
                        self.tell(progress())
                        for future in done:
                            future.result()
                except BaseException:
                    self.stop.set()
                    for worker in workers:
                        worker.kill()  # this wakes the threads that wait for them
                    raise
        finally:
            for worker in workers:
                worker.close()

    def _fuzz(self, worker: Worker) -> None:
        options = self.options
        while not self.stop.is_set():
            with self.lock:
                number = next(self.numbers)
            if options.graphs is not None and number >= options.first + options.graphs:
                return
            if options.minutes is not None and time.perf_counter() - self.start >= 60 * options.minutes:
                return
            case = case_of(options.seed, number)
            outcome = worker.run(case, number)
            if self.stop.is_set():
                return
            with self.lock:
                self._count(number, case, outcome)

    def _count(self, number: int, case: Case, outcome: Outcome) -> None:
        summary = self.summary
        summary.graphs += 1
        summary.symbolic += case.sizes == "symbols"
        summary.eager_raises += outcome.kind == "eager raises"
        summary.retraced += outcome.graphs > 1
        if outcome.failed:
            self.found.append(_Found(number, case, outcome))
            self._write(number, reproducer(case, outcome, number, self._origin(number)))
        elif case.is_attention and not outcome.kind:
            summary.attention += 1
            summary.fused += outcome.fused > 0
            if not outcome.fused:
                for reason in dict.fromkeys(outcome.missed) or ["no softmax-like place was seen"]:
                    entry = self.unfused.setdefault(general(reason), Unfused(general(reason)))
                    entry.count += 1
                    entry.examples.append(number)

    def _progress(self) -> str:
        seconds = time.perf_counter() - self.start
        summary = self.summary
        share = f"{summary.fused / summary.attention:.0%}" if summary.attention else "-"
        return (
            f"{summary.graphs} graphs, {60 * summary.graphs / seconds:.0f} a minute, "
            f"{share} of attention fused, {len(self.found)} failed"
        )

    def _minimise_all(self) -> dict[int, Case]:
        """The simplest case for the first few failures of each kind."""
        chosen: list[_Found] = []
        for found in self.found:
            if sum(c.outcome.kind == found.outcome.kind for c in chosen) < PER_KIND:
                chosen.append(found)
        left = iter(chosen)
        small: dict[int, Case] = {}

        def work(worker: Worker) -> None:
            while not self.stop.is_set():
                with self.lock:
                    found = next(left, None)
                if found is None:
                    return
                smallest = self._minimise(found, worker)
                if smallest is None:
                    found.outcome = dataclasses.replace(
                        found.outcome, detail=f"{found.outcome.detail} (not in another process)"
                    )
                else:
                    small[found.number] = smallest

        jobs = min(self.options.jobs, len(chosen))
        self._in_threads([work] * jobs, lambda: f"making failures small: {len(small)} of {len(chosen)} done")
        return small

    def _minimise(self, found: _Found, worker: Worker) -> Case | None:
        """The simplest case; None if not even the case itself fails again."""
        end = time.perf_counter() + MINIMISING

        def again(case: Case) -> Outcome:
            return worker.run(case, found.number)

        def may_go_on() -> bool:
            return time.perf_counter() < end and not self.stop.is_set()

        if again(found.case).kind != found.outcome.kind:
            return None
        return minimise(found.case, found.outcome.kind, again, may_go_on)

    def _origin(self, number: int) -> str:
        return f"python -m workshop fuzz --seed {self.options.seed} --only {number}"

    def _failure(self, found: _Found, small: Case | None) -> Failure:
        test = reproducer(small or found.case, found.outcome, found.number, self._origin(found.number))
        path = self._write(found.number, test)
        kind, detail = found.outcome.kind, found.outcome.detail
        return Failure(found.number, kind, detail, str(found.case), str(small) if small else "", test, path)

    def _write(self, number: int, test: str) -> str:
        if self.options.out is None:
            return ""
        self.options.out.mkdir(parents=True, exist_ok=True)
        path = self.options.out / f"test_seed_{self.options.seed}_graph_{number}.py"
        path.write_text(test, encoding="utf-8")
        return str(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m workshop fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    minutes = "how long to run (default 5, unless --graphs is given)"
    parser.add_argument("--minutes", type=at_least(0, float), help=minutes)
    parser.add_argument("--graphs", type=POSITIVE, help="how many graphs to run")
    parser.add_argument("--seed", type=int, default=0, help="which graphs: the same seed, the same graphs")
    parser.add_argument(
        "--only", type=at_least(0), metavar="N", help="run graph N of the seed alone, and show it"
    )
    parser.add_argument(
        "--jobs", type=POSITIVE, default=os.cpu_count() or 1, help="processes (default: all cores)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the test of each failure here")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str]) -> int:
    """The command; 1 if there was a failure."""
    given = _parser().parse_args(argv)
    first, graphs, minutes, jobs = 0, given.graphs, given.minutes, given.jobs
    if given.only is not None:
        first, graphs, minutes, jobs = given.only, 1, None, 1
    elif graphs is None and minutes is None:
        minutes = 5.0
    if given.out is not None:
        try:
            given.out.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise TargetError(f"--out: cannot write to {given.out}: {problem.strerror}.") from problem
    tell = Progress(every=10)
    found = run(Options(given.seed, minutes, graphs, jobs, given.out, first), tell)
    tell.done()
    if given.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print(found if given.only is None else f"{text_of(given.seed, given.only)}\n{found}")
    return 1 if found.failures else 0
