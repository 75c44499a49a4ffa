"""Decoders with other attentions or another order of norms equal the same model put together from
torch's own functions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.positions import sinusoidal_table
from attngraph.models.post_norm_decoder import PostNormDecoder
from attngraph.models.sparse_attention import sparse_pattern
from attngraph.models.sparse_transformer import SparseTransformer, SparseTransformerConfig
from attngraph.models.text import byte_batch
from tests.models.test_every_model import DECODERS

SIZES = {"layers": 2, "width": 16, "heads": 4, "max_tokens": 32}


def randomised(model: nn.Module) -> nn.Module:
    """In float64, norms and biases not left at ones and zeros."""
    for parameter in model.double().parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def pre_norm_logits(
    model: nn.Module, ids: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """A pre-norm decoder by torch's functions; `attend` maps queries, keys and values `[B, 4, T, 4]`."""
    w = dict(model.named_parameters())

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (16,), w[f"{name}.weight"], w[f"{name}.bias"])

    x = w["token_embedding.weight"][ids] + w["position_embedding.weight"][: ids.shape[1]]
    for i in range(2):
        y, name = norm(x, f"blocks.{i}.attention_norm"), f"blocks.{i}.attention"
        if f"{name}.qkv.weight" in w:
            parts = list(linear(y, f"{name}.qkv").chunk(3, dim=-1))
        else:
            parts = [linear(y, f"{name}.{part}") for part in ("query", "key", "value")]
        query, key, value = (part.unflatten(-1, (4, 4)).movedim(2, 1) for part in parts)
        x = x + linear(attend(query, key, value).movedim(1, 2).flatten(2), f"{name}.project")
        y = norm(x, f"blocks.{i}.mlp_norm")
        x = x + linear(functional.gelu(linear(y, f"blocks.{i}.mlp.expand")), f"blocks.{i}.mlp.project")
    return norm(x, "norm") @ w["head.weight"].T


def test_post_norm_logits_equal_those_of_torch_encoder_layers_under_a_causal_mask() -> None:
    model, ids = randomised(DECODERS["post-norm"]()), byte_batch(2, 11)
    assert isinstance(model, PostNormDecoder)
    x = model.embedding.embedding.weight[ids] * 4.0 + sinusoidal_table(11, 16)
    future = torch.ones(11, 11, dtype=torch.bool).triu(1)
    for block in model.blocks:
        layer = nn.TransformerEncoderLayer(16, 4, 64, dropout=0.0, batch_first=True).double()
        names = {
            "attention.qkv.weight": "self_attn.in_proj_weight",
            "attention.qkv.bias": "self_attn.in_proj_bias",
            "attention.project": "self_attn.out_proj",
            "attention_norm": "norm1",
            "feed_forward.expand": "linear1",
            "feed_forward.project": "linear2",
            "feed_forward_norm": "norm2",
        }
        weights = {}
        for key, tensor in block.state_dict().items():
            stem = key.rpartition(".")[0]
            weights[names[key] if key in names else key.replace(stem, names[stem])] = tensor
        layer.load_state_dict(weights)
        x = layer(x, src_mask=future)
    assert_close(model(ids), x @ model.head.weight.T)


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_sparse_logits_equal_those_of_a_decoder_under_the_papers_masks(pattern: str) -> None:
    model, ids = randomised(DECODERS[f"sparse, {pattern}"]()), byte_batch(2, 11)
    mask = torch.zeros(4, 11, 11, dtype=torch.bool)
    for h in range(4):
        for i in range(11):
            for j in range(i + 1):
                if pattern == "strided":
                    mask[h, i, j] = (i - j) % 3 == 0 if h % 2 else i - j <= 3
                else:
                    mask[h, i, j] = j % 4 >= 2 if h % 2 else j // 4 == i // 4

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        bias = torch.zeros(4, 11, 11, dtype=torch.float64).masked_fill(~mask, float("-inf"))
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return torch.where(mask.any(-1)[:, :, None], mixed, 0.0)

    assert_close(model(ids), pre_norm_logits(model, ids, attend))


@pytest.mark.parametrize("name", ["linear", "linear, no features"])
def test_linear_logits_equal_those_of_a_decoder_with_running_sums(name: str) -> None:
    model, ids = randomised(DECODERS[name]()), byte_batch(2, 11)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if name == "linear":
            query, key = (torch.where(x > 0, x + 1, x.exp()) for x in (query, key))
        states = (key[..., :, None] * value[..., None, :]).cumsum(dim=2)  # [B, 4, T, D, Dv]
        mixed = torch.einsum("bhtd,bhtdv->bhtv", query, states)
        total = (query * key.cumsum(dim=2)).sum(-1, keepdim=True)
        return mixed / total if name == "linear" else mixed

    assert_close(model(ids), pre_norm_logits(model, ids, attend), rtol=1e-6, atol=1e-6)


def test_one_block_of_stride_one_makes_every_second_head_plainly_causal() -> None:
    sparse = SparseTransformer(SparseTransformerConfig(**SIZES, stride=1, summary=1))
    plain = DecoderLM(DecoderLMConfig(**SIZES))
    assert set(sparse.state_dict()) == set(plain.state_dict())
    visible = torch.ones(5, 5).tril().bool()
    pattern = sparse_pattern(5, sparse.blocks[0].attention.config, torch.device("cpu"))
    assert torch.equal(pattern[1], visible)
    assert torch.equal(pattern[0], torch.eye(5).bool())
