"""Results for which the weights of a fused attention would be computed wait until somebody looks at them.

A call whose weights are returned (`return out, p`), or kept by its model (`self.attention_weights = p`),
needs them in memory only if somebody looks at that result. What such results need, and nothing else in the
call does, moves to the stage `Rate.LOOK`. It starts from values that the graph computes anyway (queries and
keys), which become results of the graph. A value that somebody may write to before the look is copied: what
shares its memory with an input or with another result.

A result waits only beside one that is computed in the call from the attention's output: else all of the call
would be computed when it is looked at, and nothing saved. Random numbers must be those of the call. A dropout
that was fused has them by the seed of its attention (`ir/ops/others.py`); what any other random operation
draws is computed in the call, and what draws from the weights themselves computes them there.
Likewise a size that only data know is measured in the call.

In the model what the attention gives follows from its weights, and gradients flow from it to who holds them.
The fused value does not, so where gradients may flow it is tied to the results that it would follow from
(`ir/ops/others.py`): the stage has it too, computed from them as the model does. Used by `fuse_attention.py`.
"""

import dataclasses
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import networkx as nx
import torch
from torch import fx

from attngraph.ir.walk import operands_first
from attngraph.meaning.algebra.sizes import size_expression
from attngraph.passes.build import Builder, NoSize

from attngraph.ir.graph import (  # isort: skip
    RESULTS, Input, Output, ProgramGraph, Rate, argument, as_module, computed_from, is_random, is_size,
    makes_a_size, memory_of, part_of, replace_in_other_users,
)  # fmt: skip

aten = torch.ops.aten

Weights = Mapping[fx.Node, str]
"""The "weights" and "scores" of fused attentions."""
Kinds = Collection[str]
"""Kinds of results (`Output.kind`)."""
Seeds = Mapping[fx.Node, fx.Node]
"""The seed of each dropout that is part of a fused attention."""


def can_wait(
    graph: ProgramGraph, kinds: Kinds, node: fx.Node, way: Iterable[fx.Node],
    dropouts: Collection[fx.Node],
) -> bool:  # fmt: skip
    """Whether a node that is computed from weights in this way is a result that waits, if results of these
    kinds may, once these dropouts are part of an attention."""
    found = {output.kind for result, output in results_of(graph) if result is node}
    return found <= set(kinds) and all(n in dropouts or not _draws_or_measures(n) for n in way)


def results_of(graph: ProgramGraph) -> list[tuple[fx.Node, Output]]:
    """The results of a graph, and what each of them is."""
    return list(zip(graph.results(), graph.outputs, strict=True))


def take_results(
    graph: ProgramGraph, kinds: Kinds, weights: Weights, seeds: Seeds, fused: Mapping[fx.Node, fx.Node]
) -> list[str]:
    """Move results of these kinds that need any of these weights and scores to their stage, where nothing
    else needs them; returns their names. `fused`: the values of the model that fused ones stand for."""
    results = graph.results()
    waiting, needed = _waiting(graph, kinds, weights, seeds)
    if not waiting:
        return []
    shown = [results[n] for n in sorted(waiting)]
    ties = [old for old in fused if ancestors_among(shown, old)] if graph.gradients else []
    own = {n for n in computed_from((*shown, *ties)) - needed if n.op == "call_function"}
    # One of several results of a node that is computed in the call is a value of the call.
    own -= {n for n in own if n.target is operator.getitem and n.args[0] not in own}
    stage = _Stage(graph, own, weights, seeds)
    of_call = [n for n, o in enumerate(graph.outputs) if o.kind in RESULTS]
    looks = dict(zip(shown, _together(shown, own, weights, ties), strict=True))
    later = [
        dataclasses.replace(graph.outputs[n], place=of_call.index(n), look=looks[results[n]])
        for n in sorted(waiting)
    ]
    tied = [
        Output("tied", str(number), look=looks[ancestors_among(shown, old)[0]])
        for number, old in enumerate(ties)
    ]
    graph.stages[Rate.LOOK] = stage.finish([*shown, *ties], [*later, *tied])
    staying = [n for n in range(len(results)) if n not in waiting]
    kept = _kept(graph, stage.taken, [results[n] for n in staying])
    looked_at = (Output(Rate.LOOK.value, name) for name in stage.taken)
    graph.outputs = (*(graph.outputs[n] for n in staying), *looked_at)
    graph.graph.output_node().args = ((*(results[n] for n in staying), *kept.values()),)
    for number, old in enumerate(ties):  # what a fused value goes to takes it tied
        given = [kept[name] for name in tied_inputs(graph.stages[Rate.LOOK], number)]
        builder = Builder(graph, fused[old].next)
        made = builder.call(torch.ops.attngraph.tied.default, fused[old], given, number)
        replace_in_other_users(fused[old], made)
    return sorted({o.name.removeprefix("model.") or f"result {o.place}" for o in later})


def ancestors_among(results: Iterable[fx.Node], value: fx.Node) -> list[fx.Node]:
    """The floating results that a value is computed from."""
    above = computed_from(value.all_input_nodes)
    return [n for n in dict.fromkeys(results) if n in above and n.meta["val"].is_floating_point()]


def tied_inputs(stage: ProgramGraph, number: int) -> list[str]:
    """What the tied value of this number, and the results that it follows from, need of the call."""
    value = next(node for node, o in results_of(stage) if (o.kind, o.name) == ("tied", str(number)))
    names = (i.name for i in part_of(stage, {"": value}).inputs if i.kind == Rate.LOOK.value)
    return sorted(names, key=int)


