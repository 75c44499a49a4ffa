"""The passes of one graph: what each did, how long it took, and the text before and after side by side.

What is not shown at first (folded lines, the text of a whole graph) is added by `page.js` from the texts that
are packed into the page (`Store`).
"""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from attngraph.report.entries import Entries, PassRecord
from attngraph.report.page.diff import Block, changed_words, compare
from attngraph.report.page.folding import Fold, Hunk, fold
from attngraph.report.page.html import MINUS, TIMES, Html, html, joined, plural, span_of_names, tag
from attngraph.report.page.layers import Line, read_lines

_KINDS = {"equal": 0, "changed": 1, "replaced": 2}


@dataclasses.dataclass
class Store:
    """What `page.js` shows on demand: texts of graphs, the blocks of each fold between two of them, and the
    user's code of each graph."""

    texts: list[str] = dataclasses.field(default_factory=list)
    code: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    folds: list[tuple[int, int, list[list[int]]]] = dataclasses.field(default_factory=list)

    def add_text(self, text: str) -> int:
        self.texts.append(text)
        return len(self.texts) - 1

    def add_fold(self, old: int, new: int, blocks: Sequence[Block]) -> int:
        self.folds.append((old, new, [[_KINDS[b.kind], b.a, b.b, b.c, b.d] for b in blocks]))
        return len(self.folds) - 1

    def packed(self) -> str:
        """JSON, deflated, in base64, whose characters have no meaning in HTML."""
        data = json.dumps(dataclasses.asdict(self), separators=(",", ":"))
        return base64.b64encode(zlib.compress(data.encode("utf-8", "replace"), 9)).decode("ascii")


def render_passes(report: Entries, prefix: str, store: Store) -> Html:
    """The list of a graph's passes, the capture before them; `prefix` begins the ids of its elements."""
    items = []
    last, known = store.add_text(report.captured), read_lines(report.captured)
    if report.captured:
        items.append(_capture(report, last))
    for number, record in enumerate(report.passes):
        body: list[Html] = []
        if record.text:
            lines, place = read_lines(record.text), store.add_text(record.text)
            body = [
                _diff(known, lines, (last, place), store),
                _whole(place, "The whole graph after this pass", len(lines)),
            ]
            last, known = place, lines
        items.append(_pass(record, f"{prefix}-pass-{number}", body))
    return tag("ol", *items, class_="passes")


def _capture(report: Entries, place: int) -> Html:
    ops = plural(report.passes[0].before, "op") if report.passes else ""
    lines = report.captured.count("\n") + 1
    head = tag(
        "summary", tag("span", "capture", class_="name"), " ",
        tag("span", "the graph as it was traced", class_="state"), " ", tag("span", ops, class_="count"), " ",
        tag("span", _duration(report.capture) if report.capture else "", class_="time"),
    )  # fmt: skip
    return tag("li", tag("details", head, _text(place, lines), class_="pass"), data_kind="capture")


def _pass(record: PassRecord, name: str, body: list[Html]) -> Html:
    state = "changed" if record.changed else "no change"
    count = f"{record.before:,} → {record.after:,} ops" if record.changed else plural(record.after, "op")
    step = record.after - record.before
    if record.changed and step:
        count += f" ({'+' if step > 0 else MINUS}{abs(step):,})"
    head = tag(
        "summary", tag("span", record.name, class_="name"), " ", tag("span", state, class_="state"), " ",
        tag("span", count, class_="count"), " ", tag("span", _duration(record.seconds), class_="time"),
    )  # fmt: skip
    said = []
    if record.options:
        said.append(tag("p", "Options: ", tag("code", record.options)))
    if record.notes:
        said.append(_notes(record.notes))
    if not record.changed:
        said.append(tag("p", "The graph is as it was before."))
    elif not body:
        said.append(tag("p", "The text of the graph is not part of this report."))
    kind = "changed" if record.changed else "unchanged"
    return tag("li", tag("details", head, *said, *body, class_="pass"), id=name, data_kind=kind)


