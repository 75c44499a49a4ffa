"""Searches for wrong answers: random programs of one kind, until the time or the number is reached.

    python -m workshop search around --seed 1 --minutes 30
    python -m workshop search files --count 10000 [--only dump] [--sanitize]

around: numbers kept anywhere that change between calls, and what a function asks of its argument. causal:
decoders of models that see tokens far away. sizes: functions around data-dependent and empty sizes. rows:
whole sequences without gradients, of which parts mix rows. files: edits of saved files, each in a process of
its own. Every program that is wrong is printed; at the end how many programs there were of each kind, and how
many of them were wrong. A program follows from the seed and its number alone.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import logging
import math
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attngraph.cli.arguments import POSITIVE, at_least
from attngraph.cli.terminal import Progress
from workshop.harness import short

Found = tuple[str, str, str]
"""What a program was, its kind or outcome for the count, and what is wrong with it ("": nothing)."""
Trial = Callable[[int], Found]
"""Tries a program by its number."""
EACH_SEED = 1_000_000
"""Programs that a seed has, where programs have numbers alone."""


@contextlib.contextmanager
def around(options: argparse.Namespace) -> Iterator[Trial]:
    """Programs of a number that changes, and questions to an argument, in turns."""
    from workshop.fuzz.around import asking, programs

    drawn = programs.programs(options.seed)
    with tempfile.TemporaryDirectory() as folder:

        def one(number: int) -> Found:
            if number % 2:
                asked = options.seed * EACH_SEED + number // 2
                return f"asking {asked}", "asking", _of(lambda: asking.check(asked))
            program = next(drawn)
            return str(program), "reading", _of(lambda: programs.check(program, Path(folder)))

        yield one


@contextlib.contextmanager
def causal(options: argparse.Namespace) -> Iterator[Trial]:
    from workshop.fuzz import causal

    def one(number: int) -> Found:
        seed, kind = options.seed * EACH_SEED + number, ["raises"]

        def wrong() -> str:
            found, decodes = causal.check(seed)
            kind[0] = "with a decoder" if decodes else "without one"
            return found

        found = _of(wrong)
        return f"{seed}: {causal.Model(seed)}", kind[0], found

    yield one


@contextlib.contextmanager
def sizes(options: argparse.Namespace) -> Iterator[Trial]:
    from workshop.fuzz import sizes

    def one(number: int) -> Found:
        seed = options.seed * EACH_SEED + number
        return (
            f"{seed}: {sizes.text_of(seed).partition('def function')[2]}",
            "functions",
            _of(lambda: sizes.check(seed)),
        )

    yield one


@contextlib.contextmanager
def rows(options: argparse.Namespace) -> Iterator[Trial]:
    from workshop.fuzz import rows

    def one(number: int) -> Found:
        seed = options.seed * EACH_SEED + number
        return f"{seed}: {rows.Model(seed)}", "functions", _of(lambda: rows.check(seed))

    yield one


@contextlib.contextmanager
def files(options: argparse.Namespace) -> Iterator[Trial]:
    from workshop.fuzz.files import run

    with run.tried(options.only, 0 if options.no_limit else run.MEMORY) as tried:

        def one(number: int) -> Found:
            kind, outcome, told = tried(options.seed, number)
            wrong = f"{outcome}: {told}" if outcome in run.FAULTS else ""
            return f"edit {number} of seed {options.seed}, {kind}", f"{kind}: {outcome}", wrong

        yield one


def _of(check: Callable[[], str]) -> str:
    """What a check finds; an error of the check itself is a finding too."""
    try:
        return check()
    except Exception as problem:
        at = traceback.extract_tb(problem.__traceback__)[-1]
        return f"{short(problem, 300)} ({at.filename}:{at.lineno})"


KINDS = {"around": around, "causal": causal, "sizes": sizes, "rows": rows, "files": files}


def search(options: argparse.Namespace, say: Callable[[str], None]) -> tuple[collections.Counter[str], int]:
    """How many programs of each kind there were, and how many were wrong; each of these is printed."""
    counts: collections.Counter[str] = collections.Counter()
    wrong, end = 0, time.monotonic() + 60 * options.minutes
    with KINDS[options.kind](options) as trial, contextlib.suppress(KeyboardInterrupt):
        for number in itertools.count(options.first):
            if time.monotonic() >= end or counts.total() >= options.count:
                break
            program, kind, found = trial(number)
            counts[kind] += 1
            wrong += bool(found)
            if found:
                print(f"{' '.join(program.split())} -> {' '.join(found.split())[:500]}", flush=True)
            say(f"{counts.total()} programs, {wrong} wrong")
    return counts, wrong


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m workshop search", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument(
        "--minutes", type=at_least(0, float), help="how long (default 5, unless --count is given)"
    )
    parser.add_argument("--count", type=POSITIVE, help="how many programs")
    parser.add_argument("--first", type=at_least(0), default=0, help="the number of the first")
    own = parser.add_argument_group("files")
    own.add_argument("--only", default="", help="a part of the name of a kind of files")
    own.add_argument("--sanitize", action="store_true", help="compile kernels with AddressSanitizer")
    own.add_argument("--no-limit", action="store_true", help="of memory")
    return parser


def main(argv: Sequence[str]) -> int:
    """The command; 1 if a program was wrong."""
    options = _parser().parse_args(argv)
    if options.sanitize:
        from workshop.fuzz.files.run import with_sanitizer

        return with_sanitizer([a for a in argv if a != "--sanitize"])
    options.minutes = options.minutes if options.minutes is not None else math.inf if options.count else 5.0
    options.count = options.count or sys.maxsize
    tell, start, before = Progress(every=10), time.monotonic(), logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            counts, wrong = search(options, tell)
    finally:
        logging.disable(before)
        tell.done()
    each = (time.monotonic() - start) / max(1, counts.total())
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
    programs = f"{counts.total()} programs ({kinds}), {wrong} wrong, {each:.2f} s each"
    print(f"search {options.kind}, seed {options.seed}: {programs}")
    return int(bool(wrong))
