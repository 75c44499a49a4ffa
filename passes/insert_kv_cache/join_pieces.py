"""Pieces of a tensor, and tokens that are read each at its own place, become the whole of it.

Matches `cat([f(c) for c in x.chunk(4, 1)], 1)` and its kin: operands of a `cat` that equal operations
compute from pieces that follow each other and are all of `x` (a feed-forward layer in chunks, to save
memory). How many pieces there are may follow from how many tokens there are, which a decoder cannot have.
Numbers that differ among the pieces are taken for sizes of theirs, and become the size of the whole. Right
because both are run in float64 and compared. Leaves operations that differ, and pieces that see each other,
as they are; the decoder's own analysis says what it makes of them.

Matches as well what reads, by an index, each token at its own place: `x[:, torch.arange(n)]`, a gather with a
stride of one, an index that is clamped to where it is anyway. An element of the result is, by the element
rules, the same element of the operand. Among the packed tokens of a step such an index would point somewhere
else, so the operation is left out. Used by `insert_kv_cache`.
"""

import logging
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.errors import AttnGraphError
from attngraph.ir import budgets
from attngraph.ir.graph import ProgramGraph, is_random, is_size, source_of
from attngraph.ir.language import E
from attngraph.meaning import Meaning, tried
from attngraph.meaning.check.check import Checks
from attngraph.passes.build import Builder, Refused
from attngraph.passes.proposal import Proposal

log = logging.getLogger(__name__)
aten = torch.ops.aten
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.tensor_split.sections)
_SLICES = (aten.slice.Tensor, aten.narrow.default)
BY_INDEX = (aten.index.Tensor, aten.gather.default, aten.index_select.default, aten.take_along_dim.default)
_DIFFER = "the pieces are not treated alike"


def join_pieces(graph: ProgramGraph) -> list[str]:
    """Put together what a graph computes in pieces; notes for the report."""
    notes: list[str] = []
    checks = Checks(graph)
    for node in list(graph.graph.nodes):
        pieces = node.args[0] if node.target in (aten.cat.default, aten.concat.default) else ()
        if not isinstance(pieces, list | tuple) or len(pieces) < 2 or len(set(pieces)) < len(pieces):
            continue
        with Proposal(graph, node, checks) as proposal:
            try:
                joint = _Joint(node, pieces)
                whole = joint.whole(proposal)
                others = [n for n in joint.others if not is_size(n)]
                proposal.replace(node, whole, [joint.source, *others])
            except (AttnGraphError, RuntimeError, TypeError, ValueError, IndexError) as problem:
                log.info("pieces at %s are not joined: %s", source_of(node), problem)
                raise Refused("torch does not run the operations so") from problem
        if proposal.done:
            notes.append(f"{len(pieces)} pieces of one tensor are computed together ({source_of(node)})")
    if notes:
        graph.graph.eliminate_dead_code()
    return notes


