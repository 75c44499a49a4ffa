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
from attngraph.errors import SavedError
from attngraph.models import targets

Models = Callable[..., types.ModuleType]
IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


def saved(model: Callable[..., Any], path: Path, *args: Any, **options: Any) -> Any:
    """The model's answer, with what was compiled for it saved."""
    compiled = attngraph.compile(model)
    answer = compiled(*args)
    compiled.save(path, **options)
    return answer


def test_a_loaded_model_answers_as_before_without_a_trace(
    models: Models, tmp_path: Path, traces: list[str]
) -> None:
    model = models().Model()
    answer = saved(model, tmp_path / "m", IDS)
    loaded = attngraph.load(tmp_path / "m", model, strict=True)
    assert torch.equal(loaded(IDS), answer)
    longer = IDS.repeat(2, 3)
    assert torch.allclose(loaded(longer), model(longer), atol=1e-5)
    assert traces == ["compile_graph"]
    assert len(loaded.report.attention) == 2 and loaded.report.captured
    assert str(tmp_path / "m") in str(loaded.report)


def test_gradients_flow_through_a_loaded_model(models: Models, tmp_path: Path, traces: list[str]) -> None:
    model = models().Model().train()
    saved(model, tmp_path / "m", IDS)
    attngraph.load(tmp_path / "m", model, strict=True)(IDS).square().sum().backward()
    found = model.head.weight.grad.clone()
    model.zero_grad()
    model(IDS).square().sum().backward()
    assert torch.allclose(found, model.head.weight.grad, rtol=1e-4, atol=1e-4)
    assert traces == ["compile_graph"]


def test_several_graphs_are_saved_together(models: Models, tmp_path: Path, traces: list[str]) -> None:
    model = models().Model()
    compiled = attngraph.compile(model)
    with torch.no_grad():
        compiled(IDS)
    compiled(IDS)
    compiled.save(tmp_path / "m")
    loaded = attngraph.load(tmp_path / "m", model, strict=True)
    with torch.no_grad():
        assert not loaded(IDS).requires_grad
    assert loaded(IDS).requires_grad
    assert len(traces) == 2


@pytest.mark.parametrize(
    "name",
    ["tiny_decoder_lm", "sparse_transformer", "linear_transformer", "mla_decoder", "longformer", "vit"],
)
def test_our_own_targets_are_saved(name: str, tmp_path: Path, traces: list[str]) -> None:
    model, inputs = getattr(targets, name)(tokens=64)
    with torch.no_grad():
        answer = saved(model, tmp_path / "m", *inputs)
        assert torch.equal(attngraph.load(tmp_path / "m", model, strict=True)(*inputs), answer)
    assert len(traces) == 1


def test_functions_results_in_containers_sizes_and_constants(tmp_path: Path, traces: list[str]) -> None:
    tensor = torch.arange(6.0)

    def attend(x: Tensor, *, scale: float) -> dict[str, Any]:
        p = (x @ x.mT * scale + torch.tensor([[1.5]])).softmax(-1)
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


def test_sizes_at_which_the_graph_is_not_valid_are_traced(
    models: Models, tmp_path: Path, traces: list[str]
) -> None:
    model = models().Model()
    saved(model, tmp_path / "m", IDS)
    loaded = attngraph.load(tmp_path / "m", model)
    assert torch.allclose(loaded(IDS[:, :1]), model(IDS[:, :1]), atol=1e-5)
    assert len(traces) == 2


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
    what: str, models: Models, tmp_path: Path, traces: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    change, message = CHANGES[what]
    saved(models().Model(), tmp_path / "m", IDS)
    model = models(change).Model()
    with pytest.raises(SavedError, match=message):
        attngraph.load(tmp_path / "m", model, strict=True)(IDS)
    loaded = attngraph.load(tmp_path / "m", model)
    assert torch.allclose(loaded(IDS), model(IDS), atol=1e-5)
    assert len(traces) == 2 and "traced anew" in caplog.text


def test_a_buffer_whose_values_were_read_is_compared(
    models: Models, tmp_path: Path, traces: list[str]
) -> None:
    model = models().Model()
    saved(model, tmp_path / "m", IDS)
    model.layers[1].order.fill_(True)
    with pytest.raises(SavedError, match=r"the buffer layers\.1\.order held other values"):
        attngraph.load(tmp_path / "m", model, strict=True)(IDS)
    model.layers[1].order.tril_()
    loaded = attngraph.load(tmp_path / "m", model)
    loaded(IDS)
    assert len(traces) == 1
    model.layers[0].order.fill_(True)  # and as long as it is in use
    assert torch.allclose(loaded(IDS), model(IDS), atol=1e-5)
    assert len(traces) == 2


def test_what_a_trace_did_not_look_at_may_change(models: Models, tmp_path: Path, traces: list[str]) -> None:
    saved(models().Model(), tmp_path / "m", IDS)
    model = models(('TABLE = {"slope": 0.25}', 'TABLE = {"slope": 0.50}')).Model()
    attngraph.load(tmp_path / "m", model, strict=True)(IDS)
    assert len(traces) == 1


