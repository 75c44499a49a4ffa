"""Tidy: the same values by fewer operations.

For graphs of small tensors, where the overhead of each call dominates: a decoder's step. Chains of views
become one view, no-ops are removed, common subexpressions are computed once, and activations and
root-mean-square norms that a model spells out become one PyTorch operation. Right because views only
reorder elements, and activations and norms are recognised by the formula of an element, not by spelling.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph.program_graph import Level, ProgramGraph, is_size
from attngraph.ir.language import E, Expr
from attngraph.meaning import RULES, Category, M, Meaning, Unliftable, category_of, size_expression
from attngraph.meaning.rules import movement
from attngraph.passes.build import Builder
from attngraph.passes.named import GELU_BY_TANH, RMS_NORM, SILU, meant
from attngraph.passes.proposal import Proposal
from attngraph.pipeline import Outcome

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Tidy:
    name: str = "tidy"
    requires: Level = Level.CACHED
    yields: Level = Level.CACHED

    def run(self, graph: ProgramGraph) -> Outcome:
        outcome = Outcome()
        before = graph.op_count()
        activations, norms = _name(graph, _activation), _name(graph, _norm)
        _shorten_views(graph)
        graph.clean()
        _share(graph)
        graph.clean()
        if graph.op_count() != before:
            fewer = before - graph.op_count()
            named = f"{activations} activation(s) and {norms} norm(s) named"
            outcome.notes.append(f"{fewer} operation(s) fewer, {named}")
        return outcome


def _shorten_views(graph: ProgramGraph) -> None:
    """Replace a chain of operations that keep the order of elements by one reshape, or none."""
    for node in list(graph.graph.nodes):
        if not _keeps_order(node) or not node.users:
            continue
        source: Any = node.args[0]
        chain = 1
        while _keeps_order(source):
            source, chain = source.args[0], chain + 1
        if str(node.target) == "aten.contiguous.default":
            continue  # it needs its memory
        before, after = ([size_expression(s) for s in n.meta["val"].shape] for n in (source, node))
        if before == after:
            node.replace_all_uses_with(source)
        elif chain > 1:
            with Proposal(graph, node) as proposal:
                shape = [proposal.size(extent) for extent in after]
                proposal.replace(node, proposal.call(aten.reshape.default, source, shape))


def _keeps_order(node: fx.Node) -> bool:
    """Whether an operation keeps all elements in their order."""
    found = RULES.get(str(node.target))
    is_view = found is not None and found.element is movement.view
    return is_view or str(node.target) == "aten.contiguous.default"


def _share(graph: ProgramGraph) -> None:
    """Compute equal operations on equal operands once."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            continue
        key = node.target, repr(node.args), repr(sorted(node.kwargs.items()))
        found = seen.setdefault(key, node)
        if found is not node:
            node.replace_all_uses_with(found)
            graph.graph.erase_node(node)


_X = E.var("x")
_MEAN = "aten.mean.dim"
_LAST = frozenset({"aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor"})
_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _name(graph: ProgramGraph, match: Callable[[Meaning, fx.Node], _Call | None]) -> int:
    """Replace what a match finds by the operation that it names; returns how many there were."""
    meaning, found = Meaning({}, graph.conditions), 0
    for node in list(graph.graph.nodes):
        if str(node.target) not in _LAST or not node.users:
            continue
        try:
            call = match(meaning, node)
        except (Unliftable, TypeError):
            continue
        if call is not None:
            target, args, kwargs = call
            node.replace_all_uses_with(Builder(graph, node).call(target, *args, **kwargs))
            found += 1
    return found


def _places(meaning: Meaning, node: fx.Node, *others: fx.Node) -> tuple[Expr, ...] | None:
    """Indices of an element; None where one of the others has another dtype, or the first another shape."""
    shape = meaning.shape(node)
    alike = all(n.meta["val"].dtype == node.meta["val"].dtype for n in others)
    if not alike or meaning.shape(others[0]) != shape:
        return None
    return tuple(E.var(f"o{d}", extent) for d, extent in enumerate(shape))


