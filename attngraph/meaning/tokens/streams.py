"""Blocks of tokens: what is computed from each m tokens in turn, and so has an entry for each block.

A stream is a sequence of entries with a length of its own: of n tokens it has n // m. Entry w follows from
tokens up to the last of block w, and from a few blocks before, as its formula says; so once a block is full
its entry never changes, and a decoder keeps the entry in the place of its tokens. Pooled and compressed keys,
strided ones and patches are streams, however they are spelled (`unfold`, a convolution with a stride, views).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import networkx as nx
from torch import Tensor, fx

from attngraph.ir.graph.program_graph import is_size
from attngraph.ir.language import E, Expr
from attngraph.ir.walk import minimum_cut, reached
from attngraph.meaning.algebra import Digits, M, ranges
from attngraph.meaning.tokens.facts import Axes, Fact, Facts, Kind, Scan, outside_reads


class Blocks(NamedTuple):
    """Blocks of `size` tokens: block w is computed from tokens size * w - back to size * w + reach."""

    size: int
    back: int
    reach: int


def blocks_of(facts: Facts, variable: Expr, formula: Expr) -> Blocks | None:
    """The blocks of tokens that a variable counts in a formula; None where it counts no such."""
    found = list[Blocks]()
    for read in (r for r in E.reads(formula) if variable in r.free):
        fact = facts.known(read.value)
        for digits, index in zip(fact.axes if fact else (), read.args, strict=False):
            if facts.space.token in digits and variable in index.free:
                size = ranges.polynomial(index).get((variable,), 0)
                low, high = ranges.bounds(ranges.polynomial(M.sub(index, M.mul(E.const(size), variable))))
                if size < 1 or low is None or high is None or not set(low) | set(high) <= {()}:
                    return None
                found.append(Blocks(size, -low.get((), 0), high.get((), 0)))
    if len({size for size, _, _ in found}) != 1:
        return None
    return Blocks(found[0].size, max(b.back for b in found), max(b.reach for b in found))


def more_than_tokens(extent: Expr, size: int, tokens: Expr) -> int | None:
    """The number in an extent (tokens + number) // size; None where it is no such."""
    rounds_up = extent.op != "floordiv"
    quotient = M.neg(extent) if rounds_up else extent
    if quotient.op != "floordiv" or not E.is_const(quotient.args[1], size):
        return None
    whole = M.neg(quotient.args[0]) if rounds_up else quotient.args[0]
    more = M.sub(whole, tokens)
    return int(more.value) + (size - 1) * rounds_up if more.op == "const" else None


@dataclasses.dataclass(frozen=True)
class Stream(Scan):
    """A value with an entry for each `size` tokens, in dimension `dim`, computed by `region` from `operands`.
    `before`: from how many blocks before its own an entry follows."""

    node: fx.Node
    region: tuple[fx.Node, ...]
    size: int
    before: int
    dim: int
    operands: tuple[fx.Node, ...] = ()

    @property
    def latest(self) -> int:  # type: ignore[override]
        return (self.before + 1) * self.size

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        given = (n for step in self.region for n in step.all_input_nodes)
        return tuple(n for n in dict.fromkeys(given) if n not in self.region)

    def fact(self, facts: Facts) -> Fact:
        """What is known of the value as one of which a token has an entry where it completes a block."""
        axes: list[Digits] = [()] * len(facts.meaning.shape(self.node))
        assert facts.space.row is not None
        axes[0], axes[self.dim] = (facts.space.row,), (facts.space.token,)
        return Fact(Kind.SCAN, tuple(axes), self.reason, scan=self)

    @property
    def reason(self) -> str:
        return f"an entry for each {self.size} tokens"


