"""Where it shows how a value lies in memory, or which memory it is in, a graph has it as the model does."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from tests.runtime.small import agree, sequence


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


def attend(x: Tensor) -> Tensor:
    """Two heads, in memory by heads: a fused result lies by tokens."""
    k = heads(x).contiguous()
    return (k @ k.mT).softmax(-1) @ k


def _window(y: Tensor) -> Tensor:
    return y.as_strided((*y.shape[:2], y.shape[2] - 1, 2, y.shape[3]), (*y.stride()[:3], y.stride(2), 1))


READ: dict[str, Callable[[Tensor], Tensor]] = {
    "as_strided": _window,
    "as_strided of what is computed from it": lambda y: (y * 2 + 1).as_strided((6,), (3,), 2),
    "as_strided of a part": lambda y: y[:, :, 1:].as_strided((6,), (2,), 1),
    "as_strided of a turned one": lambda y: y.transpose(1, 2).as_strided((4, 4), (1, 2), 3),
    "as_strided_scatter": lambda y: y.as_strided_scatter(torch.zeros(6, dtype=y.dtype), (6,), (2,), 1),
    "a write through strides": lambda y: (y * 1).as_strided((6,), (5,)).fill_(3.0) + y.sum(),
    "kron": lambda y: torch.kron(torch.ones(1, 1, 1, 2, dtype=y.dtype), y),
    "a view as another dtype": lambda y: y.detach().view(torch.int64),
    "complex": lambda y: torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (2, 2)))),
}


def by_exponentials(x: Tensor) -> Tensor:
    """The same, computed by sums of exponentials: its result follows from weights element by element."""
    k = heads(x).contiguous()
    scores = k @ k.mT
    top = torch.full((*k.shape[:-1], 1), -torch.inf, dtype=k.dtype)
    new = torch.maximum(top, scores.amax(-1, True))
    weights, rescaled = (scores - new).exp(), (top - new).exp()
    return (0 * rescaled + weights @ k) / (0 * rescaled + weights.sum(-1, True))


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("spelling", [attend, by_exponentials])
@pytest.mark.parametrize("name", READ)
def test_what_reads_by_memory_reads_the_models(name: str, spelling: Any, gradients: bool) -> None:
    as_int = name == "a view as another dtype"

    def model(x: Tensor) -> Tensor:
        found = READ[name](spelling(x))
        return found.view(torch.float64) if as_int else found

    calls = [sequence(n, dtype=torch.float64, requires_grad=gradients) for n in (5, 7)]
    agree(model, *calls, grads=gradients and not as_int, tolerance=1e-7, min_scores=0, fused=1)


def test_what_reads_the_memory_of_chosen_tokens_reads_the_models() -> None:
    """The order of dimensions in memory is not read from a call in which one of them has no extent."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        t = x[:, w]
        o = (t @ t.mT).softmax(-1) @ t[..., :1]
        return (o + 1)[..., 1:, :].as_strided(o.shape[:1], (2,))

    calls = [(torch.randn(3, 9, 8, dtype=torch.float64), torch.arange(9) < n) for n in (2, 4, 3, 7)]
    agree(model, *calls, min_scores=0, fused=1)


