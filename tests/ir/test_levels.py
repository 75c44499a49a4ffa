"""What each level of a graph promises is checked: a graph that breaks one promise is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attngraph import pipeline
from attngraph.capture.trace import capture
from attngraph.errors import VerificationError
from attngraph.ir.graph.program_graph import Level, Output, ProgramGraph, Rate, move_to_stage
from attngraph.ir.graph.verify import PROMISES, verify
from attngraph.ir.ops import nodes
from attngraph.ir.ops.cached_attention import CachePlan
from attngraph.passes import DEFAULT_PIPELINE

aten = torch.ops.aten


def attend(x: Tensor, w: Tensor) -> Tensor:
    y = x @ (w @ w.mT)
    return torch.softmax(y @ y.mT, -1) @ y


@pytest.fixture
def graph() -> ProgramGraph:
    found = capture(attend, (torch.randn(2, 5, 4), torch.randn(4, 4)), {}).graph
    pipeline.run(found, DEFAULT_PIPELINE)
    return found


def _writes(graph: ProgramGraph) -> None:
    first = next(n for n in graph.graph.nodes if n.op == "call_function")
    with graph.graph.inserting_after(first):
        made = graph.graph.call_function(aten.add_.Tensor, (first, 1))
    made.meta["val"] = first.meta["val"]


def _has_a_tensor_of_its_own(graph: ProgramGraph) -> None:
    graph.module.register_buffer("table", torch.ones(3))
    with graph.graph.inserting_after(graph.placeholders()[-1]):
        graph.graph.get_attr("table")


def _has_one_result_too_many(graph: ProgramGraph) -> None:
    graph.outputs = (*graph.outputs, Output("value"))


def _takes_what_no_stage_gives(graph: ProgramGraph) -> None:
    weight = graph.placeholders()[1]
    product = next(iter(weight.users))
    move_to_stage(graph, Rate.WEIGHTS, {"folded0": product})
    verify(graph)  # is in order so far
    del graph.stages[Rate.WEIGHTS]


def _asserts(graph: ProgramGraph) -> None:
    first = graph.placeholders()[-1]
    with graph.graph.inserting_after(first):
        graph.graph.call_function(aten._assert_tensor_metadata.default, (first, None, None, torch.float32))


def _keeps_nothing_that_it_plans(graph: ProgramGraph) -> None:
    graph.outputs = (*graph.outputs[:-1], Output("pages", "kept0"))
    graph.state = CachePlan()


def _has_no_kernel(graph: ProgramGraph) -> None:
    (node,) = graph.attentions()
    node.args = nodes.Attention.of(node).with_kernel("").args


BROKEN: dict[str, tuple[Level, Callable[[ProgramGraph], None], str]] = {
    "a write": (Level.CAPTURED, _writes, "add_.Tensor writes to an operand"),
    "an attribute": (Level.CAPTURED, _has_a_tensor_of_its_own, "a graph holds no attributes"),
    "a result": (Level.CAPTURED, _has_one_result_too_many, "1 results for 2 outputs"),
    "a stage": (Level.CAPTURED, _takes_what_no_stage_gives, "folded0: no stage of rate weights gives it"),
    "an assertion": (Level.CANONICAL, _asserts, "may not occur at level"),
    "a state": (
        Level.CACHED,
        _keeps_nothing_that_it_plans,
        "kept0: kept by the plan or written by the graph",
    ),
    "a kernel": (Level.LOWERED, _has_no_kernel, "no kernel was chosen"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_promise_is_found_from_its_level_on(what: str, graph: ProgramGraph) -> None:
    level, breaks, words = BROKEN[what]
    verify(graph)
    breaks(graph)
    for at in Level:
        graph.reach(at)
        if at < level:
            verify(graph)
        else:
            with pytest.raises(VerificationError, match=words):
                verify(graph)


def test_every_level_says_what_it_promises() -> None:
    assert set(PROMISES) == set(Level)
    assert all(promise.__doc__ for promises in PROMISES.values() for promise in promises)


def test_equal_layers_are_inferred_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification infers a call once, however many layers have it; a wrong type in any layer is found."""
    import attngraph.ir.graph.call as inferring

    def layers(count: int) -> tuple[ProgramGraph, int]:
        class Layers(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for _ in range(count):
                    x = (x @ x.mT).relu() @ x + 1
                return x

        graph = capture(Layers(), (torch.randn(2, 5, 4),), {}).graph
        for node in graph.graph.nodes:
            node.meta.pop("inferred", None)
        calls: list[object] = []
        infer = inferring.infer
        monkeypatch.setattr(inferring, "infer", lambda *args: (calls.append(args[0]), infer(*args))[1])
        verify(graph)
        monkeypatch.setattr(inferring, "infer", infer)
        return graph, len(calls)

    graph, many = layers(6)
    assert many == layers(2)[1]
    last = [n for n in graph.graph.nodes if n.op == "call_function" and "val" in n.meta][-1]
    last.meta["val"] = last.meta["val"].double()
    last.meta.pop("inferred", None)
    with pytest.raises(VerificationError, match="recorded as"):
        verify(graph)
