"""The encoder equals stock BERT on the same weights, sees to both sides, and hides tokens fairly."""

import pytest
import torch
from torch.testing import assert_close

from attngraph.models.encoder import IGNORED_TARGET, MASK_ID, Encoder, EncoderConfig, mask_tokens
from attngraph.models.text import byte_batch

SMALL = EncoderConfig(layers=2, width=16, heads=4, hidden=32, max_tokens=32)


def test_logits_equal_those_of_transformers_bert_with_the_same_weights() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=258, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=32, max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    theirs = transformers.BertForMaskedLM(config).double().eval()
    ours = Encoder(SMALL).double().eval()
    embeddings, head = theirs.bert.embeddings, theirs.cls.predictions
    parts = {
        "token_embedding": embeddings.word_embeddings,
        "position_embedding": embeddings.position_embeddings,
        "segment_embedding": embeddings.token_type_embeddings,
        "norm": embeddings.LayerNorm,
        "head.transform": head.transform.dense,
        "head.norm": head.transform.LayerNorm,
        "head.score": head.decoder,
    }
    for i, layer in enumerate(theirs.bert.encoder.layer):
        attention = f"blocks.{i}.attention.attention"
        parts |= {
            f"{attention}.query": layer.attention.self.query,
            f"{attention}.key": layer.attention.self.key,
            f"{attention}.value": layer.attention.self.value,
            f"{attention}.project": layer.attention.output.dense,
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
    ours.load_state_dict(weights)

    ids, segments = byte_batch(2, 11), torch.arange(11).expand(2, 11) // 6
    keep = torch.arange(11) < torch.tensor([[11], [7]])
    expected = theirs(ids, attention_mask=keep.long(), token_type_ids=segments).logits
    assert_close(ours(ids, keep, segments), expected)


def test_every_token_sees_to_both_sides() -> None:
    model, ids = Encoder(SMALL).double().eval(), byte_batch(1, 10)
    changed = ids.clone()
    changed[:, 5] = MASK_ID
    assert (model(changed) != model(ids)).any(dim=-1).all()


def test_the_head_shares_the_token_embedding() -> None:
    model = Encoder(SMALL)
    assert model.head.score.weight is model.token_embedding.weight
    assert model.double().head.score.weight is model.token_embedding.weight


def test_hiding_follows_the_papers_proportions() -> None:
    ids = byte_batch(16, 4096)
    hidden, targets = mask_tokens(ids, seed=3)
    chosen = targets != IGNORED_TARGET
    assert torch.equal(targets[chosen], ids[chosen])
    assert torch.equal(hidden[~chosen], ids[~chosen])
    assert chosen.double().mean().item() == pytest.approx(0.15, abs=0.01)
    assert (hidden[chosen] == MASK_ID).double().mean().item() == pytest.approx(0.8, abs=0.02)
    assert (hidden[chosen] == ids[chosen]).double().mean().item() == pytest.approx(0.1, abs=0.02)
    again, _ = mask_tokens(ids, seed=3)
    assert torch.equal(again, hidden)
