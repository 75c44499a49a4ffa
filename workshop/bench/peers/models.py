"""The models that are measured: transformers' own, with random weights that every process draws alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def gpt2() -> Any:
    """GPT-2 at real size (124M parameters) with room for more tokens than its own 1,024."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_positions=1152))


def llama() -> Any:
    """A Llama of 100M parameters: 12 layers of width 768, 12 heads over 4 key heads, tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
        num_attention_heads=12, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tiny() -> Any:
    """A Llama that is as small as it can be, to see that everything runs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS: Mapping[str, Callable[[], Any]] = {"GPT-2": gpt2, "Llama 100M": llama, "tiny Llama": tiny}


def make(name: str) -> Any:
    """The model, in eval mode, with the same weights in every process."""
    torch.manual_seed(0)
    return MODELS[name]().eval()


def bytes_of_weights(model: nn.Module) -> int:
    """Bytes that a token has to read: all weights but tables of which it looks up a row."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tables -= {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    return sum(p.nbytes for p in model.parameters() if id(p) not in tables)


class WithPast(nn.Module):
    """A model as a pure function: tokens and each layer's keys and values to logits and longer ones.

    `beams` picks the rows of the past (`[B]`); engines that keep the past as state know it by this input.
    """

    def __init__(self, model: Any, has_beams: bool = False) -> None:
        super().__init__()
        self.model, self.has_beams = model, has_beams

    def forward(self, ids: Any, *rest: Any) -> tuple[Any, ...]:
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        from attngraph.hf import CACHE

        past = list(rest)
        if self.has_beams:
            beams = past.pop(0)
            past = [p.index_select(0, beams) for p in past]
        cache = DynamicCache()
        for keys, values in zip(past[::2], past[1::2], strict=True):
            layer = DynamicLayer()
            layer.keys, layer.values, layer.is_initialized = keys, values, True
            layer.dtype, layer.device = keys.dtype, keys.device
            cache.layers.append(layer)
        kept, new = past[0].shape[2], ids.shape[1]
        positions = torch.arange(new) + kept
        mask = (torch.arange(kept + new)[None] <= positions[:, None])[None, None]
        found = self.model(
            ids, attention_mask=mask, position_ids=positions[None], **{CACHE: cache}, use_cache=True
        )
        return found.logits, *(t for layer in cache.layers for t in (layer.keys, layer.values))


def past_of(model: Any, rows: int, kept: int) -> list[torch.Tensor]:
    """Keys and values of every layer, as `WithPast` takes them."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = config.hidden_size // config.num_attention_heads
    return [torch.zeros(rows, heads, kept, width) for _ in range(2 * config.num_hidden_layers)]
