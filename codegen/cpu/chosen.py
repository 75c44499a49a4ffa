"""Which of two kernels takes less time for attention in 16 bits, measured once on each machine.

ATen's kernel multiplies 16-bit numbers by the processor's own instructions where it has them (AVX512-BF16,
AMX); so does ours with bfloat16 and AVX512-BF16 (`c/tile.h`), and elsewhere it widens them and multiplies in
float32. Which is faster differs by machine, width and length. So the first large call of a kind runs both, in
turns, and the faster one serves such calls from then on. What was measured is stored beside the compiled
libraries, for this processor, compiler and version of our C alone, as `chosen_<machine>_<version>.json`:

    {"forward, bfloat16, 64 wide, causal, 512 queries, 2 threads": {"cpu.flash": 0.004, "cpu.compiled": 0.01}}

The times are seconds. A file that is malformed, or that cannot be written, is logged and ignored.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from attngraph.codegen.cpu import toolchain
from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops.kernels import Operands

_log = logging.getLogger("attngraph.codegen.cpu")
_Result = TypeVar("_Result")
Times = Mapping[str, float]
"""Seconds by the name of a kernel."""
TURNS = 3
"""How often each kernel is timed; the least time counts, because others use the machine too."""
LONG = 1.0
"""A kernel that takes so many seconds is timed once."""
_lock = threading.Lock()
_known: dict[str, Times] | None = None


def kind_of(step: str, program: ScoreProgram, operands: Operands) -> str:
    """What calls have in common that are taken to be served best by the same kernel."""
    q, k, _ = operands
    mask = "causal" if program.keeps else "plain"
    queries, keys = (1 << max(0, t.shape[2] - 1).bit_length() for t in (q, k))
    about = [step, str(q.dtype).removeprefix("torch."), f"{q.shape[3]} wide", mask, f"{queries} queries"]
    about += [] if keys == queries else [f"{keys} keys"]
    return ", ".join([*about, f"{torch.get_num_threads()} threads"])


def known(kind: str) -> Times | None:
    """What was measured for calls of a kind on this machine; None if nothing was."""
    return _table().get(kind)


def best(times: Times) -> str:
    """The kernel that took least time."""
    return min(times, key=lambda name: times[name])


def measure(kind: str, ways: Mapping[str, Callable[[], _Result]]) -> _Result:
    """Run all ways to compute a call in turns, store their times, and return the result of the fastest."""
    results = {name: way() for name, way in ways.items()}  # compiles what is not compiled yet
    times: dict[str, float] = {}
    for _ in range(TURNS):
        for name, way in ways.items():
            if times.get(name, 0.0) < LONG:
                times[name] = min(times.get(name, float("inf")), _seconds(way))
    _log.info("%s: %s", kind, ", ".join(f"{name} {1e3 * t:.2f} ms" for name, t in times.items()))
    _keep(kind, times)
    return results[best(times)]


def said(kind: str, times: Times) -> str:
    """What the report says of a choice."""
    name, other = sorted(times, key=lambda name: times[name])[:2]
    ratio = times[other] / max(times[name], 1e-9)
    return f"{other} takes {ratio:.1f} times as long as {name}, measured here for {kind}"


def _seconds(way: Callable[[], Tensor | object]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def _table() -> dict[str, Times]:
    global _known
    with _lock:
        if _known is None:
            _known = _read(_path())
        return _known


def _path() -> Path:
    return toolchain.folder() / f"chosen_{toolchain.machine()}_{_version()}.json"


@functools.cache
def _version() -> str:
    """A digest of the C that is written by hand: other C takes other times."""
    texts = [path.read_bytes() for path in sorted((Path(__file__).parent / "c").glob("*.h"))]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:8]


def _read(path: Path) -> dict[str, Times]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(kind): _times(times) for kind, times in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as problem:
        _log.warning("%s is no table of times and is not used: %r", path, problem)
        return {}


def _times(found: Mapping[str, float]) -> Times:
    times = {str(name): float(seconds) for name, seconds in found.items()}
    if len(times) < 2 or not all(0 <= seconds < 1e6 for seconds in times.values()):
        raise ValueError(f"{found} are no times of two kernels")
    return times


def _keep(kind: str, times: Times) -> None:
    """Store times, with what other processes have stored meanwhile."""
    table = _table()
    with _lock:
        table[kind] = times
        path = _path()
        with contextlib.suppress(OSError):
            content = json.dumps({**_read(path), kind: times}, indent=1)
            handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(content)
            os.replace(temporary, path)
