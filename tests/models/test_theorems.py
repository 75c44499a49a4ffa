"""What is true of attention whatever the weights, held against the plain models and the compiled ones:
symmetries, causality, relative rotations, the online recurrence, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import attngraph
from attngraph.models.attention import (
    AttentionConfig,
    CrossAttention,
    CrossAttentionConfig,
    DotProductAttention,
    HeadByHeadAttention,
    MultiHeadAttention,
    PackedMultiHeadAttention,
    ScaledDotProductAttention,
)
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from attngraph.models.grouped_attention import GroupedQueryAttention, GroupedQueryConfig
from attngraph.models.linear_attention import LinearAttention, LinearAttentionConfig
from attngraph.models.linear_transformer import LinearTransformer, LinearTransformerConfig
from attngraph.models.masked_attention import (
    CausalAttentionConfig,
    CausalSelfAttention,
    SlidingWindowAttention,
    SlidingWindowConfig,
)
from attngraph.models.modern_decoder import ModernDecoder, ModernDecoderConfig
from attngraph.models.online_softmax import FlashAttention, OnlineSoftmaxAttention
from attngraph.models.positions import RotaryLayout, rotary_angles, rotate_half, rotate_interleaved
from attngraph.models.post_norm_decoder import PostNormDecoder
from attngraph.models.relative_bias import RelativeBiasAttention, RelativeBiasConfig
from attngraph.models.sparse_attention import SparseAttention, SparseAttentionConfig
from attngraph.models.sparse_transformer import SparseTransformer, SparseTransformerConfig
from attngraph.models.text import byte_batch

SMALL = {"width": 16, "heads": 4, "key_width": 4, "value_width": 5}
STACK = {"layers": 2, "width": 16, "heads": 4, "max_tokens": 32}
HOW = ["eager", "compiled"]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def run_as(how: str, model: nn.Module) -> nn.Module:
    return attngraph.compile(model) if how == "compiled" else model


SELF_ATTENTIONS: dict[str, Callable[[], nn.Module]] = {
    "separate": lambda: MultiHeadAttention(AttentionConfig(**SMALL)),
    "packed": lambda: PackedMultiHeadAttention(AttentionConfig(**SMALL)),
    "head by head": lambda: HeadByHeadAttention(AttentionConfig(**SMALL)),
    "grouped": lambda: GroupedQueryAttention(GroupedQueryConfig(**SMALL, kv_heads=2, causal=False)),
    "linear": lambda: LinearAttention(LinearAttentionConfig(**SMALL, causal=False)),
    "linear, no features": lambda: LinearAttention(
        LinearAttentionConfig(**SMALL, causal=False, feature_map="identity")
    ),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", SELF_ATTENTIONS)
def test_without_positions_self_attention_commutes_with_every_permutation_of_the_tokens(
    name: str, how: str
) -> None:
    module = run_as(how, SELF_ATTENTIONS[name]().double())
    x, order = rand(2, 9, 16), torch.randperm(9)
    assert_close(module(x[:, order]), module(x)[:, order])


@pytest.mark.parametrize("how", HOW)
def test_attention_does_not_see_the_order_of_key_value_pairs(how: str) -> None:
    order = torch.randperm(7)
    one, many = (run_as(how, m) for m in (DotProductAttention(), ScaledDotProductAttention()))
    query, keys, values = rand(3, 4), rand(7, 4), rand(7, 5)
    assert_close(one(query[0], keys[order], values[order]), one(query[0], keys, values))
    assert_close(many(query, keys[order], values[order]), many(query, keys, values))

    cross = run_as(how, CrossAttention(CrossAttentionConfig(**SMALL, memory_width=6)).double())
    x, memory, padding = rand(2, 5, 16), rand(2, 7, 6), torch.arange(7).expand(2, 7) >= 4
    assert_close(cross(x, memory[:, order], padding[:, order]), cross(x, memory, padding))


CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "pre-norm": lambda: DecoderLM(DecoderLMConfig(**STACK)),
    "post-norm": lambda: PostNormDecoder(DecoderLMConfig(**STACK)),
    "modern": lambda: ModernDecoder(
        ModernDecoderConfig(layers=2, width=16, heads=4, kv_heads=2, head_width=4, hidden=24)
    ),
    "sparse, strided": lambda: SparseTransformer(
        SparseTransformerConfig(**STACK, pattern="strided", stride=3, summary=1)
    ),
    "sparse, fixed": lambda: SparseTransformer(SparseTransformerConfig(**STACK, stride=4, summary=2)),
    "linear": lambda: LinearTransformer(LinearTransformerConfig(**STACK)),
    "encoder-decoder": lambda: EncoderDecoder(
        EncoderDecoderConfig(layers=2, width=16, heads=4, hidden=24, max_tokens=32)
    ),
}
QUICK = {"modern", "sparse, fixed", "linear"}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(n, how, marks=pytest.mark.slow) if how == "compiled" and n not in QUICK else (n, how)
        for n in CAUSAL
        for how in HOW
    ],
)
def test_a_causal_model_at_t_does_not_move_when_a_later_token_changes(name: str, how: str) -> None:
    model = run_as(how, CAUSAL[name]().double().eval())
    source, ids = byte_batch(2, 9), byte_batch(2, 12, seed=1)
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    given = (source,) if name == "encoder-decoder" else ()
    before, after = model(*given, ids), model(*given, changed)
    assert_close(after[:, :7], before[:, :7], rtol=0, atol=1e-13)
    assert (after[:, 7:] - before[:, 7:]).abs().amax(dim=-1).min() > 1e-6


class RotatedAttention(nn.Module):
    """Attention whose queries and keys stand at the given positions."""

    def __init__(self, layout: RotaryLayout) -> None:
        super().__init__()
        self.rotate = rotate_half if layout == "half" else rotate_interleaved

    def forward(self, positions: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        angles = rotary_angles(positions, query.shape[-1])
        scores = self.rotate(query, angles) @ self.rotate(key, angles).transpose(-2, -1)
        return torch.softmax(scores / math.sqrt(query.shape[-1]), dim=-1) @ value


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_with_rotary_positions_only_differences_of_positions_count(layout: RotaryLayout, how: str) -> None:
    module = run_as(how, RotatedAttention(layout))
    query, key, value = rand(3, 2, 7, 6), rand(3, 2, 7, 6), rand(3, 2, 7, 6)
    here = torch.arange(7, dtype=torch.float64)
    assert_close(module(here + 1000, query, key, value), module(here, query, key, value), atol=1e-10, rtol=0)
    twice = module(here * 2, query, key, value)
    assert not torch.allclose(twice, module(here, query, key, value), atol=1e-3)


@pytest.mark.parametrize("how", HOW)
def test_the_online_recurrence_is_softmax_at_every_prefix(how: str) -> None:
    online = run_as(how, OnlineSoftmaxAttention())
    scores, values = 5 * rand(3, 2, 6), rand(3, 6, 4)
    prefixes = online(scores, values)
    for i in range(6):
        expected = torch.softmax(scores[..., : i + 1], dim=-1) @ values[:, : i + 1]
        assert_close(prefixes[:, i], expected)


@pytest.mark.parametrize("how", HOW)
def test_flash_attention_by_blocks_is_attention(how: str) -> None:
    query, key, value = rand(2, 3, 5, 4), rand(2, 3, 7, 4), rand(2, 3, 7, 6)
    flash = run_as(how, FlashAttention(3))
    assert_close(flash(query, key, value), ScaledDotProductAttention()(query, key, value))


@pytest.mark.parametrize(("layers", "tokens", "width"), [(1, 16, 32), (2, 16, 32), (2, 48, 32), (3, 24, 64)])
def test_a_forward_pass_costs_what_the_formula_says(layers: int, tokens: int, width: int) -> None:
    """N L (12 T C^2 + 2 T^2 C) multiplications: 4 C^2 a token for the projections of attention, 8 C^2 for
    the MLP, T C each for the scores and the mixing of values; and the head."""
    sizes = DecoderLMConfig(layers=layers, width=width, heads=4, max_tokens=64)
    model, ids = DecoderLM(sizes).eval(), byte_batch(3, tokens)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    blocks = 3 * layers * (12 * tokens * width**2 + 2 * tokens**2 * width)
    head = 3 * tokens * width * 256
    assert counter.get_total_flops() == 2 * (blocks + head)  # a multiplication and an addition each


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that were allocated at one time during a call, counted by PyTorch's allocator, what
    kernels hold for themselves included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    del result
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: int(e.start_ns())):
        held += event.nbytes()
        most = max(most, held)
    return most


LONG = {"width": 32, "heads": 4, "key_width": 8, "value_width": 8}
MEMORY: dict[str, Callable[[], nn.Module]] = {
    "causal": lambda: CausalSelfAttention(CausalAttentionConfig(**LONG)),
    "no mask": lambda: MultiHeadAttention(AttentionConfig(**LONG)),
    "window": lambda: SlidingWindowAttention(SlidingWindowConfig(**LONG, window=16)),
    "sparse": lambda: SparseAttention(SparseAttentionConfig(**LONG, pattern="fixed", stride=32)),
    "T5 bias": lambda: RelativeBiasAttention(RelativeBiasConfig(**LONG)),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "name", [n if n in ("no mask", "window") else pytest.param(n, marks=pytest.mark.slow) for n in MEMORY]
)
def test_memory_grows_with_the_tokens_when_fused_and_with_their_square_when_not(
    name: str, training: bool
) -> None:
    model = MEMORY[name]()
    compiled = attngraph.compile(model)

    def growth(callable_model: nn.Module) -> float:
        """The power of T by which peak memory grows, from 256 tokens to 1024."""
        found = []
        for tokens in (256, 1024):
            x = torch.randn(2, tokens, 32, requires_grad=training)

            def call(x: Tensor = x) -> None:
                with torch.set_grad_enabled(training):
                    output = callable_model(x)
                    if training:
                        output.sum().backward()

            call()  # traced, and gradients have their memory
            found.append(peak_bytes(call))
        return math.log(found[1] / found[0], 4)

    assert growth(model) > 1.9
    assert growth(compiled) < 1.25  # a kernel may take larger blocks for more tokens
