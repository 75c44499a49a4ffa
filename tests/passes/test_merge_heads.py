"""merge-heads: attentions of separate heads become one, with the answers of the separate ones; what is no
set of heads stays apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph

H, D = 4, 8


def one_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, slope: float = 0.0) -> Tensor:
    i = torch.arange(q.shape[-2])
    scores = q @ k.mT / math.sqrt(D) + slope * (i[None] - i[:, None])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def slices_of_one_tensor(x: Tensor) -> Tensor:
    q, k, v = x.chunk(3, -1)
    heads = [slice(h * D, (h + 1) * D) for h in range(H)]
    return torch.cat([one_head(q[..., h], k[..., h], v[..., h]) for h in heads], -1)


def stacked(x: Tensor) -> Tensor:
    q, k, v = x.unflatten(-1, (3, H, D)).permute(2, 3, 0, 1, 4)
    return torch.stack([one_head(q[h], k[h], v[h]) for h in range(H)], 1)


def one_key_head(x: Tensor) -> Tensor:
    q, k, v = x.chunk(3, -1)
    return torch.cat([one_head(q[..., h * D : (h + 1) * D], k[..., :D], v[..., :D]) for h in range(H)], -1)


def slopes_by_head(x: Tensor) -> Tensor:
    q, k, v = x.unflatten(-1, (3, H, D)).permute(2, 3, 0, 1, 4)
    return torch.cat([one_head(q[h], k[h], v[h], slope=2.0 ** -(h + 1)) for h in range(H)], -1)


def windows_by_head(x: Tensor) -> Tensor:
    q, k, v = x.unflatten(-1, (3, H, D)).permute(2, 3, 0, 1, 4)
    i = torch.arange(x.shape[1])
    masks = [(i[None] <= i[:, None]) & (i[None] > i[:, None] - 2 * h - 2) for h in range(H)]
    return torch.cat([one_head(q[h], k[h], v[h], masks[h]) for h in range(H)], -1)


class Heads(nn.Module):
    """A ModuleList of heads with weights and dropout of their own."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(3 * H * D, 3 * D, dtype=torch.float64) for _ in range(H))
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for part in self.parts:
            q, k, v = part(x).chunk(3, -1)
            weights = F.dropout((q @ k.mT).softmax(-1), self.rate, self.training)
            found.append(weights @ v)
        return torch.cat(found, -1)


def inputs(tokens: int = 7) -> Tensor:
    return torch.randn(2, tokens, 3 * H * D, dtype=torch.float64)


CASES: dict[str, tuple[Callable[[], Callable[..., Any]], int]] = {
    "slices of one tensor": (lambda: slices_of_one_tensor, H),
    "stacked": (lambda: stacked, H),
    "one key head": (lambda: one_key_head, 1),
    "slopes by head": (lambda: slopes_by_head, H),
    "windows by head": (lambda: windows_by_head, H),
    "a ModuleList": (Heads, H),
}


@pytest.mark.parametrize("name", CASES)
def test_heads_become_one_attention_with_the_answers_of_eager(name: str) -> None:
    make, kv_heads = CASES[name]
    model = make()
    compiled = attngraph.compile(model)
    for tokens in (7, 11):
        x = inputs(tokens).requires_grad_()
        mine, theirs = compiled(x), model(x)
        assert torch.allclose(mine, theirs, atol=1e-10)
        grads = (torch.autograd.grad(y.square().sum(), x)[0] for y in (mine, theirs))
        assert torch.allclose(*grads, atol=1e-9)
    report = compiled.report
    (entry,) = report.attention
    assert (entry.heads, entry.kv_heads, entry.merged) == (H, kv_heads, H)
    assert report.graphs == 1
    assert f"merged from {H} attentions" in str(report)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_heads_that_autocast_converts_one_by_one_become_one_attention(name: str, dtype: torch.dtype) -> None:
    make, kv_heads = CASES[name]
    model = make()
    model = model.float() if isinstance(model, nn.Module) else model
    compiled, x = attngraph.compile(model), inputs().float()
    with torch.autocast("cpu", dtype):
        mine, theirs = compiled(x), model(x)
    assert mine.dtype == theirs.dtype
    assert torch.allclose(mine.double(), theirs.double(), atol=0.05)
    (entry,) = compiled.report.attention
    assert (entry.heads, entry.kv_heads, entry.merged) == (H, kv_heads, H)
    ((graph,),) = compiled._graphs.values()
    (whole,) = graph.captured.graph.attentions()
    assert {n.meta["val"].dtype for n in whole.args[:3]} == {dtype}  # type: ignore[union-attr]


def test_slices_of_one_tensor_are_not_copied() -> None:
    project = nn.Linear(3 * H * D, 3 * H * D, dtype=torch.float64)
    compiled = attngraph.compile(lambda x: slices_of_one_tensor(project(x)))
    with torch.no_grad():
        compiled(inputs())
    ((graph,),) = compiled._graphs.values()
    names = {str(n.target) for n in graph.captured.graph.graph.nodes}
    assert not any(n.startswith(("aten.cat", "aten.stack")) for n in names)


@pytest.mark.slow
def test_dropout_of_merged_heads_follows_the_seed_and_differs_by_head() -> None:
    model = Heads(0.5)
    compiled = attngraph.compile(model)
    x = inputs()
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(compiled(x))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    (entry,) = compiled.report.attention
    assert entry.merged == H and "[h]" in entry.program


def test_attentions_one_after_the_other_are_no_heads() -> None:
    def chained(x: Tensor) -> Tensor:
        q, k, v = x.chunk(3, -1)
        first = one_head(q, k, v)
        return torch.cat([first, one_head(first, k, v)], -1)

    compiled = attngraph.compile(chained)
    x = inputs()
    assert torch.allclose(compiled(x), chained(x), atol=1e-10)
    assert [a.merged for a in compiled.report.attention] == [1, 1]


def test_results_that_nothing_joins_stay_apart() -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = x.chunk(3, -1)
        return one_head(q, k, v), one_head(k, q, v)

    compiled = attngraph.compile(two)
    x = inputs()
    for mine, theirs in zip(compiled(x), two(x), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-10)
    assert [a.merged for a in compiled.report.attention] == [1, 1]
