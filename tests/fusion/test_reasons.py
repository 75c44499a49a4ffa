"""What the report says of softmaxes that are left alone: true, and in the words of the model."""

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


MIXERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda p, mix: torch.einsum("bhqk,hg->bgqk", p, mix),
    "convolution": lambda p, mix: F.conv2d(p, mix[:, :, None, None]),
    "linear": lambda p, mix: F.linear(p.permute(0, 2, 3, 1), mix, mix[0]).permute(0, 3, 1, 2),
}
DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cdist": lambda q, k: torch.cdist(q, k),
    "squared cdist": lambda q, k: torch.cdist(q, k) ** 2,
    "sum of squares": lambda q, k: (q[:, :, :, None] - k[:, :, None]).pow(2).sum(-1),
    "norm": lambda q, k: (q[:, :, :, None] - k[:, :, None]).norm(dim=-1),
}
TO_FEATURES = normal(8, 8)


def criss_cross(x: Tensor, y: Tensor) -> Tensor:
    here, square = (t if t.ndim == 4 else t.view(-1, 3, 3, 8) for t in (x, y))
    rows = torch.einsum("bhwd,bhvd->bhwv", here, square)
    columns = torch.einsum("bhwd,bgwd->bhwg", here, square)
    columns = columns + torch.diag(torch.full((3,), -torch.inf))[:, None]  # itself is among the rows
    p = torch.cat([columns, rows], -1).softmax(-1)
    found = torch.einsum("bhwg,bgwd->bhwd", p[..., :3], square)
    return found + torch.einsum("bhwv,bhvd->bhwd", p[..., 3:], square)


def over_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores.flatten(-2).softmax(-1).view_as(scores) @ v


def two_simplicial(q: Tensor, k: Tensor, v: Tensor, flat: bool = True) -> Tensor:
    """The weights of a query do sum to one."""
    scores = torch.einsum("bhid,bhjd,bhkd->bhijk", q, k, k * 1.1)
    weights = scores.flatten(-2).softmax(-1).view_as(scores) if flat else scores.exp()
    weights = weights if flat else weights / weights.sum((-2, -1), keepdim=True)
    return torch.einsum("bhijk,bhjd,bhkd->bhid", weights, v, v * 0.9)


def performer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = ((x - x.square().sum(-1, keepdim=True) / 2).exp() + 1e-4 for x in (q, k))
    return q @ (k.mT @ v) / (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)


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


def over_edges(nodes: Tensor, edges: Tensor) -> Tensor:
    source, target = edges
    scores = (nodes[source] * nodes[target]).sum(-1)
    most = torch.full(nodes.shape[:2], -torch.inf, dtype=nodes.dtype)
    at = target[:, None].expand(-1, nodes.shape[1])
    weights = (scores - most.scatter_reduce(0, at, scores, "amax")[target]).exp()
    total = torch.zeros_like(most).index_add(0, target, weights)
    weights = weights / (total[target] + 1e-16)
    return torch.zeros_like(nodes).index_add(0, target, weights[..., None] * nodes[source])


