"""The state of a decoder: the cached values of every row, and the rows' lengths.

Nothing is written before everything is known to fit, and what a call changes, it changes by one assignment,
of `Contents`. So a call that fails or is interrupted anywhere leaves a state as it was. Memory that present
contents need is written over in few places (a ring buffer, rows that change places in the contiguous layout);
what fails there is an error whenever the state is used again."""

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngraph.errors import CacheError
from attngraph.ir.modes import serving
from attngraph.ir.ops.cached_attention import CachePlan, tell
from attngraph.ir.records import replacing
from attngraph.runtime import saved_cache
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.pages import Pages, all_pages, sent
from attngraph.runtime.parts import CarriedValues, FixedValues, Part
from attngraph.runtime.saved_cache import require
from attngraph.runtime.tree import Tree

SAVED = "attngraph cache 4"


@dataclasses.dataclass(frozen=True)
class Call:
    """The sizes of a call: rows, the lengths of those that have a result, other sizes by their symbol."""

    rows: int
    lengths: frozenset[int]
    others: Mapping[str, int] = dataclasses.field(default_factory=dict)


class Contents(NamedTuple):
    """What a state has.

    Attributes:
        lengths: places of each row so far: its tokens, and before them the learned ones, if it has begun.
        lost: for each row: positions before this one have been overwritten in ring buffers.
        parts: what it keeps (`parts.py`), by name: pages by that of their page table, and where ranks divide
            the tokens, by which of them this is.
        unfinished: the call that began to write over what is here, and has not ended.
    """

    lengths: list[int]
    lost: list[int]
    parts: dict[str, Part]
    unfinished: str = ""


_NOTHING = Contents([], [], {})


