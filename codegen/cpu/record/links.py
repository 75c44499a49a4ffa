"""Which operations of a decoder's graph become calls of compiled code in a recording, and with what memory.

A call is kept with the addresses that it was made with. So its operands lie in memory that stays, where the
call can be told of another place (pages of a cache, what rows carry), or are the numbers of rows that the
decoder's state vouches for (`Kinds.are_of_the_state`).
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from attngraph.codegen.cpu.carried import link_of, may_be_copy, sums_of, windows_of
from attngraph.codegen.cpu.decode import DECODE
from attngraph.codegen.cpu.loops import step_of
from attngraph.codegen.cpu.native import Link
from attngraph.codegen.cpu.operands import OverCache
from attngraph.codegen.cpu.tokens.run import TOKENS
from attngraph.ir.graph.program_graph import Input, ProgramGraph, Rate
from attngraph.ir.ops import nodes
from attngraph.ir.ops.cached_attention import Rows
from attngraph.ir.ops.history import last_tokens
from attngraph.ir.ops.loop import loop
from attngraph.ir.ops.running_sum import running_sum

aten = torch.ops.aten
_STARTS, _FIRST = Input("rows", "starts"), Input("rows", "first")
_BY_SHAPE = (aten.sym_size.int, aten.zeros_like.default, aten.full_like.default)
"""Operations to which the first operand is its shape alone."""
_OF_SHAPES = (*_BY_SHAPE, aten.arange.default, aten.unsqueeze.default)
"""Operations by which the table and the lengths of fixed keys are made of shapes."""
_CHANGING = ("argument", "rows", "carried")
"""Kinds of inputs that are copied at every call, but for carried values that compiled code alone reads; all
others are read where they lie."""
_token_program = torch.ops.attngraph.token_program.default
SEVERAL = (_token_program, running_sum, loop)
"""Ops with several results."""


class Kinds:
    """A decoder's graph, and which of its inputs change in what way, by number.

    Attributes:
        changing: new at every call.
        pages: of the cache, which may move.
        fixed: computed once for a prompt.
        still: weights and all others, which lie where they lay.
        in_place: `still` and `pages`.
        counted: of `changing`, which token is the first of each row.
        tokens: the tokens of a call.
        shorten: makes a module cheaper to call.
    """

    def __init__(self, graph: ProgramGraph, shorten: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
        self.graph, self.shorten = graph, shorten
        self.placeholders = graph.placeholders()
        self.changing = [n for n, given in enumerate(graph.inputs) if given.kind in _CHANGING]
        self.pages = [n for n, given in enumerate(graph.inputs) if given.kind == "pages"]
        self.fixed = [n for n, given in enumerate(graph.inputs) if given.kind == Rate.PROMPT.value]
        moving = {*self.changing, *self.pages}
        self.still = [n for n in range(len(graph.inputs)) if n not in moving]
        self.in_place = [*self.still, *self.pages]
        self.counted = [n for n in self.changing if graph.inputs[n] == _STARTS]
        arguments = (n for n in self.changing if graph.inputs[n].kind == "argument")
        ranks = {n: getattr(self.placeholders[n].meta.get("val"), "ndim", 0) for n in arguments}
        self.tokens = next((n for n, rank in ranks.items() if rank > 1), None)

    def are_of_the_state(
        self, pages: Sequence[fx.Node], table: fx.Node | None, starts: fx.Node, first: fx.Node | None = None,
        held: fx.Node | None = None,
    ) -> bool:  # fmt: skip
        """Whether operands that say which tokens belong to which row will hold, at every run, numbers that
        the decoder's state vouches for: they are its inputs of those names, the table that of the pages; or
        they follow from shapes alone, and then the pages are none of the state's."""
        plan = self.graph.state
        kinds = dict(zip(self.placeholders, self.graph.inputs, strict=True))
        if kinds.get(starts) != _STARTS or (first is not None and kinds.get(first) != _FIRST):
            return False
        stores = {store.name: store for store in plan.stores} if plan is not None else {}
        found = [stores.get(kinds[p].name) for p in pages if p in kinds and kinds[p].kind == "pages"]
        if len(found) not in (0, len(pages)) or None in found:
            return False
        if not found:
            return all(n is None or _follows_from_shapes(n) for n in (table, held))
        names = {store.table for store in found if store is not None and store.team == 1}
        if table is None or len(names) != 1 or kinds.get(table) != Input("rows", *names):
            return False
        return held is None or kinds.get(held) == _FIRST


def _follows_from_shapes(node: fx.Node) -> bool:
    """Whether a value is made of shapes alone: every tensor that it follows from counts by its shape."""
    if node.target not in _OF_SHAPES and getattr(node.target, "__module__", "") != "_operator":
        return False
    operands = [n for n in node.all_input_nodes if node.target not in _BY_SHAPE or n is not node.args[0]]
    return node.target is not operator.getitem and all(_follows_from_shapes(n) for n in operands)


def early_first(graph: fx.Graph) -> list[fx.Node]:
    """The operations, first those that need none of what compiled code computes: chains are then not cut for
    them."""
    late: set[fx.Node] = set()
    order: tuple[list[fx.Node], list[fx.Node]] = [], []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        may_be_compiled = node.target in SEVERAL or node.target is last_tokens or may_be_copy(node)
        may_be_compiled |= isinstance(nodes.view(node), nodes.CachedAttention)
        if may_be_compiled or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
        order[node in late].append(node)
    return [*order[0], *order[1]]


