"""QuantiseCache: a decoder keeps keys, values and latents as numbers of 8 bits with scales.

Matches values that a decoder keeps of every token, that are floating and read by attention alone, as vectors
of one token and head or as parts of these. They are rounded by `attngraph::quantised` when they are computed,
kept with a scale for each token and head (latents have one head), and read by attention, which gets the
scales (`ir/ops/cached_attention.py`). New tokens see each other's values unrounded, unless sums are to have
one order: then they see what later tokens will (`see_rounded`). What else is kept (tokens
of a convolution's window, values that masks read) stays as it is, and the notes say why. The result is
approximate: by how much, `runtime/proof.py` says, of the values and of the logits.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from attngraph.ir.graph import Input, Level, Output, ProgramGraph, op_name, source_of
from attngraph.ir.ops import nodes
from attngraph.ir.ops.cached_attention import Store
from attngraph.ir.ops.quantised import NAMES, as_kept, quantised
from attngraph.meaning import Meaning, Unliftable
from attngraph.passes.build import Builder, Refused, infer_anew
from attngraph.passes.divide_cache import uses_of
from attngraph.pipeline import Outcome


@dataclasses.dataclass(frozen=True)
class QuantiseCache:
    """`dtype`: of what is kept, "int8" or "float8_e4m3fn"."""

    dtype: str = "int8"
    name: str = "quantise-cache"
    requires: Level = Level.LOWERED
    yields: Level = Level.LOWERED

    def run(self, graph: ProgramGraph) -> Outcome:
        outcome = Outcome()
        if graph.state is None:
            outcome.notes.append("nothing is kept from one call to the next")
            return outcome
        meaning = Meaning({}, graph.conditions)
        found: dict[str, list[Reader]] = {}
        pages = graph.pages()
        for store in graph.state.stores:
            try:
                readers = _readers(meaning, pages[store.name]) if store.name in pages else []
                if store.dtype.is_floating_point and store.dtype.itemsize > 1 and readers:
                    found[store.name] = readers
            except Refused as problem:
                outcome.notes.append(f"{store.label}: kept as it is computed: {problem}")
        if found:
            if graph.unordered is not None:
                see_rounded(graph, found, self.dtype)
            _quantise(graph, found, self.dtype)
            told = f"{len(found)} value(s) are kept as {self.dtype} with scales: approximate"
            outcome.notes.insert(0, told)
        return outcome


def see_rounded(graph: ProgramGraph, names: Iterable[str], dtype: str) -> None:
    """Let what reads these pages see the new tokens' values as numbers of this dtype too (of 8 bits with
    scales), so that it makes no difference when a token came."""
    results, pages = graph.results(), graph.pages()
    values = {o.name: r for o, r in zip(graph.outputs, results, strict=True) if o.kind == "pages"}
    for name in names:
        value, readers = values[name], {user for _, user in uses_of(pages[name])}
        uses = [(used, user) for used, user in uses_of(value) if user in readers]
        if not uses:
            continue
        made = {value: Builder(graph, value.next).call(as_kept, value, dtype)}
        for used, user in uses:
            user.replace_input_with(used, _moved_alike(graph, used, made))


def _moved_alike(graph: ProgramGraph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """A view of a value, made of what stands for it."""
    if node not in made:
        source = node.all_input_nodes[0]
        moved = _moved_alike(graph, source, made)
        with graph.graph.inserting_after(node if node > moved else moved):
            made[node] = graph.graph.node_copy(node, lambda n: moved if n is source else n)
    return made[node]


Reader = tuple[fx.Node, str]
"""An attention that reads pages, and the name of the argument that takes their scales."""


def _readers(meaning: Meaning, pages: fx.Node) -> list[Reader]:
    """All that reads pages; Refused where it is something else than attention, or reads other vectors than
    those of one token and head."""
    found: list[Reader] = []
    for value, user in uses_of(pages):
        view = nodes.view(user)
        if not isinstance(view, nodes.Cached):
            raise Refused(f"{op_name(user)} at {source_of(user)} reads it")
        names = zip(view.page_names, view.scale_names, strict=True)
        found += [(user, scales) for name, scales in names if getattr(view, name) is value]
        others = [v for name, v in view.named.items() if name not in view.page_names]
        if any(value is v or (isinstance(v, (list, tuple)) and value in v) for v in others):
            raise Refused(f"scores read it at {source_of(user)}")
        _require_vectors(meaning, pages, value)
    return found


def _require_vectors(meaning: Meaning, pages: fx.Node, value: fx.Node) -> None:
    """Raise unless a view of pages has, for each page, head and token, elements of the one vector there."""
    with contextlib.suppress(Unliftable):
        _, at = meaning.places(value)
        element = meaning.lift(meaning.read(value, at), lambda read: read.value is not pages)
        same = element.op == "read" and element.value is pages
        if same and len(at) == 4 and element.args[:3] == at[:3]:
            return
    raise Refused(f"heads are not a dimension of what is kept ({source_of(value)})")


def _quantise(graph: ProgramGraph, found: dict[str, list[Reader]], dtype: str) -> None:
    assert graph.state is not None
    pages = graph.pages()
    made: list[Store] = []
    stores = {store.name: store for store in graph.state.stores}
    for name, readers in found.items():
        value = pages[name].meta["val"]
        by = graph.empty(value.shape[:3], torch.float32, value.device)
        scales = graph.add_input(Input("pages", f"{name}.scales"), by, f"pages_{name}_scales")
        pages[name].meta["val"] = graph.empty(value.shape, NAMES[dtype], value.device)
        for node, name_of_scales in readers:
            node.args = nodes.AttentionOp.of(node).replace(**{name_of_scales: scales}).args
        own = stores[name]
        stores[name] = dataclasses.replace(own, dtype=NAMES[dtype])
        made.append(Store(
            f"{name}.scales", own.shape[:3], own.row_dim, own.token_dim, torch.float32, own.window,
            f"{own.label}, scales", own.uses, name,
        ))  # fmt: skip
    infer_anew(graph, [pages[name] for name in found])
    _round_results(graph, list(found), dtype)
    graph.state = dataclasses.replace(graph.state, stores=(*stores.values(), *made))


def _round_results(graph: ProgramGraph, names: Sequence[str], dtype: str) -> None:
    """Return rounded values and, after all that is kept, scales; values of one shape are rounded at once."""
    output = graph.graph.output_node()
    results = graph.results()
    places = {o.name: n for n, o in enumerate(graph.outputs) if o.kind == "pages"}
    together: dict[Any, list[str]] = {}
    for name in names:
        value = results[places[name]].meta["val"]
        together.setdefault((tuple(map(str, value.shape)), value.dtype), []).append(name)
    builder = Builder(graph, output)
    scales: dict[str, fx.Node] = {}
    for members in together.values():
        made = builder.call(quantised, [results[places[name]] for name in members], dtype)
        for number, name in enumerate(members):
            results[places[name]] = builder.call(operator.getitem, made, number)
            scales[name] = builder.call(operator.getitem, made, len(members) + number)
    end = max(places.values()) + 1
    output.args = ((*results[:end], *(scales[name] for name in names), *results[end:]),)
    more = [Output("pages", f"{name}.scales") for name in names]
    graph.outputs = (*graph.outputs[:end], *more, *graph.outputs[end:])
