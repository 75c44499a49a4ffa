"""One order of sums on a GPU: whole sequences, chunks, single tokens and rows alone, bit for bit."""

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

import attngraph
from tests.standin.test_decoders import _deepseek, _gpt2, _qwen3
from workshop.same_bits import MODELS


def _mistral() -> nn.Module:
    """With a window."""
    config = transformers.MistralConfig(
        hidden_size=32, intermediate_size=48, vocab_size=64, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=1, sliding_window=4,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config)


@pytest.mark.parametrize(("build", "dtype"), [
    (_gpt2, torch.float32), (_qwen3, torch.bfloat16),
    pytest.param(_deepseek, torch.float32, marks=pytest.mark.slow),
    pytest.param(_mistral, torch.bfloat16, marks=pytest.mark.slow),
    *(pytest.param(MODELS[name], torch.float32, marks=pytest.mark.slow)
      for name in ("mixtral, experts", "mamba2, states", "lfm2, convolutions")),
])  # fmt: skip
@torch.no_grad()
def test_a_token_has_the_same_bits_in_any_chunk_and_company(
    build: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    model, ids = build().eval().to(dtype), torch.randint(0, 64, (2, 9))
    decoder = attngraph.compile(model, consistent=True, cache=True)
    whole, _ = decoder.prefill(ids)
    assert whole.is_cuda and "the same bits   in every batch, chunk and page" in str(decoder.report)
    close = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(whole, model(ids).logits, rtol=close, atol=close)
    assert torch.equal(attngraph.compile(model, consistent=True)(ids).logits, whole)
    logits, state = decoder.prefill(ids[1:, :4])
    parts = [logits, *(decoder.decode(ids[1:, begin:end], state) for begin, end in ((4, 5), (5, 9)))]
    assert torch.equal(torch.cat([part.view(1, -1, whole.shape[-1]) for part in parts], 1), whole[1:])


def test_a_trainer_has_the_probabilities_of_what_was_sampled() -> None:
    torch.manual_seed(1)
    model, ids = _gpt2().eval(), torch.randint(0, 64, (3, 6))
    trainer = attngraph.compile(model, consistent=True)
    sampler = attngraph.compile(model, consistent=True, cache=True)
    logits = trainer(ids).logits
    found = attngraph.logprobs(logits[:, :-1], ids[:, 1:])
    with torch.no_grad():
        alone = attngraph.logprobs(sampler.prefill(ids[1:2, :-1])[0], ids[1:2, 1:])
    assert found.is_cuda and torch.equal(found[1:2], alone)
    wanted = torch.log_softmax(model(ids).logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(found, wanted)
    parameters = [model.transformer.wte.weight, model.transformer.h[0].attn.c_attn.weight]
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), parameters), torch.autograd.grad(wanted.sum(), parameters)
    )