def _activation(meaning: Meaning, node: fx.Node) -> _Call | None:
    """The operation of the formula that a node computes from one tensor."""
    value, source = node.meta["val"], _common_source(node)
    if not isinstance(value, Tensor) or not value.is_floating_point() or source is None:
        return None
    at = _places(meaning, node, source)
    if at is None:
        return None
    whole = meaning.lift(meaning.read(node, at), lambda r: r.value is not source and _is_pointwise(r.value))
    formula = _plain(M.substitute(whole, {meaning.read(source, at): _X}))
    target, kwargs = _ACTIVATIONS.get(formula, (None, {}))
    return None if target is None else (target, (source,), kwargs)


def _plain(formula: Expr) -> Expr:
    """A formula with all numbers as floats, so that 1 and 1.0 compare equal."""
    numbers = {n: E.const(float(n.value)) for n in E.walk(formula) if n.op == "const" and n.kind == "int"}
    return M.canonical_binders(M.substitute(formula, numbers))


_ACTIVATIONS: dict[Expr, tuple[Any, dict[str, Any]]] = {
    _plain(meant(text, x=_X)): (target, kwargs)
    for text, target, kwargs in (
        (GELU_BY_TANH.replace("x * x * x", "x ** 3.0"), aten.gelu.default, {"approximate": "tanh"}),
        (SILU, aten.silu.default, {}),
    )
}


def _is_pointwise(node: fx.Node) -> bool:
    return category_of(node) is Category.POINTWISE


def _grown(
    node: fx.Node, belongs: Callable[[fx.Node], bool], most: int
) -> Iterator[tuple[set[fx.Node], list[fx.Node]]]:
    """The operations that end at a node, more and more of them, which are used by each other alone; and what
    they are computed from, sizes apart."""
    inside: dict[fx.Node, None] = {node: None}
    while True:
        before = {n: None for i in inside for n in i.all_input_nodes if n not in inside and not is_size(n)}
        yield set(inside), list(before)
        grown = [n for n in before if belongs(n) and all(u in inside for u in n.users)]
        if not grown or len(inside) > most:
            return
        inside.update(dict.fromkeys(grown))


def _common_source(node: fx.Node) -> fx.Node | None:
    """The input of a small tree of pointwise operations: the last value that all of it depends on."""
    trees = _grown(node, _is_pointwise, 16)
    return next((before[0] for inside, before in trees if len(before) == 1 and 1 < len(inside) <= 16), None)


def _norm(meaning: Meaning, node: fx.Node) -> _Call | None:
    """`rms_norm` of the tensor, the weight and the epsilon of which a node is the norm."""
    operands = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    weights = [n for n in operands if n.op == "placeholder" and n.meta["val"].ndim == 1]
    # Pointwise operations and one mean, without other uses.
    *_, (inside, _) = _grown(node, lambda n: _is_pointwise(n) or str(n.target) == _MEAN, 10)
    if len(weights) != 1 or sum(str(n.target) == _MEAN for n in inside) != 1:
        return None
    square: Any = next(n for n in inside if str(n.target) == _MEAN).args[0]
    if square not in inside or not isinstance(square.args[0], fx.Node):
        return None
    (weight,), source = weights, square.args[0]
    at = _places(meaning, node, source, weight)
    if at is None or meaning.shape(weight) != meaning.shape(node)[-1:]:
        return None
    whole = meaning.lift(meaning.read(node, at), lambda r: r.value in inside and r.value is not source)
    place = E.var("c", at[-1].args[0])
    total = M.total(place, M.power(meaning.read(source, (*at[:-1], place)), E.const(2)))
    square, x = M.mul(total, M.recip(at[-1].args[0])), meaning.read(source, at)
    for epsilon in {n.value for n in E.walk(whole) if n.op == "const" and n.kind == "float"}:
        norm = meant(RMS_NORM, x=x, square=square, epsilon=E.const(epsilon))
        wanted = M.mul(meaning.read(weight, at[-1:]), norm)
        if _plain(whole) is _plain(wanted):
            return aten.rms_norm.default, (source, [weight.meta["val"].shape[0]], weight, epsilon), {}
    return None
