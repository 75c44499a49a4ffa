"""The pytest plugin: the fixture `attn`, the option `--attngraph-update`, and the graphs of a failing test.

    def test_my_attention_stays_fused(attn):
        attn.compile(MyModel().eval(), x).assert_fused(count=12, mask="causal")

pytest imports this file in every run wherever attngraph is installed, so torch is imported only when a test
uses the fixture. The assertions are defined in `attngraph/testing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attngraph.testing import Checked

MOST_LINES = 60
"""The most lines of a graph in the report of a failing test."""
_WRITTEN = pytest.StashKey[list[Path]]()
_COMPILED = pytest.StashKey[list["Checked"]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attngraph")
    group.addoption(
        "--attngraph-update", action="store_true",
        help="write the golden files of attn.compile(...).golden(name) anew instead of comparing with them",
    )  # fmt: skip


class Attn:
    """The fixture: compiles models, and keeps them for the report of a failing test."""

    def __init__(
        self, found: list[Checked], folder: Callable[[], Path], goldens: Path,
        update: Callable[[Path], None] | None,
    ) -> None:  # fmt: skip
        self._found, self._folder, self._goldens, self._update = found, folder, goldens, update

    def compile(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Checked:
        """Compile `model`, call it once with these arguments, and return a handle to make assertions on
        (`attngraph.testing.Checked`)."""
        from attngraph.testing import Checked

        made = Checked(model, args, kwargs, self._folder(), self._goldens, self._update)
        self._found.append(made)
        return made


@pytest.fixture
def attn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Attn:
    """Compile models with attngraph and make assertions about their attention."""
    found: list[Checked] = []
    request.node.stash[_COMPILED] = found
    written = request.config.stash.setdefault(_WRITTEN, [])
    return Attn(
        found,
        lambda: tmp_path_factory.mktemp("attngraph"),
        request.path.parent / "golden",
        written.append if request.config.getoption("attngraph_update") else None,
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.failed:
        compiled: list[Checked] = item.stash.get(_COMPILED, [])
        for number, checked in enumerate(compiled, 1):
            report.sections += _sections(checked, number)
    return report


def _sections(checked: Checked, number: int) -> list[tuple[str, str]]:
    """The report and the dumps of one compiled model, as sections of a test report."""
    title = f"attngraph, model {number}"
    found = [(f"{title}: report", str(checked.report))]
    for name, paths in checked.files.items():
        text = "\n".join(_cut(path) for path in paths)
        found.append((f"{title}: graph after {name}", text))
    return found


def _cut(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rest = len(lines) - MOST_LINES
    return "\n".join(lines if rest <= 0 else [*lines[:MOST_LINES], f"... and {rest} more lines in {path}"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    written = config.stash.get(_WRITTEN, [])
    for path in dict.fromkeys(written):
        terminalreporter.write_line(f"attngraph wrote {path}")
