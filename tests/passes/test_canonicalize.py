"""Canonicalize takes out what computes nothing, and nothing else: copies that are seen stay copies, and
gradients that were stopped stay stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attngraph
from attngraph.capture.trace import capture
from attngraph.ir.graph.program_graph import Level, ProgramGraph
from attngraph.passes.canonicalize import Canonicalize
from attngraph.pipeline import run


def canonical(function: Callable[..., Any], *inputs: Tensor, gradients: bool = True) -> ProgramGraph:
    with torch.set_grad_enabled(gradients):
        graph = capture(function, inputs, {}).graph
        run(graph, (Canonicalize(),))
    assert graph.level is Level.CANONICAL
    return graph


def targets(graph: ProgramGraph) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]


def test_detach_stays_where_gradients_flow_and_goes_where_none_do() -> None:
    def f(x: Tensor) -> Tensor:
        return x.detach() * 2 + x

    x = torch.randn(3, 4, requires_grad=True)
    assert any("detach" in t for t in targets(canonical(f, x)))
    assert not any("detach" in t for t in targets(canonical(f, x, gradients=False)))


def test_what_is_computed_without_gradients_gets_none() -> None:
    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 3
        return y * x

    x = torch.randn(3, 4, requires_grad=True)
    compiled = attngraph.compile(f)
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.allclose(gradient, 3 * x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clone(),
        lambda x: x.clone(memory_format=torch.contiguous_format),
        lambda x: x[1:].clone(),
        lambda x: x.view(-1).clone(),
        lambda x: x.mT.contiguous().mT,
        lambda x: x.to(x.dtype, copy=True),
    ],
    ids=["clone", "contiguous clone", "of a slice", "of a view", "of a transpose", "by a cast"],
)
@pytest.mark.parametrize("gradients", [True, False])
def test_a_copy_of_an_input_stays_a_copy(function: Callable[[Tensor], Tensor], gradients: bool) -> None:
    compiled = attngraph.compile(function)
    x = torch.randn(3, 4)
    kept = x.clone()
    with torch.set_grad_enabled(gradients):
        for _ in range(2):
            found = compiled(x)
            assert torch.equal(found, function(x))
            with torch.no_grad():
                found.zero_()
            assert torch.equal(x, kept)


def test_a_copy_of_a_weight_stays_a_copy() -> None:
    class Giving(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", torch.ones(4))

        def forward(self, x: Tensor) -> Any:
            return self.b.clone(), x + self.b

    model = Giving()
    compiled = attngraph.compile(model)
    for _ in range(2):
        compiled(torch.randn(4))[0].zero_()
        assert (model.b == 1).all()


def test_copies_made_only_to_be_contiguous_are_made_only_where_needed() -> None:
    graph = canonical(lambda x: (x * 2).mT.contiguous().view(-1), torch.randn(3, 4))
    assert not any("clone" in t for t in targets(graph))
    assert not any("aten.view" in t for t in targets(graph))


def test_a_copy_that_nobody_else_can_write_to_goes() -> None:
    graph = canonical(lambda x: (x * 2).clone() + 1, torch.randn(3, 4))
    assert not any("clone" in t for t in targets(graph))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (lambda y: (y, y.clone()))(x * 2),
        lambda x: (lambda y: (y, y.clone().view(-1)))(x * 2),
        lambda x: (x * 2)[:, :1].expand(3, 4).clone().as_strided((4, 3), (1, 4)),
    ],
    ids=["returned beside it", "a view of it returned", "its strides looked at"],
)
def test_a_copy_that_can_be_told_from_its_original_stays(function: Callable[[Tensor], Any]) -> None:
    x = torch.randn(3, 4)
    graph = canonical(function, x)
    assert any("clone" in t for t in targets(graph))
    found, wanted = attngraph.compile(function)(x), function(x)
    if isinstance(found, Tensor):
        assert torch.equal(found, wanted)
    else:
        found[0].zero_()
        assert torch.equal(found[1], wanted[1])


def test_a_size_of_a_value_is_computed_from_sizes_of_inputs() -> None:
    def masked(q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        keep = torch.vmap(torch.vmap(lambda a, b: b <= a, (None, 0)), (0, None))(places, places)
        return (q @ k.mT).masked_fill(~keep, -torch.inf)

    graph = canonical(masked, torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8))
    sizes = [n for n in graph.graph.nodes if n.target is torch.ops.aten.sym_size.int]
    assert sizes and all(n.args[0].op == "placeholder" for n in sizes)


def test_what_nothing_uses_goes_and_inputs_stay() -> None:
    def f(x: Tensor, unused: Tensor) -> Tensor:
        x.exp()
        return x + 1

    graph = canonical(f, torch.randn(3, 4), torch.randn(2))
    assert [t for t in targets(graph) if "exp" in t] == []
    assert len(graph.placeholders()) == 2


def test_writes_to_an_input_are_kept() -> None:
    def f(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.clone()

    compiled = attngraph.compile(f)
    x = torch.ones(3, 4)
    found = compiled(x)
    assert (x == 2).all() and (found == 2).all()
    found.zero_()
    assert (x == 2).all()


def test_the_pass_says_what_it_removed() -> None:
    with torch.no_grad():
        graph = capture(lambda x: x.detach() + torch.tensor(1.0), (torch.randn(3),), {}).graph
        result = run(graph, (Canonicalize(),))
    (record,) = result.records
    assert record.changed
    assert any(note.startswith("removed") and "detach" in note for note in record.notes)


PICKED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, int, int, int] | None]] = {
    "one place from the end": (lambda x: x[:, :, [-2]], (2, 4, 5, 1)),
    "the last place": (lambda x: x[:, :, [-1]], (2, 5, 6, 1)),
    "a range": (lambda x: x[:, torch.arange(1, 4)], (1, 1, 4, 1)),
    "every other place": (lambda x: x[:, :, torch.tensor([-5, -3, -1])], (2, 1, 6, 2)),
    "a selection": (lambda x: x.index_select(2, torch.tensor([2, 3])), (2, 2, 4, 1)),
    "all": (lambda x: x[:, :, torch.arange(6)], (2, 0, 6, 1)),
    "backwards": (lambda x: x[:, :, [3, 2, 1]], None),
    "around the end": (lambda x: x[:, :, [-1, 0, 1]], None),
    "the same place twice": (lambda x: x[:, :, [1, 1]], None),
    "no pattern": (lambda x: x[:, :, [0, 1, 3]], None),
    "two lists": (lambda x: x[:, [0, 1], [2, 3]], None),
    "a dimension of any size": (lambda x: x[[0]], None),
    "a list of lists": (lambda x: x[:, :, torch.arange(4).view(2, 2)], None),
}


@pytest.mark.parametrize("name", PICKED)
def test_picking_places_that_follow_each_other_is_a_slice(name: str) -> None:
    pick, cut = PICKED[name]

    def function(x: Tensor) -> Tensor:
        return pick(x.view(-1, 5, 6, 8))

    x = torch.randn(3, 240)
    graph = canonical(function, x)
    slices = [n.args[1:] for n in graph.graph.nodes if n.target is torch.ops.aten.slice.Tensor]
    assert [found for found in slices if len(found) == 4] == ([] if cut is None else [cut])
    assert any("index" in target for target in targets(graph)) == (cut is None)
    compiled = attngraph.compile(function, min_scores=0)
    assert torch.equal(compiled(x), function(x))
    assert compiled(x).stride() == function(x).stride()
    compiled(x).zero_()
    assert x.abs().min() > 0
