"""Calls with few scores run the model itself; the report says so; larger ones run the graph."""

import copy

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.ir import budgets
from attngraph.ir.ops.kernels import KERNELS
from attngraph.passes import DEFAULT_PIPELINE


class Layer(nn.Module):
    """One attention, written out, that counts how often its own forward runs outside of a trace."""

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


@pytest.mark.parametrize("options", [{"min_scores": 0}, {"backend": "cpu"}, {"passes": DEFAULT_PIPELINE}])
def test_whoever_asks_for_the_graph_gets_it(
    options: dict[str, object], runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from_scores(1 << 20, monkeypatch)
    compiled = attngraph.compile(Layer(), **options)
    compiled(torch.randn(1, 5, 16))
    runs.clear()
    compiled(torch.randn(1, 5, 16))
    assert runs and not compiled.report.small_calls and "itself" not in str(compiled.report)


def test_a_graph_without_anything_fused_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from_scores(1 << 20, monkeypatch)
    compiled = attngraph.compile(nn.Linear(4, 4))
    compiled(torch.randn(3, 4))
    assert "1 call ran the model itself: there is nothing fused" in str(compiled.report)


def test_a_model_with_compiled_parts_runs_as_a_graph(
    runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from_scores(1 << 20, monkeypatch)
    whole = attngraph.compile(nn.Sequential(attngraph.compile(Layer()), nn.Linear(16, 16)))
    whole(torch.randn(1, 5, 16))
    runs.clear()
    whole(torch.randn(1, 5, 16))
    assert runs and not whole.report.small_calls


def test_the_fewest_scores_are_a_number() -> None:
    with pytest.raises(ValueError, match="is a whole number from 0 on; found -1"):
        attngraph.compile(Layer(), min_scores=-1)


def test_where_only_data_tell_how_many_scores_there_are_the_graph_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from_scores(1 << 20, monkeypatch)
    model = Layer()

    def of_real_tokens(x: Tensor, real: Tensor) -> Tensor:
        return model(x[:, real])

    compiled = attngraph.compile(of_real_tokens)
    for count in (3, 7):
        x, real = torch.randn(2, 9, 16), torch.arange(9) < count
        torch.testing.assert_close(compiled(x, real), of_real_tokens(x, real))
    assert not compiled.report.small_calls and len(compiled.report.attention) == 1
