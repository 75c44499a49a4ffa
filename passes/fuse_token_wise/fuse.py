"""FuseTokenWise: what is computed from each token alone becomes one operation between two attentions.

Matches operations on floating values of 32 or 16 bits on the CPU whose elements follow from elements of the
same token and from weights (`formulas.py`): products with weights, norms, activations, rotary embeddings,
residual sums. A program computes in float32, so values of 16 bits are rounded where they leave it alone.
All of them that need the same attentions, and other operations that are left, become one
`attngraph::token_program` (`program.py`). Right because each formula is that of the operation, and a region
has no way out and in again. Where gradients flow, products stay PyTorch's, and so does what is read at other
indices than its own; the gradients of an operation are one operation again, which computes what lies between
from its operands (`ir/language/token_derivative.py`). Nothing is rewritten where no C compiler is found, as
the operation is only worth it in compiled form.

One step of a loop over tokens (`ir/language/step_program.py`) gives a row its result from its own token, what
it carries, and weights. So a row is to a step what a token is to a decoder's graph, and steps are rewritten
in the same way. Cells of recurrent networks, which PyTorch has as one operation each, are computed as what
they consist of. What is not token-wise in this sense stays as the model has it.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import networkx as nx
import torch
import torch.nn.functional as F
from torch import fx

from attngraph.ir.graph import Input, Level, Output, ProgramGraph, Rate, is_size, op_name, source_of
from attngraph.ir.graph.program_graph import as_module, dependence, keep_sizes
from attngraph.ir.language.derivative import UnsupportedError
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.step_program import parse as parse_steps
from attngraph.ir.language.step_program import written
from attngraph.ir.language.token_derivative import backward
from attngraph.ir.language.token_program import FLOATS, parse
from attngraph.ir.ops import token_program as op
from attngraph.ir.ops.cached_attention import CachePlan
from attngraph.ir.ops.loop import loop
from attngraph.ir.ops.quantised import linear_q
from attngraph.passes.build import Builder
from attngraph.passes.fuse_token_wise.formulas import Formula, Formulas
from attngraph.passes.fuse_token_wise.program import Region
from attngraph.pipeline import Outcome

aten = torch.ops.aten
_SIGNS = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//"}
FEWEST = 3
"""A region of fewer operations, none of them a product, is left as it is. (In a step of a loop none is: the
next steps follow without PyTorch.)"""
WORTH = 2 / 3
"""Of the elements that operations and their gradients read and write one by one, a program may move so many.
(A sum with a layer norm, 0.71, was 2 % slower in BERT; SiLU with a product, 0.57, 2 % faster in Llama.)"""


@dataclasses.dataclass(frozen=True)
class FuseTokenWise:
    """`everything`: also what is too little to gain from it, so that its sums are ours to order."""

    serves: ClassVar[tuple[Level, ...]] = (Level.FUSED, Level.CACHED)
    everything: bool = False
    name: str = "fuse-token-wise"
    requires: Level = Level.FUSED
    yields: Level = Level.FUSED

    def run(self, graph: ProgramGraph) -> Outcome:
        outcome = Outcome()
        if not op.RUNNERS:
            return outcome
        once = graph.stages.get(Rate.PROMPT)
        for part, where in ((once, " of what is computed once for a prompt"), (graph, "")):
            counts = [] if part is None else _made(part, 1 if self.everything else FEWEST, self.everything)
            if counts:
                what = f"{sum(counts)} operation(s){where} that compute each token by itself"
                outcome.notes.append(f"{what} are now {len(counts)}")
        outcome.notes += _fuse_steps(graph)
        return outcome


def _made(graph: ProgramGraph, fewest: int, everything: bool = False) -> list[int]:
    """Fuse all regions of a graph; returns how many operations each of them replaces."""
    facts = Formulas(graph, everything)
    formulas = {n: found for n in graph.graph.nodes if (found := facts.of(n)) is not None}
    replaced: dict[fx.Node, fx.Node] = {}
    made = (_fuse(graph, facts, members, replaced, fewest) for members in _regions(graph, facts, formulas))
    regions = [count for count in made if count]
    if regions or facts.windows:
        # Every operation behind its operands, otherwise in the order that there is.
        order = {node: place for place, node in enumerate(graph.graph.nodes)}
        output = graph.graph.output_node()
        for node in nx.lexicographical_topological_sort(dependence(graph.graph), key=order.__getitem__):
            if node is not output:
                output.prepend(node)
        graph.clean()
    return regions


def _regions(
    graph: ProgramGraph, facts: Formulas, formulas: Mapping[fx.Node, Formula]
) -> list[dict[fx.Node, Formula]]:
    """The nodes with formulas, by how many other operations must have run before them, one after another. So
    no path leaves a region and comes back. (What splits a value runs within the region of its parts.)"""
    depth: dict[fx.Node, int] = {}
    found: dict[tuple[int, Expr], dict[fx.Node, Formula]] = {}
    within = {n for n in graph.graph.nodes if n in formulas or _only_splits(n, formulas)}
    for node in graph.graph.nodes:
        leaves = node.op == "call_function" and not is_size(node) and node not in within
        depth[node] = max((depth[n] + (leaves and n in within) for n in node.all_input_nodes), default=0)
        if node in formulas:
            place = facts.rows.of(node)
            assert place is not None
            found.setdefault((depth[node], place.total), {})[node] = formulas[node]
    return list(found.values())


def _fuse(
    graph: ProgramGraph, facts: Formulas, members: dict[fx.Node, Formula],
    replaced: dict[fx.Node, fx.Node], fewest: int,
) -> int:  # fmt: skip
    """Replace the members of a region by one operation; returns how many there are, or 0. `replaced`: the
    results that stand for values of earlier regions."""
    computing = [n for n, f in members.items() if f.value.op != "read"]
    multiplies = any(n.target is linear_q or facts.meaning.contracts(n) for n in computing)
    if not graph.gradients and len(computing) < fewest and not multiplies:
        return 0
    members = _without_views_of_given(members)
    wanted = [n for n in members if any(u not in members and not _only_splits(u, members) for u in n.users)]
    region = Region(facts, members, wanted)
    program = region.program
    if all(given.token_dim is None for given in program.given):
        return 0  # nothing says how many tokens there are
    if not op.is_supported(program, wanted[0].meta["val"].device.type):
        return 0
    if graph.gradients and not _pays(facts, computing, region):
        return 0
    builder, rows = Builder(graph, max(members)), facts.rows
    given = [rows.flattened(replaced.get(node, node), rows.of(node), builder) for node in region.given]
    made = builder.call(torch.ops.attngraph.token_program.default, given, program.text)
    for place, node in enumerate(wanted):
        result = rows.unflattened(builder.call(operator.getitem, made, place), node, builder)
        result.meta |= {key: value for key, value in node.meta.items() if key != "val"}
        keep_sizes(node, result)
        replaced[node] = result
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in members)
    return len(members)


def _pays(facts: Formulas, members: Sequence[fx.Node], region: Region) -> bool:
    """Whether a program with its gradients reads and writes so much less than the operations do one by one.
    Each of these reads its operands and writes its result; then it reads the gradient and another operand for
    each of its operands, and writes that one's gradient."""
    program = region.program
    wanted = frozenset(place for place, given in enumerate(program.given) if given.dtype in FLOATS)
    try:
        made = backward(program.text, wanted)
    except UnsupportedError:
        return False

    def width(node: fx.Node) -> int:
        place = facts.rows.of(node)
        extents = (n for d, n in enumerate(facts.shape(node) or ()) if place and d not in place.dims)
        return 0 if place is None else math.prod(int(n.value) for n in extents)

    def moved(text: str) -> int:
        parsed = parse(text)
        shapes = [g.shape for g in parsed.given if g.token_dim is not None]
        shapes += {r.number: r.shape for r in parsed.results}.values()
        return sum(math.prod(n or 1 for n in shape) for shape in shapes)

    one_by_one = sum(width(n) + 4 * sum(map(width, n.all_input_nodes)) for n in members)
    whole = (program.given[g].shape for g, of in made.gradients.items() if of.sums)
    summed = sum(math.prod(n or 1 for n in shape) for shape in whole)
    together = moved(program.text) + (moved(made.program) if made.program else 0) + summed
    return together <= WORTH * one_by_one


