"""A recurrent encoder and decoder with attention: translation before the Transformer.

The encoder reads the source in both directions, h_j its states. At each step i the decoder has a state
s_i, and a context c_i of the source:

    e_ij = score(s, h_j),  a_i = softmax over j of e_ij,  c_i = sum_j a_ij h_j

    AdditiveAttention         score(s, h) = v . tanh(W s + U h)
                              (Bahdanau et al. 2015, equations 5 to 7, appendix A.1.2)
    MultiplicativeAttention   score(s, h) = s . W h
                              (Luong et al. 2015, section 3.1, score "general")

    BahdanauSeq2Seq   the context of the previous state enters the recurrence: token by token
    LuongSeq2Seq      the context of the current state joins it in the output: a layer after the
                      recurrence, so that all target tokens attend at once

Shapes: source int64 `[B, S]`, target int64 `[B, T]`, lengths int64 `[B]` of the source; logits
`[B, T, vocab_size]`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Seq2SeqConfig:
    """Sizes: `width` is that of embeddings and of the decoder's state; an encoder's direction has half."""

    source_vocab: int = 256
    target_vocab: int = 256
    width: int = 64


class AdditiveAttention(nn.Module):
    """states `[B, T, C]`, memory `[B, S, C]`, keep bool `[B, S]` to contexts `[B, T, C]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, states: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        joined = torch.tanh(self.query(states).unsqueeze(2) + self.key(memory).unsqueeze(1))
        scores = self.score(joined).squeeze(-1)  # [B, T, S]
        scores = scores.masked_fill(~keep.unsqueeze(1), float("-inf"))
        return torch.softmax(scores, dim=-1) @ memory


class MultiplicativeAttention(nn.Module):
    """states `[B, T, C]`, memory `[B, S, C]`, keep bool `[B, S]` to contexts `[B, T, C]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key = nn.Linear(width, width, bias=False)

    def forward(self, states: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        scores = states @ self.key(memory).transpose(1, 2)  # [B, T, S]
        scores = scores.masked_fill(~keep.unsqueeze(1), float("-inf"))
        return torch.softmax(scores, dim=-1) @ memory


class RecurrentEncoder(nn.Module):
    """source `[B, S]` to its states in both directions, side by side: `[B, S, C]`."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.source_vocab, config.width)
        self.rnn = nn.GRU(config.width, config.width // 2, batch_first=True, bidirectional=True)

    def forward(self, source: Tensor) -> Tensor:
        states: Tensor = self.rnn(self.embedding(source))[0]
        return states


def within(lengths: Tensor, source: Tensor) -> Tensor:
    """Which tokens of the source are no padding: bool `[B, S]`."""
    return torch.arange(source.shape[1], device=source.device) < lengths.unsqueeze(1)


class BahdanauSeq2Seq(nn.Module):
    """Each step attends with the state before it, and reads the context beside the target's token."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.encoder = RecurrentEncoder(config)
        self.embedding = nn.Embedding(config.target_vocab, config.width)
        self.attention = AdditiveAttention(config.width)
        self.begin = nn.Linear(config.width, config.width)
        self.cell = nn.GRUCell(2 * config.width, config.width)
        self.output = nn.Linear(2 * config.width, config.target_vocab)

    def forward(self, source: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
        memory, keep = self.encoder(source), within(lengths, source)
        state = torch.tanh(self.begin(memory[:, 0]))  # [B, C]
        tokens = self.embedding(target)
        logits = []
        for step in range(target.shape[1]):
            context = self.attention(state.unsqueeze(1), memory, keep).squeeze(1)  # [B, C]
            state = self.cell(torch.cat([tokens[:, step], context], dim=-1), state)
            logits.append(self.output(torch.cat([state, context], dim=-1)))
        return torch.stack(logits, dim=1)


class LuongSeq2Seq(nn.Module):
    """The recurrence runs first; then every state attends, and is joined with its context."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.encoder = RecurrentEncoder(config)
        self.embedding = nn.Embedding(config.target_vocab, config.width)
        self.rnn = nn.GRU(config.width, config.width, batch_first=True)
        self.attention = MultiplicativeAttention(config.width)
        self.join = nn.Linear(2 * config.width, config.width)
        self.output = nn.Linear(config.width, config.target_vocab)

    def forward(self, source: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
        memory, keep = self.encoder(source), within(lengths, source)
        states, _ = self.rnn(self.embedding(target))
        context = self.attention(states, memory, keep)
        joined = torch.tanh(self.join(torch.cat([states, context], dim=-1)))
        scores: Tensor = self.output(joined)
        return scores
