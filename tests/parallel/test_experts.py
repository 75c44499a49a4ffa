"""Mixtures of experts on simulated ranks: each has some of the experts, whole, and computes their tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.ir.ops.others import EXPERT_ROWS
from attngraph.report.ranks import RanksEntry

pytest.importorskip("transformers.integrations.moe")
Compared = Callable[..., RanksEntry]
X = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Mixture(nn.Module):
    """Tokens sorted by expert, two products with the weights of each one's expert, and the way back.
    `between` is computed from the hidden units of all sorted tokens."""

    def __init__(self, experts: int, between: Callable[[Tensor], Tensor] = nn.functional.silu) -> None:
        super().__init__()
        self.gate, self.between = nn.Linear(16, experts, bias=False), between
        self.up = nn.Parameter(torch.randn(experts, 16, 48) / 4)
        self.down = nn.Parameter(torch.randn(experts, 24, 16) / 4)
        self.bias = nn.Parameter(torch.randn(experts, 48))

    def forward(self, x: Tensor) -> Tensor:
        flat, experts = x.flatten(0, 1), len(self.up)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        chosen, order = chosen.flatten().sort(stable=True)
        ends = torch.histc(chosen.float(), experts, 0, experts - 1).cumsum(0).to(torch.int32)
        y = torch.ops.transformers.grouped_mm_fallback(flat[order // 2], self.up, ends) + self.bias[chosen]
        a, b = y.chunk(2, -1)
        y = torch.ops.transformers.grouped_mm_fallback(self.between(a) * b, self.down, ends)
        y = y * weights.flatten()[order].unsqueeze(-1)
        places = torch.empty_like(order).index_put((order,), torch.arange(len(order)))
        return y[places].view(-1, 2, 16).sum(1).view(x.shape)


@pytest.mark.parametrize(
    ("experts", "ranks", "whole"),
    [(8, 4, True), (6, 4, False), (4, 2, True), (8, 2, True), (2, 2, False), (4, 4, False)],
)
def test_experts_are_divided_whole_or_by_hidden_units_where_ranks_would_have_one_or_unequally_many(
    same_on_ranks: Compared, experts: int, ranks: int, whole: bool
) -> None:
    entry = same_on_ranks(Mixture(experts), ranks, X)
    assert [(e.what, e.count) for e in entry.divided] == [
        ("experts", experts) if whole else ("hidden units", 24)
    ]
    assert not whole or {name for name, _, _ in entry.whole} == {"gate.weight", "bias"}
    after = [(s.what, s.bytes_per_token) for s in entry.sent]
    assert not whole or after == [("all-reduce", 128)], "after the sum of a token"


def test_units_that_depend_on_other_tokens_are_not_those_of_single_experts(same_on_ranks: Compared) -> None:
    """A softmax over all sorted tokens: a rank would need the units of tokens that are not its own."""
    entry = same_on_ranks(Mixture(8, lambda units: units.softmax(0)), 2, X)
    assert "experts" not in {e.what for e in entry.divided}


@pytest.mark.parametrize("first, count", [(0, 2), (1, 2), (3, 1), (0, 4)])
def test_rows_of_some_experts(first: int, count: int) -> None:
    """The op by itself, beside a product for each token; an expert without tokens among them."""
    ends = torch.tensor([3, 3, 4, 9])
    x = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 6, 5, dtype=torch.float64, requires_grad=True)
    of = torch.searchsorted(ends, torch.arange(9), right=True)
    own = ((of >= first) & (of < first + count)).unsqueeze(-1)
    wanted = torch.where(own, torch.einsum("sd,sdh->sh", x, weight[of]), 0.0)
    found = EXPERT_ROWS(x, weight[first : first + count], ends, torch.tensor([first]))
    torch.testing.assert_close(found, wanted)
    grad = torch.randn_like(wanted)
    grads: list[Any] = [torch.autograd.grad(y, (x, weight), grad) for y in (found, wanted)]
    torch.testing.assert_close(*grads)


def test_a_rank_computes_its_own_tokens_alone() -> None:
    """The rows of other experts are not looked at."""
    x = torch.full((6, 4), float("nan"))
    x[2:5] = 1.0
    found = EXPERT_ROWS(x, torch.ones(1, 4, 3), torch.tensor([2, 5, 6]), torch.tensor([1]))
    assert torch.equal(found, torch.tensor([0.0, 0, 4, 4, 4, 0]).unsqueeze(-1).expand(-1, 3))


def test_experts_and_tokens_divided_together() -> None:
    """Tokens that are sorted by expert are no single tokens: every rank of that axis computes them all."""
    torch.manual_seed(0)
    model, x = Mixture(8).double(), torch.randn(2, 8, 16, dtype=torch.float64)
    compiled = attngraph.compile(model, mesh=attngraph.SimulatedMesh(tensor=2, context=2))
    torch.testing.assert_close(compiled(x), model(x))
    assert [e.what for e in compiled.report.ranks.divided] == ["experts"]


class Written(nn.Module):
    """A mixture by its formula, `of(x, weights, up, bias, down, out)`, with tokens `[B, T, 16]`."""

    def __init__(self, of: Callable[..., Tensor], experts: int = 6, units: int = 24) -> None:
        super().__init__()
        self.of, self.gate = of, nn.Linear(16, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 16, units) / 4)
        self.bias = nn.Parameter(torch.randn(experts, units) / 4)
        self.down = nn.Parameter(torch.randn(experts, units, 16) / 4)
        self.out = nn.Parameter(torch.randn(experts, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x, self.gate(x), self.up, self.bias, self.down, self.out)


def _einsum(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor, down: Tensor, out: Tensor) -> Tensor:
    """All experts compute all tokens."""
    hidden = nn.functional.silu(torch.einsum("btd,edh->bteh", x, up) + bias)
    y = torch.einsum("bteh,ehd->bted", hidden, down) + out
    return (y * gate.sigmoid().unsqueeze(-1)).sum(2)


def _softmax(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor, down: Tensor, out: Tensor) -> Tensor:
    """The same, and a softmax over experts: an attention, of which they are the values."""
    hidden = nn.functional.silu(torch.einsum("btd,edh->bteh", x, up))
    return (torch.einsum("bteh,ehd->bted", hidden, down) * gate.softmax(-1).unsqueeze(-1)).sum(2)


def _batched(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor, down: Tensor, out: Tensor) -> Tensor:
    """All experts in one batched product; the router keeps two of them."""
    flat, count = x.flatten(0, 1), len(up)
    kept, chosen = gate.flatten(0, 1).topk(2, -1)
    weights = torch.zeros_like(gate.flatten(0, 1)).scatter(1, chosen, kept.softmax(-1))
    tokens = flat.repeat(count, 1).view(count, len(flat), -1)
    y = torch.bmm(nn.functional.gelu(torch.bmm(tokens, up) + bias[:, None]), down) + out[:, None]
    return (y * weights.t().unsqueeze(-1)).sum(0).view(x.shape)


def _gathered(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor, down: Tensor, out: Tensor) -> Tensor:
    """`W[ids]`: each token has the matrices of its own experts."""
    weights, ids = gate.softmax(-1).topk(2, -1)
    hidden = nn.functional.gelu(torch.einsum("btd,btkdh->btkh", x, up[ids]) + bias[ids])
    y = torch.einsum("btkh,btkhd->btkd", hidden, down[ids]) + out[ids]
    return torch.einsum("btkd,btk->btd", y, weights)


def _one_by_one(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor, down: Tensor, out: Tensor) -> Tensor:
    """A loop over experts."""
    weights, y = gate.softmax(-1), torch.zeros_like(x)
    for n in range(len(up)):
        y = y + weights[..., n : n + 1] * (nn.functional.silu(x @ up[n] + bias[n]) @ down[n] + out[n])
    return y


@pytest.mark.parametrize("of", [_gathered, _einsum, _softmax, _batched, _one_by_one])
def test_experts_of_any_spelling_are_divided_and_added_up_once(
    same_on_ranks: Compared, of: Callable[..., Tensor]
) -> None:
    """One sum over ranks of a token's width, after its experts are added."""
    entry = same_on_ranks(Written(of), 4, X)
    assert {e.what for e in entry.divided} == {"hidden units"}
    assert [(s.what, s.bytes_per_token) for s in entry.sent] == [("all-reduce", 128)]
    assert {name for name, _, _ in entry.whole} <= {"gate.weight", "out"}


