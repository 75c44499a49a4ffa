"""The examples run, write what they say, and find compiled training equal to eager training."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import runpy
import types
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SVG = "{http://www.w3.org/2000/svg}"
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
