"""MergeHeads: attentions of separate heads become one attention over all of them.

Matches attentions of one kind (the same program, shapes and dtypes) that do not depend on each other
and whose results one `cat` or `stack` joins: a loop over heads, a ModuleList of heads. Right because
attention treats heads alike: the heads' operands are concatenated (by a view where they are slices of
one tensor), a tensor that differs between heads is read at the index `h`, and the result is split
again. Each result is checked against the separate ones in float64. Refuses groups in which
programs differ.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten

from attngraph.ir.graph import Level, ProgramGraph, argument, dependence, sort, source_of
from attngraph.ir.language import E, Expr, ScoreProgram, formulas, operation
from attngraph.ir.ops.nodes import Attention
from attngraph.meaning import ELEMENTWISE, Category, M, Meaning, category_of, is_part
from attngraph.meaning.attention import layout
from attngraph.passes.attention_entries import in_words
from attngraph.passes.build import Builder, NoSize
from attngraph.passes.proposal import Proposal
from attngraph.pipeline import Outcome
from attngraph.report.entries import AttentionEntry

aten = torch.ops.aten
_CONCATENATIONS = (aten.cat.default, aten.concat.default, aten.stack.default)


@dataclasses.dataclass(frozen=True)
class MergeHeads:
    name: str = "merge-heads"
    requires: Level = Level.FUSED
    yields: Level = Level.FUSED

    def run(self, graph: ProgramGraph) -> Outcome:
        outcome = Outcome()
        found: dict[tuple[fx.Node, Hashable], list[fx.Node]] = {}
        for node in graph.attentions():
            concatenation = _concatenated_by(node)
            if concatenation is not None:
                found.setdefault((concatenation, _kind(node)), []).append(node)
        groups = [(concatenation, heads) for (concatenation, _), heads in found.items() if len(heads) > 1]
        for concatenation, heads in groups:
            with Proposal(graph, heads[-1], survives=True) as proposal:
                note = _Merge(proposal, heads).run(concatenation)
            if proposal.problem:
                note = f"heads at {source_of(heads[0])} are left apart: {proposal.problem}"
            outcome.notes += [note] if note else []
        return outcome


def _concatenated_by(node: fx.Node) -> fx.Node | None:
    """The one `cat` or `stack` of this attention's result with others, if nothing else uses it."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.target in _CONCATENATIONS:
            return user
        if user.target is not operator.getitem and category_of(user) is not Category.MOVEMENT:
            return None
        node = user
    return None


def _kind(node: fx.Node) -> Hashable:
    """A key that is equal for attentions that can be merged: all but the numbers in their programs."""
    head = Attention.of(node)
    tensors = (head.q, *head.keys, *head.reads)
    about = tuple((str(t.meta["val"].dtype), str(t.meta["val"].shape)) for t in tensors)
    sizes = tuple(str(s.meta["val"]) if isinstance(s, fx.Node) else s for s in head.sizes)
    form = tuple((type(s).__name__, *map(_form, formulas(s))) for s in head.program.statements)
    return form, about, sizes


def _form(node: Expr) -> Hashable:
    """An expression's structure, without its numbers."""
    value = node.kind if node.op == "const" else node.value
    return (node.op, value, *map(_form, node.args))


