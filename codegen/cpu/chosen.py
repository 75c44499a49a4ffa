"""Which of two kernels takes less time, measured on each machine.

Attention in 16 bits: ATen's kernel multiplies 16-bit numbers by the processor's own instructions where it
has them (AVX512-BF16, AMX); so does ours with bfloat16 and AVX512-BF16 (`c/tile.h`), and elsewhere it widens
them and multiplies in float32. Products of many tokens: PyTorch's or ours (`tokens/run.py`). Which is faster
differs by machine and size. So the first large call of a kind runs both, in turns, and the faster one serves
such calls in this process. Times are stored beside the compiled libraries, for this processor, compiler and
version of our C alone, as `chosen_<machine>_<version>.json`:

    {"forward, bfloat16, 64 wide, causal, 512 queries, 2 threads":
        {"seconds": {"cpu.flash": 0.004, "cpu.compiled": 0.01}, "processes": 1}}

Other work on the machine makes a kernel seem slower than it is, never faster. So the next processes run both
once more, unless one is clearly slower, and the least times of all of them count. A file that is malformed,
or that cannot be written, is logged and ignored.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from attngraph.codegen.cpu import native, toolchain
from attngraph.codegen.remarks import Remarks
from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops.kernels import Operands
from attngraph.ir.records import made, plain, write_whole

_log = logging.getLogger("attngraph.codegen.cpu")
_Result = TypeVar("_Result")
Times = dict[str, float]
"""Seconds by the name of a kernel."""
TURNS = 3
"""How often the first process times each kernel; later ones do it once."""
LONG = 0.3
"""A kernel is not timed again once it has taken so many seconds in all."""
PROCESSES, CLEAR = 5, 2.0
"""So many processes time the kernels of a kind, or fewer if one takes so many times as long as the other."""
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Measured:
    """The least seconds of each kernel, and how many processes measured them."""

    seconds: Times
    processes: int

    @property
    def is_settled(self) -> bool:
        return self.processes >= PROCESSES or max(self.seconds.values()) >= CLEAR * min(self.seconds.values())


_known: dict[str, Measured] | None = None
_measured_here: set[str] = set()
"""The kinds that this process has measured."""


def kind_of(step: str, program: ScoreProgram, operands: Operands) -> str:
    """What calls have in common that are taken to be served best by the same kernel."""
    q, k, _ = operands
    mask = "causal" if program.keeps else "plain"
    queries, keys = (1 << max(0, t.shape[2] - 1).bit_length() for t in (q, k))
    about = [step, str(q.dtype).removeprefix("torch."), f"{q.shape[3]} wide", mask, f"{queries} queries"]
    about += [] if keys == queries else [f"{keys} keys"]
    return ", ".join([*about, f"{torch.get_num_threads()} threads"])


def known(kind: str) -> Times | None:
    """The times by which calls of a kind are served; None if this process has to measure first."""
    found = _table().get(kind)
    return found.seconds if found and (found.is_settled or kind in _measured_here) else None


def best(times: Times) -> str:
    """The kernel that took least time."""
    return min(times, key=lambda name: times[name])


def measure(kind: str, ways: Mapping[str, Callable[[], _Result]]) -> _Result:
    """Run all ways to compute a call in turns, store their times, and return the result of the fastest."""
    before = _table().get(kind)
    if before is None:
        for way in ways.values():
            way()  # compiles what is not compiled yet
    toolchain.settle()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    results: dict[str, _Result] = {}
    for _ in range(TURNS if before is None else 1):
        for name, way in ways.items():
            if sum(taken[name]) < LONG:
                seconds, results[name] = _timed(way)
                taken[name].append(seconds)
    times = {name: min(seconds) for name, seconds in taken.items()}
    _log.info("%s: %s", kind, ", ".join(f"{name} {1e3 * t:.2f} ms" for name, t in times.items()))
    return results[best(_keep(kind, times))]


def fastest(
    kind: str, ways: Mapping[str, Callable[[], _Result]], remarks: Remarks, program: Hashable
) -> _Result:
    """The result of the way that takes least time, which is measured first if not known, and remarked."""
    times = known(kind)
    result = measure(kind, ways) if times is None else ways[best(times)]()
    remarks.add(program, said(kind, times or known(kind) or {}))
    return result


def said(kind: str, times: Times) -> str:
    """What the report says of a choice."""
    name, other = sorted(times, key=lambda name: times[name])[:2]
    ratio = times[other] / max(times[name], 1e-9)
    return f"{other} takes {ratio:.1f} times as long as {name}, measured here for {kind}"


def _timed(way: Callable[[], _Result]) -> tuple[float, _Result]:
    start = time.perf_counter()
    result = way()
    return time.perf_counter() - start, result


def _table() -> dict[str, Measured]:
    global _known
    with _lock:
        if _known is None:
            _known = _read(_path())
        return _known


def _path() -> Path:
    """Of the table. Other C, of what is written by hand, takes other times."""
    texts = [path.read_bytes() for path in sorted(native.FOLDER.glob("*.h"))]
    version = hashlib.sha256(b"".join(texts)).hexdigest()[:8]
    return toolchain.folder() / f"chosen_{toolchain.machine()}_{version}.json"


def _read(path: Path) -> dict[str, Measured]:
    try:
        found: dict[str, Measured] = made(dict[str, Measured], json.loads(path.read_text(encoding="utf-8")))
        for one in found.values():
            if len(one.seconds) < 2 or not all(0 <= seconds < 1e6 for seconds in one.seconds.values()):
                raise ValueError(f"{one} are no times of two kernels")
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        _log.warning("%s is no table of times and is not used: %r", path, problem)
        return {}


def _keep(kind: str, times: Times) -> Times:
    """Store times, with what other processes have stored meanwhile. Returns the least times of all."""
    table, path = _table(), _path()
    with _lock:
        stored = _read(path)
        others = [m for m in (stored.get(kind), table.get(kind)) if m is not None]
        least = {name: min([t, *(m.seconds.get(name, t) for m in others)]) for name, t in times.items()}
        stored[kind] = table[kind] = Measured(least, 1 + max((m.processes for m in others), default=0))
        _measured_here.add(kind)
        with contextlib.suppress(OSError):
            write_whole(path, json.dumps(plain(stored), indent=1))
    return least