class Results(nn.Module):
    def __init__(self, results: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("count", torch.zeros(4))
        self.__dict__["results"] = results

    def forward(self, x: Tensor) -> Any:
        return self.results(x, self)


def _written(x: Tensor, m: Any) -> Any:
    x.add_(1)
    return attend(x), x, x[:, 0]


def _written_whole(x: Tensor, m: Any) -> Any:
    x.add_(1)
    return attend(x), x, x


def _written_buffer(x: Tensor, m: Any) -> Any:
    m.count.add_(1)
    return attend(x), m.count


def _written_view(x: Tensor, m: Any) -> Any:
    y = attend(x) * 1
    first = y[:, 0]
    first.mul_(2)
    return y, first


def _kept(x: Tensor, m: Any) -> Any:
    y = attend(x)
    m.kept = y[:, 0]
    return y


RESULTS: dict[str, Callable[[Tensor, Any], Any]] = {
    "a view of another": lambda x, m: (y := attend(x), y[:, 0], y.transpose(1, 2)),
    "two views": lambda x, m: ((y := attend(x))[:, 1:], y[:, 0]),
    "a view and a copy": lambda x, m: (y := attend(x), y.transpose(1, 2).flatten(2), y.clone()),
    "the same twice": lambda x, m: (y := attend(x), y, y.contiguous()),
    "cut from gradients": lambda x, m: (y := attend(x), y.detach(), m.weight.detach()),
    "an argument": lambda x, m: (attend(x), x, x[:, 0]),
    "views of an argument": lambda x, m: (x.transpose(0, 1), x[:1], x.view(-1), x.detach(), attend(x)),
    "copies of an argument": lambda x, m: (x.clone(), x + 0, x.reshape(-1).clone(), attend(x)),
    "casts that do nothing": lambda x, m: (x.to(torch.float32), x.float(), x.contiguous(), attend(x)),
    "a parameter": lambda x, m: (attend(x), m.weight, m.weight.T, m.count),
    "weights": lambda x, m: (attend(x), p := (x @ x.mT).softmax(-1), p @ x, p[:, 0]),
    "an expanded result": lambda x, m: attend(x).sum(1, keepdim=True).expand(-1, 3, -1, -1),
    "heads joined": lambda x, m: attend(x).transpose(1, 2),
    "heads joined, contiguous": lambda x, m: attend(x).transpose(1, 2).contiguous(),
    "strided": lambda x, m: (attend(x)[:, :, ::2], attend(x).mT, heads(x) @ heads(x).mT),
    "an argument that is written": _written_whole,
    "what is written": _written,
    "a buffer that is written": _written_buffer,
    "a part that is written": _written_view,
    "an attribute": _kept,
}


def _relations(model: Any, call: Callable[[Tensor], Any], gradients: bool) -> list[Any]:
    """Which results, arguments and tensors of the model are one, or share memory, and how they lie."""
    x = torch.arange(80.0).sin().view(2, 5, 8)
    with torch.set_grad_enabled(gradients):
        results = call(x)
    tensors = [x, model.weight, model.count, *(results if isinstance(results, tuple) else (results,))]
    tensors += [model.kept] if hasattr(model, "kept") else []
    assert all(float(t.detach().sum()) < 1e9 for t in tensors)  # computes those that wait
    shared = [(a is b, a.data_ptr() and a.untyped_storage()._cdata == b.untyped_storage()._cdata)
              for a in tensors for b in tensors]  # fmt: skip
    return [shared, [(t.stride(), t.storage_offset(), t.requires_grad) for t in tensors]]


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", RESULTS)
def test_results_share_memory_as_the_models_do(name: str, gradients: bool) -> None:
    torch._dynamo.reset()
    model = Results(RESULTS[name])
    other = copy.deepcopy(model)
    compiled = attngraph.compile(model)
    for _ in range(2):
        assert _relations(model, compiled, gradients) == _relations(other, other, gradients)
    written = name.startswith(("what is", "a buffer"))
    assert bool(compiled.report.breaks) == written
    if written:
        assert "that it writes to, or a view of it" in compiled.report.breaks[0].reason


@pytest.mark.parametrize("name", ["a view of another", "an argument that is written"])
def test_a_saved_graph_gives_results_that_share_memory(name: str, tmp_path: Path) -> None:
    model = Results(RESULTS[name])
    compiled = attngraph.compile(model)
    expected = _relations(model, compiled, True)
    compiled.save(tmp_path / "saved")
    assert _relations(model, attngraph.load(tmp_path / "saved", model), True) == expected
    assert expected == _relations(model, model, True)


FOLLOWED: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "a fused result": lambda x: (y := attend(x), y.square()),
    "what another attention reads": lambda x: (
        y := (x @ x.mT).softmax(-1) @ x, (y @ y.mT).softmax(-1) @ y,
    ),
    "queries and values": lambda x: (
        q := x.unflatten(-1, (2, 4)).transpose(1, 2), v := q * 2, (q @ q.mT).softmax(-1) @ v,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_gradients_flow_through_results_that_others_follow_from(name: str) -> None:
    model, x, found = FOLLOWED[name], sequence(requires_grad=True), []
    compiled = attngraph.compile(model)
    for each in (model, compiled):
        *between, last = each(x)
        found.append(torch.autograd.grad(last.sum(), (x, *between)))
    torch.testing.assert_close(*found)
    assert compiled.report.attention and not compiled.report.breaks


@pytest.mark.parametrize("ask", [lambda x: x._is_view(), lambda x: x._base is not None])
def test_an_argument_that_is_a_view_is_another_call_if_the_model_asks(ask: Callable[[Tensor], bool]) -> None:
    """Its strides are those of one that is none."""

    def model(x: Tensor) -> Tensor:
        return attend(x) * (2.0 if ask(x) else 3.0)

    agree(model, sequence(), torch.randn(80).view(2, 5, 8), sequence(), min_scores=0, fused=1)


@pytest.mark.parametrize("autocast", [True, False])
def test_a_model_that_asks_how_often_its_argument_was_written_to_runs_as_it_is(autocast: bool) -> None:
    """Under autocast another mode stands between the model and the one that hears what it asks."""

    def model(x: Tensor) -> Tensor:
        return attend(x) * (1.0 + x._version)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        agree(model, sequence(), sequence().add_(1), min_scores=0)


def test_an_operation_in_pieces_reads_memory_whose_strides_are_of_other_sizes() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        t = torch.cat([x[:, :1], x[:, w]], 1)
        o = nn.functional.scaled_dot_product_attention(t, t, t[..., :1])
        return torch.kron(o, o[..., :1, :])

    sizes = (2, 17), (4, 4), (3, 6)
    calls = [(torch.randn(rows, n, 8, dtype=torch.float64), torch.arange(n) < 3) for rows, n in sizes]
    agree(model, *calls, min_scores=0)
