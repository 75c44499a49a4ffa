"""Reads a program graph from the text that `ir/graph/printer.py` wrote.

This file goes through the lines; `ir/graph/body.py` builds the graph. The type of every value is inferred
again and compared with the written one, so inconsistent edits by hand are detected. Only the ops that a text
names are executed, on fake tensors. Buffer contents are not part of the text (`dump.py` stores them
separately).

A text that is known to be what was printed (`attngraph/saved/` keeps its digest) may be read with the types
as they are written: nothing is executed. So graphs over a cache are read, whose types are those of whole
sequences.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from attngraph.errors import TextError
from attngraph.ir.graph.body import Body, Places, symbols_of
from attngraph.ir.graph.literals import split
from attngraph.ir.graph.printer import VERSION
from attngraph.ir.graph.program_graph import BEFORE, Level, ProgramGraph, Rate, as_module


def read_graph(text: str, file: str = "the text", places: Mapping[str, Places] | None = None) -> ProgramGraph:
    """The graph that a dump's file holds.

    Args:
        file: the name of the file in error messages.
        places: given for a text that is known to be unchanged, whose types are taken as written: for each
            part (`graph`, or the name of a stage) where its sizes are taken from.

    Raises:
        TextError: the file has another format version, is truncated, or has a malformed line; names the line.
    """
    return _Reader(text, file, places).graph()


@dataclasses.dataclass
class _Head:
    level: Level = Level.CAPTURED
    gradients: bool = False
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    conditions: list[str] = dataclasses.field(default_factory=list)


class _Reader:
    def __init__(self, text: str, file: str, places: Mapping[str, Places] | None = None) -> None:
        self.file, self.places = file, places
        self.lines = text.splitlines()
        self.number = 0
        self.head = _Head()

    def graph(self) -> ProgramGraph:
        self._read_head()
        measured = (
            {int(n) for n in re.findall(r"\bu(\d+)\b", "\n".join(self.lines))} if self.places else set()
        )
        self.mode, self.symbols = symbols_of(self.head.sizes, max(measured, default=-1) + 1)
        stages = {rate: self._part(rate.value) for rate in BEFORE if self._peek() == f"{rate.value}("}
        if Rate.PROMPT in stages and self.places is None:
            raise self._error("graphs of a decoder cannot be read back: what they keep is not in the text")
        graph = self._part("graph")
        if self.number < len(self.lines) and self._peek() == f"{Rate.LOOK.value}(":
            stages[Rate.LOOK] = self._part(Rate.LOOK.value)
        graph.stages = stages
        return graph

    def _error(self, problem: object) -> TextError:
        return TextError(f"{self.file}, line {self.number + 1}: {problem}.")

    def _told(self, read: Callable[..., Any], *args: Any) -> Any:
        """Parse a line with `read`; a ValueError becomes a TextError with the line's number."""
        try:
            return read(*args)
        except (ValueError, SyntaxError) as problem:
            raise self._error(problem) from problem

    def _peek(self) -> str:
        if self.number >= len(self.lines):
            raise self._error("the file ends here, it is cut off")
        return self.lines[self.number]

    def _read_head(self) -> None:
        while self._peek().startswith("#") or not self._peek().strip():
            self.number += 1
        found = re.fullmatch(r"dump (\d+), level (\w+)(, gradients)?", self._peek())
        if found is None or int(found[1]) != VERSION or found[2].upper() not in Level.__members__:
            raise self._error(
                f"this is no dump of version {VERSION}, which begins with `dump {VERSION}, level ...`; "
                f"found {self._peek()[:60]!r}. Write it again with this version of attngraph"
            )
        self.head = _Head(Level[found[2].upper()], bool(found[3]))
        self.number += 1
        while not self._peek().endswith("("):
            kind, _, rest = self._peek().partition(" ")
            if kind == "sizes":
                for part in split(rest):
                    name, _, value = part.partition(" = ")
                    self.head.sizes[name] = self._told(int, value)
            elif kind == "where":
                self.head.conditions.append(rest)
            else:
                raise self._error(f"expected sizes, where or graph(, found {self._peek()[:60]!r}")
            self.number += 1

    def _part(self, title: str) -> ProgramGraph:
        if self._peek() != f"{title}(":
            raise self._error(f"expected {title}(, found {self._peek()[:60]!r}")
        self.number += 1
        body = Body(self.mode, self.symbols, None if self.places is None else self.places.get(title, {}))
        while self._peek() != ") {":
            self._told(body.input, self._peek())
            self.number += 1
        self.number += 1
        while self._peek() != "}":
            program = self._program()
            self._told(body.statement, self._peek(), "\n".join(program))
            self.number += 1 + len(program)
        if not body.ended:
            raise self._error("the graph has no `return`, it is cut off")
        self.number += 1
        conditions = [self._told(body.formulas.value, c) for c in self.head.conditions]
        return ProgramGraph(
            as_module(body.graph), self.head.level, tuple(body.inputs), tuple(body.outputs), {}, {},
            self.head.gradients,
            tuple(c.node._expr for c in conditions if isinstance(c, torch.SymBool)),
            {str(self.symbols[name].node.expr): hint for name, hint in self.head.sizes.items()},
        )  # fmt: skip

    def _program(self) -> list[str]:
        """The lines of a score program, which follow the line of their attention."""
        found = []
        for line in self.lines[self.number + 1 :]:
            if not line.startswith(" " * 10):
                break
            found.append(line.strip())
        return found
