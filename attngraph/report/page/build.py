"""The whole page: first what was not fused, then attentions, passes and graphs.

A content security policy lets the page's own script run (by its hash) and nothing else, and lets it reach
nothing outside itself.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from torch import Tensor

from attngraph.errors import DumpError
from attngraph.report.entries import Break, Entries, folded
from attngraph.report.files import write_whole
from attngraph.report.page.attention import panels, render_attentions
from attngraph.report.page.code import render_excerpt
from attngraph.report.page.compared import render_compared
from attngraph.report.page.graphs import final_text, graph_title, render_graphs
from attngraph.report.page.html import MINUS, TIMES, Html, html, joined, plural, span_of_names, tag
from attngraph.report.page.passes import Store, render_passes
from attngraph.report.page.programs import panels_of_programs, render_programs
from attngraph.report.page.times import render_times
from attngraph.report.page.weights import render_weights
from attngraph.report.times import Times
from attngraph.report.user_code import UserCode


def write(
    report: Entries, path: Path, title: str = "", weights: Mapping[str, Tensor] | None = None,
    earlier: Entries | None = None, times: Times | None = None,
) -> Path:  # fmt: skip
    """Write the page of a report atomically and return the file.

    Raises:
        DumpError: it cannot be written. An existing file is left as it was.
    """
    text = render(report, title, weights, earlier, times)
    try:
        write_whole(path, text)
    except OSError as problem:
        raise DumpError(
            f"cannot write the page to {path}: {problem.strerror or problem}. "
            "Name a file in a folder that exists."
        ) from problem
    return path


def render(
    report: Entries, title: str = "", weights: Mapping[str, Tensor] | None = None,
    earlier: Entries | None = None, times: Times | None = None,
) -> str:  # fmt: skip
    """The page of a report as text. `title` says what was compiled, if that is known; `weights` are those of
    attentions, by name (`compiled.weights`); `earlier` is a report to compare this one with; `times`,
    those of operations (`compiled.times`)."""
    graphs, then = _graphs(report), () if earlier is None else _graphs(earlier)
    store = Store()
    groups, code = folded(report.attention), _all_code(graphs)
    drawn, boxes = render_graphs(graphs, {**panels(groups), **panels_of_programs(report.programs)}, store)
    compared = tag("div") if earlier is None else render_compared(report, earlier, graphs, then, store)
    sections = [
        _section("missed", f"Not fused ({len(report.missed)})", _missed(report, code), bool(report.missed)),
        _section("pieces", "Captured in pieces", _breaks(report), bool(report.breaks)),
        _section("numbers", "Sizes that are numbers", _numbers(report), bool(report.numbers)),
        _section(
            "attention",
            f"Attention ({len(report.attention)})",
            render_attentions(groups, code, boxes, times),
            bool(groups),
        ),
        _section(
            "programs",
            f"Token programs ({len(report.programs)})",
            render_programs(report.programs, boxes),
            bool(report.programs),
        ),
        _section("times", "Where the time goes", render_times(times), times is not None),
        _section("weights", "Weights", render_weights(weights or {}), bool(weights)),
        _section("cache", "Cache", _cache(report), report.cache is not None),
        _section("retraces", "Traced again", _retraces(report), bool(report.retraces)),
        _section("compared", "Compared with before", compared, bool(then)),
        _section("passes", "Passes", _passes(graphs, store), bool(graphs)),
        _section("graph", "Graph", drawn, any(final_text(g) for g in graphs)),
    ]
    return _document(report, title, [found for found in sections if found], store)


def _all_code(graphs: Sequence[Entries]) -> UserCode:
    codes = [graph.code for graph in graphs]
    return UserCode(
        tuple(s for code in codes for s in code.stretches), tuple(r for code in codes for r in code.reached)
    )


def _graphs(report: Entries) -> tuple[Entries, ...]:
    return report.parts or ((report,) if report.graphs else ())


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


def _document(report: Entries, title: str, sections: Sequence[Section], store: Store) -> str:
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
    text = resources.files("attngraph.report.page").joinpath(name).read_text(encoding="utf-8")
    assert "</s" not in text, f"{name} would end its own element"
    return text


def _summary(report: Entries) -> list[Html]:
    if not report.graphs:
        return [tag("p", "Nothing was traced: the compiled model has not been called.", class_="summary")]
    kinds = len(folded(report.attention))
    words = report.counted()
    words += f", {plural(kinds, 'distinct attention')}" if kinds else ""
    words += ", captured in pieces" if report.breaks else ""
    graphs = f", {plural(report.graphs, 'graph')}" if report.graphs > 1 else ""
    state = "good" if not report.unfused and not report.breaks else "notice"
    return [
        tag(
            "p",
            tag("strong", words, class_=state),
            f"{graphs}, compiled in {report.seconds:.2f} s.",
            class_="summary",
        )
    ]


def _missed(report: Entries, code: UserCode) -> Html:
    found = []
    for (reason, source), group in itertools.groupby(
        report.missed, key=lambda m: (m.reason, m.caller or m.source)
    ):
        members = list(group)
        times = f" {TIMES} {len(members)}" if len(members) > 1 else ""
        names = span_of_names([m.name for m in members])
        where = [
            tag("code", source or "line not known"),
            times,
            *([" in ", tag("code", names)] if names else []),
        ]
        excerpt = render_excerpt(code.how(members[0].source, members[0].name), code)
        found.append(tag("li", tag("p", *where, class_="place"), tag("p", reason), excerpt))
    return tag("ul", *found, class_="cards")


def _breaks(report: Entries) -> Html:
    return _stops(
        "The model is not one graph. torch.compile captured it in pieces, for this reason:", report.breaks
    )


def _numbers(report: Entries) -> Html:
    return _stops("A call with other sizes is compiled again, for this reason:", report.numbers)


def _retraces(report: Entries) -> Html:
    found = (tag("li", tag("p", f"because of {what}, {TIMES} {n}")) for what, n in report.retraces)
    intro = tag("p", "The graphs that there were did not serve a call, and the model was traced again:")
    return joined([intro, tag("ul", *found, class_="cards")])


def _stops(intro: str, stops: Sequence[Break]) -> Html:
    found = [
        tag(
            "li", *([tag("p", tag("code", b.source), class_="place")] if b.source else []), tag("p", b.reason)
        )
        for b in stops
    ]
    return joined([tag("p", intro), tag("ul", *found, class_="cards")])


def _cache(report: Entries) -> Html:
    if report.cache is None:
        return html("")
    first, *more = [line.strip() for line in report.cache.lines() if line.strip()]
    head = first.removeprefix("cache").strip()
    return joined([tag("p", tag("strong", head)), tag("ul", *(tag("li", line) for line in more))])


def _passes(graphs: Sequence[Entries], store: Store) -> Html:
    lists = [
        tag("div", graph_title(graph, n, len(graphs)), render_passes(graph, f"g{n}", store), class_="graph")
        for n, graph in enumerate(graphs)
    ]
    controls = tag(
        "div",
        tag(
            "label", "Search passes, their graphs and charts ",
            tag("input", type="search", id="search", autocomplete="off"),
        ),
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
