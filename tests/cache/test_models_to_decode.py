"""Every decoder in models/: derived, and equal to itself on whole sequences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attngraph
from attngraph.models import targets
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from attngraph.models.linear_transformer import LinearTransformer, LinearTransformerConfig
from attngraph.models.modern_decoder import ModernDecoder, ModernDecoderConfig
from attngraph.models.post_norm_decoder import PostNormDecoder
from attngraph.models.sparse_transformer import SparseTransformer, SparseTransformerConfig
from tests.cache.small import stirred

SMALL = DecoderLMConfig(layers=2, width=16, heads=2, max_tokens=32)
MODELS = {
    "decoder-only LM": lambda: DecoderLM(SMALL),
    "post-norm": lambda: PostNormDecoder(SMALL),
    "modern": lambda: ModernDecoder(
        ModernDecoderConfig(layers=2, width=16, heads=4, kv_heads=2, head_width=4, hidden=32)
    ),
    "modern, interleaved": lambda: ModernDecoder(
        ModernDecoderConfig(layers=1, width=16, heads=4, kv_heads=1, head_width=4, rotary="interleaved")
    ),
    "sparse": lambda: SparseTransformer(SparseTransformerConfig(layers=2, width=16, heads=2, max_tokens=32)),
}


def logits_of(result: object) -> Tensor:
    found = result[0] if isinstance(result, tuple) else result
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_decoders(name: str) -> None:
    model = stirred(MODELS[name]())
    tokens = torch.randint(0, 200, (2, 20))
    compiled = attngraph.compile(model, cache=True)
    logits, state = compiled.prefill(tokens[:, :6])
    pieces = [logits, *(compiled.decode(tokens[:, n : n + 2], state) for n in range(6, 20, 2))]
    with torch.no_grad():
        wanted = logits_of(model(tokens))
    torch.testing.assert_close(torch.cat(pieces, 1), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_encoder_decoder() -> None:
    model = stirred(EncoderDecoder(EncoderDecoderConfig(layers=2, width=16, heads=2)))
    source, target = torch.randint(0, 200, (2, 9)), torch.randint(0, 200, (2, 12))
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 5:] = True
    compiled = attngraph.compile(model, cache=True)
    logits, state = compiled.prefill(target[:, :4], source=source, source_padding=padding)
    pieces = [logits, *(compiled.decode(target[:, n : n + 2], state) for n in range(4, 12, 2))]
    with torch.no_grad():
        wanted = logits_of(model(source, target, source_padding=padding))
    torch.testing.assert_close(torch.cat(pieces, 1), wanted, rtol=1e-4, atol=1e-4)


def test_linear_attention_carries_its_sums() -> None:
    model = LinearTransformer(LinearTransformerConfig(layers=1, width=16, heads=2, max_tokens=32)).eval()
    decoder, tokens = attngraph.compile(model, cache=True), torch.randint(0, 200, (1, 9))
    logits, state = decoder.prefill(tokens[:, :6])
    found = torch.cat([logits, *(decoder.decode(tokens[:, at], state) for at in range(6, 9))], 1)
    torch.testing.assert_close(found, logits_of(model(tokens)), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_main_target_at_real_size() -> None:
    model, (tokens,) = targets.decoder_lm(tokens=40)
    compiled = attngraph.compile(model, cache=True)
    found = compiled.generate(tokens[:, :30], 10)
    whole = found[:, :30]
    with torch.no_grad():
        for place in range(30, 40):
            whole = torch.cat([whole, logits_of(model(whole))[:, -1:].argmax(-1)], 1)
            assert torch.equal(whole, found[:, : place + 1])
