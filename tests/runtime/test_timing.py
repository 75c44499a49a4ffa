"""`compiled.times`: every operation is measured, alike ones are told together, and nothing is changed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph import cli
from attngraph.errors import CaptureError
from attngraph.report.account import OpTime, Times
from attngraph.report.entries import AttentionEntry, KernelEntry
from tests.runtime.small import Of, attend


def _calls(m: Any, x: Tensor) -> Tensor:
    m.calls.add_(1)
    for layer in m.layers:
        x = layer(x)
    return x


def test_every_operation_is_measured_and_the_model_is_as_it_was(x: Tensor) -> None:
    layers = nn.ModuleList(Of(lambda m, x: attend(m.q(x), x), q=nn.Linear(8, 8)) for _ in range(2))
    model = Of(_calls, layers=layers, calls=nn.Buffer(torch.zeros(()))).eval()
    compiled = attngraph.compile(model)
    times = compiled.times(x, rounds=2)
    assert {op.name for op in times.ops} >= {"layers.0", "layers.1", "layers.0.q", "layers.1.q"}
    assert all(op.seconds > 0 for op in times.ops) and times.rounds == 2
    assert model.calls == 0
    assert sum(group.count for group in times.alike()) == len(times.ops)
    spent = times.of(compiled.report.attention)
    assert spent is not None and 0 < spent < times.seconds
    assert compiled.report.attention[0].kernel.name in str(times)


def test_alike_operations_are_told_together_the_longest_first() -> None:
    times = Times((
        OpTime("linear", "h.0.q", "m.py:3", 0.001), OpTime("linear", "h.1.q", "m.py:3", 0.002),
        OpTime("attention", "h.0", "m.py:4", 0.05, "cpu.compiled"), OpTime("add", "", "m.py:9", 0.000001),
    ), 5)  # fmt: skip
    assert [(g.op, g.name, g.count) for g in times.alike()] == [
        ("cpu.compiled", "h.#", 1), ("linear", "h.#.q", 2), ("add", "", 1),
    ]  # fmt: skip
    assert [g.what for g in times.longest()] == ["cpu.compiled", "linear x 2", "others"]
    entry = AttentionEntry("h.0", "", 1, 1, 8, 8, "none", "m.py:4", KernelEntry(), 0.0)
    assert times.of([entry]) == 0.05 and times.of([]) is None


def test_a_model_in_pieces_has_no_times() -> None:
    def prints(x: Tensor) -> Tensor:
        y = torch.softmax(x @ x.mT, -1) @ x
        print("between")
        return y

    with pytest.raises(CaptureError, match=r"times can be shown .* not of pieces"):
        attngraph.compile(prints).times(torch.randn(2, 5, 8))


@pytest.mark.slow
def test_the_command_writes_a_page_with_times_and_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    quick = ["--rounds", "1", "--no-torch-compile", "--page", str(page)]
    assert cli.main(["compile", "attngraph.models.targets:tiny_decoder_lm", "--tokens", "12", *quick]) == 0
    text = page.read_text(encoding="utf-8")
    assert "Where the time goes" in text and 'id="weights-0"' in text and "Measured" in text
    assert str(page) in capsys.readouterr().err
    two = ["attngraph.models.targets:tiny_decoder_lm", "attngraph.models.targets:gpt2"]
    assert cli.main(["compile", *two, *quick]) == 2
    assert cli.main(["compile", two[0], "--page", str(tmp_path / "none" / "x.html")]) == 2