def test_other_weights_are_used_as_they_are(models: Models, tmp_path: Path, traces: list[str]) -> None:
    module = models()
    saved(module.Model(), tmp_path / "m", IDS)
    torch.manual_seed(7)
    model = module.Model()
    assert torch.allclose(attngraph.load(tmp_path / "m", model, strict=True)(IDS), model(IDS), atol=1e-5)
    assert len(traces) == 1


def test_a_patched_method_is_noticed(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = models()
    model = module.Model()
    saved(model, tmp_path / "m", IDS)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight.T)
    with pytest.raises(SavedError, match=r"Linear\.forward was function"):
        attngraph.load(tmp_path / "m", model, strict=True)(IDS)


@pytest.mark.slow
def test_a_function_that_is_bound_to_another_is_noticed(models: Models, tmp_path: Path) -> None:
    module = models()
    model = module.Model()
    saved(model, tmp_path / "m", IDS)
    module.scores = lambda q, k: q @ k.mT
    with pytest.raises(SavedError, match="scores"):
        attngraph.load(tmp_path / "m", model, strict=True)(IDS)


def test_a_tensor_that_is_no_buffer_is_compared_by_its_contents(tmp_path: Path, traces: list[str]) -> None:
    bias = torch.randn(5)

    def attend(x: Tensor) -> Tensor:
        return (x @ x.mT + bias).softmax(-1) @ x

    x = torch.randn(2, 5, 4)
    saved(attend, tmp_path / "m", x)
    assert torch.allclose(attngraph.load(tmp_path / "m", attend, strict=True)(x), attend(x), atol=1e-6)
    bias.zero_()
    with pytest.raises(SavedError, match="bias"):
        attngraph.load(tmp_path / "m", attend, strict=True)(x)


@pytest.mark.parametrize("name", ["torch", "machine", "attngraph", "python"])
def test_another_version_or_processor_is_named(
    name: str,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from attngraph.api import saving

    model = models().Model()
    saved(model, tmp_path / "m", IDS)
    other = {**saving.versions(), name: "of tomorrow"}
    monkeypatch.setattr(saving, "versions", lambda: other)
    with pytest.raises(SavedError, match=f"{name} was .*, and is of tomorrow"):
        attngraph.load(tmp_path / "m", model, strict=True)
    assert torch.allclose(attngraph.load(tmp_path / "m", model)(IDS), model(IDS), atol=1e-5)
    assert f"{name} was" in caplog.text


# --- with weights ---


def test_weights_are_saved_and_no_class_is_needed(models: Models, tmp_path: Path, traces: list[str]) -> None:
    model = models().Model().eval()
    with torch.no_grad():
        answer = saved(model, tmp_path / "m", IDS, weights=True)
        models(("class Model", "class Gone"))
        loaded = attngraph.load(tmp_path / "m")
        assert torch.equal(loaded(IDS), answer)
    assert loaded.head.weight is loaded.embed.weight
    assert loaded.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(SavedError, match="gradients was False"):
        loaded(IDS)
    assert traces == ["compile_graph"]


def test_without_weights_a_model_is_needed(models: Models, tmp_path: Path) -> None:
    saved(models().Model(), tmp_path / "m", IDS)
    with pytest.raises(SavedError, match="Give the model"):
        attngraph.load(tmp_path / "m")


def test_without_safetensors_weights_are_refused_with_what_to_do(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with pytest.raises(SavedError, match="pip install safetensors"):
        saved(models().Model(), tmp_path / "m", IDS, weights=True)
    assert not (tmp_path / "m").exists()


# --- what cannot be saved ---


def test_nothing_compiled_yet_is_an_error(models: Models, tmp_path: Path) -> None:
    with pytest.raises(SavedError, match="call the model once"):
        attngraph.compile(models().Model()).save(tmp_path / "m")


def test_a_folder_that_is_none_of_ours_is_left_alone(models: Models, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine.txt").write_text("mine")
    with pytest.raises(SavedError, match="no saved model"):
        saved(models().Model(), tmp_path / "m", IDS)
    assert (tmp_path / "m" / "mine.txt").read_text() == "mine"


def test_saving_again_replaces_what_was_saved(models: Models, tmp_path: Path) -> None:
    model = models().Model()
    for _ in range(2):
        saved(model, tmp_path / "m", IDS)
    assert [p.name for p in tmp_path.iterdir() if p.name != "saved_models.py"] == ["m"]
    attngraph.load(tmp_path / "m", model, strict=True)(IDS)


def test_no_file_holds_code_to_be_executed(models: Models, tmp_path: Path) -> None:
    saved(models().Model(), tmp_path / "m", IDS)
    names = {p.name for p in (tmp_path / "m").rglob("*") if p.is_file()}
    assert {n.rpartition(".")[2] for n in names} <= {"json", "txt", "c"}
    assert json.loads((tmp_path / "m" / "manifest.json").read_text())["content"]["graphs"] == 1
