"""The order in which a rank runs a graph: keys travel while it computes what does not need them. (That values
and gradients stay the same two processes show in `test_processes.py`.)"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.ir.graph.program_graph import is_random
from attngraph.ir.ops.token_collectives import begin_fetch, finish_fetch
from attngraph.runtime.parallel.fetch_early import fetching_early

WIDTH, HEADS, LAYERS = 16, 2, 3


class Layer(nn.Module):
    """Queries come first in the code, as in most models."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.gate, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        gate = self.dropout(self.gate(x))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        p = (q @ k.mT).masked_fill(hidden, float("-inf")).softmax(-1)
        return x + self.out((p @ v).transpose(1, 2).flatten(2)) * gate.sigmoid()


def order() -> tuple[Any, list[Any]]:
    """The module of a graph on two ranks, and the nodes of the one with early fetches."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    compiled = attngraph.compile(model, mesh=attngraph.SimulatedMesh(context=2))
    compiled(torch.randn(2, 8, WIDTH))
    ((executable,),) = compiled._graphs.values()
    module = executable.captured.graph.module
    return module, list(fetching_early(module).graph.nodes)


@pytest.mark.slow
def test_each_fetch_begins_before_what_does_not_need_it() -> None:
    _, nodes = order()
    begun = [n for n, node in enumerate(nodes) if node.target is begin_fetch]
    ended = [n for n, node in enumerate(nodes) if node.target is finish_fetch]
    assert len(begun) == len(ended) == 2 * LAYERS
    for layer in range(LAYERS):
        first, last = begun[2 * layer : 2 * layer + 2]
        assert first < last < ended[2 * layer]
        meanwhile = [str(node.target) for node in nodes[last : ended[2 * layer]]]
        assert meanwhile.count("aten.linear.default") == 2, "the queries and the gate"


@pytest.mark.slow
def test_random_numbers_are_drawn_in_the_same_order() -> None:
    module, nodes = order()

    def drawing(found: Any) -> list[str]:
        return [n.name for n in found if n.op == "call_function" and is_random(n.target, n.args)]

    assert len(drawing(nodes)) == 2 * LAYERS and drawing(nodes) == drawing(module.graph.nodes)


def test_a_graph_without_fetches_is_the_same_object() -> None:
    module = torch.fx.symbolic_trace(nn.Linear(3, 3))
    assert fetching_early(module) is module
