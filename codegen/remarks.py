"""What came up in running a program, for the report: a choice that failed, a part that is left to others."""

from __future__ import annotations

from attngraph.ir.language.score import ScoreProgram


class Remarks:
    """Remarks of one backend on programs, each once, kept for the process."""

    def __init__(self) -> None:
        self._said: dict[ScoreProgram, list[str]] = {}

    def add(self, program: ScoreProgram, what: str) -> bool:
        """Keep a remark; whether it is new."""
        known = self._said.setdefault(program, [])
        is_new = what not in known
        if is_new:
            known.append(what)
        return is_new

    def of(self, program: ScoreProgram) -> tuple[str, ...]:
        return tuple(self._said.get(program, ()))
