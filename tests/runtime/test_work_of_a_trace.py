"""What a trace leaves undone, because nothing needs it: code of graphs, sizes that no operation takes, proofs
of what is asked about the example alone, itself where a loop over tokens is ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import attngraph
from attngraph.capture.captured import Assumed
from attngraph.capture.faster.calls import equal_calls_inferred_once, equal_formulas_computed_once
from attngraph.capture.trace import capture
from attngraph.errors import CaptureError
from attngraph.ir import budgets


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """The calls of a function of this name from now on."""
    calls: list[str] = []
    function = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: (calls.append(name), function(*a, **k))[1])
    return calls


class Reshaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        unused = [batch * tokens * n for n in range(50)]
        with torch.no_grad():
            y = self.linear(x).view(batch * tokens, 2, 4)
        return y.transpose(1, 2).reshape(batch, -1, 8)[:, : max(len(unused), 1)]


def test_no_code_of_a_graph_is_written_in_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, fx.Graph, "python_code")
    model = Reshaped()
    captured = capture(model, (torch.randn(2, 5, 8),), {})
    assert not calls
    found = attngraph.compile(model, min_scores=0)
    x = torch.randn(3, 7, 8)
    assert torch.allclose(found(x), model(x), atol=1e-6) and calls and captured.graph.op_count()


def test_sizes_that_no_operation_takes_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, proxy_tensor, "_compute_proxy")
    capture(Reshaped(), (torch.randn(2, 5, 8),), {})
    assert 0 < len(calls) < 10


def test_a_long_chain_of_sizes_is_still_one_graph() -> None:
    def longer(x: Tensor) -> Tensor:
        length = x.shape[0]
        for _ in range(600):
            length = length + 1
        return x.new_zeros(length) + x.sum()

    compiled = attngraph.compile(longer, strict=True, min_scores=0)
    for tokens in (5, 9):
        x = torch.randn(tokens)
        assert torch.equal(compiled(x), longer(x))
    assert compiled.report.graphs == 1


def test_what_is_asked_of_the_example_alone_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = counted(monkeypatch, ShapeEnv, "_maybe_evaluate_static")
    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(6, 10))
    tokens, width = x.shape
    with equal_calls_inferred_once(), equal_formulas_computed_once():
        with mode.shape_env.suppress_guards():
            assert tokens * 2 < width + 7 and not tokens * 2 > width + 7
        assert not proofs and not mode.shape_env.guards
        assert tokens * 2 < width + 7  # this one is a condition
    assert proofs and len(mode.shape_env.guards) == 1


class InChunks(nn.Module):
    """Works on chunks of 32 tokens, in many steps; then, with a loop, on one chunk after the other."""

    def __init__(self, loop: bool) -> None:
        super().__init__()
        self.loop, self.scale = loop, nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        chunks = nn.functional.pad(x, (0, -tokens % 32)).unflatten(1, (-1, 32)) * self.scale
        for step in range(1, 12):
            chunks = chunks + chunks[..., :step].clone().sum(-1, keepdim=True)
        parts = [chunks[:, n] for n in range(chunks.shape[1])] if self.loop else [chunks.flatten(1)]
        return torch.cat(parts, -1)[:, :tokens]


@pytest.mark.parametrize("loop", [False, True])
def test_a_loop_over_chunks_is_found_before_a_trace_for_any_number_of_tokens_comes_to_it(
    monkeypatch: pytest.MonkeyPatch, loop: bool
) -> None:
    monkeypatch.setattr(budgets, "QUOTIENTS_OF_TOKENS", 4)
    model, x = InChunks(loop), torch.randn(2, 9)
    calls = counted(monkeypatch, proxy_tensor, "proxy_call")
    if loop:
        with pytest.raises(CaptureError, match="how often a loop runs") as found:
            capture(model, (x,), {}, Assumed(symbolic=frozenset({(0, 1)})))
        assert 32 in (found.value.extents or ()) and 0 < len(calls) < 11 * 4
    else:
        captured = capture(model, (x,), {}, Assumed(symbolic=frozenset({(0, 1)})))
        (result,) = captured.graph.graph.output_node().args[0]  # type: ignore[misc, union-attr]
        assert not isinstance(result.meta["val"].shape[1], int) and len(calls) > 11 * 4  # type: ignore[union-attr]
