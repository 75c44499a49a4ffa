"""A compiled module is saved and loaded: equal answers, nothing traced, and what does not fit is named."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.api import saving
from attngraph.errors import SavedError
from attngraph.models import targets

Models = Callable[..., types.ModuleType]
IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


def saved_to(path: Path, model: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The model's answer, with what was compiled for it saved."""
    compiled = attngraph.compile(model)
    answer = compiled(*args)
    compiled.save(path, **options)
    return answer


def test_a_loaded_model_answers_as_before_without_a_trace(
    models: Models, saved: Path, saved_once: tuple[Path, Tensor], traces: list[str]
) -> None:
    """Each of several graphs; also with other weights, and where what a trace did not look at has changed."""
    for change in ((), (('TABLE = {"slope": 0.25}', 'TABLE = {"slope": 0.50}'),)):
        torch.manual_seed(7)
        model = models(*change).Model().eval()
        loaded = attngraph.load(saved, model, strict=True)
        assert torch.allclose(loaded(IDS), model(IDS), atol=1e-5)
    with torch.no_grad():
        assert not loaded(IDS).requires_grad
    loaded(IDS).square().sum().backward()
    found = model.head.weight.grad.clone()
    model.zero_grad()
    model(IDS).square().sum().backward()
    assert torch.allclose(found, model.head.weight.grad, rtol=1e-4, atol=1e-4)
    longer = IDS.repeat(2, 3)
    assert torch.allclose(loaded(longer), model(longer), atol=1e-5)
    assert traces == []
    assert len(loaded.report.attention) == 2 and loaded.report.captured and str(saved) in str(loaded.report)
    with torch.no_grad():
        assert torch.equal(attngraph.load(saved)(IDS), saved_once[1])


@pytest.mark.parametrize(
    "name",
    ["tiny_decoder_lm", "sparse_transformer", "linear_transformer", "mla_decoder", "longformer", "vit"],
)
def test_our_own_targets_are_saved(name: str, tmp_path: Path, traces: list[str]) -> None:
    model, inputs = getattr(targets, name)(tokens=64)
    with torch.no_grad():
        answer = saved_to(tmp_path / "m", model, *inputs)
        assert torch.equal(attngraph.load(tmp_path / "m", model, strict=True)(*inputs), answer)
    assert len(traces) == 1


def test_functions_results_in_containers_sizes_and_constants(tmp_path: Path, traces: list[str]) -> None:
    tensor, bias = torch.arange(6.0), torch.randn(5)

    def attend(x: Tensor, *, scale: float) -> dict[str, Any]:
        p = (x @ x.mT * scale + torch.tensor([[1.5]]) + bias.sum()).softmax(-1)
        return {"out": (p @ x, x.shape[1] * 2), "name": "attend", "more": [tensor.sum() + p.sum(), None, 2.5]}

    x = torch.randn(2, 5, 4)
    compiled = attngraph.compile(attend)
    answer = compiled(x, scale=0.5)
    compiled.save(tmp_path / "m")
    loaded = attngraph.load(tmp_path / "m", attend, strict=True)
    found = loaded(x[:, :3], scale=0.5)
    wanted = attend(x[:, :3], scale=0.5)
    assert found["out"][1] == 6 and found["name"] == "attend" and found["more"][1:] == [None, 2.5]
    assert torch.allclose(found["out"][0], wanted["out"][0], atol=1e-6)
    assert torch.equal(loaded(x, scale=0.5)["out"][0], answer["out"][0])
    assert len(traces) == 1
    with pytest.raises(SavedError, match=r"argument 1 was builtins.float 0.5, and is builtins.float 0.25"):
        loaded(x, scale=0.25)
    bias.zero_()  # a tensor that is no buffer is compared by its contents
    with pytest.raises(SavedError, match="bias"):
        attngraph.load(tmp_path / "m", attend, strict=True)(x, scale=0.5)


def test_sizes_at_which_the_graph_is_not_valid_are_traced(
    models: Models, saved: Path, traces: list[str]
) -> None:
    model = models().Model().eval()
    loaded = attngraph.load(saved, model)
    assert torch.allclose(loaded(IDS[:, :1]), model(IDS[:, :1]), atol=1e-5)
    assert len(traces) == 1


# --- what does not fit ---

