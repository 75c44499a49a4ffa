"""Multi-head latent attention: keys and values that are made from one narrow vector per token.

    c_t = norm(x_t W_dkv)                       the latent of a token, L wide, shared by all heads
    k_t^h = c_t W_uk^h,   v_t^h = c_t W_uv^h    the key and the value of head h
    q_t^h = norm(x_t W_dq) W_uq^h               or x_t W_q^h, without a rank of the queries' own

(DeepSeek-V2, Liu et al. 2024, section 2.1.2.) RoPE on k_t^h would put a rotation that depends
on the position between W_uq and W_uk, so that these could not be absorbed into one matrix. So a few extra
coordinates carry positions: the *decoupled* rotary key, one for all heads (ibid., section 2.1.3):

    q_t^h = [ W_uq^h ; RoPE(W_qr^h) ],   k_t^h = [ c_t W_uk^h ; RoPE(x_t W_kr) ]
    score = (q . k) / sqrt(P + R)

Nothing here caches values or multiplies weights in advance: keys and values are computed for every head.
The scores of the decoupled form can be written in three ways that give the same numbers.

Shapes: x `[B, T, C]`; P the width of a key's up-projected part, R of its rotary part, V of a value, L of
the latent, Q of the queries' own rank. ids int64 `[B, T]`, logits `[B, T, vocab_size]`.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from attngraph.models.attention import merge_heads, split_heads
from attngraph.models.grouped_attention import hide_future
from attngraph.models.modern_decoder import ModernStack, RMSNorm
from attngraph.models.positions import RotaryLayout, rotary_angles, rotate_half, rotate_interleaved

ScoreSpelling = Literal["concatenated", "summed", "absorbed"]
"""The decoupled form as one product of concatenated vectors; as the sum of two products; or as that sum with
the query multiplied by W_uk, so that keys and values are the latents themselves."""


@dataclass(frozen=True)
class MLAConfig:
    """Sizes of the model; the defaults are 1/8 of DeepSeek-V3's widths and heads at its head sizes.

    `latent` is L, `nope` is P, `rope` is R (even; 0: no positions), `value` is V, `query_rank` is Q (None:
    queries are projected from x directly), `norm`: whether the latents are normalised before they are
    projected up. Raises ValueError where R is odd.
    """

    vocab_size: int = 256
    layers: int = 2
    width: int = 896
    heads: int = 16
    latent: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    query_rank: int | None = 192
    norm: bool = True
    bias: bool = False
    scores: ScoreSpelling = "concatenated"
    rotary: RotaryLayout = "interleaved"
    rotary_base: float = 10000.0
    hidden: int = 2304
    norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.rope % 2 != 0:
            raise ValueError(f"rope {self.rope} must be even: RoPE turns pairs")


class LatentAttention(nn.Module):
    """Without positions: keys and values are both projected from the latent alone. `[B, T, C]` to the same.

    At DeepSeek-V3's size C is 7168, there are 128 heads of 128, and the latent may be taken 576 wide.
    """

    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        self.config = config
        self.query = nn.Linear(config.width, config.heads * config.nope, bias=config.bias)
        self.down = nn.Linear(config.width, config.latent, bias=config.bias)
        self.key_up = nn.Linear(config.latent, config.heads * config.nope, bias=config.bias)
        self.value_up = nn.Linear(config.latent, config.heads * config.value, bias=config.bias)
        self.project = nn.Linear(config.heads * config.value, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        latent = self.down(x)  # [B, T, L]
        query = split_heads(self.query(x), config.heads)  # [B, H, T, P]
        key = split_heads(self.key_up(latent), config.heads)
        value = split_heads(self.value_up(latent), config.heads)  # [B, H, T, V]

        scores = hide_future(query @ key.transpose(-2, -1) / math.sqrt(config.nope))
        output: Tensor = self.project(merge_heads(torch.softmax(scores, dim=-1) @ value))
        return output


class QueryProjection(nn.Module):
    """The projection of queries, of low rank if `query_rank` is set: `[B, T, C]` to `[B, H, T, P + R]`."""

    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        self.heads = config.heads
        rank = config.width if config.query_rank is None else config.query_rank
        self.down: nn.Module = nn.Identity()
        if config.query_rank is not None:
            self.down = nn.Linear(config.width, rank, bias=config.bias)
        normed = config.norm and config.query_rank is not None
        self.norm = RMSNorm(rank, config.norm_epsilon) if normed else nn.Identity()
        self.up = nn.Linear(rank, config.heads * (config.nope + config.rope), bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return split_heads(self.up(self.norm(self.down(x))), self.heads)


class RotaryLatentAttention(nn.Module):
    """With decoupled RoPE: `[B, T, C]` to `[B, T, C]`.

    `up` holds, head by head, the matrix of the keys and then that of the values.
    """

    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        self.config = config
        self.query = QueryProjection(config)
        self.down = nn.Linear(config.width, config.latent + config.rope, bias=config.bias)
        self.norm = RMSNorm(config.latent, config.norm_epsilon) if config.norm else nn.Identity()
        self.up = nn.Linear(config.latent, config.heads * (config.nope + config.value), bias=False)
        self.project = nn.Linear(config.heads * config.value, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        sizes_of_query, sizes_of_key = [config.nope, config.rope], [config.latent, config.rope]
        query, rotary_query = torch.split(self.query(x), sizes_of_query, dim=-1)  # [B, H, T, P or R]
        latent, rotary_key = torch.split(self.down(x), sizes_of_key, dim=-1)
        latent = self.norm(latent)  # [B, T, L]

        precision = torch.promote_types(x.dtype, torch.float32)
        positions = torch.arange(x.shape[1], device=x.device, dtype=precision)  # [T]
        angles = rotary_angles(positions, config.rope, config.rotary_base)  # [T, R / 2]
        rotate = rotate_half if config.rotary == "half" else rotate_interleaved
        rotary_query, rotary_key = rotate(rotary_query, angles), rotate(rotary_key, angles)

        mixed = self._attend(query, rotary_query, latent, rotary_key)  # [B, H, T, V]
        output: Tensor = self.project(merge_heads(mixed))
        return output

    def _attend(self, query: Tensor, rotary_query: Tensor, latent: Tensor, rotary_key: Tensor) -> Tensor:
        config = self.config
        rotary_key = rotary_key.unsqueeze(1)  # [B, 1, T, R]
        scale = 1 / math.sqrt(config.nope + config.rope)
        if config.scores == "absorbed":
            weight = self.up.weight.view(config.heads, config.nope + config.value, config.latent)
            key_up, value_up = torch.split(weight, [config.nope, config.value], dim=1)  # [H, P or V, L]
            shared = latent.unsqueeze(1)  # [B, 1, T, L]
            scores = (query @ key_up) @ shared.transpose(-2, -1) + rotary_query @ rotary_key.transpose(-2, -1)
            weights = torch.softmax(hide_future(scores * scale), dim=-1)
            absorbed: Tensor = (weights @ shared) @ value_up.transpose(-2, -1)
            return absorbed
        expanded = split_heads(self.up(latent), config.heads)  # [B, H, T, P + V]
        key, value = torch.split(expanded, [config.nope, config.value], dim=-1)
        if config.scores == "summed":
            scores = query @ key.transpose(-2, -1) + rotary_query @ rotary_key.transpose(-2, -1)
        else:
            whole_key = torch.cat([key, rotary_key.expand(-1, config.heads, -1, -1)], dim=-1)
            scores = torch.cat([query, rotary_query], dim=-1) @ whole_key.transpose(-2, -1)
        mixed: Tensor = torch.softmax(hide_future(scores * scale), dim=-1) @ value
        return mixed


class MLADecoder(ModernStack):
    """`ModernDecoder` with latent attention: ids int64 `[B, T]` to logits `[B, T, vocab_size]`."""

    def __init__(self, config: MLAConfig) -> None:
        kind = RotaryLatentAttention if config.rope else LatentAttention
        attentions = [kind(config) for _ in range(config.layers)]
        super().__init__(attentions, config.vocab_size, config.width, config.hidden, config.norm_epsilon)
        self.config = config
