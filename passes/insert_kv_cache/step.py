"""What a graph of whole sequences becomes a step with: its inputs, what is kept and carried for it.

A value that follows from earlier tokens (`Scan` in `meaning/tokens/facts.py`) is replaced by a `Rewrite`, one
for each class of scans: `insert.py` has the table. All of them share one `Step`.

Keys, values and what masks read of a token are needed again by later tokens. Any cut through the values that
they are computed from would do; chosen is the one of fewest bytes per token, among values of which the
operands are only views [minimum cut]. So key/value heads are kept before they are repeated, keys that are
also values once, and parts that are joined by `cat` separately if several heads share one of them. An operand
that is a view of a kept value is a view of its pages, by the same steps. Used by `insert_kv_cache`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import networkx as nx
import torch
from torch import Tensor, fx

from attngraph.errors import NoDecoderError
from attngraph.ir.graph import Input, ProgramGraph, Rate, module_of, op_name, source_of
from attngraph.ir.language.expr import Expr
from attngraph.ir.ops.cached_attention import Carried, Store
from attngraph.ir.ops.nodes import AttentionOp
from attngraph.ir.walk import filled, minimum_cut, reached
from attngraph.meaning.rule import RULES, Category
from attngraph.meaning.tokens.facts import Kind
from attngraph.meaning.tokens.streams import Stream
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.meaning.tokens.windows import History
from attngraph.passes.build import Builder
from attngraph.passes.insert_kv_cache.free_tokens import repeated

aten = torch.ops.aten
_FEWER_STEPS = 1.0 / (1 << 20)
"""Of cuts with equal bytes, prefer the one nearest to the operands: least work remains when they are read."""
_UNKNOWN_WIDTH = (
    "how many values a token has follows from the call alone, where attention reads the model's input "
    "itself, so there is no knowing how much to keep"
)


class StepInputs:
    """A step's inputs besides the model's own: rows, pages, and values that are fixed for a prompt.
    Placeholders added after the graph's own, each created at its first use."""

    def __init__(self, graph: ProgramGraph, ids: fx.Node, tokens: Tokens) -> None:
        self.graph, self.ids, self.tokens = graph, ids, tokens
        self._device = graph.placeholders()[-1].meta["val"].device
        self._made: dict[str, fx.Node] = {}
        self._page_sizes: dict[str, Any] = {}

    def __getitem__(self, name: str) -> fx.Node:
        return self._made[name]

    def take(self, kind: str, name: str, shape: Sequence[Any], dtype: torch.dtype = torch.int64) -> fx.Node:
        """A new placeholder, or the existing one of that name; None in the shape is a new symbolic size."""
        if name not in self._made:
            value, called = self.graph.empty(shape, dtype, self._device), f"{kind}_{name.replace('.', '_')}"
            self._made[name] = self.graph.add_input(Input(kind, name), value, called)
        return self._made[name]

    def rows(self, name: str) -> fx.Node:
        """An integer vector with an entry per row, or per token."""
        place = self.tokens.token_dim(self.ids)
        of_tokens = name in ("positions", "row")
        return self.take("rows", name, [self.ids.meta["val"].shape[place] if of_tokens else None])

    def table(self, store: Store) -> fx.Node:
        """The page table of a cached value."""
        return self.take("rows", store.table, [None, None])

    def pages(self, store: Store) -> fx.Node:
        """All pages of a cached value. Values that share a page table have pages of as many tokens."""
        shape: list[Any] = [n or None for n in store.shape]
        shape[store.token_dim] = self._page_sizes.get(store.table)
        made = self.take("pages", store.name, shape, store.dtype)
        self._page_sizes[store.table] = made.meta["val"].shape[store.token_dim]
        return made

    def carried(self, about: Carried) -> fx.Node:
        """What every row carries of a value."""
        rows = self.rows("first").meta["val"].shape[0]
        return self.take("carried", about.name, [rows, *about.shape], about.dtype)

    def fixed(self, name: str, value: Any) -> fx.Node:
        """A result of the prompt's stage, with the shape and dtype of `value`."""
        made = self.take(Rate.PROMPT.value, name, [], value.dtype)
        made.meta["val"] = value
        return made

    def drop_unused(self) -> None:
        """Remove inputs that are not used, except parameters. Raises `NoDecoderError`: an input of the model
        other than the tokens is still needed."""
        for node, given in self.graph.given().items():
            if node.users and given.kind == "argument" and not self.tokens.depends_on_tokens(node):
                user = source_of(next(iter(node.users)))
                raise NoDecoderError(f"a size of input {given.name} is needed for every token ({user}).")
        own = ("parameter", "buffer", "constant")
        self.graph.drop_inputs(lambda node, given: not node.users and given.kind not in own)


