"""Random attention-like functions against eager, in several processes, up to a time or a number.

    python -m workshop fuzz --minutes 5 --seed 7         a failure is made small and printed as a test
    python -m workshop fuzz --seed 7 --only 12           graph 12 of that seed alone, and its text

A thread drives each process: it takes the next number, sends the case and stores the outcome. The result of a
case does not depend on the process that runs it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from attngraph.cli.arguments import POSITIVE, at_least
from attngraph.cli.terminal import Progress, TargetError
from workshop.fuzz.compare import Outcome
from workshop.fuzz.grammar import Case
from workshop.fuzz.minimise import minimise, reproducer
from workshop.fuzz.sample import case_of
from workshop.fuzz.source import render
from workshop.fuzz.worker import Worker

T = TypeVar("T")
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


@dataclasses.dataclass
class Failure:
    """A case that failed: what differed, the simplest case found that fails the same way, its test, and
    the file of the test, if it was written."""

    number: int
    kind: str
    detail: str
    case: str
    smallest: str = ""
    test: str = ""
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
        self.cases: dict[int, tuple[Case, Outcome]] = {}
        """Those that failed."""
        self.summary = Summary(options.seed)
        self.unfused: dict[str, Unfused] = {}

    def run(self) -> Summary:
        summary = self.summary
        with contextlib.suppress(KeyboardInterrupt):
            self._each(self._numbers(), self._try, self.options.jobs, self._progress)
            chosen = self._chosen()
            self._each(
                iter(chosen),
                self._reduce,
                min(self.options.jobs, len(chosen)),
                lambda: "making failures small",
            )
        summary.seconds = time.perf_counter() - self.start
        summary.unfused = sorted(self.unfused.values(), key=lambda u: -u.count)
        summary.failures.sort(key=lambda f: f.number)
        return summary

    def _each(
        self, items: Iterator[T], work: Callable[[T, Worker], None], jobs: int, progress: Callable[[], str]
    ) -> None:
        """Work on the items in threads that have a process each, which end with the items."""
        workers = [Worker() for _ in range(jobs)]

        def take(worker: Worker) -> None:
            while not self.stop.is_set():
                with self.lock:
                    item = next(items, None)
                if item is None:
                    return
                work(item, worker)

        try:
            with concurrent.futures.ThreadPoolExecutor(max(1, jobs)) as pool:
                waiting = {pool.submit(take, worker) for worker in workers}
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

    def _numbers(self) -> Iterator[int]:
        """The numbers of graphs, until enough are drawn or the time is over."""
        options = self.options
        last = math.inf if options.graphs is None else options.first + options.graphs
        for number in itertools.count(options.first):
            is_late = options.minutes is not None and time.perf_counter() - self.start >= 60 * options.minutes
            if number >= last or is_late:
                return
            yield number

    def _try(self, number: int, worker: Worker) -> None:
        case = case_of(self.options.seed, number)
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
            self.cases[number] = case, outcome
            summary.failures.append(Failure(number, outcome.kind, outcome.detail, str(case)))
            self._write(summary.failures[-1], case)
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
            f"{share} of attention fused, {len(summary.failures)} failed"
        )

    def _chosen(self) -> list[Failure]:
        """The first few failures of each kind, which are made small."""
        chosen: list[Failure] = []
        for failure in sorted(self.summary.failures, key=lambda f: f.number):
            if sum(c.kind == failure.kind for c in chosen) < PER_KIND:
                chosen.append(failure)
        return chosen

    def _reduce(self, failure: Failure, worker: Worker) -> None:
        """Find the simplest case, if the case itself fails again."""
        end = time.perf_counter() + MINIMISING
        case, _ = self.cases[failure.number]

        def again(case: Case) -> Outcome:
            return worker.run(case, failure.number)

        if again(case).kind != failure.kind:
            failure.detail += " (not in another process)"
            self._write(failure, case)
            return
        small = minimise(
            case, failure.kind, again, lambda: time.perf_counter() < end and not self.stop.is_set()
        )
        failure.smallest = str(small)
        self._write(failure, small)

    def _write(self, failure: Failure, case: Case) -> None:
        """Its test, in a file too if there is a folder for them."""
        options, number = self.options, failure.number
        origin = f"python -m workshop fuzz --seed {options.seed} --only {number}"
        outcome = dataclasses.replace(self.cases[number][1], detail=failure.detail)
        failure.test = reproducer(case, outcome, number, origin)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            path = options.out / f"test_seed_{options.seed}_graph_{number}.py"
            path.write_text(failure.test, encoding="utf-8")
            failure.path = str(path)


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
