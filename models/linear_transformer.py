"""The linear transformer: a decoder whose attention has no softmax.

Katharopoulos et al. 2020: the blocks of `decoder_lm` with the causal form of `linear_attention`.
Such a model can be run like a recurrent network, with one D x Dv matrix per head
as its state (section 3.4).
"""

from dataclasses import dataclass
from functools import partial

from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.linear_attention import FeatureMap, LinearAttention, LinearAttentionConfig


@dataclass(frozen=True)
class LinearTransformerConfig(DecoderLMConfig):
    """As DecoderLMConfig, with the `feature_map` of LinearAttentionConfig; no dropout of weights."""

    feature_map: FeatureMap = "elu"

    @property
    def linear_attention(self) -> LinearAttentionConfig:
        """The sizes of the attention in each block."""
        head_width = self.width // self.heads
        return LinearAttentionConfig(
            self.width, self.heads, head_width, head_width, bias=self.bias, feature_map=self.feature_map
        )


class LinearTransformer(DecoderLM):
    """Decoder-only language model: ids int64 `[B, T]` to logits `[B, T, vocab_size]`.

    Targets, loss and errors as in DecoderLM.
    """

    def __init__(self, config: LinearTransformerConfig) -> None:
        super().__init__(config, partial(LinearAttention, config.linear_attention))
