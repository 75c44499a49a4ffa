"""Equal operations are inferred once in a trace, and the graph is the one that torch gives when all are. What
else a trace leaves undone, because nothing needs it: code of graphs, sizes that no operation takes, proofs of
what is asked about the example alone, itself where a loop over tokens is ahead."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import attngraph
from attngraph.capture import faster, trace
from attngraph.capture.captured import Assumed
from attngraph.capture.faster.calls import equal_calls_inferred_once, equal_formulas_computed_once
from attngraph.capture.trace import capture
from attngraph.errors import CaptureError
from attngraph.ir import budgets
from attngraph.ir.graph.printer import format_file
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from tests.runtime.small import Of, agree


def _model(layers: int) -> nn.Module:
    return DecoderLM(DecoderLMConfig(vocab_size=17, layers=layers, width=8, heads=1, max_tokens=32)).eval()


@pytest.mark.parametrize("gradients", [False, True])
def test_more_equal_layers_take_no_more_inferences(monkeypatch: pytest.MonkeyPatch, gradients: bool) -> None:
    found = []
    with torch.set_grad_enabled(gradients):
        for layers in (3, 4):
            with monkeypatch.context() as patch:
                calls = counted(patch, FakeTensorMode, "_dispatch_impl")
                capture(_model(layers), (torch.randint(0, 17, (2, 9)),), {})
            found.append(len(calls))
    assert found[0] == found[1] > 0


def views_of_the_same_and_of_others(x: Tensor) -> Tensor:
    other = x + 1
    return x @ x.mT + x @ other.mT + x.expand_as(x) @ x.expand_as(other).mT


def a_table_that_a_loop_writes(x: Tensor) -> Tensor:
    table = torch.zeros(x.shape[0], 3, x.shape[1])
    for n in range(3):
        table[:, n] = x[..., n] * 2
    return table + table.requires_grad


def sizes_that_follow_from_values(x: Tensor) -> Tensor:
    first, second = (x > 0).nonzero(), (x > 1).nonzero()
    return first.sum() + second.sum() * first.shape[0] + second.shape[0]


def two_kinds_of_numbers(x: Tensor) -> tuple[Tensor, ...]:
    return x * 2, x * 2.0, x * True, x.long() * 2, x.long() * 2.0, x * -0.0, x * 0.0, x / 2, x // 2


def what_is_returned_as_it_is(x: Tensor) -> tuple[Tensor, ...]:
    y = x.contiguous().to(x.dtype)
    return y.add(1).to(torch.float64), y.to(torch.float32), y.reshape(y.shape), y.mT.contiguous().mT


def a_tensor_that_changes_its_shape_in_place(x: Tensor) -> Tensor:
    a, b = x + 1, x + 1
    a.unsqueeze_(0)
    return a + b + (x + 1).flatten() @ (x + 1).flatten()


def with_and_without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        fixed = x.sin() * 2
    return x.sin() * 2 + fixed + (x.sin() * 2).detach()


def known_values(x: Tensor) -> Tensor:
    two, three = torch.tensor(2), torch.tensor(3)
    return x[..., : int(two)].sum() + x[..., : int(three)].sum() + (two + three).item()


def random_numbers(x: Tensor) -> Tensor:
    return torch.rand_like(x) + torch.rand_like(x) * x


EXAMPLES = [
    views_of_the_same_and_of_others, a_table_that_a_loop_writes, sizes_that_follow_from_values,
    two_kinds_of_numbers, what_is_returned_as_it_is, a_tensor_that_changes_its_shape_in_place,
    with_and_without_gradients, known_values, random_numbers,
]  # fmt: skip


@pytest.mark.parametrize("model", [*EXAMPLES, _model(2)], ids=lambda m: getattr(m, "__name__", "decoder"))
@pytest.mark.parametrize("gradients", [False, True])
def test_the_graph_is_what_torch_gives_without_it(
    monkeypatch: pytest.MonkeyPatch, model: Callable[..., Any], gradients: bool
) -> None:
    x = torch.randint(0, 17, (4, 9)) if isinstance(model, nn.Module) else torch.randn(4, 9, 9)

    def traced() -> tuple[str, str]:
        with torch.set_grad_enabled(gradients):
            given = x.clone().requires_grad_(gradients and x.is_floating_point())
            return format_file(trace.capture(model, (given,), {}).graph)

    found = traced()
    for name in ("equal_calls_inferred_once", "equal_formulas_computed_once"):
        monkeypatch.setattr(faster, name, contextlib.nullcontext)
    assert found == traced()


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """The calls of a function of this name from now on."""
    calls: list[str] = []
    function = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: (calls.append(name), function(*a, **k))[1])
    return calls


def _reshaped(m: Any, x: Tensor) -> Tensor:
    batch, tokens, _ = x.shape
    unused = [batch * tokens * n for n in range(50)]
    with torch.no_grad():
        y = m.linear(x).view(batch * tokens, 2, 4)
    return y.transpose(1, 2).reshape(batch, -1, 8)[:, : max(len(unused), 1)]


def test_no_code_of_a_graph_is_written_in_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, fx.Graph, "python_code")
    model = Of(_reshaped, linear=nn.Linear(8, 8))
    captured = capture(model, (torch.randn(2, 5, 8),), {})
    assert not calls
    found = attngraph.compile(model, min_scores=0)
    x = torch.randn(3, 7, 8)
    assert torch.allclose(found(x), model(x), atol=1e-6) and calls and captured.graph.op_count()


def test_sizes_that_no_operation_takes_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, proxy_tensor, "_compute_proxy")
    capture(Of(_reshaped, linear=nn.Linear(8, 8)), (torch.randn(2, 5, 8),), {})
    assert 0 < len(calls) < 10


def test_a_long_chain_of_sizes_is_still_one_graph() -> None:
    def longer(x: Tensor) -> Tensor:
        length = x.shape[0]
        for _ in range(300):
            length = length + 1
        return x.new_zeros(length) + x.sum()

    agree(longer, torch.randn(5), torch.randn(9), strict=True, min_scores=0, graphs=1)


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
