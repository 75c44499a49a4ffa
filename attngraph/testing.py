"""Assertions about how attngraph compiles a model, for use in any test; no test framework is needed.

    checked = attngraph.testing.compile(model, x)        # compiles, runs once
    checked.assert_fused(count=12, mask="causal")
    checked.check("CHECK: softcap", after="fuse-attention")

The pytest plugin (`attngraph/pytest_plugin.py`) provides the same as the fixture `attn`. A failure says what
was expected, what the report says, and what to do. Only user-visible output is examined: the report, the
dumps, the results. Nothing here changes how a model is compiled.
"""

import difflib
import io
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from attngraph.api import compile as api
from attngraph.api.verify import verify as compare_sides
from attngraph.api.verify.verdict import Verdict
from attngraph.errors import meant
from attngraph.ir.language.parser import parse
from attngraph.meaning.check import comparison
from attngraph.meaning.check.comparison import elementwise
from attngraph.report.entries import AttentionEntry
from attngraph.report.report import CompileReport
from attngraph.runtime.verify import compare, tensors_of

MOST_LINES = 40
"""The most lines of a diff or a graph in a message."""


def compile(model: Callable[..., Any], *args: Any, **kwargs: Any) -> "Checked":
    """Compile `model`, call it once, and return a handle to make assertions on.

    Raises:
        Exception: what `attngraph.compile` and the call raise.
    """
    with tempfile.TemporaryDirectory(prefix="attngraph-") as folder:
        return Checked(model, args, kwargs, Path(folder), Path("golden"))


def verify(
    reference: Callable[..., Any], candidate: Callable[..., Any], inputs: Any, **options: Any
) -> Verdict:
    """Assert that `candidate` computes what `reference` does. `inputs`, `options` and what is returned
    are those of `attngraph.verify`.

    Raises:
        AssertionError: they differ, or cannot be compared; the text is the verdict.
    """
    __tracebackhide__ = True
    verdict = compare_sides(reference, candidate, inputs, **options)
    if not verdict:
        raise AssertionError(f"expected a candidate that computes what the reference does.\n\n{verdict}")
    return verdict


