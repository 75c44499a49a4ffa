"""Targets run as given, are the same every time, and the folder keeps its rules."""

import ast
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attngraph.models.text
from attngraph.models import targets
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig

SOURCES = sorted(Path(attngraph.models.text.__file__).parent.glob("*.py"))
FUSED_CACHED_OR_TOLD_POSITIONS = {
    "scaled_dot_product_attention",
    "flex_attention",
    "multi_head_attention_forward",
    "MultiheadAttention",
    "past_key_values",
    "position_ids",
}


@pytest.fixture
def one_layer_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets keep their widths but lose all layers but one, to spare the test machine."""
    for name in [name for name in vars(targets) if name.endswith("Config")]:
        config = getattr(targets, name)

        def shallow(config: type = config, **sizes: int) -> object:
            return config(**{**sizes, "layers": 1})

        monkeypatch.setattr(targets, name, shallow)


OUR_TARGETS = [
    targets.decoder_lm,
    targets.tiny_decoder_lm,
    targets.post_norm_decoder,
    targets.modern_decoder,
    targets.mla_decoder,
    targets.sparse_transformer,
    targets.linear_transformer,
    targets.bert,
    targets.longformer,
    targets.encoder_decoder,
]


@pytest.mark.usefixtures("one_layer_models")
@pytest.mark.parametrize("target", OUR_TARGETS, ids=lambda target: str(target.__name__))
def test_a_target_runs_on_its_own_inputs_in_eval_mode(target: Callable[..., targets.Target]) -> None:
    model, inputs = target(batch=3, tokens=16)
    assert not model.training
    assert all(tensor.shape == (3, 16) for tensor in inputs)
    with torch.no_grad():
        logits = model(*inputs)
    assert logits.shape[:2] == (3, 16)
    assert logits.isfinite().all()


@pytest.mark.usefixtures("one_layer_models")
@pytest.mark.parametrize("target", OUR_TARGETS, ids=lambda target: str(target.__name__))
def test_a_target_has_room_for_more_tokens_than_its_default(target: Callable[..., targets.Target]) -> None:
    model, inputs = target(tokens=1025)
    with torch.no_grad():
        assert model(*inputs).shape[:2] == (1, 1025)


@pytest.mark.usefixtures("one_layer_models")
@pytest.mark.parametrize(("tokens", "size"), [(16, (64, 64)), (6, (32, 48)), (7, (16, 112))])
def test_the_image_target_has_as_many_patches_as_it_is_asked_for(tokens: int, size: tuple[int, int]) -> None:
    model, (images,) = targets.vit(batch=3, tokens=tokens)
    assert images.shape == (3, 3, *size)
    assert not model.training
    with torch.no_grad():
        assert model.patch_embedding(images).shape == (3, tokens, 768)
        assert model(images).isfinite().all()


def test_a_target_is_the_same_every_time_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, inputs = targets.tiny_decoder_lm(tokens=16)
    torch.rand(3)
    second, same_inputs = targets.tiny_decoder_lm(tokens=16)
    torch.set_rng_state(before)
    targets.tiny_decoder_lm(tokens=16)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(inputs[0], same_inputs[0])
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])


def test_the_plain_decoder_target_is_gpt2_small() -> None:
    with torch.device("meta"):
        config = DecoderLMConfig()
        model = DecoderLM(config)
    assert (config.layers, config.width, config.heads, config.max_tokens) == (12, 768, 12, 1024)
    blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
    assert blocks == 85_054_464  # GPT-2 small without its embeddings and final norm


def test_padding_is_ragged_and_never_whole_rows() -> None:
    padding = targets.ragged_padding(5, 16)
    assert (~padding).sum(dim=1).tolist() == [16, 14, 12, 10, 16]
    assert not targets.ragged_padding(4, 1).any()


def test_gpt2_is_the_stock_model_on_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    stock = transformers.GPT2Config

    def small(**settings: object) -> object:
        return stock(**settings | {"n_layer": 1, "n_embd": 32, "n_head": 2})

    monkeypatch.setattr(transformers, "GPT2Config", small)
    model, (ids,) = targets.gpt2(batch=2, tokens=1100)
    assert isinstance(model, transformers.GPT2LMHeadModel)
    assert not model.training
    assert model.config._attn_implementation == "eager"
    assert model.config.use_cache is False
    assert model.config.n_positions == 1100
    assert ids.shape == (2, 1100)
    assert int(ids.max()) < 256
    with torch.no_grad():
        logits: Tensor = model(ids[:, :8]).logits
    assert logits.shape == (2, 8, 50257)


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "transformers>=5"'):
        targets.gpt2()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_models_are_eager_pytorch_and_import_nothing_of_ours_but_each_other(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "."]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    for name in imported:
        package = name.split(".")[0]
        assert (
            name.startswith("attngraph.models.") or package == "torch" or package in sys.stdlib_module_names
        ), name
    names = {
        str(getattr(node, field))
        for node in ast.walk(tree)
        for field in ("id", "attr", "arg", "name")
        if hasattr(node, field)
    }
    assert not names & FUSED_CACHED_OR_TOLD_POSITIONS
