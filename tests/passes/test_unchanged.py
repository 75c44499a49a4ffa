"""A graph counts as unchanged only where every part of it is the object that it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import sympy
import torch
from torch import fx

from attngraph.capture.trace import capture
from attngraph.ir.graph.program_graph import Level, ProgramGraph
from attngraph.ir.graph.verify import is_unchanged, seen
from attngraph.pipeline import Outcome, run


def _graph() -> ProgramGraph:
    linear = torch.nn.Linear(4, 4)
    return capture(lambda x: linear(x).relu() + 1, (torch.randn(2, 4),), {}).graph


def _node(graph: ProgramGraph, name: str) -> fx.Node:
    return next(n for n in graph.graph.nodes if name in str(n.target))


def other_argument(graph: ProgramGraph) -> None:
    _node(graph, "add").update_arg(1, 2)


def other_operation(graph: ProgramGraph) -> None:
    _node(graph, "relu").target = torch.ops.aten.tanh.default


def note(graph: ProgramGraph) -> None:
    _node(graph, "relu").meta["tokens"] = "a note"


def other_value(graph: ProgramGraph) -> None:
    node = _node(graph, "relu")
    node.meta["val"] = node.meta["val"].clone()


def without_a_node(graph: ProgramGraph) -> None:
    node = _node(graph, "relu")
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    graph.graph.erase_node(node)


def condition(graph: ProgramGraph) -> None:
    graph.conditions += (sympy.Eq(sympy.Symbol("s9"), 1),)


def other_level(graph: ProgramGraph) -> None:
    graph.level = Level.CANONICAL


def other_result(graph: ProgramGraph) -> None:
    graph.outputs = tuple(dataclasses.replace(o, name="other") for o in graph.outputs)


def hint(graph: ProgramGraph) -> None:
    graph.hints["s9"] = 1


CHANGES = [
    other_argument, other_operation, note, other_value, without_a_node, condition, other_level, other_result,
    hint,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change: Callable[[ProgramGraph], None]) -> None:
    graph = _graph()
    before = seen(graph)
    assert is_unchanged(before, graph)
    change(graph)
    assert not is_unchanged(before, graph)


@dataclasses.dataclass(frozen=True)
class Breaks:
    """A pass that changes an operation and not its type."""

    name: str = "breaks"
    requires: Level = Level.CAPTURED
    yields: Level = Level.CAPTURED

    def run(self, graph: ProgramGraph) -> Outcome:
        _node(graph, "add").target = torch.ops.aten.eq.Tensor
        return Outcome()


@dataclasses.dataclass(frozen=True)
class Nothing(Breaks):
    name: str = "nothing"

    def run(self, graph: ProgramGraph) -> Outcome:
        return Outcome(["looked"])


def test_only_what_changed_is_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[ProgramGraph] = []
    monkeypatch.setattr("attngraph.pipeline.verify", verified.append)
    result = run(_graph(), [Nothing(), Nothing(), Breaks(), Nothing()])
    assert len(verified) == 2  # what was given, and what the third pass left
    assert [r.changed for r in result.records] == [False, False, True, False]
    assert [r.notes for r in result.records][:2] == [("looked",), ("looked",)]
