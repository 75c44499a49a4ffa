"""Where the time of a call goes: what each operation of a graph took. Text and numbers, as in the report."""

import dataclasses
from collections.abc import Iterable

from attngraph.report.entries import AttentionEntry
from attngraph.report.user_code import like
from attngraph.report.words import milliseconds

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
        found: dict[tuple[str, str, str], list[OpTime]] = {}
        for op in self.ops:
            found.setdefault((op.kernel or op.op, like(op.name), op.source), []).append(op)
        groups = [Shared(*key, len(ops), sum(o.seconds for o in ops)) for key, ops in found.items()]
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
