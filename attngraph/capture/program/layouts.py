"""Writes into a graph where it matters how a value lies in memory, and which value it is.

What a pass puts in the place of a value has the value's numbers, and may lie in memory in another way, or
stand beside it. That shows in three places, where `attngraph::laid_out` holds what the trace had:

- an operation that reads by memory (`as_strided`, an operation that takes views inside);
- results that share memory, to which the caller may write;
- where gradients are recorded, a result that others follow from, whose gradient the caller may ask for.

Scores and weights of an attention must be looked through: there only what leads to an operation that reads
memory sees the held value, and such results wait (`passes/look_later.py`). What a graph cannot share is
refused: a write is a result of it. Used by `trace.py`.
"""

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from attngraph.capture.lines import refused
from attngraph.capture.program.exported import memory_order
from attngraph.ir.graph import ProgramGraph, computed_from, infer_once, may_alias, op_name, source_of
from attngraph.ir.graph.program_graph import RESULTS, makes_a_size, measured_sizes, replace_in_other_users
from attngraph.ir.walk import computed, operands_first
from attngraph.meaning.algebra.sizes import evaluate_size, size_expression
from attngraph.meaning.rule import ELEMENTWISE, Unliftable, category_of

aten = torch.ops.aten
_BY_ITSELF = frozenset({aten.linear.default, aten.addmm.default, aten.embedding.default})
"""Ops whose result lies in memory in one way, whatever their operands do."""
_MEASURED = (8, 5, 3, 2)
"""Numbers that stand for a size that only data know, until one fits the other sizes."""
_EXPONENTIALS = frozenset({"softmax", "_softmax", "_safe_softmax", "exp", "logsumexp", "log_softmax"})


def hold_layouts(graph: ProgramGraph, memory: Sequence[int]) -> None:
    """Write into a captured graph where layouts matter.

    Args:
        memory: for the arguments of the call, the model's own tensors, and the results of the trace, the
            number of the first that shares memory with it.

    Raises:
        CaptureError: a result shares memory that a graph of the model cannot share, or an operation reads the
            memory of a value between its elements.
    """
    nodes: Any = graph.graph.output_node().args[0]
    results = [n for n, o in zip(nodes, graph.outputs, strict=True) if o.kind in (*RESULTS, "check")]
    _require_sharing(results, memory)
    held: dict[fx.Node, tuple[int, ...]] = {}
    scores = _of_scores(graph.graph)
    for node in graph.graph.nodes:
        for operand in node.all_input_nodes if node.op == "call_function" else ():
            root = _allocated(operand)
            if root not in held and _may_move(root, scores) and _reads_memory(node, operand):
                held[root] = _dense(root, node, graph.hints)
    for root, count in Counter(_allocated(n) for n in dict.fromkeys(results)).items():
        if count > 1 and _may_move(root, scores) and root not in scores:
            held.setdefault(root, memory_order(root.meta["val"]))
    asked = dict.fromkeys(results if graph.gradients else ())
    above = computed_from(n for result in asked for n in result.all_input_nodes)
    for result in asked:
        value = result.meta["val"]  # of interest are the floating ones from which others follow
        floating = isinstance(value, Tensor) and value.is_floating_point()
        if result in above and result.op == "call_function" and floating and result not in scores:
            held.setdefault(result, memory_order(value))
    for node, order in held.items():
        with graph.graph.inserting_after(node):
            made = graph.graph.call_function(torch.ops.attngraph.laid_out.default, (node, list(order)))
        made.meta = {key: value for key, value in node.meta.items() if key != "inferred"}
        if node in scores:
            leading = [user for user in node.users if _leads_to_memory(node, user)]
            node.replace_all_uses_with(made, leading.__contains__)
        else:
            replace_in_other_users(node, made)
    graph.module.recompile()


