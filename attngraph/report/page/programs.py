"""A panel for each token program: what it computes for every token, in which modules, and its kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attngraph.report.entries import TokenProgramEntry
from attngraph.report.page.attention import render_kernel
from attngraph.report.page.html import TIMES, Html, joined, span_of_names, tag


def panels_of_programs(programs: Sequence[TokenProgramEntry]) -> dict[tuple[str, str] | str, str]:
    """The id of the panel of each program, by its text."""
    return {entry.program: f"program-{n}" for n, entry in enumerate(programs)}


def render_programs(programs: Sequence[TokenProgramEntry], boxes: Mapping[str, str]) -> Html:
    """The panels; `boxes` are those of charts, by panel."""
    intro = tag(
        "p", "Between two attentions each token is computed by itself: all of that is one operation, a ",
        "program of single elements.", class_="hint",
    )  # fmt: skip
    sources: dict[str, str] = {}
    return joined(
        [intro, *(_panel(entry, f"program-{n}", boxes, sources) for n, entry in enumerate(programs))]
    )


def _panel(entry: TokenProgramEntry, name: str, boxes: Mapping[str, str], sources: dict[str, str]) -> Html:
    count = f" {TIMES} {len(entry.names)}" if len(entry.names) > 1 else ""
    where = span_of_names(list(entry.names))
    title = tag("h3", f"token program{count}", tag("span", f" {where}", class_="sub"), id=name)
    text = tag(
        "pre", tag("code", entry.program), tabindex=0, aria_label="token program", role="group",
        class_="program",
    )  # fmt: skip
    box = boxes.get(name)
    link = tag("p", tag("a", "Show it in the graph", href=f"#{box}"), class_="led") if box else ""
    return tag(
        "article", title, text, link, render_kernel(entry.kernel, name, sources), class_="panel",
        aria_labelledby=name,
    )  # fmt: skip
