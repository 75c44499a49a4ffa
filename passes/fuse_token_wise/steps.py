"""One step of a loop over tokens, whose rows are each computed by themselves, as token programs.

A step (`ir/language/step_program.py`) gives a row its result from its own token, what it carries, and
weights. So a row is to a step what a token is to a decoder's graph, and the same pass makes operations of
ours of it. Cells of recurrent networks, which PyTorch has as one operation each, are computed as what they
consist of. What is not token-wise in this sense stays as the model has it. The text of the step changes, and
nothing else of the graph.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from attngraph.ir.graph.program_graph import Input, Level, Output, ProgramGraph, as_module, op_name
from attngraph.ir.graph.source import source_of
from attngraph.ir.language.step_program import parse, written
from attngraph.ir.ops.cached_attention import CachePlan
from attngraph.ir.ops.loop import loop
from attngraph.passes.build import Builder

aten = torch.ops.aten
_SIGNS = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//"}


def fuse_steps(graph: ProgramGraph, fuse: Callable[[ProgramGraph], int]) -> list[str]:
    """Make token programs of the steps of the graph's loops. `fuse`: does it in a graph, and returns how many
    it made. Returns a note for each loop, which tells what PyTorch computes of its steps."""
    notes = []
    for node in graph.graph.find_nodes(op="call_function", target=loop):
        tokens, shared, carried, starts, first, program = node.args
        parts, count = [], 0
        for name, body in parse(program)._asdict().items():
            step = _graph(graph, body, {"t": tokens, "s": shared, "c": carried}, first)
            count = fuse(step)
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


def _graph(
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
    """The text of a part."""
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
