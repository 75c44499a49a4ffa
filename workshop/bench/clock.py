"""How long calls take on a device, and until they are launched."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping

from attngraph.codegen.triton.tuning import ROUNDS, memory_to_flush, timed


class Clock:
    """Times calls on a device, with its cache emptied before each.

    Args:
        turn: called before the first measurement; it returns when nothing else uses the device.
    """

    def __init__(self, device: str, turn: Callable[[], None] = lambda: None) -> None:
        self.device = device
        self.flush = memory_to_flush(device)
        self._turn = functools.cache(turn)

    def once(self, call: Callable[[], object]) -> float:
        """Seconds of the device."""
        return timed(call, self.flush, timed(call, self.flush)[1])[0]

    def medians(
        self, calls: Mapping[str, Callable[[], object]], rounds: int = ROUNDS
    ) -> dict[str, tuple[float, float]]:
        """Median seconds of each call, and of its launch; calls take turns."""
        self._turn()
        for call in calls.values():
            timed(call, self.flush)
        launched = {name: timed(call, self.flush)[1] for name, call in calls.items()}
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                spent[name].append(timed(call, self.flush, launched[name]))
        return {
            name: (statistics.median(d for d, _ in found), statistics.median(h for _, h in found))
            for name, found in spent.items()
        }