def streams_of(
    facts: Facts,
    region: Sequence[fx.Node],
    operands: Sequence[fx.Node],
    formula: Callable[[fx.Node, Axes], Expr | None],
) -> dict[fx.Node, Stream]:
    """The streams of a region that a value is computed from: of fewest bytes among all that would do.

    Args:
        region: operations in the graph's order. operands: values of tokens that it begins with.
        formula: an element in terms of the values that the region begins with; None where it has none.
    """
    inner, found = set(region), dict[fx.Node, tuple[Blocks, int]]()
    for node in region:
        if (blocks := _blocks(facts, node, formula)) is not None:
            found[node] = blocks
    given = {n for n in region if n in found}

    def before(node: fx.Node) -> list[fx.Node]:
        steps = [n for n in node.all_input_nodes if n in inner and not facts.of_sizes(n)]
        return steps if not set(operands) & set(node.all_input_nodes) and given.issuperset(steps) else []

    wanted = [n for n in given if not given.issuperset(u for u in n.users if u in inner) or n is region[-1]]
    sizes: dict[fx.Node, float | None] = {
        n: _bytes(n) + _LATER * (len(found) - place) for place, n in enumerate(found)
    }
    try:
        chosen = minimum_cut(sizes, before, wanted) if wanted else []
    except nx.NetworkXUnbounded:
        return {}
    return {node: _stream(node, found[node], region, operands) for node in chosen}


_LATER = 1.0 / (1 << 20)
"""Of entries with equal bytes, prefer the last one: least work remains when they are read."""


def _bytes(node: fx.Node) -> float:
    value = node.meta["val"]
    return float(math.prod(n for n in value.shape if isinstance(n, int)) * value.dtype.itemsize)


def _blocks(
    facts: Facts, node: fx.Node, formula: Callable[[fx.Node, Axes], Expr | None]
) -> tuple[Blocks, int] | None:
    """The blocks that a value has an entry for, and the dimension of these."""
    space, value = facts.space, node.meta.get("val")
    if not isinstance(value, Tensor) or is_size(node) or facts.of_sizes(node) or space.row is None:
        return None
    shape = facts.meaning.shape(node)
    counting = [dim for dim, extent in enumerate(shape) if space.counts_tokens(extent)]
    rows = [dim for dim, extent in enumerate(shape) if extent is space.rows]
    if (
        len(counting) != 1
        or rows != [0]
        or any(n.op != "const" for dim, n in enumerate(shape) if dim not in (0, counting[0]))
    ):
        return None
    (dim,) = counting
    extent = shape[dim]
    if extent.op != "floordiv" or extent.args[0] is not space.tokens or extent.args[1].op != "const":
        return None
    element = formula(node, ((space.row,), *((),) * (len(shape) - 1)))
    own = E.var(f"own{dim}", extent)
    blocks = None if element is None else blocks_of(facts, own, element)
    if (
        blocks is None
        or element is None
        or blocks.size != int(extent.args[1].value)
        or blocks.reach >= blocks.size
    ):
        return None
    for read in E.reads(element):
        fact = facts.known(read.value)
        if fact is None:
            return None
        for digits, index in zip(fact.axes or ((),) * len(read.args), read.args, strict=True):
            of_block = space.token in digits
            if of_block and (digits != (space.token,) or own not in index.free):
                return None
            if not of_block and not space.follows_digits(digits, index):
                return None
    # With its own and the blocks before, an entry must be what it is with all: nothing asks for the block's
    # number, but whether it is one of the first.
    later = M.substitute(element, {own: M.add(E.const(_blocks_before(blocks)), E.var("block"))})
    asked = (n for n in outside_reads(later) if n.op in ("le", "lt", "eq"))
    if any(map(space.is_count, outside_reads(later))) or any(E.var("block") in n.free for n in asked):
        return None
    return blocks, dim


def _blocks_before(blocks: Blocks) -> int:
    """From how many blocks before its own an entry follows."""
    return max(0, -(-blocks.back // blocks.size))


def _stream(
    node: fx.Node, about: tuple[Blocks, int], region: Sequence[fx.Node], operands: Sequence[fx.Node]
) -> Stream:
    blocks, dim = about
    inner = set(region)
    needed = set(reached([node], lambda n: n.all_input_nodes if n in inner else ())) & inner
    steps = tuple(n for n in region if n in needed)
    given = {n for step in steps for n in step.all_input_nodes}
    before = _blocks_before(blocks)
    return Stream(node, steps, blocks.size, before, dim, tuple(n for n in operands if n in given))
