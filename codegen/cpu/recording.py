"""One recorded step of a decoder: its compiled calls in chains, and PyTorch's operations between them.

The calls of compiled functions are made with memory that stays theirs, and stand one after another
(`chain.py`); views of their results need nothing. Other operations run between the chains, first of all those
that need no result of compiled code, and their results are copied to where compiled code reads them. What
rows carry is read where it lies and written to new memory, since earlier states may be kept. What a cache
keeps of the new tokens is written to its pages: such results are None, as those that are written to buffers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.autograd.graph import increment_version

from attngraph.codegen.cpu.carried import LAST_TOKENS, RUNNING_SUM
from attngraph.codegen.cpu.chain import Chain, Link
from attngraph.codegen.cpu.copies import Keeping, link_of, may_be_copy
from attngraph.codegen.cpu.decode import Decode
from attngraph.codegen.cpu.loops import LOOPS
from attngraph.codegen.cpu.places import addresses, places, ranks
from attngraph.codegen.cpu.step_graph import SEVERAL, Kinds, early_first, is_view, only_moves
from attngraph.codegen.cpu.tokens.run import TOKENS
from attngraph.ir.ops import nodes
from attngraph.ir.ops.cached_attention import Rows
from attngraph.ir.ops.last_tokens import last_tokens
from attngraph.ir.ops.loop import loop
from attngraph.ir.ops.running_sum import running_sum


class NotRecorded(Exception):
    """The step has no compiled calls that could be recorded."""


class NotNow(NotRecorded):
    """A compiled call is not valid in this step; it may be in others."""


@dataclasses.dataclass
class _Between:
    """Operations that run in PyTorch, between two chains: `module` takes and gives these values of the
    recording; results with memory of their own are copied there."""

    module: Callable[..., Sequence[Any]]
    takes: list[fx.Node]
    gives: list[fx.Node]


class _Carry(NamedTuple):
    """A call that reads carried input number `state` where it lies, and writes node `after`, what is carried
    on, to memory of its own at every run."""

    link: Link
    state: int
    after: fx.Node


class _Renewed(NamedTuple):
    """Result `place` of the graph, which a call writes to new memory at every run: result `number` of it."""

    place: int
    link: Link
    number: int


class Recording:
    """One recorded step."""

    def __init__(self, kinds: Kinds, inputs: Sequence[Tensor]) -> None:
        self.kinds, graph = kinds, kinds.graph
        self.placeholders = graph.placeholders()
        self.still = addresses([inputs[n] for n in kinds.still])
        self.where = places([inputs[n] for n in kinds.pages])
        self.seen: list[weakref.ref[Tensor]] = []
        self.values: dict[fx.Node, Any] = dict(zip(self.placeholders, inputs, strict=True))
        self.own: dict[fx.Node, Tensor] = {}
        for n in kinds.changing:
            node = self.placeholders[n]
            self.own[node] = self.values[node] = inputs[n].clone(memory_format=torch.contiguous_format)
        self.fresh: set[fx.Node] = set()
        self.pages = {self.placeholders[n] for n in kinds.pages}
        self.growing = set(self.pages)
        self.pieces: list[_Between | Chain] = []
        self.readers: list[tuple[Link, list[fx.Node]]] = []
        self.carries: list[_Carry] = []
        self._waiting: list[fx.Node] = []
        self._links: list[Link] = []
        for node in early_first(graph.graph):
            self._add(node)
        self._end_links()
        self.results: list[Any] = list(graph.graph.output_node().args[0])  # type: ignore[arg-type]
        self._end_waiting([n for n in self.results if isinstance(n, fx.Node)])
        if not any(isinstance(piece, Chain) for piece in self.pieces):
            raise NotRecorded
        self.keeping, self.movers = self._kept()
        self.paged = [self.keeping is not None and output.kind == "pages" for output in graph.outputs]
        self.renewed = self._renewed()
        fresh = {carry.after for carry in self.carries} | {self.results[r.place] for r in self.renewed}
        self.copied = [
            output.kind != "pages" and value not in fresh
            for output, value in zip(graph.outputs, self.results, strict=True)
        ]
        self._keep_what_is_needed()

    # --- recording ---

    def _add(self, node: fx.Node) -> None:
        link = self._link(node)
        if link is not None:
            self._end_waiting(node.all_input_nodes)
            self._links.append(link)
            self.values[node] = link.results if node.target in SEVERAL else link.results[0]
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        operands = node.all_input_nodes
        if self._links and any(self._is_computed(n) for n in operands) and not only_moves(node):
            self._end_links()
        self.values[node] = found = node.target(*args, **kwargs)  # type: ignore[operator]
        if not isinstance(found, (Tensor, list, tuple)):
            of_tensors = [n for n in operands if isinstance(self.values[n], Tensor)]
            is_size = str(node.target).startswith("aten.sym_") and self.growing.isdisjoint(of_tensors)
            if of_tensors and not is_size:
                raise NotRecorded
            return  # a size, which is the same in all calls with these shapes
        if not self.growing.isdisjoint(operands) and nodes.view(node) is None:
            self.growing.add(node)
        moves = self.pages.union(self.fresh)
        if moves.isdisjoint(operands) and is_view(found, args):
            return
        self.fresh.add(node)
        self._waiting.append(node)

    def _is_computed(self, node: fx.Node) -> bool:
        """Whether a value depends on links that have not run yet."""
        results = {t.untyped_storage().data_ptr() for link in self._links for t in link.results}
        value = self.values[node]
        return any(
            t.untyped_storage().data_ptr() in results
            for t in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(t, Tensor)
        )  # fmt: skip

    def _link(self, node: fx.Node) -> Link | None:
        """The compiled call of a node; None if PyTorch computes it."""
        if node.target in (torch.ops.attngraph.token_program.default, loop):
            if not self.growing.isdisjoint(node.all_input_nodes):
                return None
            args = cast("tuple[Any, ...]", fx.map_arg(node.args, self._settled))
            return LOOPS.link(*args) if node.target is loop else TOKENS.link(args[1], args[0])
        if node.target is last_tokens:
            return self._link_of_windows(node)
        if node.target is running_sum:
            return self._link_of_sums(node)
        if may_be_copy(node):
            return self._link_of_copy(node)
        view = nodes.view(node)
        if not isinstance(view, nodes.CachedAttention) or view.by not in ("", "cpu", _DECODE.name):
            return None
        pages = [view.k_pages, view.v_pages, *(s for s in (view.k_scales, view.v_scales) if s is not None)]
        moving = {n for n in node.all_input_nodes if n in self.growing}
        if not moving <= set(pages) or not all(map(self._is_settled_or_moves, pages)):
            return None
        q, k, v, k_pages, v_pages, table, starts, first, held = (
            self._settled(n) for n in (
                view.q, view.k, view.v, view.k_pages, view.v_pages,
                view.table, view.starts, view.first, view.held,
            )
        )  # fmt: skip
        sizes, reads = fx.map_arg(view.sizes, self.values.__getitem__), [self._settled(r) for r in view.reads]
        scales = [None if s is None else self._settled(s) for s in (view.k_scales, view.v_scales)]
        link = _DECODE.link(
            view.program, q, (k, v), (k_pages, v_pages), reads, sizes, Rows(table, starts, first, held),
            (scales[0], scales[1]),
        )  # fmt: skip
        if link is not None:
            self.readers.append((link, pages))
        return link

    def _link_of_windows(self, node: fx.Node) -> Link | None:
        pages, new, table, starts, first, _, row_dim, dim, back = cast("tuple[Any, ...]", node.args)
        if new in self.growing or not self._is_settled_or_moves(pages):
            return None
        tensors = [self._settled(n) for n in (pages, new, table, starts, first)]
        link = LAST_TOKENS.link(*tensors, row_dim, dim, back)  # type: ignore[call-arg, arg-type]
        if link is not None:
            self.readers.append((link, [pages]))
        return link

    def _link_of_sums(self, node: fx.Node) -> Link | None:
        if not self.growing.isdisjoint(node.all_input_nodes):
            return None
        args = [self._settled(a) if isinstance(a, fx.Node) else a for a in node.args]
        link = RUNNING_SUM.link(*args)  # type: ignore[arg-type]
        state = cast("fx.Node", node.args[4])
        after = next((u for u in node.users if u.args[1] == 1), None)
        alone = after is not None and len(state.users) == 1 and all(u.op == "output" for u in after.users)
        if link is not None and after is not None and alone and state in self.placeholders:
            self.carries.append(_Carry(link, self.placeholders.index(state), after))
        return link

    def _link_of_copy(self, node: fx.Node) -> Link | None:
        operands = node.all_input_nodes
        if not self.growing.isdisjoint(operands):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        found = link_of(node.target, args, kwargs)
        if found is None or self.fresh.isdisjoint(operands):
            return found
        tensors = {n for n in operands if isinstance(self.values[n], Tensor)}
        settled = fx.map_arg(
            (node.args, node.kwargs), lambda n: self._settled(n) if n in tensors else self.values[n]
        )
        return link_of(node.target, *settled)

    def _is_settled_or_moves(self, node: fx.Node) -> bool:
        """Whether pages lie where they lay, or are an input: compiled code can be told where it is."""
        return node not in self.growing or node in self.pages

    def _settled(self, node: fx.Node) -> Tensor:
        """A value in memory that stays: results of PyTorch's operations get memory of their own."""
        if node in self.fresh and node not in self.own:
            value = self.values[node]
            self.own[node] = value.clone()
            self.values[node] = self.own[node]
        return cast("Tensor", self.values[node])

    def _end_links(self) -> None:
        if self._links:
            chain = Chain(self._links)
            if not chain.run():
                raise NotNow
            self.pieces.append(chain)
            self._links = []

    def _end_waiting(self, needed: Sequence[fx.Node]) -> None:
        """Make a piece of the operations in PyTorch since the last one, if one of their results is needed."""
        inside = set(self._waiting)
        if inside.isdisjoint(needed):
            return
        self._end_links()
        gives = [n for n in self._waiting if any(u not in inside for u in n.users)]
        takes = list(dict.fromkeys(n for w in self._waiting for n in w.all_input_nodes if n not in inside))
        takes = [n for n in takes if isinstance(self.values[n], (Tensor, list, tuple))]
        copy = fx.Graph()
        places: dict[fx.Node, Any] = {n: copy.placeholder(f"v{p}") for p, n in enumerate(takes)}

        def place(node: fx.Node) -> Any:
            return places[node] if node in places else self.values[node]

        for node in self._waiting:
            args, kwargs = fx.map_arg((node.args, node.kwargs), place)
            places[node] = copy.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        copy.output(tuple(places[n] for n in gives))
        self.pieces.append(_Between(self.kinds.shorten(fx.GraphModule({}, copy)), takes, gives))
        self._waiting = []

    def _kept(self) -> tuple[Keeping | None, list[Callable[[Tensor], bool]]]:
        """What writes all results that a cache keeps to its pages, and what moves each of them, in the order
        of these inputs; None where something is kept in another way."""
        graph = self.kinds.graph
        inputs = {given.name: node for given, node in zip(graph.inputs, self.placeholders, strict=True)}
        stores = {store.name: store for store in graph.state.stores} if graph.state else {}
        results = {o.name: n for o, n in zip(graph.outputs, self.results, strict=True) if o.kind == "pages"}
        keeping, movers = Keeping(), []
        for number in self.kinds.pages:
            name = graph.inputs[number].name
            store, result = stores.get(name), results.pop(name, None)
            if store is None or result is None or store.team > 1 or (result in self.fresh - self.own.keys()):
                return None, []
            table, starts, first = (self.values[inputs[n]] for n in (store.table, "starts", "first"))
            pages, dims = self.values[self.placeholders[number]], (store.row_dim, store.token_dim)
            move = keeping.add(self.values[result], pages, table, starts, first, *dims)
            if move is None:
                return None, []
            movers.append(move)
        return (None, []) if results else (keeping, movers)

    def _renewed(self) -> list[_Renewed]:
        """The results that calls can write to new memory: nothing else reads them."""
        links = [link for piece in self.pieces if isinstance(piece, Chain) for link in piece.links]
        made = {id(t): (link, n) for link in links if link.renew for n, t in enumerate(link.results)}
        found = []
        for place, node in enumerate(self.results):
            if isinstance(node, fx.Node) and id(self.values[node]) in made and len(node.users) == 1:
                link, number = made[id(self.values[node])]
                if self.results.count(node) == 1 and link.renew and link.renew(number) is not None:
                    found.append(_Renewed(place, link, number))
        return found

    def _keep_what_is_needed(self) -> None:
        """Forget values that no run needs, and those of this call's pages: they may be large."""
        between = [piece for piece in self.pieces if isinstance(piece, _Between)]
        made = {n for piece in between for n in piece.gives if n not in self.own}
        self.passing = [*self.pages, *made, *(carry.after for carry in self.carries)]
        copied = {n: self.own[self.placeholders[n]] for n in self.kinds.changing
                  if all(n != carry.state for carry in self.carries)}  # fmt: skip
        self.written = list(copied.values())
        self.copies = [(n, own, own.data_ptr() if own.is_cpu else 0, own.nbytes) for n, own in copied.items()]
        needed = {n for piece in between for n in piece.takes} | self._returned()
        self.values = {n: v for n, v in self.values.items() if n in needed}
        self.taken = [n for n in (*self.kinds.still, *self.kinds.pages) if self.placeholders[n] in needed]
        self._forget()

    def _returned(self) -> set[fx.Node]:
        """The nodes that are results as they are: not written to pages, nor to new memory."""
        elsewhere = {self.results[r.place] for r in self.renewed}
        if self.keeping is not None:
            pairs = zip(self.kinds.graph.outputs, self.results, strict=True)
            elsewhere |= {node for output, node in pairs if output.kind == "pages"}
        return {n for n in self.results if isinstance(n, fx.Node)} - elsewhere

    def _forget(self) -> None:
        for node in self.passing:
            self.values[node] = None

    # --- running ---

    def is_valid(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the weights lie where they lay, and calls read present pages."""
        if addresses([inputs[n] for n in self.kinds.still]) != self.still:
            return False
        pages = [inputs[n] for n in self.kinds.pages]
        if len(pages) == len(self.seen) and all(r() is t for r, t in zip(self.seen, pages, strict=True)):
            return True
        now_at = places(pages)
        if now_at != self.where:
            if now_at.dtypes != self.where.dtypes or ranks(now_at) != ranks(self.where):
                return False
            now = dict(zip(self.placeholders, inputs, strict=True))
            for link, read in self.readers:
                here = [now[n] for n in read if n in now]
                if len(here) == len(read) and link.move_pages is not None:
                    if any(t.stride(-1) != 1 for t in here):
                        return False
                    link.move_pages(*here)
                elif here:
                    return False
            if not all(move(t) for move, t in zip(self.movers, pages, strict=False)):
                return False
            self.where = now_at
        self.seen = list(map(weakref.ref, pages))
        return True

    def run(self, inputs: Sequence[Tensor]) -> list[Any] | None:
        """The results; None where they have to be computed in another way: a compiled function found an index
        out of range, or a value has another size than when it was recorded."""
        if not all(inputs[carry.state].is_contiguous() for carry in self.carries):
            return None
        for n, own, place, size in self.copies:
            given = inputs[n]
            if place and given.is_cpu and given.is_contiguous():
                ctypes.memmove(place, given.data_ptr(), size)  # without PyTorch's way to its loops
            else:
                own.copy_(given)
        increment_version(self.written)  # what is known of earlier values (`tell`) does not hold
        for carry in self.carries:
            assert carry.link.carry is not None
            self.values[carry.after] = carry.link.carry(inputs[carry.state])
        for n in self.taken:
            self.values[self.placeholders[n]] = inputs[n]
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
        if self.keeping is not None:
            self.keeping.run()
        nodes_or_none = [None if paged else n for n, paged in zip(self.results, self.paged, strict=True)]
        results = [values.get(n) if isinstance(n, fx.Node) else n for n in nodes_or_none]
        return [
            value.clone() if copied and isinstance(value, Tensor) else value
            for value, copied in zip(results, self.copied, strict=True)
        ]


_DECODE = Decode()
