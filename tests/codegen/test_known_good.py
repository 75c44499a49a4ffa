"""Calls whose launches are known to be good are not run again, and no others."""

import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attngraph.codegen.triton import device, launch, store

pytestmark = pytest.mark.skipif(device.no_triton() is not None, reason="needs triton")


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Checks a call of a kernel with this source, and says what was done: "run, compared" or nothing."""
    import known_good

    monkeypatch.setattr(known_good, "TABLE", tmp_path / "known_good.txt")
    monkeypatch.delenv("ATTNGRAPH_INTERPRET", raising=False)
    done: list[str] = []
    monkeypatch.setattr(store, "launch_kernel", lambda *_: done.append("run"))
    path = tmp_path / "kernel.py"

    def call(
        source: str, grid: int = 1, number: int = 1, *, updates: bool = False, right: bool = True
    ) -> str:
        path.write_text(source)
        function = types.SimpleNamespace(
            __name__="kernel", __code__=types.SimpleNamespace(co_filename=str(path))
        )
        given = [torch.tensor([number]), torch.zeros(3), 5]
        done.clear()

        def compare(found: int) -> None:
            done.append("compared")
            assert right

        def run() -> int:
            launch.launch_kernel(types.SimpleNamespace(fn=function), (grid,), given, {}, torch.device("cpu"))
            return 1

        with known_good.of_this_run(updates):
            known_good.check(run, compare)
        return ", ".join(done)

    return call


def test_what_was_compared_once_is_not_run_again_as_long_as_it_stays_as_it_is(
    attempt: Callable[..., str],
) -> None:
    assert attempt("a") == attempt("a") == "run, compared", "it is written on demand alone"
    assert attempt("a", updates=True) == "run, compared"
    assert attempt("a") == ""
    assert {attempt("b"), attempt("a", grid=2), attempt("a", number=2)} == {"run, compared"}
    assert attempt("b", updates=True) == "run, compared" and attempt("a") == attempt("b") == ""


def test_what_is_wrong_is_not_known_to_be_good(attempt: Callable[..., str]) -> None:
    with pytest.raises(AssertionError):
        attempt("a", updates=True, right=False)
    assert attempt("a") == "run, compared"


def test_where_the_code_around_launches_changes_all_is_run(
    attempt: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import known_good

    assert attempt("a", updates=True) == "run, compared" and attempt("a") == ""
    monkeypatch.setattr(known_good, "_around", lambda: "other")
    assert attempt("a") == "run, compared"


def test_all_is_run_on_demand(attempt: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    attempt("a", updates=True)
    monkeypatch.setenv("ATTNGRAPH_INTERPRET", "all")
    assert attempt("a") == "run, compared"
