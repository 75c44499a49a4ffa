"""For a few numbers, a model that asks for a size may do the same all the same: it is traced and compared.

`is_causal = tokens > 1` is asked by most models of transformers, and makes no difference to one token; torch
asks whether `x[:, 1:]` is one place, which might be broadcast, and that makes no difference to two. For the
few small sizes that would change an answer, and for these together, the model is traced once more. Both
graphs are of the same operations then, or are run in float64, as every claim is. Where they differ, or the
model has no such call, the decision stays a condition of the graph.
"""

import itertools
import logging
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from attngraph.capture.captured import Captured
from attngraph.capture.guards import size_value
from attngraph.capture.sides import Decision, Same, Sides, assumed, is_of_ones
from attngraph.capture.structure import flatten, unflatten
from attngraph.errors import NoDecoderError
from attngraph.ir import budgets
from attngraph.ir.graph.formula import holds
from attngraph.ir.graph.program_graph import RESULTS, ProgramGraph, is_size
from attngraph.meaning.check.comparison import Rule, compare
from attngraph.meaning.check.oracle import Exact
from attngraph.runtime.machine import Machine
from attngraph.runtime.proof import TOLERANCE

log = logging.getLogger(__name__)
Again = Callable[[tuple[Any, ...], dict[str, Any]], Captured]
"""Captures another call of the model."""


def compare_sides(
    captured: Captured, graph: ProgramGraph, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
    again: Again, results: Sequence[int] | None = None, single: Collection[str] = (), weights: bool = True,
) -> Sides:  # fmt: skip
    """What a trace decided about sizes, with the sizes for which it makes no difference.

    Args:
        graph: as it was captured. args, kwargs: the call that it was captured from.
        results: the numbers of the results that are compared; None: all.
        single: sizes that are 1 in every call of the graph, about which questions were answered so.
        weights: whether the model's weights are here; if not, as on one rank of several, others are made up
            one after the other.

    Raises:
        NoDecoderError: the graph does not give what the model gives where these are 1.
    """
    sides, found = captured.sides, list[Same]()
    always = frozenset((name, 1) for name in single)
    for at in _apart(sides, graph, always):
        sizes = {**graph.hints, **dict(at)}
        call = resized(args, kwargs, captured.shapes, sizes)
        smaller = [leaf for leaf in flatten(call)[0] if isinstance(leaf, Tensor)]
        try:
            other, run = again(*call), Exact if weights else _MadeUp
            equal = _of_same_operations(graph, other.graph, sizes)
            if equal or _alike(graph, other, captured, owner, smaller, results, run):
                found.append(Same(at, tuple(_relations(other, captured, dict(at)))))
        except Exception as problem:  # the user's model runs at sizes that nobody asked for
            log.info("not for %s: %s", ", ".join(f"{name} of {n}" for name, n in sorted(at)), problem)
    if not single:
        return Sides(sides.decisions, tuple(found))
    first = next((same for same in found if same.at == always), None)
    if first is None:
        raise NoDecoderError("what it does with one sequence is not what it does with each of several.")
    known = {d.relation for d in sides.decisions}
    line = next((d.line for d in sides.decisions), "its own code")
    more = (Decision(r, line) for r in first.relations if r not in known)
    return Sides((*sides.decisions, *more), tuple(Same(s.at - always, s.relations) for s in found))


def _apart(
    sides: Sides, graph: ProgramGraph, always: frozenset[tuple[str, int]]
) -> Iterator[frozenset[tuple[str, int]]]:
    """The sizes that would change an answer where the graph's conditions hold, each alone and then together;
    with those that are always so in all of them."""
    places = [
        [(name, n) for n in sorted(sides.apart[name])
         if any(not holds(d.relation, {**graph.hints, name: n}) for d in sides.decisions)]
        for name in sorted(sides.symbols & graph.hints.keys())
    ]  # fmt: skip
    sets = [frozenset(filter(None, chosen)) for chosen in itertools.product(*([None, *of] for of in places))]
    sets.sort(key=lambda at: (len(at) > 1, -len(at)))  # the order of the others stays
    allowed = (
        at | always for at in sets
        if (at or always)
        and all(holds(c, {**graph.hints, **dict(at | always)}) for c in assumed(graph.conditions))
    )  # fmt: skip
    return itertools.islice(allowed, budgets.SIDES)


