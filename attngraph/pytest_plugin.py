"""The pytest plugin: the fixture `attn`, its options, and the report of a failing test.

    def test_my_attention_stays_fused(attn):
        attn.compile(MyModel().eval(), x).assert_fused(count=12, mask="causal")

pytest imports this file in every run wherever attngraph is installed, so torch is imported only when a test
uses the fixture. The assertions are defined in `attngraph/testing.py`.
"""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attngraph.api.verify.verdict import Verdict
    from attngraph.testing import Checked

MOST_LINES = 60
"""The most lines of a graph in the report of a failing test."""
_WRITTEN = pytest.StashKey[list[Path]]()
_COMPILED = pytest.StashKey[list["Checked"]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attngraph")
    group.addoption(
        "--attngraph-graphs", action="store_true",
        help="print the graphs of a failing test, after each pass that changed them",
    )  # fmt: skip
    group.addoption(
        "--attngraph-update", action="store_true",
        help="write the golden files of attn.compile(...).golden(name) anew instead of comparing with them",
    )  # fmt: skip


class Attn:
    """The fixture: compiles models, and keeps them for the report of a failing test."""

    def __init__(
        self, found: "list[Checked]", folder: Callable[[], Path], goldens: Path,
        update: Callable[[Path], None] | None,
    ) -> None:  # fmt: skip
        self._found, self._folder, self._goldens, self._update = found, folder, goldens, update

    def compile(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> "Checked":
        """Compile `model`, call it once with these arguments, and return a handle to make assertions on
        (`attngraph.testing.Checked`)."""
        from attngraph.testing import Checked

        made = Checked(model, args, kwargs, self._folder(), self._goldens, self._update)
        self._found.append(made)
        return made

    def verify(
        self, reference: Callable[..., Any], candidate: Callable[..., Any], inputs: Any, **options: Any
    ) -> "Verdict":
        """Assert that `candidate` computes what `reference` does (`attngraph.testing.verify`)."""
        __tracebackhide__ = True
        from attngraph.testing import verify

        return verify(reference, candidate, inputs, **options)


@pytest.fixture
def attn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Attn:
    """Compile models with attngraph and make assertions about their attention."""
    found: list[Checked] = []
    request.node.stash[_COMPILED] = found
    written = request.config.stash.setdefault(_WRITTEN, [])
    update = written.append if request.config.getoption("attngraph_update") else None
    goldens = request.path.parent / "golden"
    return Attn(found, lambda: tmp_path_factory.mktemp("attngraph"), goldens, update)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.failed:
        report.sections = _without_traces(report.sections)
        compiled: list[Checked] = item.stash.get(_COMPILED, [])
        for number, checked in enumerate(compiled, 1):
            found = _sections(checked, number, item.config.getoption("attngraph_graphs"))
            is_told = str(checked.report).splitlines()[0] in report.longreprtext  # by a failing assertion
            report.sections += found[1:] if is_told else found
    return report


def _without_traces(sections: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The sections of a test report without torch's structured traces, whose lines in a log are empty."""
    found = []
    for title, text in sections:
        kept = [line for line in text.splitlines(keepends=True) if " torch.__trace:" not in line]
        if kept or not text:
            found.append((title, "".join(kept)))
    return found


def _sections(checked: "Checked", number: int, graphs: bool) -> list[tuple[str, str]]:
    """The report of one compiled model, and its dumps or where they are, as sections of a test report."""
    title = f"attngraph, model {number}"
    found = [(f"{title}: report", str(checked.report))]
    if not graphs:
        folders = dict.fromkeys(str(path.parent) for paths in checked.files.values() for path in paths)
        where = "\n".join([*folders, "(pytest --attngraph-graphs prints them here)"])
        return [*found, (f"{title}: graphs after each pass", where)] if folders else found
    cut = ((name, "\n".join(map(_cut, paths))) for name, paths in checked.files.items())
    return [*found, *((f"{title}: graph after {name}", text) for name, text in cut)]


def _cut(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rest = len(lines) - MOST_LINES
    return "\n".join(lines if rest <= 0 else [*lines[:MOST_LINES], f"... and {rest} more lines in {path}"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    written = config.stash.get(_WRITTEN, [])
    for path in dict.fromkeys(written):
        terminalreporter.write_line(f"attngraph wrote {path}")
