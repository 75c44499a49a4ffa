"""Tidy: the same values by fewer operations.

For graphs of small tensors, where the overhead of each call dominates: a decoder's step. Chains of views
become one view, no-ops are removed, common subexpressions are computed once, and activations and
root-mean-square norms that a model spells out become one PyTorch operation. Right because views only
reorder elements, and activations and norms are recognised by the formula of an element, not by spelling.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph.program_graph import Level, ProgramGraph, is_size
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.algebra.sizes import size_expression
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import RULES, Category, Unliftable, category_of
from attngraph.meaning.rules import movement
from attngraph.passes.build import Builder, NoSize
from attngraph.pipeline import Outcome

aten = torch.ops.aten
_IMPURE = (torch.Tag.nondeterministic_seeded,)


@dataclasses.dataclass(frozen=True)
class Tidy:
    name: str = "tidy"
    requires: Level = Level.CACHED
    yields: Level = Level.CACHED

    def run(self, graph: ProgramGraph) -> Outcome:
        outcome = Outcome()
        before = graph.op_count()
        activations = _name_activations(graph)
        norms = _name_norms(graph)
        _shorten_views(graph)
        graph.clean()
        _share(graph)
        graph.clean()
        if graph.op_count() != before:
            fewer = before - graph.op_count()
            named = f"{activations} activation(s) and {norms} norm(s) named"
            outcome.notes.append(f"{fewer} operation(s) fewer, {named}")
        return outcome


def _extents(node: Any) -> tuple[Expr, ...]:
    return tuple(size_expression(s) for s in node.meta["val"].shape)


def _shorten_views(graph: ProgramGraph) -> None:
    """Replace a chain of operations that keep the order of elements by one reshape, or none."""
    for node in list(graph.graph.nodes):
        if not _keeps_order(node) or not node.users:
            continue
        source: Any = node.args[0]
        chain = 1
        while _keeps_order(source):
            source, chain = source.args[0], chain + 1
        needs_memory = str(node.target) == "aten.contiguous.default"
        if _extents(source) == _extents(node) and not needs_memory:
            node.replace_all_uses_with(source)
        elif chain > 1 and not needs_memory:
            builder = Builder(graph, node)
            try:
                shape = [builder.size(extent) for extent in _extents(node)]
            except (NoSize, KeyError):
                builder.discard()
                continue
            node.replace_all_uses_with(builder.call(aten.reshape.default, source, shape))


def _keeps_order(node: fx.Node) -> bool:
    """Whether an operation keeps all elements in their order."""
    found = RULES.get(str(node.target))
    is_view = found is not None and found.element is movement.view
    return is_view or str(node.target) == "aten.contiguous.default"


def _share(graph: ProgramGraph) -> None:
    """Compute equal operations on equal operands once."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or any(tag in getattr(node.target, "tags", ()) for tag in _IMPURE):
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        found = seen.setdefault(key, node)
        if found is not node:
            node.replace_all_uses_with(found)
            graph.graph.erase_node(node)


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, dict):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    return value if isinstance(value, fx.Node) else (type(value).__name__, str(value))


_X = E.var("x")
_INNER = M.add(_X, M.mul(E.const(0.044715), M.power(_X, E.const(3.0))))
_TANH = M.function("tanh", M.mul(E.const(math.sqrt(2 / math.pi)), _INNER))
_ACTIVATIONS: dict[Expr, tuple[Any, dict[str, Any]]] = {
    M.mul(E.const(0.5), _X, M.add(E.const(1.0), _TANH)): (aten.gelu.default, {"approximate": "tanh"}),
    M.mul(_X, M.function("sigmoid", _X)): (aten.silu.default, {}),
}
"""Formulas of one element, and the operation that computes them (Hendrycks & Gimpel 2016; Elfwing 2018)."""
_MEAN = "aten.mean.dim"
_LAST = frozenset({"aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor"})


def _name_activations(graph: ProgramGraph) -> int:
    meaning = Meaning({}, graph.conditions)
    found = 0
    for node in list(graph.graph.nodes):
        if str(node.target) not in _LAST or not node.users:
            continue
        match = _activation(meaning, node)
        if match is None:
            continue
        source, target, kwargs = match
        builder = Builder(graph, node)
        node.replace_all_uses_with(builder.call(target, source, **kwargs))
        found += 1
    return found


