"""GPUs in numbers, and the model that turns what a loop executes into time.

A multiprocessor's time for a tile has two parts: products on tensor cores, and all other instructions, of
which the busiest unit decides. In one program, the parts overlap as far as the machine code lets them:
products by warp groups (sm_90) go on until the code waits for them; others keep their warp. What a program
leaves idle, programs that share a multiprocessor fill:

    time of a tile = larger part + (time of a program alone - larger part) / programs

and no less than the memory needs to deliver the tile. Products run at `ATTAINED` of the rate in the data
sheet, as large matrix products do. `OBTAINED`, `TURN`, `DRAIN` and `ARRIVAL` were fitted to the times of
kernels on an H200 (docs/measured/h200_tiles.json): docs/gpu.md says how well, and for which kernels not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from workshop.bench.scorecard.code import Step, Work

ATTAINED = 0.8
"""The share of the data sheet's rate that a plain matrix product was measured to reach on an H200 (790 of
989)."""
DELIVERED = 0.9
"""The share of the data sheet's memory bandwidth that a copy was measured to reach on an H200."""
OBTAINED = 0.8
"""The share of their rate that instructions besides products reach: many wait for a result before them."""
TURN = 450
"""Cycles that a program loses in each turn of a loop, whatever the tile: the wait for its loads, the first
product's way through the tensor cores, the rows' largest scores."""
DRAIN = 32
"""Cycles that a warp loses at a barrier, or where it waits for products to finish before it goes on."""
ARRIVAL = 600
"""Cycles that a program loses in a turn in which it asks for a tile and has nothing else to compute."""
LATENCY = 1000
"""Cycles from the request of a tile to its arrival from memory, under load (H100: 600 to 1000)."""


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU. Rates are per cycle of one multiprocessor: `flops` (for warp groups' products, or the only kind)
    and `flops_of_warps`, lanes of instructions issued, floats (`fused`), others (`integer`), transcendental
    (`special`), bytes of shared memory and of the second cache.

    Attributes:
        gigahertz: the clock of the data sheet's rate. bandwidth: of memory, bytes per second.
        registers: per lane and quarter of a multiprocessor for one warp; `unit` of their allocation.
        shared: bytes of shared memory; `reserved` of them for each program. warps: at most, per quarter.
    """

    name: str
    multiprocessors: int
    gigahertz: float
    flops: int
    flops_of_warps: int
    issued: int
    fused: int
    integer: int
    special: int
    shared_rate: int
    cache_rate: float
    bandwidth: float
    registers: int
    shared: int
    reserved: int
    warps: int
    lanes: int = 32
    unit: int = 8

    def programs(self, registers: int, shared: int, warps: int) -> int:
        """How many programs share a multiprocessor."""
        each = max(self.unit, -(-registers // self.unit) * self.unit)
        by_registers = 4 * min(self.warps, self.registers // each) // warps
        by_shared = self.shared // (shared + self.reserved) if shared + self.reserved else by_registers
        return max(1, min(by_registers, by_shared))

    def cycles(self, work: Work, warps: int, programs: int) -> float:
        """Cycles of a multiprocessor for one turn of the loop in each of its programs, per program."""
        tensor = self._products(work, warps, self.flops if work.by_groups else self.flops_of_warps)
        other = self._others(work, warps, work.products)
        larger = max(tensor, other)
        alone = max(self._in_order(work, warps), larger) if work.steps else tensor + other
        return larger + (alone - larger + TURN + DRAIN * work.stops) / programs

    def _products(self, work: Work | Step, warps: int, rate: int) -> float:
        return max(warps * work.flops / rate / ATTAINED, warps * work.operand_bytes / self.shared_rate)

    def _others(self, work: Work | Step, warps: int, products: int) -> float:
        """Cycles of the busiest unit besides that for products."""
        lanes = warps * self.lanes
        least = max(
            lanes * (work.instructions - products * self.frees_issue) / self.issued,
            lanes * work.fused / self.fused, lanes * work.integer / self.integer,
            lanes * work.special / self.special, warps * work.shared_bytes / self.shared_rate,
        )  # fmt: skip
        return least / OBTAINED

    def _in_order(self, work: Work, warps: int) -> float:
        """Cycles of one turn in a program alone, whose products go on beside its other instructions until it
        waits for them. Between two waits, instructions are spread evenly over the time that the busiest unit
        takes for them."""
        turns = 4
        order = work.steps * turns
        now, idle, groups, since = 0.0, 0.0, list[float](), 0
        ends: list[float] = []
        for place, step in enumerate(order):
            if step.waits is None:
                continue
            between = order[since : place + 1]
            took = self._others(_together(between), warps, 0)
            each = took / sum(one.instructions for one in between)
            for one in between:
                now += each * one.instructions
                if one.flops:
                    idle = max(idle, now) + self._products(one, warps, self.flops)
                    groups += [idle] if one.closes else []
            under_way = groups[-step.waits :] if step.waits else []
            now = max([now, *groups[: len(groups) - len(under_way)]])
            groups, since = under_way, place + 1
            ends.append(now)
        each_turn = len(ends) // turns
        return ends[-1] - ends[-1 - each_turn] if each_turn else idle

    @property
    def frees_issue(self) -> int:
        """Whether products are issued beside other instructions (AMD: by another scheduler)."""
        return int(self.lanes == 64)

    def delivery(self, tile_bytes: int, readers: int, in_flight: float) -> float:
        """Cycles until a tile is delivered to one multiprocessor, with so many bytes asked for at a time: by
        the second cache, and, if only so many programs read the tile, by the memory (0: it does not
        matter)."""
        cached = tile_bytes / self.cache_rate
        if not readers:
            return cached
        share = DELIVERED * self.bandwidth / (self.multiprocessors * self.gigahertz * 1e9)
        return max(cached, tile_bytes / min(share * readers, in_flight / LATENCY if in_flight else math.inf))

    def rate(self, amount: float, cycles: float) -> float:
        """Amounts (operations, bytes) per second, of all multiprocessors."""
        return amount / cycles * self.gigahertz * 1e9 * self.multiprocessors


def _together(steps: Sequence[Step]) -> Step:
    names = [f.name for f in dataclasses.fields(Step) if f.name not in ("closes", "waits")]
    return Step(*(sum(getattr(step, name) for step in steps) for name in names))


CARDS = {
    "sm_90": Card(
        "H100 SXM", 132, 1.83, 4096, 2580, 128, 128, 64, 16, 128, 32.0, 3.35e12, 512, 233_472, 1024, 16
    ),
    "sm_80": Card(
        "A100 SXM", 108, 1.41, 2048, 2048, 128, 64, 64, 16, 128, 32.0, 2.04e12, 512, 167_936, 1024, 16
    ),
    "gfx942": Card(
        "MI300X", 304, 2.1, 2048, 2048, 64, 64, 64, 16, 128, 32.0, 5.3e12, 512, 65_536, 0, 8, lanes=64
    ),
}  # fmt: skip
"""Data sheets and the vendors' tables of instruction throughput. mma.sync on an H100 reaches 63 % of wgmma's
rate (Luo et al. 2024). The second cache of an H200 was measured to deliver 30 bytes."""
