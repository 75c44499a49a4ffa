"""TabulateScores: what scores have of a distance, a key or a query is computed once for each of them, not
for each pair.

Matches parts of a score program whose indices are `k - q` alone, `k` alone or `q` alone (besides `b` and
`h`), and that take many operations: the logarithmic buckets of T5, Gaussians of distances, sines of places.
Such a part is computed as a table, by PyTorch's operations, before the attention, and the program reads it
[hoisting of loop invariants]. Right because with `k - q = d` substituted the formula names no query any more;
the new attention is checked against the old in float64. Equal tables are one. Conditions stay in the program:
they say which keys need not be visited.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from attngraph.ir.graph import Level, ProgramGraph, source_of
from attngraph.ir.language import FUNCTIONS, E, Expr, Keep, ScoreProgram, operation
from attngraph.ir.language.evaluate import number
from attngraph.ir.ops.nodes import Attention
from attngraph.ir.walk import reached
from attngraph.meaning import M
from attngraph.meaning.check.check import Checks
from attngraph.passes.build import Builder
from attngraph.passes.insert_kv_cache.write_formula import Writer
from attngraph.passes.proposal import Proposal
from attngraph.pipeline import Outcome

aten = torch.ops.aten
_B, _H, _Q, _K = (E.var(name) for name in "bhqk")
_D = E.var("d")
_SIMPLE = frozenset({"abs", "sign", "min", "max", "isnan", "float", "int", "where"})
MANY = 12
"""A part of so many operations is tabulated. A function counts as four."""


@dataclasses.dataclass(frozen=True)
class TabulateScores:
    name: str = "tabulate-scores"
    requires: Level = Level.FUSED
    yields: Level = Level.FUSED

    def run(self, graph: ProgramGraph) -> Outcome:
        outcome, tables = Outcome(), dict[Any, fx.Node]()
        checks = Checks(graph)
        for node in graph.attentions():
            view = Attention.of(node) if node.target is Attention.target else None
            parts = [] if view is None else list(_parts(view.program))
            if view is None or not parts:
                continue
            known = dict(tables)
            with Proposal(graph, node, checks, survives=True) as proposal:
                made = _Tables(proposal, view, known).of(parts)
                whole = proposal.attention(made)
                whole.meta["attention"] = node.meta["attention"]
                leaves = [view.q, view.k, view.v, *view.reads]
                for result in list(node.users):
                    proposal.replace(result, proposal.call(result.target, whole, *result.args[1:]), leaves)
            where = source_of(node)
            if proposal.done:
                graph.graph.erase_node(node)
                tables = known
                told = [f"computed once for each {_WORDS[p.along]} at {where}: {p.value}" for p in parts]
            else:
                told = [f"computed for each pair at {where}: {proposal.problem}"]
            outcome.notes += [note for note in told if note not in outcome.notes]
        graph.clean()
        return outcome


class _Part(NamedTuple):
    """A part of a program, and the index that it is a function of: `d` for the distance `k - q`."""

    value: Expr
    along: str


_WORDS = {"d": "distance", "k": "key", "q": "query"}


def _parts(program: ScoreProgram) -> list[_Part]:
    """The largest parts that are worth a table."""
    values = [s.value for s in reversed(program.statements) if not isinstance(s, Keep)]
    found = ((value, _along(value)) for value in reached(values, lambda v: () if _along(v) else v.args))
    return [_Part(value, along) for value, along in found if along is not None]


def _along(value: Expr) -> str | None:
    """The index that a number of many operations is a function of, besides those of batch and head."""
    inner = [n for n in E.walk(value) if n.args and n.op not in ("read", "var")]
    operations = sum(4 if n.op in FUNCTIONS and n.op not in _SIMPLE else 1 for n in inner)
    if operations < MANY or value.kind == "bool":
        return None
    if any(n.op in ("dot", "s", "p", "random") for n in E.walk(value)):
        return None
    places = value.free - {_B, _H}
    if len(places) == 1:
        return str(next(iter(places)).value)
    distance = M.substitute(M.canonical(value), {_K: M.add(_D, _Q)})
    return "d" if places and _Q not in distance.free else None


class _Tables:
    """The tables of one attention. `known`: the tables so far, by what they are computed from."""

    def __init__(self, builder: Builder, view: Attention, known: dict[Any, fx.Node]) -> None:
        self.builder, self.view, self.known = builder, view, known
        self.reads, self.sizes = list(view.reads), list(view.sizes)

    def of(self, parts: Sequence[_Part]) -> Attention:
        """The attention, with reads in place of the parts."""
        instead = {part.value: self._read(part) for part in parts}
        program, used = self.view.program.mapped(lambda f: E.replaced(f, instead)).renumbered()
        return self.view.replace(program=program, reads=[self.reads[n] for n in used], sizes=self.sizes)

    def _read(self, part: _Part) -> Expr:
        varying = [v for v in (_B, _H) if v in part.value.free]
        self.reads.append(self._table(part, varying))
        place: Expr = E.var(part.along)
        if part.along == "d":
            before = operation("sub", self._queries(), E.ONE)
            place = operation("add", operation("sub", _K, _Q), before)
        return E.read(len(self.reads) - 1, (*varying, place), "int" if part.value.kind == "int" else "float")

    def _queries(self) -> Expr:
        """How many queries there are, by its name in the program."""
        count = self.view.q.meta["val"].shape[2]
        if isinstance(count, int):
            return E.const(count)
        node = self.builder.trace(lambda q: q.size(2), self.view.q)
        if node not in self.sizes:
            self.sizes.append(node)
        return E.size(f"n{self.sizes.index(node)}")

    def _table(self, part: _Part, varying: Sequence[Expr]) -> fx.Node:
        q, k = self.view.q.meta["val"], self.view.k.meta["val"]
        reads = tuple((n.value, self.view.reads[n.value]) for n in E.reads(part.value))
        sizes = tuple(str(getattr(s, "meta", {}).get("val", s)) for s in self.view.sizes)
        key = part, reads, sizes, *map(str, (*q.shape[:3], k.shape[2], q.dtype, q.device))
        if key not in self.known:
            self.known[key] = _Writer(self.builder, self.view, part.along).table(part.value, varying)
        return self.known[key]


class _Writer(Writer):
    """Writes a part as a tensor `[b, h, places]`, without the dimensions along which it does not vary.
    Distances are those of all keys to all queries, from the least on."""

    def __init__(self, builder: Builder, view: Attention, along: str) -> None:
        q = view.q.meta["val"]
        dtype = torch.promote_types(q.dtype, torch.float32)
        super().__init__(builder, 3, dtype, q.device)
        self.view, self.index_of_places = view, along

    def table(self, part: Expr, varying: Sequence[Expr]) -> fx.Node:
        if self.index_of_places == "d":
            part = E.replaced(part, {_Q: E.ZERO})  # any query serves: take distances to the first

        def shaped(found: Any) -> Any:
            found = found if part.kind == "int" else found.to(self.dtype)
            for _ in range(3 - found.ndim):
                found = found.unsqueeze(0)
            for dim, variable in ((1, _H), (0, _B)):
                found = found if variable in varying else found.select(dim, 0)
            return found.contiguous()

        return self.builder.trace(shaped, self.value(part))  # type: ignore[no-any-return]

    def _value(self, node: Expr) -> Any:
        if not node.free and not any(n.op in ("read", "size") for n in E.walk(node)):
            return number(node)
        if node.kind == "int" and not node.free and not E.reads(node):
            return self.builder.size(node, {E.size(f"n{n}"): size for n, size in enumerate(self.view.sizes)})
        if node.op in ("int", "float"):
            return self.builder.to(self.value(node.args[0]), torch.int64 if node.op == "int" else self.dtype)
        return super()._value(node)

    def index(self, variable: Expr) -> fx.Node:
        name, (q, k) = str(variable.value), (self.view.q, self.view.k)
        if name in "bh":
            return self._counted(self.builder.trace(lambda q: q.size("bh".index(name)), q), "bh".index(name))
        if self.index_of_places != "d":
            return self._counted(self.builder.trace(lambda x: x.size(2), q if name == "q" else k), 2)
        many = self._counted(self.builder.trace(lambda q, k: q.size(2) + k.size(2) - 1, q, k), 2)
        return self.builder.trace(lambda x, q: x - (q.size(2) - 1), many, q)  # type: ignore[no-any-return]

    def _counted(self, count: fx.Node, dim: int) -> fx.Node:
        return self.along(self.builder.call(aten.arange.default, count, device=self.device), dim)

    def read(self, node: Expr) -> fx.Node:
        indices = [self.as_tensor(self.value(place), []) for place in node.args]
        return self.builder.call(aten.index.Tensor, self.view.reads[node.value], indices)
