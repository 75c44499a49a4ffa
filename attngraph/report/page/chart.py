"""A graph as charts: one for each group of equal layers, with the ops of the first of them, and their layout.

A chart's boxes are ops; consecutive views of one value share a box, weights are named in the box that reads
them, and a value from elsewhere has a box of its own. Boxes stand in rows from the top down, after Sugiyama,
Tagawa and Toda (1981): each is below all boxes that it reads; parts of a layer are below each other; boxes
of a row are ordered so that few lines cross, and moved to where their lines are straight. A value that passes
rows has one place in each, however many boxes read it. `graphs.py` draws them.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import networkx as nx

from attngraph.report.page.layers import Line, shape_of, stretches
from attngraph.report.words import gathered

_VIEWS = {
    "reshape", "view", "transpose", "permute", "unsqueeze", "squeeze", "expand", "unflatten", "flatten",
    "narrow", "select", "slice", "contiguous", "clone", "t", "alias", "detach",
}  # fmt: skip
"""Ops that give the same values in another arrangement."""
Key = int | tuple[int, int]
"""A box by its index, or (box, row) for its value where it passes a row."""
_SWEEPS = 12
_BETWEEN = 18.0
"""Free space between boxes of a row."""
_ALONG = 10.0
"""The width that a passing line takes."""


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
        values = [line for line in self.lines if line.value]
        readers = collections.Counter(name for line in values for name in {*map(_whole, line.references)})
        programs: dict[str, tuple[str, ...]] = {}
        of = ""
        for line in self.lines:
            of = of if line.is_program else line.value
            programs[of] = (*programs.get(of, ()), line.code.strip()) if line.is_program else ()
        boxes: list[Box] = []
        place: dict[str, int] = {}
        for line in values:
            names = list(dict.fromkeys(_whole(n) for n in line.references if n[0] == "%"))
            band, leaves = _band(line), line.value in self.outside
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
                lines = (*last.lines, line)
                boxes[before] = dataclasses.replace(last, lines=lines, name=line.value, leaves=leaves)
                place[line.value] = before
                continue
            reads = tuple(place[name] for name in names)
            place[line.value] = len(boxes)  # set after `reads`: in a malformed text a value may read itself
            boxes.append(Box((line,), line.value, reads, band, leaves, programs[line.value]))
        return boxes


def charts(lines: Sequence[Line]) -> list[Chart]:
    """Charts of a graph's text, in order of appearance."""
    found: dict[tuple[str, str], Chart] = {}
    for part, body in _parts(lines):
        for layer, start, stop in stretches(line.layer for line in body):
            inside = body[start:stop]
            if not any(line.value for line in inside):
                continue
            form = part, shape_of([f"{line.code} # {line.note}" for line in inside], layer)
            known = found.get(form)
            if known is not None:
                found[form] = dataclasses.replace(known, layers=(*known.layers, layer))
                continue
            others = (*body[:start], *body[stop:])
            outside = frozenset(name.partition(".")[0] for line in others for name in line.references)
            found[form] = Chart(part, (layer,), tuple(inside), outside)
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


@dataclasses.dataclass(frozen=True)
class Placed:
    """The layout: the boxes of each row, the middle of each box or passing value, and the lines from one row
    to the next."""

    rows: list[list[int]]
    middle: dict[Key, float]
    lines: nx.DiGraph
    width: float


