"""A sheet with panels, drawn as one self-contained SVG element: no script, no font, no style of a page.

It has a title and a description for screen readers, and follows light and dark mode. A page that contains it
may set `--attngraph-ink` and `--attngraph-accent`.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Callable, Iterable
from html import escape

CELL, ROW = 240, 3
"""The width of a panel, in units of the SVG, and panels in one row."""
_GAP, _MARGIN, _LINE = 28, 12, 17


class Sheet:
    """What is drawn so far, from the top down: lines of text, and panels that are as high as `height`."""

    def __init__(self, count: int, queries: int, keys: int, least: float) -> None:
        self.inner = max(min(count, ROW) * (CELL + _GAP) - _GAP, least)
        self.height = max(min(CELL * queries / keys, 2 * CELL), CELL / 12)
        """To scale; at most twice the width, and never too thin to see."""
        self.body: list[str] = []
        self.top: float = _MARGIN + _LINE

    def write(self, text: str, weight: str = "normal", mark: Iterable[str] = ()) -> None:
        """A text below what there is, in as many lines as it needs, behind a mark if there is one."""
        self.body += mark
        indent = 20 if mark else 0
        for line in textwrap.wrap(text, int(self.inner // 7) - (3 if mark else 0)) or [""]:
            self._label(_MARGIN + indent, self.top, line, weight)
            self.top += _LINE

    def mark_at(self) -> tuple[float, float]:
        """The upper left corner of a mark before the next line."""
        return _MARGIN, self.top - 10

    def panels(self, headings: list[str], draw: Callable[[int, float, float], Iterable[str]]) -> None:
        """Panels with frames, and headings if these are not empty; `draw` gets a number and where it is."""
        for start in range(0, len(headings), ROW):
            self.top += _LINE if headings[start] else 0
            for place, heading in enumerate(headings[start : start + ROW]):
                left = _MARGIN + place * (CELL + _GAP)
                if heading:
                    self._label(left, self.top - 6, heading)
                self.body += draw(start + place, left, self.top)
                self.body.append(
                    f'<rect x="{left:g}" y="{self.top:g}" width="{CELL}" height="{self.height:.6g}" '
                    'fill="none" stroke="currentColor" stroke-opacity=".5"/>'
                )
            self.top += self.height + _GAP

    def _label(self, x: float, y: float, text: str, weight: str = "normal") -> None:
        self.body.append(
            f'<text x="{x:g}" y="{y:g}" fill="currentColor" font-weight="{weight}">{escape(text)}</text>'
        )

    def document(self, words: str, title: str) -> str:
        """The element. `words` describe it for those who do not see it."""
        name = "attngraph-" + hashlib.sha256("\0".join([title, *self.body]).encode()).hexdigest()[:10]
        width = self.inner + 2 * _MARGIN
        style = (
            f"#{name}{{color:var(--attngraph-ink,#24292f)}}"
            f"@media (prefers-color-scheme:dark){{#{name}{{color:var(--attngraph-ink,#e6edf3)}}}}"
        )
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" id="{name}" role="img" viewBox="0 0 {width:g} '
            f'{self.top:g}" width="{width:g}" style="max-width:100%;height:auto" '
            f'aria-labelledby="{name}-title {name}-desc" font-family="system-ui,sans-serif" font-size="12">',
            f'<title id="{name}-title">{escape(title)}</title>',
            f'<desc id="{name}-desc">{escape(clean(words))}</desc>',
            f"<style>{style}</style>",
            *self.body,
            "</svg>",
            "",
        ])  # fmt: skip


def clean(text: str) -> str:
    """The text without characters that XML does not allow."""
    return re.sub(
        r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]", "\N{REPLACEMENT CHARACTER}", text
    )
