"""A recorded call of a decoder's graph, which runs again: its compiled calls in chains, and PyTorch's
operations between them. `recorder.py` makes it.

A run copies what the call gives to where compiled code reads it. Other operations run between the chains, and
their results are copied there too. What rows carry is read where it lies and written to new memory, since
earlier states may be kept. What a cache keeps of the new tokens is written to its pages by whoever keeps the
state, when all has succeeded: such results are the function that writes all of them, until the next run.
"""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx
from torch.autograd.graph import increment_version

from attngraph.codegen.cpu.native import Link
from attngraph.codegen.cpu.record.chain import Chain
from attngraph.codegen.cpu.record.copies import Keeping
from attngraph.codegen.cpu.record.places import Places, addresses, places, ranks
from attngraph.codegen.cpu.record.step_graph import Kinds
from attngraph.ir.ops.cached_attention import numbers_of

Addresses = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


@dataclasses.dataclass
class Between:
    """Operations that run in PyTorch, between two chains: `module` takes and gives these values of the
    recording; results with memory of their own are copied there."""

    module: Callable[..., Sequence[Any]]
    takes: list[fx.Node]
    gives: list[fx.Node]


class Carry(NamedTuple):
    """A call that reads carried input number `state` where it lies, and writes node `after`, what is carried
    on, to memory of its own at every run."""

    link: Link
    state: int
    after: fx.Node


class Renewed(NamedTuple):
    """Result `place` of the graph, which a call writes to new memory at every run: result `number` of it."""

    place: int
    link: Link
    number: int


class Reader(NamedTuple):
    """A call that reads these pages of a cache. It is made for rows that keep at most `most_kept` tokens,
    which input number `held` says (None: for all rows)."""

    link: Link
    pages: list[fx.Node]
    held: int | None = None
    most_kept: int | None = None


@dataclasses.dataclass(eq=False)
class Recording:
    """One recorded call.

    Attributes:
        pieces: what runs, in this order.
        results: the graph's results: values by node, or what does not change.
        values: what is known of values between runs.
        own: memory that stays, of inputs that are copied there and of results of PyTorch's operations.
        passing: values of one run alone.
        copies: the inputs that are copied: by number, where to, its address (0: not on the CPU) and bytes.
        taken: the inputs that PyTorch's operations take where they lie, by number.
        kept: for each result, whether `keeping` is to write it to the pages of a cache.
        copied: for each result, whether it lies in memory that the next run writes to.
        still, where: where weights and pages lay.
        nbytes: of the results of its compiled calls.
    """

    kinds: Kinds
    pieces: list[Between | Chain]
    results: list[Any]
    values: dict[fx.Node, Any]
    own: dict[fx.Node, Tensor]
    passing: list[fx.Node]
    copies: list[tuple[int, Tensor, int, int]]
    taken: list[int]
    kept: list[bool]
    copied: list[bool]
    readers: list[Reader]
    carries: list[Carry]
    renewed: list[Renewed]
    keeping: Keeping | None
    movers: list[Callable[[Tensor], bool]]
    still: Addresses
    where: Places
    nbytes: int

    def __post_init__(self) -> None:
        self._placeholders = self.kinds.graph.placeholders()
        self._seen: list[weakref.ref[Tensor]] = []
        self._written = [own for _, own, _, _ in self.copies]
        self._most_kept: dict[int, int] = {}
        for reader in self.readers:
            if reader.held is not None and reader.most_kept is not None:
                least = min(reader.most_kept, self._most_kept.get(reader.held, reader.most_kept))
                self._most_kept[reader.held] = least
        self._forget()

    def is_valid(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the weights lie where they lay, and calls read present pages."""
        if addresses([inputs[n] for n in self.kinds.still]) != self.still:
            return False
        pages = [inputs[n] for n in self.kinds.pages]
        if len(pages) == len(self._seen) and all(r() is t for r, t in zip(self._seen, pages, strict=True)):
            return True
        now_at = places(pages)
        if now_at != self.where:
            if now_at.dtypes != self.where.dtypes or ranks(now_at) != ranks(self.where):
                return False
            self._seen, self.where = [], places([])  # until all read the present ones
            now = dict(zip(self._placeholders, inputs, strict=True))
            for reader in self.readers:
                here = [now[n] for n in reader.pages if n in now]
                if len(here) == len(reader.pages) and reader.link.move_pages is not None:
                    if any(t.stride(-1) != 1 for t in here):
                        return False
                    reader.link.move_pages(*here)
                elif here:
                    return False
            if not all(move(t) for move, t in zip(self.movers, pages, strict=False)):
                return False
            self.where = now_at
        self._seen = list(map(weakref.ref, pages))
        return True

    def run(self, inputs: Sequence[Tensor]) -> list[Any] | None:
        """The results; None where they have to be computed in another way: rows keep more tokens than the
        calls are made for, a compiled function found an index out of range, or a value has another size than
        when it was recorded."""
        if any(max(numbers_of(inputs[n]), default=0) > most for n, most in self._most_kept.items()):
            return None
        if not all(inputs[carry.state].is_contiguous() for carry in self.carries):
            return None
        for n, own, place, size in self.copies:
            given = inputs[n]
            if place and given.is_cpu and given.is_contiguous():
                ctypes.memmove(place, given.data_ptr(), size)  # without PyTorch's way to its loops
            else:
                own.copy_(given)
        increment_version(self._written)  # what is known of earlier values (`tell`) does not hold
        for carry in self.carries:
            assert carry.link.carry is not None
            self.values[carry.after] = carry.link.carry(inputs[carry.state])
        for n in self.taken:
            self.values[self._placeholders[n]] = inputs[n]
        renewed = [link.renew(number) for _, link, number in self.renewed if link.renew]
        try:
            found = self._run()
        finally:
            self._forget()
        if found is not None:
            for (place, _, _), value in zip(self.renewed, renewed, strict=True):
                found[place] = value
        return found

    def _run(self) -> list[Any] | None:
        values = self.values
        for piece in self.pieces:
            if isinstance(piece, Chain):
                if not piece.run():
                    return None
                continue
            found = piece.module(*(values[n] for n in piece.takes))
            for node, value in zip(piece.gives, found, strict=True):
                if node in self.own:
                    if self.own[node].shape != value.shape:
                        return None  # it follows data, not the call's shapes
                    self.own[node].copy_(value)
                else:
                    values[node] = value
        write = None if self.keeping is None else self.keeping.run
        results = [values.get(n) if isinstance(n, fx.Node) else n for n in self.results]
        return [
            write if kept else value.clone() if copied and isinstance(value, Tensor) else value
            for value, kept, copied in zip(results, self.kept, self.copied, strict=True)
        ]

    def _forget(self) -> None:
        for node in self.passing:
            self.values[node] = None
