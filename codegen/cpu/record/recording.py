"""A call of a decoder's graph that is recorded and runs again: its compiled calls in chains, and PyTorch's
operations between them.

The graph runs once, with memory for the results of compiled functions that stays theirs, and each of their
calls is kept (`links.py`); views of their results need nothing. Operations that need no result of compiled
code come first, so that chains are long.

A run copies what the call gives to where compiled code reads it, and the results of other operations as well.
What rows carry is read where it lies and written to new memory, since earlier states may be kept. What a
cache keeps of the new tokens is written to its pages by whoever keeps the state, when all has succeeded: such
results are the function that writes all of them, until the next run.
"""

import ctypes
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.autograd.graph import increment_version

from attngraph.codegen.cpu.carried import Keeping
from attngraph.codegen.cpu.native import Chain, Link
from attngraph.codegen.cpu.record.links import SEVERAL, Kinds, Links, early_first
from attngraph.ir import budgets
from attngraph.ir.ops import nodes
from attngraph.ir.ops.cached_attention import numbers_of


class NotRecorded(Exception):
    """The call has no compiled calls that could be recorded, or their results take too much memory."""


class NotNow(NotRecorded):
    """A compiled call is not valid in this call; it may be in others."""


class Places(NamedTuple):
    """Where tensors lie and what they are. Made by functions of C, because a step has hundreds of weights."""

    addresses: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]


_DTYPE = operator.attrgetter("dtype")


def places(tensors: Sequence[Tensor]) -> Places:
    """The places of these tensors."""
    return Places(*addresses(tensors), tuple(map(Tensor.size, tensors)), tuple(map(_DTYPE, tensors)))