def let_go(graph: ProgramGraph) -> None:
    """Hold layouts of a captured graph only where operations read by memory. Ranks put results together from
    parts, so nothing follows from these."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.attngraph.laid_out.default):
        if not any(_reads_memory(user, node) for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.module.recompile()


def _allocated(node: fx.Node) -> fx.Node:
    """The node whose memory a value lies in; one of several results of an op counts as a node."""
    while True:
        view: Any = node.args[0] if node.target is operator.getitem else node
        if not isinstance(view, fx.Node) or not may_alias(view.target) or not view.args:
            return node
        source = view.args[0]
        if not isinstance(source, fx.Node):
            return node
        node = source


def _require_sharing(results: Sequence[fx.Node], memory: Sequence[int]) -> None:
    roots = [_allocated(result) for result in results]
    before = len(memory) - len(results)
    for place, root in enumerate(roots):
        first = memory[before + place]
        if first < before:
            shares, what = root.op == "placeholder", "an argument, or a tensor of the model,"
        else:
            shares, what = root is roots[first - before], "another result"
        if not shares:
            reason = f"forward() returns {what} that it writes to, or a view of it"
            then = "In a graph what is written is a new tensor."
            raise refused(reason, source_of(results[place]), "return a copy (.clone())", then=then)


def _may_move(root: fx.Node, scores: Set[fx.Node]) -> bool:
    """Whether a pass may give what stands for a value another layout."""
    value = root.meta.get("val")
    if root.op != "call_function" or not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return not (root.target in _BY_ITSELF and scores.isdisjoint(root.all_input_nodes))


def _leads_to_memory(node: fx.Node, user: fx.Node) -> bool:
    """Whether a user of a value reads its memory, or gives a view to one that does."""
    if _reads_memory(user, node):
        return True
    views = user.target is operator.getitem or (may_alias(user.target) and user.args[:1] == (node,))
    return views and any(_leads_to_memory(user, each) for each in user.users)


def _of_scores(graph: fx.Graph) -> set[fx.Node]:
    """The values that may be scores or weights: element by element exponentials are computed from them, or
    they from these."""
    nodes = list(graph.nodes)
    apart = {n for n in nodes if n.op == "call_function" and category_of(n) in ELEMENTWISE}
    exponentials = {n for n in nodes if op_name(n) in _EXPONENTIALS}
    weights, scores = set(exponentials), set[fx.Node]()
    for node in nodes:
        if node in apart and not weights.isdisjoint(node.all_input_nodes):
            weights.add(node)
    for node in reversed(nodes):
        if any(user in exponentials or (user in apart and user in scores) for user in node.users):
            scores.add(node)
    return weights | scores


def _reads_memory(node: fx.Node, operand: fx.Node) -> bool:
    """Whether an op depends on how an operand lies in memory: it takes strides, or does not accept another
    layout. (Ops that have element rules do.)"""
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.target is torch.ops.attngraph.laid_out.default:
        return False
    if any(argument.name == "storage_offset" for argument in schema.arguments):
        return True
    rank = operand.meta["val"].ndim
    reverse = list(range(rank))[::-1]
    by_tokens = [0, 2, 1, *range(3, rank)] if rank > 2 else reverse
    return category_of(node) is None and not all(_accepts(node, operand, o) for o in (reverse, by_tokens))


def _accepts(node: fx.Node, operand: fx.Node, order: list[int]) -> bool:
    """Whether an op can be applied to an operand that lies in memory in another order. (Where sizes follow
    from data nobody can tell.)"""
    if any(map(free_unbacked_symbols, operand.meta["val"].shape)):
        return True
    mode = operand.meta["val"].fake_mode
    turned = infer_once(torch.ops.attngraph.laid_out.default, (operand, order), {}, mode)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: turned if n is operand else n.meta["val"])
    try:
        infer_once(node.target, args, kwargs, mode)
    except (RuntimeError, ValueError):
        return False
    return True


def _dense(root: fx.Node, reader: fx.Node, hints: Mapping[str, int]) -> tuple[int, ...]:
    """The order of a value's dimensions in memory, for its reader. Raises CaptureError if its elements
    do not fill its memory, or only data tell how they lie there."""
    value = _in_eager(root, hints)
    order = () if value is None else memory_order(value)
    if not order and root.meta["val"].ndim:
        what = "in which there are gaps between a tensor's elements"
        what = "where a tensor's elements lie as only data tell" if value is None else what
        raise refused(f"{op_name(reader)} reads memory {what}", source_of(reader))
    return order


def _in_eager(root: fx.Node, hints: Mapping[str, int]) -> Tensor | None:
    """A tensor that lies in memory as the value does in eager mode. For some operations torch tells a trace
    other strides (of `roll`, say), so those that the value is computed by run, on zeros. Where they cannot,
    the trace is believed. None where sizes follow from data, and no numbers for these show an order."""

    def operands(node: fx.Node) -> list[fx.Node]:
        runs = node.op == "call_function" and node.target not in _BY_ITSELF and not makes_a_size(node)
        return node.all_input_nodes if runs else []

    order = operands_first([root], operands)
    value: Tensor = root.meta["val"]
    measured = {str(size) for node in order for size in measured_sizes(node)}
    for number in _MEASURED if measured else (0,):
        found = _run(order, operands, {**hints, **dict.fromkeys(measured, number)})
        if not measured:
            return value if found is None else found
        # Dimensions of one element, or none, have no place in an order.
        open_dims = [d for d, n in enumerate(value.shape) if not isinstance(n, int)]
        if found is not None and all(found.shape[d] > 1 for d in open_dims):
            return found
    return None


def _run(
    order: Sequence[fx.Node], operands: Callable[[fx.Node], list[fx.Node]], sizes: Mapping[str, int]
) -> Tensor | None:
    """What the last of these nodes gives, on zeros of these sizes; None if it cannot be computed."""

    def run(node: fx.Node, found: Mapping[fx.Node, Any]) -> Any:
        if not operands(node):
            return _zeros(node.meta["val"], sizes)
        args, kwargs = fx.map_arg((node.args, node.kwargs), found.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            (result,) = computed(order, operands, run, order[-1:])
    except (RuntimeError, ValueError, LookupError, TypeError, NotImplementedError, Unliftable):
        return None
    return result  # type: ignore[no-any-return]


def _zeros(value: Any, sizes: Mapping[str, int]) -> Any:
    """What a trace has, with the sizes of its call, and these where it has none."""
    if isinstance(value, (list, tuple)):
        return [_zeros(one, sizes) for one in value]
    if isinstance(value, Tensor):
        shape, strides = ([_zeros(n, sizes) for n in ns] for ns in (value.shape, value.stride()))
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).zero_()
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    hint = value.node.hint
    return evaluate_size(size_expression(value), sizes) if hint is None else hint
