"""Figures of large models from few layers: exact, because every further layer of a kind adds the same."""

import dataclasses

import pytest
from torch import nn

from workshop.bench import weak_scaling
from workshop.bench.weak_scaling import SHAPES, Shape, figures, megatron

pytest.importorskip("transformers")


def _tiny(layers: tuple[int, ...]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=8, num_key_value_heads=8,
        num_hidden_layers=layers[0], vocab_size=256, max_position_embeddings=256, use_cache=False,
    ))  # fmt: skip


@pytest.mark.slow
def test_counted_layers_are_those_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weak_scaling, "TOKENS", 128)
    monkeypatch.setattr(weak_scaling, "RANKS", (1, 8, 16))
    shape = Shape((3,), _tiny, 2 * 256 * 64, (4 * 64 * 64 + 3 * 64 * 128,), 64, 128)
    whole = dataclasses.replace(shape, layers=(1,), build=lambda layers: _tiny((3 * layers[0],)))
    for (ranks, counted), (_, found) in zip(figures(shape), figures(whole), strict=True):
        assert counted == pytest.approx(found), ranks
        theirs = megatron(shape, ranks)
        vectors = 2 * 64 * (2 * 3 + 1)  # norms, which every rank has
        assert counted["weights"] == theirs["weights"] + vectors
        assert theirs["received"] <= counted["received"] <= 1.5 * theirs["received"]


def test_parameters_are_those_that_are_published() -> None:
    """70.6 billion (Llama 3) and 671 billion (DeepSeek-V3), but for norms."""
    for name, billions in (("llama", 70.55), ("deepseek", 671.0)):
        weights = megatron(SHAPES[name], 1)["weights"] / 2
        assert weights == pytest.approx(billions * 1e9, rel=1e-3)
