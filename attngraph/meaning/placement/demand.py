"""What a rank needs of a node's operands to compute its part of the node.

By the element rules: an element of the result reads elements of the operands, so the indices that a rank has
of the result say which it needs of each operand. `uses` answers this for one node; which nodes are computed
by parts at all is decided in `regions.py`. Nothing here knows an operation by its name but attention (whose
heads are independent of each other), norms over the last dimensions, and the ways of writing a view.
"""

import dataclasses
import math
import operator
from collections.abc import Mapping

import torch
from torch import Tensor, fx

from attngraph.ir.language import E, Expr, operation_of
from attngraph.ir.ops import nodes
from attngraph.ir.ops.collectives import COLLECTIVES
from attngraph.ir.walk import connected, reached
from attngraph.meaning.algebra.digits import numbers
from attngraph.meaning.element import Meaning
from attngraph.meaning.placement.elements import element, independent_dims
from attngraph.meaning.placement.table import Cut, Table
from attngraph.meaning.rule import Category, Indices, Unliftable, tried

LARGEST = 1 << 22
"""Index pairs of one view that are enumerated."""
VIEWS = frozenset(f"aten.{name}" for name in (
    "view.default", "reshape.default", "_unsafe_view.default", "unflatten.int", "flatten.using_ints",
))  # fmt: skip
"""Operations that keep the order of elements in memory and take sizes, or ranges of dimensions."""


class Unplaced(Exception):
    """A node cannot be computed by parts in this way: says why, for a user."""


@dataclasses.dataclass(frozen=True)
class Use:
    """What is needed of an operand. `sources`: where exactly this is moved, the dimension of the result that
    each dimension of the operand belongs to (None: of one index)."""

    operand: fx.Node
    cut: Cut
    sources: tuple[int | None, ...] = ()


Part = tuple[Use, ...]
"""What a node is computed from by parts. The operation is the node's own on its part of the operands, with
other sizes if it is a view; where a `Use` has `sources`, it is that of moving exactly what is needed."""


