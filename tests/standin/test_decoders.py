"""Decoders on a GPU: the tokens of whole sequences, and what a step makes the CPU wait for."""

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn

import attngraph
from tests.cache.small import greedy
from workshop.standin.plugin import DEVICE

_WIDTHS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}


def _gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def _qwen3() -> nn.Module:
    config = transformers.Qwen3Config(**_WIDTHS, num_key_value_heads=1, head_dim=16)
    return transformers.Qwen3ForCausalLM(config)


def _deepseek() -> nn.Module:
    config = transformers.DeepseekV3Config(
        **_WIDTHS, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        first_k_dense_replace=1, num_key_value_heads=2,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def _whole(model: nn.Module, ids: Tensor, new: int) -> Tensor:
    return greedy(lambda ids: model(ids).logits, ids, new)


@pytest.mark.parametrize("build", [_gpt2, _qwen3, _deepseek])
@torch.no_grad()
def test_a_decoder_gives_the_tokens_of_whole_sequences(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    model, ids = build().eval(), torch.randint(0, 64, (2, 5))
    decoder = attngraph.compile(model, cache=True)
    assert torch.equal(decoder.generate(ids, 4), _whole(model, ids, 4))
    _, state = decoder.prefill(ids)
    for _ in range(2):
        assert decoder.decode(ids[:, :1], state).is_cuda
    before = DEVICE.launches
    DEVICE.waits()
    decoder.decode(ids[:, :1], state)
    assert DEVICE.waits() == [] and DEVICE.launches - before < 30  # the graph is captured by now


def test_an_engine_gives_each_request_its_own_tokens() -> None:
    torch.manual_seed(1)
    model = _gpt2().eval()
    decoder = attngraph.compile(model, cache=True)
    prompts = [torch.randint(0, 64, (n,)) for n in (3, 20, 1)]
    engine = attngraph.Engine(decoder)
    requests = [engine.submit(p, max_new_tokens=3) for p in prompts]
    engine.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens == _whole(model, prompt[None], 3)[0, len(prompt) :].tolist()
