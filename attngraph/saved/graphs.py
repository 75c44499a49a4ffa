"""A lowered graph as text and JSON: the text that dumps have, and beside it what is not in the text.

Beside it stand the full names of inputs and results, tensors that the model's code made, the conditions on
sizes, where sizes are taken from, and the plan of the cache. Before a graph is given out as files it is read
back and compared with the original node by node; what is not the same is not saved.
"""

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.errors import SavedError, TextError, told_as
from attngraph.ir.graph import Input, Output, ProgramGraph, Rate, arguments, is_size, read_graph
from attngraph.ir.graph.formula import size_of, size_text
from attngraph.ir.graph.literals import decode, encode, split
from attngraph.ir.graph.printer import format_named, is_printed, parts_of
from attngraph.ir.ops.cached_attention import CachePlan
from attngraph.ir.records import made, plain
from attngraph.report.entries import AttentionEntry

Names = dict[str, str]
"""Names of sizes in a file by those in a graph, or the other way round."""
_KNOWN = {"aten", "prims", "prim", "attngraph", "_operator", "math", "torch"}
"""Whose operations the versions of torch and of attngraph decide. What another library's operation gives a
trace, its shape say, may change with that library."""


def write(graph: ProgramGraph, live: Mapping[str, str]) -> tuple[str, dict[str, Any], Names]:
    """A lowered graph as text, what is not in the text, and the names of its sizes in both. `live`: constants
    that are tensors of the user's own, by their path from the model; their contents are not written.
    SavedError where the graph cannot be read back as the same."""
    nodes = [node for part in parts_of(graph).values() for node in part.graph.nodes]
    calls = [n.target for n in nodes if n.op == "call_function"]
    spaces = (getattr(c, "namespace", None) or str(getattr(c, "__module__", "")).split(".")[0] for c in calls)
    foreign = set(spaces) - _KNOWN
    if foreign:
        raise SavedError(
            f"its graph has operations of {', '.join(sorted(foreign))}, whose version is not known"
        )
    head, text, names = format_named(graph)
    text = f"{head}\n{text}\n"
    parts = {title: _beside(part, names) for title, part in parts_of(graph).items()}
    named = [given for part in parts.values() for given in (*part["inputs"], *part["assumed"])]
    needed = {name for kind, name in named if kind == "constant"}
    beside = {
        "parts": parts,
        "conditions": [size_text(c, names) for c in graph.conditions],
        "hints": {names.get(n, n): hint for n, hint in graph.hints.items()},
        "constants": {n: encode(t) for n, t in graph.constants.items() if n in needed and n not in live},
        "live": {n: path for n, path in live.items() if n in needed},
        "state": plain(_with_sizes(graph.state, names)),
    }
    kinds = TextError, ValueError, KeyError, IndexError, TypeError
    with told_as(SavedError, *kinds, before="its graph cannot be read back: "):
        again, back = read(text, beside, {n: graph.constants[n] for n in beside["live"]})
    difference = _difference(graph, again, names, back)
    if difference:
        raise SavedError(f"its graph is not the same when it is read back: {difference}")
    return text, beside, names


def read(text: str, beside: Mapping[str, Any], live: Mapping[str, Tensor]) -> tuple[ProgramGraph, Names]:
    """The graph that `write` wrote, and the names of its sizes by those in the file. `live`: the user's own
    tensors among its constants."""
    places = {
        title: {n: tuple(p) for n, p in part["sizes"].items()} for title, part in beside["parts"].items()
    }
    graph = read_graph(text, "the graph", places)  # type: ignore[arg-type]
    constants = {n: decode(t) for n, t in beside["constants"].items()} | dict(live)
    head = next((line for line in text.splitlines()[:4] if line.startswith("sizes ")), "sizes ")
    sizes = [part.partition(" = ")[0] for part in split(head.removeprefix("sizes "))]
    names = dict(zip(sizes, graph.hints, strict=True))
    conditions = tuple(size_of(c, names) for c in beside["conditions"])
    hints = {names.get(n, n): hint for n, hint in beside["hints"].items()}
    for title, part in parts_of(graph).items():
        _complete(part, beside["parts"][title])
        part.constants, part.conditions, part.hints = constants, conditions, dict(hints)
    weights, prompt = (graph.stages.get(rate) for rate in (Rate.WEIGHTS, Rate.PROMPT))
    if weights and prompt and any(i.kind == Rate.WEIGHTS.value for i in prompt.inputs):
        prompt.stages = {Rate.WEIGHTS: weights}  # a stage has those whose results it takes, as the graph has
    if beside["state"] is not None:
        graph.state = _with_sizes(made(CachePlan, beside["state"]), names)
    return graph, names


def _with_sizes(plan: CachePlan | None, names: Names) -> CachePlan | None:
    """The plan with the other names of the sizes that it names."""
    if plan is None:
        return None
    length, tokens = (names.get(name, name) for name in (plan.length, plan.step_tokens))
    return dataclasses.replace(plan, length=length, step_tokens=tokens)


def give_entries(graph: ProgramGraph, entries: tuple[AttentionEntry, ...]) -> None:
    """Give the nodes that have an entry in the report, in its order, their entries back."""
    nodes = [n for part in (*graph.stages.values(), graph) for n in part.graph.nodes if "attention" in n.meta]
    for node, entry in zip(nodes, entries, strict=True):
        node.meta["attention"] = entry


