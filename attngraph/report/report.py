"""What a compilation did, for people (`str`, `to_html`) and for machines (`to_json`)."""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from attngraph.ir.records import made
from attngraph.meaning.masks.words import remarks
from attngraph.report import page
from attngraph.report.entries import (
    AttentionEntry,
    Entries,
    LatentEntry,
    LaterEntry,
    Missed,
    PassRecord,
    TokenProgramEntry,
    folded,
)
from attngraph.report.times import Times
from attngraph.report.units import binary

_MASK_WORDS = 160
"""Characters of a mask that are shown in one line."""


@dataclasses.dataclass(frozen=True)
class CompileReport(Entries):
    """What was fused, what was not and why, and what each pass did."""

    parts: tuple[CompileReport, ...] = dataclasses.field(default=(), repr=False)

    def to_json(self) -> str:
        """The report as a JSON object, without the texts of graphs, kernels and the user's code."""
        found = dataclasses.asdict(dataclasses.replace(self, parts=()))
        for left_out in ("captured", "code", "parts"):
            del found[left_out]
        for entry in found["passes"]:
            del entry["text"]
        for entry in found["attention"]:
            del entry["kernel"]["source"]
        for entry in found["programs"]:
            del entry["kernel"]["source"]
        return json.dumps(found, indent=2)

    def to_html(
        self, path: str | Path, title: str = "", weights: Mapping[str, Tensor] | None = None,
        earlier: CompileReport | None = None, times: Times | None = None,
    ) -> Path:  # fmt: skip
        """Write the report as one self-contained HTML file and return its path.

        `title` says what was compiled; `weights` (what `compiled.weights` gives for several names) are shown
        as heatmaps; `earlier` is a report that this one is compared with; `times` (what `compiled.times`
        gives) say where the time of a call goes. An existing file at `path` is replaced atomically.

        Raises:
            DumpError: the file cannot be written.
        """
        return page.write(self, Path(path), title, weights, earlier, times)

    @staticmethod
    def from_json(text: str) -> CompileReport:
        """The report that `to_json` wrote.

        Raises:
            ValueError: the text is not JSON, or not a report.
        """
        found: CompileReport = made(CompileReport, json.loads(text))
        return found

    def __str__(self) -> str:
        lines = [f"attngraph: {self.counted()}, compiled in {self.seconds:.2f} s"]
        if self.taken_from:
            lines.append(f"  taken from {self.taken_from}; times and bytes are of the call that was compiled")
        if self.graphs == 0:
            lines = ["attngraph: nothing traced yet; call the compiled model once"]
        for entries in folded(self.attention):
            lines += _attention_lines(entries)
        for (reason, source, _), group in itertools.groupby(
            self.missed, key=lambda m: (m.reason, m.source, m.caller)
        ):
            members = list(group)
            times = f" x {len(members)}" if len(members) > 1 else ""
            lines += ["", f"  not fused{times}   {source}", *_caller_lines(members[0]), f"      {reason}"]
        if self.cache is not None:
            lines += self.cache.lines()
        lines += _program_lines(self.programs)
        if self.ranks is not None:
            lines += self.ranks.lines()
        if self.context is not None:
            lines += self.context.lines()
        for stop in self.breaks:
            lines += ["", f"  captured in pieces   {stop.source}", f"      {stop.reason}"]
        for stop in self.numbers:
            lines += ["", f"  compiled again for other sizes   {stop.source}", f"      {stop.reason}"]
        if self.later:
            lines += ["", "  computed when somebody looks at it", *_later_lines(self.later)]
        if self.retraces:
            lines += ["", *(f"  traced again x {count}   because of {what}" for what, count in self.retraces)]
        if self.small_calls:
            lines += ["", _small(self.small_calls, bool(self.attention))]
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
            if record.name == FUSING and record.changed and scores:
                lines.append(
                    f"      no longer written: {binary(scores)} of scores, and what follows from them"
                )
        return lines

    def _repr_html_(self) -> str:
        """The report in a notebook; `to_html` writes the whole page."""
        return f"<pre>{html.escape(str(self))}</pre>"


FUSING = "fuse-attention"
"""The pass that puts attentions in place of score matrices."""


def _small(calls: int, fused: bool) -> str:
    """The line that says how many calls ran the model itself, and why."""
    many = "1 call" if calls == 1 else f"{calls} calls"
    why = (
        "attention is too small there to gain from fusing" if fused else "there is nothing fused in the graph"
    )
    return f"  {many} ran the model itself: {why} (min_scores=0: always run the graph)"


