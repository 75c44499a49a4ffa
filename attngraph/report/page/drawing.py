"""A chart as an SVG element: boxes for ops, lines for values, downwards; attentions are highlighted.

Each box can be focused and says what it computes, from what, and on which line of the user's code; `page.js`
moves the focus with the arrow keys and repeats this text beside the picture. Colours are the page's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attngraph.report.page.chart import Box, Chart
from attngraph.report.page.code import Links, places, source_of
from attngraph.report.page.html import Html, joined, plural, tag
from attngraph.report.page.layers import Line
from attngraph.report.page.layout import Key, Placed, place

_LETTER, _LINE, _PAD = 7.3, 16.0, 7.0
"""The width of a letter, the height of a line of text, and the room around it."""
_ROW_GAP, _MARGIN, _LABEL = 22.0, 14.0, 6.0
_LONGEST = 26
"""Most letters of a line in a box."""
_PROGRAM = 4
"""Most lines of an attention's program in its box; beside the picture stands all of it."""


def draw(chart: Chart, name: str, missed: Mapping[str, str], links: Links) -> Html:
    """The SVG of a chart. `name` is its id in the page, `missed` has the reason for each source line whose
    softmax was left alone; `links` is told which box shows an attention that has a panel."""
    boxes = chart.boxes()
    texts = [_texts(box) for box in boxes]
    widths = [max(len(text) for text in lines) * _LETTER + 2 * _PAD for lines in texts]
    placed = place(boxes, widths)
    heights = [
        len(lines) * _LINE + _PAD if box.lines else _LINE + 2 for box, lines in zip(boxes, texts, strict=True)
    ]
    tops, bottom = _tops(boxes, placed, heights)
    bands = list(_bands(boxes, placed, tops, heights))
    margin = _MARGIN + max((len(label) * _LETTER + _LABEL for label, _, _ in bands), default=0.0)
    width, height = placed.width + margin + _MARGIN, bottom + _MARGIN
    first = _first(boxes)
    title = f"{chart.layers[0] or 'ops of no layer'}: {plural(chart.ops, 'op')}, values flow downwards"
    return tag(
        "svg",
        tag("title", title, id=f"{name}-title"),
        *(_band(label, top, end, width) for label, top, end in bands),
        tag("g", *_lines(placed, tops, heights, margin), class_="wires", aria_hidden="true"),
        *(
            _box(
                box, texts[n], missed, (x, tops[n], widths[n], heights[n]), n == first,
                **_led(box, f"{name}-box-{n}", links),
            )
            for n, box in enumerate(boxes)
            for x in (placed.middle[n] + margin,)
        ),
        class_="chart", role="group", aria_labelledby=f"{name}-title",
        viewBox=f"0 0 {width:.0f} {height:.0f}", width=f"{width:.0f}", height=f"{height:.0f}",
    )  # fmt: skip


def _led(box: Box, name: str, links: Links) -> dict[str, str | None]:
    """The attributes of a box by which other parts of the page are found from it, and it from them."""
    panel = links.panel(box.lines, box.program)
    own = name if panel and links.boxes.setdefault(panel, name) == name else None
    at = " ".join(map(str, places(links.code, box.lines)))
    return {"id": own, "data_panel": panel or None, "data_at": at or None}


def _first(boxes: Sequence[Box]) -> int:
    """The box that the tab key focuses: an attention, if there is one, or else an op."""
    found = [n for n, box in enumerate(boxes) if box.is_attention]
    found += [n for n, box in enumerate(boxes) if box.lines]
    return found[0] if found else 0


def _texts(box: Box) -> list[str]:
    if not box.lines:
        return [f"input {box.name[4:]}" if box.name.startswith("%arg") else f"from {box.name}"]
    ops = [_shortened(line.op) for line in box.lines]
    if not box.is_attention:
        return [*ops, *map(_shortened, _weights(box)[:1])]
    program = [_begun(line) for line in box.program[:_PROGRAM]]
    more = ["…"] if len(box.program) > _PROGRAM else []
    return [*ops, *(_shortened(word) for line in box.lines for word in _kernel(line)), *program, *more]


def _weights(box: Box) -> list[str]:
    """Where the weights come from, within the layer: `attn.c_attn` for its weight and bias."""
    names: dict[str, None] = {}
    for line in box.lines:
        for name in line.references:
            if name[0] == "$":
                inner = name[1:].strip("'\"").removeprefix(f"{line.layer}." if line.layer else "")
                names[inner.rpartition(".")[0] or inner] = None
    return list(names)


def _kernel(line: Line) -> list[str]:
    """The kernel that computes an attention, if one is chosen."""
    parts = line.code.rpartition(" : ")[0].rstrip(")").split(", ")
    return [part.partition("=")[2] for part in parts if part.startswith(("kernel=", "by="))]


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"…{text[1 - _LONGEST :]}"


