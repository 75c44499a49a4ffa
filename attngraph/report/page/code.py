"""The user's code in the page: the lines around one that matters, and for `page.js` whole functions beside
charts, where lines lead to boxes and boxes to lines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from attngraph.report.page.html import Html, html, tag
from attngraph.report.page.layers import Line
from attngraph.report.user_code import Reached, UserCode

_BEFORE, _AFTER = 3, 3
"""Lines shown around one."""


@dataclasses.dataclass
class Links:
    """What leads from charts to other parts of the page, and back: the graph's `code`; `panels`, those of
    attentions by module and source, and of token programs by their text; `boxes`, the ids of what was drawn
    first, by panel."""

    code: UserCode
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
    if how is None:
        return html("")
    own = _around(how.frames[how.own], code)
    if not own:
        return html("")
    inner = [tag("li", tag("code", frame), _text(frame, code)) for frame in how.frames[how.own + 1 :]]
    below = tag("ul", *inner, class_="calls") if inner else html("")
    return tag("div", own, below, class_="excerpt")


def _around(frame: str, code: UserCode) -> Html:
    found = code.line(frame)
    if found is None:
        return html("")
    stretch, place = found
    lines = stretch.text.split("\n")
    start, stop = max(place - _BEFORE, 0), min(place + _AFTER + 1, len(lines))
    margin = min((len(x) - len(x.lstrip()) for x in lines[start:stop] if x.strip()), default=0)
    shown = [
        tag("mark" if n == place else "span", tag("small", f"{stretch.first + n:>5}  "), lines[n][margin:])
        for n in range(start, stop)
    ]
    return tag("pre", *shown, tabindex=0, role="group", aria_label=f"lines around {frame}", class_="lines")


def _text(frame: str, code: UserCode) -> Html:
    found = code.line(frame)
    if found is None:
        return html("")
    stretch, place = found
    return tag("code", f" {stretch.text.split(chr(10))[place].strip()}")