def _timed(name: str, what: str, seconds: float) -> str:
    return f"  {name:<18} {what:<18} {seconds * 1000:8.1f} ms"


def _shown(line: str) -> str:
    """A line of a score program, with a word for the number that a dtype's `finfo.min` is."""
    remark = "; ".join(remarks(line))
    return f"{line}   ({remark})" if remark else line


def _attention_lines(entries: list[AttentionEntry]) -> list[str]:
    first = entries[0]
    times = f" x {len(entries)}" if len(entries) > 1 else ""
    names = first.name or "attention"
    if len(entries) > 1:
        names = f"{first.name} .. {entries[-1].name}"
    error = max(e.error for e in entries)
    return [
        "",
        f"  attention{times}   {first.source}   {names}",
        *_caller_lines(first),
        f"      {first.heads_in_words()}, mask: {_in_short(first.mask)}",
        *(f"      | {_shown(line)}" for line in first.program.splitlines()),
        *([f"      look: {first.warning}"] if first.warning else []),
        *([f"      {first.again}"] if first.again else []),
        *_latent_lines(first.latent),
        f"      kernel {first.kernel}, {first.numerics}, checked in float64 (error {error:.0e})",
        *(f"        {remark}" for remark in first.kernel.remarks),
    ]


def _in_short(mask: str) -> str:
    """A mask in words; where that is too long to be read, the lines of the program say it."""
    return mask if len(mask) <= _MASK_WORDS else "the conditions below"


def _caller_lines(entry: AttentionEntry | Missed) -> list[str]:
    return [f"      called at {entry.caller}   {entry.code}".rstrip()] if entry.caller else []


def _later_lines(entries: Sequence[LaterEntry]) -> Iterator[str]:
    """The names of results that wait, and what a look at them costs; those of equal costs together."""
    costs: dict[str, list[LaterEntry]] = {}
    for entry in entries:
        costs.setdefault(entry.cost, []).append(entry)
    for cost, alike in costs.items():
        names = [name for entry in alike for name in entry.names]
        yield f"      {', '.join(names) if len(names) <= _NAMES else f'{names[0]} .. {names[-1]}'}"
        yield f"        {cost}{' each' if len(alike) > 1 else ''}, in a call like the first"
    yield "      a look computes the scores once more: if you always look, twice in every call"


_NAMES = 4
"""Most names of results in a line."""


def _program_lines(programs: Sequence[TokenProgramEntry]) -> list[str]:
    """What kernels say of how they computed token programs; nothing where they say nothing."""
    remarks = dict.fromkeys(remark for entry in programs for remark in entry.kernel.remarks)
    return ["", "  each token by itself", *(f"      {remark}" for remark in remarks)] if remarks else []


def _latent_lines(latent: LatentEntry | None) -> list[str]:
    lines = [] if latent is None else latent.lines()
    return [f"      {'latent: ' if place == 0 else '        '}{line}" for place, line in enumerate(lines)]


def merge(reports: Sequence[CompileReport]) -> CompileReport:
    """One report for a model that was captured in pieces."""
    if len(reports) == 1:
        return reports[0]
    parts = [part for r in reports for part in r.parts or (r,)]
    return CompileReport(
        tuple(a for r in reports for a in r.attention),
        tuple(m for r in reports for m in r.missed),
        _merged_passes([p for r in reports for p in r.passes]),
        tuple(dict.fromkeys(b for r in reports for b in r.breaks)),
        sum(r.seconds for r in reports),
        sum(r.graphs for r in reports),
        ranks=next((r.ranks for r in reports if r.ranks is not None), None),
        context=next((r.context for r in reports if r.context is not None), None),
        numbers=tuple(dict.fromkeys(b for r in reports for b in r.numbers)),
        capture=sum(r.capture for r in reports),
        small_calls=sum(r.small_calls for r in reports),
        programs=tuple(p for r in reports for p in r.programs),
        later=tuple(dict.fromkeys(entry for r in reports for entry in r.later)),
        parts=tuple(parts),
    )


def _merged_passes(records: Sequence[PassRecord]) -> tuple[PassRecord, ...]:
    """One record per pass, which sums up its runs on several graphs."""
    found: dict[str, PassRecord] = {}
    for record in records:
        known = found.get(record.name)
        if known is None:
            found[record.name] = record
            continue
        found[record.name] = PassRecord(
            record.name, known.changed or record.changed, known.seconds + record.seconds,
            known.before + record.before, known.after + record.after, known.notes + record.notes,
            record.options,
        )  # fmt: skip
    return tuple(found.values())
