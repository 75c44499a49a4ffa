"""What `attngraph.verify` found: differences, and the verdict as text, as data and as one HTML page.

The page has no script, and a policy that allows none; all that comes from a model is written as text.
"""

import dataclasses
from typing import Any

from attngraph.report.entries import AttentionEntry
from attngraph.report.page import html as H
from attngraph.report.page.code import render_excerpt
from attngraph.report.page.html import Html, tag
from attngraph.report.user_code import UserCode

CODES = (
    "weights-unmatched", "reference-refuses", "candidate-refuses", "candidate-ended", "candidate-late",
    "number-of-results", "shape", "not-finite", "values", "gradients", "heads", "hides", "weighs",
    "cache-rounds", "rounds-narrower", "setting",
)  # fmt: skip
"""Every code of a difference, which programs that read verdicts may rely on. docs/SKILL.md has what each
means."""
UNKNOWN = "cannot be compared"
STATUSES = ("equal", "differs", UNKNOWN)
"""Every status of a verdict; the number of each is the exit code of `attngraph verify`."""
Pair = tuple[AttentionEntry, AttentionEntry]
_SIDES = ("", "Reference", "Candidate")


@dataclasses.dataclass(frozen=True)
class Difference:
    """One difference: its `kind` ("weights", "call", "results", "values", "program", "setting"), its `code`
    (`CODES`) and `about`, a sentence; for a program both lines of the user's code, both programs and from how
    many `tokens` on; for values the module in which it enters, where modules of both sides have the same
    names, and the lines of both at which values part; for a setting the lines that made it. `given`: the
    argument of that module that has other values already. `smallest`: the dtypes and shapes of the smallest
    call found at which the two differ."""

    kind: str
    about: str
    reference: str = ""
    candidate: str = ""
    program: str = ""
    other: str = ""
    enters: str = ""
    code: str = ""
    given: str = ""
    tokens: int = 0
    smallest: tuple[str, ...] = ()

    def where(self) -> list[str]:
        """What is known of where it enters, and how small a call shows it."""
        found = []
        if self.enters:
            how = "what it is given is equal, what it returns is not"
            how = f"it is given other values as argument {self.given}" if self.given else how
            found.append(f"enters in {self.enters}: {how}")
        if self.smallest:
            found.append(f"the smallest call found at which they differ: {', '.join(self.smallest)}")
        if self.candidate and not self.other:
            at = f"{self.candidate} of the candidate, {self.reference or 'no line'} of the reference"
            found.append(f"values part at {at}")
        return found

    def __str__(self) -> str:
        lines = [self.about, *(f"  {said}" for said in self.where())]
        for name, source, program in (
            ("reference", self.reference, self.program), ("candidate", self.candidate, self.other),
        ):  # fmt: skip
            if program:
                lines += [f"  {name}  {source}", *(f"    | {line}" for line in program.splitlines())]
        return "\n".join(lines)


class Incomparable(Exception):
    """Two sides cannot be compared: a difference says why."""


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
    attentions: tuple[Pair, ...] = ()
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

    def html(self, title: str = "") -> str:
        """The verdict as one page, which runs nothing and reaches nothing. `title`: what was compared."""
        compared, heading = self._compared(), f"attngraph verify: {title}" if title else "attngraph verify"
        status = tag("strong", self.status, class_="good" if self else "notice")
        sides = (
            [H.joined([tag("code", e.source), H.listing("program", e.program)]) for e in pair]
            for pair in self.attentions
        )
        rows = [(f"{number}", *cells) for number, cells in enumerate(sides, start=1)]
        pairs = [H.table(_SIDES, rows, "sides")] if rows else []
        sections = (
            ("differences", "Differences", [_difference(d, self.code) for d in self.differences]),
            ("attentions", f"Attentions in pairs ({len(self.attentions)})", pairs),
            ("compared", "What was compared", [H.items(compared)] if compared else []),
        )
        header = tag("header", tag("h1", heading), tag("p", status, class_="summary"))
        main = tag("main", *(H.section(*found) for found in sections if found[2]))
        return H.document(heading, [header, main])


def _difference(found: Difference, code: UserCode) -> Html:
    rows: list[tuple[str, ...]] = []
    lines = found.reference, found.candidate
    if any(lines):
        cells = (H.joined([tag("code", at), render_excerpt(code.how(at, ""), code)]) for at in lines)
        rows.append(("Line", *cells))
    if found.program:
        rows.append(("Program", *(H.listing("program", text) for text in (found.program, found.other))))
    return H.joined([
        tag("p", tag("strong", found.code), f": {found.about}"),
        H.items(found.where()) if found.where() else "",
        H.table(_SIDES, rows, "sides") if rows else "",
    ])  # fmt: skip
