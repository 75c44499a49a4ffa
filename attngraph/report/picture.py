"""Masks drawn: a `TileMap` (`report/tile_map.py`) as text for a terminal, or as SVG for a page.

In both each kind of tile has a shape or a shade of its own, so that no colour is needed to tell them apart,
and there is a legend. The SVG is self-contained: no script, no font, no style of a page. It has a title and a
description for screen readers, and follows light and dark mode. A page that contains it may set
`--attngraph-ink` and `--attngraph-accent`.
"""

import hashlib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from html import escape

from attngraph.report.tile_map import STATES, Panel, Rows, State, TileMap, mask_map, tile_map

__all__ = ["STATES", "Panel", "State", "TileMap", "marks", "mask_map", "tile_map", "to_svg", "to_text"]

_BLOCKS: dict[State, str] = {"full": "█", "partial": "▒", "filled": "░", "empty": "·", "unknown": "?"}
_PLAIN: dict[State, str] = {"full": "#", "partial": "+", "filled": "-", "empty": ".", "unknown": "?"}
_COLORS: dict[State, str] = {"full": "34", "partial": "36", "filled": "35", "empty": "2", "unknown": "33"}
_NOT_XML = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")
_PANELS = 8
"""Most heads that are drawn; the others are only counted."""
_SIDE = 64
"""Most tiles along a side of a drawing; where there are more, tiles are joined."""


def marks(plain: bool = True) -> dict[State, str]:
    """The character that stands for each kind of tile."""
    return dict(_PLAIN if plain else _BLOCKS)


def to_text(
    drawn: TileMap, color: bool | None = None, plain: bool | None = None, columns: int | None = None
) -> str:
    """The map for a terminal, with a legend.

    Args:
        color: None: if standard output is a terminal and NO_COLOR is not set.
        plain: ASCII alone; None: if standard output's encoding has no block characters.
        columns: the longest line (at least 40); None: the terminal's width.
    """
    if color is None:
        is_dumb = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        color = sys.stdout.isatty() and not is_dumb
    plain = not _can_draw_blocks() if plain is None else plain
    columns = max(shutil.get_terminal_size((100, 24)).columns if columns is None else columns, 40)
    signs = marks(plain)
    shown = _fitting(drawn, min(_SIDE, columns - 2))
    wide = 2 if 2 * len(shown.rows[0]) + 2 <= columns else 1

    def cell(state: State, width: int) -> str:
        text = signs[state] * width
        return f"\x1b[{_COLORS[state]}m{text}\x1b[0m" if color else text

    def wrapped(text: str) -> list[str]:
        return [f"  {line}" for line in textwrap.wrap(text, columns - 2)]

    lines: list[str] = []
    for panel in shown.panels[:_PANELS]:
        lines += wrapped(_heading(panel)) if len(shown.panels) > 1 else []
        lines += ["  " + "".join(cell(state, wide) for state in row) for row in panel.rows]
    lines += [line for note in _notes(shown, "mark") for line in wrapped(note)]
    for state in shown.states():
        first, *rest = textwrap.wrap(shown.meaning(state), columns - 6)
        lines += [f"  {cell(state, 2)}  {first}", *(f"      {line}" for line in rest)]
    return "\n".join(lines)


