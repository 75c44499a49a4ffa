"""A step's inputs besides the model's own: rows, pages, and values that are fixed for a prompt."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from attngraph.errors import NoDecoderError
from attngraph.ir.graph import Input, ProgramGraph, Rate, source_of
from attngraph.ir.ops.cached_attention import Carried, Store
from attngraph.meaning.tokens.tokens import Tokens


class StepInputs:
    """Placeholders added after the graph's own, each created at its first use."""

    def __init__(self, graph: ProgramGraph, ids: fx.Node, tokens: Tokens) -> None:
        self.graph, self.ids, self.tokens = graph, ids, tokens
        self._device = graph.placeholders()[-1].meta["val"].device
        self._made: dict[str, fx.Node] = {}
        self._page_sizes: dict[int | None, Any] = {}

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
        space = self.tokens.space
        place = space.place(self.tokens[self.ids].axes, space.token)
        of_tokens = name in ("positions", "row")
        return self.take("rows", name, [self.ids.meta["val"].shape[place] if of_tokens else None])

    def table(self, window: int | None) -> fx.Node:
        """The page table of the rows, for values that are cached for a window, or (None) without limit."""
        return self.take("rows", f"table.{window or 'all'}", [None, None])

    def pages(self, store: Store) -> fx.Node:
        """All pages of a cached value. Values that share a page table have pages of as many tokens."""
        shape: list[Any] = [n or None for n in store.shape]
        shape[store.token_dim] = self._page_sizes.get(store.window)
        made = self.take("pages", store.name, shape, store.dtype)
        self._page_sizes[store.window] = made.meta["val"].shape[store.token_dim]
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
        """Remove inputs that are not used, except parameters.

        Raises:
            NoDecoderError: an input of the model other than the tokens is still needed.
        """
        for node, given in zip(self.graph.placeholders(), self.graph.inputs, strict=True):
            if node.users and given.kind == "argument" and not self.tokens.depends_on_tokens(node):
                user = source_of(next(iter(node.users)))
                raise NoDecoderError(f"a size of input {given.name} is needed for every token ({user}).")
        own = ("parameter", "buffer", "constant")
        self.graph.drop_inputs(lambda node, given: not node.users and given.kind not in own)
