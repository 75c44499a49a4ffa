"""The Longformer encoder: BERT's blocks with windows and global tokens (Beltagy et al. 2020).

As `encoder`, and trained in the same way (section 4.1), but a token sees its neighbourhood and the
global tokens only, so that long texts are affordable:

    x = LayerNorm(token[ids] + position[0 .. T-1])
    x = LayerNorm(x + GlobalWindowAttention(x))     for each block;
    x = LayerNorm(x + FeedForward(x))               FeedForward(x) = GELU(x W_1 + b_1) W_2 + b_2
    logits = LayerNorm(GELU(x W + b)) E^T + c       with E the token embedding

Which tokens are global is the task's choice: the first one for classification, those of the
question for question answering (section 3.1).

Shapes: ids int64 `[B, T]`, is_global and keep bool `[B, T]`, logits `[B, T, vocab_size]`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attngraph.models.decoder_lm import with_loss
from attngraph.models.encoder import EncoderBlock, EncoderConfig, MaskedTokenHead
from attngraph.models.positions import LearnedPositions
from attngraph.models.windowed_attention import GlobalWindowAttention, GlobalWindowConfig


@dataclass(frozen=True)
class LongformerConfig(EncoderConfig):
    """As EncoderConfig, without segments; `window` is w, so that w // 2 keys to either side are near."""

    max_tokens: int = 4096
    window: int = 512

    @property
    def window_attention(self) -> GlobalWindowConfig:
        """The sizes of the attention in each block."""
        return GlobalWindowConfig.of_width(self.width, self.heads, dropout=self.dropout, window=self.window)


class Longformer(nn.Module):
    """Bidirectional encoder of long texts: ids int64 `[B, T]` to logits `[B, T, vocab_size]`.

    `is_global` is bool `[B, T]` (None: the first token of each row); `keep` is bool `[B, T]`, True at
    real tokens (None: all are real), each row having a global token among them. With `targets`
    int64 `[B, T]`, the true token where one was hidden and -100 elsewhere, returns
    `(logits, loss)`. Raises ValueError where T exceeds `max_tokens`.
    """

    def __init__(self, config: LongformerConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.positions = LearnedPositions(config.max_tokens, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)
        attentions = [GlobalWindowAttention(config.window_attention) for _ in range(config.layers)]
        self.blocks = nn.ModuleList([EncoderBlock(config, attention) for attention in attentions])
        # The head shares this matrix, so it has a small standard deviation, as in `encoder`.
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        self.head = MaskedTokenHead(config, self.token_embedding)

    def forward(
        self,
        ids: Tensor,
        is_global: Tensor | None = None,
        keep: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if is_global is None:
            is_global = (torch.arange(ids.shape[1], device=ids.device) == 0).expand(ids.shape)
        x = self.positions(self.token_embedding(ids))  # [B, T, C]
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x, is_global, keep)
        logits: Tensor = self.head(x)  # [B, T, vocab_size]
        return with_loss(logits, targets)
