"""The examples run, write what they say, and find compiled training equal to eager training."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import math
import re
import runpy
import types
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attngraph

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SVG = "{http://www.w3.org/2000/svg}"
Script = Callable[..., dict[str, Any]]
TINY = ["--steps", "4", "--tokens", "16", "--batch", "2", "--layers", "2", "--width", "32"]


@pytest.fixture(scope="module")
def train_byte_lm() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("train_byte_lm", EXAMPLES / "train_byte_lm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_training_a_byte_model_goes_the_same_way_eager_and_compiled(
    train_byte_lm: types.ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_byte_lm.main([*TINY, "--out", str(tmp_path / "new" / "folder")]) == 0
    found = json.loads((tmp_path / "new" / "folder" / "figures.json").read_text(encoding="utf-8"))
    eager, compiled = found["losses"]["eager"], found["losses"]["attngraph"]
    assert len(eager) == len(compiled) == 4
    assert compiled == pytest.approx(eager, rel=1e-5)
    assert found["largest_loss_difference"] == max(abs(a - b) for a, b in zip(eager, compiled, strict=True))
    assert eager[0] == pytest.approx(math.log(256), abs=1.0)  # an untrained model guesses
    assert len(set(eager)) == 4  # and learns: no two steps are alike
    assert found["fused_attentions"] == 2
    assert all(step["seconds"] > 0 for step in found["step"].values())

    picture = ElementTree.parse(tmp_path / "new" / "folder" / "loss.svg").getroot()
    curves = picture.findall(f"{SVG}polyline")
    assert [len(curve.attrib["points"].split()) for curve in curves] == [4, 4]
    out, err = capsys.readouterr()
    assert "2 attentions fused" in out
    assert "4/4" in err


def test_the_plot_puts_a_lower_loss_lower_and_leaves_out_what_is_not_finite(
    train_byte_lm: types.ModuleType,
) -> None:
    text = train_byte_lm.loss_plot({"eager": [5.0, 4.0, 2.0], "attngraph": [5.0, math.nan, 2.5]})
    first, second = ElementTree.fromstring(text).findall(f"{SVG}polyline")
    heights = [float(point.split(",")[1]) for point in first.attrib["points"].split()]
    assert heights == sorted(heights)
    assert len(set(heights)) == 3
    assert len(second.attrib["points"].split()) == 2


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.31, 5.56), (3.0, 3.0), (1.2e-5, 1.3e-5)])
def test_ticks_are_even_and_hold_all_values_between_them(
    train_byte_lm: types.ModuleType, low: float, high: float
) -> None:
    ticks = train_byte_lm.round_numbers(low, high)
    assert ticks[0] <= low + 1e-12
    assert ticks[-1] >= high - 1e-12
    assert 2 <= len(ticks) <= 9
    gaps = [b - a for a, b in itertools.pairwise(ticks)]
    assert gaps == pytest.approx([gaps[0]] * len(gaps))


@pytest.mark.parametrize("wrong", [["--width", "33"], ["--steps", "0"], ["--batch", "-1"]])
def test_options_that_make_no_sense_end_the_program_with_a_message(
    train_byte_lm: types.ModuleType, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        train_byte_lm.main(wrong)
    assert stop.value.code == 2
    assert f"{wrong[0]} must be" in capsys.readouterr().err


def test_a_policy_trains_on_what_it_has_just_sampled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["same_bits.py", "--steps", "2", "--rows", "2"])
    runpy.run_path(str(EXAMPLES / "same_bits.py"), run_name="__main__")
    assert capsys.readouterr().out.count("ratio 1.0 to 1.0") == 2


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """The names that a script defines when it is run; skipped where a package of others is not installed."""

    def run(name: str, *packages: str, as_main: bool = True) -> dict[str, Any]:
        for package in packages:
            pytest.importorskip(package, reason=f"{name} needs {package}, which is not installed")
        monkeypatch.syspath_prepend(EXAMPLES)  # as python has it for a script
        monkeypatch.setattr("sys.argv", [name])
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__" if as_main else "imported")

    return run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(EXAMPLES)
    pytest.importorskip("transformers", reason="the examples' checkpoint is one of transformers")
    made: str = importlib.import_module("tiny_checkpoint").tiny_checkpoint(str(tmp_path / "checkpoint"))
    return made


def test_a_checkpoint_answers_by_pipeline_chat_streams_batch_and_engine(
    script: Script, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    found = script("serve_and_chat.py", "transformers", "tokenizers")
    out = capsys.readouterr().out
    assert "generate runs the uncompiled model" not in caplog.text
    model, tokenizer = found["model"], found["tokenizer"]
    prompt = tokenizer("Once upon a time", return_tensors="pt")
    expected = tokenizer.decode(model.generate(**prompt, max_new_tokens=10, do_sample=False)[0])
    assert found["texts"][0] == found["served"][0] == expected
    assert out.count(expected) >= 4  # pipeline, stream, batch, engine
    assert "|".join(expected.removeprefix("Once upon a time")) in out  # piece by piece
    read = re.findall(r"(\d+) tokens read, (\d+) in the state", out)
    assert [int(n) for _, n in read] == [50, 50 + int(read[1][0]) + 20]
    whole = tokenizer(found["said"], add_special_tokens=False, return_tensors="pt")["input_ids"]
    assert found["state"].lengths == [whole.shape[1]]
    with torch.no_grad():  # the state is that of all that was said
        longer = torch.cat([whole, whole[:, :1]], 1)
        going_on = found["decoder"].decode(whole[:, :1], found["state"])
        torch.testing.assert_close(going_on, model(longer).logits[:, -1:], rtol=1e-4, atol=1e-5)


def test_the_server_of_transformers_answers_with_a_compiled_model(
    script: Script, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = script("serve_with_transformers.py", "transformers", "fastapi", "uvicorn", "openai", as_main=False)
    client = importlib.import_module("fastapi.testclient").TestClient
    asked = {"model": folder, "messages": [{"role": "user", "content": "Who?"}]}
    asked |= {"max_tokens": 8, "temperature": 0}
    with client(app["server"](folder)) as server:
        (answer,) = server.post("/v1/chat/completions", json=asked).json()["choices"]
        pieces = server.post("/v1/chat/completions", json={**asked, "stream": True}).text
    transformers = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer("user: Who?\nassistant: ", return_tensors="pt")["input_ids"]
    found = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert answer["message"]["content"] == tokenizer.decode(found, skip_special_tokens=True)
    parts = [json.loads(line[6:]) for line in pieces.splitlines() if line.startswith("data: {")]
    said = [choice["delta"].get("content") or "" for part in parts for choice in part["choices"]]
    assert "".join(said) == answer["message"]["content"]
    assert "generate runs the uncompiled model" not in caplog.text


def loaded(folder: str) -> Any:
    return importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(folder)


IDS = torch.arange(3, 27).reshape(2, 12)


def test_adapters_are_trained_swapped_merged_and_decoded(
    script: Script, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = script("lora.py", "peft", "accelerate", as_main=False)
    torch.manual_seed(0)
    found, merged = lora["swap"](loaded(folder), IDS)
    losses, continued = capsys.readouterr().out.splitlines()
    torch.manual_seed(0)  # the same without attngraph
    plain = lora["get_peft_model"](loaded(folder), lora["LORA"], adapter_name="poems")
    plain.add_adapter("letters", lora["LORA"])
    expected = lora["train"](plain, IDS)
    assert json.loads(losses.partition("poems ")[2]) == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == 3
    plain.eval()
    for name in ("poems", "letters"):
        plain.set_adapter(name)
        torch.testing.assert_close(found[name], plain(input_ids=IDS).logits[:, -1], rtol=1e-4, atol=1e-5)
    assert (found["poems"] - found["letters"]).abs().max() > 1e-4
    compiled = attngraph.compile(merged, min_scores=0)
    torch.testing.assert_close(compiled(input_ids=IDS).logits[:, -1], found["poems"], rtol=1e-4, atol=1e-5)
    assert len(compiled.report.attention) == 2
    plain.set_adapter("poems")
    own = plain.generate(input_ids=IDS, max_new_tokens=5, do_sample=False)[:, 12:]
    assert json.loads(continued.partition("continue ")[2]) == own.tolist()


@pytest.mark.slow
def test_an_adapter_of_4_bit_weights_is_trained_in_pieces(script: Script, folder: str) -> None:
    lora = script("lora.py", "peft", "accelerate", "bitsandbytes", as_main=False)
    torch.manual_seed(0)
    compiled = attngraph.compile(lora["four_bits"](folder), min_scores=0)
    found = lora["train"](compiled, IDS)
    assert len(compiled.report.attention) == 2 and compiled.report.breaks
    torch.manual_seed(0)
    expected = lora["train"](lora["four_bits"](folder), IDS)
    assert found == pytest.approx(expected, rel=1e-5) and len(set(expected)) == 3


@pytest.mark.parametrize("trainer", ["sft", "grpo"])
def test_trainers_of_trl_train_a_compiled_backbone_as_they_train_the_model(
    script: Script, folder: str, trainer: str
) -> None:
    trl = script("train_with_trl.py", "trl", "datasets", as_main=False)
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    model = trl["with_fused_attention"](loaded(folder))
    found = trl[trainer](model, tokenizer)
    assert len(model.base_model.report.attention) == 2
    torch.manual_seed(0)
    expected = trl[trainer](loaded(folder), tokenizer)
    assert len(expected) > 0
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_embeddings_of_a_compiled_encoder_are_those_of_the_encoder(script: Script) -> None:
    found = script("embeddings.py", "sentence_transformers")
    model, texts = found["model"], found["texts"]
    compiled = model[0].model
    plain = found["SentenceTransformer"](found["folder"], device="cpu")
    torch.testing.assert_close(*(torch.as_tensor(m) for m in (found["embeddings"], plain.encode(texts))))
    model[0].model = attngraph.compile(compiled._orig_mod, min_scores=0)  # calls as small as these too
    torch.testing.assert_close(*(torch.as_tensor(m.encode(texts)) for m in (model, plain)))
    assert len(model[0].model.report.attention) == 2

    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    gradients = []
    for each in (model, plain):
        pairs = [each.preprocess(texts[:2]), each.preprocess(texts[1:])]
        losses.MultipleNegativesRankingLoss(each.eval())(pairs, None).backward()
        gradients.append([p.grad for p in each.parameters() if p.grad is not None])
    assert len(gradients[0]) > 20
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_functions_of_flex_attention_go_in_and_come_out(script: Script) -> None:
    found = script("flex_attention.py")
    q, k, v, documents, places = *(found[n] for n in ("q", "k", "v", "documents")), torch.arange(64)
    bias = found["slopes"].detach()[:, None, None] * (places - places[:, None])
    seen = (places <= places[:, None]) & (documents[:, :, None] == documents[:, None, :])
    scores = (q @ k.mT / 32**0.5 + bias).masked_fill(~seen[:, None], -math.inf)
    torch.testing.assert_close(found["out"], scores.softmax(-1) @ v)
    for source in (found["attention"].flex(), found["attention"].sdpa()):
        names: dict[str, Any] = {}
        exec(source, names)
        torch.testing.assert_close(names["attention"](q, k, v), found["window"](q, k, v))
