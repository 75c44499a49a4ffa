"""What `attngraph.verify` found, as text and as data."""

import dataclasses
from typing import Any

from attngraph.report.entries import AttentionEntry

STATUSES = ("equal", "differs", "cannot be compared")
"""Every status of a verdict; the number of each is the exit code of `attngraph verify`."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """One difference: its `kind` ("weights", "call", "results", "values", "program") and `about`, a sentence;
    for a program both lines of the user's code and both programs; for values the module in which it enters,
    where modules of both sides have the same names, and the lines of both at which values part."""

    kind: str
    about: str
    reference: str = ""
    candidate: str = ""
    program: str = ""
    other: str = ""
    enters: str = ""

    def __str__(self) -> str:
        lines = [self.about]
        if self.enters:
            lines.append(f"  enters in {self.enters}: what it is given is equal, what it returns is not")
        if self.candidate and not self.other:
            at = f"{self.candidate} of the candidate, {self.reference or 'no line'} of the reference"
            lines.append(f"  values part at {at}")
        for name, source, program in (
            ("reference", self.reference, self.program), ("candidate", self.candidate, self.other),
        ):  # fmt: skip
            if program:
                lines += [f"  {name}  {source}", *(f"    | {line}" for line in program.splitlines())]
        return "\n".join(lines)


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
    """

    status: str
    differences: tuple[Difference, ...] = ()
    attentions: tuple[tuple[AttentionEntry, AttentionEntry], ...] = ()
    notes: tuple[str, ...] = ()
    tried: int = 0
    worst: float = 0.0
    seed: int = 0

    def __bool__(self) -> bool:
        return self.status == "equal"

    def __str__(self) -> str:
        lines = [f"{self.status}: {self.differences[0]}" if self.differences else self.status]
        lines += [str(difference) for difference in self.differences[1:]]
        if self.attentions:
            lines.append(f"attentions of both sides in pairs: {len(self.attentions)}")
        lines += self.notes
        if self.tried:
            lines.append(f"the largest error is {self.worst:.2g} of the allowed one")
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
        """The verdict as data. The fields stay: later versions may add some."""
        return {
            "status": self.status, "differences": [dataclasses.asdict(d) for d in self.differences],
            "attentions": [[a.program, b.program] for a, b in self.attentions], "notes": list(self.notes),
            "tried": self.tried, "worst": self.worst, "seed": self.seed,
        }  # fmt: skip