def place(boxes: Sequence[Box], widths: Sequence[float]) -> Placed:
    """Rows and places for boxes of these widths."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(boxes)))
    graph.add_edges_from((read, n) for n, box in enumerate(boxes) for read in box.reads)
    row = _rows(graph, boxes)
    whole = [boxes for _, boxes in sorted(gathered(range(len(boxes)), row.__getitem__))]
    rows: list[list[Key]] = [[*line] for line in whole]
    lines = nx.DiGraph()
    for a in graph.nodes:
        last = max((row[b] for b in graph.successors(a)), default=0)
        way: list[Key] = [a, *((a, r) for r in range(row[a] + 1, last))]
        for r, key in enumerate(way[1:], row[a] + 1):
            rows[r].append(key)
        nx.add_path(lines, way)
        lines.add_edges_from((way[row[b] - row[a] - 1], b) for b in graph.successors(a))
    size: dict[Key, float] = {key: _ALONG for line in rows for key in line}
    size.update(enumerate(widths))
    _order(rows, lines)
    middle = _middles(rows, lines, size)
    left = min((middle[key] - size[key] / 2 for key in size), default=0.0)
    middle = {key: at - left for key, at in middle.items()}
    return Placed(whole, middle, lines, max((middle[k] + size[k] / 2 for k in size), default=0.0))


def _rows(graph: nx.DiGraph, boxes: Sequence[Box]) -> dict[int, int]:
    """The row of each box: below what it reads, below the parts of the layer that came before."""
    row: dict[int, int] = {}
    least = deepest = 0
    last = None
    for n, box in enumerate(boxes):
        if box.lines and box.band != last:
            least, last = deepest + (last is not None), box.band
        row[n] = max([least, *(row[read] + 1 for read in box.reads)])
        deepest = max(deepest, row[n]) if box.lines else deepest
    for n in reversed(list(nx.topological_sort(graph))):
        users = [row[user] for user in graph.successors(n)]
        if users and graph.in_degree(n) == 0:
            row[n] = max(min(users) - 1, row[n] if boxes[n].lines else -1)
    first = min(row.values(), default=0)
    used = {r: place for place, r in enumerate(sorted({r - first for r in row.values()}))}
    return {n: used[r - first] for n, r in row.items()}


def _order(rows: list[list[Key]], lines: nx.DiGraph) -> None:
    """Order each row by the mean place of what its members are connected to, going down and up again."""
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        known = lines.pred if down else lines.succ
        places: dict[Key, float] = {}
        for line in rows if down else rows[::-1]:
            now = {key: n for n, key in enumerate(line)}
            joined = {key: [places[o] for o in known[key] if o in places] for key in line}
            wanted = {key: _mean(joined[key], now[key]) for key in line}
            line.sort(key=wanted.__getitem__)
            places.update({key: float(n) for n, key in enumerate(line)})


def _middles(rows: list[list[Key]], lines: nx.DiGraph, size: dict[Key, float]) -> dict[Key, float]:
    """Start tightly packed, move rows towards what they are connected to, and finally straighten runs."""
    middle: dict[Key, float] = {}
    for line in rows:
        at = -sum(size[key] + _BETWEEN for key in line) / 2
        for key in line:
            middle[key] = at + size[key] / 2
            at += size[key] + _BETWEEN
    for sweep in range(3 * _SWEEPS):
        near, ordered = (lines.pred, rows) if sweep % 2 == 0 else (lines.succ, rows[::-1])
        for line in ordered:
            wanted = [_mean([middle[o] for o in near[key]], middle[key]) for key in line]
            middle.update(zip(line, _apart(line, wanted, size), strict=True))
    runs = _runs(rows, lines)
    for _ in range(4 * _SWEEPS):
        for run in runs:
            ends = [middle[o] for key in run for o in nx.all_neighbors(lines, key) if o not in run]
            at = _mean([middle[key] for key in run], 0.0)
            middle.update(dict.fromkeys(run, _mean([at, at, _mean(ends, at)], at)))
        for line in rows:
            middle.update(zip(line, _apart(line, [middle[key] for key in line], size), strict=True))
    return middle


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _runs(rows: list[list[Key]], lines: nx.DiGraph) -> list[set[Key]]:
    """What should be vertically aligned: the places of one passing value, boxes connected one to one."""
    aligned = nx.Graph()
    aligned.add_nodes_from(itertools.chain.from_iterable(rows))
    aligned.add_edges_from(
        (one, other)
        for one, other in lines.edges
        if isinstance(one, tuple) == isinstance(other, tuple) and lines.in_degree(other) == 1
        and (isinstance(other, tuple) or lines.out_degree(one) == 1)
    )  # fmt: skip
    return list(nx.connected_components(aligned))


def _apart(line: list[Key], wanted: list[float], size: dict[Key, float]) -> list[float]:
    """The places nearest to those wanted that keep order and distance: the mean of pushing right and left."""
    steps = [(size[a] + size[b]) / 2 + _BETWEEN for a, b in itertools.pairwise(line)]
    right, left = list(wanted), list(wanted)
    for n, step in enumerate(steps):
        right[n + 1] = max(right[n + 1], right[n] + step)
    for n in range(len(steps) - 1, -1, -1):
        left[n] = min(left[n], left[n + 1] - steps[n])
    return [(a + b) / 2 for a, b in zip(right, left, strict=True)]
