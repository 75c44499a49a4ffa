"""The values that a decoder keeps of each token, and views of their pages.

They are a minimum cut (`meaning/tokens/kv_cut.py`) of what attentions, windows and other values read of
earlier tokens. An operand that is a view of a kept value is a view of its pages, by the same steps.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from attngraph.errors import NoDecoderError
from attngraph.ir.graph import ProgramGraph, module_of, op_name, source_of
from attngraph.ir.language.expr import Expr
from attngraph.ir.ops.cached_attention import Store
from attngraph.ir.ops.nodes import AttentionOp
from attngraph.meaning.tokens.facts import Kind
from attngraph.meaning.tokens.kv_cut import bytes_per_token, choose_kept, moved_operands
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.passes.build import Builder
from attngraph.passes.insert_kv_cache.free_tokens import repeated
from attngraph.passes.insert_kv_cache.step_inputs import StepInputs

aten = torch.ops.aten


class KeptValues:
    """The values of one graph that are kept of each token. `stores`: how each is kept."""

    def __init__(self, graph: ProgramGraph, tokens: Tokens, inputs: StepInputs) -> None:
        self.graph, self.tokens, self.inputs = graph, tokens, inputs
        self.space, self.meaning = tokens.space, tokens.meaning
        self.stores: dict[fx.Node, Store] = {}

    def choose(self, readers: Sequence[fx.Node]) -> None:
        """Choose what is kept for the values that read earlier tokens: attentions, and windows of tokens."""
        operands = [o for node in readers for o in self._operands(node)]
        kept = choose_kept(self.tokens, operands)
        for number, value in enumerate(kept):
            users = [n for n in readers for o in self._operands(n) if value in self._path(o, kept)]
            windows = [self._window(n) for n in users]
            window = None if None in windows else max(w for w in windows if w is not None)
            space = self.space
            fact = self.tokens[value]
            row, token = space.place(fact.axes, space.row), space.place(fact.axes, space.token)
            if token is None or bytes_per_token(self.tokens, value) is None:
                raise NoDecoderError(
                    f"{op_name(value)} at {source_of(value)}: what later tokens need of it does not have the "
                    "tokens as a dimension of their own."
                )
            counted = [isinstance(n, int) and not digits for n, digits in
                       zip(value.meta["val"].shape, fact.axes, strict=True)]  # fmt: skip
            shape = [int(n) if own else 0 for n, own in zip(value.meta["val"].shape, counted, strict=True)]
            if row is None:  # no batch dimension: the dimension of pages is added in front
                shape, row, token = [0, *shape], 0, token + 1
            label = module_of(users[0]) or source_of(value) if users else source_of(value)
            name = f"kept{number}"
            self.stores[value] = Store(
                name, tuple(shape), row, token, value.meta["val"].dtype, window, label, len(users)
            )
        together = [self._path(o, kept) for o in operands]
        together += [[n for o in self._operands(r) for n in self._path(o, kept)] for r in readers
                     if self.tokens[r].scan is None]  # fmt: skip
        self._keep_equally_long(together)

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

    def _window(self, node: fx.Node) -> int | None:
        """How many of the latest tokens a value needs; None: all."""
        fact = self.tokens[node]
        if fact.scan is not None:
            return fact.scan.latest
        assert fact.causality is not None
        return fact.causality.window

    def _path(self, operand: fx.Node, kept: Iterable[fx.Node]) -> list[fx.Node]:
        """The cached values that an operand is a view of."""
        stop, found, stack = set(kept), [], [operand]
        while stack:
            node = stack.pop()
            if node in stop:
                found.append(node)
            else:
                stack += moved_operands(self.tokens, node)
        return found

    def move(self, made: Mapping[fx.Node, fx.Node]) -> None:
        """Say what has replaced values of the graph."""
        self.stores = {made.get(kept, kept): store for kept, store in self.stores.items()}

    def pages_of(self, builder: Builder, operand: fx.Node) -> tuple[fx.Node, Store]:
        """An operand as a view of pages, and the store that has them."""
        return self.view(builder, operand), self.of([operand])[0]

    def of(self, operands: Sequence[fx.Node]) -> list[Store]:
        """The stores that have these operands of one node."""
        return [self.stores[n] for o in operands for n in self._path(o, self.stores)]

    def is_kept_as(self, operand: fx.Node) -> fx.Node:
        """The first of the cached values that an operand is a view of; it may be the operand itself."""
        return next(iter(self._path(operand, self.stores)))

    def view(self, builder: Builder, operand: fx.Node) -> fx.Node:
        """An operand as a view of pages: repeats the steps from the cached value, with pages instead of rows
        and the tokens of a page instead of all tokens."""
        done: dict[fx.Node, fx.Node] = {}

        def replay(node: fx.Node) -> fx.Node:
            if node in done:
                return done[node]
            if node in self.stores:
                done[node] = self.inputs.pages(self.stores[node])
                return done[node]
            copies = {n: replay(n) for n in moved_operands(self.tokens, node)}
            first = next(iter(copies))
            sizes = self._page_sizes(builder, done, first)
            done[node] = repeated(self.tokens, builder, node, copies, sizes)
            return done[node]

        return replay(operand)

    def _page_sizes(
        self, builder: Builder, done: dict[fx.Node, fx.Node], node: fx.Node
    ) -> dict[Expr, fx.Node]:
        fact = self.tokens[node]
        row, token = (
            self.space.place(fact.axes, self.space.row),
            self.space.place(fact.axes, self.space.token),
        )
        assert token is not None
        shift = 1 if self.space.row is None else 0
        found = {self.space.tokens: builder.call(aten.sym_size.int, done[node], token + shift)}
        if row is not None:
            found[self.space.rows] = builder.call(aten.sym_size.int, done[node], row)
        return found
