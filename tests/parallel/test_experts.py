"""Mixtures of experts on simulated ranks: each has some of the experts, whole, and computes their tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.ir.ops.experts import EXPERT_ROWS
from attngraph.report.ranks import RanksEntry

pytest.importorskip("transformers.integrations.moe")
Compared = Callable[..., RanksEntry]


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


@pytest.mark.parametrize("experts, ranks", [(4, 2), (8, 2), (8, 4)])
def test_experts_are_divided_whole_where_there_are_more_than_ranks(
    same_on_ranks: Compared, experts: int, ranks: int
) -> None:
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    entry = same_on_ranks(Mixture(experts), ranks, x)
    assert [(e.what, e.count) for e in entry.divided] == [("experts", experts)]
    assert [(s.what, s.bytes_per_token) for s in entry.sent] == [("all-reduce", 128)], (
        "after the sum of a token"
    )
    whole = {name for name, _, _ in entry.whole}
    assert whole == {"gate.weight", "bias"}


@pytest.mark.parametrize("experts, ranks", [(2, 2), (4, 4), (6, 4)])
def test_hidden_units_are_divided_where_ranks_would_have_one_expert_or_unequally_many(
    same_on_ranks: Compared, experts: int, ranks: int
) -> None:
    entry = same_on_ranks(Mixture(experts), ranks, torch.randn(2, 5, 16, dtype=torch.float64))
    assert [(e.what, e.count) for e in entry.divided] == [("hidden units", 24)]


def test_units_that_depend_on_other_tokens_are_not_those_of_single_experts(same_on_ranks: Compared) -> None:
    """A softmax over all sorted tokens: a rank would need the units of tokens that are not its own."""
    mixture = Mixture(8, lambda units: units.softmax(0))
    entry = same_on_ranks(mixture, 2, torch.randn(2, 5, 16, dtype=torch.float64))
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
