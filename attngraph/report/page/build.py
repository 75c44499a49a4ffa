"""The whole page: first what was not fused, then attentions, passes and graphs."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from attngraph.report.account import Times, later, records
from attngraph.report.entries import Break, Entries, folded
from attngraph.report.heatmap import to_svg
from attngraph.report.page import html as H
from attngraph.report.page.attention import panels, render_attentions, render_programs
from attngraph.report.page.code import render_excerpt
from attngraph.report.page.folding import Store
from attngraph.report.page.graphs import render_graphs
from attngraph.report.page.html import TIMES, Html, html, plural, tag
from attngraph.report.page.passes import render_compared, render_passes
from attngraph.report.user_code import UserCode
from attngraph.report.words import Part, gathered, milliseconds


def render(
    report: Entries, title: str = "", weights: Mapping[str, Tensor] | None = None,
    earlier: Entries | None = None, times: Times | None = None,
) -> str:  # fmt: skip
    """The page of a report as text; arguments as of `CompileReport.to_html`."""
    graphs, then = _graphs(report), () if earlier is None else _graphs(earlier)
    store, groups = Store(), folded(report.attention)
    every = [graph.code for graph in graphs]
    code = UserCode(sum((c.stretches for c in every), ()), sum((c.reached for c in every), ()))
    drawn, boxes = render_graphs(graphs, panels(groups, report.programs), store)
    compared = render_compared(report, earlier, graphs, then, store) if earlier and then else html("")
    again = [Break(f"because of {what}, {TIMES} {n}", "") for what, n in report.retraces]
    found = [
        ("missed", f"Not fused ({len(report.missed)})", _missed(report, code)),
        ("pieces", "Captured in pieces", _stops(_IN_PIECES, report.breaks)),
        ("numbers", "Sizes that are numbers", _stops(_OTHER_SIZES, report.numbers)),
        ("attention", f"Attention ({len(report.attention)})", render_attentions(groups, code, boxes, times)),
        ("programs", f"Token programs ({len(report.programs)})", render_programs(report.programs, boxes)),
        ("times", "Where the time goes", _times(times)), ("weights", "Weights", _weights(weights or {})),
        *(_told(part) for part in (*records(report), *later(report))),
        ("retraces", "Traced again", _stops(_TRACED_AGAIN, again)),
        ("compared", "Compared with before", compared),
        ("passes", "Passes", render_passes(graphs, store)), ("graph", "Graph", drawn),
    ]  # fmt: skip
    return _document(report, title, [section for section in found if section[2]], store)


def _graphs(report: Entries) -> tuple[Entries, ...]:
    return report.parts or ((report,) if report.graphs else ())


_WITHOUT_SCRIPT = (
    "The page's script did not run: what is folded cannot be unfolded here, nor searched. "
    "The dump's text files hold every graph as a whole."
)
_EACH_BY_ITSELF = "Each operation was measured by itself, so the sum may be more than a call takes."
_IN_PIECES = "The model is not one graph. torch.compile captured it in pieces, for this reason:"
_OTHER_SIZES = "A call with other sizes is compiled again, for this reason:"
_TRACED_AGAIN = "The graphs that there were did not serve a call, and the model was traced again:"
Section = tuple[str, str, Html]


def _document(report: Entries, title: str, sections: Sequence[Section], store: Store) -> str:
    heading = f"attngraph: {title}" if title else "attngraph report"
    links = [tag("li", tag("a", words, href=f"#{name}")) for name, words, _ in sections]
    parts = (H.section(name, words, [inside], id=name) for name, words, inside in sections)
    body = [
        tag("a", "Skip to the report", href="#report", class_="skip"),
        tag("header", tag("h1", heading), *_summary(report)),
        tag("nav", tag("ul", *links), aria_label="parts of the report"),
        H.hint(_WITHOUT_SCRIPT, id="without-script"),
        tag("main", *parts, id="report", tabindex=-1),
        tag("p", "", role="status", class_="vh", id="said"),
        tag("script", Html(store.packed()), type="text/plain", id="store"),
    ]  # fmt: skip
    return H.document(heading, body, H.asset("page.js"))


def _summary(report: Entries) -> list[Html]:
    if not report.graphs:
        return [tag("p", "Nothing was traced: the compiled model has not been called.", class_="summary")]
    kinds = len(folded(report.attention))
    words = report.counted()
    words += f", {plural(kinds, 'distinct attention')}" if kinds else ""
    words += ", captured in pieces" if report.breaks else ""
    graphs = f", {plural(report.graphs, 'graph')}" if report.graphs > 1 else ""
    state = "good" if not report.unfused and not report.breaks else "notice"
    told = tag("strong", words, class_=state), f"{graphs}, {report.took()}."
    return [tag("p", *told, class_="summary")]


def _missed(report: Entries, code: UserCode) -> Html:
    found = []
    for (reason, source), members in gathered(report.missed, lambda m: (m.reason, m.caller or m.source)):
        names = H.span_of_names([m.name for m in members])
        where = [tag("code", source or "line not known"), H.repeated(len(members))]
        where += [" in ", tag("code", names)] if names else []
        excerpt = render_excerpt(code.how(members[0].source, members[0].name), code)
        found.append(H.joined([tag("p", *where, class_="place"), tag("p", reason), excerpt]))
    return H.cards(found) if found else html("")


def _stops(intro: str, stops: Sequence[Break]) -> Html:
    found = (
        H.joined([tag("p", tag("code", b.source), class_="place") if b.source else "", tag("p", b.reason)])
        for b in stops
    )
    return H.joined([tag("p", intro), H.cards(found)]) if stops else html("")


def _told(part: Part) -> Section:
    """A part of the account, as the text has it."""
    about = part.about.strip()
    head = tag("p", tag("strong", part.head)) if part.head else ""
    return about.partition(" ")[0], about.capitalize(), H.joined([head, H.items(part.facts)])


def _times(times: Times | None) -> Html:
    """A table of the operations that took longest, alike ones together."""
    if times is None:
        return html("")
    whole = times.seconds or 1.0
    took = f"{milliseconds(whole)} in all, medians of {times.rounds} rounds."
    rows = []
    for group in times.longest():
        share = 100 * group.seconds / whole
        bar = H.joined([f"{share:.0f} %", tag("span", "", class_="bar", style=f"width: {share:.0f}%")])
        names = (group.what.replace(" x ", f" {TIMES} "), group.name, group.source)
        rows.append([*(tag("code", name) for name in names), milliseconds(group.seconds), bar])
    drawn = H.table(("Operation", "Module", "Line", "Time", "Share"), rows, "times")
    scroll = tag("div", drawn, class_="scroll", tabindex=0, role="group", aria_label="times of operations")
    return H.joined([H.hint(f"{took} {_EACH_BY_ITSELF}"), scroll])


def _weights(found: Mapping[str, Tensor]) -> Html:
    """A panel for each attention: heatmaps of the heads of its first row."""
    panels = []
    for own, (name, weights) in ((f"weights-{n}", given) for n, given in enumerate(found.items())):
        drawn = H.picture(to_svg(weights, H.visible(name)), f"{own}-map")
        several = weights.ndim == 4 and len(weights) > 1
        note = H.hint(f"The first of {len(weights):,} rows.") if several else ""
        title = tag("h3", name, id=own, class_="vh")  # the picture has it too
        panels.append(H.panel(own, title, note, tag("div", drawn)))
    return tag("div", *panels, class_="maps") if panels else html("")
