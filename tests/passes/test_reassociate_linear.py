"""reassociate-linear: products of scores and values without a softmax are summed over the keys first, with
the same answers and nothing of size tokens x tokens; what does not grow with the tokens stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from attngraph.meaning.attention import linear

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT) @ v


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd->bqhd", torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.1, v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).tril() @ v


def causal_times_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(q.shape[2], q.shape[2], dtype=q.dtype).tril()
    return ((q @ k.mT) * keep) @ v


def normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    weights = (q @ k.mT).tril()
    return (weights / weights.sum(-1, keepdim=True)) @ v


def divided_afterwards(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    weights = q @ k.mT
    return weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)


def of_softmaxed_features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    features = (q @ torch.ones(8, 8, dtype=q.dtype).tril()).softmax(-1)
    weights = (features @ k.exp().mT).tril()
    return weights @ v / weights.sum(-1, keepdim=True)


FORMS: dict[str, tuple[Function, int]] = {
    **{f.__name__: (f, 1) for f in (plain, scaled, causal, causal_times_a_mask)},
    **{f.__name__: (f, 2) for f in (normalised, divided_afterwards, of_softmaxed_features)},
}


def qkv(tokens: int) -> list[Tensor]:
    return [t.requires_grad_() for t in torch.randn(3, 2, 4, tokens, 8, dtype=torch.float64).unbind()]


def notes(compiled: attngraph.CompiledModule) -> tuple[str, ...]:
    (step,) = (p for p in compiled.report.passes if p.name == "reassociate-linear")
    return step.notes


def noted(function: Callable[..., Any], *inputs: Tensor) -> tuple[str, ...]:
    """The pass's notes on a function, whose answers are eager's."""
    compiled = attngraph.compile(function, min_scores=0)
    torch.testing.assert_close(compiled(*inputs), function(*inputs), atol=1e-10, rtol=1e-10)
    return notes(compiled)


SUMMED = "causal, keys and values are summed first"


@pytest.mark.parametrize("name", FORMS)
def test_keys_and_values_are_summed_first_with_the_answers_of_eager(name: str) -> None:
    function, sums = FORMS[name]
    compiled = attngraph.compile(function)
    for tokens in (7, 150, 64):
        inputs = qkv(tokens)
        mine, theirs = compiled(*inputs), function(*inputs)
        assert torch.allclose(mine, theirs, atol=1e-9)
        for a, b in zip(*(torch.autograd.grad(y.sum(), inputs) for y in (mine, theirs)), strict=True):
            assert torch.allclose(a, b, atol=1e-8)
    assert len(notes(compiled)) == sums
    assert all("keys and values are summed first" in note for note in notes(compiled))
    assert not compiled.report.attention and compiled.report.graphs == 1


@pytest.mark.parametrize("name", FORMS)
def test_no_value_of_the_graph_is_as_large_as_the_scores(name: str) -> None:
    compiled = attngraph.compile(FORMS[name][0])
    tokens = 300
    with torch.no_grad():
        compiled(*qkv(tokens))
    ((graph,),) = compiled._graphs.values()
    shapes = [
        n.meta["val"].shape for n in graph.captured.graph.graph.nodes if isinstance(n.meta.get("val"), Tensor)
    ]
    scores = [s for s in shapes if len(s) > 3 and s[-1] == s[-2]]
    assert not scores


def test_more_keys_than_queries_and_shared_key_heads() -> None:
    def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k[:, :1].mT) @ v[:, :1]

    assert noted(shared, *(torch.randn(2, 4, t, 8, dtype=torch.float64) for t in (5, 9, 9)))


def test_two_linear_layers_in_a_row_stay_two() -> None:
    model = nn.Sequential(nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)).double()
    compiled = attngraph.compile(model)
    x = torch.randn(3, 40, 16, dtype=torch.float64)
    assert torch.equal(compiled(x), model(x))
    assert not notes(compiled)


def test_scores_that_are_returned_as_well_are_left_as_they_are() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ k.mT
        return scores @ v, scores

    compiled = attngraph.compile(both)
    inputs = qkv(7)
    for mine, theirs in zip(compiled(*inputs), both(*inputs), strict=True):
        assert torch.equal(mine, theirs)
    assert not notes(compiled)


def decayed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[2])
    behind = i[:, None] - i
    return (q @ k.mT * torch.where(behind >= 0, 0.9 ** behind.to(q.dtype), 0.0)) @ v


CURVED = "its weights are a function of the scores other than a multiple"
IN_THE_WAY: dict[str, tuple[Function, str]] = {
    "a square": (lambda q, k, v: (q @ k.mT) ** 2 @ v, CURVED),
    "a cube": (lambda q, k, v: (q @ k.mT) ** 3 @ v, CURVED),
    "a decay": (decayed, "depends on query and key together (a decay, say)"),
    "a window": (
        lambda q, k, v: (q @ k.mT).tril().triu(-2) @ v,
        "its mask is neither causal nor none (causal & window(3))",
    ),
}


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_what_stands_in_the_way_is_told(name: str) -> None:
    function, reason = IN_THE_WAY[name]
    (note,) = noted(function, *qkv(7))
    assert reason in note


@pytest.mark.parametrize("shape", [(2, 7, 16), (7, 16)], ids=str)
def test_values_that_are_a_product_themselves_are_not_taken_for_scores(shape: tuple[int, ...]) -> None:
    """Without a head axis the values are a projection, with nothing moved after it."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
            self.register_buffer("tril", torch.ones(32, 32).tril())

        def forward(self, x: Tensor) -> Tensor:
            t = x.shape[-2]
            q, k = F.elu(self.q(x)) + 1, F.elu(self.k(x)) + 1
            weights = (q @ k.mT / 4).masked_fill(self.tril[:t, :t] == 0, 0)  # type: ignore[index]
            return weights @ self.v(x) / weights.sum(-1, keepdim=True)

    told = noted(Layer().double(), torch.randn(*shape, dtype=torch.float64))
    assert [note.split(": ")[1] for note in told] == [SUMMED] * 2


