"""Runs edits of files, each in a process of its own: a fork with limits of time and memory, which tells what
it did.

A process that dies, takes too long, writes to a path or loads a library that a file names, or opens a file
for writing elsewhere than in its own folders is a failure; so is an error of another kind than ours while a
file is read. What a graph computes is its author's: another answer, or an error when it runs, is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SECONDS, WAITING, MEMORY = 60, 400, 6 << 30
"""Of a process's own time, and with what it waits for (a compiler)."""
SHOW = "ATTNGRAPH_FUZZ_SHOW"
"""Set to anything, what the process prints is shown."""


FAULTS = ("crash", "hang", "escape", "unexpected")
"""The outcomes that are failures."""


@contextlib.contextmanager
def tried(only: str, limit: int = MEMORY) -> Iterator[Callable[[int, int], tuple[str, str, str]]]:
    """What tries edit `number` of a seed on files of the kinds with `only` in their names: the kind, the
    outcome, and what was told."""
    import torch

    from workshop.fuzz.files.subjects import all_of

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork has no other threads
    base = Path(tempfile.mkdtemp(prefix="attngraph-files-"))

    def one(seed: int, number: int) -> tuple[str, str, str]:
        rng = random.Random(f"{seed} {number}")
        (subject,) = rng.choices(subjects, [s.weight for s in subjects])
        return subject.name, *_apart(subject, rng, base, limit)

    try:
        subjects = all_of(base, only)
        yield one
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(base, ignore_errors=True)


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
        for stream in () if os.environ.get(SHOW) else (1, 2):
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
    """Where our own compilers write."""
    from attngraph.ir import cache_folder

    return str(cache_folder.wanted()), os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()


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
        command = [sys.executable, "-m", "workshop", "search", *arguments, "--no-limit"]
        return subprocess.run(command, env=surroundings, check=False).returncode