class KVCache:
    """The cached state of the rows of a batch. Made by `Decoder.prefill`.

    What it has is `now`; `lengths` are the tokens of each row so far.
    """

    def __init__(
        self, plan: CachePlan, rows: int, config: CacheConfig, device: torch.device, limit: int | None = None
    ) -> None:
        self.plan, self.config, self.device = plan, config, device
        self.limit = min((n for n in (limit, config.max_length) if n is not None), default=None)
        self.origin: Any = None
        """What it belongs to (`derived.Origin`); set by the decoder. None: it was loaded."""
        self.sizes: dict[str, int] = {}
        """Sizes of the prompt's other inputs, by symbol."""
        self.alone = False
        """Whether each row is a call of its own, as an engine's requests are."""
        self.rank = (0, 1)
        """Whose part of the values this is: which rank, of how many."""
        self._ones: tuple[Tensor, Tensor] | None = None
        """The row of each token, and the start of each row's tokens, if every row gets one new token. Kept by
        the state, not by the process: a state of tensors without data has such ones here too."""
        parts: list[Part] = [*all_pages(plan.stores, rows, config, device)]
        parts += [CarriedValues(plan.carried, rows, config, device), FixedValues(plan.fixed, device, {})]
        self._now = Contents([0] * rows, [0] * rows, {part.name: part for part in parts})
        self._has_rings = any(store.window is not None for store in plan.stores)
        self._back = _NOTHING
        self.tree: Tree | None = None
        """The paths that the rows are, after `Decoder.decode(..., parents=...)`."""

    @property
    def now(self) -> Contents:
        """What the state has; a CacheError if a call that did not end has written over some of it."""
        if self._now.unfinished:
            raise CacheError(self.unfinished)
        return self._now

    @property
    def unfinished(self) -> str:
        """Why nobody can go on with the state; "" where one can."""
        return self._now.unfinished and (
            f"{self._now.unfinished} of this state did not end, and had begun to write over what is kept of "
            "its tokens, so nobody can go on with it.\nWhat to do: give the tokens anew (prefill, submit)."
        )

    @property
    def lengths(self) -> list[int]:
        found = self.now.lengths
        return [max(0, n - self.plan.begins) for n in found] if self.plan.begins else found

    @property
    def groups(self) -> dict[str, Pages]:
        """The pages among its parts."""
        return {name: part for name, part in self.now.parts.items() if isinstance(part, Pages)}

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Where the body fails, also after it has changed the state, the state is what it was before."""
        self._back = self._now
        try:
            yield
        except BaseException:
            self._now = self._back
            raise
        finally:
            self._back = _NOTHING

    def begin(self, fixed: Mapping[str, Tensor]) -> None:
        """Have these values of the prompt."""
        now = self.now
        part = FixedValues(self.plan.fixed, self.device, fixed)
        self._now = now._replace(parts=now.parts | {part.name: part})

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for cached values."""
        return sum(part.nbytes for part in self.now.parts.values())

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token of one row, sliding windows not considered."""
        return sum(store.bytes_in(self.config.floating) for store in self.plan.stores)

    def stores(self) -> dict[str, Tensor]:
        """The pages of every cached value, by name."""
        return {name: pages for group in self.groups.values() for name, pages in group.values.items()}

    def kept(self) -> dict[str, Tensor]:
        """All that a step reads: pages, what the rows carry, values of the prompt."""
        return {name: value for part in self.now.parts.values() for name, value in part.values.items()}

    # --- a step ---

    def call(self, counts: Sequence[int], unfinished: Collection[int] = ()) -> Call:
        """The sizes of a call with so many new tokens of each row. `unfinished`: rows without a result."""
        after = (n + c for row, (n, c) in enumerate(zip(self.lengths, counts, strict=False))
                 if c and row not in unfinished)  # fmt: skip
        return Call(1 if self.alone else self.rows, frozenset(after), self.sizes)

    def require_room(self, counts: Sequence[int]) -> None:
        """Check that `counts[r]` more tokens of each row r fit."""
        if len(counts) != self.rows:
            raise CacheError(f"new tokens for {len(counts)} row(s), but the state has {self.rows}.")
        after = [n + c for n, c in zip(self.lengths, counts, strict=True)]
        longest = max(after, default=0)
        if self.limit is not None and longest > self.limit:
            row = after.index(longest)
            raise CacheError(
                f"row {row} has {self.lengths[row]} token(s) and gets {counts[row]} more, but at most "
                f"{self.limit} fit (max_length, or the model's own limit). Nothing was written."
            )

    def reserve(self, counts: Sequence[int]) -> None:
        """Make room for `counts[r]` more places of each row r, which fit (`require_room`)."""
        now, groups = self.now, self.groups
        most = None if self.limit is None else self.limit + self.plan.begins
        roomy = {name: group.with_room(now.lengths, counts, most) for name, group in groups.items()}
        if roomy != groups:
            self._now = now._replace(parts=now.parts | roomy)

    def inputs(self, counts: Sequence[int]) -> dict[str, Tensor]:
        """The "rows" inputs of a step, by name: which token belongs to which row, and the page tables."""
        places = self.now.lengths
        first = tell(torch.tensor(places, dtype=torch.int64), places)
        if min(counts, default=0) == 1 == max(counts):
            if self._ones is None or len(self._ones[0]) != self.rows:
                self._ones = torch.arange(self.rows), tell(torch.arange(self.rows + 1), range(self.rows + 1))
            row, starts = self._ones
            positions = first
        else:
            count = torch.tensor(list(counts), dtype=torch.int64)
            row = torch.repeat_interleave(count, output_size=sum(counts))
            starts = torch.zeros(len(counts) + 1, dtype=torch.int64)
            torch.cumsum(count, 0, out=starts[1:])
            tell(starts, [0, *itertools.accumulate(counts)])
            positions = torch.arange(row.shape[0]) + (first - starts[:-1])[row]
        found = {"starts": starts, "first": first, "row": row, "positions": positions}
        if self.device.type != "cpu":
            found = {name: sent(t, self.device) for name, t in found.items()}
        return found | {name: group.table() for name, group in self.groups.items()}

    def write(self, news: Mapping[str, Any], given: Mapping[str, Tensor], counts: Sequence[int]) -> None:
        """Write what a step computed for its new tokens; `reserve` has made room for it. `news`: values by
        name, or for all stores a function that writes them."""
        now, groups = self.now, self.groups
        after = [n + c for n, c in zip(now.lengths, counts, strict=True)]
        parts = {name: part.after(news, now.lengths) for name, part in now.parts.items()}
        then = Contents(after, now.lost, parts)
        if self._has_rings:
            reach = self._reach
            lost = [max(a, b - reach) for a, b in zip(now.lost, after, strict=True)]
            spoils = any(self._lacks(n, a) for n, a in zip(now.lengths, lost, strict=True))
            then, why = then._replace(lost=lost), "a call with new tokens" if spoils else ""
            self._now = self._back = now._replace(lost=lost, unfinished=why)
        write = news[self.plan.stores[0].name] if self.plan.stores else None
        if callable(write):
            write()
        else:
            for group in groups.values():
                group.write(news, given["row"], given["positions"], now.lengths, counts)
        self._now = then

    @property
    def _reach(self) -> int:
        """That of the smallest ring buffer; 0 if there is none."""
        return min((group.reach for group in self.groups.values() if group.ring), default=0)

    def _lacks(self, length: int, lost: int) -> int:
        """The window of which a row of this length lacks a token; 0 if it lacks none. `lost`: as in
        `Contents`, for the smallest ring buffer; larger ones have lost fewer."""
        latest = lost and lost + self._reach
        for group in self.groups.values():
            if group.ring and latest - group.reach > max(0, length - (group.window or 0) + 1):
                return group.window or 0
        return 0

    # --- between steps ---

    def crop(self, length: int | Sequence[int]) -> None:
        """Remove all tokens of each row from position `length` on (a sequence: one length for each row).

        Raises:
            CacheError: a sliding window has overwritten tokens that would be needed again;
                `CacheConfig.rollback` sets how many tokens can be removed. Or the rows carry sums over their
                tokens; `CacheConfig.snapshots` sets how many calls can be undone.
        """
        now = self.now
        lengths = [length] * self.rows if isinstance(length, int) else list(length)
        if len(lengths) != self.rows:
            raise CacheError(f"{len(lengths)} length(s) for {self.rows} row(s).")
        if min(lengths, default=0) < 0:
            raise CacheError(f"a row cannot have {min(lengths)} tokens.")
        begins = self.plan.begins
        after = [min(a, b + begins if b else 0) for a, b in zip(now.lengths, lengths, strict=True)]
        for row, (old, new) in enumerate(zip(now.lengths, after, strict=True)):
            for part in now.parts.values():
                part.check_crop(row, old, new)
            window = self._lacks(new, now.lost[row]) if 0 < new < old else 0
            if window:
                raise CacheError(
                    f"row {row} cannot go back from {old} to {new} tokens: a window of {window} has "
                    "overwritten what it needs. CacheConfig(rollback=...) keeps more."
                )
        lost = [n and before for n, before in zip(after, now.lost, strict=True)]
        parts = {name: part.cropped(now.lengths, after) for name, part in now.parts.items()}
        self._now = Contents(after, lost, parts)

    def reset(self, row: int | None = None) -> None:
        """Remove all tokens, of one row or of all rows."""
        self.crop([0 if row in (None, n) else length for n, length in enumerate(self.lengths)])

    @serving
    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Row n becomes a copy of row rows[n]; the number of rows may change."""
        picked = [int(r) for r in rows]
        if any(not 0 <= r < self.rows for r in picked):
            raise CacheError(f"rows {picked} of a state of {self.rows} row(s).")
        now = self.now
        parts = {name: part.reordered(picked) for name, part in now.parts.items()}
        then = Contents(
            [now.lengths[r] for r in picked], [now.lost[r] for r in picked],
            {name: part for name, (part, _) in parts.items()},
        )  # fmt: skip
        copies = [(part, pairs) for part, pairs in parts.values() if isinstance(part, Pages) and pairs]
        if copies:
            self._now = self._back = now._replace(unfinished="reorder")
            for part, pairs in copies:
                part.copy_pages(pairs)
        self._now = then

    def keep(self, path: Sequence[int] | Sequence[Sequence[int]]) -> None:
        """Keep one path of the tree that `Decoder.decode(..., parents=...)` has computed, and of each row
        before that the tokens of its path alone.

        Args:
            path: the places of tokens among the new ones, from the row's last token on, for each row (for one
                row also without the list around it). An empty one keeps none.

        Raises:
            CacheError: there is no tree, or no such path; or what a row keeps cannot go back (as in `crop`).
        """
        if self.tree is None or len(self.tree.sources) != self.rows:
            raise CacheError("there is no tree: decode(ids, state, parents=...) makes one, and keep ends it.")
        picked, lengths = self.tree.picked(path)
        after = list(self.lengths)
        for row, length in zip(picked, lengths, strict=True):
            after[row] = length
        self.crop(after)
        self.reorder(picked)
        self.tree = None

    @serving
    def copy(self) -> "KVCache":
        """An independent copy of the state."""
        other = copy.deepcopy(self)
        other.origin = self.origin
        return other

    def save(self, path: str | Path) -> None:
        """Write the state to a file that `load` reads, whole or not at all."""
        state = self.__getstate__()
        with replacing(Path(path)) as file:
            torch.save({"format": SAVED, "state": state, "digest": saved_cache.digest(state)}, file)

    def __getstate__(self) -> dict[str, Any]:
        now, saved = self.now, {name: part.saved() for name, part in self.now.parts.items()}
        return {
            "plan": dataclasses.asdict(self.plan), "config": dataclasses.asdict(self.config),
            "limit": self.limit, "lengths": list(now.lengths), "lost": list(now.lost),
            "fixed": saved.pop(FixedValues.name), "carried": saved.pop(CarriedValues.name), "groups": saved,
            "device": str(self.device), "rank": self.rank, "sizes": dict(self.sizes), "alone": self.alone,
        }  # fmt: skip

    def __setstate__(self, state: Any) -> None:
        require(isinstance(state, dict), "it is no record")
        lacking = {"device", "limit", "lengths", "lost", "fixed", "carried", "groups"} - state.keys()
        require(not lacking, f"it lacks {', '.join(sorted(lacking))}")
        plan, config = saved_cache.plan_of(state)
        limit = None if state["limit"] is None else saved_cache.number(state["limit"], "limit")
        most = saved_cache.MOST if limit is None else limit + plan.begins
        lengths = saved_cache.numbers(state["lengths"], "lengths", 0, most)
        lost = saved_cache.numbers(state["lost"], "lost")
        fits = len(lost) == len(lengths) and all(a <= b for a, b in zip(lost, lengths, strict=True))
        require(fits, "lost has other rows than lengths, or says more")
        device = saved_cache.device_of(state["device"])
        rank = saved_cache.numbers(state.get("rank", (0, 1)), "rank")
        require(len(rank) == 2 and rank[0] < rank[1], f"it is of no rank: {rank!r:.40}")
        self.__init__(plan, 0, config, device, limit)  # type: ignore[misc]
        self.rank = rank[0], rank[1]
        sizes = state.get("sizes", {})
        require(isinstance(sizes, dict), "sizes is no record")
        self.sizes = {str(n): saved_cache.number(size, f"the size {n!r:.40}") for n, size in sizes.items()}
        self.alone = bool(state.get("alone", False))
        kept = state["groups"]
        same = isinstance(kept, dict) and kept.keys() == self.groups.keys()
        require(same, "it has other pages than its plan")
        kept = {**kept, FixedValues.name: state["fixed"], CarriedValues.name: state["carried"]}
        parts = {name: part.restored(kept[name], lengths) for name, part in self._now.parts.items()}
        self._now = Contents(lengths, lost, parts)

    @classmethod
    @serving
    def load(cls, path: str | Path) -> "KVCache":
        """Read a state that `save` wrote.

        Raises:
            CacheError: the file is not a saved state, or was saved by another version, or its numbers do not
                go together (`saved_cache.py`).
        """
        found = saved_cache.read(path)
        if not isinstance(found, dict) or found.get("format") != SAVED:
            raise CacheError(f"{path} holds no saved cache, or one of another version of attngraph.")
        state = cls.__new__(cls)
        state.__setstate__(found.get("state"))
        require(found.get("digest") == saved_cache.digest(state.__getstate__()), f"{path} has changed")
        return state
