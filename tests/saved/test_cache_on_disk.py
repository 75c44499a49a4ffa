"""What was compiled once is not compiled again, in this process or another; in doubt it is."""

from __future__ import annotations

import linecache
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.cli import main
from attngraph.saved.disk import Disk

Models = Callable[..., types.ModuleType]
IDS = torch.tensor([[3, 1, 4, 1, 5], [2, 6, 5, 3, 5]])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNGRAPH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(cache: Path) -> int:
    return Disk(cache).usage()[0]


def test_the_second_time_nothing_is_traced(
    models: Models, cache: Path, traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models().Model().eval()
    answers = [attngraph.compile(model)(IDS) for _ in range(2)]
    assert torch.equal(*answers) and traces == ["compile_graph"]
    tokens = [attngraph.compile(model, cache=True).generate(IDS, 4) for _ in range(2)]
    assert torch.equal(*tokens) and traces == ["compile_graph", "derive_decoder"]
    assert entries(cache) == 2
    monkeypatch.setenv("ATTNGRAPH_CACHE", "0")  # turns it off
    attngraph.compile(model)(IDS)
    assert len(traces) == 3 and entries(cache) == 2


@pytest.mark.slow
def test_other_options_modes_and_arguments_are_other_entries(
    models: Models, cache: Path, traces: list[str]
) -> None:
    model = models().Model()
    attngraph.compile(model)(IDS)
    with torch.no_grad():
        attngraph.compile(model)(IDS)
    attngraph.compile(model, disable=("merge-heads",))(IDS)
    attngraph.compile(model.eval())(IDS)
    attngraph.compile(model)(IDS.int())
    assert len(traces) == entries(cache) == 5


CHANGES = (
    ("SCALE = 0.5", "SCALE = 0.25"),
    ("return scores(q, k)", "return scores(q, k) * 1.0"),
    ("window=3", "window=4"),
    ('kind = "plain"', 'kind = "other"'),
    (".tril().bool()", ".tril(1).bool()"),
)


def test_changed_code_and_state_miss(models: Models, cache: Path, traces: list[str]) -> None:
    attngraph.compile(models().Model(layers=1))(IDS)
    for change in CHANGES:
        model = models(change).Model(layers=1)
        assert torch.allclose(attngraph.compile(model)(IDS), model(IDS), atol=1e-5)
    assert len(traces) == 1 + len(CHANGES)


def test_values_in_closures_defaults_containers_and_objects_miss(cache: Path, traces: list[str]) -> None:
    class Options:
        def __init__(self, scale: float) -> None:
            self.scale = scale

    def made(a: float, b: float, c: float, d: float) -> Callable[[Tensor], Tensor]:
        held, options = {"b": [b]}, Options(c)

        def attend(x: Tensor, shift: float = d) -> Tensor:
            return ((x @ x.mT) * a + held["b"][0] * options.scale + shift).sigmoid().softmax(-1) @ x

        return attend

    x = torch.randn(2, 5, 4)
    for numbers in ((1, 2, 3, 4), (9, 2, 3, 4), (1, 9, 3, 4), (1, 2, 9, 4), (1, 2, 3, 9), (1, 2, 3, 4)):
        attend = made(*map(float, numbers))
        assert torch.allclose(attngraph.compile(attend)(x), attend(x), atol=1e-6)
    assert len(traces) == 5


HELD = {
    "a table": ('SCALE = {"a": %s}', 'helper.SCALE["a"]'),
    "an object": ("class Own: ...\nSCALE = Own()\nSCALE.a = %s", "helper.SCALE.a"),
    "a table of a class": ("class Own:\n    SCALE = [%s]", "helper.Own.SCALE[0]"),
    "an enumeration": ("import enum\nclass Own(enum.Enum):\n    A = %s", "helper.Own.A.value"),
    "a function's own global": ("SCALE = %s\ndef scale(): return SCALE", "helper.scale()"),
    "a function in a table": ('SCALE = {"a": lambda: %s}', 'helper.SCALE["a"]()'),
    "a name as a text": ("SCALE = [%s]", 'getattr(helper, "SCALE")[0]'),
    "imported where it is used": ("SCALE = [%s]", '__import__("helper_of_a_test").SCALE[0]'),
}


@pytest.mark.parametrize("held", HELD)
def test_what_another_file_holds_counts(
    held: str, cache: Path, traces: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, read = HELD[held]
    file = tmp_path / "helper_of_a_test.py"
    x = torch.randn(2, 5, 4)
    for number in (0.5, 0.25, 0.5):
        file.write_text(text % number)
        linecache.clearcache()
        helper = types.ModuleType(file.stem)
        helper.__file__ = str(file)
        exec(compile(file.read_text(), file, "exec"), vars(helper))
        monkeypatch.setitem(sys.modules, file.stem, helper)
        names = {"helper": helper}
        exec(f"def attend(x): return (x @ x.mT * {read}).softmax(-1) @ x", names)
        attend: Any = names["attend"]
        assert torch.allclose(attngraph.compile(attend)(x), attend(x), atol=1e-6)
    assert len(traces) in (2, 3)  # where it could not be told, nothing was kept


def test_what_cannot_be_compared_is_not_kept(cache: Path, traces: list[str], tmp_path: Path) -> None:
    """Something from a file; and an object whose state is hidden, an iterator."""
    file, x = tmp_path / "scale.txt", torch.randn(2, 5, 4)
    hidden = types.SimpleNamespace(numbers=iter([1.0, 2.0]))

    def of_a_file(x: Tensor) -> Tensor:
        return (x @ x.mT * float(file.read_text())).softmax(-1) @ x

    class Odd(nn.Module):
        odd = hidden

        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).softmax(-1) @ x if self.odd else x

    for number in (0.5, 0.25):
        file.write_text(str(number))
        assert torch.allclose(attngraph.compile(of_a_file)(x), of_a_file(x), atol=1e-6)
        attngraph.compile(Odd())(x)
    assert len(traces) == 4 and entries(cache) == 0


def test_a_variable_of_the_environment_that_is_read_counts(
    cache: Path, traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(x: Tensor) -> Tensor:
        return (x @ x.mT * float(os.environ.get("SCALE_OF_A_TEST", "1"))).softmax(-1) @ x

    x = torch.randn(2, 5, 4)
    for scale in ("1", "2", "1"):
        monkeypatch.setenv("SCALE_OF_A_TEST", scale)
        assert torch.allclose(attngraph.compile(attend)(x), attend(x), atol=1e-6)
    assert len(traces) == 2


@pytest.mark.parametrize("asks", [False, True])
def test_the_number_of_threads_counts_where_code_asks_for_it(
    asks: bool, cache: Path, traces: list[str]
) -> None:
    """An entry serves machines of any number of cores, and a state goes on when the number is set."""

    def attend(x: Tensor) -> Tensor:
        return (x @ x.mT * (torch.get_num_threads() if asks else 1)).softmax(-1) @ x

    x, compiled = torch.randn(2, 4, 8), attngraph.compile(attend, min_scores=0)
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        torch.testing.assert_close(compiled(x), attend(x))
        torch.testing.assert_close(attngraph.compile(attend, min_scores=0)(x), attend(x))
    assert len(traces) == 1 + asks


def test_a_damaged_entry_is_removed_and_compiled_again(
    models: Models, cache: Path, traces: list[str]
) -> None:
    model = models().Model()
    attngraph.compile(model)(IDS)
    for name in ("graph.txt", "guards.json", "manifest.json"):
        (file,) = cache.rglob(name)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
        assert torch.allclose(attngraph.compile(model)(IDS), model(IDS), atol=1e-5)
        assert entries(cache) == 1
    assert len(traces) == 4


def test_its_size_is_bounded_and_the_least_recently_used_go(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    files = {"guards.json": b"{}", "graph.txt": b"x" * 1000}
    for number in range(6):
        disk.keep({"number": number}, {**files, "guards.json": str(number).encode()})
        for path in disk._all():
            os.utime(path / "manifest.json", (0, os.stat(path / "manifest.json").st_mtime - 10))
    disk.used(*next(iter(disk.entries({"number": 0}))))
    disk.make_room(most=1 << 20, entries=3)
    kept = [n for n in range(6) if list(disk.entries({"number": n}))]
    assert kept == [0, 4, 5]
    disk.make_room(most=1500)
    assert disk.usage()[0] == 1
    disk.clear()
    assert disk.usage() == (0, 0)


SCRIPT = """
import sys, torch, attngraph
sys.path.insert(0, sys.argv[1])
import saved_models
from attngraph.api import build
traces = []
compile_graph = build.compile_graph
build.compile_graph = lambda *a, **k: (traces.append(1), compile_graph(*a, **k))[1]
torch.manual_seed(0)
model = saved_models.Model()
ids = torch.tensor([[3, 1, 4, 1, 5], [2, 6, 5, 3, 5]])
assert torch.allclose(attngraph.compile(model)(ids), model(ids), atol=1e-5)
print(len(traces))
"""


@pytest.mark.slow
def test_processes_share_it_also_at_once(models: Models, cache: Path, tmp_path: Path) -> None:
    models()
    environment = {**os.environ, "ATTNGRAPH_CACHE": str(cache), "PYTHONHASHSEED": "random"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]

    def begin() -> subprocess.Popen[str]:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    together = [begin(), begin()]
    assert [p.communicate()[0].strip() in ("0", "1") and p.returncode for p in together] == [0, 0]
    assert entries(cache) == 1
    (later,) = [begin()]
    assert later.communicate()[0].strip() == "0"


def test_the_command_line_shows_and_clears_it(
    models: Models, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models().Model()
    attngraph.compile(model)(IDS)
    assert main(["cache"]) == 0
    assert "1 graph" in (shown := capsys.readouterr().out) and str(cache) in shown
    assert main(["cache", "clear"]) == 0
    assert entries(cache) == 0
    cache.with_name("file").write_text("")
    monkeypatch.setenv("ATTNGRAPH_CACHE", str(cache.with_name("file")))  # cannot be written to
    assert torch.allclose(attngraph.compile(model)(IDS), model(IDS), atol=1e-5)


def test_a_folder_to_which_others_may_write_is_not_used(
    models: Models, cache: Path, traces: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = models().Model().eval()
    mask = os.umask(0o002)
    try:
        attngraph.compile(model)(IDS)
    finally:
        os.umask(mask)
    (manifest,) = (cache / "graphs").glob("*/*/manifest.json")
    for count, folder in enumerate((cache / "graphs", manifest.parent.parent, manifest.parent), 2):
        mode = folder.stat().st_mode
        assert not mode & 0o022
        folder.chmod(0o775)
        caplog.clear()
        attngraph.compile(model)(IDS)
        assert traces == ["compile_graph"] * count and "other users may write to it" in caplog.text
        folder.chmod(mode)
