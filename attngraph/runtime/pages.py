"""Pages of cached values: allocation to rows, growth, copy on write, ring buffers for sliding windows.

Values of equal shape are stored in one tensor (an arena), so that a step writes them all at once. In the
contiguous layout each row has one page, which grows; in the paged layout pages of equal size come from a
pool, and rows may share a page until one of them writes to it (copy on write). Where attention only sees a
window, a row's pages form a ring buffer.
"""

import collections
import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.ir.ops import memory
from attngraph.ir.ops.cached_attention import Store, in_ring, tell, told
from attngraph.ir.ops.divided_attention import own_count
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.parts import Part
from attngraph.runtime.saved_cache import number, numbers, require, tensor

FEW = 16
"""Up to this many new tokens are copied one by one; up to this many runs of consecutive ones, run by run."""


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without waiting for what the device is doing."""
    if device.type == "cpu":
        return tensor
    pinned = tensor.pin_memory() if device.type == "cuda" and torch.cuda.is_available() else tensor
    found = pinned.to(device, non_blocking=True)
    numbers = told(tensor)
    return found if numbers is None else tell(found, numbers)


class Pages(Part):
    """The pages of all stores with the same window, and which row has which page.

    Where a team of ranks divides a cache's tokens, these are the pages of one member: of every row it keeps
    each team-th token (`ir/ops/divided_attention.py`), in the pages of a row that is so much shorter; of a
    window, in a ring so much smaller. Rows are told in numbers of all tokens. Of a value with an entry
    for each few tokens the same is kept as of a team whose last member this is."""

    def __init__(self, stores: Sequence[Store], rows: int, config: CacheConfig, device: torch.device) -> None:
        self.window, self.team, self.member = stores[0].window, stores[0].team, stores[0].member
        self.name = stores[0].table if self.team == 1 else f"{stores[0].table}@{self.member}"
        if stores[0].size > 1:  # of each block the last token's place is kept
            self.team, self.member = stores[0].size, stores[0].size - 1
        self.config, self.device = config, device
        held = 0 if self.window is None else in_ring(self.window, config.rollback)
        self.ring = own_count(held, self.team, 0)
        self.paged = config.layout == "paged"
        self.page = config.page if self.paged else self.ring or 1
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.users: list[int] = []
        self.free: list[int] = []
        self._table: Tensor | None = None
        kinds: dict[tuple[Any, ...], list[Store]] = {}
        for store in stores:
            kinds.setdefault((store.shape, store.row_dim, store.token_dim, store.dtype), []).append(store)
        self.arenas: dict[tuple[Any, ...], tuple[list[Store], Tensor]] = {}
        self.values = {}
        for kind, members in kinds.items():
            self._put(kind, members, self._empty(members, 0))

    def _empty(self, members: Sequence[Store], pages: int) -> Tensor:
        first = members[0]
        shape = list(first.shape)
        shape[first.row_dim], shape[first.token_dim] = pages, self.page
        floating = self.config.floating
        dtype = floating if floating and first.dtype.is_floating_point else first.dtype
        return memory.empty((len(members), *shape), dtype, self.device)

    def _put(self, kind: tuple[Any, ...], members: list[Store], arena: Tensor) -> None:
        """Have an arena. The pages of each store, which are read, are the same tensors until then."""
        self.arenas[kind] = members, arena
        self.values = self.values | dict(zip((s.name for s in members), arena.unbind(), strict=True))

    def _copy(self) -> "Pages":
        """The same pages, of which other rows may have others."""
        other = copy.copy(self)
        other._table = None
        other.rows = [list(pages) for pages in self.rows]
        other.users, other.free, other.arenas = list(self.users), list(self.free), dict(self.arenas)
        return other

    def own(self, length: int) -> int:
        """How many of a row's first `length` tokens are kept here."""
        return own_count(length, self.team, self.member)

    def _own_of(self, firsts: Sequence[int], counts: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """The same first tokens and numbers of tokens, of those that are kept here."""
        if self.team == 1:
            return firsts, counts
        before = [self.own(n) for n in firsts]
        after = [self.own(n + count) for n, count in zip(firsts, counts, strict=True)]
        return before, [b - a for a, b in zip(before, after, strict=True)]

    @property
    def columns(self) -> int:
        """The most pages that any row has; in a ring buffer the fixed number of pages."""
        if self.ring:
            return -(-self.ring // self.page)
        return max((len(row) for row in self.rows), default=0) or 1

    @property
    def capacity(self) -> int:
        """How many tokens a row's pages can hold; a ring buffer then overwrites the oldest."""
        return self.columns * self.page

    @property
    def reach(self) -> int:
        """Of how many of a row's latest tokens those that are kept here are not overwritten."""
        return self.capacity * self.team

    def table(self) -> Tensor:
        if self._table is None:
            columns = self.columns
            padded = [row + [0] * (columns - len(row)) for row in self.rows]
            self._table = sent(torch.tensor(padded, dtype=torch.int64).reshape(-1, columns), self.device)
        return self._table

    def pages_of(self, first: int, last: int) -> range:
        """The indices of a row's pages that hold positions first .. last - 1."""
        if first >= last:
            return range(0)
        if self.ring and (last - 1) // self.capacity > first // self.capacity:
            return range(self.columns)  # it begins anew
        start = first % self.capacity if self.ring else first
        return range(start // self.page, (start + last - 1 - first) // self.page + 1)

    def _page_for(self, longest: int, limit: int | None) -> int:
        """In the contiguous layout: for how many tokens a page is to have room; 0 where there is enough."""
        most = self.own(longest)
        if most <= self.page or self.paged or self.ring:
            return 0
        if self.config.max_length is not None:
            return self.own(self.config.max_length)
        return max(most, max(2 * self.page, 64) if limit is None else min(2 * self.page, self.own(limit)))

    def with_room(self, firsts: Sequence[int], counts: Sequence[int], limit: int | None) -> "Pages":
        """Pages with the same contents, of which every row has unshared ones for its positions first .. first
        + count - 1; in the contiguous layout one for more tokens, at most `limit`. These, if they are so."""
        length = self._page_for(max(map(sum, zip(firsts, counts, strict=True)), default=0), limit)
        firsts, counts = self._own_of(firsts, counts)
        longer = length > 0
        found = self._stretched(length) if longer else self
        needed = [found.pages_of(n, n + count) for n, count in zip(firsts, counts, strict=True)]
        missing = 0
        for pages, places in zip(self.rows, needed, strict=True):
            have, last = len(pages), places.stop - 1 if places else -1
            missing += max(0, last + 1 - have)
            missing += sum(self.users[pages[n]] > 1 for n in places if n < have)
        if not missing:
            return found
        found = found if longer else self._copy()
        found._make_room(missing)
        for pages, places in zip(found.rows, needed, strict=True):
            for place in places:
                while len(pages) <= place:
                    pages.append(found._take())
                if found.users[pages[place]] > 1:
                    found.copy_pages([found._own(pages, place)])
        return found

    def _own(self, pages: list[int], place: int) -> tuple[int, int]:
        """Give a row a page of its own for one that it shares; which page is to be copied, and where to."""
        old, new = pages[place], self._take()
        self.users[old] -= 1
        pages[place] = new
        return old, new

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages to others."""
        for members, arena in self.arenas.values():
            dim = 1 + members[0].row_dim
            for old, new in pairs:
                arena.select(dim, new).copy_(arena.select(dim, old))

    def _make_room(self, count: int) -> None:
        """Have so many free pages. All are allocated at once, because what is kept is copied each time; a
        pool of pages at least doubles, so that growing a page at a time costs the same for each."""
        more, count = count - len(self.free), len(self.users)
        if more <= 0:
            return
        more = max(more, 4, count) if self.paged else more
        for kind, (members, arena) in self.arenas.items():
            larger = self._empty(members, count + more)
            larger.narrow(1 + members[0].row_dim, 0, count).copy_(arena)
            self._put(kind, members, larger)
        self.users += [0] * more
        self.free += range(count + more - 1, count - 1, -1)

    def _take(self) -> int:
        page = self.free.pop()
        self.users[page] = 1
        return page

    def _stretched(self, length: int) -> "Pages":
        """Pages for so many tokens with the same contents."""
        other = self._copy()
        other.page = length
        for kind, (members, arena) in self.arenas.items():
            larger = other._empty(members, len(self.users))
            larger.narrow(1 + members[0].token_dim, 0, self.page).copy_(arena)
            other._put(kind, members, larger)
        return other

    def cropped(self, before: Sequence[int], lengths: Sequence[int]) -> "Pages":
        """Without the pages that rows do not need. (Kept tokens can be on any page of a ring buffer.)"""
        needed = [
            len(pages) if self.ring and length else min(len(pages), -(-self.own(length) // self.page))
            for pages, length in zip(self.rows, lengths, strict=True)
        ]
        if needed == [*map(len, self.rows)]:
            return self
        other = self._copy()
        for pages, count in zip(other.rows, needed, strict=True):
            for page in pages[count:]:
                other.users[page] -= 1
                if other.users[page] == 0:
                    other.free.append(page)
            del pages[count:]
        return other

    def write(
        self, news: Mapping[str, Tensor], row: Tensor, positions: Tensor, firsts: Sequence[int],
        counts: Sequence[int],
    ) -> None:  # fmt: skip
        """Write the values of new tokens to their pages. `row` and `positions` of every token are on the
        device; `firsts` and `counts`, each row's first position and number of new tokens, say the same.
        Nothing is asked of a device, so that a CUDA graph can capture it."""
        if self.team > 1:
            places = self._own_places(firsts, counts)
            stores = (store for members, _ in self.arenas.values() for store in members)
            news = {store.name: news[store.name].index_select(store.token_dim, places) for store in stores}
            row, positions = row[places], positions[places] // self.team
            firsts, counts = self._own_of(firsts, counts)
        if not len(row):
            return
        runs = list(itertools.islice(self._runs(firsts, counts), FEW + 1)) if row.is_cpu else []
        index: Any = None
        if not row.is_cpu or len(runs) > FEW:
            index = self._last_ones(counts)
            slot = positions[index] % self.capacity
            at = self.table()[row[index], slot // self.page], slot % self.page
        for members, arena in self.arenas.values():
            dims = members[0].row_dim, members[0].token_dim
            held = arena.movedim((1 + dims[0], 1 + dims[1]), (1, 2))
            values = [news[store.name].movedim(dims, (0, 1))[0] for store in members]
            if index is not None:
                held[:, at[0], at[1]] = torch.stack([v[index] for v in values]).to(arena.dtype)
                continue
            if len(row) > FEW:  # copied store by store: together is one copy more, of little
                pairs = [(to[None], value[None]) for to, value in zip(held, values, strict=True)]
            else:
                pairs = [(held, torch.stack(values))]
            for to, value in pairs:
                for page, place, begin, many in runs:
                    to[:, page, place : place + many].copy_(value[:, begin : begin + many])

    def _own_places(self, firsts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """The packed indices of the new tokens that are kept here."""
        begin, own = 0, list[int]()
        for first, count in zip(firsts, counts, strict=True):
            own += range(begin + (self.member - first) % self.team, begin + count, self.team)
            begin += count
        return sent(torch.tensor(own, dtype=torch.int64), self.device)

    def _runs(self, firsts: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """New tokens that are written to consecutive places: the page, the first place, the packed index of
        the first token, and how many they are. (A ring buffer may be too small for all.)"""
        begin, capacity = 0, self.capacity
        for pages, first, count in zip(self.rows, firsts, counts, strict=True):
            done = max(0, count - capacity)
            while done < count:
                page, place = divmod((first + done) % capacity, self.page)
                many = min(self.page - place, count - done)
                yield pages[page], place, begin + done, many
                done += many
            begin += count

    def _last_ones(self, counts: Sequence[int]) -> Any:
        """The packed indices of the new tokens that are written: all, unless a ring buffer is too small."""
        if not self.ring or max(counts, default=0) <= self.capacity:
            return slice(None)
        ends = itertools.accumulate(counts)
        spans = [range(end - min(n, self.capacity), end) for n, end in zip(counts, ends, strict=True)]
        return sent(torch.tensor([place for span in spans for place in span]), self.device)

    def reordered(self, rows: Sequence[int]) -> "tuple[Pages, list[tuple[int, int]]]":
        """Pages are shared where possible. What is there is needed while rows have the pages they had."""
        other = self._copy()
        other.rows = [list(self.rows[r]) for r in rows]
        counts = collections.Counter(p for pages in other.rows for p in pages)
        other.users = [counts.get(page, 0) for page in range(len(self.users))]
        other.free = [page for page in range(len(self.users) - 1, -1, -1) if not other.users[page]]
        if self.paged:
            return other, []
        other._make_room(sum(max(0, count - 1) for count in other.users))
        shared = ((pages, place) for pages in other.rows for place in range(len(pages)))
        return other, [other._own(*at) for at in shared if other.users[at[0][at[1]]] > 1]

    def saved(self) -> dict[str, Any]:
        arenas = [arena for _, arena in self.arenas.values()]
        return {
            "arenas": arenas, "page": self.page, "rows": self.rows, "users": self.users, "free": self.free,
        }  # fmt: skip

    def restored(self, saved: Any, lengths: Sequence[int]) -> "Pages":
        name = self.name
        require(isinstance(saved, dict), f"{name} is no record")
        lacking = {"arenas", "page", "rows", "users", "free"} - saved.keys()
        require(not lacking, f"{name} lacks {', '.join(sorted(lacking))}")
        page = number(saved["page"], f"{name}.page", 1)
        wanted = self.page if self.paged or self.ring else page
        require(page == wanted, f"{name} has pages of {page} tokens, not of {wanted}")
        self.page, self.users = page, numbers(saved["users"], f"{name}.users", 0, len(lengths))
        self._check_rows(saved, lengths)
        self.rows, self.free = [list(pages) for pages in saved["rows"]], list(saved["free"])
        arenas, places = saved["arenas"], set[int]()
        same = type(arenas) is list and len(arenas) == len(self.arenas)
        require(same, f"{name} has other values than its plan")
        for (kind, (members, empty)), arena in zip(list(self.arenas.items()), arenas, strict=True):
            first = members[0]
            shape = [len(members), *first.shape]
            shape[1 + first.row_dim], shape[1 + first.token_dim] = len(self.users), page
            found = tensor(arena, f"{name}.{first.name}", shape, empty.dtype, self.device)
            place = found.untyped_storage().data_ptr()
            require(not found.numel() or place not in places, f"{name} has two values in one place")
            places.add(place)
            self._put(kind, members, found)
        return self

    def _check_rows(self, saved: Any, lengths: Sequence[int]) -> None:
        """Whether each row has the pages that it needs, and nobody else's."""
        rows, name, users = saved["rows"], self.name, self.users
        own = type(rows) is list and len(rows) == len(lengths) and len(set(map(id, rows))) == len(rows)
        require(own, f"{name} has not one list of pages for each of {len(lengths)} rows")
        counted: collections.Counter[int] = collections.Counter()
        for row, (pages, length) in enumerate(zip(rows, lengths, strict=True)):
            where = f"{name}.rows[{row}]"
            numbers(pages, where, 0, len(users) - 1)
            require(len(set(pages)) == len(pages), f"{where} has a page twice")
            needed = -(-self.own(length) // self.page)
            needed, most = (min(needed, self.columns), self.columns) if self.ring else (needed, len(users))
            fits = needed <= len(pages) <= (most if self.paged else 1)
            require(fits, f"{where} has {len(pages)} page(s) of {self.page} tokens for {length} tokens")
            counted.update(pages)
        same = all(counted[n] == count for n, count in enumerate(users))
        require(same, f"{name}.users does not say how many rows use a page")
        require(self.paged or max(users, default=0) <= 1, f"{name} has a page of two rows")
        free = numbers(saved["free"], f"{name}.free", 0, len(users) - 1)
        unused = [n for n, count in enumerate(users) if not count]
        require(sorted(free) == unused, f"{name}.free is not the pages that no row uses")


def all_pages(
    stores: Sequence[Store], rows: int, config: CacheConfig, device: torch.device
) -> Iterator[Pages]:
    """The pages of all stores: those that have one page table together."""
    tables: dict[tuple[str, int], list[Store]] = {}
    for store in stores:
        tables.setdefault((store.table, store.member), []).append(store)
    for members in tables.values():
        yield Pages(members, rows, config, device)
