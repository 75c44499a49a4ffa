"""Time and peak memory of a call.

Machines are shared and their speed drifts, so candidates are timed in turn, round after round, and the
medians are compared. Memory is the rise of the process's peak resident size during one call (on a GPU, of the
allocator's peak); it is 0 where the system does not report it.
"""

import contextlib
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from attngraph.ir.ops import memory


@dataclass(frozen=True)
class Measurement:
    """`seconds` is the median over rounds, `least` the minimum; `peak_bytes` the rise of peak memory."""

    seconds: float
    least: float
    peak_bytes: int


def measure(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int = 5, seconds: float = 20.0,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Measurement]:  # fmt: skip
    """Measure candidates that have been called before: one call for the memory, then `rounds` rounds in which
    every candidate runs once; fewer (at least three) if `seconds` have passed."""
    peaks: dict[str, int] = {}
    for name, call in candidates.items():
        if progress is not None:
            progress(f"measuring {name}")
        peaks[name] = peak_memory(call)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    start = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - start > seconds:
            break
        for name, call in candidates.items():
            times[name].append(_time(call))
    return {
        name: Measurement(statistics.median(spent), min(spent), peaks[name]) for name, spent in times.items()
    }


def _time(call: Callable[[], object]) -> float:
    wait()
    start = time.perf_counter()
    _result = call()  # it is freed after the clock has stopped
    wait()
    return time.perf_counter() - start


def wait() -> None:
    """Until a GPU, if there is one, has done everything."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory(call: Callable[[], object]) -> int:
    """By how many bytes peak memory rose above what was held before the call."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return int(torch.cuda.max_memory_allocated() - before)
    memory.let_go()  # memory freed by earlier calls would hide this one's need
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except OSError:
        return 0
    before = _resident("VmRSS")
    call()
    return max(_resident("VmHWM") - before, 0)


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0
