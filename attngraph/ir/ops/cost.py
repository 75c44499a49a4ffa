"""What latent attention costs in either form, and which one is cheaper on a device.

Keys and values of G heads are made from one vector per token (`ir/ops/latent_attention.py`). Written out
("expanded"), every key is projected up once, and a pair of a query and a key costs 2 H (P + R + V)
operations. With the projections moved to the query and the result ("absorbed"), every query is projected
once, a pair costs 2 H (L + R + Lv), but only C values of a token are read instead of G (P + R + V). Counting
operations alone, the two meet at L (P + V) / (2 L - P - V) new tokens over many kept ones; a roofline counts
bytes too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple


class LatentSizes(NamedTuple):
    """`heads` (H) of queries on `kv_heads` (G); of a key `nope` (P) are made from `latent` (L) values and
    `shared` (R) are the same for all heads; of a value `value` (V) from `value_latent` (Lv). `width` (C) is
    what a token holds in all. What is not projected up counts as shared: L and P (or Lv) are 0 then."""

    heads: int
    kv_heads: int
    nope: int
    shared: int
    value: int
    latent: int
    value_latent: int
    width: int

    @property
    def expanded_width(self) -> int:
        """Values of one token's keys and values, written out for every key/value head."""
        return self.kv_heads * (self.nope + self.shared + self.value)

    @property
    def pair_expanded(self) -> int:
        """Floating-point operations of one query and one key."""
        return 2 * self.heads * (self.nope + self.shared + self.value)

    @property
    def pair_absorbed(self) -> int:
        return 2 * self.heads * (self.latent + self.shared + (self.value_latent or self.value))

    @property
    def up(self) -> int:
        """Operations of projecting one key and one value up (or one query and one result, with as many
        heads)."""
        return 2 * self.kv_heads * (self.latent * self.nope + self.value_latent * self.value)

    @property
    def query_up(self) -> int:
        return self.up * self.heads // self.kv_heads

    @property
    def crossover(self) -> float:
        """New tokens from which on projecting all keys up takes fewer operations than absorbing, over many
        kept tokens; infinite where absorbing always takes fewer."""
        more = self.pair_absorbed - self.pair_expanded
        return self.up / more if more > 0 else math.inf


@dataclasses.dataclass(frozen=True)
class Roofline:
    """What a device does at best in a second: operations and bytes (Williams et al. 2009)."""

    flops: float
    bytes: float

    def seconds(self, flops: float, bytes: float) -> float:
        return max(flops / self.flops, bytes / self.bytes)


ROOFLINES = {"cpu": Roofline(8.6e10, 3.1e10), "cuda": Roofline(7.9e14, 4.3e12)}
"""By kind of device. CPU: what decoding reaches on two cores with AVX-512 in float32; CUDA: a plain matrix
product and a copy on an H200 in bfloat16. Only the ratio of the two numbers decides anything."""
GAIN = 1.5
"""How many times faster a decoder must be by the roofline to keep latents: ideal times are that far off."""
SAVING, SLOWER = 4.0, 2.0
"""Where a cache becomes that many times smaller, a decoder may be that many times slower."""


def roofline(device: str) -> Roofline:
    return ROOFLINES.get(device, ROOFLINES["cuda"])


def absorbed_seconds(sizes: LatentSizes, new: int, held: int, line: Roofline, itemsize: int) -> float:
    """The least time for `new` queries of one row that see `held` kept tokens and, causally, one another."""
    keys, pairs = held + new, new * held + new * (new + 1) // 2
    projecting = line.seconds(new * sizes.query_up, 0)
    return projecting + line.seconds(pairs * sizes.pair_absorbed, keys * sizes.width * itemsize)


def expanded_seconds(sizes: LatentSizes, new: int, held: int, line: Roofline, itemsize: int) -> float:
    keys, pairs = held + new, new * held + new * (new + 1) // 2
    expanded = sizes.expanded_width
    projecting = line.seconds(keys * sizes.up, keys * (sizes.width + expanded) * itemsize)
    return projecting + line.seconds(pairs * sizes.pair_expanded, keys * expanded * itemsize)


def absorbing_pays(sizes: LatentSizes, rows: Iterable[tuple[int, int]], device: str, itemsize: int) -> bool:
    """Whether absorbing is cheaper for a call with so many (new, held) tokens in each row."""
    line = roofline(device)
    gain = 0.0
    for new, held in rows:
        gain += expanded_seconds(sizes, new, held, line, itemsize)
        gain -= absorbed_seconds(sizes, new, held, line, itemsize)
    return gain > 0


def keeping_pays(sizes: LatentSizes, device: str, itemsize: int) -> bool:
    """Whether a decoder that keeps latents is better than one that keeps keys and values: faster, or not
    much slower with a much smaller cache."""
    line = roofline(device)
    latent = line.seconds(sizes.pair_absorbed, sizes.width * itemsize)
    whole = line.seconds(sizes.pair_expanded, sizes.expanded_width * itemsize)
    return GAIN * latent < whole or (
        sizes.width * SAVING <= sizes.expanded_width and latent < SLOWER * whole
    )  # fmt: skip


MANY = 1 << 16
"""Kept tokens that stand for very many."""


@functools.lru_cache(maxsize=256)
def crossover(sizes: LatentSizes, device: str, itemsize: int) -> int | None:
    """The least number of new tokens of a row with many kept ones for which expanding is chosen; None if
    there is none."""
    low, high = 1, MANY
    if absorbing_pays(sizes, [(high, MANY)], device, itemsize):
        return None
    while low < high:
        middle = (low + high) // 2
        if absorbing_pays(sizes, [(middle, MANY)], device, itemsize):
            low = middle + 1
        else:
            high = middle
    return low
