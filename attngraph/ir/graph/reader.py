"""Reads a program graph from the text that `ir/graph/printer.py` wrote.

This file goes through the lines; `ir/graph/body.py` builds the graph. The type of every value is inferred
again and compared with the written one, so inconsistent edits by hand are detected. Only ops of a closed list
(`ir/operations.py`) are executed, on fake tensors. Buffer contents are not part of the text (`dump.py` stores
them separately).

A saved graph is read with the types as they are written: nothing is executed. So graphs over a cache are
read, whose types are those of whole sequences. Nothing relies on a type that is written: operations, and the
kernels of this package, look at the tensors that they are given.

A text may be anybody's. Whatever is wrong with it is a TextError, and how long it takes, and how much memory,
follows from its length alone.
"""

import itertools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from attngraph.errors import TextError
from attngraph.ir.graph.body import Body, Places, symbols_of
from attngraph.ir.graph.literals import split
from attngraph.ir.graph.printer import VERSION
from attngraph.ir.graph.program_graph import BEFORE, Level, ProgramGraph, Rate, as_module

MOST_LETTERS, MOST_MEASURED = 1 << 17, 10_000
"""In a line, and sizes without an example in a text: far more than any model has."""
_OF_DECODERS = re.compile(rf"  (pages|rows) \$|{Rate.PROMPT.value}\(")
"""Lines that only graphs of decoders have."""


def read_graph(
    text: str, file: str = "the text", places: Mapping[str, Places] | None = None,
    libraries: Collection[str] = (),
) -> ProgramGraph:  # fmt: skip
    """The graph that a dump's file holds. `file`: its name in error messages. `places`, given for a text
    whose types are taken as written: for each part (`graph`, or the name of a stage) where its sizes are
    taken from. `libraries`: whose operations the text may name, besides PyTorch's and attngraph's. A
    TextError names the line that is malformed or missing."""
    return _Reader(text, file, places, libraries).graph()


class _Reader:
    def __init__(
        self, text: str, file: str, places: Mapping[str, Places] | None, libraries: Collection[str]
    ) -> None:
        self.file, self.places, self.libraries = file, places, libraries
        self.lines = text.splitlines()
        self.number = 0
        self.sizes, self.conditions = dict[str, int](), list[str]()

    def graph(self) -> ProgramGraph:
        self._read_head()
        measured = (
            {int(n) for n in re.findall(r"\bu(\d+)\b", "\n".join(self.lines))} if self.places else set()
        )
        if max(measured, default=0) >= MOST_MEASURED:
            raise self._error(f"it names the size u{max(measured)}; there are at most {MOST_MEASURED}")
        self.mode, self.symbols = self._told(symbols_of, self.sizes, max(measured, default=-1) + 1)
        keeps = (number for number, line in enumerate(self.lines) if _OF_DECODERS.match(line))
        if self.places is None and (line := next(keeps, None)) is not None:
            self.number = line
            raise self._error(
                "graphs of a decoder cannot be read back: what they keep is not in the text. The graph "
                "before insert-kv-cache can be, and that pass run on it"
            )
        stages = {rate: self._part(rate.value) for rate in BEFORE if self._peek() == f"{rate.value}("}
        graph = self._part("graph")
        if self.number < len(self.lines) and self._peek() == f"{Rate.LOOK.value}(":
            stages[Rate.LOOK] = self._part(Rate.LOOK.value)
        graph.stages = stages
        return graph

    def _error(self, problem: object) -> TextError:
        return TextError(f"{self.file}, line {self.number + 1}: {problem}.")

    def _told(self, read: Callable[..., Any], *args: Any) -> Any:
        """Parse a line with `read`. What it raises becomes a TextError with the line's number: an operation
        that is asked for a type refuses operands in words of its own."""
        try:
            return read(*args)
        except ValueError as problem:
            raise self._error(problem) from problem
        except Exception as problem:
            raise self._error(f"it cannot be read: {type(problem).__name__}: {problem}") from problem

    def _peek(self) -> str:
        if self.number >= len(self.lines):
            raise self._error("the file ends here, it is cut off")
        line = self.lines[self.number]
        if len(line) > MOST_LETTERS:
            raise self._error(f"it has {len(line)} letters; a line has at most {MOST_LETTERS}")
        return line

    def _read_head(self) -> None:
        while self._peek().startswith("#") or not self._peek().strip():
            self.number += 1
        found = re.fullmatch(r"dump (\d+), level (\w+)(, gradients)?", self._peek())
        if found is None or int(found[1]) != VERSION or found[2].upper() not in Level.__members__:
            raise self._error(
                f"this is no dump of version {VERSION}, which begins with `dump {VERSION}, level ...`; "
                f"found {self._peek()[:60]!r}. Write it again with this version of attngraph"
            )
        self.level, self.gradients = Level[found[2].upper()], bool(found[3])
        self.number += 1
        while not self._peek().endswith("("):
            kind, _, rest = self._peek().partition(" ")
            if kind == "sizes":
                for part in split(rest):
                    name, _, value = part.partition(" = ")
                    if not name.isidentifier() or name in self.sizes:
                        raise self._error(f"{name!r} is no name of a size, or stands twice")
                    self.sizes[name] = self._told(int, value)
            elif kind == "where":
                self.conditions.append(rest)
            else:
                raise self._error(f"expected sizes, where or graph(, found {self._peek()[:60]!r}")
            self.number += 1

    def _part(self, title: str) -> ProgramGraph:
        if self._peek() != f"{title}(":
            raise self._error(f"expected {title}(, found {self._peek()[:60]!r}")
        self.number += 1
        places = None if self.places is None else self.places.get(title, {})
        body = Body(self.mode, self.symbols, places, self.libraries)
        while self._peek() != ") {":
            self._told(body.input, self._peek())
            self.number += 1
        self.number += 1
        while self._peek() != "}":
            below = itertools.islice(self.lines, self.number + 1, None)
            inside = itertools.takewhile(lambda line: line.startswith(" " * 10), below)
            program = [line.strip() for line in inside]
            self._told(body.statement, self._peek(), "\n".join(program))
            self.number += 1 + len(program)
        if not body.ended:
            raise self._error("the graph has no `return`, it is cut off")
        self.number += 1
        conditions = [self._told(body.formulas.value, c) for c in self.conditions]
        return ProgramGraph(
            as_module(body.graph), self.level, tuple(body.inputs), tuple(body.outputs), {}, {},
            self.gradients,
            tuple(c.node._expr for c in conditions if isinstance(c, torch.SymBool)),
            {str(self.symbols[name].node.expr): hint for name, hint in self.sizes.items()},
        )  # fmt: skip
