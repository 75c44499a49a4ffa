"""Functions of tensors become nodes as they are written, and proposals are kept or leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from attngraph.capture.trace import capture
from attngraph.ir.graph.call import argument, arguments
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.passes.build import Builder, NoSize, Refused
from attngraph.passes.proposal import Proposal

aten = torch.ops.aten


class Add(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


@pytest.fixture
def graph() -> ProgramGraph:
    with torch.no_grad():
        return capture(Add(), (torch.randn(6, 4), torch.randn(6, 4)), {}).graph


def last(graph: ProgramGraph) -> fx.Node:
    (node,) = graph.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    return node


WRITTEN: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "operators": (lambda x, y: -(2 * x - y), [aten.mul.Tensor, aten.sub.Tensor, aten.neg.default]),
    "methods": (lambda x, y: x.transpose(0, 1).unsqueeze(0), [aten.transpose.int, aten.unsqueeze.default]),
    "functions": (lambda x, y: torch.cat([x, y], 0), [aten.cat.default]),
    "modules": (lambda x, y: torch.nn.functional.linear(x, y), [aten.linear.default]),
    "overloads": (lambda x, y: aten.mul.Scalar(x, 2), [aten.mul.Scalar]),
    "sizes that are one list": (lambda x, y: x.reshape(2, 3, -1), [aten.reshape.default]),
    "a dtype that is another": (lambda x, y: x.to(torch.float64), [aten._to_copy.default]),
    "a dtype that it has": (lambda x, y: x.to(torch.float32), []),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_torch_is_recorded_as_it_is_written(name: str, graph: ProgramGraph) -> None:
    function, targets = WRITTEN[name]
    builder = Builder(graph, last(graph))
    made = builder.trace(function, *graph.placeholders())
    assert [node.target for node in builder.made] == targets
    eager = function(torch.zeros(6, 4), torch.zeros(6, 4))
    assert (made.meta["val"].dtype, made.meta["val"].ndim) == (eager.dtype, eager.ndim)


def test_symbolic_sizes_become_nodes(graph: ProgramGraph) -> None:
    x, y = graph.placeholders()
    builder = Builder(graph, last(graph))
    made = builder.trace(lambda x, y: x.expand(y.size(0) + 1, x.shape[0], -1), x, y)
    count, rows, _ = made.args[1]
    assert count.target(7, 1) == 8 and rows.target is aten.sym_size.int


def test_several_values_are_taken_apart(graph: ProgramGraph) -> None:
    builder = Builder(graph, last(graph))
    first, second = builder.trace(lambda x: list(aten.split.Tensor(x, 2, 1)), graph.placeholders()[0])
    assert [n.args[1] for n in (first, second)] == [0, 1] and len(builder.made) == 3


def test_an_argument_is_found_by_its_name_wherever_it_stands(graph: ProgramGraph) -> None:
    x, y = graph.placeholders()
    builder = Builder(graph, last(graph))
    by_place = builder.call(aten.sum.dim_IntList, x, [1], True)
    by_name = builder.call(aten.sum.dim_IntList, x, [1], keepdim=True)
    assert argument(by_place, "keepdim") is argument(by_name, "keepdim") is True
    assert argument(builder.call(aten.add.Tensor, x, y), "alpha") == 1
    assert argument(x, "alpha", 3) == 3
    assert arguments(by_name) == {"self": x, "dim": [1], "keepdim": True, "dtype": None}


def test_a_true_proposal_is_kept(graph: ProgramGraph) -> None:
    x, y = graph.placeholders()
    with Proposal(graph, last(graph)) as proposal:
        proposal.replace(last(graph), proposal.trace(lambda x, y: y + x, x, y), [x, y])
    assert proposal.done and not proposal.problem
    (result,) = graph.graph.output_node().all_input_nodes
    assert result.args == (y, x)


def test_a_proposal_of_another_value_leaves_the_graph_and_says_why(graph: ProgramGraph) -> None:
    x, y = graph.placeholders()
    before = list(graph.graph.nodes)
    with Proposal(graph, last(graph)) as proposal:
        proposal.replace(last(graph), proposal.trace(lambda x, y: x - y, x, y), [x, y])
    assert list(graph.graph.nodes) == before and not proposal.done
    assert "its value differs" in proposal.problem


def refused() -> None:
    raise Refused("it is too dear", tell=False)


def test_what_a_refused_proposal_changed_is_undone_before_its_nodes_go(graph: ProgramGraph) -> None:
    node = last(graph)
    args, nodes = node.args, list(graph.graph.nodes)
    with Proposal(graph, node) as proposal:
        proposal.undo_by(lambda: setattr(node, "args", args))
        node.args = (proposal.trace(lambda x: x * 2, args[0]), args[1])
        refused()
    assert (node.args, list(graph.graph.nodes)) == (args, nodes)
    assert (proposal.problem, proposal.tell) == ("it is too dear", False)


def test_an_error_of_ours_is_told_only_where_the_pass_survives_it(graph: ProgramGraph) -> None:
    with pytest.raises(KeyError), Proposal(graph, last(graph)):
        raise KeyError
    with Proposal(graph, last(graph), survives=True) as proposal:
        raise KeyError
    assert proposal.problem.startswith("an error of the compiler")


def test_a_size_that_is_nowhere_is_a_refusal() -> None:
    assert issubclass(NoSize, Refused)
