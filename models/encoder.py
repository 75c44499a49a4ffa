"""The BERT encoder with its masked-token head (Devlin et al. 2018, section 3).

Every token sees every other, to the left and to the right:

    x = LayerNorm(token[ids] + position[0 .. T-1] + segment[segments])
    x = LayerNorm(x + Attention(x))           for each block, over the tokens that are not padding;
    x = LayerNorm(x + FeedForward(x))         FeedForward(x) = GELU(x W_1 + b_1) W_2 + b_2
    logits = LayerNorm(GELU(x W + b)) E^T + c     with E the token embedding

The norm stands after each sum (post-norm). In training some tokens of the input are hidden, and
the loss is the cross entropy of the true tokens at those places only (ibid., section 3.1 and
appendix A.1); `mask_tokens` does the hiding.

Shapes: ids int64 `[B, T]`, keep bool `[B, T]` with True at real tokens, logits
`[B, T, vocab_size]`. The vocabulary is the 256 bytes, a mask token and a padding token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from attngraph.models.attention import require_multiple
from attngraph.models.decoder_lm import with_loss
from attngraph.models.masked_attention import MaskedAttentionConfig, PaddedSelfAttention

MASK_ID = 256
PADDING_ID = 257
IGNORED_TARGET = -100


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of the model; the defaults are BERT base over bytes.

    `width` is C and must be a multiple of `heads`; `segments` is the number of segment kinds.
    Raises ValueError where the heads do not divide the width.
    """

    vocab_size: int = 258
    layers: int = 12
    width: int = 768
    heads: int = 12
    hidden: int = 3072
    max_tokens: int = 512
    segments: int = 2
    dropout: float = 0.0
    norm_epsilon: float = 1e-12

    def __post_init__(self) -> None:
        require_multiple(self.width, self.heads)

    @property
    def attention(self) -> MaskedAttentionConfig:
        """The sizes of the attention in each block, and its convention: True means keep."""
        return MaskedAttentionConfig.of_width(self.width, self.heads, dropout=self.dropout, true_means="keep")


class EncoderBlock(nn.Module):
    """Attention, then feed-forward, each added to its input and normed: `[B, T, C]` to the same.

    `attention` takes x and the masks that forward was given.
    """

    def __init__(self, config: EncoderConfig, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.expand = nn.Linear(config.width, config.hidden)
        self.project = nn.Linear(config.hidden, config.width)
        self.feed_forward_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, *masks: Tensor | None) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, *masks)))
        hidden = functional.gelu(self.expand(x))  # [B, T, hidden]
        x = self.feed_forward_norm(x + self.dropout(self.project(hidden)))
        return x


class MaskedTokenHead(nn.Module):
    """Scores for the token at each place: `[B, T, C]` to `[B, T, vocab_size]`."""

    def __init__(self, config: EncoderConfig, token_embedding: nn.Embedding) -> None:
        super().__init__()
        self.transform = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.score = nn.Linear(config.width, config.vocab_size)
        self.score.weight = token_embedding.weight  # shared, as in the paper's code

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.score(self.norm(functional.gelu(self.transform(x))))
        return scores


class Encoder(nn.Module):
    """Bidirectional encoder: ids int64 `[B, T]` to logits `[B, T, vocab_size]`.

    `keep` is bool `[B, T]`, True at real tokens (None: all are real); `segments` is int64
    `[B, T]` (None: all zero). With `targets` int64 `[B, T]`, the true token where one was hidden
    and -100 elsewhere, returns `(logits, loss)`. Raises ValueError where T exceeds `max_tokens`.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.max_tokens, config.width)
        self.segment_embedding = nn.Embedding(config.segments, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            [EncoderBlock(config, PaddedSelfAttention(config.attention)) for _ in range(config.layers)]
        )
        # The head shares this matrix, so it has a small standard deviation, as in the paper's code.
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        self.head = MaskedTokenHead(config, self.token_embedding)

    def encode(self, ids: Tensor, keep: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """The representation of each token, before the head: `[B, T, C]`."""
        tokens = ids.shape[1]
        if tokens > self.config.max_tokens:
            raise ValueError(
                f"the input has {tokens} tokens, but the model has learned positions for "
                f"max_tokens={self.config.max_tokens}: configure a larger max_tokens"
            )
        if segments is None:
            segments = torch.zeros_like(ids)
        positions = torch.arange(tokens, device=ids.device)  # [T]
        x = self.token_embedding(ids) + self.position_embedding(positions)
        x = x + self.segment_embedding(segments)  # [B, T, C]
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x, keep)
        encoded: Tensor = x
        return encoded

    def forward(
        self,
        ids: Tensor,
        keep: Tensor | None = None,
        segments: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        logits: Tensor = self.head(self.encode(ids, keep, segments))  # [B, T, vocab_size]
        return with_loss(logits, targets)


def mask_tokens(ids: Tensor, *, rate: float = 0.15, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Mask some bytes, with the originals as targets: ids int64 `[B, T]` to `(hidden ids, targets)`.

    Each place is chosen with probability `rate`; of the chosen, 80 % become MASK_ID, 10 % a random
    byte, 10 % stay (Devlin et al. 2018, section 3.1). Targets are -100 elsewhere. All on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(ids.shape, generator=generator) < rate
    fate = torch.rand(ids.shape, generator=generator)
    random_bytes = torch.randint(256, ids.shape, generator=generator)
    hidden = torch.where(chosen & (fate < 0.8), MASK_ID, ids)
    hidden = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), random_bytes, hidden)
    return hidden, torch.where(chosen, ids, IGNORED_TARGET)
