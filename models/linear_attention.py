"""Linear attention: no softmax, so that the products can be reordered.

Written here in the order of the definition, with a score for each pair of tokens. Without a
feature map the scores are the weights, unscaled:

    out = ((X W_Q)(X W_K)^T) X W_V
    causal: out_i = sum over j <= i of (q_i . k_j) v_j

The sum over j can be taken first, as a matrix D x Dv, which costs O(T) and not O(T^2)
(Katharopoulos et al. 2020, section 3.2; Schlag et al. 2021, section 3). With the feature map of
the paper the weights are positive and are divided by their sum:

    out_i = sum_j phi(q_i) . phi(k_j) v_j / sum_j phi(q_i) . phi(k_j)       (equation 4)
    phi(x) = elu(x) + 1                                                     (equation 7)

Shapes: x `[B, T, C]` to `[B, T, C]`; weights `[B, H, T, T]`.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from attngraph.models.attention import merge_heads, split_heads

FeatureMap = Literal["identity", "elu"]


@dataclass(frozen=True)
class LinearAttentionConfig:
    """Sizes of one linear attention, as in AttentionConfig but without dropout.

    `feature_map` "identity" gives plain products, "elu" positive ones over their sum; `causal`
    restricts the sums to j <= i.
    """

    width: int = 768
    heads: int = 12
    key_width: int = 64
    value_width: int = 64
    bias: bool = True
    causal: bool = True
    feature_map: FeatureMap = "elu"


class LinearAttention(nn.Module):
    """Self-attention whose weights are products, not exponentials: `[B, T, C]` to `[B, T, C]`."""

    def __init__(self, config: LinearAttentionConfig) -> None:
        super().__init__()
        keys, values = config.heads * config.key_width, config.heads * config.value_width
        self.config = config
        self.query = nn.Linear(config.width, keys, bias=config.bias)
        self.key = nn.Linear(config.width, keys, bias=config.bias)
        self.value = nn.Linear(config.width, values, bias=config.bias)
        self.project = nn.Linear(values, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        query = split_heads(self.query(x), self.config.heads)  # [B, H, T, D]
        key = split_heads(self.key(x), self.config.heads)
        value = split_heads(self.value(x), self.config.heads)  # [B, H, T, Dv]
        if self.config.feature_map == "elu":
            query, key = functional.elu(query) + 1, functional.elu(key) + 1

        weights = query @ key.transpose(-2, -1)  # [B, H, T, T]
        if self.config.causal:
            weights = weights.tril()
        mixed = weights @ value
        if self.config.feature_map == "elu":
            mixed = mixed / weights.sum(dim=-1, keepdim=True)
        output: Tensor = self.project(merge_heads(mixed))
        return output
