"""A graph as charts: one for each group of equal layers, with the ops of the first of them.

A chart's boxes are ops; consecutive views of one value share a box, weights are named in the box that reads
them, and a value from elsewhere has a box of its own. `layout.py` places the boxes, `drawing.py` draws them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from attngraph.report.page.layers import Line, shape_of, stretches

_VIEWS = {
    "reshape", "view", "transpose", "permute", "unsqueeze", "squeeze", "expand", "unflatten", "flatten",
    "narrow", "select", "slice", "contiguous", "clone", "t", "alias", "detach",
}  # fmt: skip
"""Ops that give the same values in another arrangement."""


@dataclasses.dataclass(frozen=True)
class Box:
    """Ops in one box, in order, or a value from elsewhere (no ops).

    `reads` are indices of boxes of the chart; `band` says which part of the layer it belongs to; `leaves`
    whether something outside the chart reads its value. `program` are the lines of the program in its op.
    """

    lines: tuple[Line, ...]
    name: str
    reads: tuple[int, ...] = ()
    band: str = ""
    leaves: bool = False
    program: tuple[str, ...] = ()

    @property
    def is_attention(self) -> bool:
        return any("attention" in line.op for line in self.lines)


@dataclasses.dataclass(frozen=True)
class Chart:
    """Layers of the same form.

    `layers` are their names ("" for what belongs to no layer), `lines` the first of them, `part` is the part
    of the graph: `graph`, or what is computed before it. `outside` are the values that other lines read.
    """

    part: str
    layers: tuple[str, ...]
    lines: tuple[Line, ...]
    outside: frozenset[str] = frozenset()

    @property
    def ops(self) -> int:
        return sum(1 for line in self.lines if line.value)

    @property
    def attentions(self) -> int:
        return sum(1 for line in self.lines if "attention" in line.op)

    def boxes(self) -> list[Box]:
        """The boxes, each after those it reads."""
        return _boxes(self)


def charts(lines: Sequence[Line]) -> list[Chart]:
    """Charts of a graph's text, in order of appearance."""
    found: dict[tuple[str, str], Chart] = {}
    for part, body in _parts(lines):
        for cut in stretches(line.layer for line in body):
            inside = body[cut.start : cut.stop]
            if not any(line.value for line in inside):
                continue
            form = part, shape_of([f"{line.code} # {line.note}" for line in inside], cut.layer)
            known = found.get(form)
            if known is not None:
                found[form] = dataclasses.replace(known, layers=(*known.layers, cut.layer))
                continue
            others = (*body[: cut.start], *body[cut.stop :])
            outside = frozenset(name.partition(".")[0] for line in others for name in line.references)
            found[form] = Chart(part, (cut.layer,), tuple(inside), outside)
    return list(found.values())


def _parts(lines: Sequence[Line]) -> Iterator[tuple[str, list[Line]]]:
    """The name and the body of each part: `weights`, `prompt`, `graph`."""
    name, body, is_body = "", list[Line](), False
    for line in lines:
        if line.code.endswith("(") and not line.code.startswith(" "):
            name = line.code[:-1]
        elif line.code == ") {":
            body, is_body = [], True
        elif line.code == "}" and is_body:
            yield name, body
            is_body = False
        elif is_body and (line.value or line.is_program or line.code.startswith("  return ")):
            body.append(line)


def _boxes(chart: Chart) -> list[Box]:
    values = [line for line in chart.lines if line.value]
    readers: dict[str, int] = {}
    for line in values:
        for name in {_whole(n) for n in line.references}:
            readers[name] = readers.get(name, 0) + 1
    programs: dict[str, tuple[str, ...]] = {}
    of = ""
    for line in chart.lines:
        of = of if line.is_program else line.value
        programs[of] = (*programs.get(of, ()), line.code.strip()) if line.is_program else ()
    boxes: list[Box] = []
    place: dict[str, int] = {}
    for line in values:
        names = list(dict.fromkeys(_whole(n) for n in line.references if n[0] == "%"))
        band = _band(line)
        for name in names:
            if name not in place:
                place[name] = len(boxes)
                boxes.append(Box((), name, band=band))
        before = place[names[0]] if len(names) == 1 else -1
        last = boxes[before] if before >= 0 else None
        if (
            last is not None and last.lines and line.op in _VIEWS and last.lines[-1].op in _VIEWS
            and readers[names[0]] == 1 and not last.leaves and last.band == band
        ):  # fmt: skip
            boxes[before] = dataclasses.replace(
                last, lines=(*last.lines, line), name=line.value, leaves=line.value in chart.outside
            )
            place[line.value] = before
            continue
        reads = tuple(place[name] for name in names)
        place[line.value] = len(boxes)  # set after `reads`: in a malformed text a value may read itself
        leaves = line.value in chart.outside
        boxes.append(Box((line,), line.value, reads, band, leaves, programs[line.value]))
    return boxes


def _whole(name: str) -> str:
    """`%3` for `%3.1`; other names unchanged."""
    return name.partition(".")[0] if name[0] == "%" else name


def _band(line: Line) -> str:
    """The part of its layer that a line belongs to: `attn` of `h.0.attn.c_attn`, `layer.1` of
    `block.0.layer.1.wi`; "" for the layer itself."""
    if not line.layer:
        return line.module
    first, *more = line.module[len(line.layer) + 1 :].split(".")
    return f"{first}.{more[0]}" if more and more[0].isdigit() else first