def same_value(
    a: Any, b: Any, is_comparable: Callable[[fx.Node], bool],
    known: dict[tuple[fx.Node, fx.Node], bool] | None = None,
) -> bool:  # fmt: skip
    """Whether two values are one, or are computed by the same comparable operations on the same operands, as
    what a loop computes for each head again. `known`: what was found of pairs."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a is b:
        plain = not isinstance(a, (Tensor, fx.Node))
        return a is b or (type(a) is type(b) and plain and bool(a == b))
    if a.op != "call_function" or a.target is not b.target or not is_comparable(a):
        return False
    known = {} if known is None else known
    if (a, b) not in known:
        mine, spec = tree_flatten((a.args, a.kwargs))
        theirs, other = tree_flatten((b.args, b.kwargs))
        pairs = zip(mine, theirs, strict=False)
        known[a, b] = spec == other and all(same_value(x, y, is_comparable, known) for x, y in pairs)
    return known[a, b]


class _Merge:
    """One group of heads."""

    def __init__(self, proposal: Proposal, heads: Sequence[fx.Node]) -> None:
        self.builder: Builder = proposal
        self.proposal, self.graph, self.heads = proposal, proposal.graph, heads
        self.views = [Attention.of(head) for head in heads]
        self.meaning = Meaning.of(self.graph)
        self.each = self.meaning.shape(self.views[0].q)[1]
        self.kv_each = self.meaning.shape(self.views[0].k)[1]

    def run(self, concatenation: fx.Node) -> str:
        """Merge the group, whose results one node concatenates; returns what was done, or ""."""
        view = dependence(self.graph.graph)
        if any(nx.has_path(view, a, b) for a, b in itertools.combinations(self.heads, 2)):
            return ""
        if self.each.op != "const" or self.kv_each.op != "const":
            return ""
        count, each = len(self.heads), self.each.value
        keys, values = zip(*(head.keys for head in self.views), strict=True)
        shared = self._shared(keys, values)
        q = self._side_by_side([head.q for head in self.views])
        k, v = (self._side_by_side(side[:: count // shared]) for side in (keys, values))
        program, reads = self._program()
        merged = self.views[0].replace(q=q, k=k, v=v, reads=reads, program=program, kernel="")
        whole = self.builder.attention(merged)
        out = self.builder.call(operator.getitem, whole, 0)
        parts = [self.builder.call(aten.narrow.default, out, 1, n * each, each) for n in range(count)]
        results = [next(iter(h.users)) for h in self.heads]
        # As functions of what the heads' tensors are views of.
        tensors = [t for head in self.views for t in (head.q, *head.keys, *head.reads)]
        leaves = [self._source(t) for t in tensors if t.target is not torch.ops.attngraph.seed.default]
        pairs = list(zip(results, parts, strict=True))
        error = max(self.proposal.check(result, part, leaves).error for result, part in pairs)
        whole.meta["attention"] = self._entry(merged, count, shared, error)
        for result, part in pairs:
            result.replace_all_uses_with(part)
        sort(self.graph.graph)
        self._replace_concatenation(concatenation, out)
        self.graph.clean()
        return f"merged {count} attentions at {source_of(whole)} into one of {count * each} heads"

    def _shared(self, keys: Sequence[Any], values: Sequence[Any]) -> int:
        """The number of distinct key/value pairs, if they are shared by runs of equally many heads (grouped
        queries); otherwise the number of heads."""
        count = len(keys)
        for length in range(count, 1, -1) if E.is_const(self.kv_each, 1) else ():
            pairs = ((s[n - n % length], each) for s in (keys, values) for n, each in enumerate(s))
            if count % length == 0 and all(self._same(first, each) for first, each in pairs):
                return count // length
        return count

    def _same(self, a: Any, b: Any) -> bool:
        def is_comparable(node: fx.Node) -> bool:
            moves = self.meaning.category(node) in ELEMENTWISE and "dropout" not in str(node.target)
            return moves or not self.meaning.is_tensor(node)

        return same_value(a, b, is_comparable)

    def _side_by_side(self, nodes: Sequence[Any]) -> fx.Node:
        """The tensors `[B, H, S, D]` concatenated along the heads."""
        many = len(nodes) > 1
        seen = self._as_view(nodes, lambda m, b, h, s, d: ((b,), (m, h), (s,), (d,))) if many else None
        return seen or self.builder.side_by_side(list(nodes), 1)

    def _as_view(
        self, nodes: Sequence[fx.Node], roles: Callable[..., layout.Roles], of: fx.Node | None = None
    ) -> fx.Node | None:
        """The tensors together as one view, if all are slices of one tensor; of this one, if it is given."""
        places = tuple(E.var(f"a{d}", extent) for d, extent in enumerate(self.meaning.shape(nodes[0])))
        number = E.var("m", E.const(len(nodes)))
        found = self._progression([self.meaning.read(n, places) for n in nodes], number)
        if found is None or of not in (None, found.value):
            return None
        wanted = roles(number, *places)
        kept = tuple(tuple(v for v in role if not E.is_const(v.args[0], 1)) for role in wanted)
        try:
            steps = layout.solve(self.meaning.shape(found.value), found.args, kept)
            seen = self.builder.view(found.value, steps)
        except (layout.NoView, NoSize):
            return None
        # Slices that were each converted (by autocast, mostly) are slices of what is converted.
        return self.builder.to(seen, nodes[0].meta["val"].dtype)

    def _progression(self, reads: Sequence[Expr], number: Expr) -> Expr | None:
        """One read, as an expression of `number`, that equals the n-th of the reads for `number` = n."""
        lifted = list(map(self.meaning.moved_from, reads))
        first = lifted[0]
        if any(r.op != "read" or r.value is not first.value for r in lifted):
            return None
        steps = [M.sub(b, a) for a, b in zip(first.args, lifted[1].args, strict=True)]

        def at(place: Expr) -> tuple[Expr, ...]:
            return tuple(M.add(a, M.mul(place, step)) for a, step in zip(first.args, steps, strict=True))

        if any(step.free for step in steps) or all(E.is_const(step, 0) for step in steps):
            return None
        if any(at(E.const(place)) != read.args for place, read in enumerate(lifted)):
            return None
        return E.read(first.value, at(number), first.kind)

    def _program(self) -> tuple[ScoreProgram, list[Any]]:
        """The program over all heads, and the tensors that it reads."""
        head: Expr = E.var("h")
        mine = operation("floordiv", head, self.each) if self.each.value > 1 else head
        within = operation("mod", head, self.each) if self.each.value > 1 else E.ZERO
        reads: list[Any] = []
        by_head: set[int] = set()
        for number, nodes in enumerate(zip(*(h.reads for h in self.views), strict=True)):
            if all(self._same(nodes[0], n) for n in nodes):
                reads.append(nodes[0])
            else:  # stacked along a new first dimension
                by_head.add(number)
                seen = self._as_view(nodes, lambda m, *rest: ((m,), *((r,) for r in rest)))
                reads.append(seen or self.builder.call(aten.stack.default, list(nodes)))

        def replace(current: Expr, args: tuple[Expr, ...]) -> Expr:
            if current is head:
                return within
            if current.op == "read" and current.value in by_head:
                return E.read(current.value, (mine, *args))
            return E.with_args(current, args)

        programs = [h.program.mapped(lambda formula: E.rebuild(formula, replace)) for h in self.views]
        alike = zip(*(program.expressions for program in programs), strict=True)
        return programs[0].mapped(lambda formula: _by_head(next(alike), mine)), reads

    def _source(self, node: fx.Node) -> fx.Node:
        """The tensor that a node is a view of."""
        while self.meaning.category(node) is Category.MOVEMENT:
            made_by: Any = node.args[0] if is_part(node) else node
            moved = [n for n in made_by.all_input_nodes if self.meaning.is_tensor(n)]
            if len(moved) != 1:
                break
            (node,) = moved
        return node

    def _replace_concatenation(self, node: fx.Node, out: fx.Node) -> None:
        """Replace the node that concatenates the heads by a view of the merged result."""
        self.meaning, self.builder = Meaning.of(self.graph), Builder(self.graph, node)
        dtype, dim = out.meta["val"].dtype, int(argument(node, "dim")) % node.meta["val"].ndim

        def roles(number: Expr, *places: Expr) -> layout.Roles:
            if node.target is aten.stack.default:
                return tuple((p,) for p in (*places[:dim], number, *places[dim:]))
            return tuple((number, p) if d == dim else (p,) for d, p in enumerate(places))

        inputs = argument(node, "tensors")
        if all(n.meta["val"].dtype == dtype for n in (node, *inputs)):
            seen = self._as_view(inputs, roles, of=out)
            if seen is not None:
                node.replace_all_uses_with(seen)

    def _entry(self, merged: Attention, count: int, shared: int, error: float) -> AttentionEntry:
        entries: list[AttentionEntry] = [h.meta["attention"] for h in self.heads]
        names = [e.name.split(".") for e in entries]
        common = [a for a, *rest in zip(*names, strict=False) if all(a == b for b in rest)]
        return dataclasses.replace(
            entries[0], name=".".join(common), program=str(merged.program),
            mask=in_words(merged.program, merged.reads, self.graph),
            heads=entries[0].heads * count, kv_heads=entries[0].kv_heads * shared, merged=count,
            error=max(error, *(e.error for e in entries)),
        )  # fmt: skip


def _by_head(forms: Sequence[Expr], number: Expr) -> Expr:
    """One expression for several: a number that differs becomes a function of `number`, their index."""
    first = forms[0]
    if all(f is first for f in forms):
        return first
    if first.op != "const":
        args = tuple(_by_head(same, number) for same in zip(*(f.args for f in forms), strict=True))
        return E.make(first.op, args, first.value, first.kind)
    values = [f.value for f in forms]
    step = values[1] - values[0]
    if first.kind == "int" and all(v - values[0] == n * step for n, v in enumerate(values)):
        grown = operation("mul", E.const(step), number) if step != 1 else number
        return operation("add", grown, first) if values[0] else grown
    found = forms[-1]
    for place in range(len(forms) - 2, -1, -1):
        found = operation("where", operation("eq", number, E.const(place)), forms[place], found)
    return found
