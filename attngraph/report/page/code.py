"""Code in the page: the user's lines around one that matters, whole functions for `page.js` to show beside
charts, and sources of kernels, of which what is a kernel's own is shown and what every kernel has folded.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attngraph.ir.ops.kernels import SHARED, SHARED_END
from attngraph.report.page.html import Html, html, items, joined, listing, plural, tag
from attngraph.report.page.layers import Line
from attngraph.report.user_code import Reached, UserCode

_BEFORE, _AFTER = 3, 3
"""Lines shown around one."""


@dataclasses.dataclass
class Links:
    """What leads from the charts of a graph to other parts of the page, and back: its `code`, and the `place`
    of that in the store; `missed`, why softmaxes were left alone, by their lines; `panels`, those of
    attentions by module and source, and of token programs by their text; `boxes`, the ids of what was drawn
    first, by panel."""

    code: UserCode
    place: int
    missed: Mapping[str, str]
    panels: Mapping[tuple[str, str] | str, str]
    boxes: dict[str, str]

    def panel(self, lines: Sequence[Line], program: Sequence[str]) -> str:
        """The panel of the attention or the token program that these lines have; "" if there is none."""
        named = (self.panels.get((line.module, source_of(line))) for line in lines if "attention" in line.op)
        return next((name for name in named if name), "") or self.panels.get("\n".join(program), "")


def stored(code: UserCode) -> dict[str, Any]:
    """The code as `page.js` reads it: stretches as (file, first line, text), and how lines were reached."""
    return {
        "stretches": [[s.file, s.first, s.text] for s in code.stretches],
        "reached": [[list(r.frames), r.own] for r in code.reached],
    }


def places(code: UserCode, lines: Sequence[Line]) -> list[int]:
    """How lines of a graph's text were reached: places among those that are stored."""
    found: dict[int, None] = {}
    for line in lines:
        how = code.how(source_of(line), line.module)
        if how is not None:
            found[code.reached.index(how)] = None
    return list(found)


def source_of(line: Line) -> str:
    """The user's line that a line of a graph's text names."""
    return line.note.partition("; ")[0]


def render_excerpt(how: Reached | None, code: UserCode) -> Html:
    """The lines around the model's own line, and below them those that it leads to; nothing if not known."""
    known = None if how is None else code.line(how.frames[how.own])
    if how is None or known is None:
        return html("")
    stretch, place = known
    lines = stretch.text.split("\n")
    start, stop = max(place - _BEFORE, 0), min(place + _AFTER + 1, len(lines))
    margin = min((len(x) - len(x.lstrip()) for x in lines[start:stop] if x.strip()), default=0)
    shown = [
        tag("mark" if n == place else "span", tag("small", f"{stretch.first + n:>5}  "), lines[n][margin:])
        for n in range(start, stop)
    ]
    around = listing(f"lines around {how.frames[how.own]}", *shown, class_="lines")
    inner = []
    for frame in how.frames[how.own + 1 :]:
        called = code.line(frame)
        text = "" if called is None else called[0].text.split("\n")[called[1]].strip()
        inner.append(joined([tag("code", frame), tag("code", f" {text}") if called else ""]))
    return tag("div", around, items(inner, class_="calls") if inner else "", class_="excerpt")


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
    shown = (_code(kernel, title, part) for title, part in parts)
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


def _code(kernel: str, title: str, part: str) -> Html:
    """A part of a source, folded if kernels share it."""
    shown = listing(title or kernel, tag("code", joined(_marked(part))))
    words = f"{title}{SHARED} ({plural(_count(part), 'line')})"
    return tag("details", tag("summary", words), shown, class_="shared") if title else shown


def _marked(part: str) -> Iterator[Html]:
    end = 0
    for found in _SET_APART.finditer(part):
        yield html(part[end : found.start()])
        yield tag("i" if found["comment"] else "b", found[0])
        end = found.end()
    yield html(part[end:])


def _count(text: str) -> int:
    return text.rstrip("\n").count("\n") + 1
