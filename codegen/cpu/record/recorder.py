"""Records a call of a decoder's graph (`recording.py`).

The graph runs once, with memory for the results of compiled functions that stays theirs, and each of their
calls is kept; views of their results need nothing. Operations that need no result of compiled code come
first, so that chains of calls are long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from attngraph.codegen.cpu.carried import LAST_TOKENS, RUNNING_SUM
from attngraph.codegen.cpu.decode import Decode
from attngraph.codegen.cpu.loops import LOOPS
from attngraph.codegen.cpu.native import Link
from attngraph.codegen.cpu.operands import are_of_the_state
from attngraph.codegen.cpu.record.chain import Chain
from attngraph.codegen.cpu.record.copies import Keeping, link_of, may_be_copy
from attngraph.codegen.cpu.record.places import addresses, places
from attngraph.codegen.cpu.record.recording import Between, Carry, Reader, Recording, Renewed
from attngraph.codegen.cpu.record.step_graph import SEVERAL, Kinds, early_first, is_view, only_moves
from attngraph.codegen.cpu.tokens.run import TOKENS
from attngraph.ir import budgets
from attngraph.ir.ops import nodes
from attngraph.ir.ops.cached_attention import Rows
from attngraph.ir.ops.last_tokens import last_tokens
from attngraph.ir.ops.loop import loop
from attngraph.ir.ops.running_sum import running_sum


class NotRecorded(Exception):
    """The call has no compiled calls that could be recorded, or their results take too much memory."""


class NotNow(NotRecorded):
    """A compiled call is not valid in this call; it may be in others."""


class Recorder:
    """Runs a call and records it.

    Args:
        kinds: the decoder's graph, and how its inputs change.
        inputs: the call's.

    Attributes:
        recording: what runs such calls again.
        made: the results of this call, as `Recording.run` gives them.

    Raises:
        NotRecorded: see there.
    """

    def __init__(self, kinds: Kinds, inputs: Sequence[Tensor]) -> None:
        self.kinds, graph = kinds, kinds.graph
        self.placeholders = graph.placeholders()
        self.values: dict[fx.Node, Any] = dict(zip(self.placeholders, inputs, strict=True))
        self.own: dict[fx.Node, Tensor] = {}
        for n in kinds.changing:
            node = self.placeholders[n]
            self.own[node] = self.values[node] = inputs[n].clone(memory_format=torch.contiguous_format)
        self.fresh: set[fx.Node] = set()
        self.pages = {self.placeholders[n] for n in kinds.pages}
        self.growing = set(self.pages)
        self.pieces: list[Between | Chain] = []
        self.readers: list[Reader] = []
        self.carries: list[Carry] = []
        self.renewed: list[Renewed] = []
        self.nbytes = 0
        self._waiting: list[fx.Node] = []
        self._links: list[Link] = []
        self.results: list[Any] = list(graph.graph.output_node().args[0])  # type: ignore[arg-type]
        for node in early_first(graph.graph):
            self._add(node)
        self._end_links()
        self._end_waiting([n for n in self.results if isinstance(n, fx.Node)])
        if not any(isinstance(piece, Chain) for piece in self.pieces):
            raise NotRecorded
        self.keeping, self.movers = self._kept()
        self.kept = [self.keeping is not None and output.kind == "pages" for output in graph.outputs]
        self.made = self._made()
        self.recording = self._recording(inputs)

    def _add(self, node: fx.Node) -> None:
        link = self._link(node)
        if link is not None:
            self._end_waiting(node.all_input_nodes)
            self._links.append(link)
            results = self._results_of(link, node)
            self.nbytes += sum(t.nbytes for t in link.results)
            if self.nbytes > budgets.RECORDED_BYTES:
                raise NotRecorded
            self.values[node] = results if node.target in SEVERAL else results[0]
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        operands = node.all_input_nodes
        waits = bool(self._links) and any(self._is_computed(n) for n in operands)
        if waits and not only_moves(node):
            self._end_links()
        found = node.target(*args, **kwargs)  # type: ignore[operator]
        if waits and only_moves(node) and isinstance(found, Tensor) and not is_view(found, args):
            self._end_links()  # it may have been a view, and was a copy
            found = node.target(*args, **kwargs)  # type: ignore[operator]
        self.values[node] = found
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
            if node.target is loop and not self._of_the_state([], None, *cast("Any", node.args[3:5])):
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
        if not self._of_the_state(pages, view.table, view.starts, view.first, view.held):
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
            most = _DECODE.most_kept(view.program, q, reads)
            self.readers.append(Reader(link, pages, self.placeholders.index(view.first), most))
        return link

    def _of_the_state(
        self, pages: Sequence[fx.Node], table: fx.Node | None, starts: fx.Node, first: fx.Node | None = None,
        held: fx.Node | None = None,
    ) -> bool:  # fmt: skip
        """Whether the state vouches for the numbers of these operands, at every run."""
        kinds = dict(zip(self.placeholders, self.kinds.graph.inputs, strict=True))
        return are_of_the_state(kinds, self.kinds.graph.state, pages, table, starts, first, held)

    def _link_of_windows(self, node: fx.Node) -> Link | None:
        pages, new, table, starts, first, _, row_dim, dim, back = cast("tuple[Any, ...]", node.args)
        if new in self.growing or not self._is_settled_or_moves(pages):
            return None
        if pages not in self.pages or not self._of_the_state([pages], table, starts, first):
            return None
        tensors = [self._settled(n) for n in (pages, new, table, starts, first)]
        link = LAST_TOKENS.link(*tensors, row_dim, dim, back)  # type: ignore[call-arg, arg-type]
        if link is not None:
            self.readers.append(Reader(link, [pages]))
        return link

    def _link_of_sums(self, node: fx.Node) -> Link | None:
        if not self.growing.isdisjoint(node.all_input_nodes):
            return None
        if not self._of_the_state([], None, cast("fx.Node", node.args[5])):
            return None
        args = [self._settled(a) if isinstance(a, fx.Node) else a for a in node.args]
        link = RUNNING_SUM.link(*args)  # type: ignore[arg-type]
        state = cast("fx.Node", node.args[4])
        after = next((u for u in node.users if u.args[1] == 1), None)
        alone = after is not None and len(state.users) == 1 and all(u.op == "output" for u in after.users)
        if link is not None and after is not None and alone and state in self.placeholders:
            self.carries.append(Carry(link, self.placeholders.index(state), after))
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
        self.pieces.append(Between(self.kinds.shorten(fx.GraphModule({}, copy)), takes, gives))
        self._waiting = []

    def _kept(self) -> tuple[Keeping | None, list[Callable[[Tensor], bool]]]:
        """What writes all results that a cache keeps to its pages, and what moves each of them, in the order
        of these inputs; None where something is kept in another way."""
        graph = self.kinds.graph
        inputs = {
            given.name: node
            for given, node in zip(graph.inputs, self.placeholders, strict=True) if given.kind == "rows"
        }  # fmt: skip
        stores = {store.name: store for store in graph.state.stores} if graph.state else {}
        results = {o.name: n for o, n in zip(graph.outputs, self.results, strict=True) if o.kind == "pages"}
        keeping, movers = Keeping(), []
        for number in self.kinds.pages:
            name = graph.inputs[number].name
            store, result = stores.get(name), results.pop(name, None)
            if store is None or result is None or store.team > 1 or (result in self.fresh - self.own.keys()):
                return None, []
            if not {store.table, "starts", "first"} <= inputs.keys():
                return None, []
            table, starts, first = (self.values[inputs[n]] for n in (store.table, "starts", "first"))
            pages, dims = self.values[self.placeholders[number]], (store.row_dim, store.token_dim)
            move = keeping.add(self.values[result], pages, table, starts, first, *dims)
            if move is None:
                return None, []
            movers.append(move)
        return (None, []) if results else (keeping, movers)

    def _made(self) -> list[Any]:
        """This call's own results, in memory that no run writes to."""
        renewed = {place for place, _, _ in self.renewed}
        write = None if self.keeping is None else self.keeping.run
        made: list[Any] = []
        rows = zip(self.kinds.graph.outputs, self.results, self.kept, strict=True)
        for place, (output, node, kept) in enumerate(rows):
            value = self.values[node] if isinstance(node, fx.Node) else node
            stays = output.kind != "pages" and place not in renewed and isinstance(value, Tensor)
            made.append(write if kept else value.clone() if stays else value)
        return made

    def _recording(self, inputs: Sequence[Tensor]) -> Recording:
        """The recording, without values that no run needs: they may be large, as this call's pages."""
        kinds = self.kinds
        between = [piece for piece in self.pieces if isinstance(piece, Between)]
        made = {n for piece in between for n in piece.gives if n not in self.own}
        carried = {carry.state for carry in self.carries}
        copied = {n: self.own[self.placeholders[n]] for n in kinds.changing if n not in carried}
        needed = {n for piece in between for n in piece.takes} | self._returned()
        fresh = {carry.after for carry in self.carries} | {self.results[r.place] for r in self.renewed}
        return Recording(
            kinds, self.pieces, self.results, {n: v for n, v in self.values.items() if n in needed}, self.own,
            [*self.pages, *made, *(carry.after for carry in self.carries)],
            [(n, own, own.data_ptr() if own.is_cpu else 0, own.nbytes) for n, own in copied.items()],
            [n for n in (*kinds.still, *kinds.pages) if self.placeholders[n] in needed], self.kept,
            [output.kind != "pages" and value not in fresh
             for output, value in zip(kinds.graph.outputs, self.results, strict=True)],
            self.readers, self.carries, self.renewed, self.keeping, self.movers,
            addresses([inputs[n] for n in kinds.still]), places([inputs[n] for n in kinds.pages]),
            self.nbytes,
        )  # fmt: skip

    def _returned(self) -> set[fx.Node]:
        """The nodes that are results as they are: not written to pages, nor to new memory."""
        elsewhere = {self.results[r.place] for r in self.renewed}
        if self.keeping is not None:
            pairs = zip(self.kinds.graph.outputs, self.results, strict=True)
            elsewhere |= {node for output, node in pairs if output.kind == "pages"}
        return {n for n in self.results if isinstance(n, fx.Node)} - elsewhere


_DECODE = Decode()
