"""The invariants of a graph at each level, and the check of them after every pass.

A level includes the invariants of all lower levels. Because `verify` runs after every pass, a pass that
breaks an invariant is named at once, and the graph before it is still available.

Verifying and printing a graph look at every part of it. A pass that found nothing leaves all parts the very
objects that they were (`is_unchanged`), and then both say what they said before.
"""

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.errors import VerificationError
from attngraph.ir.graph.call import infer_once
from attngraph.ir.graph.program_graph import BEFORE, Level, ProgramGraph, Rate
from attngraph.ir.language.score import ProgramError
from attngraph.ir.ops import nodes
from attngraph.ir.ops.kernels import KERNELS

Problems = Iterator[str]
"""Violations of an invariant; each names the node and the rule."""


def _pure(graph: ProgramGraph) -> Problems:
    """Every value is an input or the result of an op without side effects, and has the inferred shape."""
    graph.graph.lint()
    if len(graph.placeholders()) != len(graph.inputs):
        yield f"{len(graph.placeholders())} placeholders for {len(graph.inputs)} inputs"
    results: Any = graph.graph.output_node().args[0]
    if len(results) != len(graph.outputs):
        yield f"{len(results)} results for {len(graph.outputs)} outputs"
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            yield f"{node}: a graph holds no attributes, every tensor is an input"
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            yield f"{node}: {node.target} writes to an operand"
        if isinstance(node.meta.get("val"), Tensor) and not _is_inferred(node):
            _check_shape(node)
            _note_inferred(node)  # so that only nodes that a pass changes are inferred again


def _staged(graph: ProgramGraph) -> Problems:
    """What graph and stage take from each other is a result of the other, and both are at one level."""
    for rate in Rate:
        stage = graph.stages.get(rate)
        first, then = (stage, graph) if rate in BEFORE else (graph, stage)
        given = set() if first is None else {o.name for o in first.outputs}
        taken = () if then is None else then.inputs
        for missing in {i.name for i in taken if i.kind == rate.value} - given:
            source = "no stage of rate" if rate in BEFORE else "no result for the stage"
            yield f"{missing}: {source} {rate.value} gives it"
        if stage is not None:
            if stage.level is not graph.level:
                yield f"the stage {rate.value} is at level {stage.level.name}, not {graph.level.name}"
            yield from (f"{problem} (in the stage {rate.value})" for problem in problems(stage))


def _without_assertions(graph: ProgramGraph) -> Problems:
    """No op only asserts a tensor's metadata."""
    for node in graph.graph.nodes:
        if str(node.target).startswith("aten._assert_tensor_metadata"):
            yield f"{node}: {node.target} may not occur at level {graph.level.name}"


def _with_programs(graph: ProgramGraph) -> Problems:
    """The program of every attention parses (shape inference checks that the operands fit it)."""
    for node in graph.graph.nodes:
        try:
            nodes.view(node)
        except ProgramError as problem:
            yield f"{node}: {problem}"


def _keeping(graph: ProgramGraph) -> Problems:
    """What the cache plan keeps is written by a result of its name, and pages that are read are kept."""
    if graph.state is None:
        return
    stores = {store.name for store in graph.state.stores}
    written = {o.name for o in graph.outputs if o.kind == "pages"}
    for name in stores ^ written:
        yield f"{name}: kept by the plan or written by the graph, not both"
    carried = {value.name for value in graph.state.carried}
    for name in carried ^ {o.name for o in graph.outputs if o.kind == "carried"}:
        yield f"{name}: carried by the plan or computed by the graph, not both"
    for name in {i.name for i in graph.inputs if i.kind == "pages"} - stores:
        yield f"{name}: pages of nothing that is kept"


def _with_kernels(graph: ProgramGraph) -> Problems:
    """Every attention names a registered kernel."""
    for node in graph.graph.nodes:
        found = nodes.view(node)
        if isinstance(found, nodes.Attention) and found.kernel not in KERNELS:
            named = f"no kernel is called {found.kernel!r}"
            yield f"{node}: {named if found.kernel else 'no kernel was chosen for it'}"