class _Joint:
    """Equal operations on pieces: `source` is what they are pieces of, `others` what all operations share."""

    def __init__(self, node: fx.Node, pieces: Sequence[fx.Node]) -> None:
        self.node, self.pieces = node, pieces
        self.begins: dict[fx.Node, fx.Node] = {}
        self.others: dict[fx.Node, None] = {}
        self.order: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._match(tuple(pieces))
        if len(set(self.begins.values())) != 1:
            raise Refused(_DIFFER)
        self.source = next(iter(self.begins.values()))

    def _match(self, same: tuple[fx.Node, ...]) -> None:
        """Enter operations that the pieces have at one place of their formulas."""
        first = same[0]
        if first in self.order:
            if self.order[first] != same:
                raise Refused(_DIFFER)
            return
        if all(n is first for n in same):
            self.others[first] = None
            return
        if len(self.order) > budgets.PROBE_NODES or len(set(same)) < len(same):
            raise Refused(_DIFFER)
        source = _source_of(same)
        if source is not None:
            self.begins[first] = source
        else:
            operands = [n.all_input_nodes for n in same]
            alike = all(
                n.op == "call_function" and n.target is first.target and len(o) == len(operands[0])
                and n.kwargs.keys() == first.kwargs.keys() for n, o in zip(same, operands, strict=True)
            )  # fmt: skip
            if not alike or is_random(first.target, first.args) or first.target in _SPLITS:
                raise Refused(_DIFFER)
            for group in zip(*operands, strict=True):
                self._match(group)
        self.order[first] = same

    def whole(self, builder: Builder) -> fx.Node:
        """The operations on the source."""
        made = dict(self.begins)

        def joined(*given: Any) -> Any:
            first = given[0]
            if isinstance(first, fx.Node):
                return made.get(first, first)
            if isinstance(first, list | tuple):
                if any(len(g) != len(first) for g in given):
                    raise Refused(_DIFFER)
                return type(first)(joined(*each) for each in zip(*given, strict=True))
            if all(g == first for g in given):
                return first
            if any(type(g) is not int for g in given):
                raise Refused(_DIFFER)
            return sum(given)

        for first, same in self.order.items():
            if first in made:
                continue
            args = joined(*(n.args for n in same))
            kwargs = {name: joined(*(n.kwargs[name] for n in same)) for name in first.kwargs}
            made[first] = builder.call(first.target, *args, **kwargs)
        found = made[self.pieces[0]]
        if tuple(found.meta["val"].shape) != tuple(self.node.meta["val"].shape):
            raise Refused(_DIFFER)
        return found


def _source_of(pieces: Sequence[fx.Node]) -> fx.Node | None:
    """The tensor of which these are all pieces, one after the other."""
    first: Any = pieces[0]
    if first.target is operator.getitem:
        split = first.args[0]
        if split.target not in _SPLITS or len(split.meta["val"]) != len(pieces):
            return None
        own = all(n.target is operator.getitem and n.args == (split, p) for p, n in enumerate(pieces))
        return _whole(split.args[0]) if own else None
    if any(n.target not in _SLICES or n.target is not first.target for n in pieces):
        return None
    source, dim, end = _whole(first.args[0]), first.args[1], 0
    if any(_whole(n.args[0]) is not source or n.args[1] != dim for n in pieces):
        return None
    for node in pieces:
        start = node.args[2] if len(node.args) > 2 else 0
        size: Any = node.meta["val"].shape[dim]
        if start != end or not isinstance(size, int) or (len(node.args) > 4 and node.args[4] != 1):
            return None
        end += size
    return source if end == source.meta["val"].shape[dim] else None


def _whole(node: Any) -> fx.Node:
    """What a slice of all places is taken from (`x[:, a:b]` begins with one)."""
    while node.target is aten.slice.Tensor and node.args[0].meta["val"].shape == node.meta["val"].shape:
        node = node.args[0]
    assert isinstance(node, fx.Node)
    return node


def leave_out_own_places(graph: ProgramGraph) -> list[str]:
    """Leave out what reads every element at its own place; notes for the report."""
    meaning, notes = Meaning.of(graph), list[str]()
    for node in graph.graph.nodes:
        source = node.args[0] if node.target in BY_INDEX else None
        if isinstance(source, fx.Node) and _is_the_same(meaning, node, source):
            node.replace_all_uses_with(source)
            meaning.forget_elements()
            notes.append(f"an index reads each token at its own place ({source_of(node)})")
    if notes:
        graph.clean()
    return notes


def _is_the_same(meaning: Meaning, node: fx.Node, source: fx.Node) -> bool:
    if not isinstance(source.meta.get("val"), Tensor) or node.meta["val"].dtype != source.meta["val"].dtype:
        return False
    shape = tried(meaning.shape, node)
    if shape is None or shape != tried(meaning.shape, source):
        return False
    at = tuple(E.var(f"o{d}", extent) for d, extent in enumerate(shape))
    found = tried(lambda: meaning.lift(meaning.read(node, at), lambda read: read.value is not source))
    return found is not None and found == meaning.read(source, at)
