"""A plain decoder-only language model, in the manner of GPT-2 (Radford et al. 2019).

It reads tokens and gives, at every position, a score for each token that may come next:

    x = token[ids] + position[0 .. T-1]
    x = x + Attention(LayerNorm(x))           for each block, with a causal mask;
    x = x + MLP(LayerNorm(x))                 MLP(x) = GELU(x W_1 + b_1) W_2 + b_2
    logits = LayerNorm(x) W_head              a matrix of its own, not the token embedding

The norm stands before each sublayer (pre-norm; Xiong et al. 2020, figure 1b), GELU is the exact
one (Hendrycks & Gimpel 2016, section 2). The loss is the mean cross entropy of the next token.

Shapes: ids int64 `[B, T]`, logits `[B, T, vocab_size]`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from attngraph.models.attention import require_multiple
from attngraph.models.masked_attention import CausalAttentionConfig, CausalSelfAttention


@dataclass(frozen=True)
class DecoderLMConfig:
    """Sizes of the model; the defaults are GPT-2 small over bytes.

    `width` is C and must be a multiple of `heads`; `expansion` is the MLP's hidden width over C;
    `dropout` applies to embeddings, attention weights and the output of each sublayer.
    Raises ValueError where the heads do not divide the width.
    """

    vocab_size: int = 256
    layers: int = 12
    width: int = 768
    heads: int = 12
    expansion: int = 4
    max_tokens: int = 1024
    dropout: float = 0.0
    bias: bool = True

    def __post_init__(self) -> None:
        require_multiple(self.width, self.heads)

    @property
    def attention(self) -> CausalAttentionConfig:
        """The sizes of the attention in each block."""
        return CausalAttentionConfig.of_width(
            self.width, self.heads, dropout=self.dropout, bias=self.bias, max_tokens=self.max_tokens
        )


def with_loss(logits: Tensor, targets: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """Logits `[B, T, vocab_size]` alone, or with the mean cross entropy of targets int64 `[B, T]`, -100 of
    which are left out."""
    if targets is None:
        return logits
    return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class MLP(nn.Module):
    """Two layers with GELU between, each token on its own: `[B, T, C]` to `[B, T, C]`."""

    def __init__(self, width: int, hidden: int, *, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.expand = nn.Linear(width, hidden, bias=bias)
        self.project = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.dropout(self.project(functional.gelu(self.expand(x))))
        return output


class DecoderBlock(nn.Module):
    """Attention, then MLP, each added to its input: `[B, T, C]` to `[B, T, C]`.

    `attention` maps `[B, T, C]` to `[B, T, C]`, each token seeing no later one.
    """

    def __init__(self, config: DecoderLMConfig, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(
            config.width, config.expansion * config.width, bias=config.bias, dropout=config.dropout
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class DecoderLM(nn.Module):
    """Decoder-only language model: ids int64 `[B, T]` to logits `[B, T, vocab_size]`.

    With `targets` int64 `[B, T]`, where `targets[b, t]` is the token after `ids[b, t]` (or -100 to
    leave it out), returns `(logits, loss)` with the mean cross entropy as a scalar.
    Raises ValueError where T exceeds `max_tokens`.

    `attention` makes the attention of each block; without it that is CausalSelfAttention.
    """

    def __init__(self, config: DecoderLMConfig, attention: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        if attention is None:
            attention = partial(CausalSelfAttention, config.attention)
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.max_tokens, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList([DecoderBlock(config, attention()) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        tokens = ids.shape[1]
        if tokens > self.config.max_tokens:
            raise ValueError(
                f"the input has {tokens} tokens, but the model has learned positions for "
                f"max_tokens={self.config.max_tokens}: configure a larger max_tokens"
            )
        positions = torch.arange(tokens, device=ids.device)  # [T]
        x = self.token_embedding(ids) + self.position_embedding(positions)  # [B, T, C]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))  # [B, T, vocab_size]
        return with_loss(logits, targets)