class KeptValues:
    """The values of one graph that are kept of each token. `stores`: how each is kept."""

    def __init__(self, tokens: Tokens, inputs: StepInputs) -> None:
        self.tokens, self.inputs, self.space = tokens, inputs, tokens.space
        self.stores: dict[fx.Node, Store] = {}

    def choose(self, readers: Sequence[fx.Node]) -> None:
        """Choose what is kept for the values that read earlier tokens: attentions, and windows of tokens.
        Raises `NoDecoderError`: no set of values has a known number of bytes for each token."""
        operands = [o for node in readers for o in self._operands(node)]
        kept = self._cut(operands)
        for number, value in enumerate(kept):
            uses = [(n, o) for n in readers for o in self._operands(n) if value in self._path(o, kept)]
            windows = [self._window(*use) for use in uses]
            window = None if None in windows else max(w for w in windows if w is not None)
            row, token = self.tokens.row_dim(value), self.tokens.token_dim(value)
            if token is None or self._bytes_per_token(value) is None:
                raise NoDecoderError(
                    f"{op_name(value)} at {source_of(value)}: what later tokens need of it does not have the "
                    "tokens as a dimension of their own."
                )
            extents = zip(value.meta["val"].shape, self.tokens[value].axes, strict=True)
            shape = [n if isinstance(n, int) and not digits else 0 for n, digits in extents]
            if row is None:  # no batch dimension: the dimension of pages is added in front
                shape, row, token = [0, *shape], 0, token + 1
            label = (uses and module_of(uses[0][0])) or source_of(value)
            about = tuple(shape), row, token, value.meta["val"].dtype, window, label, len(uses)
            scan = self.tokens[value].scan
            size = scan.size if isinstance(scan, Stream) else 1
            self.stores[value] = Store(f"kept{number}", *about, size=size)
        together = [self._path(o, kept) for o in operands]
        together += [[n for o in self._operands(r) for n in self._path(o, kept)] for r in readers
                     if self.tokens[r].scan is None]  # fmt: skip
        self._keep_equally_long(together)

    def _cut(self, operands: Iterable[fx.Node]) -> list[fx.Node]:
        """The values to keep, in the graph's order, such that every operand is a view of them."""
        sizes: dict[fx.Node, float | None] = {}
        before: dict[fx.Node, list[fx.Node]] = {}
        wanted = list(dict.fromkeys(operands))
        stack = [(node, 0) for node in wanted]
        while stack:
            node, depth = stack.pop()
            if node not in sizes:
                size = self._bytes_per_token(node)
                sizes[node] = None if size is None else size + depth * _FEWER_STEPS
                before[node] = self._moved_from(node)
                stack += [(operand, depth + 1) for operand in before[node]]
        try:
            kept = set(minimum_cut(sizes, before.__getitem__, wanted))
        except nx.NetworkXUnbounded as problem:
            raise NoDecoderError(_UNKNOWN_WIDTH) from problem
        return [n for n in self.tokens.graph.graph.nodes if n in kept]

    def _bytes_per_token(self, node: fx.Node) -> int | None:
        """How many bytes of a value belong to one token; None unless tokens have a dimension of their own,
        and so do sequences."""
        axes, value, space = self.tokens[node].axes, node.meta.get("val"), self.space
        rows = [(space.row,)] if space.row is not None else []
        places = [sorted(map(str, digits)) for digits in (filter(None, axes), [*rows, (space.token,)])]
        if not isinstance(value, Tensor) or places[0] != places[1]:
            return None
        own = [n for n, digits in zip(value.shape, axes, strict=True) if not digits]
        return math.prod(own) * value.dtype.itemsize if all(isinstance(n, int) for n in own) else None

    def _moved_operands(self, node: fx.Node) -> list[fx.Node]:
        """The tensors that a node rearranges, without those that only say how: integers that are the same for
        all tokens and sequences, a list of heads, say."""
        operands = [n for n in node.all_input_nodes if n in self.tokens.facts]
        dtypes = {n: getattr(n.meta.get("val"), "dtype", None) for n in operands}
        picks = (torch.int32, torch.int64)
        return [n for n in operands if not (self.tokens[n].is_shared and dtypes[n] in picks)]

    def _moved_from(self, node: fx.Node) -> list[fx.Node]:
        """The token-wise values that this one only rearranges; empty if it computes something."""
        rule = RULES.get(str(node.target)) if node.op == "call_function" else None
        if rule is None or rule.category is not Category.MOVEMENT or self.tokens[node].kind is Kind.SCAN:
            return []
        before = self._moved_operands(node)
        dtypes = {n.meta["val"].dtype for n in (*before, node)}
        return before if len(dtypes) == 1 and all(self.tokens[n].kind is Kind.TOKEN for n in before) else []

    def _keep_equally_long(self, together: Sequence[Sequence[fx.Node]]) -> None:
        """Of values that are read together, keep all tokens where they have several windows."""
        changed = True
        while changed:
            changed = False
            for values in together:
                if len({self.stores[n].window for n in values}) > 1:
                    changed = True
                    self.stores |= {n: dataclasses.replace(self.stores[n], window=None) for n in values}

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        """Operands to cache: keys, values, what scores read at key positions, and of earlier tokens."""
        scan = self.tokens[node].scan
        if scan is not None:
            return list(scan.operands)
        view = AttentionOp.of(node)
        reads_tokens = [r for r in view.reads if any(self.space.token in d for d in self.tokens[r].axes)]
        return [*([] if self.tokens[view.keys[0]].kind is Kind.FIXED else view.keys), *reads_tokens]

    def _window(self, node: fx.Node, operand: fx.Node) -> int | None:
        """Of how many of its latest tokens a value needs an operand; None: all."""
        fact = self.tokens[node]
        if isinstance(fact.scan, History):
            return fact.scan.latest_of.get(operand)
        if fact.scan is not None:
            return fact.scan.latest
        assert fact.causality is not None
        return fact.causality.window

    def _path(self, operand: fx.Node, kept: Iterable[fx.Node]) -> list[fx.Node]:
        """The cached values that an operand is a view of."""
        ends = set(kept)
        before = reached([operand], lambda n: () if n in ends else self._moved_operands(n))
        return [n for n in before if n in ends]

    def move(self, made: Mapping[fx.Node, fx.Node]) -> None:
        """Say what has replaced values of the graph."""
        self.stores = {made.get(kept, kept): store for kept, store in self.stores.items()}

    def of(self, operand: fx.Node) -> fx.Node:
        """The first of the cached values that an operand is a view of; it may be the operand itself."""
        return self._path(operand, self.stores)[0]

    def pages_of(self, builder: Builder, operand: fx.Node) -> tuple[fx.Node, Store]:
        """An operand as a view of pages, and the store that has them: repeats the steps from the cached
        value, with pages instead of rows and the tokens of a page instead of all tokens."""
        done: dict[fx.Node, fx.Node] = {}

        def operands(node: fx.Node) -> list[fx.Node]:
            return [] if node in self.stores else self._moved_operands(node)

        def made(node: fx.Node) -> fx.Node:
            if node in self.stores:
                return self.inputs.pages(self.stores[node])
            copies = {n: done[n] for n in operands(node)}
            sizes = self._page_sizes(builder, *next(iter(copies.items())))
            return repeated(self.tokens, builder, node, copies, sizes)

        return filled(done, operand, operands, made), self.stores[self.of(operand)]

    def _page_sizes(self, builder: Builder, node: fx.Node, pages: fx.Node) -> dict[Expr, fx.Node]:
        row, token = self.tokens.row_dim(node), self.tokens.token_dim(node)
        assert token is not None
        shift = 1 if self.space.row is None else 0
        found = {self.space.tokens: builder.call(aten.sym_size.int, pages, token + shift)}
        if row is not None:
            found[self.space.rows] = builder.call(aten.sym_size.int, pages, row)
        return found


