"""The positions of a chart's boxes: rows from the top down, after Sugiyama, Tagawa and Toda (1981).

Each box is below all boxes that it reads; parts of a layer are below each other; boxes of a row are ordered
so that few lines cross, and moved to where their lines are straight. A value that passes rows has one place
in each, however many boxes read it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import networkx as nx

from attngraph.report.page.chart import Box

Key = int | tuple[int, int]
"""A box by its index, or (box, row) for its value where it passes a row."""
_SWEEPS = 12
_BETWEEN = 18.0
"""Free space between boxes of a row."""
_ALONG = 10.0
"""The width that a passing line takes."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """The layout: the row of each box, the middle of each box or passing value, and what is connected by a
    line from one row to the next."""

    row: dict[int, int]
    middle: dict[Key, float]
    joins: tuple[tuple[Key, Key], ...]
    width: float


def place(boxes: Sequence[Box], widths: Sequence[float]) -> Placed:
    """Rows and places for boxes of these widths."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(boxes)))
    graph.add_edges_from((read, n) for n, box in enumerate(boxes) for read in box.reads)
    row = _rows(graph, boxes)
    rows: list[list[Key]] = [[] for _ in range(max(row.values(), default=-1) + 1)]
    for n in range(len(boxes)):
        rows[row[n]].append(n)
    joins: dict[tuple[Key, Key], None] = {}
    for a in graph.nodes:
        last = max((row[b] for b in graph.successors(a)), default=0)
        passing: list[Key] = [(a, r) for r in range(row[a] + 1, last)]
        for key, r in zip(passing, range(row[a] + 1, last), strict=True):
            rows[r].append(key)
        way: list[Key] = [a, *passing]
        joins.update(dict.fromkeys(itertools.pairwise(way)))
        joins.update(dict.fromkeys((way[row[b] - row[a] - 1], b) for b in graph.successors(a)))
    size: dict[Key, float] = {key: _ALONG for line in rows for key in line}
    size.update(enumerate(widths))
    near = _neighbours(joins)
    _order(rows, near)
    middle = _middles(rows, near, size)
    left = min((middle[key] - size[key] / 2 for key in size), default=0.0)
    middle = {key: at - left for key, at in middle.items()}
    return Placed(row, middle, tuple(joins), max((middle[k] + size[k] / 2 for k in size), default=0.0))


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


def _neighbours(joins: Iterable[tuple[Key, Key]]) -> tuple[dict[Key, list[Key]], dict[Key, list[Key]]]:
    """What each box or passing value is connected to in the row above, and in the row below."""
    above: dict[Key, list[Key]] = {}
    below: dict[Key, list[Key]] = {}
    for one, other in joins:
        below.setdefault(one, []).append(other)
        above.setdefault(other, []).append(one)
    return above, below


def _order(rows: list[list[Key]], near: tuple[dict[Key, list[Key]], dict[Key, list[Key]]]) -> None:
    """Order each row by the mean place of what its members are connected to, going down and up again."""
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        known = near[0] if down else near[1]
        places: dict[Key, float] = {}
        for line in rows if down else rows[::-1]:
            now = {key: n for n, key in enumerate(line)}

            joined = {key: [places[o] for o in known.get(key, ()) if o in places] for key in line}
            wanted = {key: _mean(joined[key], now[key]) for key in line}
            line.sort(key=wanted.__getitem__)
            places.update({key: float(n) for n, key in enumerate(line)})


def _middles(
    rows: list[list[Key]],
    near: tuple[dict[Key, list[Key]], dict[Key, list[Key]]],
    size: dict[Key, float],
) -> dict[Key, float]:
    """Start tightly packed, move rows towards what they are connected to, and finally straighten runs."""
    middle: dict[Key, float] = {}
    for line in rows:
        at = -sum(size[key] + _BETWEEN for key in line) / 2
        for key in line:
            middle[key] = at + size[key] / 2
            at += size[key] + _BETWEEN
    for sweep in range(3 * _SWEEPS):
        side = near[sweep % 2]
        for line in rows if sweep % 2 == 0 else rows[::-1]:
            wanted = [_mean([middle[o] for o in side.get(key, ())], middle[key]) for key in line]
            middle.update(zip(line, _apart(line, wanted, size), strict=True))
    runs = _runs(rows, near)
    for _ in range(4 * _SWEEPS):
        for run in runs:
            ends = [middle[o] for key in run for side in near for o in side.get(key, ()) if o not in run]
            at = _mean([middle[key] for key in run], 0.0)
            middle.update(dict.fromkeys(run, _mean([at, at, _mean(ends, at)], at)))
        for line in rows:
            middle.update(zip(line, _apart(line, [middle[key] for key in line], size), strict=True))
    return middle


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _runs(
    rows: list[list[Key]], near: tuple[dict[Key, list[Key]], dict[Key, list[Key]]]
) -> list[tuple[Key, ...]]:
    """What should be vertically aligned: the places of one passing value, boxes connected one to one."""
    above, below = near
    found: dict[Key, list[Key]] = {}
    for key in itertools.chain.from_iterable(rows):
        before = above.get(key, [])
        passes = isinstance(key, tuple)
        follows = len(before) == 1 and isinstance(before[0], tuple) == passes
        follows = follows and (passes or below[before[0]] == [key])
        run = found[before[0]] if follows else []
        run.append(key)
        found[key] = run
    return [tuple(run) for run in {id(run): run for run in found.values()}.values()]


def _apart(line: list[Key], wanted: list[float], size: dict[Key, float]) -> list[float]:
    """The places nearest to those wanted that keep order and distance: the mean of pushing right and left."""
    steps = [(size[a] + size[b]) / 2 + _BETWEEN for a, b in itertools.pairwise(line)]
    right, left = list(wanted), list(wanted)
    for n, step in enumerate(steps):
        right[n + 1] = max(right[n + 1], right[n] + step)
    for n in range(len(steps) - 1, -1, -1):
        left[n] = min(left[n], left[n + 1] - steps[n])
    return [(a + b) / 2 for a, b in zip(right, left, strict=True)]