def addresses(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Where each tensor begins, and its strides."""
    return tuple(map(Tensor.data_ptr, tensors)), tuple(map(Tensor.stride, tensors))


class Between(NamedTuple):
    """Operations that run in PyTorch, between two chains: `module` takes and gives these values of the
    recording; results with memory of their own are copied there."""

    module: Callable[..., Sequence[Any]]
    takes: list[fx.Node]
    gives: list[fx.Node]


class Renewed(NamedTuple):
    """Result `place` of the graph, which a call writes to new memory at every run: result `number` of it."""

    place: int
    link: Link
    number: int


class Recording:
    """Runs a call and records it.

    Args:
        kinds: the decoder's graph, and how its inputs change.
        inputs: the call's.

    Attributes:
        made: the results of this call, as `run` gives them, until they are taken.
        pieces: what runs, in this order.
        values: what is known of values between runs, by node.
        results: the graph's results: values by node, or what does not change.
        keeping, movers: what writes results that a cache keeps to its pages, and moves each of these; None
            where something is kept in another way.
        nbytes: of the results of its compiled calls.

    Raises:
        NotRecorded: see there.
    """

    def __init__(self, kinds: Kinds, inputs: Sequence[Tensor]) -> None:
        self.kinds, self._links = kinds, Links(kinds, inputs)
        self.values, self._own = self._links.values, self._links.own
        self.results: list[Any] = list(cast("list[Any]", kinds.graph.graph.output_node().args[0]))
        self.pieces: list[Between | Chain] = []
        self.renewed: list[Renewed] = []
        self.nbytes = 0
        self._chain: list[Link] = []
        self._waiting: list[fx.Node] = []
        for node in early_first(kinds.graph.graph):
            self._add(node)
        self._end_chain()
        self._end_waiting([n for n in self.results if isinstance(n, fx.Node)])
        if not any(isinstance(piece, Chain) for piece in self.pieces):
            raise NotRecorded
        self.readers, self.carries = self._links.readers, self._links.carries
        self._most_kept = self._links.most_kept
        self.keeping, self._movers = self._kept()
        self._write = None if self.keeping is None else self.keeping.run
        renewed = {self.results[r.place] for r in self.renewed}
        kinds_of_results = [output.kind for output in kinds.graph.outputs]
        self._to_pages = [self.keeping is not None and kind == "pages" for kind in kinds_of_results]

        def copied(fresh: set[Any]) -> list[bool]:
            """Whether each result lies in memory that the next run writes to."""
            pairs = zip(kinds_of_results, self.results, strict=True)
            return [kind != "pages" and value not in fresh for kind, value in pairs]

        self.made: list[Any] | None = self._results(copied(renewed))
        self._copied = copied(renewed | {carry.after for carry in self.carries})
        self._set_inputs(inputs, renewed)

    # --- recording ---

    def _add(self, node: fx.Node) -> None:
        link = self._links.of(node)
        if link is not None:
            self._end_waiting(node.all_input_nodes)
            self._chain.append(link)
            results = self._results_of(link, node)
            self.nbytes += sum(t.nbytes for t in link.results)
            if self.nbytes > budgets.RECORDED_BYTES:
                raise NotRecorded
            self.values[node] = results if node.target in SEVERAL else results[0]
            return
        args, kwargs = self._links.operands(node)
        inputs, growing = node.all_input_nodes, self._links.growing
        waits = bool(self._chain) and any(self._is_computed(n) for n in inputs)
        if waits and not _only_moves(node):
            self._end_chain()
        found = node.target(*args, **kwargs)  # type: ignore[operator]
        if waits and _only_moves(node) and isinstance(found, Tensor) and not _is_view(found, args):
            self._end_chain()  # it may have been a view, and was a copy
            found = node.target(*args, **kwargs)  # type: ignore[operator]
        self.values[node] = found
        if not isinstance(found, (Tensor, list, tuple)):
            of_tensors = [n for n in inputs if isinstance(self.values[n], Tensor)]
            is_size = str(node.target).startswith("aten.sym_") and growing.isdisjoint(of_tensors)
            if of_tensors and not is_size:
                raise NotRecorded
            return  # a size, which is the same in all calls with these shapes
        if not growing.isdisjoint(inputs) and nodes.view(node) is None:
            growing.add(node)
        if self._links.pages.union(self._links.fresh).isdisjoint(inputs) and _is_view(found, args):
            return
        self._links.fresh.add(node)
        self._waiting.append(node)

    def _results_of(self, link: Link, node: fx.Node) -> list[Tensor]:
        """The results of a link. Those that the caller alone gets are written to new memory at every run, and
        at this one; the link does not keep them."""
        results = list(link.results)
        values = [(cast("int", n.args[1]), n) for n in node.users] if node.target in SEVERAL else [(0, node)]
        numbers = [number for number, _ in values]
        for number, value in values:
            alone = numbers.count(number) == 1 and len(value.users) == 1 and self.results.count(value) == 1
            place = self.results.index(value) if alone else None
            if place is None or self.kinds.graph.outputs[place].kind == "pages" or link.renew is None:
                continue
            made = link.renew(number)
            if made is not None:
                results[number] = made
                self.renewed.append(Renewed(place, link, number))
        link.results = [old for old, new in zip(link.results, results, strict=True) if old is new]
        return results

    def _is_computed(self, node: fx.Node) -> bool:
        """Whether a value depends on links that have not run yet."""
        results = _memory([link.results for link in self._chain])
        return not results.isdisjoint(_memory(self.values[node]))

    def _end_chain(self) -> None:
        if self._chain:
            chain = Chain(self._chain)
            if not chain.run():
                raise NotNow
            self.pieces.append(chain)
            self._chain = []

    def _end_waiting(self, needed: Sequence[fx.Node]) -> None:
        """Make a piece of the operations in PyTorch since the last one, if one of their results is needed."""
        inside = set(self._waiting)
        if inside.isdisjoint(needed):
            return
        self._end_chain()
        gives = [n for n in self._waiting if any(u not in inside for u in n.users)]
        takes = list(dict.fromkeys(n for w in self._waiting for n in w.all_input_nodes if n not in inside))
        takes = [n for n in takes if isinstance(self.values[n], (Tensor, list, tuple))]
        copy = fx.Graph()
        copies: dict[fx.Node, Any] = {n: copy.placeholder(f"v{p}") for p, n in enumerate(takes)}
        for node in self._waiting:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: copies.get(n, self.values[n]))
            copies[node] = copy.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        copy.output(tuple(copies[n] for n in gives))
        self.pieces.append(Between(self.kinds.shorten(fx.GraphModule({}, copy)), takes, gives))
        self._waiting = []

    def _kept(self) -> tuple[Keeping | None, list[Callable[[Tensor], bool]]]:
        """`keeping` and `movers`, in the order of the pages."""
        graph, placeholders = self.kinds.graph, self.kinds.placeholders
        rows = {
            given.name: self.values[node]
            for given, node in zip(graph.inputs, placeholders, strict=True) if given.kind == "rows"
        }  # fmt: skip
        stores = {store.name: store for store in graph.state.stores} if graph.state else {}
        results = {o.name: n for o, n in zip(graph.outputs, self.results, strict=True) if o.kind == "pages"}
        keeping, movers = Keeping(), []
        for number in self.kinds.pages:
            name = graph.inputs[number].name
            store, result = stores.get(name), results.pop(name, None)
            if store is None or store.team > 1 or not {store.table, "starts", "first"} <= rows.keys():
                return None, []
            if result is None or result in self._links.fresh - self._own.keys():
                return None, []
            table, starts, first = (rows[name] for name in (store.table, "starts", "first"))
            pages, dims = self.values[placeholders[number]], (store.row_dim, store.token_dim)
            move = keeping.add(self.values[result], pages, table, starts, first, *dims)
            if move is None:
                return None, []
            movers.append(move)
        return (None, []) if results else (keeping, movers)

    def _set_inputs(self, inputs: Sequence[Tensor], renewed: set[Any]) -> None:
        """What a run does with its inputs. Values that no run needs are dropped: they may be large, as this
        call's pages."""
        kinds, placeholders, after = self.kinds, self.kinds.placeholders, [c.after for c in self.carries]
        between = [piece for piece in self.pieces if isinstance(piece, Between)]
        returned = {
            n for n, kept in zip(self.results, self._to_pages, strict=True)
            if isinstance(n, fx.Node) and not kept
        }  # fmt: skip
        needed = {n for piece in between for n in piece.takes} | (returned - renewed)
        self.values = {n: v for n, v in self.values.items() if n in needed}
        self._passing = [
            *self._links.pages, *(n for p in between for n in p.gives if n not in self._own), *after
        ]  # fmt: skip
        carried = {carry.state for carry in self.carries}
        copied = [(n, self._own[placeholders[n]]) for n in kinds.changing if n not in carried]
        self._copies = [(n, own, own.data_ptr() if own.is_cpu else 0, own.nbytes) for n, own in copied]
        self._written = [own for _, own in copied]
        self._taken = [n for n in (*kinds.still, *kinds.pages) if placeholders[n] in needed]
        self._still = addresses([inputs[n] for n in kinds.still])
        self._where = places([inputs[n] for n in kinds.pages])
        self._seen: list[weakref.ref[Tensor]] = []
        del self._links
        self._forget()

    # --- running ---

    def is_valid(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the weights lie where they lay, and calls read present pages."""
        if addresses([inputs[n] for n in self.kinds.still]) != self._still:
            return False
        pages = [inputs[n] for n in self.kinds.pages]
        if len(pages) == len(self._seen) and all(r() is t for r, t in zip(self._seen, pages, strict=True)):
            return True
        now_at = places(pages)
        if now_at != self._where:
            ranks = [list(map(len, at.shapes)) for at in (now_at, self._where)]
            if now_at.dtypes != self._where.dtypes or ranks[0] != ranks[1]:
                return False
            self._seen, self._where = [], places([])  # until all read the present ones
            now = dict(zip(self.kinds.placeholders, inputs, strict=True))
            for reader in self.readers:
                here = [now[n] for n in reader.pages if n in now]
                if len(here) == len(reader.pages) and reader.link.move_pages is not None:
                    if any(t.stride(-1) != 1 for t in here):
                        return False
                    reader.link.move_pages(*here)
                elif here:
                    return False
            if not all(move(t) for move, t in zip(self._movers, pages, strict=False)):
                return False
            self._where = now_at
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
        for n, own, place, size in self._copies:
            given = inputs[n]
            if place and given.is_cpu and given.is_contiguous():
                ctypes.memmove(place, given.data_ptr(), size)  # without PyTorch's way to its loops
            else:
                own.copy_(given)
        increment_version(self._written)  # what is known of earlier values (`tell`) does not hold
        for carry in self.carries:
            assert carry.link.carry is not None
            self.values[carry.after] = carry.link.carry(inputs[carry.state])
        for n in self._taken:
            self.values[self.kinds.placeholders[n]] = inputs[n]
        renewed = [link.renew(number) for _, link, number in self.renewed if link.renew]
        try:
            found = self._results(self._copied) if self._run() else None
        finally:
            self._forget()
        if found is not None:
            for (place, _, _), value in zip(self.renewed, renewed, strict=True):
                found[place] = value
        return found

    def _run(self) -> bool:
        values = self.values
        for piece in self.pieces:
            if isinstance(piece, Chain):
                if not piece.run():
                    return False
                continue
            found = piece.module(*(values[n] for n in piece.takes))
            for node, value in zip(piece.gives, found, strict=True):
                if node in self._own:
                    if self._own[node].shape != value.shape:
                        return False  # it follows data, not the call's shapes
                    self._own[node].copy_(value)
                else:
                    values[node] = value
        return True

    def _results(self, copied: Sequence[bool]) -> list[Any]:
        """The values of the results, copied where it is said."""
        results = [self.values.get(n) if isinstance(n, fx.Node) else n for n in self.results]
        return [
            self._write if kept else value.clone() if copy and isinstance(value, Tensor) else value
            for value, kept, copy in zip(results, self._to_pages, copied, strict=True)
        ]

    def _forget(self) -> None:
        for node in self._passing:
            self.values[node] = None


def _only_moves(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" or bool(getattr(node.target, "is_view", False))


def _is_view(value: Any, args: Any) -> bool:
    """Whether a value shares memory with an operand, so that it follows what is written there."""
    return isinstance(value, Tensor) and not _memory(value).isdisjoint(_memory(args))


def _memory(values: Any) -> set[int]:
    """Where the tensors of a structure lie."""
    tensors = (t for t in torch.utils._pytree.tree_leaves(values) if isinstance(t, Tensor))
    return {t.untyped_storage().data_ptr() for t in tensors}