def _only_splits(node: fx.Node, members: Collection[fx.Node]) -> bool:
    """Whether a node gives several values, and these are used by members alone."""
    return isinstance(node.meta.get("val"), (list, tuple)) and all(user in members for user in node.users)


def _without_views_of_given(members: dict[fx.Node, Formula]) -> dict[fx.Node, Formula]:
    """Without views of values from outside that are used outside: a program would copy them."""
    left = dict(members)
    for node, formula in members.items():
        is_view = formula.value.op == "read" and formula.value.value not in left
        if is_view and any(u not in members for u in node.users):
            del left[node]
    return left


# --- steps of loops ---


def _fuse_steps(graph: ProgramGraph) -> list[str]:
    """Make token programs of the steps of the graph's loops. Returns a note for each loop, which tells what
    PyTorch computes of its steps."""
    notes = []
    for node in graph.graph.find_nodes(op="call_function", target=loop):
        tokens, shared, carried, starts, first, program = node.args
        parts, count = [], 0
        for name, body in parse_steps(program)._asdict().items():
            step = _step(graph, body, {"t": tokens, "s": shared, "c": carried}, first)
            count = len(_made(step, fewest=1))
            step.clean()
            parts += [f"{name}:", *_lines(step)]
        node.args = (tokens, shared, carried, starts, first, "\n".join(parts))
        compiled = (operator.getitem, torch.ops.attngraph.token_program.default)
        others = [n for n in step.graph.nodes if n.op == "call_function" and n.target not in compiled]
        left = ", ".join(sorted({op_name(n) for n in others}))
        where = f" at {source}" if (source := source_of(node)) else ""
        in_pytorch = f" and, in PyTorch, {left}" if left else ""
        notes.append(f"a step of the loop over tokens{where}: {count} token program(s){in_pytorch}")
    return notes


