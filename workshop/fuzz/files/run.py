"""Runs edits of files, each in a process of its own: a fork with limits of time and memory, which tells what
it did.

A process that dies, takes too long, writes to a path or loads a library that a file names, or opens a file
for writing elsewhere than in its own folders is a failure; so is an error of another kind than ours while a
file is read. What a graph computes is its author's: another answer, or an error when it runs, is none.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECONDS, WAITING, MEMORY = 60, 400, 6 << 30
"""Of a process's own time, and with what it waits for (a compiler)."""
SHOW = "ATTNGRAPH_FUZZ_SHOW"
"""Set to 1, every outcome is printed; set to 2, also what the process prints."""


@dataclasses.dataclass
class Found:
    """What came of the edits: how often, by kind of file and outcome, and the failures."""

    counts: dict[str, dict[str, int]]
    failures: list[str]

    def __str__(self) -> str:
        lines = [f"{sum(sum(c.values()) for c in self.counts.values())} edits, {len(self.failures)} failures"]
        for name, counts in self.counts.items():
            told = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
            lines.append(f"  {name}: {told}")
        return "\n".join([*lines, *self.failures])


def run(edits: int, seed: int = 0, first: int = 0, only: str = "", limit: int = MEMORY) -> Found:
    """Try edits `first` .. `first + edits - 1` of a seed. `only`: of this kind of files."""
    import torch

    from workshop.fuzz.files.subjects import all_of

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork has no other threads
    base = Path(tempfile.mkdtemp(prefix="attngraph-files-"))
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    failures: list[str] = []
    try:
        subjects = all_of(base, only)
        for number in range(first, first + edits):
            rng = random.Random(f"{seed} {number}")
            (subject,) = rng.choices(subjects, [s.weight for s in subjects])
            outcome, told = _apart(subject, rng, base, limit)
            counts[subject.name][outcome] += 1
            if (number + 1 - first) % 100 == 0:
                print(f"{number + 1 - first} edits", file=sys.stderr, flush=True)
            if os.environ.get(SHOW):
                print(f"edit {number}, {subject.name}: {outcome}: {told}", flush=True)
            if outcome in ("crash", "hang", "escape", "unexpected"):
                failures.append(f"edit {number} of seed {seed}, {subject.name}: {outcome}: {told}")
                print(failures[-1], flush=True)
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(base, ignore_errors=True)
    return Found({name: dict(c) for name, c in counts.items()}, failures)


def _apart(subject: Any, rng: random.Random, base: Path, limit: int) -> tuple[str, str]:
    """The outcome of one edit in a process of its own."""
    work = Path(tempfile.mkdtemp(prefix="edit-", dir=base))
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _child(subject, rng, work, writing, limit)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    escaped = [p.name for p in base.iterdir() if p.name.startswith("canary")]
    shutil.rmtree(work, ignore_errors=True)
    if escaped:
        return "escape", f"wrote {escaped}"
    if os.WIFSIGNALED(status):
        code = os.WTERMSIG(status)
        return ("hang" if code in (signal.SIGALRM, signal.SIGPROF) else "crash"), signal.Signals(code).name
    with contextlib.suppress(ValueError):
        outcome, told = json.loads(data)
        return outcome, told
    return "crash", f"exit code {os.waitstatus_to_exitcode(status)}"


def _child(subject: Any, rng: random.Random, work: Path, writing: int, limit: int) -> None:
    from attngraph.errors import AttnGraphError

    escaped: list[str] = []
    try:
        os.chdir(work)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(WAITING)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        if limit:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        out = os.open("output", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2) if os.environ.get(SHOW) != "2" else ():
            os.dup2(out, stream)
        sys.addaudithook(lambda event, args: _look(event, args, escaped))
        try:
            outcome, told = subject.trial(rng, work, str(work.parent / "canary")), ""
        except AssertionError as problem:
            outcome, told = "unexpected", str(problem)[:300]
        except AttnGraphError as problem:
            outcome, told = "refused", f"{type(problem).__name__}: {problem}"[:300]
        except Exception as problem:
            outcome, told = "error", f"{type(problem).__name__}: {problem}"[:300]
        if escaped:
            outcome, told = "escape", escaped[0]
        os.write(writing, json.dumps([outcome, told]).encode())
    finally:
        os._exit(0)


def _look(event: str, args: Sequence[Any], escaped: list[str]) -> None:
    """Note what no file may bring about: libraries that are loaded, files that are written, programs."""
    if event == "ctypes.dlopen" and args[0] and "canary" in str(args[0]):
        escaped.append(f"loaded {args[0]}")
    elif event == "open" and isinstance(args[0], str) and isinstance(args[2], int):
        writes = args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and not args[0].startswith((tempfile.gettempdir(), "/dev/", *_own())) and args[0][0] == "/":
            escaped.append(f"wrote {args[0]}")
    elif event in ("os.system", "os.exec", "os.posix_spawn"):
        escaped.append(f"{event} {args!r:.200}")


def _own() -> tuple[str, ...]:
    return tuple(
        os.environ[name] for name in ("ATTNGRAPH_CACHE", "TORCHINDUCTOR_CACHE_DIR") if os.environ.get(name)
    )


def with_sanitizer(arguments: Sequence[str]) -> int:
    """The same in a process whose kernels are compiled with AddressSanitizer, where gcc has it."""
    libraries = [
        subprocess.run(
            ["gcc", f"-print-file-name={n}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for n in ("libasan.so", "libstdc++.so.6")
    ]
    with tempfile.TemporaryDirectory() as cache:
        surroundings = {
            **os.environ, "CC": "gcc -fsanitize=address -fno-omit-frame-pointer -O1",
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:handle_segv=0:allocator_may_return_null=1",
            "ATTNGRAPH_CACHE": cache,
        }  # fmt: skip
        command = [sys.executable, "-m", "workshop.fuzz.files", *arguments, "--no-limit"]
        return subprocess.run(command, env=surroundings, check=False).returncode


def main() -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="python -m workshop.fuzz.files")
    parser.add_argument("--edits", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the name of a kind of files")
    parser.add_argument("--sanitize", action="store_true", help="compile kernels with AddressSanitizer")
    parser.add_argument("--no-limit", action="store_true", help="of memory")
    options = parser.parse_args()
    if options.sanitize:
        return with_sanitizer([a for a in sys.argv[1:] if a != "--sanitize"])
    start = time.time()
    found = run(options.edits, options.seed, options.first, options.only, 0 if options.no_limit else MEMORY)
    print(f"{found}\n{time.time() - start:.0f} s")
    return 1 if found.failures else 0
