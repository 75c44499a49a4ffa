"""What a compilation did, for people (`str`, `to_html`) and for machines (`to_json`)."""

import dataclasses
import functools
import html
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from attngraph.errors import DumpError, told_as
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.kernels import KERNELS
from attngraph.ir.ops.token_program import RUNNERS
from attngraph.ir.records import made, write_whole
from attngraph.report import page
from attngraph.report.account import Times, account
from attngraph.report.entries import Entries, PassRecord
from attngraph.report.words import binary, gathered


@dataclasses.dataclass(frozen=True)
class CompileReport(Entries):
    """What was fused, what was not and why, and what each pass did."""

    parts: "tuple[CompileReport, ...]" = dataclasses.field(default=(), repr=False)

    def to_json(self) -> str:
        """The report as a JSON object, without the texts of graphs, kernels and the user's code."""
        found = dataclasses.asdict(dataclasses.replace(self, parts=()))
        for left_out in ("captured", "code", "parts"):
            del found[left_out]
        for record in found["passes"]:
            del record["text"]
        for entry in (*found["attention"], *found["programs"]):
            del entry["kernel"]["source"]
        return json.dumps(found, indent=2)

    def to_html(
        self, path: str | Path, title: str = "", weights: Mapping[str, Tensor] | None = None,
        earlier: "CompileReport | None" = None, times: Times | None = None,
    ) -> Path:  # fmt: skip
        """Write the report as one self-contained HTML file and return its path.

        `title` says what was compiled; `weights` (what `compiled.weights` gives for several names) are shown
        as heatmaps; `earlier` is a report that this one is compared with; `times` (what `compiled.times`
        gives) say where the time of a call goes. An existing file at `path` is replaced atomically.

        Raises:
            DumpError: the file cannot be written.
        """
        before, after = f"cannot write the page to {path}: ", ". Name a file in a folder that exists."
        with told_as(DumpError, OSError, before=before, after=after):
            write_whole(Path(path), page.render(self, title, weights, earlier, times))
        return Path(path)

    @staticmethod
    def from_json(text: str) -> "CompileReport":
        """The report that `to_json` wrote.

        Raises:
            ValueError: the text is not JSON, or not a report.
        """
        found: CompileReport = made(CompileReport, json.loads(text))
        return found

    def __str__(self) -> str:
        lines = [f"attngraph: {self.counted()}, {self.took()}"]
        if self.taken_from:
            lines.append(f"  taken from {self.taken_from}; times and bytes are of the call that was compiled")
        if self.graphs == 0:
            lines = ["attngraph: nothing traced yet; call the compiled model once"]
        for part in account(self):
            lines += part.lines()
        if self.retraces:
            lines += ["", *(f"  traced again x {count}   because of {what}" for what, count in self.retraces)]
        if self.small_calls:
            many = "1 call" if self.small_calls == 1 else f"{self.small_calls} calls"
            why = "there is nothing fused in the graph"
            why = "attention is too small there to gain from fusing" if self.attention else why
            lines += ["", f"  {many} ran the model itself: {why} (min_scores=0: always run the graph)"]
        for graph, model in self.slower:
            said = f"the model itself serves calls of one size: {model:.3g} ms, measured by turns"
            lines.append(f"  {said}, instead of {graph:.3g} (min_scores=0: always run the graph)")
        return "\n".join([*lines, *self._times()])

    @property
    def stages(self) -> dict[str, float]:
        """The seconds of each stage of the compilation, in order: capture, then the passes. What is left of
        `seconds` went into proofs, kernels, and traces that were made again."""
        first = {"capture": self.capture} if self.capture else {}
        return first | {record.name: record.seconds for record in self.passes}

    def _times(self) -> list[str]:
        """A line for each part of the compilation, with its time."""
        if not self.passes:
            return []
        lines = [""]
        if self.capture:
            lines.append(_timed("capture", f"{self.passes[0].before} ops", self.capture))
        for record in self.passes:
            change = f"{record.before} -> {record.after} ops" if record.changed else "no change"
            lines.append(_timed(record.name, change, record.seconds))
            scores = sum(entry.score_bytes or 0 for entry in self.attention)
            if record.name == "fuse-attention" and record.changed and scores:
                said = f"no longer written: {binary(scores)} of scores, and what follows from them"
                lines.append(f"      {said}")
            if record.name in ("skip-padding", "freeze-weights"):
                lines += [f"      {note}" for note in record.notes]
        return lines

    def _repr_html_(self) -> str:
        """The report in a notebook; `to_html` writes the whole page."""
        return f"<pre>{html.escape(str(self))}</pre>"


def _timed(name: str, what: str, seconds: float) -> str:
    return f"  {name:<18} {what:<18} {seconds * 1000:8.1f} ms"


def with_remarks(report: CompileReport) -> CompileReport:
    """The report, with what kernels say of how they ran since the model was compiled."""
    runners = {runner.name: runner for runner in RUNNERS}

    def told(entry: Any, by: Any, read: Callable[[str], Any]) -> Any:
        remarks = () if by is None else by.remarks(read(entry.program))
        return dataclasses.replace(entry, kernel=dataclasses.replace(entry.kernel, remarks=remarks))

    return dataclasses.replace(
        report,
        attention=tuple(told(e, KERNELS.get(e.kernel.name), parse) for e in report.attention),
        programs=tuple(told(e, runners.get(e.kernel.name), str) for e in report.programs),
    )


def merge(reports: Sequence[CompileReport]) -> CompileReport:
    """One report for a model that was captured in pieces."""
    if len(reports) == 1:
        return reports[0]

    def of(name: str) -> list[Any]:
        return [getattr(r, name) for r in reports]

    def every(name: str) -> tuple[Any, ...]:
        return tuple(itertools.chain.from_iterable(of(name)))

    joined: dict[str, Any] = {name: every(name) for name in ("attention", "missed", "programs", "others")}
    joined |= {name: tuple(dict.fromkeys(every(name))) for name in ("breaks", "numbers", "later")}
    joined |= {name: sum(of(name)) for name in ("seconds", "graphs", "capture", "small_calls")}
    joined |= {name: next(filter(None, of(name)), None) for name in ("ranks", "context", "unordered")}
    parts = tuple(part for r in reports for part in r.parts or (r,))
    return CompileReport(**joined, passes=_merged_passes(every("passes")), parts=parts)


def _merged_passes(records: Sequence[PassRecord]) -> tuple[PassRecord, ...]:
    """One record per pass, which sums up its runs on several graphs."""

    def joined(old: PassRecord, new: PassRecord) -> PassRecord:
        return PassRecord(
            new.name, old.changed or new.changed, old.seconds + new.seconds, old.before + new.before,
            old.after + new.after, old.notes + new.notes, new.options,
        )  # fmt: skip

    return tuple(functools.reduce(joined, runs) for _, runs in gathered(records, lambda r: r.name))