def _begun(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _tops(boxes: Sequence[Box], placed: Placed, heights: Sequence[float]) -> tuple[list[float], float]:
    """The upper edge of each box, centred in its row, and the end of the last row."""
    deepest: dict[int, float] = {}
    for n in range(len(boxes)):
        deepest[placed.row[n]] = max(deepest.get(placed.row[n], 0.0), heights[n])
    starts, at = {}, _MARGIN
    for row in sorted(deepest):
        starts[row] = at
        at += deepest[row] + _ROW_GAP
    tops = [starts[placed.row[n]] + (deepest[placed.row[n]] - heights[n]) / 2 for n in range(len(boxes))]
    return tops, at - _ROW_GAP


def _bands(
    boxes: Sequence[Box], placed: Placed, tops: Sequence[float], heights: Sequence[float]
) -> Iterator[tuple[str, float, float]]:
    """The parts of the layer with where they begin and end; parts without a name are left out."""
    rows = sorted({placed.row[n] for n, box in enumerate(boxes) if box.lines})
    open_: tuple[str, float, float] | None = None
    for row in rows:
        inside = [n for n, box in enumerate(boxes) if box.lines and placed.row[n] == row]
        label = boxes[inside[0]].band
        top, end = min(tops[n] for n in inside), max(tops[n] + heights[n] for n in inside)
        if open_ is not None and open_[0] == label:
            open_ = label, open_[1], end
            continue
        if open_ is not None and open_[0]:
            yield open_
        open_ = label, top, end
    if open_ is not None and open_[0]:
        yield open_


def _band(label: str, top: float, end: float, width: float) -> Html:
    half = _ROW_GAP / 2 - 3
    high = end - top + 2 * half
    return tag(
        "g",
        tag("rect", x=2, y=f"{top - half:.0f}", width=f"{width - 4:.0f}", height=f"{high:.0f}", rx=4),
        tag("text", label, x=_LABEL + 2, y=f"{top + 8:.0f}"),
        class_="band",
    )  # fmt: skip


def _lines(placed: Placed, tops: Sequence[float], heights: Sequence[float], margin: float) -> Iterator[Html]:
    """A curve for each connection; a value that passes a row goes straight through it."""
    inside: dict[int, list[int]] = {}
    for n, row in placed.row.items():
        inside.setdefault(row, []).append(n)

    def ends(key: Key) -> tuple[float, float]:
        boxes = [key] if isinstance(key, int) else inside[key[1]]
        return min(tops[n] for n in boxes), max(tops[n] + heights[n] for n in boxes)

    for one, other in placed.joins:
        x, to = placed.middle[one] + margin, placed.middle[other] + margin
        y, (top, end) = ends(one)[1], ends(other)
        half = (y + top) / 2
        curve = f"M{x:.0f} {y:.0f}C{x:.0f} {half:.0f} {to:.0f} {half:.0f} {to:.0f} {top:.0f}"
        yield tag("path", d=curve if isinstance(other, int) else f"{curve}V{end:.0f}")


def _box(
    box: Box,
    texts: Sequence[str],
    missed: Mapping[str, str],
    at: tuple[float, float, float, float],
    is_first: bool,
    **links: str | None,
) -> Html:
    """One box; `at` is the middle of its upper edge, its width and its height."""
    x, y, w, h = at
    reasons = [reason for line in box.lines if "softmax" in line.op for reason in _reasons(line, missed)]
    kind = "attention" if box.is_attention else "missed" if reasons else "op" if box.lines else "value"
    ops = max(len(box.lines), 1)
    words = [
        tag("tspan", text, x=f"{x:.0f}", y=f"{y + _LINE * (n + 0.8):.0f}", class_="" if n < ops else "dim")
        for n, text in enumerate(texts)
    ]
    shape = tag("rect", x=f"{x - w / 2:.1f}", y=f"{y:.0f}", width=f"{w:.1f}", height=f"{h:.0f}", rx=4)
    title = "\n".join([*_about(box), *(f"not fused: {reason}" for reason in reasons)])
    return tag(
        "g", tag("title", title), shape, tag("text", joined(words)),
        class_=kind, role="img", tabindex=0 if is_first else -1, **links,
    )  # fmt: skip


def _reasons(line: Line, missed: Mapping[str, str]) -> list[str]:
    """Why the softmax of a line was left alone, if it was."""
    source = source_of(line)
    return [missed[source]] if source in missed else []


def _about(box: Box) -> list[str]:
    """The full description of a box, one line for each op."""
    if not box.lines:
        is_argument = box.name.startswith("%arg")
        return [f"argument {box.name[4:]} of the model" if is_argument else f"{box.name}, computed elsewhere"]
    found = [f"{line.code.strip()}{f'   {line.note}' if line.note else ''}" for line in box.lines]
    found += [f"    {line}" for line in box.program]
    module = box.lines[0].module
    return [*found, *([f"in {module}"] if module else [])]
