"""The text of a graph as lines with their op, their operands and their layer.

A line belongs to a module (`  [h.0.attn]` comes before the values of a module); the module's layer is its
name up to the first number in it. Stretches of a text are equal layers if they are the same text after their
value numbers, names and layer numbers have been renumbered from the start. Only text is handled here: a line
that is not part of a graph is kept unchanged.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from attngraph.ir.graph.literals import read_name
from attngraph.report.words import alike

REFERENCE = re.compile(r"""%\w+(?:\.\d+)*|\$(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\w.\-]+)""")
"""A value or an input, as the text names it."""
_VALUE = re.compile(r"  (%\d+) = ([\w.]+)\((.*)")
_MODULE = re.compile(r"  \[(.*)\]")
_NUMBERED = re.compile(r"%\d+")
_MADE_UP = re.compile(r"\b[su]\d+\b")
_NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Line:
    """One line. `code` is what is computed, `note` the comment after `#`: the user's line, say. `value` and
    `op` are empty if the line defines nothing, `module` if it belongs to no module."""

    code: str
    note: str = ""
    value: str = ""
    op: str = ""
    module: str = ""

    @functools.cached_property
    def key(self) -> str:
        """What is computed, without the numbers of values."""
        return _NUMBERED.sub("%", self.code)

    @functools.cached_property
    def references(self) -> list[str]:
        """The names that the line reads, in order, with parts of a value as `%3.1`."""
        return REFERENCE.findall(self.code.split(" = ", 1)[1]) if self.value else REFERENCE.findall(self.code)

    @property
    def layer(self) -> str:
        return layer_of(self.module)

    @property
    def is_program(self) -> bool:
        """Whether it is a line of a score program, under its attention."""
        return not self.value and self.code.startswith("          ")


def read_lines(text: str) -> list[Line]:
    """The lines of a graph's text."""
    found, module = [], ""
    for raw in text.split("\n"):
        code, mark, note = raw.partition("  # ")
        code = code.rstrip()
        value = _VALUE.match(code)
        named = _MODULE.fullmatch(code)
        if named:
            module = _unquoted(named[1])
        elif not value and not code.startswith("          "):
            module = ""
        op = value[2] if value else ""
        found.append(Line(code, note if mark else "", value[1] if value else "", op, module))
    return found


def _unquoted(name: str) -> str:
    try:
        return read_name(name, "")
    except (ValueError, SyntaxError):
        return name


@functools.cache
def layer_of(module: str) -> str:
    """`h.0` for `h.0.attn.c_proj`; "" if no part of the name is a number."""
    parts = module.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ""


def shape_of(lines: Sequence[str], layer: str) -> str:
    """The lines with all that differs between equal layers renumbered: the same text for equal layers.

    Values, names with numbers in them and symbolic sizes are numbered in order of appearance.
    """
    text = "\n".join(lines)
    for name in {layer, repr(layer)[1:-1]} - {""}:
        text = re.sub(rf"{re.escape(name)}(?!\w)", "#", text)
    text = REFERENCE.sub(_counting("%", lambda name: _NUMBER.sub("#", name) if name[0] == "$" else "%"), text)
    return _MADE_UP.sub(_counting("s", lambda name: name[0]), text)


def _counting(mark: str, form: Callable[[str], str]) -> Callable[[re.Match[str]], str]:
    known: dict[str, str] = {}

    def count(found: re.Match[str]) -> str:
        return known.setdefault(found[0], f"{form(found[0])}{mark}{len(known)}")

    return count


def stretches(layers: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    """Each layer (or none) and where its lines begin and end, given the layer of every line."""
    stop = 0
    for layer, lines in alike(layers, str):
        start, stop = stop, stop + len(lines)
        yield layer, start, stop