def _waiting(
    graph: ProgramGraph, kinds: Kinds, weights: Weights, seeds: Seeds
) -> tuple[set[int], set[fx.Node]]:
    """The results that wait, by number: those that need weights which nothing else needs; and all that is
    computed in the call. What cannot be computed later is, with all that it needs."""
    results = graph.results()

    def runs_later(node: fx.Node) -> bool:
        if node.target is aten.native_dropout.default:
            return node in seeds and all(u.target is operator.getitem and u.args[1] == 0 for u in node.users)
        return node in seeds or node.op != "call_function" or not _draws_or_measures(node)

    waiting = {n for n, o in enumerate(graph.outputs) if o.kind in kinds}
    while True:
        needed = computed_from(node for n, node in enumerate(results) if n not in waiting)
        later = computed_from(results[n] for n in waiting) - needed
        needed |= computed_from(node for node in later if not runs_later(node))
        own = {n: computed_from([results[n]]) - needed for n in waiting}
        now = {n for n in waiting if own[n].isdisjoint(weights.keys())}
        if not now:
            return waiting, needed
        waiting -= now


def _together(
    results: Sequence[fx.Node], own: Collection[fx.Node], weights: Weights, ties: Iterable[fx.Node]
) -> list[int]:
    """The number of each result's look: those of the same weights, or of one tied value, are together."""
    view = nx.Graph()
    for node in results:
        view.add_edges_from((node, n) for n in computed_from([node]) if n in own and n in weights)
    for value in ties:
        view.add_edges_from((node, value) for node in ancestors_among(results, value))
    looks = list(nx.connected_components(view))
    return [next(number for number, members in enumerate(looks) if node in members) for node in results]


def _draws_or_measures(node: fx.Node) -> bool:
    """Whether a node belongs to the call: what it draws, or measures in data, is that of the call."""

    def sizes(node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if is_size(n)]

    # A size that data tell as a number, and not as a dimension of a tensor, may be part of one.
    told = any(map(makes_a_size, operands_first(sizes(node), sizes)))
    return told or is_random(node.target, node.args) or makes_a_size(node)


class _Stage:
    """The stage while it is built, from the nodes that it has of its `own`; their operands are its inputs."""

    def __init__(self, graph: ProgramGraph, own: Collection[fx.Node], weights: Weights, seeds: Seeds) -> None:
        self.graph, self.own, self.weights, self.seeds = graph, own, weights, seeds
        self.given = graph.given()
        made = fx.Graph()
        self.end = made.output(())
        self.stage = dataclasses.replace(
            graph, module=as_module(made), inputs=(), outputs=(), assumed=set(), stages={}, state=None
        )
        self.builder = Builder(self.stage, self.end)
        self.made: dict[fx.Node, Any] = {}
        self.taken: dict[str, fx.Node] = {}
        """The values of the graph that are inputs, by name."""
        order = [node for node in graph.graph.nodes if node in own and not is_size(node)]
        for node in order:
            for operand in (*node.all_input_nodes, *((seeds[node],) if node in seeds else ())):
                if operand not in own and not is_size(operand):
                    self._input(operand)
        for node in order:
            self._copy(node)

    def finish(self, results: Sequence[fx.Node], outputs: Sequence[Output]) -> ProgramGraph:
        """The stage with these results."""
        self.end.args = (tuple(self.made[node] for node in results),)
        self.stage.outputs = tuple(outputs)
        self.stage.module.recompile()
        return self.stage

    def _input(self, node: fx.Node) -> Any:
        if node not in self.made:
            given = self.given.get(node)
            if given is None or given.kind != "constant":
                given = Input(Rate.LOOK.value, str(len(self.taken)))
                self.taken[given.name] = node
            self.made[node] = self.stage.add_input(given, node.meta["val"], f"input_{len(self.made)}")
        return self.made[node]

    def _copy(self, node: fx.Node) -> None:
        if node in self.seeds:
            rate = float(argument(node, "p"))
            value = self.made[node.args[0]], self.made[self.seeds[node]]  # type: ignore[index]
            self.made[node] = self.builder.call(torch.ops.attngraph.dropout.default, *value, rate)
        elif node.target is operator.getitem and node.args[0] in self.seeds:
            self.made[node] = self.made[node.args[0]]  # type: ignore[index]
        else:
            with self.stage.graph.inserting_before(self.end):
                self.made[node] = self.stage.graph.node_copy(node, self._operand)
            self.made[node].meta = node.meta | {"of_attention": self.weights.get(node, "")}

    def _operand(self, node: fx.Node) -> Any:
        """What stands for an operand of the graph; sizes are taken from the stage's own tensors."""
        if node not in self.made and node.target is aten.sym_size.int:
            try:
                self.made[node] = self.builder.size(size_expression(node.meta["val"]))
            except NoSize:
                source, axis = node.args
                made = self.made[source] if source in self.own else self._input(source)  # type: ignore[index, arg-type]
                self.made[node] = self.builder.call(aten.sym_size.int, made, axis)
        elif node not in self.made:
            self._copy(node)
        return self.made[node]


def _kept(
    graph: ProgramGraph, taken: Mapping[str, fx.Node], results: Iterable[fx.Node]
) -> dict[str, fx.Node]:
    """The values as results that nobody else can write to."""
    others = {memory_of(node) for node in results}
    found: dict[str, fx.Node] = {}
    for name, node in taken.items():
        found[name] = node
        if memory_of(node) in others or memory_of(node).op == "placeholder":
            last = graph.placeholders()[-1] if node.op == "placeholder" else node
            found[name] = Builder(graph, last.next).call(aten.clone.default, node)
    return found
