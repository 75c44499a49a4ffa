"""What the report says of softmaxes that are left alone: true, and in the words of the model."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attngraph


def why(model: Callable[..., Any], *operands: Tensor) -> list[str]:
    """The reasons for what was left alone."""
    return [missed.reason for missed in attngraph.explain(model, *operands).missed]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, 4, 7, 8), normal(2, 4, 9, 8), normal(2, 4, 9, 6)


@pytest.mark.parametrize("dim", [-1, -2])
def test_a_softmax_in_the_values_is_told_as_that(dim: int) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v.softmax(dim)

    report = attngraph.explain(model, *qkv())
    assert len(report.attention) == 1
    assert [m.reason for m in report.missed] == [
        "it computes values that another softmax weighs, and is no softmax over keys itself"
    ]


def test_a_softmax_over_features_whose_values_are_tokens_is_told_as_that() -> None:
    """Its result is larger than its weights, and in the way of summing keys and values first."""
    to_features = normal(8, 8)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ to_features).softmax(-1) @ k.mT) @ v

    (reason,) = why(model, *qkv())
    assert reason.startswith("its softmax runs over features: its keys are weights of the model")


def test_a_softmax_that_a_library_called_names_the_line_of_the_model(tmp_path: Path) -> None:
    file = tmp_path / "library_of_softmaxes.py"
    file.write_text("def weights(x):\n    return x.softmax(-1)\n")
    library = runpy.run_path(str(file))

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = library["weights"](q @ k.mT)
        return (p @ v) @ (p @ v).mT @ p.cos()

    (missed,) = {(m.source, m.caller, m.code) for m in attngraph.explain(model, *qkv()).missed}
    assert missed[0].endswith("library_of_softmaxes.py:2")
    assert "test_reasons.py" in missed[1]
    assert missed[2] == 'p = library["weights"](q @ k.mT)'
    assert f"called at {missed[1]}" in str(attngraph.explain(model, *qkv()))


ANOTHER_DIMENSION = "its weights are summed over another dimension than the one that the softmax runs over"
MIXERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda p, mix: torch.einsum("bhqk,hg->bgqk", p, mix),
    "convolution": lambda p, mix: F.conv2d(p, mix[:, :, None, None]),
    "linear": lambda p, mix: F.linear(p.permute(0, 2, 3, 1), mix, mix[0]).permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("name", MIXERS)
def test_heads_that_are_mixed_after_the_softmax_are_told(name: str) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
        return MIXERS[name]((q @ k.mT).softmax(-1), mix) @ v

    (reason,) = why(model, *qkv(), normal(4, 4))
    assert reason.startswith(ANOTHER_DIMENSION)


@pytest.mark.parametrize("name", MIXERS)
def test_heads_that_are_mixed_before_the_softmax_are_told(name: str) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
        return MIXERS[name](q @ k.mT, mix).softmax(-1) @ v

    (reason,) = why(model, *qkv(), normal(4, 4))
    assert "scores are mixed between heads" in reason


def test_a_softmax_over_the_queries_is_told() -> None:
    (reason,) = why(lambda q, k, v: (q @ k.mT).softmax(-2) @ v, *qkv())
    assert reason.startswith(ANOTHER_DIMENSION)


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_softmax_shared_by_a_row_and_a_column_is_told(is_cut: bool) -> None:
    def criss_cross(x: Tensor, y: Tensor) -> Tensor:
        here, square = (x.view(-1, 3, 3, 8), y.view(-1, 3, 3, 8)) if is_cut else (x, y)
        rows = torch.einsum("bhwd,bhvd->bhwv", here, square)
        columns = torch.einsum("bhwd,bgwd->bhwg", here, square)
        columns = columns + torch.diag(torch.full((3,), -torch.inf))[:, None]  # itself is among the rows
        p = torch.cat([columns, rows], -1).softmax(-1)
        found = torch.einsum("bhwg,bgwd->bhwd", p[..., :3], square)
        return found + torch.einsum("bhwv,bhvd->bhwd", p[..., 3:], square)

    shape = (2, 9, 8) if is_cut else (2, 3, 3, 8)
    (reason,) = why(criss_cross, normal(*shape), normal(*shape))
    assert "as where a row and a column of keys share one softmax" in reason


@pytest.mark.slow
def test_a_softmax_over_all_pairs_is_told() -> None:
    def over_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        return scores.flatten(-2).softmax(-1).view_as(scores) @ v

    (reason,) = why(over_pairs, *qkv())
    assert reason.startswith("its softmax runs over two dimensions at once")


@pytest.mark.parametrize("flat", [True, False])
def test_a_softmax_over_pairs_of_keys_is_told(flat: bool) -> None:
    """Two-simplicial attention: the weights of a query do sum to one."""

    def two_simplicial(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhid,bhjd,bhkd->bhijk", q, k, k * 1.1)
        weights = scores.flatten(-2).softmax(-1).view_as(scores) if flat else scores.exp()
        weights = weights if flat else weights / weights.sum((-2, -1), keepdim=True)
        return torch.einsum("bhijk,bhjd,bhkd->bhid", weights, v, v * 0.9)

    (reason,) = why(two_simplicial, *qkv())
    assert reason.startswith("its softmax runs over two dimensions at once")


def test_weights_of_which_the_largest_are_chosen_and_all_are_used_are_told_as_used() -> None:
    """Native sparse attention: weights of blocks choose blocks, and weigh their values, too."""

    def sparse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = (q @ k.mT).softmax(-1)
        best = torch.zeros_like(blocks).scatter(-1, blocks.topk(2, -1).indices, 1.0)
        return blocks @ v + (q @ (k * 2).mT).masked_fill(best == 0, -torch.inf).softmax(-1) @ v

    assert not any("only the largest few" in reason for reason in why(sparse, *qkv()))


def test_features_that_are_exponentials_are_told() -> None:
    def performer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = ((x - x.square().sum(-1, keepdim=True) / 2).exp() + 1e-4 for x in (q, k))
        return q @ (k.mT @ v) / (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)

    assert all(
        reason.startswith("it multiplies exponentials of two tensors") for reason in why(performer, *qkv())
    )


def test_blocks_whose_weights_are_brought_to_one_scale_multiply_no_two_tensors() -> None:
    def rescaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = [q @ block.mT for block in k.split(3, 2)]
        most = [s.amax(-1, keepdim=True) for s in scores]
        weights = [(s - m).exp() for s, m in zip(scores, most, strict=True)]
        sums = [w.sum(-1, keepdim=True) for w in weights]
        whole = sum(s * m.exp() for s, m in zip(sums, most, strict=True))
        of_blocks = [w / s * (s * m.exp() / whole) for w, s, m in zip(weights, sums, most, strict=True)]
        return torch.cat(of_blocks, -1) @ v

    reasons = why(rescaled, *qkv())
    assert reasons and not any("two tensors" in reason for reason in reasons)


def test_exponentials_as_values_of_a_loop_over_keys_are_told() -> None:
    def loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        maximum = torch.full((*q.shape[:-1], 1), -torch.inf, dtype=q.dtype)
        total, found = torch.zeros_like(maximum), torch.zeros(())
        for keys, values in zip(k.split(3, 2), v.split(3, 2), strict=True):
            scores = q @ keys.mT
            larger = torch.maximum(maximum, scores.amax(-1, keepdim=True))
            p, change = (scores - larger).exp(), (maximum - larger).exp()
            total, found = total * change + p.sum(-1, keepdim=True), found * change + p @ values.exp()
            maximum = larger
        return found / total

    (reason,) = why(loop, *qkv())
    assert reason.startswith("its values are exponentials themselves, and where keys come in 3 blocks")


def test_a_convolution_over_neighbouring_scores_is_told() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, kernel: Tensor) -> Tensor:
        return F.conv2d(q @ k.mT, kernel, padding=1).softmax(-1) @ v

    (reason,) = why(model, *qkv(), normal(4, 4, 3, 3))
    assert reason.endswith("a convolution over several places")


def test_a_convolution_over_neighbouring_weights_is_told() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, kernel: Tensor) -> Tensor:
        return F.conv2d((q @ k.mT).softmax(-1), kernel, padding=1) @ v

    (reason,) = why(model, *qkv(), normal(4, 4, 3, 3))
    stands = "between its scores and the sum of its values stands a convolution over several places"
    assert reason.startswith(stands)


def test_scores_that_are_a_tensor_are_told() -> None:
    (reason,) = why(lambda bias, v: bias.softmax(-1) @ v, normal(2, 7, 9), normal(2, 9, 6))
    assert reason.startswith("its scores are a tensor that the model is given")
    q, k, v = qkv()
    (reason,) = why(
        lambda q, k, v: (q[:, :, :, None] + k[:, :, None]).tanh().sum(-1).softmax(-1) @ v, q, k, v
    )
    assert reason.startswith("its scores are computed without a product of queries and keys (")


def test_a_softmax_over_edges_is_told() -> None:
    def model(nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        scores = (nodes[source] * nodes[target]).sum(-1)
        most = torch.full(nodes.shape[:2], -torch.inf, dtype=nodes.dtype)
        at = target[:, None].expand(-1, nodes.shape[1])
        weights = (scores - most.scatter_reduce(0, at, scores, "amax")[target]).exp()
        total = torch.zeros_like(most).index_add(0, target, weights)
        weights = weights / (total[target] + 1e-16)
        return torch.zeros_like(nodes).index_add(0, target, weights[..., None] * nodes[source])

    (reason,) = why(model, normal(7, 4, 8), torch.randint(0, 7, (2, 30)))
    assert "a softmax over the edges of a graph" in reason


def test_counts_by_an_index_are_no_softmax() -> None:
    def model(values: Tensor, index: Tensor) -> Tensor:
        return torch.zeros(7, dtype=values.dtype).index_add(0, index, values.exp()).log()

    assert not why(model, normal(30), torch.randint(0, 7, (30,)))


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cdist": lambda q, k: torch.cdist(q, k),
    "squared cdist": lambda q, k: torch.cdist(q, k) ** 2,
    "sum of squares": lambda q, k: (q[:, :, :, None] - k[:, :, None]).pow(2).sum(-1),
    "norm": lambda q, k: (q[:, :, :, None] - k[:, :, None]).norm(dim=-1),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_are_told_with_what_to_write_instead(name: str) -> None:
    (reason,) = why(lambda q, k, v: (-DISTANCES[name](q, k)).softmax(-1) @ v, *qkv())
    assert reason.startswith("its scores are distances (") and "are fused" in reason


def test_squared_distances_by_a_product_are_fused() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        squares = (q * q).sum(-1, keepdim=True) + (k * k).sum(-1)[..., None, :]
        return (2 * (q @ k.mT) - squares).softmax(-1) @ v

    assert len(attngraph.explain(model, *qkv()).attention) == 1


def test_torchs_attention_to_one_key_is_told_as_that() -> None:
    q = normal(2, 4, 1, 8)
    one = ["it has one key, whose weight is 1 whatever its score"]
    assert why(lambda q: F.scaled_dot_product_attention(q, q, q), q) == one
    assert why(lambda q: (q @ q.mT).softmax(-1) @ q, q) == one
