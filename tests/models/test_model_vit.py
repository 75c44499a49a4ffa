"""The image classifier equals stock ViT on the same weights; patches are cut as they should be."""

import pytest
import torch
from torch.testing import assert_close

from attngraph.models.vit import PatchEmbedding, ViT, ViTConfig

SMALL = ViTConfig(image=(12, 12), patch=4, channels=2, classes=5, layers=2, width=16, heads=4, hidden=24)


def test_logits_equal_those_of_transformers_vit_with_the_same_weights() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=12, patch_size=4, num_channels=2, hidden_size=16, num_hidden_layers=2, num_labels=5,
        num_attention_heads=4, intermediate_size=24, layer_norm_eps=1e-6, attn_implementation="eager",
    )  # fmt: skip
    theirs = transformers.ViTForImageClassification(config).eval()
    embeddings = theirs.vit.embeddings
    parts = {
        "patch_embedding.project": embeddings.patch_embeddings.projection,
        "norm": theirs.vit.layernorm,
        "head": theirs.classifier,
    }
    layers = next(m for m in theirs.vit.modules() if isinstance(m, torch.nn.ModuleList))
    for i, layer in enumerate(layers):
        parts |= {
            f"blocks.{i}.attention_norm": layer.layernorm_before,
            f"blocks.{i}.attention.query": layer.attention.q_proj,
            f"blocks.{i}.attention.key": layer.attention.k_proj,
            f"blocks.{i}.attention.value": layer.attention.v_proj,
            f"blocks.{i}.attention.project": layer.attention.o_proj,
            f"blocks.{i}.mlp_norm": layer.layernorm_after,
            f"blocks.{i}.mlp.expand": layer.mlp.fc1,
            f"blocks.{i}.mlp.project": layer.mlp.fc2,
        }
    tensors = {
        f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.named_parameters()
    }
    for tensor in (*tensors.values(), embeddings.cls_token, embeddings.position_embeddings):
        torch.nn.init.normal_(tensor, std=0.3)
    weights = tensors | {
        "class_token": embeddings.cls_token[0, 0],
        "positions.table": embeddings.position_embeddings[0],
    }
    ours = ViT(SMALL).eval()
    ours.load_state_dict(weights)
    images = torch.randn(3, 2, 12, 12)
    # ViT takes its softmax in float32, so float32 it is.
    assert_close(ours(images), theirs(images).logits, rtol=1e-4, atol=1e-5)


def test_patches_are_squares_in_reading_order_each_projected() -> None:
    config = ViTConfig(image=(4, 6), patch=2, channels=3, layers=1, width=8, heads=2)
    module, images = PatchEmbedding(config).double(), torch.randn(2, 3, 4, 6, dtype=torch.float64)
    weight, bias = module.project.weight.flatten(1), module.project.bias
    assert bias is not None
    patches = module(images)
    assert patches.shape == (2, 6, 8)
    for n in range(6):
        top, left = 2 * (n // 3), 2 * (n % 3)
        square = images[:, :, top : top + 2, left : left + 2].flatten(1)
        assert_close(patches[:, n], square @ weight.T + bias)


def test_every_patch_has_influence_on_the_logits() -> None:
    model, images = ViT(SMALL).double(), torch.randn(1, 2, 12, 12, dtype=torch.float64)
    before = model(images)
    for n in range(SMALL.patches):
        changed = images.clone()
        changed[:, :, 4 * (n // 3), 4 * (n % 3)] += 1.0
        assert (model(changed) != before).all()


def test_the_default_is_vit_base() -> None:
    with torch.device("meta"):
        model = ViT(ViTConfig())
    assert model.config.patches == 196
    assert sum(parameter.numel() for parameter in model.parameters()) == 86_567_656
