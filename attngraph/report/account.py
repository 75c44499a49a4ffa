"""The account of a compilation: its parts, which text, notebook and page print in the same words.

And where the time of a call goes: what each operation of a graph took, in text and numbers.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from attngraph.meaning.masks.words import remarks
from attngraph.report.entries import AttentionEntry, Entries, LaterEntry, Missed, OtherEntry, folded
from attngraph.report.user_code import like
from attngraph.report.words import Part, alike, from_to, gathered, milliseconds

_MASK_WORDS = 160
"""Characters of a mask that are shown in one line; of a longer one the lines of the program say it."""
_NAMES = 4
"""Most names of results in a line."""


def account(report: Entries) -> Iterator[Part]:
    """Everything that was found, in order."""
    for entries in folded(report.attention):
        yield _attention(entries)
    for (reason, source, _), missed in gathered(report.missed, lambda m: (m.reason, m.source, m.caller)):
        yield Part(f"not fused{_times(missed)}   ", source, [*_caller(missed[0]), reason])
    yield from records(report)
    for stop in report.breaks:
        yield Part("captured in pieces   ", stop.source, [stop.reason])
    for stop in report.numbers:
        yield Part("compiled again for other sizes   ", stop.source, [stop.reason])
    yield from later(report)


def records(report: Entries) -> Iterator[Part]:
    """Attentions without a softmax, what is kept, what kernels say of token programs, what ranks divide."""
    for entry, equal in alike(report.others, lambda e: dataclasses.replace(e, name="")):
        head = f"{entry.source}   {from_to([e.name or 'attention' for e in equal])}"
        done = entry.done or f"left as the model has it: {entry.reason}"
        yield Part(f"attention without a softmax{_times(equal)}   ", head, [*_caller(entry), done])
    if report.cache is not None:
        yield report.cache.account()
    if report.unordered is not None:
        found = f"not in every batch and chunk, because of {', '.join(report.unordered)}"
        yield Part("the same bits   ", found if report.unordered else "in every batch, chunk and page")
    said = dict.fromkeys(remark for entry in report.programs for remark in entry.kernel.remarks)
    if said:
        yield Part("each token by itself", "", list(said))
    for divided in (report.ranks, report.context):
        if divided is not None:
            yield divided.account()


def later(report: Entries) -> Iterator[Part]:
    """What is computed when somebody looks at it, if anything is."""
    if report.later:
        yield Part("computed when somebody looks at it", "", list(_later(report.later)))


def _attention(entries: list[AttentionEntry]) -> Part:
    first = entries[0]
    error = max(e.error for e in entries)
    latent = [] if first.latent is None else first.latent.lines()
    names = from_to([first.name or "attention"] if len(entries) == 1 else [e.name for e in entries])
    mask = first.mask if len(first.mask) <= _MASK_WORDS else "the conditions below"
    facts = [
        *_caller(first),
        f"{first.heads_in_words()}, mask: {mask}",
        *(f"| {_shown(line)}" for line in first.program.splitlines()),
        *(f"  r{number}: {told}" for number, told in enumerate(first.reads)),
        *([f"look: {first.warning}"] if first.warning else []),
        *([first.again] if first.again else []),
        *(f"{' ' * 8 if place else 'latent: '}{line}" for place, line in enumerate(latent)),
        f"kernel {first.kernel}, {first.numerics}, checked in float64 (error {error:.0e})",
        *(f"  {remark}" for remark in first.kernel.remarks),
    ]
    return Part(f"attention{_times(entries)}   ", f"{first.source}   {names}", facts)


def _times(members: Sequence[object]) -> str:
    return f" x {len(members)}" if len(members) > 1 else ""


def _caller(entry: AttentionEntry | Missed | OtherEntry) -> list[str]:
    return [f"called at {entry.caller}   {entry.code}".rstrip()] if entry.caller else []


def _later(entries: Sequence[LaterEntry]) -> Iterator[str]:
    """The names of results that wait, and what a look at them costs; those of equal costs together."""
    for cost, equal in gathered(entries, lambda entry: entry.cost):
        names = [name for entry in equal for name in entry.names]
        yield ", ".join(names) if len(names) <= _NAMES else from_to(names)
        yield f"  {cost}{' each' if len(equal) > 1 else ''}, in a call like the first"
    yield "a look computes the scores once more: if you always look, twice in every call"


def _shown(line: str) -> str:
    """A line of a score program, with a word for the number that a dtype's `finfo.min` is."""
    remark = "; ".join(remarks(line))
    return f"{line}   ({remark})" if remark else line


_MOST, _LEAST_SHARE = 12, 0.005
"""Most groups of operations that are told of, and the least share of one."""


@dataclasses.dataclass(frozen=True)
class OpTime:
    """What one operation took: the median of `seconds` over rounds. `kernel` computes it, if it is an
    attention; `name` is its module and `source` the user's line."""

    op: str
    name: str
    source: str
    seconds: float
    kernel: str = ""


@dataclasses.dataclass(frozen=True)
class Shared:
    """Operations that are alike: of one kind, on one line, in equal layers."""

    op: str
    name: str
    source: str
    count: int
    seconds: float

    @property
    def what(self) -> str:
        return f"{self.op} x {self.count}" if self.count > 1 else self.op


@dataclasses.dataclass(frozen=True)
class Times:
    """What the operations of one call took. Each was run by itself, so that the sum is more than a call takes
    where operations run side by side or are compiled together."""

    ops: tuple[OpTime, ...]
    rounds: int

    @property
    def seconds(self) -> float:
        return sum(op.seconds for op in self.ops)

    def alike(self) -> list[Shared]:
        """Operations in groups, those that took longest first."""
        found: Iterable[tuple[tuple[str, str, str], list[OpTime]]]
        found = gathered(self.ops, lambda op: (op.kernel or op.op, like(op.name), op.source))
        groups = (Shared(*what, len(ops), sum(op.seconds for op in ops)) for what, ops in found)
        return sorted(groups, key=lambda group: -group.seconds)

    def longest(self) -> list[Shared]:
        """The groups that are worth a line, and all others as one."""
        groups = self.alike()
        kept = [g for g in groups[:_MOST] if g.seconds >= _LEAST_SHARE * self.seconds]
        rest = groups[len(kept) :]
        if not rest:
            return kept
        count = sum(g.count for g in rest)
        return [*kept, Shared("others", "", "", count, sum(g.seconds for g in rest))]

    def of(self, entries: Iterable[AttentionEntry]) -> float | None:
        """What these attentions took together; None if they were not run."""
        wanted = {(entry.name, entry.source) for entry in entries}
        found = [op.seconds for op in self.ops if op.kernel and (op.name, op.source) in wanted]
        return sum(found) if found else None

    def __str__(self) -> str:
        whole, medians = self.seconds or 1.0, f"medians of {self.rounds} rounds"
        lines = [f"{len(self.ops)} operations, {milliseconds(whole)} in all ({medians})"]
        for group in self.longest():
            share, where = f"{100 * group.seconds / whole:4.0f} %", f"{group.source}   {group.name}"
            lines.append(f"  {milliseconds(group.seconds):>11}  {share}  {group.what:<24} {where}".rstrip())
        return "\n".join(lines)
