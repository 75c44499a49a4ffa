"""The Transformer as first published: an encoder and a decoder (Vaswani et al. 2017, section 3).

The encoder reads the source. The decoder reads the target so far and looks at the source:

    PE(pos, 2i) = sin(pos / 10000^(2i/C)),  PE(pos, 2i+1) = cos(pos / 10000^(2i/C))  (section 3.5)
    x = sqrt(C) source[ids] + PE;  y = sqrt(C) target[ids] + PE                       (section 3.4)

    encoder   x = LayerNorm(x + SelfAttention(x)),  x = LayerNorm(x + FeedForward(x))
    decoder   y = LayerNorm(y + CausalSelfAttention(y)),
              y = LayerNorm(y + CrossAttention(y, x)),  y = LayerNorm(y + FeedForward(y))
    FeedForward(x) = max(0, x W_1 + b_1) W_2 + b_2                                    (equation 2)
    logits = y W_head

The two sides have separate embeddings, and the head is a matrix of its own.

Shapes: source int64 `[B, S]`, target int64 `[B, T]`, padding masks bool of the same shapes with
True at *padding*, logits `[B, T, target_vocab_size]`.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from attngraph.models.attention import CrossAttention, CrossAttentionConfig
from attngraph.models.decoder_lm import with_loss
from attngraph.models.masked_attention import MaskedAttentionConfig, PaddedSelfAttention
from attngraph.models.positions import SinusoidalEmbedding


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """Sizes of the model; the defaults are the paper's base model over bytes.

    `width` is C: even, and a multiple of `heads`, or ValueError is raised. `layers` is the number
    of blocks of each side.
    """

    source_vocab_size: int = 256
    target_vocab_size: int = 256
    layers: int = 6
    width: int = 512
    heads: int = 8
    hidden: int = 2048
    max_tokens: int = 1024
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads != 0 or self.width % 2 != 0:
            raise ValueError(
                f"width {self.width} must be even (sines and cosines come in pairs) and a "
                f"multiple of heads ({self.heads})"
            )

    def embedding(self, vocab_size: int) -> SinusoidalEmbedding:
        """A new embedding of one side's tokens."""
        return SinusoidalEmbedding(vocab_size, self.width, max_tokens=self.max_tokens, dropout=self.dropout)

    def self_attention(self, *, causal: bool) -> MaskedAttentionConfig:
        """The sizes of one self-attention; True in its padding mask means drop."""
        return MaskedAttentionConfig.of_width(
            self.width, self.heads, dropout=self.dropout, true_means="drop", causal=causal
        )

    @property
    def cross_attention(self) -> CrossAttentionConfig:
        """The sizes of one cross-attention."""
        return CrossAttentionConfig.of_width(
            self.width, self.heads, dropout=self.dropout, memory_width=self.width
        )


class FeedForward(nn.Module):
    """Two layers with ReLU between, each token on its own: `[B, T, C]` to `[B, T, C]`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, hidden)
        self.project = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.project(functional.relu(self.expand(x)))
        return output


class SourceBlock(nn.Module):
    """One encoder block: x `[B, S, C]`, padding bool `[B, S]` or None, to `[B, S, C]`."""

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.attention = PaddedSelfAttention(config.self_attention(causal=False))
        self.feed_forward = FeedForward(config.width, config.hidden)
        self.attention_norm = nn.LayerNorm(config.width)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, padding)))
        x = self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
        return x


class TargetBlock(nn.Module):
    """One decoder block: y `[B, T, C]` over memory `[B, S, C]`, to `[B, T, C]`."""

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.self_attention = PaddedSelfAttention(config.self_attention(causal=True))
        self.cross_attention = CrossAttention(config.cross_attention)
        self.feed_forward = FeedForward(config.width, config.hidden)
        self.self_norm = nn.LayerNorm(config.width)
        self.cross_norm = nn.LayerNorm(config.width)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, y: Tensor, memory: Tensor, padding: Tensor | None, memory_padding: Tensor | None
    ) -> Tensor:
        y = self.self_norm(y + self.dropout(self.self_attention(y, padding)))
        y = self.cross_norm(y + self.dropout(self.cross_attention(y, memory, memory_padding)))
        y = self.feed_forward_norm(y + self.dropout(self.feed_forward(y)))
        return y


class EncoderDecoder(nn.Module):
    """Sequence to sequence: source `[B, S]` and target `[B, T]` to `[B, T, target_vocab_size]`.

    Padding masks are bool, True at padding, or None. With `labels` int64 `[B, T]`, the token after
    each target token (or -100 to leave it out), returns `(logits, loss)`.
    Raises ValueError where S or T exceeds `max_tokens`.
    """

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.source_embedding = config.embedding(config.source_vocab_size)
        self.target_embedding = config.embedding(config.target_vocab_size)
        self.encoder = nn.ModuleList([SourceBlock(config) for _ in range(config.layers)])
        self.decoder = nn.ModuleList([TargetBlock(config) for _ in range(config.layers)])
        self.head = nn.Linear(config.width, config.target_vocab_size, bias=False)

    def encode(self, source: Tensor, padding: Tensor | None = None) -> Tensor:
        """What the decoder attends to: source int64 `[B, S]` to memory `[B, S, C]`."""
        x: Tensor = self.source_embedding(source)
        for block in self.encoder:
            x = block(x, padding)
        return x

    def decode(
        self,
        target: Tensor,
        memory: Tensor,
        padding: Tensor | None = None,
        memory_padding: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token at each place of the target: `[B, T, target_vocab_size]`."""
        y = self.target_embedding(target)
        for block in self.decoder:
            y = block(y, memory, padding, memory_padding)
        logits: Tensor = self.head(y)
        return logits

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_padding: Tensor | None = None,
        target_padding: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        memory = self.encode(source, source_padding)
        logits = self.decode(target, memory, target_padding, source_padding)
        return with_loss(logits, labels)
