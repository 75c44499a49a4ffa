"""The source of a kernel: what is its own is shown, what every kernel has is folded; comments and keywords
are set apart. Together the parts are the whole source, which is what "Copy" copies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from attngraph.ir.ops.kernels import SHARED, SHARED_END
from attngraph.report.page.html import Html, html, joined, plural, tag

_SET_APART = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/|^[ \t]*\#(?!define|include|if|ifdef|ifndef|el|endif|undef|pragma)[^\n]*"
    r'|""".*?""")'
    r"|\b(?P<keyword>for|while|if|elif|else|return|break|continue|in|not|and|or|def)\b",
    re.DOTALL | re.MULTILINE,
)


def render_source(kernel: str, text: str, name: str) -> Html:
    """The source of a kernel; `name` is its id in the page."""
    parts = list(_parts(text))
    lines, own = _count(text), sum(_count(part) for title, part in parts if not title)
    words = plural(lines, "line") + (f", {own:,} of its own" if own < lines else "")
    shown = (_shared(title, part) if title else _code(kernel, part) for title, part in parts)
    return tag(
        "details",
        tag("summary", f"Source of {kernel} ({words})"),
        tag("button", "Copy", type="button", class_="copy", aria_label=f"Copy {kernel}"),
        tag("div", *shown, class_="code"),
        class_="source", id=name,
    )  # fmt: skip


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """The source in parts: the title of one that kernels share, "" for one of its own; and its text."""
    title, part = "", ""
    for line in text.splitlines(keepends=True):
        words = line.strip().lstrip("/# ")
        if words.endswith(SHARED) and not title:
            if part.strip():
                yield "", part
                part = ""
            title, part = words.removesuffix(SHARED), part + line
        elif title and words == f"{SHARED_END}{title}":
            yield title, part + line
            title, part = "", ""
        else:
            part += line
    if part:
        yield title, part


def _shared(title: str, part: str) -> Html:
    summary = tag("summary", f"{title}{SHARED} ({plural(_count(part), 'line')})")
    return tag("details", summary, _code(title, part), class_="shared")


def _code(label: str, part: str) -> Html:
    return tag("pre", tag("code", joined(_marked(part))), tabindex=0, role="group", aria_label=label)


def _marked(part: str) -> Iterator[Html]:
    end = 0
    for found in _SET_APART.finditer(part):
        yield html(part[end : found.start()])
        yield tag("i" if found["comment"] else "b", found[0])
        end = found.end()
    yield html(part[end:])


def _count(text: str) -> int:
    return text.rstrip("\n").count("\n") + 1
