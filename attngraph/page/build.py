"""The page put together: what was missed first, then attentions, passes and graphs.

A content security policy lets the page's own script run (by its hash) and nothing else, and lets it reach
nothing outside itself.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from attngraph.errors import DumpError
from attngraph.page.attention import render_attentions
from attngraph.page.chart import Chart, charts
from attngraph.page.drawing import draw
from attngraph.page.html import MINUS, TIMES, Html, html, joined, plural, span_of_names, tag
from attngraph.page.layers import read_lines
from attngraph.page.passes import Store, render_passes
from attngraph.report import CompileReport, folded

_MOST_OPS = 250
"""Ops of a chart that is drawn; of a longer one there is the text alone."""
_MOST_CHARTS = 40
"""Charts of a page."""
_MOST_OPEN = 3
"""Charts that are open at first, those with attentions before others."""


def write(report: CompileReport, path: Path, title: str = "") -> Path:
    """Write the page of a report as a whole or not at all; the file.

    Raises:
        DumpError: it cannot be written. What stood there still does.
    """
    text = render(report, title)
    handle, name = -1, ""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", text=True)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except OSError as problem:
        if name:
            Path(name).unlink(missing_ok=True)
        raise DumpError(
            f"cannot write the page to {path}: {problem.strerror or problem}. "
            "Name a file in a folder that exists."
        ) from problem
    return path


def render(report: CompileReport, title: str = "") -> str:
    """The page of a report as text. `title` says what was compiled, if that is known."""
    graphs = report.parts or ((report,) if report.graphs else ())
    store = Store()
    groups = folded(report.attention)
    sections = [
        _section("missed", f"Not fused ({len(report.missed)})", _missed(report), bool(report.missed)),
        _section("pieces", "Captured in pieces", _breaks(report), bool(report.breaks)),
        _section(
            "attention", f"Attention ({len(report.attention)})", render_attentions(groups), bool(groups)
        ),
        _section("cache", "Cache", _cache(report), report.cache is not None),
        _section("passes", "Passes", _passes(graphs, store), bool(graphs)),
        _section("graph", "Graph", _graphs(graphs), any(_final(g) for g in graphs)),
    ]
    return _document(report, title, [found for found in sections if found], store)


_WITHOUT_SCRIPT = (
    "The page's script did not run: what is folded cannot be unfolded here, nor searched. "
    "The dump's text files hold every graph as a whole."
)
Section = tuple[str, str, Html]


def _section(name: str, title: str, body: Html, is_there: bool) -> Section | None:
    if not is_there:
        return None
    head = tag("h2", title, id=f"{name}-title")
    return name, title, tag("section", head, body, id=name, aria_labelledby=f"{name}-title")


def _document(report: CompileReport, title: str, sections: Sequence[Section], store: Store) -> str:
    style, script = (_asset(name) for name in ("page.css", "page.js"))
    links = [tag("li", tag("a", words, href=f"#{name}")) for name, words, _ in sections]
    heading = f"attngraph: {title}" if title else "attngraph report"
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", heading),
        tag("style", Html(style)),
    ]
    body = [
        tag("a", "Skip to the report", href="#report", class_="skip"),
        tag("header", tag("h1", heading), *_summary(report)),
        tag("nav", tag("ul", *links), aria_label="parts of the report"),
        tag("p", _WITHOUT_SCRIPT, class_="hint", id="without-script"),
        tag("main", *(found for _, _, found in sections), id="report", tabindex=-1),
        tag("p", "", role="status", class_="vh", id="said"),
        tag("script", Html(store.packed()), type="text/plain", id="store"),
        tag("script", Html(script)),
    ]  # fmt: skip
    return f'<!DOCTYPE html>\n<html lang="en">\n{tag("head", *head)}\n{tag("body", *body)}\n</html>\n'


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    text = resources.files("attngraph.page").joinpath(name).read_text(encoding="utf-8")
    assert "</s" not in text, f"{name} would end its own element"
    return text


def _summary(report: CompileReport) -> list[Html]:
    fused, missed = len(report.attention), len(report.missed)
    if not report.graphs:
        return [tag("p", "Nothing was traced: the compiled model has not been called.", class_="summary")]
    kinds = len(folded(report.attention))
    words = f"{fused} of {plural(fused + missed, 'softmax-like place')} fused"
    words += f", {plural(kinds, 'distinct attention')}" if kinds else ""
    words += ", captured in pieces" if report.breaks else ""
    graphs = f", {plural(report.graphs, 'graph')}" if report.graphs > 1 else ""
    state = "good" if not missed and not report.breaks else "notice"
    return [
        tag(
            "p",
            tag("strong", words, class_=state),
            f"{graphs}, compiled in {report.seconds:.2f} s.",
            class_="summary",
        )
    ]


def _missed(report: CompileReport) -> Html:
    found = []
    for (reason, source), group in itertools.groupby(report.missed, key=lambda m: (m.reason, m.source)):
        members = list(group)
        times = f" {TIMES} {len(members)}" if len(members) > 1 else ""
        names = span_of_names([m.name for m in members])
        where = [
            tag("code", source or "line not known"),
            times,
            *([" in ", tag("code", names)] if names else []),
        ]
        found.append(tag("li", tag("p", *where, class_="place"), tag("p", reason)))
    return tag("ul", *found, class_="cards")


def _breaks(report: CompileReport) -> Html:
    intro = "The model is not one graph. torch.compile captured it in pieces, for this reason:"
    found = [
        tag(
            "li", *([tag("p", tag("code", b.source), class_="place")] if b.source else []), tag("p", b.reason)
        )
        for b in report.breaks
    ]
    return joined([tag("p", intro), tag("ul", *found, class_="cards")])


def _cache(report: CompileReport) -> Html:
    if report.cache is None:
        return html("")
    first, *more = [line.strip() for line in report.cache.lines() if line.strip()]
    head = first.removeprefix("cache").strip()
    return joined([tag("p", tag("strong", head)), tag("ul", *(tag("li", line) for line in more))])


def _graph_title(report: CompileReport, number: int, count: int) -> Html:
    if count == 1:
        return html("")
    fused = plural(len(report.attention), "attention")
    return tag("h3", f"Graph {number}", tag("span", f" {fused}, {report.seconds:.2f} s", class_="sub"))


def _passes(graphs: Sequence[CompileReport], store: Store) -> Html:
    lists = [
        tag("div", _graph_title(graph, n, len(graphs)), render_passes(graph, f"g{n}", store), class_="graph")
        for n, graph in enumerate(graphs)
    ]
    controls = tag(
        "div",
        tag("label", "Search passes ", tag("input", type="search", id="search", autocomplete="off")),
        tag("label", tag("input", type="checkbox", id="unchanged"), " Show unchanged passes"),
        tag("button", "Open all", type="button", id="open-all", aria_expanded="false"),
        tag("p", "", role="status", id="found"),
        class_="controls", role="search", hidden=True,
    )  # fmt: skip
    legend = tag(
        "p",
        "Lines are matched by what they compute, so that values which are only numbered anew count as ",
        f"equal. {MINUS} removed or was, + added or is; what differs within a line is ",
        tag("mark", "marked"), ". A line of yours (#) that is the same as above is not repeated.",
        class_="hint",
    )  # fmt: skip
    return joined([controls, legend, *lists])


def _final(report: CompileReport) -> str:
    """The last text there is of a graph."""
    return next((p.text for p in reversed(report.passes) if p.text), report.captured)


def _graphs(graphs: Sequence[CompileReport]) -> Html:
    intro = tag(
        "p", "The graph as it runs, one chart for each group of equal layers. Attentions are framed. "
        "Each box is an op; views that follow each other share one. Point at a box to read its line; "
        "on a keyboard, tab to a chart and use the arrow keys.", class_="hint",
    )  # fmt: skip
    found: list[Html] = [intro]
    left = _MOST_CHARTS
    for n, graph in enumerate(graphs):
        drawn = charts(read_lines(_final(graph)))
        if drawn:
            title = _graph_title(graph, n, len(graphs))
            found.append(tag("div", title, *_drawings(drawn, f"g{n}", n == 0, left), class_="graph"))
            left = max(left - len(drawn), 0)
    return joined(found)


def _drawings(drawn: Sequence[Chart], prefix: str, may_open: bool, most: int) -> list[Html]:
    """The first charts of a graph, at most `most`; those with attentions open before others."""
    ranked = sorted(range(len(drawn)), key=lambda n: -drawn[n].attentions)
    is_open = set(ranked[:_MOST_OPEN]) if may_open else set()
    is_open |= set(range(len(drawn))) if may_open and len(drawn) <= _MOST_OPEN + 1 else set()
    found = [_drawing(chart, f"{prefix}-chart-{n}", n in is_open) for n, chart in enumerate(drawn[:most])]
    if len(drawn) > most:
        words = (
            f"{plural(len(drawn) - most, 'more group')} of layers not drawn; the passes above hold the text."
        )
        found.append(tag("p", words, class_="hint"))
    return found


def _drawing(chart: Chart, name: str, is_open: bool) -> Html:
    layers = span_of_names(list(chart.layers)) or (
        f"outside of layers: {span_of_names([line.module for line in chart.lines])}".removesuffix(": ")
    )
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
        about = tag("pre", "", class_="about", aria_hidden="true")  # a box's title is its name already
        body = tag("div", tag("div", draw(chart, name), class_="scroll"), about, class_="drawn")
    title = tag("summary", tag("strong", f"{part}{layers}{times}"), tag("span", count, class_="sub"))
    return tag("details", title, body, open=is_open, class_="layer")
