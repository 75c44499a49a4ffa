"""A value that reads, by an index, each token at its own place is the operand itself.

`x[:, torch.arange(n)]`, a gather with a stride of one, an index that is clamped to where it is anyway: an
element of the result is, by the element rules, the same element of the operand. Among the packed tokens of a
step such an index would point somewhere else, so the operation is left out. What takes tokens by other
indices of places is refused. Used by `insert_kv_cache`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.errors import NoDecoderError
from attngraph.ir.graph import ProgramGraph, computed_from, is_size, op_name, source_of
from attngraph.ir.language import expr as E
from attngraph.meaning import Meaning, Unliftable
from attngraph.meaning.tokens.tokens import Tokens

aten = torch.ops.aten
_BY_INDEX = (aten.index.Tensor, aten.gather.default, aten.index_select.default, aten.take_along_dim.default)


def leave_out_own_places(graph: ProgramGraph) -> list[str]:
    """Leave out what reads every element at its own place; notes for the report."""
    meaning, notes = Meaning.of(graph), list[str]()
    for node in graph.graph.nodes:
        source = node.args[0] if node.target in _BY_INDEX else None
        if isinstance(source, fx.Node) and _is_the_same(meaning, node, source):
            node.replace_all_uses_with(source)
            meaning.forget_elements()
            notes.append(f"an index reads each token at its own place ({source_of(node)})")
    if notes:
        graph.clean()
    return notes


def require_no_places(tokens: Tokens, nodes: Iterable[fx.Node]) -> None:
    """Raise if one of these values takes tokens by an index that follows from their places, which among
    packed tokens would be others, whatever is computed from it.

    Raises:
        NoDecoderError: with the operation and its line.
    """
    for node in nodes:
        for source, dim, index in _indexed(node):
            axes = tokens[source].axes if source in tokens.facts else ()
            along = -len(axes) <= dim < len(axes) and tokens.space.token in axes[dim]
            if along and _is_of_places(index):
                raise NoDecoderError(
                    f"{op_name(node)} at {source_of(node)}: it takes tokens by an index that follows from "
                    "their places. Slice them, or leave the index out where it is a token's own place."
                )


def _is_of_places(index: fx.Node) -> bool:
    """Whether an index is computed from how many tokens there are alone."""
    sizes = {n for n in index.graph.nodes if is_size(n)}
    return all(n.op != "placeholder" for n in computed_from([index], sizes))


def _indexed(node: fx.Node) -> Iterator[tuple[fx.Node, int, fx.Node]]:
    """The tensor that is read by an index, the dimension, and the index."""
    if node.target not in _BY_INDEX:
        return
    source, *given = node.args[:3]
    pairs: list[tuple[Any, Any]] = [tuple(given)] if len(given) > 1 else []  # type: ignore[list-item]
    if node.target is aten.index.Tensor:
        pairs = list(enumerate(given[0]))  # type: ignore[arg-type]
    elif node.target is aten.take_along_dim.default:
        pairs = [(given[1], given[0])] if len(given) > 1 else []
    for dim, index in pairs:
        if isinstance(source, fx.Node) and isinstance(dim, int) and isinstance(index, fx.Node):
            yield source, dim, index


def _is_the_same(meaning: Meaning, node: fx.Node, source: fx.Node) -> bool:
    if not isinstance(source.meta.get("val"), Tensor) or node.meta["val"].dtype != source.meta["val"].dtype:
        return False
    try:
        shape = meaning.shape(node)
        if shape != meaning.shape(source):
            return False
        at = tuple(E.var(f"o{d}", extent) for d, extent in enumerate(shape))
        found = meaning.lift(meaning.read(node, at), lambda read: read.value is not source)
        return found == meaning.read(source, at)
    except Unliftable:
        return False
