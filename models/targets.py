"""Models by name for the command line: each function gives `(model, example inputs)`.

    attngraph compile attngraph.models.targets:decoder_lm

Every target takes `batch` and `tokens` by keyword, is in eval mode on the CPU in float32, has
weights drawn from a fixed seed (the caller's random state is left as it was), and comes with bytes
of real text (the image model with seeded pixels). Call the model as `model(*inputs)`.
"""

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.encoder import PADDING_ID, Encoder, EncoderConfig
from attngraph.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from attngraph.models.linear_transformer import LinearTransformer, LinearTransformerConfig
from attngraph.models.longformer import Longformer, LongformerConfig
from attngraph.models.masked_attention import CausalAttention
from attngraph.models.mla import MLAConfig, MLADecoder
from attngraph.models.modern_decoder import ModernDecoder, ModernDecoderConfig
from attngraph.models.post_norm_decoder import PostNormDecoder
from attngraph.models.sparse_transformer import SparseTransformer, SparseTransformerConfig
from attngraph.models.text import byte_batch
from attngraph.models.vit import ViT, ViTConfig

Target = tuple[nn.Module, tuple[Tensor, ...]]


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """A context in which PyTorch's CPU generator is seeded; afterwards its state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _made(kind: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    """A model with the weights of the seed, in eval mode."""
    with seeded():
        return kind(config).eval()


def ragged_padding(batch: int, tokens: int) -> Tensor:
    """Padding of a batch of unequal lengths: bool `[batch, tokens]`, True at padding.

    The last (b % 4) eighths of row b are padding, so the first row is always full.
    """
    lengths = torch.tensor([tokens - (row % 4) * tokens // 8 for row in range(batch)])
    return torch.arange(tokens) >= lengths[:, None]


def decoder_lm(*, batch: int = 1, tokens: int = 1024) -> Target:
    """The plain decoder-only model: 12 layers, width 768, 12 heads. Input: ids `[B, T]`."""
    return _made(DecoderLM, DecoderLMConfig(max_tokens=max(1024, tokens))), (byte_batch(batch, tokens),)


def tiny_decoder_lm(*, batch: int = 1, tokens: int = 1024) -> Target:
    """The plain decoder-only model, for docs and tests: 2 layers, width 64, 4 heads."""
    config = DecoderLMConfig(layers=2, width=64, heads=4, max_tokens=max(1024, tokens))
    return _made(DecoderLM, config), (byte_batch(batch, tokens),)


def post_norm_decoder(*, batch: int = 1, tokens: int = 1024) -> Target:
    """Sinusoidal positions, post-norm, ReLU: 12 layers, width 768. Input: ids `[B, T]`."""
    return _made(PostNormDecoder, DecoderLMConfig(max_tokens=max(1024, tokens))), (byte_batch(batch, tokens),)


def sparse_transformer(*, batch: int = 1, tokens: int = 1024) -> Target:
    """Fixed sparse attention, stride 128 with 32 summaries: 12 layers, width 768. Input: ids `[B, T]`."""
    config = SparseTransformerConfig(max_tokens=max(1024, tokens))
    return _made(SparseTransformer, config), (byte_batch(batch, tokens),)


def linear_transformer(*, batch: int = 1, tokens: int = 1024) -> Target:
    """Causal linear attention with elu + 1: 12 layers, width 768. Input: ids `[B, T]`."""
    config = LinearTransformerConfig(max_tokens=max(1024, tokens))
    return _made(LinearTransformer, config), (byte_batch(batch, tokens),)


def modern_decoder(*, batch: int = 1, tokens: int = 1024) -> Target:
    """RMSNorm, RoPE, 12 query heads over 4, SwiGLU: 12 layers, width 768. Input: ids `[B, T]`."""
    return _made(ModernDecoder, ModernDecoderConfig()), (byte_batch(batch, tokens),)


def mla_decoder(*, batch: int = 1, tokens: int = 1024) -> Target:
    """Latent attention with decoupled RoPE in every block, at 1/8 of DeepSeek-V3's widths: 2 layers, width
    896, 16 heads, a latent of 512 and a rotary key of 64. Input: ids `[B, T]`."""
    return _made(MLADecoder, MLAConfig()), (byte_batch(batch, tokens),)


def bert(*, batch: int = 1, tokens: int = 1024) -> Target:
    """The BERT base encoder over a ragged batch. Inputs: ids `[B, T]`, keep bool `[B, T]`."""
    model = _made(Encoder, EncoderConfig(max_tokens=max(512, tokens)))
    padding = ragged_padding(batch, tokens)
    ids = byte_batch(batch, tokens).masked_fill(padding, PADDING_ID)
    return model, (ids, ~padding)


def longformer(*, batch: int = 1, tokens: int = 1024) -> Target:
    """The Longformer base encoder, window 512, over a ragged batch; the first token is global.

    Inputs: ids `[B, T]`, is_global and keep bool `[B, T]`.
    """
    model = _made(Longformer, LongformerConfig(max_tokens=max(4096, tokens)))
    padding = ragged_padding(batch, tokens)
    ids = byte_batch(batch, tokens).masked_fill(padding, PADDING_ID)
    is_global = torch.zeros(batch, tokens, dtype=torch.bool)
    is_global[:, 0] = True
    return model, (ids, is_global, ~padding)


def vit(*, batch: int = 1, tokens: int = 1024) -> Target:
    """ViT-B/16 over `tokens` patches, as near to a square as they allow, and the class token.

    Input: images `[B, 3, height, width]` of seeded normal pixels.
    """
    rows = max(r for r in range(1, math.isqrt(tokens) + 1) if tokens % r == 0)
    config = ViTConfig(image=(16 * rows, 16 * (tokens // rows)))
    model = _made(ViT, config)
    generator = torch.Generator().manual_seed(0)
    return model, (torch.randn(batch, config.channels, *config.image, generator=generator),)


def encoder_decoder(*, batch: int = 1, tokens: int = 1024) -> Target:
    """The base Transformer, `tokens` on both sides.

    Inputs: source and target ids `[B, T]`, then their padding masks, bool `[B, T]`.
    """
    model = _made(EncoderDecoder, EncoderDecoderConfig(max_tokens=max(1024, tokens)))
    source, target = byte_batch(batch, tokens), byte_batch(batch, tokens, seed=1)
    padding = ragged_padding(batch, tokens)
    return model, (source, target, padding, padding.flip(0).clone())


def gpt2(*, batch: int = 1, tokens: int = 1024, layers: int = 12) -> Target:
    """Stock GPT-2 small from transformers, eager attention, random weights, no cache.

    Input: ids `[B, T]`, bytes in a vocabulary of 50257. Raises ModuleNotFoundError where
    transformers is not installed.
    """
    transformers = import_transformers()
    config = transformers.GPT2Config(
        attn_implementation="eager", use_cache=False, n_positions=max(1024, tokens), n_layer=layers
    )
    return _made(transformers.GPT2LMHeadModel, config), (byte_batch(batch, tokens),)


def distilgpt2(*, batch: int = 1, tokens: int = 1024) -> Target:
    """`gpt2` with six layers, which is the shape of DistilGPT-2."""
    return gpt2(batch=batch, tokens=tokens, layers=6)


def import_transformers() -> Any:
    """The transformers package, which is imported only when a target needs it."""
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            "this target is a model of the transformers package, which is not installed: "
            'pip install "transformers>=5"',
            name="transformers",
        ) from error


def causal_attention(*, batch: int = 1, tokens: int = 1024) -> Target:
    """Causal attention alone: no projections, 12 heads of width 64, `[batch, 12, tokens, 64]` each."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, batch, 12, tokens, 64, generator=generator)
    return CausalAttention(), (query, key, value)
