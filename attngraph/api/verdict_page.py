"""A verdict as one HTML page: what differs, both sources and programs side by side, and what was compared.

The page has no script, and a policy that allows none; all that comes from a model is written as text.
"""

from collections.abc import Sequence
from importlib import resources

from attngraph.api.difference import Difference
from attngraph.report.entries import AttentionEntry
from attngraph.report.page import html as H
from attngraph.report.page.code import render_excerpt
from attngraph.report.page.html import Html, html, tag
from attngraph.report.user_code import UserCode

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
Pair = tuple[AttentionEntry, AttentionEntry]
_SIDES = ("", "Reference", "Candidate")


def render(
    status: str, differences: Sequence[Difference], attentions: Sequence[Pair], compared: Sequence[str],
    code: UserCode, title: str,
) -> str:  # fmt: skip
    """The page as text."""
    style = resources.files("attngraph.report.page").joinpath("page.css").read_text(encoding="utf-8")
    heading = f"attngraph verify: {title}" if title else "attngraph verify"
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", heading), tag("style", Html(style)),
    ]  # fmt: skip
    state = "good" if status == "equal" else "notice"
    sections = [
        _section("differences", "Differences", [_difference(d, code) for d in differences]),
        _section("attentions", f"Attentions in pairs ({len(attentions)})", _programs(attentions)),
        _section("compared", "What was compared", [H.items(compared)] if compared else []),
    ]
    body = [
        tag("header", tag("h1", heading), tag("p", tag("strong", status, class_=state), class_="summary")),
        tag("main", *sections),
    ]
    return f'<!DOCTYPE html>\n<html lang="en">\n{tag("head", *head)}\n{tag("body", *body)}\n</html>\n'


def _section(name: str, title: str, inside: Sequence[Html]) -> Html:
    if not inside:
        return html("")
    return tag("section", tag("h2", title, id=f"{name}-title"), *inside, aria_labelledby=f"{name}-title")


def _difference(found: Difference, code: UserCode) -> Html:
    rows: list[tuple[str, ...]] = []
    lines = found.reference, found.candidate
    if any(lines):
        rows.append(
            ("Line", *(H.joined([tag("code", at), render_excerpt(code.how(at, ""), code)]) for at in lines))
        )
    if found.program:
        rows.append(("Program", *(H.listing("program", text) for text in (found.program, found.other))))
    return H.joined([
        tag("p", tag("strong", found.code), f": {found.about}"),
        H.items(found.where()) if found.where() else "",
        H.table(_SIDES, rows, "sides") if rows else "",
    ])  # fmt: skip


def _programs(pairs: Sequence[Pair]) -> list[Html]:
    rows = [
        (f"{number}", *(H.joined([tag("code", e.source), H.listing("program", e.program)]) for e in pair))
        for number, pair in enumerate(pairs, start=1)
    ]
    return [H.table(_SIDES, rows, "sides")] if rows else []
