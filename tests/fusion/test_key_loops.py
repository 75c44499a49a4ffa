"""Loops over keys in Python: one attention each; what is wrong with one is told once, at the user's line."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attngraph
from attngraph.models.online_softmax import FlashAttention


def loop(
    q: Tensor, k: Tensor, v: Tensor, block: int = 3, step: int = 3, wrong: str = "", last: int | None = None
) -> Tensor:
    m = torch.full_like(q[..., :1], -torch.inf)
    l, o = torch.zeros_like(m), torch.zeros_like(q)
    for j in range(0, k.shape[2] if last is None else last, step):
        s = q @ k[:, :, j : j + block].mT
        top = s.amax(-1, keepdim=True)
        new = torch.maximum(m, top)
        p, shrink = (s - (top if wrong == "maximum" else new)).exp(), (m - new).exp()
        l = l * (1.0 if wrong in ("divisor", "both") else shrink)
        o = o * (1.0 if wrong in ("output", "both") else shrink)
        total = p.sum(-1, keepdim=True)
        l = l + (total.clamp(min=1e-9) if wrong == "clamp" else total)
        o, m = o + p @ v[:, :, j : j + block], new
    return o if wrong == "undivided" else o / (l + 1e-8 if wrong == "number" else l)


REASONS = {
    "divisor": "the 3 blocks of its keys are not scaled alike in the sum and in what divides it",
    "output": "the 3 blocks of its keys are not scaled alike in the sum and in what divides it",
    "both": "the 3 blocks of its keys are added up with different maxima subtracted",
    "maximum": "the 3 blocks of its keys are added up with different maxima subtracted",
    "undivided": "its keys come in 3 blocks whose sums are added up, but not divided",
    "number": "a number is added to what divides it, after maxima of its scores were subtracted",
    "clamp": "what divides it is changed by clamp at ",
    "overlap": "some keys are in more than one of the 5 blocks",
}


def heads(tokens: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(3, 2, 4, tokens, 8, dtype=torch.float64))


@pytest.mark.parametrize("wrong", REASONS)
def test_what_is_wrong_with_a_loop_is_told_once_and_answers_as_in_eager(wrong: str, compare: Any) -> None:
    step = 2 if wrong == "overlap" else 3

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return loop(q, k, v, step=step, wrong=wrong)

    compiled = attngraph.compile(model)
    same = compare(model, compiled, heads(9))
    assert same, same.differences
    assert not compiled.report.attention
    (missed,) = compiled.report.missed
    assert missed.reason.startswith(REASONS[wrong])
    assert "test_key_loops.py" in missed.source


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [1, 5, 8, 64])
def test_the_flash_model_is_one_attention_at_any_block(block: int, causal: bool) -> None:
    model = FlashAttention(block, causal=causal)
    q, k, v = (t.requires_grad_() for t in heads(24))
    compiled = attngraph.compile(model)
    assert torch.allclose(compiled(q, k, v), model(q, k, v), atol=1e-12)
    (entry,) = compiled.report.attention
    assert entry.mask == ("causal" if causal else "none")
    assert not compiled.report.missed
    with torch.no_grad():
        assert "cat" not in compiled_ops(compiled), "blocks of one tensor are not copied"


def compiled_ops(compiled: attngraph.CompiledModule) -> set[str]:
    ((graph,),) = compiled._graphs.values()
    return {str(n.target).split(".")[1] for n in graph.captured.graph.graph.nodes if "aten." in str(n.target)}


def test_keys_left_out_of_a_loop_stay_out(compare: Any) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return loop(q, k, v, last=6)

    q, k, v = heads(9)
    compiled = attngraph.compile(model)
    assert compare(model, compiled, (q, k, v))
    assert torch.allclose(model(q, k, v), (q @ k[:, :, :6].mT).softmax(-1) @ v[:, :, :6])
    assert len(compiled.report.attention) == 1


@pytest.mark.slow
def test_blocks_with_keys_of_their_own_are_one_attention_over_them_side_by_side() -> None:
    """Each block's keys are computed in the loop, so no tensor holds them all."""

    def model(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        m = torch.full_like(q[..., :1], -torch.inf)
        l, o = torch.zeros_like(m), torch.zeros_like(q)
        for keys, values in zip(k.split(3, 2), v.split(3, 2), strict=True):
            s = q @ torch.tanh(keys @ w).mT
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            p, shrink = (s - new).exp(), (m - new).exp()
            l, o, m = l * shrink + p.sum(-1, keepdim=True), o * shrink + p @ values, new
        return o / l

    inputs = (*heads(9), torch.randn(8, 8, dtype=torch.float64))
    compiled = attngraph.compile(model)
    assert torch.allclose(compiled(*inputs), model(*inputs), atol=1e-12)
    assert len(compiled.report.attention) == 1


def _level(q: Tensor, k: Tensor, v: Tensor, own: bool, maxima: bool) -> tuple[Tensor, Tensor]:
    """Blocks of two tokens that look at themselves, or every other one at the block before it."""
    q, k, v = (t.unflatten(1, (-1, 2)) for t in (q, k, v))
    if not own:
        (_, q), (k, _), (v, _) = (t.unflatten(1, (-1, 2)).unbind(2) for t in (q, k, v))
    s = q @ k.mT
    e = (s - s.amax(-1, keepdim=True) if maxima else s).exp()
    o, l = e @ v, e.sum(-1, keepdim=True)
    return (o.flatten(1, 2), l.flatten(1, 2)) if own else (_after_none(o), _after_none(l))


def _after_none(x: Tensor) -> Tensor:
    return F.pad(x[:, :, None], (0, 0, 0, 0, 1, 0)).flatten(1, 3)


def levels(q: Tensor, k: Tensor, v: Tensor, added: float, twice: int = 1, maxima: bool = False) -> Tensor:
    """Near keys one by one, those further away as means of two or four: a hierarchy of levels."""
    sides = [[t.view(-1, 16, 4) for t in (q, k, v)]]
    sides += [[t.unflatten(1, (-1, 2)).mean(2) for t in sides[0]]]
    sides += [[t.unflatten(1, (-1, 2)).mean(2) for t in sides[1]]]
    o, l = (t * twice for t in _level(*sides[2], False, maxima))
    for level in (1, 0):
        more = _level(*sides[level], level == 0, maxima)
        o, l = (a.repeat_interleave(2, 1) + b for a, b in zip((o, l), more, strict=True))
    return o / (l + added)


@pytest.mark.parametrize(("added", "twice"), [(0.0, 1), (1e-3, 1), (0.0, 2), (0.5, 3)])
def test_blocks_that_some_queries_do_not_see_are_one_attention(added: float, twice: int) -> None:
    q, k, v = torch.randn(3, 2, 16, 4, dtype=torch.float64)
    compiled = attngraph.compile(lambda q, k, v: levels(q, k, v, added, twice), min_scores=0)
    assert torch.allclose(compiled(q, k, v), levels(q, k, v, added, twice), atol=1e-12)
    assert len(compiled.report.attention) == 1, compiled.report.missed


@pytest.mark.parametrize(
    ("added", "reason"),
    [(0.0, "the 3 blocks of its keys are added up with different maxima"), (1e-8, "a number is added to")],
)
def test_maxima_of_each_level_are_told(added: float, reason: str) -> None:
    q, k, v = torch.randn(3, 2, 16, 4, dtype=torch.float64)
    report = attngraph.explain(lambda q, k, v: levels(q, k, v, added, maxima=True), q, k, v)
    assert not report.attention
    assert [missed.reason.startswith(reason) for missed in report.missed] == [True]


def maximum(x: Tensor) -> Tensor:
    return x.amax(-1, keepdim=True)


def exponentials(x: Tensor) -> Tensor:
    return (x - maximum(x)).exp()


def joined_by_functions(q, k, v, parts):
    """The softmax of two blocks as Dao et al. 2022 (arXiv 2205.14135, section 3.1) write it: m(x), f(x) and
    l(x) of each block, each computed where it is needed."""
    n = k.shape[-2] // 2
    blocks = q @ k[..., :n, :].mT, q @ k[..., n:, :].mT
    top = torch.maximum(*map(maximum, blocks))
    scales = [(maximum(x) - top).exp() for x in blocks]
    total = sum(c * exponentials(x).sum(-1, keepdim=True) for c, x in zip(scales, blocks, strict=True))
    weights = [c * exponentials(x) for c, x in zip(scales, blocks, strict=True)]
    if parts:
        return (weights[0] @ v[..., :n, :] + weights[1] @ v[..., n:, :]) / total
    return torch.cat(weights, -1) / total @ v


@pytest.mark.parametrize("parts", [True, False])
def test_a_maximum_that_is_computed_wherever_it_is_needed_is_one(parts: bool, compare: Any) -> None:
    compiled = attngraph.compile(joined_by_functions)
    args = (*torch.randn(3, 2, 12, 8, dtype=torch.float64).unbind(), parts)
    same = compare(joined_by_functions, compiled, args)
    assert same, same.differences
    assert [entry.program for entry in compiled.report.attention] == ["s = dot"]
