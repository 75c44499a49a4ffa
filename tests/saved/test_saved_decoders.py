"""A decoder is saved and loaded: equal tokens, nothing derived or proved again."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.errors import SavedError

Models = Callable[..., types.ModuleType]
IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


def test_a_loaded_decoder_gives_the_same_tokens(models: Models, tmp_path: Path, traces: list[str]) -> None:
    model = models().Model().eval()
    decoder = attngraph.compile(model, cache=True)
    wanted = decoder.generate(IDS, 6)
    loaded = attngraph.load(decoder.save(tmp_path / "d"), model, strict=True)
    assert torch.equal(loaded.generate(IDS, 6), wanted)
    (logits, state), (again, other) = decoder.prefill(IDS), loaded.prefill(IDS)
    assert torch.equal(again, logits)
    assert torch.equal(loaded.decode(IDS[:, :2], other), decoder.decode(IDS[:, :2], state))
    assert loaded.report.cache == decoder.report.cache  # with the proof's result
    decoder.save(tmp_path / "with weights", weights=True)
    models(("class Model", "class Gone"))
    assert torch.equal(attngraph.load(tmp_path / "with weights").generate(IDS, 6), wanted)
    assert traces == ["derive_decoder"]
    model = models(("SCALE = 0.5", "SCALE = 0.25")).Model().eval()
    with pytest.raises(SavedError, match=r"SCALE was float 0\.5, and is"):
        attngraph.load(tmp_path / "d", model, strict=True).prefill(IDS)
    changed = attngraph.load(tmp_path / "d", model)
    assert torch.allclose(changed.prefill(IDS)[0], model(IDS), atol=1e-5)
    assert len(traces) == 2


def test_a_window_a_paged_cache_and_other_options(models: Models, tmp_path: Path, traces: list[str]) -> None:
    model = models().Model().eval()
    config = attngraph.CacheConfig(layout="paged", page=4, rollback=5, proof=False)
    decoder = attngraph.compile(model, cache=config)
    with pytest.raises(SavedError, match="call the model once"):
        decoder.save(tmp_path / "d")
    wanted = decoder.generate(IDS, 6)
    loaded = attngraph.load(decoder.save(tmp_path / "d"), model, strict=True)
    assert loaded.config_of_cache == config
    assert torch.equal(loaded.generate(IDS, 6), wanted)
    assert traces == ["derive_decoder"]


class Translating(nn.Module):
    """A decoder that looks at what an encoder made of its prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.own, self.other = (nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids: Tensor, source: Tensor) -> Tensor:
        x, y = self.embed(ids), self.other(self.embed(source))
        t = ids.shape[1]
        seen = torch.ones(t, t, dtype=torch.bool).tril()
        x = x + (self.own(x) @ x.mT).masked_fill(~seen, float("-inf")).softmax(-1) @ x
        found: Tensor = x + (x @ y.mT).softmax(-1) @ y
        return found @ self.embed.weight.T


def test_a_stage_of_the_prompt_is_saved(tmp_path: Path, traces: list[str]) -> None:
    model = Translating().eval()
    decoder = attngraph.compile(model, cache=True)
    source = torch.tensor([[1, 2, 3], [4, 5, 6]])
    wanted, state = decoder.prefill(IDS, source=source)
    decoder.save(tmp_path / "d")
    loaded = attngraph.load(tmp_path / "d", model, strict=True)
    logits, other = loaded.prefill(IDS, source=source)
    assert torch.equal(logits, wanted)
    assert torch.equal(loaded.decode(IDS[:, :1], other), decoder.decode(IDS[:, :1], state))
    assert traces == ["derive_decoder"]
