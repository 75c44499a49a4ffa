"""The section of charts: each graph as it runs, equal layers once; softmaxes not fused are marked.

A chart is an SVG element: boxes for ops, lines for values, downwards; attentions are highlighted. Each box
can be focused and says what it computes, from what, and on which line of the user's code; `page.js` moves the
focus with the arrow keys and repeats this text beside the picture. Colours are the page's.
"""

from collections.abc import Iterator, Mapping, Sequence

from attngraph.report.entries import Entries
from attngraph.report.page.chart import Box, Chart, Key, Placed, charts, place
from attngraph.report.page.code import Links, places, source_of, stored
from attngraph.report.page.folding import Store
from attngraph.report.page.html import Html, hint, html, joined, plural, repeated, span_of_names, tag
from attngraph.report.page.layers import Line, read_lines
from attngraph.report.words import alike

_MOST_OPS = 250
"""Most ops of a chart that is drawn; a longer one is shown only as text."""
_MOST_CHARTS = 40
"""Most charts of a page."""
_MOST_OPEN = 3
"""Most charts that are open at first, those with attentions before others."""
_INTRO = (
    "The graph as it runs, one chart for each group of equal layers. Attentions are framed, "
    "a softmax that was left alone is dashed. "
    "Each box is an op; views that follow each other share one. Point at a box to read its line and your "
    "code; on a keyboard, tab to a chart and use the arrow keys. A line of code that ops come from "
    "is a button that leads to them."
)
_LETTER, _LINE, _PAD = 7.3, 16.0, 7.0
"""The width of a letter, the height of a line of text, and the room around it."""
_ROW_GAP, _MARGIN, _LABEL = 22.0, 14.0, 6.0
_LONGEST = 26
"""Most letters of a line in a box."""
_PROGRAM = 4
"""Most lines of an attention's program in its box; beside the picture stands all of it."""


def graph_title(report: Entries, number: int, count: int) -> Html:
    """A heading that names the graph, where there are several."""
    if count == 1:
        return html("")
    fused = plural(len(report.attention), "attention")
    return tag("h3", f"Graph {number}", tag("span", f" {fused}, {report.seconds:.2f} s", class_="sub"))


def final_text(report: Entries) -> str:
    """The last text of a graph: after a pass, or as captured."""
    return next((p.text for p in reversed(report.passes) if p.text), report.captured)


def render_graphs(
    graphs: Sequence[Entries], panels: Mapping[tuple[str, str] | str, str], store: Store
) -> tuple[Html, dict[str, str]]:
    """Charts of all graphs, and the boxes of attentions by their panels."""
    boxes: dict[str, str] = {}
    if not any(map(final_text, graphs)):
        return html(""), boxes
    found: list[Html] = [hint(_INTRO)]
    left = _MOST_CHARTS
    for n, graph in enumerate(graphs):
        drawn = charts(read_lines(final_text(graph)))
        if drawn:
            title = graph_title(graph, n, len(graphs))
            missed = {entry.source: entry.reason for entry in graph.missed}
            links = Links(graph.code, len(store.code), missed, panels, boxes)
            store.code.append(stored(graph.code))
            inside = _drawings(drawn, f"g{n}", n == 0, left, links)
            found.append(tag("div", title, *inside, class_="graph"))
            left = max(left - len(drawn), 0)
    return joined(found), boxes


def _drawings(drawn: list[Chart], prefix: str, may_open: bool, most: int, links: Links) -> list[Html]:
    """The first charts of a graph, at most `most`; those with attentions open before others."""
    ranked = sorted(range(len(drawn)), key=lambda n: -drawn[n].attentions)
    is_open = set(ranked[:_MOST_OPEN]) if may_open else set()
    is_open |= set(range(len(drawn))) if may_open and len(drawn) <= _MOST_OPEN + 1 else set()
    first = enumerate(drawn[:most])
    found = [_drawing(chart, f"{prefix}-chart-{n}", n in is_open, links) for n, chart in first]
    if len(drawn) > most:
        left = plural(len(drawn) - most, "more group")
        found.append(hint(f"{left} of layers not drawn; the passes above hold the text."))
    return found


def _drawing(chart: Chart, name: str, is_open: bool, links: Links) -> Html:
    modules = span_of_names([line.module for line in chart.lines])
    layers = span_of_names(list(chart.layers)) or (f"outside of layers: {modules}" if modules else "all ops")
    part = "" if chart.part == "graph" else f"{chart.part}: "
    count = f" {plural(chart.ops, 'op')}{' each' if len(chart.layers) > 1 else ''}"
    count += f", {plural(chart.attentions, 'attention')}" if chart.attentions else ""
    if chart.ops > _MOST_OPS:
        body = hint(f"{chart.ops:,} ops are too many to draw; the passes above hold the text.")
    else:
        drawing = tag("div", _draw(chart, name, links), class_="scroll")
        beside = tag(
            "div",
            tag("pre", "", class_="about", aria_hidden="true"),  # hidden: a box's title already says it
            tag("p", tag("a", "What it computes", href="#attention"), class_="led", hidden=True),
            tag("div", "", class_="yours", data_code=links.place) if links.code.reached else "",
            class_="beside",
        )  # fmt: skip
        body = tag("div", drawing, beside, class_="drawn")
    called = tag("strong", f"{part}{layers}{repeated(len(chart.layers))}")
    title = tag("summary", called, tag("span", count, class_="sub"))
    return tag("details", title, body, open=is_open, class_="layer")