def _notes(notes: Sequence[str]) -> Html:
    """The pass's notes, without repetitions."""
    counted: dict[str, int] = {}
    for note in notes:
        counted[note] = counted.get(note, 0) + 1
    items = [tag("li", note if n == 1 else f"{note} ({TIMES} {n})") for note, n in counted.items()]
    if len(items) <= 6:
        return tag("ul", *items, class_="notes")
    more = tag(
        "details", tag("summary", f"{len(items) - 5} more notes"), tag("ul", *items[5:], class_="notes")
    )
    return joined([tag("ul", *items[:5], class_="notes"), more])


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _whole(place: int, title: str, lines: int) -> Html:
    return tag(
        "details", tag("summary", f"{title} ({plural(lines, 'line')})"), _text(place, lines), class_="whole"
    )


def _text(place: int, lines: int) -> Html:
    """Where a whole text will stand, filled when it is opened."""
    return tag(
        "div", tag("p", f"{plural(lines, 'line')}, shown by the page's script.", class_="pending"),
        class_="text", data_text=place,
    )  # fmt: skip


def render_texts(old: str, new: str, store: Store) -> Html:
    """The differences of two graphs' texts."""
    places = (store.add_text(old), store.add_text(new))
    return _diff(read_lines(old), read_lines(new), places, store)


def _diff(old: list[Line], new: list[Line], places: tuple[int, int], store: Store) -> Html:
    found = fold(compare(old, new), old, new)
    parts = [
        _hunk(part, old, new) if isinstance(part, Hunk) else _fold(part, places, store) for part in found
    ]
    head = tag("div", tag("span", "before"), tag("span", "after"), class_="sides", aria_hidden="true")
    return tag("div", head, *parts, class_="diff", role="group", aria_label="the graph before and after")


def _fold(part: Fold, places: tuple[int, int], store: Store) -> Html:
    number = store.add_fold(*places, part.blocks)
    return tag(
        "div",
        tag("button", part.words(), type="button", class_="fold", aria_expanded="false", data_fold=number),
    )


def _hunk(hunk: Hunk, old: list[Line], new: list[Line]) -> Html:
    where = f"in {span_of_names(list(hunk.modules))}: " if hunk.modules else ""
    return tag(
        "div", tag("p", where, hunk.words(), class_="where"),
        *(row for block in hunk.blocks for row in _rows(block, old, new)), class_="hunk",
    )  # fmt: skip


def _rows(block: Block, old: list[Line], new: list[Line]) -> Iterator[Html]:
    if block.kind == "changed":
        for i, j in zip(range(block.a, block.b), range(block.c, block.d), strict=True):
            left, right = changed_words(old[i], new[j])
            yield _row("changed", [_line(old[i], _marked(left))], [_line(new[j], _marked(right))])
        return
    yield _row(block.kind, _lines(old[block.a : block.b]), _lines(new[block.c : block.d]))


def _row(kind: str, left: list[Html], right: list[Html]) -> Html:
    """Lines of both sides. Screen readers read equal ones once."""
    if kind == "equal":
        return tag("div", tag("pre", *left, aria_hidden="true"), tag("pre", *right), class_="equal")
    words = ("was: ", "is: ") if kind == "changed" else ("removed: ", "added: ")
    sides = [
        tag("pre", tag("i", word, class_="vh"), *lines) if lines else tag("pre", class_="none")
        for word, lines in zip(words, (left, right), strict=True)
    ]
    return tag("div", *sides, class_=kind)


def _lines(lines: Sequence[Line]) -> list[Html]:
    """Lines below each other. A note that the line above has too is not repeated, as in `page.js`."""
    found, note = [], ""
    for line in lines:
        is_module = line.code.startswith("  [")
        code = tag("b", line.code) if is_module else html(line.code)
        found.append(_line(dataclasses.replace(line, note="") if line.note == note else line, code))
        note = note if is_module or line.is_program else line.note
    return found


def _line(line: Line, code: Html) -> Html:
    return tag("span", code, tag("small", f"  # {line.note}") if line.note else "")


def _marked(pieces: list[tuple[str, bool]]) -> Html:
    return joined(tag("mark", text) if is_new else text for text, is_new in pieces)