CHANGES: dict[str, tuple[tuple[str, str], str]] = {
    "a method": (("return scores(q, k)", "return scores(q, k) * 2"), r"Layer"),
    "a forward": (("x = x + layer(x)", "x = layer(x)"), r"Model"),
    "a function": (("return q @ k.mT * SCALE", "return q @ k.mT / SCALE"), r"scores was .* the code"),
    "a global": (("SCALE = 0.5", "SCALE = 0.25"), r"SCALE was float 0\.5, and is"),
    "an attribute": (("self.window = window", "self.window = window + 1"), r"layers\.0\.window was int 3"),
    "an attribute of a class": (('kind = "plain"', 'kind = "other"'), r"Layer"),
    "a width": (("width=8, vocabulary", "width=4, vocabulary"), r"model\.embed\.weight was parameter"),
    "a number of layers": (("layers=2", "layers=3"), r"model\.layers\.2.* is new"),
    "tied weights": (("self.head.weight = self.embed.weight", "pass"), r"model\.head\.weight was .*same as"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_what_changed_is_named_and_the_model_is_traced_anew(
    what: str, models: Models, saved: Path, traces: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    change, message = CHANGES[what]
    model = models(change).Model().eval()
    with pytest.raises(SavedError, match=message):
        attngraph.load(saved, model, strict=True)(IDS)
    loaded = attngraph.load(saved, model)
    assert torch.allclose(loaded(IDS), model(IDS), atol=1e-5)
    assert len(traces) == 1 and "traced anew" in caplog.text


def test_a_buffer_whose_values_were_read_is_compared(models: Models, saved: Path, traces: list[str]) -> None:
    model = models().Model().eval()
    model.layers[1].order.fill_(True)
    with pytest.raises(SavedError, match=r"the buffer layers\.1\.order held other values"):
        attngraph.load(saved, model, strict=True)(IDS)
    model.layers[1].order.tril_()
    loaded = attngraph.load(saved, model)
    loaded(IDS)
    assert len(traces) == 0
    model.layers[0].order.fill_(True)  # and as long as it is in use
    assert torch.allclose(loaded(IDS), model(IDS), atol=1e-5)
    assert len(traces) == 1


def test_a_patched_method_and_a_function_that_is_bound_to_another_are_noticed(
    models: Models, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = models()
    model = module.Model().eval()
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight.T)
        with pytest.raises(SavedError, match=r"Linear\.forward was function"):
            attngraph.load(saved, model, strict=True)(IDS)
    module.scores = lambda q, k: q @ k.mT
    with pytest.raises(SavedError, match="scores"):
        attngraph.load(saved, model, strict=True)(IDS)


@pytest.mark.parametrize("name", ["torch", "machine", "attngraph", "python"])
def test_another_version_or_processor_is_named(
    name: str, models: Models, saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = models().Model().eval()
    other = {**saving.versions(), name: "of tomorrow"}
    monkeypatch.setattr(saving, "versions", lambda: other)
    with pytest.raises(SavedError, match=f"{name} was .*, and is of tomorrow"):
        attngraph.load(saved, model, strict=True)
    assert torch.allclose(attngraph.load(saved, model)(IDS), model(IDS), atol=1e-5)
    assert f"{name} was" in caplog.text


# --- with weights, and without ---


def test_weights_are_saved_and_no_class_is_needed(models: Models, tmp_path: Path, traces: list[str]) -> None:
    model = models().Model().eval()
    with torch.no_grad():
        answer = saved_to(tmp_path / "m", model, IDS, weights=True)
        models(("class Model", "class Gone"))
        loaded = attngraph.load(tmp_path / "m")
        assert torch.equal(loaded(IDS), answer)
    assert loaded.head.weight is loaded.embed.weight
    assert loaded.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(SavedError, match="gradients was False"):
        loaded(IDS)
    assert traces == ["compile_graph"]


def test_what_cannot_be_saved_or_loaded_is_told(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models().Model()
    compiled = attngraph.compile(model)
    with pytest.raises(SavedError, match="call the model once"):
        compiled.save(tmp_path / "m")
    compiled(IDS)
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "safetensors.torch", None)
        with pytest.raises(SavedError, match="pip install safetensors"):
            compiled.save(tmp_path / "m", weights=True)
        assert not (tmp_path / "m").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.txt").write_text("mine")
    with pytest.raises(SavedError, match="no saved model"):
        compiled.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "mine.txt").read_text() == "mine"
    for _ in range(2):  # what was saved is replaced
        compiled.save(tmp_path / "m")
    assert {p.name for p in tmp_path.iterdir()} == {"m", "mine", "saved_models.py"}
    with pytest.raises(SavedError, match="Give the model"):
        attngraph.load(tmp_path / "m")
    assert torch.equal(attngraph.load(tmp_path / "m", model, strict=True)(IDS), compiled(IDS))
    names = {p.name for p in (tmp_path / "m").rglob("*") if p.is_file()}
    assert {n.rpartition(".")[2] for n in names} <= {"json", "txt", "c"}, "no file has code to be executed"
    assert json.loads((tmp_path / "m" / "manifest.json").read_text())["content"]["graphs"] == 1
