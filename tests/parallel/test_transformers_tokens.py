"""Unmodified models of transformers whose tokens are divided among simulated ranks: values and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attngraph.report.ranks import ContextEntry

transformers = pytest.importorskip("transformers")
Compared = Callable[..., ContextEntry]
_USUAL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
_SHARED = {**_USUAL, "num_key_value_heads": 2}
_GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 64, "eos_token_id": 0}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64}


def _model(name: str, config: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**sizes)).eval()


def _ids(tokens: int = 16) -> torch.Tensor:
    return torch.randint(3, 60, (2, tokens))


@pytest.mark.parametrize(
    "name, config, sizes, chunks",
    [
        ("GPT2LMHeadModel", "GPT2Config", _GPT2, 2),
        ("LlamaForCausalLM", "LlamaConfig", _SHARED, 2),
        ("MistralForCausalLM", "MistralConfig", {**_SHARED, "sliding_window": 3}, 1),
        ("OPTForCausalLM", "OPTConfig", {**_USUAL, "ffn_dim": 64, "word_embed_proj_dim": 32}, 2),
        ("GPTNeoXForCausalLM", "GPTNeoXConfig", _USUAL, 2),
    ],
)
def test_decoders(
    same_by_tokens: Compared, name: str, config: str, sizes: dict[str, Any], chunks: int
) -> None:
    padded = torch.ones(2, 16, dtype=torch.long)
    padded[0, 12:] = 0
    model = _model(name, config, sizes)
    entry = same_by_tokens(model, 4, _ids(), attention_mask=padded, use_cache=False)
    assert [(a.attentions, a.chunks) for a in entry.axes] == [(1, chunks)]
    assert entry.whole == ()


def test_an_encoder(same_by_tokens: Compared) -> None:
    padded = torch.ones(2, 16, dtype=torch.long)
    padded[1, 9:] = 0
    model = _model("BertForMaskedLM", "BertConfig", _USUAL)
    entry = same_by_tokens(model, 2, _ids(), attention_mask=padded)
    assert [a.attentions for a in entry.axes] == [1] and entry.whole == ()


@pytest.mark.slow
def test_an_encoder_and_a_decoder(same_by_tokens: Compared) -> None:
    """With biases by distance, which each rank computes for its own queries."""
    model = _model("T5ForConditionalGeneration", "T5Config", _T5)
    entry = same_by_tokens(model, 2, _ids(), decoder_input_ids=_ids(8), use_cache=False)
    assert [(a.tokens, a.attentions) for a in entry.axes] == [(16, 1), (8, 2)]


@pytest.mark.slow
def test_training_with_dropout(same_by_tokens: Compared) -> None:
    """The loss is that of one device: tokens' losses are gathered, and random numbers are the same."""
    model = _model("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "attn_pdrop": 0.0}).train()
    ids = _ids()
    entry = same_by_tokens(model, 2, ids, labels=ids.clone(), use_cache=False, wide=False)
    assert [a.attentions for a in entry.axes] == [1]
    assert min(f.bytes for f in entry.fetched if f.what == "all tokens of a value") == (64, 64)
