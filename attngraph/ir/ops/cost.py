"""The cost of latent attention in its two forms, and which one is cheaper on a device.

Keys and values of G heads are made from one vector per token (`ir/ops/latent_attention.py`). In the expanded
form every key is projected up once, and a (query, key) pair costs 2 H (P + R + V) operations. In the absorbed
form the projections move to the query and the result: every query is projected once and a pair costs
2 H (L + R + Lv), but only C values of a token are read instead of G (P + R + V). By operations alone the two
cost the same at L (P + V) / (2 L - P - V) new tokens over many kept ones; a roofline counts bytes too.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple


class LatentSizes(NamedTuple):
    """`heads` (H): query heads; `kv_heads` (G): key/value heads. Of a key's values, `nope` (P) are projected
    up from `latent` (L) values and `shared` (R) are the same for all heads; a head's value has `value` (V)
    values from `value_latent` (Lv). `width` (C): cached values per token. Without an up-projection everything
    counts as shared, and L and P (or Lv) are 0."""

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
        """How many values one token's keys and values have, over all key/value heads."""
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
        """The number of new tokens from which expanding takes fewer operations than absorbing, over many kept
        tokens; infinite if absorbing always takes fewer."""
        more = self.pair_absorbed - self.pair_expanded
        return self.up / more if more > 0 else math.inf


@dataclasses.dataclass(frozen=True)
class Roofline:
    """A device's peak operations and bytes per second (Williams et al. 2009)."""

    flops: float
    bytes: float

    def seconds(self, flops: float, bytes: float) -> float:
        return max(flops / self.flops, bytes / self.bytes)


ROOFLINES = {"cpu": Roofline(8.6e10, 3.1e10), "cuda": Roofline(7.9e14, 4.3e12)}
"""By device type. CPU: measured in decoding on two cores with AVX-512, float32; CUDA: a plain matrix product
and a copy on an H200, bfloat16. Decisions depend only on the ratio of the two numbers."""
GAIN = 1.5
"""A decoder keeps latents for speed only if the roofline predicts at least this speedup: the model may be
off by about that much."""
SAVING, SLOWER = 4.0, 2.0
"""A decoder may be up to SLOWER times slower if that makes its cache at least SAVING times smaller."""


def roofline(device: str) -> Roofline:
    return ROOFLINES.get(device, ROOFLINES["cuda"])


def absorbed_seconds(sizes: LatentSizes, new: int, held: int, line: Roofline, itemsize: int) -> float:
    """The least time for `new` queries of one row that attend to `held` kept tokens and, causally, to one
    another."""
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
    about = [(sizes, new, held, roofline(device), itemsize) for new, held in rows]
    return sum(expanded_seconds(*each) - absorbed_seconds(*each) for each in about) > 0


def keeping_pays(sizes: LatentSizes, device: str, itemsize: int) -> bool:
    """Whether a decoder that keeps latents is better than one that keeps keys and values: faster, or not
    much slower with a much smaller cache."""
    line = roofline(device)
    latent = line.seconds(sizes.pair_absorbed, sizes.width * itemsize)
    whole = line.seconds(sizes.pair_expanded, sizes.expanded_width * itemsize)
    return GAIN * latent < whole or (sizes.width * SAVING <= sizes.expanded_width and latent < SLOWER * whole)


MANY = 1 << 16
"""Kept tokens: a stand-in for "very many"."""


@functools.lru_cache(maxsize=256)
def crossover(sizes: LatentSizes, device: str, itemsize: int) -> int | None:
    """The least number of new tokens, in a row with many kept ones, for which expanding is chosen; None if it
    never is."""
    numbers = range(1, MANY + 1)
    place = bisect.bisect(
        numbers, 0, key=lambda new: not absorbing_pays(sizes, [(new, MANY)], device, itemsize)
    )
    return numbers[place] if place < MANY else None
