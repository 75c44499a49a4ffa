"""A decoder-only language model in the manner of the first Transformer.

It is the decoder of `encoder_decoder` without an encoder (Liu et al. 2018, "Generating Wikipedia
by Summarizing Long Sequences", section 4.2.3). Unlike `decoder_lm`, it has the norm after each
sum, sinusoidal positions, and ReLU in the feed-forward:

    x = sqrt(C) token[ids] + PE
    x = LayerNorm(x + Attention(x))           for each block, with a causal mask;
    x = LayerNorm(x + FeedForward(x))         FeedForward(x) = max(0, x W_1 + b_1) W_2 + b_2
    logits = x W_head

Shapes: ids int64 `[B, T]`, logits `[B, T, vocab_size]`.
"""

from torch import Tensor, nn

from attngraph.models.decoder_lm import DecoderLMConfig, with_loss
from attngraph.models.encoder_decoder import FeedForward
from attngraph.models.masked_attention import CausalSelfAttention
from attngraph.models.positions import SinusoidalEmbedding


class PostNormBlock(nn.Module):
    """Attention, then feed-forward, each added to its input and normed: `[B, T, C]` to the same."""

    def __init__(self, config: DecoderLMConfig) -> None:
        super().__init__()
        self.attention = CausalSelfAttention(config.attention)  # with residual dropout of its own
        self.attention_norm = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config.width, config.expansion * config.width)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x))
        x = self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
        return x


class PostNormDecoder(nn.Module):
    """Decoder-only language model: ids int64 `[B, T]` to logits `[B, T, vocab_size]`.

    With `targets` int64 `[B, T]`, where `targets[b, t]` is the token after `ids[b, t]` (or -100 to
    leave it out), returns `(logits, loss)` with the mean cross entropy as a scalar. The width must
    be even. Raises ValueError where T exceeds `max_tokens`.
    """

    def __init__(self, config: DecoderLMConfig) -> None:
        super().__init__()
        self.embedding = SinusoidalEmbedding(
            config.vocab_size, config.width, max_tokens=config.max_tokens, dropout=config.dropout
        )
        self.blocks = nn.ModuleList([PostNormBlock(config) for _ in range(config.layers)])
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        x = self.embedding(ids)  # [B, T, C]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)  # [B, T, vocab_size]
        return with_loss(logits, targets)