class Demand:
    """`part(node, cut)`: how ranks compute this part of a node; Unplaced where no way is known."""

    def __init__(self, meaning: Meaning, ranks: int) -> None:
        self.meaning, self.ranks = meaning, ranks

    def part(self, node: fx.Node, cut: Cut) -> Part:
        if node.target is operator.getitem and nodes.view(node.args[0]) is not None:  # type: ignore[arg-type]
            return (Use(node.args[0], cut),)  # type: ignore[arg-type]
        if node.target in COLLECTIVES:
            raise Unplaced("it is a sum over ranks")
        attention = nodes.view(node)
        if attention is not None:
            return self._heads(attention, cut)
        try:
            at, places = self.meaning.places(node)
            value = element(self.meaning, node, places)
        except Unliftable as problem:
            known = self._independent(node, cut)
            if known is not None:
                return known
            raise Unplaced(f"attngraph has no rule for the elements of {node.target}") from problem
        variables = {at[dim]: table for dim, table in cut.items()}
        # Those that decide where others are read included.
        reads = [n for n in E.reads(value) if isinstance(n.value, fx.Node)]
        inside = {"read": slice(0), **dict.fromkeys(E.BINDERS, slice(1, None))}
        for part in reached([value], lambda n: n.args[inside.get(n.op, slice(None))]):
            if part in variables and not variables[part].is_whole:
                raise Unplaced("the operation depends on the place of an element itself")
        if self.meaning.category(node) is Category.MOVEMENT and len(reads) == 1 and value.op == "read":
            return self._moved(node, value, at, cut)
        uses: dict[fx.Node, Use] = {}
        for read in reads:
            found = {d: variables[i] for d, i in enumerate(read.args) if i in variables}
            others = [i for i in read.args if i not in variables and not i.free.isdisjoint(variables)]
            if others:
                raise Unplaced(f"{node.target} reads other parts of its operand")
            use = Use(read.value, found)
            if uses.setdefault(read.value, use).cut != found:
                raise Unplaced(f"{node.target} reads its operand at two places")
        return tuple(uses.values())

    def _independent(self, node: fx.Node, cut: Cut) -> Part | None:
        """An operation of which only the leading dimensions are known to be independent of each other."""
        first, source = independent_dims(node), node.args[0]
        if first is None:
            return None
        if any(dim >= first and not table.is_whole for dim, table in cut.items()):
            raise Unplaced("a norm needs all that it is computed over")
        weights = [a for a in node.all_input_nodes if a is not source]
        kept = {dim: table for dim, table in cut.items() if dim < first}
        return (Use(source, kept), *(Use(w, {}) for w in weights))  # type: ignore[arg-type]

    # --- attention ---

    def _heads(self, attention: nodes.AttentionOp, cut: Cut) -> Part:
        """Attention of some query heads, with the key/value heads and entries of tables that they need."""
        if isinstance(attention, nodes.Cached):
            raise Unplaced("attention over a cache")
        heads = cut.get(1)
        if heads is None or any(dim != 1 and not table.is_whole for dim, table in cut.items()):
            raise Unplaced("a part of a head's width is no attention")
        total, latent = self._number(attention.q, 1), isinstance(attention, nodes.LatentAttention)
        uses = [Use(attention.q, {1: heads})]
        uses += [Use(key, {}) for key in attention.keys if latent]
        for node in attention.projections if latent else attention.keys:
            dim = 0 if latent else 1
            uses.append(Use(node, {dim: self.kv_heads(heads, total, self._number(node, dim))}))
        for number, tensor in enumerate(attention.reads):
            uses.append(Use(tensor, dict.fromkeys(head_dims(attention, number) or (), heads)))
        return tuple(uses)

    def _number(self, node: fx.Node, dim: int) -> int:
        extent = self.meaning.shape(node)[dim]
        if extent.op != "const":
            raise Unplaced("the number of heads is a size that varies")
        return int(extent.value)

    def kv_heads(self, heads: Table, total: int, kv: int) -> Table:
        """The key/value heads that some query heads attend to."""
        group = total // kv
        found = Table.of(heads.places // group, kv)
        if found is not None:
            each = heads.count // found.count
            local = torch.arange(heads.count) // max(each, 1)
            even = each * found.count == heads.count
            if even and torch.equal(found.places[:, local], heads.places // group):
                return found
        heads_of_both = f"{total} query heads that share {kv} key/value heads"
        raise Unplaced(f"{heads_of_both} cannot be divided among {self.ranks} ranks")

    # --- movement ---

    def _moved(self, node: fx.Node, value: Expr, at: Indices, cut: Cut) -> Part:
        """An operation that only moves elements. Of two views in a row the second may undo the first, which
        joins heads with a size that varies: then it is a view of what the first is a view of."""
        while True:
            try:
                return self._moved_once(node, value, at, cut)
            except _Symbolic as problem:
                views = {str(node.target), str(value.value.target)} <= VIEWS
                below = tried(self.meaning.element, value.value, value.args) if views else None
                if below is None:
                    raise Unplaced("heads are joined with a size that varies") from problem
                value = below

    def _moved_once(self, node: fx.Node, value: Expr, at: Indices, cut: Cut) -> Part:
        source, shape = value.value, self.meaning.shape(value.value)
        variables = {at[dim]: table for dim, table in cut.items()}
        found: dict[int, Table] = {}
        odd, kept = [], False
        for d, index in enumerate(value.args):
            if index.op == "var" and index in at and index.args[0] is shape[d]:
                if index in variables:
                    found[d] = variables[index]
            elif shape[d].op == "const" and _computable(index):
                odd.append(d)
            elif not index.free.isdisjoint(variables):
                raise _Symbolic
            else:
                kept = True
        for group in connected(odd, lambda d: value.args[d].free):
            found.update(self._sets(group, value.args, shape, variables))
        moved = [d for d in odd if not (found[d].is_whole and value.args[d].free.isdisjoint(variables))]
        if not moved:
            for d in odd:
                del found[d]
            return (Use(source, found),)
        if str(node.target) in VIEWS:
            return (Use(source, found),)
        owners = [[v for v in at if v in i.free] for i in value.args]
        flat = [v for of in owners for v in of]
        if kept or any(len(of) > 1 for of in owners) or len(set(flat)) != len(flat):
            raise Unplaced(f"{node.target} mixes dimensions")
        sources = tuple(at.index(of[0]) if of else None for of in owners)
        return (Use(source, found, sources),)

    def _sets(
        self, dims: list[int], indices: Indices, shape: Indices, variables: Mapping[Expr, Table]
    ) -> dict[int, Table]:
        """The indices that are read of some dimensions, which share variables: they must be a product."""
        used = list(dict.fromkeys(v for d in dims for v in sorted(indices[d].free, key=lambda v: v.order)))
        rows: list[list[Tensor]] = []
        for rank in range(self.ranks):
            lists = [
                variables[v].places[rank] if v in variables else torch.arange(int(v.args[0].value))
                for v in used
            ]
            lengths = [len(x) for x in lists]
            if math.prod(lengths) > LARGEST:
                raise Unplaced("a view of too many elements")
            grid = dict(zip(used, torch.meshgrid(*lists, indexing="ij") if lists else (), strict=True))
            read = [numbers(indices[d], grid).broadcast_to(lengths).flatten() for d in dims]
            rows.append([torch.unique(r) for r in read])
            distinct = torch.unique(torch.stack(read), dim=1).shape[1]
            if len(dims) > 1 and distinct != math.prod(map(len, rows[-1])):
                raise Unplaced("a rank's heads are no block of a dimension")
        found = {}
        for d, of_ranks in zip(dims, zip(*rows, strict=True), strict=True):
            table = Table.of(of_ranks, int(shape[d].value))
            if table is None:
                raise Unplaced("ranks would have unequally many heads")
            found[d] = table
        return found


class _Symbolic(Exception):
    """An index of a cut dimension depends on a size that varies."""


def head_dims(attention: nodes.AttentionOp, number: int) -> list[int] | None:
    """The dimensions of a tensor that are read at the head's number; None where heads are used otherwise, so
    that a rank needs all of the tensor."""
    found: set[tuple[int, ...]] = set()
    h = E.var("h")
    for read in (n for e in attention.program.expressions for n in E.walk(e)):
        if read.op == "read" and read.value == number:
            if any(i is not h and h in i.free for i in read.args):
                return None
            found.add(tuple(d for d, i in enumerate(read.args) if i is h))
    return list(found.pop()) if len(found) == 1 else None


def _computable(index: Expr) -> bool:
    """Whether an index follows from variables of known extent alone."""
    return all(
        operation_of(n.op) or n.op == "const" or (n.op == "var" and n.args and n.args[0].op == "const")
        for n in E.outside(index, "var")
    )
