"""The section of charts: each graph as it runs, equal layers once; softmaxes not fused are marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attngraph.report.entries import Entries
from attngraph.report.page.chart import Chart, charts
from attngraph.report.page.code import Links, stored
from attngraph.report.page.drawing import draw
from attngraph.report.page.html import TIMES, Html, html, joined, plural, span_of_names, tag
from attngraph.report.page.layers import read_lines
from attngraph.report.page.passes import Store

_MOST_OPS = 250
"""Most ops of a chart that is drawn; a longer one is shown only as text."""
_MOST_CHARTS = 40
"""Most charts of a page."""
_MOST_OPEN = 3
"""Most charts that are open at first, those with attentions before others."""


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
    intro = tag(
        "p", "The graph as it runs, one chart for each group of equal layers. Attentions are framed, "
        "a softmax that was left alone is dashed. "
        "Each box is an op; views that follow each other share one. Point at a box to read its line and your "
        "code; on a keyboard, tab to a chart and use the arrow keys. A line of code that ops come from "
        "is a button that leads to them.", class_="hint",
    )  # fmt: skip
    found: list[Html] = [intro]
    left = _MOST_CHARTS
    for n, graph in enumerate(graphs):
        drawn = charts(read_lines(final_text(graph)))
        if drawn:
            title = graph_title(graph, n, len(graphs))
            missed = {entry.source: entry.reason for entry in graph.missed}
            store.code.append(stored(graph.code))
            links = Links(graph.code, panels, boxes)
            inside = _drawings(drawn, f"g{n}", n == 0, left, missed, links, len(store.code) - 1)
            found.append(tag("div", title, *inside, class_="graph"))
            left = max(left - len(drawn), 0)
    return joined(found), boxes


def _drawings(
    drawn: Sequence[Chart], prefix: str, may_open: bool, most: int, missed: Mapping[str, str], links: Links,
    code: int,
) -> list[Html]:  # fmt: skip
    """The first charts of a graph, at most `most`; those with attentions open before others."""
    ranked = sorted(range(len(drawn)), key=lambda n: -drawn[n].attentions)
    is_open = set(ranked[:_MOST_OPEN]) if may_open else set()
    is_open |= set(range(len(drawn))) if may_open and len(drawn) <= _MOST_OPEN + 1 else set()
    found = [
        _drawing(chart, f"{prefix}-chart-{n}", n in is_open, missed, links, code)
        for n, chart in enumerate(drawn[:most])
    ]
    if len(drawn) > most:
        words = (
            f"{plural(len(drawn) - most, 'more group')} of layers not drawn; the passes above hold the text."
        )
        found.append(tag("p", words, class_="hint"))
    return found


def _drawing(
    chart: Chart, name: str, is_open: bool, missed: Mapping[str, str], links: Links, code: int
) -> Html:
    modules = span_of_names([line.module for line in chart.lines])
    layers = span_of_names(list(chart.layers)) or (f"outside of layers: {modules}" if modules else "all ops")
    times = f" {TIMES} {len(chart.layers)}" if len(chart.layers) > 1 else ""
    part = "" if chart.part == "graph" else f"{chart.part}: "
    each = " each" if len(chart.layers) > 1 else ""
    count = f" {plural(chart.ops, 'op')}{each}" + (
        f", {plural(chart.attentions, 'attention')}" if chart.attentions else ""
    )
    if chart.ops > _MOST_OPS:
        body = tag(
            "p", f"{chart.ops:,} ops are too many to draw; the passes above hold the text.", class_="hint"
        )
    else:
        drawing = tag("div", draw(chart, name, missed, links), class_="scroll")
        beside = tag(
            "div",
            tag("pre", "", class_="about", aria_hidden="true"),  # hidden: a box's title already says it
            tag("p", tag("a", "What it computes", href="#attention"), class_="led", hidden=True),
            tag("div", "", class_="yours", data_code=code) if links.code.reached else "",
            class_="beside",
        )  # fmt: skip
        body = tag("div", drawing, beside, class_="drawn")
    title = tag("summary", tag("strong", f"{part}{layers}{times}"), tag("span", count, class_="sub"))
    return tag("details", title, body, open=is_open, class_="layer")
