"""A graph depends on what the code of a model read. What later calls cannot compare is not captured, and the
reason says what it is; what only a library notes for itself is nothing to fear."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.api import arguments
from attngraph.errors import CaptureError

COUNTED = itertools.count(1)
DRAWS = random.Random(0)
NUMPYS = numpy.random.default_rng(0)
BACKENDS: dict[Any, str] = {}
SEEN: list[int] = []
NESTED: list[Any] = [1.0]
for _ in range(200):
    NESTED = [NESTED]


def attend(x: Tensor) -> Tensor:
    return (x @ x.mT).softmax(-1) @ x


def _deep() -> float:
    found: Any = NESTED
    while isinstance(found, list):
        found = found[0]
    return float(found)


def _of_file(x: Tensor) -> float:
    return float(Path(os.devnull).read_text() == "")


UNWATCHED: dict[str, tuple[Callable[[Tensor], float], str]] = {
    "a clock": (lambda x: time.time(), r"the clock \(time\)"),
    "a file": (_of_file, f"the file {os.devnull}"),
    "what is nested deeply": (lambda x: _deep(), "NESTED, a list: it is nested too deeply"),
    "an iterator": (lambda x: float(next(COUNTED)), "COUNTED"),
    "Python's random numbers": (lambda x: DRAWS.random(), "changes the global variable DRAWS"),
    "numpy's random numbers": (lambda x: NUMPYS.random(), "changes the global variable NUMPYS"),
}


@pytest.mark.parametrize("what", UNWATCHED)
def test_what_nobody_can_watch_is_named(what: str) -> None:
    read, message = UNWATCHED[what]
    x = torch.randn(2, 5, 4)
    with pytest.raises(CaptureError, match=message):
        attngraph.compile(lambda x: attend(x) * read(x), strict=True)(x)


def test_a_model_that_draws_from_a_generator_of_its_own_draws_at_every_call() -> None:
    x = torch.randn(2, 5, 4)
    compiled = attngraph.compile(lambda x: attend(x) * DRAWS.random(), min_scores=0)
    state = DRAWS.getstate()
    found = [compiled(x) for _ in range(2)]
    DRAWS.setstate(state)
    for each in found:
        torch.testing.assert_close(each, attend(x) * DRAWS.random())


def test_what_a_library_notes_by_the_class_of_a_traces_tensors_is_no_change() -> None:
    def backend_of(x: Tensor) -> str:
        return BACKENDS.setdefault(type(x), "torch")

    compiled = attngraph.compile(lambda x: attend(x) if backend_of(x) else x, strict=True, min_scores=0)
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(compiled(x), attend(x))
    assert len(compiled.report.attention) == 1


def _counts() -> float:
    SEEN.append(1)
    return 1.0


def _counts_indirectly() -> float:
    return _counts()


def test_a_side_effect_deep_in_helpers_happens_at_every_call() -> None:
    class Counting(nn.Module):
        def factor(self) -> float:
            return _counts_indirectly()

        def forward(self, x: Tensor) -> Tensor:
            return attend(x) * self.factor()

    SEEN.clear()
    compiled = attngraph.compile(Counting(), min_scores=0)
    for _ in range(3):
        compiled(torch.randn(2, 5, 4))
    assert len(SEEN) == 3
    with pytest.raises(CaptureError, match="changes the global variable SEEN"):
        attngraph.compile(Counting(), strict=True)(torch.randn(2, 5, 4))


def test_what_the_code_does_not_read_may_change_without_another_graph() -> None:
    class Model(nn.Module):
        unread = 1.0

        def other(self) -> float:
            return UNREAD

        def forward(self, x: Tensor) -> Tensor:
            return attend(x)

    model = Model()
    compiled, x = attngraph.compile(model, min_scores=0), torch.randn(2, 5, 4)
    compiled(x)
    Model.unread, globals()["UNREAD"] = 2.0, 3.0
    compiled(x)
    assert compiled.report.graphs == 1


UNREAD = 1.0


def test_hooks_of_all_modules_and_modes_of_the_callers_run_the_model_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arguments._told.cache_clear()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compiled, x = attngraph.compile(model, min_scores=0), torch.randn(2, 5, 4)
    compiled(x)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
    try:
        torch.testing.assert_close(compiled(x), model(x))
    finally:
        handle.remove()
    assert caplog.text.count("under a hook of all modules the model itself runs") == 1
    torch.testing.assert_close(compiled(x), model(x))


def test_the_default_device_is_part_of_a_call() -> None:
    compiled = attngraph.compile(lambda x: attend(x) + torch.ones(4), min_scores=0)
    x = torch.randn(2, 5, 4)
    compiled(x)
    with torch.device("meta"), pytest.raises(RuntimeError, match="device"):
        compiled(x)
    torch.testing.assert_close(compiled(x), attend(x) + 1)


def test_passes_run_without_the_callers_autocast() -> None:
    def scores_by_einsum(x: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.einsum("bqd,bkd->bqk", x, x).softmax(-1)
        return weights @ x, weights

    compiled, x = attngraph.compile(scores_by_einsum, strict=True, min_scores=0), torch.randn(2, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found, want = compiled(x), scores_by_einsum(x)
    assert len(compiled.report.attention) == 1
    for mine, theirs in zip(found, want, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


def test_a_module_that_forward_imports_first_keeps_what_it_defines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_in_forward.py").write_text("SCALE = 3.0\ndef scaled(x): return x * SCALE\n")
    monkeypatch.syspath_prepend(tmp_path)

    def forward(x: Tensor) -> Tensor:
        import imported_in_forward as module

        return attend(module.scaled(x))

    x = torch.randn(2, 5, 8)
    compiled = attngraph.compile(forward, strict=True, min_scores=0)
    torch.testing.assert_close(compiled(x), attend(x * 3))
    import imported_in_forward

    assert imported_in_forward.SCALE == 3
    imported_in_forward.SCALE = 2.0
    torch.testing.assert_close(compiled(x), attend(x * 2))