def _activation(meaning: Meaning, node: fx.Node) -> tuple[fx.Node, Any, dict[str, Any]] | None:
    """The operand and the operation, if a node is a known activation function."""
    value = node.meta["val"]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    try:
        at = tuple(E.var(f"o{d}", extent) for d, extent in enumerate(meaning.shape(node)))
        source = _common_source(node)
        if (
            source is None
            or source.meta["val"].dtype != value.dtype
            or meaning.shape(source) != meaning.shape(node)
        ):
            return None
        whole = meaning.lift(
            meaning.read(node, at), lambda r: r.value is not source and _is_pointwise(r.value)
        )
        formula = M.substitute(whole, {meaning.read(source, at): _X})
    except (Unliftable, TypeError):
        return None
    known = _ACTIVATIONS.get(_with_floats(formula))
    return None if known is None else (source, *known)


def _with_floats(formula: Expr) -> Expr:
    """The formula with all numbers as floats, so that 1 and 1.0 compare equal."""
    numbers = {n: E.const(float(n.value)) for n in E.walk(formula) if n.op == "const" and n.kind == "int"}
    return M.substitute(formula, numbers)


def _is_pointwise(node: fx.Node) -> bool:
    return category_of(node) is Category.POINTWISE


def _common_source(node: fx.Node) -> fx.Node | None:
    """The input of a small tree of pointwise operations that ends at the node: the last value on which the
    whole tree depends."""
    inside: dict[fx.Node, None] = {node: None}
    while len(inside) <= 16:
        before = {n for i in inside for n in i.all_input_nodes if n not in inside and not is_size(n)}
        if len(before) == 1 and len(inside) > 1:
            return before.pop()
        grown = [n for n in before if _is_pointwise(n) and all(u in inside for u in n.users)]
        if not grown:
            return None
        inside.update(dict.fromkeys(grown))
    return None


def _name_norms(graph: ProgramGraph) -> int:
    """Replace w x / sqrt(mean(x^2) + epsilon) by `rms_norm` (Zhang & Sennrich 2019)."""
    meaning = Meaning({}, graph.conditions)
    found = 0
    for node in list(graph.graph.nodes):
        if str(node.target) not in _LAST or not node.users:
            continue
        match = _norm(meaning, node)
        if match is not None:
            source, weight, epsilon = match
            width = weight.meta["val"].shape[0]
            builder = Builder(graph, node)
            made = builder.call(aten.rms_norm.default, source, [width], weight, epsilon)
            node.replace_all_uses_with(made)
            found += 1
    return found


def _norm(meaning: Meaning, node: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """The operand, weight and epsilon, if a node is a root-mean-square norm."""
    operands = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    weights = [n for n in operands if n.op == "placeholder" and n.meta["val"].ndim == 1]
    inside = _normaliser(node)
    if len(weights) != 1 or inside is None:
        return None
    mean = next(n for n in inside if str(n.target) == _MEAN)
    square: Any = mean.args[0]
    if square not in inside or not isinstance(square.args[0], fx.Node):
        return None
    (weight,), source, value = weights, square.args[0], node.meta["val"]
    if source.meta["val"].dtype != value.dtype or weight.meta["val"].dtype != value.dtype:
        return None
    try:
        shape = meaning.shape(node)
        if meaning.shape(source) != shape or meaning.shape(weight) != shape[-1:]:
            return None
        at = tuple(E.var(f"o{d}", extent) for d, extent in enumerate(shape))
        whole = meaning.lift(meaning.read(node, at), lambda r: r.value in inside and r.value is not source)
        for epsilon in {n.value for n in E.walk(whole) if n.op == "const" and n.kind == "float"}:
            wanted = _normalised(meaning, source, weight, at, epsilon)
            if _plain(whole) is _plain(wanted):
                return source, weight, epsilon
    except (Unliftable, TypeError):
        return None
    return None


def _normalised(
    meaning: Meaning, source: fx.Node, weight: fx.Node, at: tuple[Expr, ...], epsilon: float
) -> Expr:
    place = E.var("c", at[-1].args[0])
    square = M.power(meaning.read(source, (*at[:-1], place)), E.const(2))
    mean = M.mul(M.total(place, square), M.recip(at[-1].args[0]))
    by = M.recip(M.function("sqrt", M.add(mean, E.const(epsilon))))
    return M.mul(meaning.read(weight, at[-1:]), meaning.read(source, at), by)


def _plain(formula: Expr) -> Expr:
    return M.canonical_binders(_with_floats(formula))


def _normaliser(node: fx.Node) -> set[fx.Node] | None:
    """The operations of a norm that ends at a node: pointwise ones and one mean, without other uses."""
    inside: set[fx.Node] = {node}
    grown = True
    while grown and len(inside) <= 10:
        before = {n for i in inside for n in i.all_input_nodes if n not in inside and not is_size(n)}
        new = {
            n for n in before
            if (_is_pointwise(n) or str(n.target) == _MEAN) and all(u in inside for u in n.users)
        }  # fmt: skip
        inside |= new
        grown = bool(new)
    means = [n for n in inside if str(n.target) == _MEAN]
    return inside if len(means) == 1 else None
