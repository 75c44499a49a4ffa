"""The section that says where the time of a call goes, if it was measured."""

from __future__ import annotations

from attngraph.report.page.html import TIMES, Html, html, joined, tag
from attngraph.report.times import Shared, Times, milliseconds

_COLUMNS = ("Operation", "Module", "Line", "Time", "Share")


def render_times(times: Times | None) -> Html:
    """A table of the operations that took longest, alike ones together."""
    if times is None:
        return html("")
    whole = times.seconds or 1.0
    intro = (
        f"{milliseconds(whole)} in all, medians of {times.rounds} rounds. Each operation was measured by "
        "itself, so the sum may be more than a call takes."
    )
    head = tag("tr", *(tag("th", name, scope="col") for name in _COLUMNS))
    body = tag("tbody", *(_row(group, whole) for group in times.longest()))
    table = tag("table", tag("thead", head), body, class_="times")
    scroll = tag("div", table, class_="scroll", tabindex=0, role="group", aria_label="times of operations")
    return joined([tag("p", intro, class_="hint"), scroll])


def _row(group: Shared, whole: float) -> Html:
    share = 100 * group.seconds / whole
    bar = tag("span", "", class_="bar", style=f"width: {share:.0f}%")
    where = (tag("td", tag("code", text)) for text in (group.name, group.source))
    return tag(
        "tr", tag("th", tag("code", group.what.replace(" x ", f" {TIMES} ")), scope="row"), *where,
        tag("td", milliseconds(group.seconds)), tag("td", f"{share:.0f} %", bar),
    )  # fmt: skip
