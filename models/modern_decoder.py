"""A decoder-only language model in the manner of Llama.

Unlike `decoder_lm`: RMSNorm instead of LayerNorm, rotary instead of learned positions, grouped queries,
SwiGLU instead of GELU, and no biases.

    RMSNorm(x) = g * x / sqrt(mean(x^2) + epsilon)               (Zhang & Sennrich 2019, section 3)
    SwiGLU(x) = (SiLU(x W_gate) * (x W_up)) W_down               (Shazeer 2020, section 2)
    x = x + Attention(RMSNorm(x));  x = x + SwiGLU(RMSNorm(x))   for each block
    logits = RMSNorm(x) W_head

Rotary positions, in either layout of the pairs, are described in `positions`.

Shapes: ids int64 `[B, T]`, logits `[B, T, vocab_size]`. There is no table of positions, so T has no limit.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from attngraph.models.attention import merge_heads, split_heads
from attngraph.models.decoder_lm import with_loss
from attngraph.models.grouped_attention import SharingSpelling, attend_to_shared_heads
from attngraph.models.positions import RotaryLayout, rotary_angles, rotate_half, rotate_interleaved


@dataclass(frozen=True)
class ModernDecoderConfig:
    """Sizes of the model; the defaults are about those of `decoder_lm`.

    `heads` is H, `kv_heads` is G, `head_width` is D (even), `hidden` is the width inside SwiGLU.
    Raises ValueError where G does not divide H or D is odd.
    """

    vocab_size: int = 256
    layers: int = 12
    width: int = 768
    heads: int = 12
    kv_heads: int = 4
    head_width: int = 64
    hidden: int = 2048
    rotary: RotaryLayout = "half"
    rotary_base: float = 10000.0
    sharing: SharingSpelling = "repeat_interleave"
    norm_epsilon: float = 1e-6
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads != 0:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly: "
                "heads must be a multiple of kv_heads"
            )
        if self.head_width % 2 != 0:
            raise ValueError(f"head_width {self.head_width} must be even: RoPE turns pairs")


class RMSNorm(nn.Module):
    """Divide by the root mean square of the last axis, then scale: `[..., C]` to `[..., C]`."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.epsilon)


class RotaryAttention(nn.Module):
    """Causal grouped-query attention with rotary positions: `[B, T, C]` to `[B, T, C]`."""

    def __init__(self, config: ModernDecoderConfig) -> None:
        super().__init__()
        self.config = config
        queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
        self.query = nn.Linear(config.width, queries, bias=False)
        self.key = nn.Linear(config.width, keys, bias=False)
        self.value = nn.Linear(config.width, keys, bias=False)
        self.project = nn.Linear(queries, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        query = split_heads(self.query(x), config.heads)  # [B, H, T, D]
        key = split_heads(self.key(x), config.kv_heads)  # [B, G, T, D]
        value = split_heads(self.value(x), config.kv_heads)

        # Angles of late positions need float32 at least: bfloat16 cannot tell 257 from 256.
        precision = torch.promote_types(x.dtype, torch.float32)
        positions = torch.arange(x.shape[1], device=x.device, dtype=precision)  # [T]
        angles = rotary_angles(positions, config.head_width, config.rotary_base)  # [T, D / 2]
        rotate = rotate_half if config.rotary == "half" else rotate_interleaved
        query, key = rotate(query, angles), rotate(key, angles)

        mixed = attend_to_shared_heads(
            query, key, value, spelling=config.sharing, causal=True, dropout=self.dropout
        )
        output: Tensor = self.project(merge_heads(mixed))
        return output


class SwiGLU(nn.Module):
    """A gated feed-forward, each token on its own: `[B, T, width]` to the same."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return output


class ModernBlock(nn.Module):
    """Some attention, then SwiGLU, each added to its input: `[B, T, width]` to the same."""

    def __init__(self, attention: nn.Module, width: int, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width, epsilon)
        self.attention = attention
        self.feed_forward_norm = RMSNorm(width, epsilon)
        self.feed_forward = SwiGLU(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return x


class ModernStack(nn.Module):
    """Decoder-only language model of given attentions: ids int64 `[B, T]` to logits `[B, T, vocab_size]`.

    With `targets` int64 `[B, T]`, where `targets[b, t]` is the token after `ids[b, t]` (or -100 to
    leave it out), returns `(logits, loss)` with the mean cross entropy as a scalar.
    """

    def __init__(
        self, attentions: Iterable[nn.Module], vocab_size: int, width: int, hidden: int, epsilon: float
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList([ModernBlock(a, width, hidden, epsilon) for a in attentions])
        self.norm = RMSNorm(width, epsilon)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        x = self.embedding(ids)  # [B, T, width]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))  # [B, T, vocab_size]
        return with_loss(logits, targets)


class ModernDecoder(ModernStack):
    """The stack with grouped queries and rotary positions."""

    def __init__(self, config: ModernDecoderConfig) -> None:
        attentions = [RotaryAttention(config) for _ in range(config.layers)]
        super().__init__(attentions, config.vocab_size, config.width, config.hidden, config.norm_epsilon)
        self.config = config
