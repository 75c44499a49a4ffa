"""How long calls take on a device, whatever the host needs to launch them."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

ROUNDS = 9
_CYCLES = 2e9
"""About as many a second does a GPU's clock have."""


class Clock:
    """Times calls on a device, with its cache emptied before each.

    Args:
        turn: called before the first measurement; it returns when nothing else uses the device.
    """

    def __init__(self, device: str, turn: Callable[[], None] = lambda: None) -> None:
        self.device = device
        self.is_cuda = device.startswith("cuda")
        self.flush = torch.empty(128 << 20 if self.is_cuda else 1, dtype=torch.int32, device=device)
        self._turn = functools.cache(turn)

    def once(self, call: Callable[[], object]) -> float:
        """Seconds of the device."""
        return self._both(call, self._both(call, 0.0)[1])[0]

    def _both(self, call: Callable[[], object], before_it: float) -> tuple[float, float]:
        """Seconds of the device, and of the host until it has launched everything. The device is kept busy
        for longer than that: for `before_it` seconds, and half as many again."""
        if not self.is_cuda:
            self.flush.zero_()
            start = time.perf_counter()
            call()
            return (spent := time.perf_counter() - start), spent
        event: Any = torch.cuda.Event
        sleep: Any = torch.cuda._sleep
        before, after = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()
        self.flush.zero_()
        sleep(int(1.5 * before_it * _CYCLES))
        before.record()
        start = time.perf_counter()
        call()
        spent = time.perf_counter() - start
        after.record()
        torch.cuda.synchronize()
        return float(before.elapsed_time(after)) / 1e3, spent

    def medians(
        self, calls: Mapping[str, Callable[[], object]], rounds: int = ROUNDS
    ) -> dict[str, tuple[float, float]]:
        """Median seconds of each call, and of its launch; calls take turns."""
        self._turn()
        for call in calls.values():
            self._both(call, 0.0)
        launched = {name: self._both(call, 0.0)[1] for name, call in calls.items()}
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                spent[name].append(self._both(call, launched[name]))
        return {
            name: (statistics.median(d for d, _ in found), statistics.median(h for _, h in found))
            for name, found in spent.items()
        }