def _beside(part: ProgramGraph, names: Mapping[str, str]) -> dict[str, Any]:
    """What the text of one part does not have."""
    kept = [(node, given) for node, given in part.given().items() if is_printed(node, given)]
    return {
        "inputs": [dataclasses.astuple(given) for _, given in kept],
        "outputs": [dataclasses.astuple(output) for output in part.outputs],
        "assumed": [dataclasses.astuple(given) for given in _assumed(part)],
        "sizes": _sizes(part, {node: place for place, (node, _) in enumerate(kept)}, names),
        "attention": [place for place, node in enumerate(_calls(part)) if "attention" in node.meta],
    }


def _sizes(
    part: ProgramGraph, places: Mapping[fx.Node, int], names: Mapping[str, str]
) -> dict[str, tuple[int, int]]:
    """Where each size is taken from; SavedError where a decoder's graph takes a size from several places,
    which have it for different reasons: its tokens are those of several sequences, one after another."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    kinds = {node: given.kind for node, given in part.given().items()}
    of_step = part.state is not None or not set(kinds.values()).isdisjoint(("rows", "pages", "carried"))
    for node in part.graph.nodes:
        if node.target is not torch.ops.aten.sym_size.int:
            continue
        source, axis = node.args
        size = node.meta["val"]
        name = str(size.node.expr) if isinstance(size, torch.SymInt) else ""
        if source not in places or (not name.isidentifier() and of_step):
            if of_step:
                raise SavedError("a size of it is measured while it runs")
            continue
        if name.isidentifier():
            group = "tokens" if kinds[source] in ("argument", "rows") else kinds[source]
            found.setdefault(names.get(name, name), {}).setdefault(group, (places[source], int(axis)))
    if of_step and any(len(groups) > 1 for groups in found.values()):
        raise SavedError("a size of it is one of the tokens and of something else")
    return {name: next(iter(groups.values())) for name, groups in found.items()}


def _complete(part: ProgramGraph, about: Mapping[str, Any]) -> None:
    """Give a part what its text does not have."""
    if len(about["inputs"]) != len(part.inputs) or len(about["outputs"]) != len(part.outputs):
        raise ValueError("other inputs or results than in the text")
    part.inputs = made(tuple[Input, ...], about["inputs"], "inputs")
    part.outputs = made(tuple[Output, ...], about["outputs"], "results")
    _assume(part, made(tuple[Input, ...], about["assumed"], "what is assumed"))
    calls = _calls(part)
    for place in about["attention"]:
        calls[place].meta["attention"] = None


def _assumed(part: ProgramGraph) -> list[Input]:
    """The inputs whose contents a part relies on. It may need no more of them than was read."""
    return [given for node, given in part.given().items() if node.name in part.assumed]


def _assume(part: ProgramGraph, assumed: Sequence[Input]) -> None:
    """Let a part rely on the contents of these inputs, which it gets if it has them not."""
    for given in (g for g in assumed if g not in part.inputs):
        part.add_input(given, None)
    part.assumed = {node.name for node, given in part.given().items() if given in assumed}
    part.module.recompile()


def _calls(part: ProgramGraph) -> list[fx.Node]:
    """The calls of a part, without sizes and what is picked from several results."""
    calls = (n for n in part.graph.nodes if n.op == "call_function" and not is_size(n))
    return [n for n in calls if n.target is not operator.getitem]


# --- the comparison ---


def _difference(graph: ProgramGraph, again: ProgramGraph, names: Names, back: Names) -> str:
    """The first place where two graphs are not the same; "" if there is none."""
    first, second = parts_of(graph), parts_of(again)
    if first.keys() != second.keys():
        return "its stages"
    if format_named(graph)[:2] != format_named(again)[:2]:
        return "its text"
    forth = {new: old for old, new in back.items()}
    if plain(_with_sizes(graph.state, names)) != plain(_with_sizes(again.state, forth)):
        return "the plan of its cache"
    for title, part in first.items():
        ours, theirs = list(_lines(part)), list(_lines(second[title]))
        if ours != theirs:
            place = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), -1)
            return f"value {place} of {title}"
        for what, fact in _facts(part).items():
            if fact != _facts(second[title])[what]:
                return f"{what} of {title}"
    return ""


def _facts(part: ProgramGraph) -> dict[str, Any]:
    """What has to be the same besides the calls."""
    kinds = {given.kind for given in part.inputs}
    printed = [given for node, given in part.given().items() if is_printed(node, given)]
    return {
        "inputs": (printed, set(_assumed(part))), "results": (part.outputs, part.gradients),
        "stages": {rate for rate in part.stages if rate.value in kinds},
    }  # fmt: skip


def _lines(part: ProgramGraph) -> Iterator[tuple[Any, ...]]:
    """Every call with its operands, by number. Sizes are compared by the formulas in the text."""
    numbers: dict[fx.Node, Any] = {}
    for place, node in enumerate(n for n, given in part.given().items() if is_printed(n, given)):
        numbers[node] = ("input", place)
    count = 0

    def named(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return numbers.get(value, "size")
        if isinstance(value, (list, tuple)):
            return tuple(named(v) for v in value)
        if isinstance(value, dict):
            return tuple(sorted((k, named(v)) for k, v in value.items() if v is not None))
        if isinstance(value, slice):
            return ("slice", named(value.start), named(value.stop), named(value.step))
        return (type(value).__name__, repr(value))

    for node in part.graph.nodes:
        if node.op == "output":
            yield ("output", named(node.args[0]))
        if node.op != "call_function" or is_size(node):
            continue
        if node.target is operator.getitem:
            numbers[node] = (named(node.args[0]), node.args[1])
            continue
        numbers[node] = count
        count += 1
        operands = arguments(node) or (node.args, dict(node.kwargs))
        yield (str(node.target), named(operands), "attention" in node.meta)


def contents(graph: ProgramGraph) -> Iterator[Input]:
    """The inputs whose contents the graph relies on."""
    for part in parts_of(graph).values():
        yield from _assumed(part)