def _step(
    graph: ProgramGraph, body: fx.GraphModule, given: dict[str, Sequence[fx.Node]], first: fx.Node
) -> ProgramGraph:
    """A part of a step as a graph, whose arguments are called as the text calls them."""
    made, rows = fx.Graph(), first.meta["val"].shape[0]
    values: dict[str, fx.Node] = {}
    for kind, nodes in given.items():
        for number, source in enumerate(nodes):
            node = values[f"{kind}{number}"] = made.placeholder(f"{kind}{number}")
            value = source.meta["val"]
            node.meta["val"] = value if kind == "s" else value.new_empty((rows, *value.shape[1:]))
    end = made.output(())
    inputs = tuple(Input("argument", name) for name in values)
    step = ProgramGraph(
        as_module(made), Level.CACHED, inputs, (), {}, {}, False, graph.conditions, state=CachePlan()
    )
    builder, of = Builder(step, end), dict[fx.Node, Any]()

    def count() -> Any:
        return builder.call(aten.sym_size.int, values["c0" if given["c"] else "t0"], 0)

    kinds = dict(zip(body.graph.find_nodes(op="placeholder"), ("rows", *given), strict=True))
    for node in body.graph.nodes:
        if node.op == "output":
            results = fx.map_arg(node.args[0], of.__getitem__)
        elif node.op == "placeholder":
            of[node] = count() if kinds[node] == "rows" and node.users else None
        elif node.args[0] in kinds and kinds[node.args[0]] != "rows":
            of[node] = values[f"{kinds[node.args[0]]}{node.args[1]}"]
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), of.__getitem__)
            of[node] = _computed(builder, node.target, args, kwargs)
    end.args = (tuple(results),)
    step.outputs = tuple(Output("value") for _ in results)
    return step


def _computed(builder: Builder, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call, or what it gives if it gives several values: a cell by its operations, another as it is."""
    if target is operator.getitem and isinstance(args[0], list):
        return args[0][args[1]]
    if target in _CELLS:
        return builder.trace(_CELLS[target], *args)
    return builder.call(target, *args, **kwargs)


def _both(x: Any, h: Any, weights: Sequence[Any]) -> tuple[Any, Any]:
    """What the token's and the carried vector give."""
    own, handed, *biases = (*weights, None, None)[:4]
    return F.linear(x, own, biases[0]), F.linear(h, handed, biases[1])


def _parts(value: Any, count: int) -> list[Any]:
    size = value.shape[-1] // count
    return [value.narrow(-1, size * n, size) for n in range(count)]


def _lstm(x: Any, state: Any, *weights: Any) -> tuple[Any, Any]:
    """Hochreiter & Schmidhuber 1997; gates in the order of PyTorch."""
    h, c = state
    own, handed = _both(x, h, weights)
    enter, forget, new, leave = _parts(own + handed, 4)
    c = forget.sigmoid() * c + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * c.tanh(), c


def _gru(x: Any, h: Any, *weights: Any) -> Any:
    """Cho et al. 2014: h' = n + z (h - n), where n = tanh(x_n + r h_n)."""
    own, handed = (_parts(value, 3) for value in _both(x, h, weights))
    reset, update = ((a + b).sigmoid() for a, b in zip(own[:2], handed[:2], strict=True))
    new = (own[2] + reset * handed[2]).tanh()
    return (h - new) * update + new


def _elman(name: str) -> Callable[..., Any]:
    """Elman 1990: h' = f(W x + b + U h + c)."""

    def cell(x: Any, h: Any, *weights: Any) -> Any:
        own, handed = _both(x, h, weights)
        return getattr(own + handed, name)()

    return cell


_CELLS: dict[Any, Callable[..., Any]] = {
    aten.lstm_cell.default: _lstm, aten.gru_cell.default: _gru,
    aten.rnn_tanh_cell.default: _elman("tanh"), aten.rnn_relu_cell.default: _elman("relu"),
}  # fmt: skip


def _lines(step: ProgramGraph) -> list[str]:
    names: dict[fx.Node, str] = {}
    lines: list[str] = []
    for node in step.graph.nodes:
        if node.op == "placeholder":
            names[node] = node.name
            continue
        args = [written(a, names) for a in node.args]
        if node.op == "output":
            return [*lines, f"    return {', '.join(written(a, names) for a in node.args[0])}"]
        if node.target is operator.getitem:
            names[node] = f"{args[0]}[{args[1]}]"
            continue
        if node.target in _SIGNS:
            names[node] = f"({args[0]} {_SIGNS[node.target]} {args[1]})"
            continue
        args += [f"{name}={written(value, names)}" for name, value in node.kwargs.items()]
        names[node] = f"v{len(lines)}"
        lines.append(f"    v{len(lines)} = {node.target}({', '.join(args)})")
    raise AssertionError("a graph ends with its results")
