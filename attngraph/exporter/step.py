"""A decoder's step as a module that torch.export can trace: the cache is its input and its output.

    forward(tokens, lengths, past) -> (logits, present)

`tokens` is `[B, S]`; `past` has what is kept of T earlier tokens, tensors such as `[B, H, T, D]`, and
`present` the same of T + S tokens. One program computes prompts (T = 0) and new tokens. Rows of unequal
length are padded on the left: `lengths`, `[B]`, is how many of a row's T + S tokens are real. Without padding
there are no lengths.

The derived graph computes the new tokens of all rows as one sequence, `[1, B * S]`, because all but attention
is computed for each token by itself. So this module only reshapes what attention reads, and puts keys and
values behind those of the cache.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from attngraph.errors import ExportError
from attngraph.exporter.lower import Lowering, Operands, Places
from attngraph.exporter.tracing import Limits
from attngraph.exporter.whole import Rewritten, Weights
from attngraph.ir.graph.program_graph import Rate
from attngraph.ir.ops import nodes
from attngraph.ir.ops.cached_attention import Store
from attngraph.runtime.step import Step

_PLACED = ("positions", "row")
"""Inputs of the graph that say where each token stands."""


class StepModule(nn.Module):
    """The module. `inputs` and `outputs` are the names of its tensors, in order; `padding`: whether it takes
    the lengths of the rows."""

    def __init__(self, step: Step, lowering: Lowering, padding: bool) -> None:
        super().__init__()
        _refuse(step)
        self._step, self._lowering, self.padding = step, lowering, padding
        self.weights = Weights(step.graph, step.owner)
        own = _names_of_stores(step)
        self.past, self.present = [f"past_{n}" for n in own], [f"present_{n}" for n in own]
        sizes = step.sizes
        self.limits = Limits(
            list(sizes.strictly()), {sizes.length: "tokens in a row", sizes.rows: "rows"}, sizes.sides
        )
        self.inputs = [step.name, *(["lengths"] if padding else []), *self.past]
        self.outputs = ["logits", *self.present]

    def size_names(self, stores: Sequence[Store]) -> list[dict[int, str]]:
        """Names for the sizes of the inputs that vary."""
        own = [{0: "batch", 1: "tokens"}, *([{0: "batch"}] if self.padding else [])]
        return own + [{store.row_dim: "batch", store.token_dim: "past"} for store in stores]

    def forward(self, tokens: Tensor, lengths: Tensor | None, past: list[Tensor]) -> tuple[Any, ...]:
        plan, graph = self._step.plan, self._step.graph
        batch, new = tokens.shape[:2]
        kept = past[0].shape[plan.stores[0].token_dim] if past else 0
        sizes = self._step.sizes
        longest = kept + new if lengths is None else lengths
        known = {sizes.length: longest, sizes.rows: batch}
        tokens = self.limits.checked(tokens, known, self._lowering.format)
        slots = Slots(tokens, lengths, batch, new, kept)
        stores = {about.name: value for about, value in zip(plan.stores, past, strict=True)}
        given: list[Any] = []
        for about in graph.inputs:
            if about in self.weights:
                given.append(self.weights[about])
            elif about.kind == "argument":
                given.append(tokens.reshape(1, batch * new, *tokens.shape[2:]))
            elif about.kind == "pages":
                given.append(stores[about.name])
            elif about.kind == "rows" and about.name in _PLACED:
                given.append(getattr(slots, about.name)())
            else:
                given.append(None)  # only attention reads it, which knows the rows by itself
        self._lowering.begin()
        run = _Run(self._step, self._lowering, slots)
        logits, *news = run.run(*given)
        present = [
            run.present[about.name] if about.name in run.present
            else _appended(stores[about.name], value, about, batch, new)
            for about, value in zip(plan.stores, news, strict=True)
        ]  # fmt: skip
        return logits.reshape(batch, new, *logits.shape[2:]), present


class Slots:
    """Where the tokens of a call stand: T kept and S new ones in every row, some of the first padding."""

    def __init__(self, tokens: Tensor, lengths: Tensor | None, batch: Any, new: Any, kept: Any) -> None:
        self.batch, self.new, self.kept = batch, new, kept
        self._like = tokens
        self.padding = None if lengths is None else (kept + new - lengths).reshape(batch, 1)

    def _count(self, start: Any, end: Any) -> Tensor:
        return torch.arange(start, end, device=self._like.device)

    def positions(self) -> Tensor:
        """The position of every new token in its row, `[B * S]`; padding stands at zero."""
        found = self._count(self.kept, self.kept + self.new).reshape(1, self.new)
        if self.padding is not None:
            found = (found - self.padding).clamp(min=0)
        return found.expand(self.batch, self.new).reshape(self.batch * self.new)

    def row(self) -> Tensor:
        """The row of every new token, `[B * S]`."""
        rows = self._count(0, self.batch).reshape(self.batch, 1)
        return rows.expand(self.batch, self.new).reshape(self.batch * self.new)

    @functools.cached_property
    def places(self) -> Places:
        """The positions of queries and keys; one object for all layers."""
        q = self._count(self.kept, self.kept + self.new).reshape(1, 1, self.new, 1)
        k = self._count(0, self.kept + self.new).reshape(1, 1, 1, self.kept + self.new)
        if self.padding is None:
            return Places(q, k)
        pad = self.padding.reshape(self.batch, 1, 1, 1)
        return Places((q - pad).clamp(min=0), (k - pad).clamp(min=0), k >= pad, (k == q) & (q < pad))

    def of_rows(self, packed: Tensor) -> Tensor:
        """`[1, H, B * S, D]` as `[B, H, S, D]`."""
        _, heads, _, width = packed.shape
        return packed.transpose(1, 2).reshape(self.batch, self.new, heads, width).transpose(1, 2)

    def packed(self, rows: Tensor) -> Tensor:
        """`[B, H, S, D]` as `[1, H, B * S, D]`."""
        _, heads, _, width = rows.shape
        return rows.transpose(1, 2).reshape(1, self.batch * self.new, heads, width).transpose(1, 2)


class _Run(Rewritten):
    """The graph, with attention over cached and new tokens. `present`: stores that an attention's operation
    has already put together."""

    def __init__(self, step: Step, lowering: Lowering, slots: Slots) -> None:
        super().__init__(step.graph, lowering)
        self.slots, self.present = slots, dict[str, Tensor]()
        given = step.graph.given().items()
        outputs = list(zip(step.graph.results(), step.graph.outputs, strict=True))
        self._stores = {
            node: (about.name, result)
            for node, about in given
            for result, output in outputs
            if about.kind == output.kind == "pages" and about.name == output.name
        }
        self._picked = {node for node, about in given if (about.kind, about.name) == ("rows", "picked")}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(node in self._picked for node in self.node.all_input_nodes):
            if target is not torch.ops.aten.index_select.default:
                raise ExportError(f"{target} picks results in a way that is not exported.")
            return args[0]  # the results of all tokens are wanted
        return super().call_function(target, args, kwargs)

    def attention(self, found: nodes.AttentionOp) -> Any:
        if not isinstance(found, nodes.CachedAttention):
            raise ExportError(f"{type(found).__name__} has no counterpart in torch or ONNX.")
        q, k, v = map(self.slots.of_rows, (found.q, found.k, found.v))
        view = nodes.CachedAttention.of(self.node)
        names = [self._name_of(*pair) for pair in ((view.k_pages, view.k), (view.v_pages, view.v))]
        operands = Operands(q, k, v, found.reads, found.sizes, (found.k_pages, found.v_pages))
        if all(name in self.present for name in names):
            k, v = (self.present[str(name)] for name in names)
            operands = Operands(q, k, v, found.reads, found.sizes)
        out, present = self.lowering.attention(self.title(), found.program, operands, self.slots.places)
        for name, value in zip(names, present or (), strict=False):
            if name is not None:
                self.present[name] = value
        return self.slots.packed(out)

    def _name_of(self, pages: fx.Node, new: fx.Node) -> str | None:
        """The store whose pages and new tokens these are, unchanged."""
        name, result = self._stores.get(pages, ("", None))
        return name if result is new else None


def _appended(past: Tensor, new: Tensor, about: Store, batch: Any, count: Any) -> Tensor:
    """What is kept of earlier and of new tokens; the new ones of all rows are one sequence."""
    dims = (about.row_dim, about.token_dim)
    rows = new.movedim(dims, (0, 1))
    rows = rows.reshape(batch, count, *rows.shape[2:]).movedim((0, 1), dims)
    return torch.cat([past, rows], about.token_dim)


def _refuse(step: Step) -> None:
    """Raise if the step needs more than tokens and what is kept of earlier ones."""
    plan, graph = step.plan, step.graph
    if plan.fixed or Rate.PROMPT in graph.stages:
        raise ExportError(
            "the decoder computes values once for a prompt (an encoder, say), which are not exported yet."
        )
    if any(store.scales_of for store in plan.stores):
        raise ExportError("the decoder keeps numbers of 8 bits with scales, which are not exported yet.")
    if step.asked:
        raise ExportError(
            "the decoder asks in each call that data do not hide a token from itself by a finite number, at "
            f"{step.asked[0]}, and no file asks. Let the model hide by -inf."
        )
    if plan.beside:
        raise ExportError("the decoder gives a draft something beside the logits, which is not exported.")
    if plan.begins:
        raise ExportError(f"each row begins with {plan.begins} learned places, which are not exported yet.")
    if plan.carried:
        raise ExportError("the decoder carries running sums from token to token, which are not exported yet.")
    others = [a for a in step.arguments if a != step.name]
    if others:
        raise ExportError(f"the decoder takes {', '.join(sorted(others))} for every token, not tokens alone.")
    for node, about in graph.given().items():
        known = about.kind in ("argument", "pages") or about.name in (*_PLACED, "picked")
        readers = [n for n in node.users if nodes.view(n) is None]
        if about.kind in ("rows", "carried") and not known and readers:
            raise ExportError(f"{readers[0].target} reads earlier tokens in a way that is not exported yet.")


def _names_of_stores(step: Step) -> list[str]:
    """A name for each store: of what the first attention reads from it."""
    found: dict[str, str] = {}
    attentions = [n for n in step.graph.graph.nodes if isinstance(nodes.view(n), nodes.Cached)]
    pages = {node: about.name for node, about in step.graph.given().items() if about.kind == "pages"}
    for number, node in enumerate(attentions):
        view = nodes.CachedAttention.of(node)
        for role, value in (("key", view.k_pages), ("value", view.v_pages)):
            if value in pages:
                found.setdefault(pages[value], f"key_values.{number}.{role}")
    return [found.get(s.name, f"key_values.{s.name}") for s in step.plan.stores]
