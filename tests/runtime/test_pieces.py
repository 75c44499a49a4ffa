"""Models that cannot be captured whole, torch.compile with us as its backend, strictness, and `explain`."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import attngraph

Same = Callable[..., None]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Branching(nn.Module):
    """Two attentions and a branch on data between them."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.softmax(self.project(x) @ x.mT, -1) @ x
        y = y * 2 if y.sum() > 0 else y - 1
        return torch.softmax(y @ x.mT, -1) @ x


@pytest.mark.slow
def test_a_model_that_branches_on_data_runs_in_pieces_and_says_where_it_broke(same: Same) -> None:
    model = Branching()
    compiled = attngraph.compile(model)
    for tokens in (5, 6, 7):
        for sign in (1, -1):
            x = torch.randn(2, tokens, 8) * 0.1 + sign
            same(compiled(x), model(x))
    report = compiled.report
    assert len(report.attention) >= 2
    assert report.breaks and report.breaks[0].reason
    assert report.breaks[0].source.endswith(f"test_pieces.py:{_line_of('y * 2 if y.sum() > 0')}")
    assert "captured in pieces" in str(report)


def test_a_piece_that_is_captured_again_for_other_sizes_is_told_once() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    model.register_forward_hook(lambda module, given, result: (result[0] * 2, result[1]))
    compiled = attngraph.compile(model)
    for tokens in (5, 6, 7):
        x = torch.randn(2, tokens, 8)
        compiled(x, x, x, need_weights=False)
    assert len(compiled.report.attention) == 1


def _line_of(text: str) -> int:
    with open(__file__, encoding="utf-8") as lines:
        return next(n for n, line in enumerate(lines, 1) if text in line)


@pytest.mark.slow
def test_pieces_train_as_eager_does(x: Tensor, same: Same) -> None:
    model = Branching()
    compiled = attngraph.compile(model)
    mine, theirs = (
        torch.autograd.grad(m(x).square().sum(), list(model.parameters())) for m in (compiled, model)
    )
    same(mine, theirs)


def test_strict_names_the_line_that_cannot_be_captured_and_what_to_do(x: Tensor) -> None:
    with pytest.raises(attngraph.CaptureError) as caught:
        attngraph.compile(Branching(), strict=True)(x)
    problem = caught.value
    line = f"test_pieces.py:{_line_of('y * 2 if y.sum() > 0')}"
    assert problem.source.endswith(line) and line in str(problem)
    assert problem.reason and problem.reason in str(problem)
    assert "What to do:" in str(problem)


def softmax_over_heads(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.mT, 0) @ x


def test_strict_names_the_line_that_is_not_fused(x: Tensor) -> None:
    with pytest.raises(attngraph.NotFusedError) as caught:
        attngraph.compile(softmax_over_heads, strict=True)(x)
    assert f"test_pieces.py:{_line_of('torch.softmax(x @ x.mT, 0)')}" in str(caught.value)
    assert "What to do:" in str(caught.value)


def test_every_error_of_ours_has_one_base() -> None:
    for kind in (attngraph.CaptureError, attngraph.NotFusedError, attngraph.VerificationError):
        assert issubclass(kind, attngraph.AttnGraphError)


def test_what_cannot_be_compiled_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="found int"):
        attngraph.compile(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="auto, cpu, triton, reference"):
        attngraph.compile(softmax_over_heads, backend="nonsense")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_every_backend_that_runs_here_answers_as_eager(
    backend: str, layer: type[nn.Module], x: Tensor, same: Same
) -> None:
    model = layer()
    compiled = attngraph.compile(model, backend=backend)
    same(compiled(x), model(x))
    kernel = compiled.report.attention[0].kernel.name
    assert kernel and (backend == "auto" or kernel.split(".")[0] == backend)


# --- torch.compile with our backend ------------------------------------------------------------------


@pytest.mark.slow
def test_the_backend_is_known_to_torch_compile_by_name(layer: type[nn.Module], same: Same) -> None:
    model = layer()
    compiled = torch.compile(model, backend="attngraph")
    for batch, tokens in ((2, 5), (3, 6), (2, 7), (1, 9)):
        x = torch.randn(batch, tokens, 8, requires_grad=True)
        same(compiled(x), model(x))
        mine, theirs = (torch.autograd.grad(m(x).square().sum(), x) for m in (compiled, model))
        same(mine, theirs)
    with torch.no_grad():
        same(compiled(x), model(x))


@pytest.mark.slow
def test_the_backend_serves_dynamic_sizes_in_one_graph(layer: type[nn.Module], same: Same) -> None:
    model = layer()
    compiled = torch.compile(model, backend="attngraph", fullgraph=True, dynamic=True)
    for batch, tokens in ((2, 5), (3, 6), (2, 7)):
        x = torch.randn(batch, tokens, 8)
        same(compiled(x), model(x))


@pytest.mark.slow
def test_the_backend_takes_options(layer: type[nn.Module], x: Tensor, same: Same) -> None:
    model = layer()
    same(torch.compile(model, backend="attngraph", options={"backend": "reference"})(x), model(x))


@pytest.mark.slow
def test_the_backend_keeps_breaks_writes_and_side_effects(
    attention: Callable[..., Tensor], same: Same
) -> None:
    def f(x: Tensor, seen: list[int]) -> Tensor:
        seen.append(1)
        x = x + 1
        print(end="")
        y = attention(x)
        x.add_(1)
        return y + x

    compiled = torch.compile(f, backend="attngraph")
    seen: list[int] = []
    for tokens in (5, 6):
        x = torch.randn(2, tokens, 4)
        same(compiled(x, seen), f(x, []))
    assert len(seen) == 2


@pytest.mark.slow
def test_the_backend_writes_buffers(attention: Callable[..., Tensor], same: Same) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.n.add_(1)
            return attention(self.norm(x))

    model = Normed()
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="attngraph")
    for _ in range(3):
        x = torch.randn(2, 4, 5)
        same(compiled(x), model(x))
    same(dict(other.state_dict()), dict(model.state_dict()))


# --- explain ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_explain_gives_the_report_and_keeps_nothing(layer: type[nn.Module], x: Tensor) -> None:
    model = layer()
    state = torch.get_rng_state()
    weights = copy.deepcopy(model.state_dict())
    report = attngraph.explain(model, x)
    assert len(report.attention) == 1
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("whole", [True, False], ids=["captured whole", "captured in pieces"])
def test_explain_writes_to_no_buffer(whole: bool, attention: Callable[..., Tensor]) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = attention(self.norm(x))
            if not whole and y.sum() > 0:
                y = y * 2
            return y

    model = Normed()
    before = copy.deepcopy(model.state_dict())
    report = attngraph.explain(model, torch.randn(2, 4, 5))
    assert bool(report.breaks) != whole
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_nothing_is_traced_before_the_first_call(layer: type[nn.Module], x: Tensor) -> None:
    compiled = attngraph.compile(layer())
    assert compiled.report.graphs == 0
    compiled(x)
    compiled(x)
    assert compiled.report.graphs == 1
