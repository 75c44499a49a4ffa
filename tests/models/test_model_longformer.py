"""The Longformer encoder equals the stock one on the same weights, and reads only what it may."""

import pytest
import torch
from torch.testing import assert_close

from attngraph.models.encoder import MASK_ID
from attngraph.models.longformer import Longformer, LongformerConfig
from attngraph.models.text import byte_batch

SMALL = LongformerConfig(layers=2, width=16, heads=4, hidden=32, max_tokens=32, window=4)


def test_logits_equal_those_of_transformers_longformer_with_the_same_weights() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LongformerConfig(
        vocab_size=258, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=34, attention_window=4, type_vocab_size=1, pad_token_id=1,
        layer_norm_eps=1e-12, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    theirs = transformers.LongformerForMaskedLM(config).eval()
    ours = Longformer(SMALL).eval()
    embeddings, head = theirs.longformer.embeddings, theirs.lm_head
    parts = {
        "token_embedding": embeddings.word_embeddings,
        "norm": embeddings.LayerNorm,
        "head.transform": head.dense,
        "head.norm": head.layer_norm,
        "head.score": head.decoder,
    }
    for i, layer in enumerate(theirs.longformer.encoder.layer):
        attention = layer.attention.self
        parts |= {
            f"blocks.{i}.attention.query": attention.query,
            f"blocks.{i}.attention.key": attention.key,
            f"blocks.{i}.attention.value": attention.value,
            f"blocks.{i}.attention.global_query": attention.query_global,
            f"blocks.{i}.attention.global_key": attention.key_global,
            f"blocks.{i}.attention.global_value": attention.value_global,
            f"blocks.{i}.attention.project": layer.attention.output.dense,
            f"blocks.{i}.attention_norm": layer.attention.output.LayerNorm,
            f"blocks.{i}.expand": layer.intermediate.dense,
            f"blocks.{i}.project": layer.output.dense,
            f"blocks.{i}.feed_forward_norm": layer.output.LayerNorm,
        }
    weights = {}
    for name, part in parts.items():
        for key, tensor in part.named_parameters(recurse=False):
            torch.nn.init.normal_(tensor, std=0.3)
            weights[f"{name}.{key}"] = tensor
    # Stock position ids start after the id of padding, and the one token type is added everywhere.
    weights["positions.table"] = (
        embeddings.position_embeddings.weight[2:] + embeddings.token_type_embeddings.weight
    )
    ours.load_state_dict(weights)

    ids = byte_batch(2, 16)  # a multiple of the window, so that stock code adds no padding of its own
    is_global = torch.zeros(2, 16, dtype=torch.bool)
    is_global[0, 0] = is_global[0, 9] = is_global[1, 3] = True
    keep = torch.arange(16) < torch.tensor([[16], [11]])
    with torch.no_grad():
        expected = theirs(
            ids, attention_mask=keep.long(), global_attention_mask=is_global.long()
        ).logits  # softmax in float32, so float32 it is
        found = ours(ids, is_global, keep)
    assert_close(found[keep], expected[keep], rtol=1e-4, atol=1e-4)


def test_the_first_token_is_the_global_one_unless_told_otherwise() -> None:
    model, ids = Longformer(SMALL).double().eval(), byte_batch(2, 12)
    first = (torch.arange(12) == 0).expand(2, 12)
    assert_close(model(ids), model(ids, first), rtol=0, atol=0)
    assert not torch.allclose(model(ids), model(ids, first.roll(1, dims=1)))


def test_a_change_travels_one_window_per_layer_and_by_way_of_global_tokens() -> None:
    model, ids = Longformer(SMALL).double().eval(), byte_batch(1, 20)
    changed = ids.clone()
    changed[:, 15] = MASK_ID
    nothing = torch.zeros(1, 20, dtype=torch.bool)

    def moved(is_global: torch.Tensor) -> list[int]:
        differs = (model(changed, is_global) != model(ids, is_global)).any(dim=-1)
        return differs[0].nonzero().flatten().tolist()

    assert moved(nothing) == list(range(11, 20))
    assert moved(torch.arange(20)[None] == 0) == list(range(20))
