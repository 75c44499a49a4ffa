"""Pictures of benchmarks: each suite's figures become bars, and a file that cannot be drawn is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workshop.__main__ import main
from workshop.bench import attention_cpu, decoding, latent
from workshop.bench.plot import Bars, draw

ROW = {
    "program": "causal",
    "tokens": 512,
    "dtype": "float32",
    "attngraph": {"seconds": 0.002, "peak_bytes": 0},
    "eager": {"seconds": 0.01, "peak_bytes": 0},
}
TOKEN = {"batch 1": {"one token": {"floor": 3.0}}, "bytes": {}}
RESULTS: dict[str, tuple[Any, dict[str, Any], dict[str, dict[str, float]]]] = {
    "attention": (
        attention_cpu, {"torch": "2", "threads": 2, "rows": [ROW]},
        {"causal, float32, 512": {"attngraph": 2.0, "eager": 10.0}},
    ),
    "decode": (
        decoding, {"torch": "2", "threads": 2, "gpt2": TOKEN},
        {"gpt2, batch 1": {"floor": 3.0}},
    ),
    "mla": (
        latent, {"torch": "2", "threads": 2, "1024": {"milliseconds": {"absorbed": 8.0}}},
        {"1024 kept": {"absorbed": 8.0}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("suite", RESULTS)
def test_the_figures_of_a_suite_are_its_bars(suite: str) -> None:
    module, results, cells = RESULTS[suite]
    assert module.bars(results).cells == cells


@pytest.mark.parametrize("suite", RESULTS)
def test_a_plot_is_drawn_of_what_was_measured(
    suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    module, results, _ = RESULTS[suite]
    monkeypatch.setattr(module, "main", lambda argv: Path(argv[1]).write_text(json.dumps(results)))
    picture = tmp_path / "picture.svg"
    command = ["bench", "--device", "cpu", "--suite", suite, "--plot", str(picture)]
    assert main(command) == 0
    assert "</svg>" in picture.read_text()
    both = ["bench", "--device", "cpu", "--suite", suite, suite, "--json", str(tmp_path / "r.json")]
    assert main(both) == 0
    assert json.loads((tmp_path / f"r-{suite}.json").read_text()) == results


def test_a_picture_that_cannot_be_drawn_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    module, results, _ = RESULTS["mla"]
    monkeypatch.setattr(module, "main", lambda argv: Path(argv[1]).write_text(json.dumps(results)))
    for place in (tmp_path / "no" / "folder.png", tmp_path / "picture.docx"):
        assert main(["bench", "--device", "cpu", "--suite", "mla", "--plot", str(place)]) == 2
        told = capsys.readouterr().err
        assert str(place) in told and ("a picture may end in" in told or "there is no folder" in told)


def test_groups_of_bars_may_lack_a_candidate(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    draw(Bars("t", "ms", {"a": {"x": 1.0, "y": 2.0}, "b": {"y": 3.0}}), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
