"""Where the model itself serves: calls with few scores, and sizes at which it is faster, which is measured in
their first calls. The report says so; other calls run the graph."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.ir import budgets
from attngraph.ir.ops.kernels import KERNELS
from attngraph.passes import DEFAULT_PIPELINE
from attngraph.runtime import graphs
from tests.runtime.small import Of, agree, attend


class Layer(nn.Module):
    """One attention, written out."""

    def __init__(self, heads: int = 2, width: int = 16) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        p = (q @ k.mT / 4).softmax(-1)
        return (p @ v).transpose(1, 2).flatten(2)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each attention that a kernel computes from here on."""
    found: list[int] = []
    for kernel in set(map(type, KERNELS.values())):
        forward = kernel.forward

        def counted(self, program, operands, *rest, _forward=forward):  # type: ignore[no-untyped-def]
            found.append(operands[0].shape[2])
            return _forward(self, program, operands, *rest)

        monkeypatch.setattr(kernel, "forward", counted)
    return found


def from_scores(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "FUSED_SCORES", count)


def test_the_graph_runs_from_so_many_scores_on(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from_scores(2 * 2 * 30 * 30, monkeypatch)  # batch 2, 2 heads, 30 tokens
    model = Layer()
    compiled = attngraph.compile(model)
    for batch, tokens, fused in ((2, 29, False), (2, 30, True), (1, 30, False), (1, 43, True)):
        x = torch.randn(batch, tokens, 16)
        compiled(x)  # may trace, which runs kernels to check them
        runs.clear()
        found = compiled(x)
        assert bool(runs) == fused, (batch, tokens)
        torch.testing.assert_close(found, model(x))
    assert compiled.report.small_calls == 4 and len(compiled.report.attention) == 1
    assert "4 calls ran the model itself: attention is too small" in str(compiled.report)


def test_gradients_and_state_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from_scores(1 << 20, monkeypatch)
    model = Layer()
    other, compiled = copy.deepcopy(model), attngraph.compile(model)
    x = torch.randn(2, 9, 16)
    for scale in (1.0, 3.0):
        for one in (compiled, other):
            one.zero_grad()
            (one(x) * scale).square().sum().backward()
        assert torch.equal(model.qkv.weight.grad, other.qkv.weight.grad)
        for one in (model, other):
            one.heads = 4  # the shapes were seen before; the model's own answer follows its attributes
    assert compiled.report.small_calls == 2


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Layer(), {"min_scores": 0}), (Layer(), {"backend": "cpu"}), (Layer(), {"passes": DEFAULT_PIPELINE}),
        (nn.Sequential(attngraph.compile(Layer()), nn.Linear(16, 16)), {}),  # parts are compiled already
    ],
)  # fmt: skip
def test_whoever_asks_for_the_graph_gets_it(
    model: nn.Module, options: dict[str, object], runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from_scores(1 << 20, monkeypatch)
    compiled = attngraph.compile(model, **options)
    compiled(torch.randn(1, 5, 16))
    runs.clear()
    compiled(torch.randn(1, 5, 16))
    assert runs and not compiled.report.small_calls and "itself" not in str(compiled.report)


def test_a_graph_without_anything_fused_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from_scores(1 << 20, monkeypatch)
    compiled = agree(nn.Linear(4, 4), torch.randn(3, 4))
    assert "1 call ran the model itself: there is nothing fused" in str(compiled.report)


def test_where_only_data_tell_how_many_scores_there_are_the_graph_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from_scores(1 << 20, monkeypatch)
    model = Layer()
    calls = [(torch.randn(2, 9, 16), torch.arange(9) < count) for count in (3, 7)]
    assert not agree(lambda x, real: model(x[:, real]), *calls, fused=1).report.small_calls


# --- the faster one ---


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that only passes when it is told to."""
    now = [0.0]
    monkeypatch.setattr(graphs.time, "perf_counter", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


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


def layer() -> nn.Module:
    return Of(lambda m, x: m.out(attend(x)), out=nn.Linear(8, 8))


def test_a_model_that_is_faster_serves_calls_of_that_size_alone(
    clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "FUSED_SCORES", 1)
    model = layer()
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
    compiled = attngraph.compile(layer(), min_scores=0 if why == "asked for" else None)
    monkeypatch.setattr(graphs.Paces, "serve", lambda *_: pytest.fail("measured"))
    with torch.set_grad_enabled(why == "gradients"):
        for _ in range(3):
            compiled(torch.randn(2, 6, 8))
