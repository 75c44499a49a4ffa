"""The line that is shown while a model compiles: on a terminal, late, and gone at the end."""

import io
import re
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import attngraph
from attngraph.api import progress_line


class Stream(io.StringIO):
    """Standard error: a terminal, or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def model(q: Tensor) -> Tensor:
    return (q @ q.mT).softmax(-1) @ q


def compiled_with(terminal: bool, monkeypatch: pytest.MonkeyPatch, of: Any = model, **options: Any) -> str:
    stream = Stream(terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    attngraph.compile(of, **options)(torch.randn(2, 5, 8))
    monkeypatch.undo()
    return stream.getvalue()


def test_a_terminal_shows_stages_and_the_line_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_line, "SILENT", 0.001)
    before = threading.active_count()
    shown = compiled_with(True, monkeypatch)
    assert re.search(r"attngraph compiles: \d+ s, [a-z-]+", shown)  # whichever stages took long enough
    assert shown.endswith("\r\x1b[K") and "\n" not in shown
    assert threading.active_count() == before


def test_the_line_is_erased_where_compiling_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def printing(q: Tensor) -> Tensor:
        print("a side effect")
        return model(q)

    monkeypatch.setattr(progress_line, "SILENT", 0.001)
    stream = Stream(True)
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(attngraph.CaptureError):
        attngraph.compile(printing, strict=True)(torch.randn(2, 5, 8))
    assert stream.getvalue() == "" or stream.getvalue().endswith("\r\x1b[K")


def test_nothing_is_written_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_line, "SILENT", 0.001)
    assert compiled_with(False, monkeypatch) == ""


def test_a_short_compilation_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_line, "SILENT", 1000.0)
    assert compiled_with(True, monkeypatch) == ""
