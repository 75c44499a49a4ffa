"""Some elements of a value, computed from parts of its operands, are those of the whole value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils import _pytree as pytree

import attngraph
from attngraph.capture.captured import Assumed
from attngraph.capture.trace import capture
from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.meaning.check import check
from attngraph.meaning.check.oracle import SEED, Oracle
from attngraph.meaning.check.parts import Box, Parts
from attngraph.meaning.check.region import region

ROWS, COLUMNS = (0, 3, 5, 11), (0, 2, 6)
WIDE = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def scores(x: Tensor) -> Tensor:
    return (x @ x.mT / 3).softmax(-1)


OF_PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "elementwise": lambda x: (x * 2 + x.exp()).clamp(-1, 1),
    "broadcast": lambda x: x + x[:1] + x[:, :1],
    "product": lambda x: x @ WIDE.mT,
    "scores": lambda x: x @ x[:5].mT,
    "linear": lambda x: F.linear(x, WIDE, WIDE[:, 0]),
    "softmax": lambda x: x.softmax(-1),
    "softmax_over_the_other_dimension": lambda x: x.softmax(0),
    "reductions": lambda x: x - x.amax(-1, keepdim=True) + x.sum(-1, keepdim=True) + x.max(-1, True)[0],
    "transposed": lambda x: (x.mT * 2).permute(1, 0),
    "split_in_two": lambda x: x.view(3, 4, 8).exp().view(12, 8),
    "flattened": lambda x: x.view(3, 4, 8).exp().transpose(0, 1).reshape(4, 24)[:3].reshape(12, 6),
    "padded_with_ones": lambda x: x.view(12, 1, 8, 1).exp().squeeze(1).reshape(1, 12, 8)[0],
    "heads": lambda x: x.view(12, 2, 4).transpose(0, 1).exp().transpose(0, 1).reshape(12, 8),
    "expanded": lambda x: x[:, :1].expand(12, 8) * x,
    "masked": lambda x: x.masked_fill(torch.ones(12, 8, dtype=torch.bool).tril(), -math.inf).exp(),
    "positions": lambda x: torch.where(torch.arange(12)[:, None] > torch.arange(8), x, 0.5),
    "zeros": lambda x: torch.zeros(12, 8, dtype=x.dtype) + x,
    "half_of_the_rows": lambda x: torch.cat([x, 2 * x]).exp().chunk(2)[0].clone(),
    "rows_from_the_third": lambda x: torch.cat([x, 2 * x]).exp()[2:14] + 1,
    "all_of_them": lambda x: x.exp().narrow(0, 0, 12).narrow(1, 0, 8) + 1,
    "turned": lambda x: x.roll(1, 0) + x.flip(0),
    "sums_so_far": lambda x: x.cumsum(0) + x.cumsum(1),
    "picked": lambda x: x[torch.arange(11, -1, -1)] + x.index_select(1, torch.arange(7, -1, -1)),
    "diagonal": lambda x: (x @ x.mT).diagonal()[:, None] + x,
    "square": lambda x: scores(x) @ x,
    "sorted": lambda x: x.sort(-1)[0] + x.sort(0)[0],
    "einsum": lambda x: torch.einsum("sd,td->st", x, x * 2) @ x,
    "convolution": lambda x: F.conv1d(x.mT[None], WIDE[:8, :, None])[0].mT.exp(),
    "sdpa": lambda x: F.scaled_dot_product_attention(x[None], x[None] * 2, x[None])[0],
    "causal_sdpa": lambda x: F.scaled_dot_product_attention(x[None], x[None] * 2, x[None], is_causal=True)[0],
    "norm": lambda x: F.layer_norm(x, (8,)),
    "dropout": lambda x: F.dropout(x.exp(), 0.5),
}  # fmt: skip


def traced(function: Callable[..., Any], *operands: Tensor) -> tuple[ProgramGraph, list[fx.Node]]:
    """A function's graph in which every size is a number, and the nodes of its results."""
    fixed = frozenset((place, dim) for place, x in enumerate(operands) for dim in range(x.ndim))
    graph = capture(function, operands, {}, Assumed(fixed)).graph
    return graph, list(graph.graph.output_node().all_input_nodes)


def both(graph: ProgramGraph, node: fx.Node, box: Box, *operands: Tensor) -> tuple[Tensor, Tensor]:
    """A part of a value, and the same part of the whole value."""
    arguments = iter(operands)
    given = {
        node: next(arguments) if i.kind == "argument" else WIDE
        for node, i in zip(graph.placeholders(), graph.inputs, strict=True)
    }
    order = region([node], ())
    (whole,) = Oracle().evaluate(order, given, [node])
    (part,) = Parts(given, {}).evaluate(Oracle(), given, [(node, box)])
    for dim, indices in enumerate(box):
        whole = whole if indices is None else whole.index_select(dim, torch.tensor(indices))
    return part, whole


