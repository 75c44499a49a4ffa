"""How numbers, names and groups of equal things are told, and a part of an account (`account.py`)."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Part:
    """One thing that is told: what it is about (with the space behind it), its head, and facts below."""

    about: str
    head: str
    facts: Sequence[str] = ()

    def lines(self) -> list[str]:
        """As text."""
        return ["", f"  {self.about}{self.head}", *(f"      {fact}" for fact in self.facts)]


def scaled(number: float, step: float, units: Sequence[str]) -> tuple[float, str]:
    """The number in the largest of these units of which there is at least one; each is `step` of the one
    before it."""
    place = 0
    while number >= step and place < len(units) - 1:
        number, place = number / step, place + 1
    return number, units[place]


def binary(count: float) -> str:
    """A number of bytes in powers of 1024, as memory is counted."""
    number, unit = scaled(count, 1024, ("bytes", "KiB", "MiB", "GiB", "TiB"))
    return f"{number:,.0f} {unit}" if unit == "bytes" else f"{number:,.1f} {unit}"


def short_binary(count: float) -> str:
    """The same in three digits."""
    number, unit = scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:,.0f} {unit}"


def size(count: float) -> str:
    """A number of bytes in powers of 1000, as devices are sold."""
    number, unit = scaled(count, 1000, ("B", "kB", "MB", "GB", "TB"))
    return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.3g} {unit}"


def operations(count: float) -> str:
    """A number of operations, to which `FLOP` can be added: `3.2 G`."""
    number, unit = scaled(count, 1000, ("", "k", "M", "G", "T"))
    return f"{number:.3g} {unit}"


def seconds(count: float) -> str:
    """A time in three digits."""
    number, unit = scaled(count * 1e9, 1000, ("ns", "us", "ms", "s"))
    return f"{number:.3g} {unit}"


def milliseconds(count: float) -> str:
    return f"{count * 1000:,.2f} ms"


def from_to(names: Sequence[str]) -> str:
    """`h.0`, or `h.0 .. h.11`."""
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def gathered(things: Iterable[T], what: Callable[[T], Any]) -> Iterable[tuple[Any, list[T]]]:
    """Things that are equal in something, which comes with them, in the order of the first of each."""
    found: dict[Any, list[T]] = {}
    for thing in things:
        found.setdefault(what(thing), []).append(thing)
    return found.items()


def alike(things: Iterable[T], what: Callable[[T], Any]) -> Iterator[tuple[Any, list[T]]]:
    """Things that follow each other and are equal in something, which comes with them."""
    for key, group in itertools.groupby(things, what):
        yield key, list(group)
