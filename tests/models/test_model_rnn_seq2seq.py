"""Recurrent seq2seq models: attention against loops, padding, and what attngraph makes of them."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import attngraph
from attngraph.models.rnn_seq2seq import (
    AdditiveAttention,
    BahdanauSeq2Seq,
    LuongSeq2Seq,
    MultiplicativeAttention,
    Seq2SeqConfig,
)

CONFIG = Seq2SeqConfig(source_vocab=11, target_vocab=13, width=8)
MODELS = [BahdanauSeq2Seq, LuongSeq2Seq]


def batch(rows: int = 3, source: int = 7, target: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = (torch.randint(0, n, (rows, m), generator=generator) for n, m in ((11, source), (13, target)))
    return (*ids, torch.tensor([source, source - 3, 1])[:rows])


def by_loops(attention: nn.Module, states: Tensor, memory: Tensor, lengths: list[int]) -> Tensor:
    """The papers' formulas, a query at a time."""
    found = torch.zeros_like(states)
    for b, i in ((b, i) for b in range(states.shape[0]) for i in range(states.shape[1])):
        s, scores = states[b, i], []
        for h in memory[b, : lengths[b]]:
            if isinstance(attention, AdditiveAttention):
                inner = attention.query.weight @ s + attention.key.weight @ h + attention.key.bias
                scores.append((attention.score.weight[0] @ torch.tanh(inner)).item())
            else:
                scores.append((s @ attention.key.weight @ h).item())
        total = math.fsum(map(math.exp, scores))
        for score, h in zip(scores, memory[b], strict=False):
            found[b, i] += math.exp(score) / total * h
    return found


@pytest.mark.parametrize("kind", [AdditiveAttention, MultiplicativeAttention])
def test_attention_is_the_papers_formula(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    attention = kind(8).double()
    states, memory = torch.randn(2, 3, 8).double(), torch.randn(2, 4, 8).double()
    keep = torch.arange(4) < torch.tensor([[4], [2]])
    with torch.no_grad():
        assert_close(attention(states, memory, keep), by_loops(attention, states, memory, [4, 2]))


@pytest.mark.parametrize("kind", MODELS)
def test_the_logits_have_the_targets_shape_and_learn(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, (source, target, lengths) = kind(CONFIG), batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        logits = model(source, target, lengths)
        assert logits.shape == (3, 5, 13)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("kind", MODELS)
def test_a_target_token_does_not_depend_on_later_ones(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, (source, target, lengths) = kind(CONFIG).eval(), batch()
    changed = target.clone()
    changed[:, 3:] = (changed[:, 3:] + 1) % 13
    a, b = model(source, target, lengths), model(source, changed, lengths)
    assert_close(a[:, :3], b[:, :3])
    assert not torch.allclose(a[:, 3:], b[:, 3:])


@pytest.mark.parametrize("kind", MODELS)
def test_the_compiled_model_has_the_same_answer(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind(CONFIG).eval()
    compiled = attngraph.compile(model)
    with torch.no_grad():
        for sizes in ((3, 7, 5), (2, 9, 5)):
            given = batch(*sizes)
            assert_close(compiled(*given), model(*given), rtol=1e-4, atol=1e-5)
    assert not compiled.report.missed
    fused = compiled.report.attention
    if kind is LuongSeq2Seq:  # all target tokens attend in one node
        assert [entry.program for entry in fused] == ["s = dot\nkeep k <= r0[b] - 1"]
    else:  # one for each target token: its scores are products of one vector with keys made for it
        assert len(fused) == 5
