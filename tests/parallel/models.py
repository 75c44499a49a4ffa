"""The decoders that tests divide among ranks: stock classes of transformers, and one of shared keys."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph

LLAMA = {
    "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "pad_token_id": 0,
}  # fmt: skip
HEADED = {**LLAMA, "head_dim": 8}
BERT = {
    "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 40,
}  # fmt: skip
GPT2 = {"n_layer": 1, "n_embd": 32, "n_head": 4, "n_positions": 32}
T5 = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 1}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **LLAMA, "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 0, "moe_intermediate_size": 16,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
}  # fmt: skip
CLASSES: dict[str, tuple[dict[str, Any], int, tuple[int, int] | None]] = {
    "GPT2LMHeadModel": (GPT2, 3, (128, 64)),
    "LlamaForCausalLM": (LLAMA, 3, (64, 32)),
    "GPTNeoXForCausalLM": ({**BERT, "rotary_pct": 0.5}, 2, (128, 64)),
    "BloomForCausalLM": ({"n_layer": 1, "hidden_size": 32, "n_head": 4}, 3, (128, 64)),
    "OPTForCausalLM": ({**BERT, "ffn_dim": 64, "word_embed_proj_dim": 32}, 3, (128, 64)),
    "MptForCausalLM": ({"d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 32}, 3, (128, 64)),
    "FalconForCausalLM": (
        {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}, 2, (32, 16)),
    "MistralForCausalLM": ({**LLAMA, "sliding_window": 3}, 3, (64, 32)),
    "Qwen2ForCausalLM": (LLAMA, 3, (64, 32)),
    "Qwen3ForCausalLM": (HEADED, 3, (64, 32)),
    "GemmaForCausalLM": ({**HEADED, "num_key_value_heads": 1}, 3, (32, 16)),
    "Gemma2ForCausalLM": ({**HEADED, "num_hidden_layers": 2}, 5, (128, 64)),
    "PhiForCausalLM": ({**LLAMA, "num_key_value_heads": 4}, 2, (128, 64)),
    "Phi3ForCausalLM": (LLAMA, 3, (64, 32)),
    "OlmoForCausalLM": (LLAMA, 3, (64, 32)),
    "Olmo2ForCausalLM": (LLAMA, 3, (64, 32)),
    "CohereForCausalLM": ({**LLAMA, "use_qk_norm": True}, 2, (64, 32)),
    "StableLmForCausalLM": ({**LLAMA, "qk_layernorm": True}, 3, (64, 32)),
    "GraniteForCausalLM": (LLAMA, 3, (64, 32)),
    "Starcoder2ForCausalLM": (LLAMA, 3, (64, 32)),
    "PersimmonForCausalLM": (
        {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, 3, (128, 64)),
    "GPTBigCodeForCausalLM": (GPT2, 3, (32, 16)),
    "MixtralForCausalLM": ({**LLAMA, **EXPERTS}, 3, (64, 32)),
    "DeepseekV3ForCausalLM": (LATENT, 3, (32, 16)),
    "DeepseekV2ForCausalLM": ({**LATENT, "n_group": 1}, 3, None),
    "GlmForCausalLM": (HEADED, 3, None),
    "NemotronForCausalLM": (LLAMA, 3, None),
    "SmolLM3ForCausalLM": (LLAMA, 3, None),
    "GptOssForCausalLM": ({**HEADED, **EXPERTS, "num_hidden_layers": 2, "sliding_window": 4}, 5, None),
    "GPTJForCausalLM": ({**GPT2, "rotary_dim": 4}, 2, None),
    "GPTNeoForCausalLM": (
        {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
         "window_size": 4, "max_position_embeddings": 32}, 5, None),
    "CodeGenForCausalLM": ({**GPT2, "rotary_dim": 4}, 2, None),
    "BioGptForCausalLM": (BERT, 3, None),
    "XGLMForCausalLM": (
        {"num_layers": 1, "d_model": 32, "attention_heads": 4, "ffn_dim": 64,
         "max_position_embeddings": 32}, 3, None),
    "BertForMaskedLM": (BERT, 3, None),
    "RobertaForMaskedLM": (BERT, 3, None),
    "ElectraForMaskedLM": ({**BERT, "embedding_size": 16}, 3, None),
    "AlbertForMaskedLM": ({**BERT, "embedding_size": 16}, 3, None),
    "DistilBertForMaskedLM": (
        {"n_layers": 1, "dim": 32, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 32}, 3, None),
    "CLIPTextModel": (BERT, 3, None),
    "T5EncoderModel": (T5, 3, None),
    "T5ForConditionalGeneration": ({**T5, "feed_forward_proj": "gated-gelu"}, 7, None),
    "BartForConditionalGeneration": (
        {"encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
         "max_position_embeddings": 32}, 7, None),
}  # fmt: skip
"""The class, its sizes, how many sums over ranks its graph has, and of decoders the bytes that one of 2 and
of 4 ranks keeps of a token: those of its key/value heads (4 heads of 8 values, are 256 bytes with keys and
values). Ranks that attend to one head divide its tokens. (A latent of 16 values is 64 bytes.)"""


def stock(name: str, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    kind: Any = getattr(transformers, name)
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, **CLASSES[name][0], **more}
    return kind(kind.config_class(**sizes)).eval()


class Shared(nn.Module):
    """A decoder of which groups of heads share keys and values of 8 numbers. `latent`: every head has its
    own, made from 8 numbers for all. `window`: each token sees itself and so many less one before it."""

    def __init__(
        self, heads: int = 4, key_heads: int = 1, most: int = 64, latent: bool = False,
        window: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places = nn.Embedding(64, 32), nn.Embedding(most, 32)
        self.q, self.window = nn.Linear(32, 8 * heads), window
        self.down = nn.Linear(32, 8 if latent else 16 * key_heads)
        self.up = nn.Linear(8, 16 * heads, bias=False) if latent else nn.Identity()
        self.out, self.head = nn.Linear(8 * heads, 32), nn.Linear(32, 64)
        self.eval()

    def embedded(self, ids: Tensor) -> Tensor:
        found: Tensor = self.table(ids)
        return found if self.window else found + self.places(torch.arange(ids.shape[1]))

    def forward(self, ids: Tensor) -> Tensor:
        x, n = self.embedded(ids), torch.arange(ids.shape[1])
        k, v = self.up(self.down(x)).unflatten(-1, (-1, 16)).transpose(1, 2).split(8, -1)
        q = self.q(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        sees = None
        if self.window:
            sees = (n[:, None] >= n) & (n[:, None] < n + self.window)
        y = nn.functional.scaled_dot_product_attention(q, k, v, sees, is_causal=sees is None, enable_gqa=True)
        found: Tensor = self.head(x + self.out(y.transpose(1, 2).flatten(2)))
        return found


def on_ranks(ranks: int, model: nn.Module, cache: str = "auto", **config: Any) -> attngraph.Decoder:
    found = attngraph.compile(
        model, cache=attngraph.CacheConfig(**config), mesh=attngraph.SimulatedMesh(tensor=ranks),
        shard=attngraph.ShardConfig(cache=cache),
    )  # fmt: skip
    assert isinstance(found, attngraph.Decoder)
    return found


def ids(rows: int = 2, tokens: int = 5) -> Tensor:
    return torch.randint(3, 64, (rows, tokens))