def _can_draw_blocks() -> bool:
    try:
        "".join(_BLOCKS.values()).encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _fitting(drawn: TileMap, side: int) -> TileMap:
    """The same map with tiles joined so that no side has more than `side` of them."""
    most = max(len(drawn.rows), len(drawn.rows[0]))
    return drawn if most <= side else drawn.joined(-(-most // side))


def _heading(panel: Panel) -> str:
    more = f" and {len(panel.heads) - 6} more" if len(panel.heads) > 6 else ""
    return f"head {', '.join(map(str, panel.heads[:6]))}{more}"


def _notes(shown: TileMap, mark: str) -> list[str]:
    """What a reader needs besides the legend."""
    notes = [f"down: queries 0 to {shown.queries - 1}; across: keys 0 to {shown.keys - 1}"]
    if shown.tile > 1:
        notes.append(f"a {mark} is {shown.tile} queries by {shown.tile} keys")
    if len(shown.panels) > _PANELS:
        notes.append(f"heads that look different again: {len(shown.panels) - _PANELS}, not drawn")
    return notes


CELL, ROW = 240, 3
"""The width of a panel, in units of the SVG, and panels in one row."""
_GAP, _MARGIN, _LINE = 28, 12, 17
_NARROW = 336
"""The least width of an SVG: what a phone shows without scaling text down."""


def to_svg(drawn: TileMap, title: str = "") -> str:
    """The map as one self-contained SVG element.

    Args:
        title: what it shows; the mask in words if empty.
    """
    shown = _fitting(drawn, _SIDE)
    title = clean(title or f"Mask: {shown.mask}")
    panels = shown.panels[:_PANELS]
    sheet = Sheet(len(panels), shown.queries, shown.keys, _NARROW)
    sheet.write(title, "bold")
    headings = [_heading(panel) if len(panels) > 1 else "" for panel in panels]
    sheet.panels(headings, lambda n, left, top: _panel(panels[n].rows, left, top, sheet.height))
    for note in _notes(shown, "square"):
        sheet.write(note)
    for state in shown.states():
        sheet.write(clean(shown.meaning(state)), mark=_mark(state, [sheet.mark_at()], 11, 11))
    shares = ", ".join(f"{100 * share:.1f} % {state}" for state, share in shown.shares.items() if share)
    pieces = "pairs" if shown.tile == 1 else f"tiles of {shown.tile} by {shown.tile}"
    words = f"{shown.queries} queries and {shown.keys} keys in {pieces}: {shares}. Mask: {shown.mask}."
    return sheet.document(f"{words} Score program: {shown.program}", title)


def _panel(rows: Rows, left: float, top: float, height: float) -> Iterator[str]:
    width, tall = CELL / len(rows[0]), height / len(rows)
    for state in STATES:
        found = ((i, j) for i, row in enumerate(rows) for j, kind in enumerate(row) if kind == state)
        places = [(left + j * width, top + i * tall) for i, j in found]
        if places:
            yield _mark(state, places, width, tall)


def _mark(state: State, places: list[tuple[float, float]], width: float, height: float) -> str:
    """One path for all tiles of a kind: a square, a pale square, a dash, a dot or a cross."""
    w, h = width * 0.92, height * 0.92
    square, right, down = f"h{w:.4g}v{h:.4g}h{-w:.4g}z", f"{w / 2:.4g}", f"{h / 2:.4g}"
    cross = f"m{w / 4:.4g} {h / 4:.4g}l{right} {down}m0 -{down}l-{right} {down}"
    line = f'fill="none" stroke="currentColor" stroke-width="{min(w, h) / 6:.3g}"'
    accent = 'style="fill:var(--attngraph-accent,#3b7dd8)"'
    shape, ink = {
        "full": (square, accent),
        "partial": (square, f'{accent} fill-opacity=".45"'),
        "filled": (f"m{w * 0.2:.4g} {down}h{w * 0.6:.4g}", f'{line} stroke-opacity=".45"'),
        "empty": (f"m{right} {down}h.01", f'{line} stroke-linecap="round" stroke-opacity=".45"'),
        "unknown": (cross, f'{line} stroke-opacity=".8"'),
    }[state]
    path = "".join(f"M{x:.5g} {y:.5g}{shape}" for x, y in places)
    return f'<path class="{state}" {ink} d="{path}"/>'


class Sheet:
    """An SVG element as it is drawn from the top down: lines of text, and panels of one `height`."""

    def __init__(self, count: int, queries: int, keys: int, least: float) -> None:
        self.inner = max(min(count, ROW) * (CELL + _GAP) - _GAP, least)
        self.height = max(min(CELL * queries / keys, 2 * CELL), CELL / 12)
        """To scale; at most twice the width, and never too thin to see."""
        self.body: list[str] = []
        self.top: float = _MARGIN + _LINE

    def write(self, text: str, weight: str = "normal", mark: str = "") -> None:
        """A text below what there is, in as many lines as it needs, behind a mark if there is one."""
        self.body += [mark] * bool(mark)
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
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