def _mixed(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor, down: Tensor, out: Tensor) -> Tensor:
    """What is computed from hidden units is no sum of them."""
    weights, ids = gate.softmax(-1).topk(2, -1)
    hidden = torch.einsum("btd,btkdh->btkh", x, up[ids]).softmax(-1)
    return torch.einsum("btkh,btkhd,btk->btd", hidden, down[ids], weights)


def _bent(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor, down: Tensor, out: Tensor) -> Tensor:
    """Between the experts and their sum stands what is not linear."""
    hidden = nn.functional.silu(torch.einsum("btd,edh->bteh", x, up))
    return torch.einsum("bteh,ehd->bted", hidden, down).tanh().sum(2)


def test_units_that_are_normalised_are_not_divided_nor_is_added_up_after_what_is_not_linear(
    same_on_ranks: Compared,
) -> None:
    entry = same_on_ranks(Written(_mixed), 2, X)
    assert not entry.divided and {"up", "down"} <= {name for name, _, _ in entry.whole}
    entry = same_on_ranks(Written(_bent), 2, X)
    assert [(s.what, s.bytes_per_token) for s in entry.sent] == [("all-reduce", 6 * 128)]


class Shared(nn.Module):
    """Experts whose weighted sum is one of float32 values, and an MLP that all tokens go to; each is cast to
    their dtype and added, or (`late`) they are added in float32."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late, self.experts = late, Written(self._mixed, units=24)
        self.one, self.two = nn.Linear(16, 24), nn.Linear(24, 16)

    def _mixed(
        self, x: Tensor, gate: Tensor, up: Tensor, bias: Tensor, down: Tensor, out: Tensor
    ) -> Tensor:  # fmt: skip
        hidden = nn.functional.silu(torch.einsum("btd,edh->bteh", x, up))
        wide = gate.dtype if gate.dtype == torch.float64 else torch.float32
        y = torch.einsum("bteh,ehd->bted", hidden, down).to(wide)
        return 0.5 * (y * gate.to(wide).sigmoid().unsqueeze(-1)).sum(2)

    def forward(self, x: Tensor) -> Tensor:
        mixed, shared = self.experts(x), self.two(self.one(x).relu())
        if self.late:
            return (mixed + shared.to(mixed.dtype)).to(x.dtype)
        return mixed.to(x.dtype) + shared


@pytest.mark.parametrize(
    ("dtype", "late", "sent"),
    [(torch.bfloat16, False, [32]), (torch.float16, False, [64, 32]), (torch.float16, True, [64])],
)
def test_experts_and_the_one_of_all_tokens_are_added_up_together(
    dtype: torch.dtype, late: bool, sent: list[int]
) -> None:
    """A cast stands before the sum where it keeps the range, which float16 does not, or all numbers."""
    torch.manual_seed(0)
    model, x = Shared(late).to(dtype), torch.randn(2, 5, 16, dtype=dtype)
    compiled = attngraph.compile(model, mesh=attngraph.SimulatedMesh(tensor=2))
    with torch.no_grad():
        found, eager = compiled(x).double(), model(x).double()
        wanted = model.double()(x.double())
    worst = float((found - wanted).abs().max())
    assert worst <= 2 * float((eager - wanted).abs().max()) + torch.finfo(dtype).eps
    assert [s.bytes_per_token for s in compiled.report.ranks.sent] == sent


@pytest.mark.parametrize("late", [False, True])
def test_gradients_of_experts_added_up_together(same_on_ranks: Compared, late: bool) -> None:
    entry = same_on_ranks(Shared(late), 4, X)
    assert [s.bytes_per_token for s in entry.sent] == [128]
