"""Where the model itself is faster, it serves: measured in the first calls of each size, and told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.ir import budgets
from attngraph.runtime import graphs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """A clock that only passes when it is told to."""
    now = [0.0]
    monkeypatch.setattr(graphs.time, "perf_counter", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    yield passes


@pytest.mark.parametrize(
    ("graph", "model", "turns"),
    [(1.0, 1.2, "ggmgmggg"), (1.2, 1.0, "ggmgmmmm"), (1.0, 1.0, "ggmgmggg"), (1.0, 1.6, "ggmggggg"),
     (9.0, 1.0, "ggmmmmmm"), (1.02, 1.0, "ggmgmggg")],
)  # fmt: skip
def test_the_faster_one_serves_after_few_turns(
    graph: float, model: float, turns: str, clock: Callable[[float], None]
) -> None:
    paces, ran = graphs.Paces(), list[str]()

    def run(name: str, seconds: float) -> Callable[[], None]:
        def one() -> None:
            ran.append(name)
            clock(seconds)

        return one

    for _ in turns:
        paces.serve("a size", run("g", graph), run("m", model))
    assert "".join(ran) == turns
    assert bool(paces.slower()) == (turns[-1] == "m")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x @ x.mT).softmax(-1) @ x)


def test_a_model_that_is_faster_serves_calls_of_that_size_alone(
    clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "FUSED_SCORES", 1)
    model = Layer()
    compiled = attngraph.compile(model)
    by_graph, ran = type(compiled)._by_graph, list[int]()

    def slow(self: object, *args: object) -> object:
        clock(1.0)
        ran.append(1)
        return by_graph(self, *args)

    monkeypatch.setattr(type(compiled), "_by_graph", slow)
    with torch.no_grad():
        for tokens, turns, of_graph in ((6, 6, 2), (7, 2, 2)):
            x = torch.randn(2, tokens, 8)
            ran.clear()
            for _ in range(turns):
                torch.testing.assert_close(compiled(x), model(x))
            assert len(ran) == of_graph
    told = "the model itself serves calls of one size: 0 ms, measured by turns, instead of 1e+03"
    assert str(compiled.report).count(told) == 1


@pytest.mark.parametrize("why", ["gradients", "many scores", "asked for"])
def test_the_graph_serves_where_nothing_is_measured(
    why: str, clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "FUSED_SCORES", 1)
    if why == "many scores":
        monkeypatch.setattr(budgets, "TIMED_SCORES", 10)
    compiled = attngraph.compile(Layer(), min_scores=0 if why == "asked for" else None)
    monkeypatch.setattr(graphs.Paces, "serve", lambda *_: pytest.fail("measured"))
    with torch.set_grad_enabled(why == "gradients"):
        for _ in range(3):
            compiled(torch.randn(2, 6, 8))
