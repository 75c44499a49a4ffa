"""Models that cannot be captured whole, torch.compile with us as its backend, strictness, and `explain`."""

import copy
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import attngraph
from tests.runtime.small import Of, SelfAttention, agree, attend, gradients, same, sequence


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _branching(m: nn.Module, x: Tensor) -> Tensor:
    """Two attentions and a branch on data between them."""
    y = attend(m.project(x), x)
    y = y * 2 if y.sum() > 0 else y - 1
    return attend(y, x)


def branching() -> nn.Module:
    return Of(_branching, project=nn.Linear(8, 8))


@pytest.mark.slow
def test_a_model_that_branches_on_data_runs_in_pieces_and_says_where_it_broke() -> None:
    calls = [sequence(tokens) * 0.1 + sign for tokens in (5, 6, 7) for sign in (1, -1)]
    report = agree(branching(), *calls, grads=True).report
    assert len(report.attention) >= 2
    assert report.breaks and report.breaks[0].reason
    assert report.breaks[0].source.endswith(f"test_pieces.py:{_line_of('y * 2 if y.sum() > 0')}")
    assert "captured in pieces" in str(report)


def test_a_piece_that_is_captured_again_for_other_sizes_is_told_once() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    model.register_forward_hook(lambda module, given, result: (result[0] * 2, result[1]))
    compiled = attngraph.compile(model)
    for tokens in (5, 6, 7):
        compiled(*[sequence(tokens)] * 3, need_weights=False)
    assert len(compiled.report.attention) == 1


def _line_of(text: str) -> int:
    with open(__file__, encoding="utf-8") as lines:
        return next(n for n, line in enumerate(lines, 1) if text in line)


def softmax_over_heads(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.mT, 0) @ x


def test_strict_names_the_line_and_what_to_do(x: Tensor) -> None:
    with pytest.raises(attngraph.CaptureError) as caught:
        attngraph.compile(branching(), strict=True)(x)
    problem = caught.value
    line = f"test_pieces.py:{_line_of('y * 2 if y.sum() > 0')}"
    assert problem.source.endswith(line) and line in str(problem)
    assert problem.reason and problem.reason in str(problem)
    assert "What to do:" in str(problem)
    with pytest.raises(attngraph.NotFusedError) as refused:
        attngraph.compile(softmax_over_heads, strict=True)(x)
    assert f"test_pieces.py:{_line_of('torch.softmax(x @ x.mT, 0)')}" in str(refused.value)
    assert "What to do:" in str(refused.value)


def test_every_error_of_ours_has_one_base() -> None:
    for kind in (attngraph.CaptureError, attngraph.NotFusedError, attngraph.VerificationError):
        assert issubclass(kind, attngraph.AttnGraphError)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_every_backend_that_runs_here_answers_as_eager(backend: str, x: Tensor) -> None:
    compiled = agree(SelfAttention(), x, backend=backend)
    kernel = compiled.report.attention[0].kernel.name
    assert kernel and (backend == "auto" or kernel.split(".")[0] == backend)


# --- torch.compile with our backend ------------------------------------------------------------------


@pytest.mark.slow
def test_the_backend_is_known_to_torch_compile_by_name_and_takes_options(x: Tensor) -> None:
    model = SelfAttention()
    compiled = torch.compile(model, backend="attngraph")
    for rows, tokens in ((2, 5), (3, 6), (2, 7), (1, 9)):
        x = sequence(tokens, rows, requires_grad=True)
        same(compiled(x), model(x))
        same(*(gradients(m(x), [x]) for m in (compiled, model)))
    with torch.no_grad():
        same(compiled(x), model(x))
    same(torch.compile(model, backend="attngraph", options={"backend": "reference"})(x), model(x))


@pytest.mark.slow
def test_the_backend_serves_dynamic_sizes_in_one_graph() -> None:
    model = SelfAttention()
    compiled = torch.compile(model, backend="attngraph", fullgraph=True, dynamic=True)
    for rows, tokens in ((2, 5), (3, 6), (2, 7)):
        x = sequence(tokens, rows)
        same(compiled(x), model(x))


@pytest.mark.slow
def test_the_backend_keeps_breaks_writes_and_side_effects() -> None:
    def f(x: Tensor, seen: list[int]) -> Tensor:
        seen.append(1)
        x = x + 1
        print(end="")
        y = attend(x)
        x.add_(1)
        return y + x

    compiled = torch.compile(f, backend="attngraph")
    seen: list[int] = []
    for tokens in (5, 6):
        x = torch.randn(2, tokens, 4)
        same(compiled(x, seen), f(x, []))
    assert len(seen) == 2


@pytest.mark.slow
def test_the_backend_writes_buffers() -> None:
    def counts(m: nn.Module, x: Tensor) -> Tensor:
        m.n.add_(1)
        return attend(m.norm(x))

    model = Of(counts, norm=nn.BatchNorm1d(4), n=nn.Buffer(torch.zeros(())))
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="attngraph")
    for _ in range(3):
        x = torch.randn(2, 4, 5)
        same(compiled(x), model(x))
    same(dict(other.state_dict()), dict(model.state_dict()))


# --- explain ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_explain_gives_the_report_and_keeps_nothing(x: Tensor) -> None:
    model = SelfAttention()
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
def test_explain_writes_to_no_buffer(whole: bool) -> None:
    def normed(m: nn.Module, x: Tensor) -> Tensor:
        y = attend(m.norm(x))
        if not whole and y.sum() > 0:
            y = y * 2
        return y

    model = Of(normed, norm=nn.BatchNorm1d(4))
    before = copy.deepcopy(model.state_dict())
    report = attngraph.explain(model, torch.randn(2, 4, 5))
    assert bool(report.breaks) != whole
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_nothing_is_traced_before_the_first_call(x: Tensor) -> None:
    compiled = attngraph.compile(SelfAttention())
    assert compiled.report.graphs == 0
    compiled(x)
    compiled(x)
    assert compiled.report.graphs == 1