def _draw(chart: Chart, name: str, links: Links) -> Html:
    """The SVG of a chart. `name` is its id in the page; `links` is told which box shows an attention that has
    a panel."""
    boxes = chart.boxes()
    texts = [_texts(box) for box in boxes]
    widths = [max(len(text) for text in lines) * _LETTER + 2 * _PAD for lines in texts]
    placed = place(boxes, widths)
    heights = [
        len(lines) * _LINE + _PAD if box.lines else _LINE + 2 for box, lines in zip(boxes, texts, strict=True)
    ]
    tops, bottom = _tops(placed, heights)
    bands = list(_bands(boxes, placed, tops, heights))
    margin = _MARGIN + max((len(label) * _LETTER + _LABEL for label, _, _ in bands), default=0.0)
    width, height = placed.width + margin + _MARGIN, bottom + _MARGIN
    where = [(placed.middle[n] + margin, tops[n], widths[n], heights[n]) for n in range(len(boxes))]
    found = [n for n, box in enumerate(boxes) if box.is_attention]
    first = next(iter([*found, *(n for n, box in enumerate(boxes) if box.lines)]), 0)  # for the tab key
    title = f"{chart.layers[0] or 'ops of no layer'}: {plural(chart.ops, 'op')}, values flow downwards"
    return tag(
        "svg",
        tag("title", title, id=f"{name}-title"),
        *(_band(label, top, end, width) for label, top, end in bands),
        tag("g", *_lines(placed, tops, heights, margin), class_="wires", aria_hidden="true"),
        *(_box(box, texts[n], where[n], f"{name}-box-{n}", links, n == first) for n, box in enumerate(boxes)),
        class_="chart", role="group", aria_labelledby=f"{name}-title",
        viewBox=f"0 0 {width:.0f} {height:.0f}", width=f"{width:.0f}", height=f"{height:.0f}",
    )  # fmt: skip


def _texts(box: Box) -> list[str]:
    if not box.lines:
        return [f"input {box.name[4:]}" if box.name.startswith("%arg") else f"from {box.name}"]
    ops = [_shortened(line.op) for line in box.lines]
    if not box.is_attention:
        return [*ops, *map(_shortened, _weights(box)[:1])]
    program = [x if len(x) <= _LONGEST else f"{x[: _LONGEST - 1]}…" for x in box.program[:_PROGRAM]]
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


def _tops(placed: Placed, heights: Sequence[float]) -> tuple[list[float], float]:
    """The upper edge of each box, centred in its row, and the end of the last row."""
    tops, at = [0.0] * len(heights), _MARGIN
    for row in placed.rows:
        deepest = max(heights[n] for n in row)
        for n in row:
            tops[n] = at + (deepest - heights[n]) / 2
        at += deepest + _ROW_GAP
    return tops, at - _ROW_GAP


def _bands(
    boxes: Sequence[Box], placed: Placed, tops: Sequence[float], heights: Sequence[float]
) -> Iterator[tuple[str, float, float]]:
    """The parts of the layer with where they begin and end; parts without a name are left out."""
    rows = ([n for n in row if boxes[n].lines] for row in placed.rows)
    for label, group in alike(filter(None, rows), lambda row: boxes[row[0]].band):
        inside = [n for row in group for n in row]
        if label:
            yield label, min(tops[n] for n in inside), max(tops[n] + heights[n] for n in inside)


def _band(label: str, top: float, end: float, width: float) -> Html:
    half = _ROW_GAP / 2 - 3
    size = {"width": f"{width - 4:.0f}", "height": f"{end - top + 2 * half:.0f}"}
    frame = tag("rect", x=2, y=f"{top - half:.0f}", **size, rx=4)
    return tag("g", frame, tag("text", label, x=_LABEL + 2, y=f"{top + 8:.0f}"), class_="band")


def _lines(placed: Placed, tops: Sequence[float], heights: Sequence[float], margin: float) -> Iterator[Html]:
    """A curve for each connection; a value that passes a row goes straight through it."""
    rows = placed.rows

    def ends(key: Key) -> tuple[float, float]:
        boxes = [key] if isinstance(key, int) else rows[key[1]]
        return min(tops[n] for n in boxes), max(tops[n] + heights[n] for n in boxes)

    for one, other in placed.lines.edges:
        x, to = placed.middle[one] + margin, placed.middle[other] + margin
        y, (top, end) = ends(one)[1], ends(other)
        half = (y + top) / 2
        curve = f"M{x:.0f} {y:.0f}C{x:.0f} {half:.0f} {to:.0f} {half:.0f} {to:.0f} {top:.0f}"
        yield tag("path", d=curve if isinstance(other, int) else f"{curve}V{end:.0f}")


def _box(
    box: Box, texts: list[str], where: tuple[float, ...], name: str, links: Links, is_first: bool
) -> Html:
    """One box; `where`: the middle of its upper edge, its width and its height. Other parts of the page are
    found from it by its attributes, and it by its id from them."""
    x, y, w, h = where
    panel = links.panel(box.lines, box.program)
    own = name if panel and links.boxes.setdefault(panel, name) == name else None
    at = " ".join(map(str, places(links.code, box.lines)))
    sources = [source_of(line) for line in box.lines if "softmax" in line.op]
    reasons = [links.missed[source] for source in sources if source in links.missed]
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
        class_=kind, role="img", tabindex=0 if is_first else -1,
        id=own, data_panel=panel or None, data_at=at or None,
    )  # fmt: skip


def _about(box: Box) -> list[str]:
    """The full description of a box, one line for each op."""
    if not box.lines:
        is_argument = box.name.startswith("%arg")
        return [f"argument {box.name[4:]} of the model" if is_argument else f"{box.name}, computed elsewhere"]
    found = [f"{line.code.strip()}{f'   {line.note}' if line.note else ''}" for line in box.lines]
    found += [f"    {line}" for line in box.program]
    module = box.lines[0].module
    return [*found, *([f"in {module}"] if module else [])]