Reason = tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]], str]
ANOTHER = "its weights are summed over another dimension than the one that the softmax runs over"
TWO = "its softmax runs over two dimensions at once"
SCORES: dict[str, Reason] = {
    "features whose values are tokens": (
        lambda q, k, v: ((q @ TO_FEATURES).softmax(-1) @ k.mT) @ v, qkv,
        "its softmax runs over features: its keys are weights of the model",
    ),
    "a tensor": (
        lambda bias, v: bias.softmax(-1) @ v, lambda: (normal(2, 7, 9), normal(2, 9, 6)),
        "its scores are a tensor that the model is given",
    ),
    "no product": (
        lambda q, k, v: (q[:, :, :, None] + k[:, :, None]).tanh().sum(-1).softmax(-1) @ v, qkv,
        "its scores are computed without a product of queries and keys (",
    ),
    "a convolution over neighbouring scores": (
        lambda q, k, v, kernel: F.conv2d(q @ k.mT, kernel, padding=1).softmax(-1) @ v,
        lambda: (*qkv(), normal(4, 4, 3, 3)), "... a convolution over several places",
    ),
    **{
        f"heads mixed by {name}": (
            lambda q, k, v, m, mixed=mixed: mixed(q @ k.mT, m).softmax(-1) @ v,
            lambda: (*qkv(), normal(4, 4)), "... scores are mixed between heads",
        )
        for name, mixed in MIXERS.items()
    },
    **{
        f"distances by {name}": (
            lambda q, k, v, of=of: (-of(q, k)).softmax(-1) @ v, qkv, "its scores are distances (... are fused"
        )
        for name, of in DISTANCES.items()
    },
    "one key": (
        lambda q: (q @ q.mT).softmax(-1) @ q, lambda: (normal(2, 4, 1, 8),),
        "it has one key, whose weight is 1 whatever its score",
    ),
    "one key of torch's attention": (
        lambda q: F.scaled_dot_product_attention(q, q, q), lambda: (normal(2, 4, 1, 8),),
        "it has one key, whose weight is 1 whatever its score",
    ),
}  # fmt: skip
WEIGHTS: dict[str, Reason] = {
    "the queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, qkv, ANOTHER),
    "a row and a column": (
        criss_cross, lambda: (normal(2, 9, 8), normal(2, 9, 8)),
        "... as where a row and a column of keys share one softmax",
    ),
    "a row and a column, not cut": (
        criss_cross, lambda: (normal(2, 3, 3, 8), normal(2, 3, 3, 8)),
        "... as where a row and a column of keys share one softmax",
    ),
    "all pairs": (over_pairs, qkv, TWO),
    "pairs of keys": (two_simplicial, qkv, TWO),
    "pairs of keys, by hand": (lambda q, k, v: two_simplicial(q, k, v, False), qkv, TWO),
    "the edges of a graph": (
        over_edges, lambda: (normal(7, 4, 8), torch.randint(0, 7, (2, 30))),
        "... a softmax over the edges of a graph",
    ),
    "a loop over exponentials": (
        loop, qkv, "its values are exponentials themselves, and where keys come in 3 blocks"
    ),
    "a convolution over neighbouring weights": (
        lambda q, k, v, kernel: F.conv2d((q @ k.mT).softmax(-1), kernel, padding=1) @ v,
        lambda: (*qkv(), normal(4, 4, 3, 3)),
        "between its scores and the sum of its values stands a convolution over several places",
    ),
    **{
        f"heads mixed by {name}": (
            lambda q, k, v, m, mixed=mixed: mixed((q @ k.mT).softmax(-1), m) @ v,
            lambda: (*qkv(), normal(4, 4)), ANOTHER,
        )
        for name, mixed in MIXERS.items()
    },
}  # fmt: skip


def is_told(reason: Reason) -> None:
    """The reason, whose words may stand after and between others (where there are dots), is the only one."""
    model, operands, words = reason
    (found,) = why(model, *operands())
    for place, part in enumerate(words.split("...")):
        assert found.startswith(part) if place == 0 else part.strip() in found, found


@pytest.mark.parametrize("name", SCORES)
def test_what_scores_are_that_are_left_alone_is_told(name: str) -> None:
    is_told(SCORES[name])


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_weights_are_summed_over_is_told(name: str) -> None:
    is_told(WEIGHTS[name])


@pytest.mark.parametrize("dim", [-1, -2])
def test_a_softmax_in_the_values_is_told_as_that(dim: int) -> None:
    report = attngraph.explain(lambda q, k, v: (q @ k.mT).softmax(-1) @ v.softmax(dim), *qkv())
    assert len(report.attention) == 1
    assert [m.reason for m in report.missed] == [
        "it computes values that another softmax weighs, and is no softmax over keys itself"
    ]


def test_features_that_are_exponentials_are_told() -> None:
    told = "it multiplies exponentials of two tensors"
    assert all(reason.startswith(told) for reason in why(performer, *qkv()))


def test_weights_of_which_the_largest_are_chosen_and_all_are_used_are_told_as_used() -> None:
    """Native sparse attention: weights of blocks choose blocks, and weigh their values, too."""

    def sparse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = (q @ k.mT).softmax(-1)
        best = torch.zeros_like(blocks).scatter(-1, blocks.topk(2, -1).indices, 1.0)
        return blocks @ v + (q @ (k * 2).mT).masked_fill(best == 0, -torch.inf).softmax(-1) @ v

    assert not any("only the largest few" in reason for reason in why(sparse, *qkv()))


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


def test_counts_by_an_index_are_no_softmax_and_squared_distances_by_a_product_are_fused() -> None:
    def counts(values: Tensor, index: Tensor) -> Tensor:
        return torch.zeros(7, dtype=values.dtype).index_add(0, index, values.exp()).log()

    def squares(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        squares = (q * q).sum(-1, keepdim=True) + (k * k).sum(-1)[..., None, :]
        return (2 * (q @ k.mT) - squares).softmax(-1) @ v

    assert not why(counts, normal(30), torch.randint(0, 7, (30,)))
    assert len(attngraph.explain(squares, *qkv()).attention) == 1