def test_products_with_joined_products_are_left_without_a_fault() -> None:
    def joined(x: Tensor, w: Tensor, y: Tensor, u: Tensor, z: Tensor, t: Tensor) -> Tensor:
        return (x @ w) @ torch.cat([y @ u, z @ t], -2).mT

    rows = [torch.randn(2, tokens, 4, dtype=torch.float64) for tokens in (9, 6, 7)]
    x, y, z = rows
    w, u, t = torch.randn(3, 4, 5, dtype=torch.float64).unbind()
    compiled = attngraph.compile(joined)
    assert torch.equal(compiled(x, w, y, u, z, t), joined(x, w, y, u, z, t))
    assert not any("error of the compiler" in note for note in notes(compiled))


def test_layers_are_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ModuleList(nn.Linear(16, 32, bias=False) for _ in range(3))
            self.down = nn.ModuleList(nn.Linear(32, 16, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for up, down in zip(self.up, self.down, strict=True):
                x = x + down(F.gelu(up(x)))
            return x

    looked_into: list[object] = []
    find = linear.dots.find_dot
    monkeypatch.setattr(linear.dots, "find_dot", lambda *a: (looked_into.append(a), find(*a))[1])
    compiled, x = attngraph.compile(Residual(), min_scores=0), torch.randn(2, 5, 16)
    compiled(x)
    assert not looked_into and not notes(compiled)
    attngraph.compile(plain, min_scores=0)(*qkv(7))
    assert looked_into


class Projected(nn.Module):
    """Queries, keys and values from layers, by each of two spellings of projections."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1) if self.packed else [layer(x) for layer in self.layers]
        return (q @ k.mT).tril() @ v


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rows", [(), (2,), (2, 3)])
def test_values_that_are_a_layers_own_product_are_no_scores(packed: bool, rows: tuple[int, ...]) -> None:
    model = Projected(packed).double()
    for tokens in (9, 40):
        told = noted(model, torch.randn(*rows, tokens, 8, dtype=torch.float64))
        assert [note.split(": ")[1] for note in told] == [SUMMED]


def test_operands_that_are_rounded_each_for_itself_are_multiplied_in_one_dtype(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def f(x: Tensor) -> Tensor:
        t = x.chunk(2, 1)[0]
        q, k, v = t.half(), t.half(), t.half()
        return ((q @ k.mT).tril() @ v).isnan().any()

    x = torch.randn(2, 9, 6)
    assert torch.equal(attngraph.compile(f, min_scores=0)(x), f(x))
    assert not [r for r in caplog.records if r.exc_info]


def rows_of_a_triangular_system(steps: int) -> Function:
    """Each row is a sum over the rows before it, weighted by products."""

    def solve(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = q @ k.mT
        for n in range(1, steps):
            row = rows[..., n, :n] + (rows[..., n, :n, None] * rows[..., :n, :n]).sum(-2)
            row = F.pad(row, (0, steps - n))[..., None, :]
            rows = torch.cat((rows[..., :n, :], row, rows[..., n + 1 :, :]), -2)
        return rows @ v

    return solve


def test_a_system_solved_row_by_row_is_not_looked_into_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_into: list[object] = []
    examine = linear.examine
    monkeypatch.setattr(linear, "examine", lambda *a: (looked_into.append(a), examine(*a))[1])
    solve, given = rows_of_a_triangular_system(32), torch.randn(3, 1, 2, 32, 32, dtype=torch.float64)
    noted(solve, *given)
    assert 0 < len(looked_into) < 31