@pytest.mark.parametrize("name", OF_PARTS)
@pytest.mark.parametrize(
    "box", [(ROWS, None), (None, COLUMNS), (ROWS, COLUMNS)], ids=["rows", "columns", "both"]
)
def test_a_part_has_the_values_of_the_whole(name: str, box: Box) -> None:
    x = torch.randn(12, 8, dtype=torch.float64)
    graph, (node,) = traced(OF_PARTS[name], x)
    box = (box[0], None if box[1] is None else tuple(i for i in box[1] if i < node.meta["val"].shape[1]))
    part, whole = both(graph, node, box, x)
    assert part.shape == whole.shape
    torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize(
    "name", ["square", "split_in_two", "heads", "einsum", "masked", "dropout", "softmax"]
)
def test_rows_take_no_more_of_an_operand_than_they_need(name: str) -> None:
    graph, (node,) = traced(OF_PARTS[name], torch.randn(12, 8, dtype=torch.float64))
    order = Parts(frozenset(graph.placeholders()), {}).order([(node, ((0, 5), None))])
    wholes = [
        n for n, box in order if not any(box) and n.op == "call_function" and n.meta["val"].numel() >= 96
    ]
    keys = {"square": ["transpose"], "einsum": ["mul"], "masked": ["ones", "tril"]}
    assert [n.name for n in wholes] == keys.get(name, [])


PROGRAM = """
s = 0.3 * dot + r0[h, q, k] + 0.1 * b
keep k <= q + h
p = p * (random(r1[], b, h, q, k) < 0.5)
"""


def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seed: Tensor) -> Tensor:
    results: tuple[Tensor, Tensor] = torch.ops.attngraph.attention(
        q, k, v, [bias, seed], [], PROGRAM, "reference"
    )
    return results[0]


@pytest.mark.parametrize("box", [
    (None, None, (0, 3, 6), None), (None, (1, 2), None, None), ((1,), (0, 3), (2, 5), (0, 2)),
    (None, None, None, (1, 2)),
])  # fmt: skip
def test_some_queries_of_an_attention_keep_their_places(box: Box) -> None:
    q, k, v, bias = (
        torch.randn(n, dtype=torch.float64) for n in ((2, 4, 7, 5), (2, 2, 9, 5), (2, 2, 9, 3), (4, 7, 9))
    )
    operands = (q, k, v, bias, torch.tensor(SEED))
    graph, (node,) = traced(attended, *operands)
    part, whole = both(graph, node, box, *operands)
    torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-12)


class Map(torch.nn.Module):
    """Attention among the pixels of a map, as diffusion models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Conv2d(16, 48, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.reshape(x.shape[0], 16, -1) for t in self.qkv(x).chunk(3, 1))
        mixed: Tensor = (q.mT @ k / 4).softmax(-1) @ v.mT
        return mixed.mT.reshape(x.shape)


@pytest.mark.parametrize("training", [False, True])
def test_a_large_map_of_fixed_size_is_checked_in_little_memory(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Map().requires_grad_(training), torch.randn(1, 16, 64, 64)
    largest, compute = 0, Oracle.compute

    def watched(self: Oracle, node: fx.Node, *given: Any) -> Any:
        nonlocal largest
        found = compute(self, node, *given)
        largest = max([largest, *(8 * t.numel() for t in pytree.tree_leaves(found) if isinstance(t, Tensor))])
        return found

    monkeypatch.setattr(Oracle, "compute", watched)
    compiled = attngraph.compile(model)
    compiled(x)
    assert len(compiled.report.attention) == 1, compiled.report.missed
    assert 0 < largest < budgets.SAMPLE_BYTES


@pytest.mark.parametrize("wrong", ["scale", "mask", "values"])
def test_a_wrong_claim_is_seen_in_part(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        late = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(1)
        first = (q @ k.mT * 0.3).masked_fill(late, -math.inf).softmax(-1) @ v
        factor = 0.3001 if wrong == "scale" else 0.3
        late = late.roll(1, 1) if wrong == "mask" else late
        second = (q @ k.mT * factor).masked_fill(late, -math.inf).softmax(-1) @ (
            v.flip(0) if wrong == "values" else v
        )
        return first, second

    operands = [torch.randn(64, 8) for _ in range(3)]
    graph, (old, new) = traced(model, *operands)
    monkeypatch.setattr(budgets, "SAMPLE_BYTES", 1 << 15)
    leaves = graph.placeholders()
    assert check.same_value(graph, old, old, leaves).problem == ""
    problem = check.same_value(graph, old, new, leaves).problem
    assert "differs" in problem or "NaN in other places" in problem
