"""What backends say of programs: remarks for the report on how they ran, and that one cannot be emitted."""

from collections.abc import Hashable

from attngraph.ir.language.derivative import UnsupportedError

__all__ = ["Remarks", "UnsupportedError"]


class Remarks:
    """One backend's remarks on programs, each stored once, for the lifetime of the process."""

    def __init__(self) -> None:
        self._said: dict[Hashable, list[str]] = {}

    def add(self, program: Hashable, what: str) -> bool:
        """Store a remark, and return whether it is new."""
        known = self._said.setdefault(program, [])
        is_new = what not in known
        if is_new:
            known.append(what)
        return is_new

    def of(self, program: Hashable) -> tuple[str, ...]:
        return tuple(self._said.get(program, ()))
