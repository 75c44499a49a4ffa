"""Attributes for which the weights of a fused attention would be computed wait until somebody looks at them.

A forward that sets `self.attention_weights = p` needs `p` in memory only if somebody reads the attribute.
What the attribute needs, and nothing else does, moves to the stage `Rate.LOOK`. It starts from values that
the graph computes anyway (queries and keys), which become results of the graph. A value that somebody may
write to before the look is copied: what shares its memory with an input or with another result.

Random numbers must be those of the call. A dropout that was fused has them by the seed of its attention
(`ir/ops/dropout.py`); with any other random operation the attribute is set in each call. Used by
`fuse_attention.py`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from attngraph.ir.graph.program_graph import (
    Input,
    Output,
    ProgramGraph,
    Rate,
    as_module,
    computed_from,
    is_measured,
    is_random,
    is_size,
    memory_of,
)
from attngraph.meaning.algebra.sizes import size_expression
from attngraph.meaning.rule import argument
from attngraph.passes.build import Builder, NoSize

aten = torch.ops.aten

Weights = Collection[fx.Node]
"""Weights and scores of fused attentions."""
Seeds = Mapping[fx.Node, fx.Node]
"""The seed of each dropout that is part of a fused attention."""


def can_wait(graph: ProgramGraph, value: fx.Node, way: Iterable[fx.Node], dropouts: Weights) -> bool:
    """Whether a result that is computed from weights in this way is one that waits, once these dropouts are
    part of an attention."""
    results: Any = graph.graph.output_node().args[0]
    kinds = {o.kind for node, o in zip(results, graph.outputs, strict=True) if node is value}
    return kinds == {"attribute"} and all(n in dropouts or not is_random(n.target, n.args) for n in way)


def take_attributes(graph: ProgramGraph, weights: Weights, seeds: Seeds) -> list[str]:
    """Move the attributes that wait to their stage, where only they need any of these weights and scores;
    returns their names."""
    results: list[fx.Node] = list(graph.graph.output_node().args[0])  # type: ignore[arg-type]
    waiting = _waiting(graph, results, weights, seeds)
    if not waiting:
        return []
    staying = [n for n in range(len(results)) if n not in waiting]
    needed = computed_from(results[n] for n in staying)
    own = {node for node in computed_from(results[n] for n in waiting) - needed if node.op == "call_function"}
    stage = _Stage(graph, own, seeds)
    of_call = [n for n, o in enumerate(graph.outputs) if o.kind in ("value", "attribute")]
    later = [dataclasses.replace(graph.outputs[n], place=of_call.index(n)) for n in sorted(waiting)]
    graph.stages[Rate.LOOK] = stage.finish([results[n] for n in sorted(waiting)], later)
    kept = _kept(graph, stage.taken.values(), [results[n] for n in staying])
    graph.graph.output_node().args = ((*(results[n] for n in staying), *kept),)
    graph.outputs = (
        *(graph.outputs[n] for n in staying), *(Output(Rate.LOOK.value, name) for name in stage.taken)
    )  # fmt: skip
    return sorted({o.name.removeprefix("model.") for o in later})


def _waiting(graph: ProgramGraph, results: list[fx.Node], weights: Weights, seeds: Seeds) -> set[int]:
    """The results that wait: attributes that need weights which nothing else needs."""
    waiting = {n for n, o in enumerate(graph.outputs) if o.kind == "attribute"}
    while True:
        needed = computed_from(node for n, node in enumerate(results) if n not in waiting)
        set_now = set()
        for n in waiting:
            own = {node for node in computed_from([results[n]]) - needed if node.op == "call_function"}
            if own.isdisjoint(weights) or not all(_runs_later(node, seeds) for node in own):
                set_now.add(n)
        if not set_now:
            return waiting
        waiting -= set_now


def _runs_later(node: fx.Node, seeds: Seeds) -> bool:
    if is_measured(node):
        return False
    if node.target is aten.native_dropout.default:
        return node in seeds and all(u.target is operator.getitem and u.args[1] == 0 for u in node.users)
    return node in seeds or not is_random(node.target, node.args)


class _Stage:
    """The stage while it is built, from the nodes that it has of its `own`; their operands are its inputs."""

    def __init__(self, graph: ProgramGraph, own: Collection[fx.Node], seeds: Seeds) -> None:
        self.graph, self.own, self.seeds = graph, own, seeds
        self.given = dict(zip(graph.placeholders(), graph.inputs, strict=True))
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

    def _input(self, node: fx.Node) -> fx.Node:
        if node not in self.made:
            first = next(iter(self.stage.graph.nodes))
            last = self.stage.placeholders()[-1:]
            at = (
                self.stage.graph.inserting_after(last[0])
                if last
                else self.stage.graph.inserting_before(first)
            )
            given = self.given.get(node)
            if given is None or given.kind != "constant":
                given = Input(Rate.LOOK.value, str(len(self.taken)))
                self.taken[given.name] = node
            with at:
                made = self.made[node] = self.stage.graph.placeholder(f"input_{len(self.made)}")
            made.meta = {"val": node.meta["val"]}
            self.stage.inputs = (*self.stage.inputs, given)
        return self.made[node]  # type: ignore[no-any-return]

    def _copy(self, node: fx.Node) -> None:
        if node in self.seeds:
            rate = float(argument(node, 1, "p", 0.5))
            value = self.made[node.args[0]], self.made[self.seeds[node]]  # type: ignore[index]
            self.made[node] = self.builder.call(torch.ops.attngraph.dropout.default, *value, rate)
        elif node.target is operator.getitem and node.args[0] in self.seeds:
            self.made[node] = self.made[node.args[0]]  # type: ignore[index]
        else:
            with self.stage.graph.inserting_before(self.end):
                self.made[node] = self.stage.graph.node_copy(node, self._operand)
            self.made[node].meta = dict(node.meta)

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


def _kept(graph: ProgramGraph, taken: Collection[fx.Node], results: Iterable[fx.Node]) -> list[fx.Node]:
    """The values as results that nobody else can write to."""
    builder = Builder(graph, graph.graph.output_node())
    others = {memory_of(node) for node in results}
    shared = [memory_of(n) in others or memory_of(n).op == "placeholder" for n in taken]
    return [
        builder.call(aten.clone.default, node) if copied else node
        for node, copied in zip(taken, shared, strict=True)
    ]
