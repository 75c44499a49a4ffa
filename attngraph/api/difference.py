"""One difference between two sides: what kind it is, where it is seen and where it enters."""

import dataclasses

CODES = (
    "weights-unmatched", "reference-refuses", "candidate-refuses", "candidate-ended", "candidate-late",
    "number-of-results", "shape", "not-finite", "values", "gradients", "heads", "hides", "weighs",
    "cache-rounds", "rounds-narrower", "setting",
)  # fmt: skip
"""Every code of a difference, which programs that read verdicts may rely on. docs/SKILL.md has what each
means."""


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
