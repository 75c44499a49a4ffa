"""What `attngraph.verify` found, as text and as data."""

import dataclasses
from typing import Any

from attngraph.api.difference import Difference
from attngraph.api.verdict_page import render
from attngraph.report.entries import AttentionEntry
from attngraph.report.user_code import UserCode

UNKNOWN = "cannot be compared"
STATUSES = ("equal", "differs", UNKNOWN)
"""Every status of a verdict; the number of each is the exit code of `attngraph verify`."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """True where everything that was compared is equal.

    Attributes:
        status: one of `STATUSES`.
        differences: what differs, or why nothing can be compared.
        attentions: the attentions of both sides, in pairs.
        notes: what was compared, and how.
        tried: how many calls were compared. worst: the largest error, in units of the allowed one.
        seed: with which `attngraph.verify` repeats the run.
        inputs: the smallest call found at which the two differ, as `attngraph.verify` takes it.
        code: the functions around the lines that differences name.
    """

    status: str
    differences: tuple[Difference, ...] = ()
    attentions: tuple[tuple[AttentionEntry, AttentionEntry], ...] = ()
    notes: tuple[str, ...] = ()
    tried: int = 0
    worst: float = 0.0
    seed: int = 0
    inputs: Any = None
    code: UserCode = dataclasses.field(default_factory=UserCode)

    def __bool__(self) -> bool:
        return self.status == "equal"

    def __str__(self) -> str:
        lines = [f"{self.status}: {self.differences[0]}" if self.differences else self.status]
        lines += [str(difference) for difference in self.differences[1:]]
        if self.attentions:
            lines.append(f"attentions of both sides in pairs: {len(self.attentions)}")
        return "\n".join([*lines, *self._compared()])

    def html(self, title: str = "") -> str:
        """The verdict as one page, which runs nothing and reaches nothing. `title`: what was compared."""
        return render(self.status, self.differences, self.attentions, self._compared(), self.code, title)

    def _compared(self) -> list[str]:
        said = f"the largest error is {self.worst:.2g} of the allowed one"
        return [*self.notes, *[said] * bool(self.tried)]

    def json(self) -> dict[str, Any]:
        """The verdict as data. The fields stay: later versions may add some."""
        return {
            "status": self.status, "differences": [dataclasses.asdict(d) for d in self.differences],
            "attentions": [[a.program, b.program] for a, b in self.attentions], "notes": list(self.notes),
            "tried": self.tried, "worst": self.worst, "seed": self.seed,
        }  # fmt: skip