class Carry(NamedTuple):
    """A call that reads carried input number `state` where it lies, and writes node `after`, what is carried
    on, to memory of its own at every run."""

    link: Link
    state: int
    after: fx.Node


class Reader(NamedTuple):
    """A call that reads these pages of a cache."""

    link: Link
    pages: list[fx.Node]


class Links:
    """Makes the calls of one recording.

    Attributes:
        values: of the call that is recorded, by node.
        own: memory that stays, of inputs that are copied there and of results of PyTorch's operations.
        fresh: what PyTorch computes at every run.
        growing: pages of the cache, and what follows from them: other tensors in other calls.
        readers, carries: the calls that are told of other memory. most_kept: how many tokens of a row the
            calls are made for, by the number of the input that says how many each row keeps.
    """

    def __init__(self, kinds: Kinds, inputs: Sequence[Tensor]) -> None:
        self.kinds = kinds
        self.values: dict[fx.Node, Any] = dict(zip(kinds.placeholders, inputs, strict=True))
        self.own: dict[fx.Node, Tensor] = {}
        for n in kinds.changing:
            node = kinds.placeholders[n]
            self.own[node] = self.values[node] = inputs[n].clone(memory_format=torch.contiguous_format)
        self.fresh: set[fx.Node] = set()
        self.pages = {kinds.placeholders[n] for n in kinds.pages}
        self.growing = set(self.pages)
        self.readers: list[Reader] = []
        self.most_kept: dict[int, int] = {}
        self.carries: list[Carry] = []

    def operands(self, node: fx.Node) -> Any:
        """The positional and the named operands of an operation."""
        return fx.map_arg((node.args, node.kwargs), self.values.__getitem__)

    def of(self, node: fx.Node) -> Link | None:
        """The compiled call of a node; None if PyTorch computes it."""
        if node.target is last_tokens:
            return self._windows(node)
        view = nodes.view(node)
        if isinstance(view, nodes.CachedAttention):
            return self._attention(view, node) if view.by in ("", "cpu", DECODE.name) else None
        if not self.growing.isdisjoint(node.all_input_nodes):
            return None
        if node.target is _token_program:
            given, program = self._settled_operands(node)
            return TOKENS.link(program, given)
        if node.target is loop:
            of_the_state = self.kinds.are_of_the_state([], None, *cast("Any", node.args[3:5]))
            return step_of(*self._settled_operands(node)) if of_the_state else None
        if node.target is running_sum:
            return self._sums(node)
        return self._copy(node) if may_be_copy(node) else None

    def _attention(self, view: nodes.CachedAttention, node: fx.Node) -> Link | None:
        pages = [view.k_pages, view.v_pages, *(s for s in (view.k_scales, view.v_scales) if s is not None)]
        if not self.growing.intersection(node.all_input_nodes) <= set(pages):
            return None
        if any(n in self.growing and n not in self.pages for n in pages):
            return None  # compiled code can be told where an input is
        if not self.kinds.are_of_the_state(pages, view.table, view.starts, view.first, view.held):
            return None
        of: Any = nodes.called(node.target, *fx.map_arg((node.args, node.kwargs), self._settled))
        call = OverCache(
            of.program, of.q, (of.k, of.v), (of.k_pages, of.v_pages), of.reads, of.sizes,
            Rows(of.table, of.starts, of.first, of.held), (of.k_scales, of.v_scales),
        )  # fmt: skip
        link = DECODE.link(call)
        if link is not None:
            most, held = DECODE.most_kept(call), self.kinds.placeholders.index(view.first)
            self.most_kept[held] = min(most, self.most_kept.get(held, most))
            self.readers.append(Reader(link, pages))
        return link

    def _windows(self, node: fx.Node) -> Link | None:
        pages, new, table, starts, first, _, *dims = cast("tuple[Any, ...]", node.args)
        if new in self.growing or pages not in self.pages:
            return None
        if not self.kinds.are_of_the_state([pages], table, starts, first):
            return None
        link = windows_of(*map(self._settled, (pages, new, table, starts, first)), *dims)
        if link is not None:
            self.readers.append(Reader(link, [pages]))
        return link

    def _sums(self, node: fx.Node) -> Link | None:
        state, starts = cast("list[fx.Node]", node.args[4:6])
        if not self.kinds.are_of_the_state([], None, starts):
            return None
        link = sums_of(*self._settled_operands(node))
        after = next((u for u in node.users if u.args[1] == 1), None)
        alone = after is not None and len(state.users) == 1 and all(u.op == "output" for u in after.users)
        if link is not None and after is not None and alone and state in self.kinds.placeholders:
            self.carries.append(Carry(link, self.kinds.placeholders.index(state), after))
        return link

    def _copy(self, node: fx.Node) -> Link | None:
        args, kwargs = self.operands(node)
        found = link_of(node.target, args, kwargs)
        if found is None or self.fresh.isdisjoint(node.all_input_nodes):
            return found
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._settled)
        return link_of(node.target, args, kwargs)

    def _settled_operands(self, node: fx.Node) -> Any:
        return fx.map_arg(node.args, self._settled)

    def _settled(self, node: fx.Node) -> Any:
        """A value in memory that stays: results of PyTorch's operations get memory of their own."""
        if node in self.fresh and node not in self.own:
            self.own[node] = self.values[node] = self.values[node].clone()
        return self.values[node]
