"""Which values are computed from arguments: beside a walk through all that a value is computed from."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from attngraph.capture.trace import capture
from attngraph.ir.graph.program_graph import ProgramGraph, is_size
from attngraph.meaning.check.region import region
from attngraph.passes.fuse_attention import FollowsArguments


class Layers(nn.Module):
    """Values of weights alone, of arguments, of both, and of an argument's size alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights = self.first.weight @ self.second.weight
        places = torch.arange(x.shape[0]) * 2
        for _ in range(3):
            x = self.second(x @ weights).relu()
        return x + places[:, None] + y.sum() * weights.sum()


def walked(graph: ProgramGraph, value: fx.Node) -> bool:
    named = dict(zip(graph.placeholders(), graph.inputs, strict=True))
    return any(n in named and named[n].kind == "argument" for n in region([value], ()))


def graph_of_layers() -> ProgramGraph:
    with torch.no_grad():
        return capture(Layers(), (torch.randn(5, 4), torch.randn(3)), {}).graph


def test_every_value_whichever_is_asked_first() -> None:
    graph = graph_of_layers()
    computed = [n for n in graph.graph.nodes if n.op == "call_function" and not is_size(n)]
    wanted = {node: walked(graph, node) for node in computed}
    assert set(wanted.values()) == {True, False}
    for order in (computed, computed[::-1]):
        follows = FollowsArguments(graph)
        assert {node: follows(node) for node in order} == wanted


def test_what_takes_a_values_place_may_have_another_answer() -> None:
    graph = graph_of_layers()
    follows = FollowsArguments(graph)
    computed = [n for n in graph.graph.nodes if n.op == "call_function" and not is_size(n)]
    before = {node: follows(node) for node in computed}
    old = next(n for n in computed if not before[n] and str(n.target).startswith(("aten.mm", "aten.matmul")))
    argument = graph.placeholders()[[i.kind for i in graph.inputs].index("argument")]
    with graph.graph.inserting_before(old):
        new = graph.graph.call_function(torch.ops.aten.matmul.default, (old, argument))
        new.meta["val"] = old.meta["val"]
    follows.replace(old, new)
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    after = {node: follows(node) for node in computed}
    assert after == {node: walked(graph, node) for node in computed} and after != before
