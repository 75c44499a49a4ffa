"""The Sparse Transformer: a decoder whose heads see sparse patterns of the past.

Child et al. 2019: pre-norm blocks with GELU as in `decoder_lm` (section 5.2), and in each of them
the attention of `sparse_attention`. Each position has one learned vector; for images the paper has
two, for row and column (section 5.3).
"""

from dataclasses import dataclass
from functools import partial

from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.sparse_attention import SparseAttention, SparseAttentionConfig, SparsePattern


@dataclass(frozen=True)
class SparseTransformerConfig(DecoderLMConfig):
    """As DecoderLMConfig, with the `pattern`, `stride` and `summary` of SparseAttentionConfig."""

    pattern: SparsePattern = "fixed"
    stride: int = 128
    summary: int = 32

    @property
    def sparse_attention(self) -> SparseAttentionConfig:
        """The sizes of the attention in each block."""
        return SparseAttentionConfig.of_width(
            self.width,
            self.heads,
            dropout=self.dropout,
            bias=self.bias,
            pattern=self.pattern,
            stride=self.stride,
            summary=self.summary,
        )


class SparseTransformer(DecoderLM):
    """Decoder-only language model: ids int64 `[B, T]` to logits `[B, T, vocab_size]`.

    Targets, loss and errors as in DecoderLM.
    """

    def __init__(self, config: SparseTransformerConfig) -> None:
        super().__init__(config, partial(SparseAttention, config.sparse_attention))