class Checked:
    """A model that was compiled and called once.

    Attributes:
        report: what was fused, what was not, and why not.
        output: what the call returned.
        dumps: the graph as text after each pass that changed it, by the pass's name; `"capture"` is the graph
            before all passes. For a model captured in pieces, the graphs of all pieces.
        files: where the dumps were written.
    """

    def __init__(
        self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], folder: Path,
        goldens: Path, update: Callable[[Path], None] | None = None,
    ) -> None:  # fmt: skip
        """`folder`: for the dumps. `goldens`: the folder of golden files. `update`: if given, golden files
        are written instead of compared, and it is called with the path of each."""
        self._model, self._call = model, (args, kwargs)
        self._goldens, self._update = goldens, update
        self._compiled = api.compile(model, dump=folder, min_scores=0)
        self.output = self._compiled(*args, **kwargs)
        self.report: CompileReport = self._compiled.report
        self.files: dict[str, list[Path]] = {}
        for path in sorted(folder.glob("graph-*/[0-9][0-9]-*.txt"), key=lambda p: (len(str(p.parent)), p)):
            self.files.setdefault(path.stem.partition("-")[2], []).append(path)
        self.dumps = {name: "".join(p.read_text() for p in paths) for name, paths in self.files.items()}

    def assert_fused(
        self, count: int | None = None, mask: str | None = None, program: str | None = None
    ) -> None:
        """Assert that attention was fused, according to the report.

        Args:
            count: the number of fused attentions with this mask and program (any, if not given); other
                softmax-like places may be unfused. None: at least one, all of them with this mask and
                program, and no softmax-like place was left unfused but those that are known to be no
                attention (routers of experts).
            mask: the mask as the report describes it. program: the score program; whitespace and line ends do
                not matter.

        Raises:
            AssertionError: otherwise. ProgramError: `program` does not parse.
        """
        __tracebackhide__ = True
        found = self.report.attention
        wanted = None if program is None else str(parse(program))
        fitting = [e for e in found if mask in (None, e.mask) and wanted in (None, _canonical(e))]
        described = "" if mask is None else f" with mask {mask!r}"
        described += "" if wanted is None else " with this program"
        difference = _difference(found, fitting, mask, wanted)
        if count is not None:
            if len(fitting) != count:
                said = f"expected {count} fused attention(s){described}, found {len(fitting)}."
                self._fail(said, difference)
            return
        if not found:
            self._fail(f"expected fused attention{described}, found none.")
        if len(fitting) != len(found):
            others = f"{len(found) - len(fitting)} of {len(found)} are different."
            self._fail(f"expected every fused attention{described}; {others}", difference)
        if self.report.unfused:
            self._fail(
                f"{len(self.report.unfused)} softmax-like place(s) were left alone.",
                advice=f"{_REWRITE} If they are no attention (the last softmax of a model), say "
                f"how many attentions there are: assert_fused(count={len(found)}).",
            )

    def assert_not_fused(self, reason: str | None = None) -> None:
        """Assert that no attention was fused and that a softmax-like place was left unfused; if `reason` is
        given, for a reason that contains this text.

        Raises:
            AssertionError: otherwise.
        """
        __tracebackhide__ = True
        if self.report.attention:
            self._fail(
                f"expected no fused attention, found {len(self.report.attention)}.",
                advice="if attngraph may fuse it (the model changed, or attngraph has learned it), assert "
                "that: assert_fused(); if its answers differ from eager's, please report it.",
            )
        if not self.report.missed:
            self._fail(
                "expected a softmax-like place that was left alone, found none.",
                advice="make sure that the call runs the attention that the test is about.",
            )
        if reason is not None and not any(reason in m.reason for m in self.report.missed):
            self._fail(f"expected a place left alone for the reason {reason!r}.", advice=_ACCEPT)

    def assert_close_to_eager(self) -> None:
        """Assert that the result is as exact as eager's: the error against float64 is at most twice eager's,
        plus rounding, with NaN in the same places (`attngraph/runtime/verify.py`). A function may be compared
        if it closes over no floating tensor; otherwise make it an nn.Module.

        Raises:
            AssertionError: otherwise.
        """
        __tracebackhide__ = True
        model, (args, kwargs) = self._model, self._call
        if not _repeats(model, args, kwargs):
            self._fail(
                "the model itself answers differently each time it is called: nothing to be close to.",
                advice="where dropout draws anew (training mode), call model.eval() first.",
            )
        agreement = compare(self._compiled, model, args, kwargs)
        if not agreement.holds:
            self._fail(
                f"{agreement}.", advice="please report it, with the model; the dumps show what was rewritten."
            )

    def check(self, checks: str, after: str | None = None) -> None:
        """Assert that the dump after a pass satisfies `checks`, lines in FileCheck's syntax (`CHECK: text`,
        `CHECK-NEXT:`, `CHECK-NOT:`, `CHECK-DAG:`, `CHECK-COUNT-2:`, `{{regex}}`, `[[name:regex]]`).

        Args:
            after: the name of a pass, even if it changed nothing. None: the last.

        Raises:
            AssertionError: otherwise. ValueError: there is no such pass, or a line is not a check.
            ImportError: the package `filecheck` is missing.
        """
        __tracebackhide__ = True
        name, text = self.dump(after)
        problem = _filecheck(checks, text)
        if problem is None:
            return
        self._fail(
            f"the graph after {name} does not satisfy the checks.\n\n{_indented(problem)}\n\nThe checks:\n"
            f"{_indented(checks.strip())}\n\nThe graph after {name}:\n{_indented(_cut(text.splitlines()))}",
            advice=_ACCEPT,
        )

    def golden(self, name: str | Path, after: str | None = None) -> None:
        """Assert that the whole graph after a pass equals a golden file, except for details that vary between
        machines and runs (`without_what_varies`).

        Args:
            name: the file is `golden/<name>.txt` beside the test (without pytest: in the current folder). A
                `Path` is used unchanged.
            after: as for `check`.

        Raises:
            AssertionError: the file is missing or differs.
        """
        __tracebackhide__ = True
        path = name if isinstance(name, Path) else self._goldens / f"{name}.txt"
        last, text = self.dump(after)
        found = without_what_varies(text)
        if self._update is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found, encoding="utf-8")
            self._update(path)
            return
        again = "run pytest --attngraph-update to write it, then read what changed and commit it."
        if not path.exists():
            raise AssertionError(f"there is no golden file {path}.\n\nWhat to do: {again}")
        golden = path.read_text(encoding="utf-8")
        if found != golden:
            shown = _diff(golden, found, str(path), f"the graph after {last}")
            raise AssertionError(
                f"the graph after {last} is not as written down in {path}.\n\n{shown}\n\n"
                f"What to do: if the change is meant: {again}"
            )

    def dump(self, after: str | None = None) -> tuple[str, str]:
        """The last pass up to `after` (None: of all) that changed the graph: its name and the graph after it.

        Raises:
            ValueError: there is no such pass.
        """
        order = ["capture", *dict.fromkeys(p.name for p in self.report.passes)]
        if after is not None and after not in order:
            raise ValueError(f"no pass is called {after!r}; {meant(after, order)}")
        passed = order if after is None else order[: order.index(after) + 1]
        name = next(n for n in reversed(passed) if n in self.dumps)
        return name, self.dumps[name]

    def _fail(self, expected: str, difference: str = "", advice: str = "") -> None:
        __tracebackhide__ = True
        parts = [expected, *([difference] if difference else [])]
        parts.append(f"What the report says:\n{_indented(str(self.report))}")
        advice = advice or (_ACCEPT if difference else _REWRITE)
        raise AssertionError("\n\n".join([*parts, f"What to do: {advice}"]))


