"""Pages of a cache whose tokens ranks divide: those of one member of a team.

Of every row a member keeps each team-th token (`ir/ops/divided_attention.py`), in the pages of a row that is
so much shorter; of a window, in a ring so much smaller. Rows are told in numbers of all tokens, as they are
to any other pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attngraph.ir.ops.cached_attention import Store
from attngraph.ir.ops.divided_attention import own_count
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.pages import Pages, sent


def make_pages(stores: Sequence[Store], config: CacheConfig, device: torch.device) -> Pages:
    """The pages of stores that have one page table."""
    first = stores[0]
    if first.team == 1:
        return Pages(first.window, stores, config, device)
    return DividedPages(first.team, first.member, stores, config, device)


class DividedPages(Pages):
    """The pages of one member."""

    def __init__(
        self, team: int, member: int, stores: Sequence[Store], config: CacheConfig, device: torch.device
    ) -> None:
        self.team, self.member = team, member
        super().__init__(stores[0].window, stores, config, device)

    def own(self, length: int) -> int:
        return own_count(length, self.team, self.member)

    def most_own(self, count: int) -> int:
        return own_count(count, self.team, 0)

    @property
    def reach(self) -> int:
        return self.capacity * self.team

    def _own_of(self, firsts: Sequence[int], counts: Sequence[int]) -> tuple[list[int], list[int]]:
        """The same first tokens and numbers of tokens, of those that are kept here."""
        before = [self.own(n) for n in firsts]
        after = [self.own(n + count) for n, count in zip(firsts, counts, strict=True)]
        return before, [b - a for a, b in zip(before, after, strict=True)]

    def with_room(self, firsts: Sequence[int], counts: Sequence[int], length: int = 0) -> Pages:
        return super().with_room(*self._own_of(firsts, counts), length)

    def cropped(self, lengths: Sequence[int]) -> Pages:
        return super().cropped([*map(self.own, lengths)])

    def write(
        self, news: Mapping[str, Tensor], row: Tensor, positions: Tensor, firsts: Sequence[int],
        counts: Sequence[int],
    ) -> None:  # fmt: skip
        begin, own = 0, list[int]()
        for first, count in zip(firsts, counts, strict=True):
            own += range(begin + (self.member - first) % self.team, begin + count, self.team)
            begin += count
        places = sent(torch.tensor(own, dtype=torch.int64), self.device)
        if not len(places):
            return
        members = (store for stores, _ in self.arenas.values() for store in stores)
        picked = {store.name: news[store.name].index_select(store.token_dim, places) for store in members}
        before, many = self._own_of(firsts, counts)
        super().write(picked, row[places], positions[places] // self.team, before, many)