class RefutedError(Exception):
    """A value is no sum over earlier tokens, though it looks like one; says why. Raised before anything that
    was in the graph is changed."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


class RowProgram(NamedTuple):
    """What computes a value for one row (`ir/ops/each_row.py`), and its operands: of new tokens, shared by
    all rows, of all tokens, and of the tokens that are chosen."""

    text: str
    new: list[fx.Node]
    shared: list[fx.Node]
    whole: list[fx.Node]
    read: list[fx.Node]


@dataclasses.dataclass
class Step:
    """One graph that is made a step.

    `carried`: what the rows carry, with the nodes that compute the next of it. `rounding`: of the tables from
    which decays are read. `anew`, `assumed`: the lines of values that are computed from all tokens, and
    those of which it is taken from the user that they see no later ones. `least`: what is computed from all
    tokens is computed of at least so many. `programs`: of values that are computed from all tokens.
    """

    tokens: Tokens
    inputs: StepInputs
    kept: KeptValues
    carried: dict[fx.Node, Carried] = dataclasses.field(default_factory=dict)
    rounding: float = 0.0
    least: int = 0
    programs: dict[fx.Node, RowProgram] = dataclasses.field(default_factory=dict)
    anew: list[str] = dataclasses.field(default_factory=list)
    assumed: list[str] = dataclasses.field(default_factory=list)

    def states(
        self, node: fx.Node, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]]
    ) -> dict[fx.Node, Carried]:
        """Inputs with what every row carries for a value, one for each shape and dtype."""
        label = module_of(node) or source_of(node)
        about = [Carried(f"carried{n}", *kind, label) for n, kind in enumerate(wanted, len(self.carried))]
        return {self.inputs.carried(each): each for each in about}

    def carry(self, builder: Builder, several: fx.Node, states: dict[fx.Node, Carried]) -> fx.Node:
        """The first of several results; the others are the next of these states."""
        out, *after = builder.results(several)
        self.carried |= zip(after, states.values(), strict=True)
        return out

    def in_place(self, builder: Builder, value: fx.Node, node: fx.Node) -> fx.Node:
        """A value `[tokens, ...]`, whose other dimensions are in order, with the dimensions of a node."""
        space, axes, row = self.tokens.space, self.tokens[node].axes, self.tokens.row_dim(node)
        own = iter(range(1, len(axes)))
        order = [0 if space.token in digits else next(own) for digits in axes if space.row not in digits]
        value = builder.permuted(value, order)
        if row is None:
            return value
        value = builder.unsqueezed(value, row)
        sizes: list[Any] = [builder.size(space.rows) if dim == row else -1 for dim in range(len(axes))]
        return builder.call(aten.expand.default, value, sizes)


Rewrite = Callable[[Step, Builder, fx.Node, Any], tuple[fx.Node, str]]
"""Gets a value and its scan; gives the node that computes it for new tokens, and a note for the report.

Raises:
    NotWritten, NoSize: something cannot be computed for a few new tokens.
"""