_REWRITE = (
    "each place that is not fused stands above with its line and the reason: rewrite it, or accept it in the "
    "test with assert_not_fused(reason=...)."
)
_ACCEPT = (
    "if the change is meant, copy what the report says into the test; if not, look at what changed in the "
    "model at the lines above."
)


def without_what_varies(text: str) -> str:
    """A dump without details that vary between runs or machines: line numbers (a comment in the model may
    shift them), rounding errors, torch's numbering of sizes, and the CPU kernel (one needs a compiler)."""
    text = re.sub(r"(# \S+\.py|at \S+\.py):\d+", r"\1", text)
    text = re.sub(r"max error \S+\)", "max error ...)", text)
    text = re.sub(r"\bs\d+=", "s=", text)
    text = re.sub(r"\bcpu\.\w+", "cpu...", text)
    return re.sub(r" +# ", "  # ", text)


def _repeats(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two calls give the same results, up to rounding."""
    with torch.no_grad():
        one, two = (tensors_of(model(*args, **kwargs)) for _ in range(2))
    return all(comparison.compare(a, b, elementwise(1e-2)).holds for a, b in zip(one, two, strict=False))


def _canonical(entry: AttentionEntry) -> str:
    return str(parse(entry.program))


def _difference(
    found: Iterable[AttentionEntry], fitting: Iterable[AttentionEntry], mask: str | None, program: str | None
) -> str:
    """How the first attention that does not match differs from what was expected."""
    kept = {id(e) for e in fitting}
    other = next((e for e in found if id(e) not in kept), None)
    if other is None or (mask is None and program is None):
        return ""
    lines = [f"{other.name or 'attention'}, at {other.source or 'an unknown line'}, is different:"]
    if mask is not None and other.mask != mask:
        lines += [f"  - mask: {mask}", f"  + mask: {other.mask}"]
    if program is not None and _canonical(other) != program:
        lines += [_indented(_diff(program, _canonical(other), "expected program", "found program"))]
    return "\n".join(lines)


def _diff(old: str, new: str, old_name: str, new_name: str) -> str:
    pairs = difflib.unified_diff(old.splitlines(), new.splitlines(), old_name, new_name, lineterm="")
    return _cut(list(pairs))


def _cut(lines: list[str]) -> str:
    rest = len(lines) - MOST_LINES
    return "\n".join(lines if rest <= 0 else [*lines[:MOST_LINES], f"... and {rest} more lines"])


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else "" for line in text.splitlines())


def _filecheck(checks: str, text: str) -> str | None:
    """What FileCheck finds wrong with `text`, None if nothing."""
    try:
        from filecheck.finput import FInput
        from filecheck.matcher import Matcher
        from filecheck.options import Options
        from filecheck.parser import Parser, pattern_for_opts
    except ImportError as problem:
        raise ImportError(
            "check() reads FileCheck's syntax with the package `filecheck`: pip install filecheck."
        ) from problem
    options = Options(match_filename="checks")
    check, comment = pattern_for_opts(options)
    lines = [line.strip() for line in checks.strip().splitlines()]
    ignored = [line for line in lines if line and not check.search(line) and not comment.search(line)]
    if ignored or not lines:
        found = ignored[0] if ignored else ""
        raise ValueError(f"not a check of FileCheck's: {found!r}. A line begins with CHECK:, CHECK-NOT:, ...")
    parser = Parser(options, io.StringIO("\n".join(lines) + "\n"), check, comment)
    matcher = Matcher(options, FInput("dump", text), parser)
    said = io.StringIO()
    matcher.stderr = said
    if matcher.run() == 0:
        return None
    return re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue()).strip()
