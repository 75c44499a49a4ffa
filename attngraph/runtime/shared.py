"""Equal beginnings of an engine's prompts, found by their tokens and computed once (a prefix cache).

A row that begins like another shares its pages, until one of them writes there. Requests that have ended are
kept in rows of their own; the ones that nothing has used for longest give way. A prompt that begins like one
that is being processed waits until that has come to where they part: so it is also shared what is kept of
rows as sums over their tokens, of which there is none but the latest.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from attngraph.errors import CacheError
from attngraph.runtime.kv_cache import KVCache
from attngraph.runtime.packing import equal_tokens
from attngraph.runtime.request import Request

_NONE = 2**31
"""No border."""


@dataclasses.dataclass
class _Kept:
    """A row that is kept: its tokens, and when it was used last (0: never), and made."""

    tokens: Tensor
    used: int
    made: int


class Beginnings:
    """Which row of a state begins like which other.

    Args:
        rows: those of the state for requests that have ended.
    """

    def __init__(self, rows: range) -> None:
        self.rows = rows
        self._kept: dict[int, _Kept] = {}
        self._border: dict[int, int] = {}
        """Up to where rows are processed for now, because others wait for that; 0 for these."""
        self._time = 0

    def forget(self) -> None:
        """Another state is used."""
        self._kept, self._border = {}, {}

    def tidy(self, state: KVCache) -> None:
        """Free the kept rows that are not what they are said to be, after a step that was interrupted."""
        lengths = state.lengths
        own = {row: kept for row, kept in self._kept.items() if lengths[row] == len(kept.tokens)}
        if own != self._kept or any(lengths[row] and row not in own for row in self.rows):
            self._kept = own
            state.crop([0 if n in self.rows and n not in own else length for n, length in enumerate(lengths)])

    def keep(self, state: KVCache, row: int, tokens: Tensor) -> None:
        """Keep what a row has, the first of these tokens."""
        tokens = tokens[: state.lengths[row]]
        if not self.rows or len(tokens) < state.config.page or self._have(tokens):
            return
        free = [n for n in self.rows if n not in self._kept]
        place = free[0] if free else min(self._kept, key=self._worth)
        self._kept.pop(place, None)
        state.reorder([row if n == place else n for n in range(state.rows)])
        self._time += 1
        self._kept[place] = _Kept(tokens, 0, self._time)

    def _have(self, tokens: Tensor) -> bool:
        known = (kept.tokens for kept in self._kept.values() if len(kept.tokens) >= len(tokens))
        return any(torch.equal(own[: len(tokens)], tokens) for own in known)

    def _worth(self, row: int) -> tuple[int, int]:
        return self._kept[row].used, self._kept[row].made

    def give_way(self, state: KVCache, most: int) -> None:
        """Free kept rows until they have at most so many tokens."""
        while self._kept and sum(len(kept.tokens) for kept in self._kept.values()) > most:
            row = min(self._kept, key=self._worth)
            del self._kept[row]
            state.reset(row)

    def most(self, row: int, done: int) -> int:
        """How many tokens of a row may be processed now."""
        border = self._border.get(row, _NONE)
        return max(0, border - done)

    def share(self, state: KVCache, places: Sequence[Request | None]) -> None:
        """Give rows without tokens the longest beginning that another has, or let them wait for it."""
        self._border = {}
        new = [(r.number, n, r) for n, r in enumerate(places) if r is not None and not state.lengths[n]]
        for _, place, request in sorted(new, key=lambda entry: entry[:2]):
            known = {row: kept.tokens for row, kept in self._kept.items()}
            known |= {
                n: other.whole() for n, other in enumerate(places)
                if other is not None and n != place and (state.lengths[n] or n in self._border)
            }  # fmt: skip
            alike = {row: equal_tokens(request.prompt[:-1], tokens) for row, tokens in known.items()}
            sources = [row for row in known if alike[row] >= state.config.page]
            self._border[place] = _NONE
            for source in sorted(sources, key=lambda row: (alike[row], state.lengths[row]), reverse=True):
                if state.lengths[source] < alike[source]:
                    self._border[place] = 0
                    self._border[source] = min(self._border.get(source, _NONE), alike[source])
                    break
                if self._fork(state, source, place, request, alike[source]):
                    break

    def _fork(self, state: KVCache, source: int, place: int, request: Request, count: int) -> bool:
        """Give a row the first tokens of another; False if that cannot go back to there."""
        try:
            with state.changing():
                state.reorder([source if n == place else n for n in range(state.rows)])
                state.crop([count if n == place else length for n, length in enumerate(state.lengths)])
        except CacheError:
            return False
        request.shared = count
        self._time += 1
        if source in self._kept:
            self._kept[source].used = self._time
        else:
            self.keep(state, place, request.prompt)
        return True