def _relations(other: Captured, captured: Captured, at: Mapping[str, int]) -> Iterator[Any]:
    """What a trace at other sizes decided besides, about the sizes of the first."""
    shapes = (zip(*pair, strict=True) for pair in zip(other.shapes, captured.shapes, strict=True))
    pairs = itertools.chain.from_iterable(shapes)
    names = {a: b for a, b in pairs if getattr(a, "is_Symbol", False)}  # from its sizes to the first's
    for relation in (*assumed(other.graph.conditions), *(d.relation for d in other.sides.decisions)):
        relation = relation.xreplace(names)
        relation = relation.subs({s: at[str(s)] for s in relation.free_symbols if str(s) in at})
        if relation is not sympy.true and not is_of_ones(relation):
            yield relation


def resized(
    args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Sequence[Sequence[Any]], sizes: Mapping[str, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with tensors of these sizes: cut, or begun again where there are not as many."""
    leaves, spec = flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for place, shape in zip(places, shapes, strict=True):
        for dim, extent in enumerate(shape):
            tensor = leaves[place]
            wanted = extent if isinstance(extent, int) else size_value(extent, dict(sizes))
            if wanted != tensor.shape[dim]:
                chosen = torch.arange(wanted, device=tensor.device) % tensor.shape[dim]
                leaves[place] = tensor.index_select(dim, chosen)
    found: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(leaves, spec)
    return found


def _of_same_operations(graph: ProgramGraph, other: ProgramGraph, sizes: Mapping[str, int]) -> bool:
    """Whether two graphs are of equal operations on equal operands, where the first is of these sizes."""
    if graph.inputs != other.inputs or graph.outputs != other.outputs:
        return False
    ours, theirs = ([n for n in g.graph.nodes if not is_size(n)] for g in (graph, other))
    if len(ours) != len(theirs):
        return False
    places = {node: n for side in (ours, theirs) for n, node in enumerate(side)}

    def plain(value: Any) -> Any:
        """An operand by its place in its graph, a size as a number, at the sizes that are given."""
        if isinstance(value, fx.Node) and not is_size(value):
            return "operand", places[value]
        value = value.meta.get("val") if isinstance(value, fx.Node) else value
        formula = value.node.expr if isinstance(value, torch.SymInt) else value
        found = size_value(formula, dict(sizes)) if hasattr(formula, "free_symbols") else formula
        return type(found), found

    for a, b in zip(ours, theirs, strict=True):
        if a.op != b.op or (a.op == "call_function" and a.target is not b.target):
            return False
        operands = (map_aggregate((node.args, node.kwargs), plain) for node in (a, b))
        if a.op != "placeholder" and operator.ne(*operands):
            return False
    one, two = graph.constants, other.constants
    return one.keys() == two.keys() and all(_equal(value, two[name]) for name, value in one.items())


def _alike(
    graph: ProgramGraph, other: Captured, captured: Captured, owner: nn.Module, tensors: Sequence[Tensor],
    results: Sequence[int] | None, run: type[Exact],
) -> bool:  # fmt: skip
    """Whether both graphs give the same for these tensors."""
    same_kind = [o.kind for o in graph.outputs] == [o.kind for o in other.graph.outputs]
    if not same_kind or str(other.structure.tree) != str(captured.structure.tree):
        return False
    with torch.no_grad():
        values = (Machine(g, owner)(tensors, None, run) for g in (graph, other.graph))
        is_result = [o.kind in RESULTS for o in graph.outputs]
        ours, theirs = ([*itertools.compress(every, is_result)] for every in values)
    places = range(len(ours)) if results is None else results
    return all(_equal(ours[n], theirs[n]) for n in places)


class _MadeUp(Exact):
    """A graph with weights that are made up where they are used: what is compared holds for any."""

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        return pytree.tree_map(_made_up, super().fetch_args_kwargs_from_env(n))


def _made_up(value: Any) -> Any:
    """Numbers between -1 / 2 and 1 / 2 in place of a tensor without data, the same for equal shapes."""
    if not isinstance(value, Tensor) or not value.numel() or value.untyped_storage().nbytes():
        return value
    places = torch.arange(value.numel(), dtype=torch.float64, device=value.device)
    found = (places * 0.6180339887498949).frac() - 0.5
    return found.reshape(value.shape).to(value.dtype)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) if not a.is_floating_point() else compare(a, b, Rule(TOLERANCE)).holds