PROMISES: dict[Level, tuple[Callable[[ProgramGraph], Problems], ...]] = {
    Level.CAPTURED: (_pure, _staged), Level.CANONICAL: (_without_assertions,),
    Level.FUSED: (_with_programs,), Level.CACHED: (_keeping,), Level.LOWERED: (_with_kernels,),
}  # fmt: skip
"""The invariants that each level adds to those below it; each function's docstring states one."""


def problems(graph: ProgramGraph) -> Problems:
    """Every violation of the invariants of the graph's level."""
    promised = itertools.chain.from_iterable(PROMISES[level] for level in Level if level <= graph.level)
    return itertools.chain.from_iterable(promise(graph) for promise in promised)


def verify(graph: ProgramGraph) -> None:
    """Check the invariants of the graph's level; a VerificationError names the node and the rule that it
    violates."""
    for problem in problems(graph):
        raise VerificationError(problem)


def accept(graph: fx.Graph) -> None:
    """Mark the values of a fresh trace as inferred, so that `verify` infers only what changes afterwards."""
    for node in graph.nodes:
        if node.op == "call_function":
            _note_inferred(node)


def _note_inferred(node: fx.Node) -> None:
    values = [n.meta.get("val") for n in node.all_input_nodes]
    node.meta["inferred"] = node.target, node.args, node.kwargs, values


def _is_inferred(node: fx.Node) -> bool:
    """Whether the op, its operands and their values are unchanged since the value was inferred."""
    if "inferred" not in node.meta:
        return False
    target, args, kwargs, values = node.meta["inferred"]
    if target is not node.target:
        return False
    if args is not node.args or kwargs is not node.kwargs:  # arguments are never changed, only replaced
        if (str(args), str(kwargs)) != (str(node.args), str(node.kwargs)):
            return False
        node.meta["inferred"] = target, node.args, node.kwargs, values
    now = [n.meta.get("val") for n in node.all_input_nodes]
    return len(values) == len(now) and all(a is b for a, b in zip(values, now, strict=True))


def _check_shape(node: fx.Node) -> None:
    recorded = node.meta["val"]
    try:
        found = infer_once(node.target, node.args, node.kwargs, getattr(recorded, "fake_mode", None))
    except (RuntimeError, ValueError, TypeError) as problem:
        raise VerificationError(
            f"{node}: {node.target} cannot be applied to its operands: {problem}"
        ) from problem
    if found.dtype != recorded.dtype or len(found.shape) != len(recorded.shape):
        raise VerificationError(
            f"{node}: recorded as {recorded.dtype}{list(recorded.shape)}, "
            f"but {node.target} gives {found.dtype}{list(found.shape)}"
        )
    for mine, theirs in zip(recorded.shape, found.shape, strict=True):
        if isinstance(mine, int) and isinstance(theirs, int) and mine != theirs:
            raise VerificationError(
                f"{node}: recorded as {list(recorded.shape)}, but {node.target} gives {list(found.shape)}"
            )


def seen(graph: ProgramGraph) -> list[Any]:
    """All objects that the graph's text and its promises follow from."""
    found = [graph.level, graph.inputs, graph.outputs, graph.conditions, graph.gradients, graph.state]
    for table in (graph.constants, graph.values, graph.hints):
        found += [*table, *table.values()]
    found += [graph.ranks, *sorted(graph.assumed)]
    for node in graph.graph.nodes:
        found += [node, node.target, node.args, node.kwargs, *node.meta.values()]
    for rate, stage in graph.stages.items():
        found += [rate, *seen(stage)]
    return found


def is_unchanged(before: list[Any], graph: ProgramGraph) -> bool:
    """Whether it still consists of the same objects."""
    now = seen(graph)
    return len(now) == len(before) and all(map(operator.is_, before, now))
