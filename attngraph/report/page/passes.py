"""The passes of a graph: what each did, how long it took, and the text before and after side by side; and a
report beside an earlier one: in numbers, which attentions came or went, and the last graphs.

What is not shown at first (folded lines, the text of a whole graph) is added by `page.js` from the texts that
are packed into the page (`Store`).
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from attngraph.report.entries import AttentionEntry, Entries, PassRecord
from attngraph.report.page import html as H
from attngraph.report.page.diff import Block, changed_words, compare
from attngraph.report.page.folding import Fold, Hunk, Store, fold
from attngraph.report.page.graphs import final_text, graph_title
from attngraph.report.page.html import MINUS, TIMES, Html, plural, repeated, span_of_names
from attngraph.report.page.layers import Line, read_lines

_MOST_NOTES = 6
"""Most notes of a pass that are shown at once."""


def render_passes(graphs: Sequence[Entries], store: Store) -> Html:
    """The passes of each graph, what searches them, and what the marks in them say."""
    if not graphs:
        return H.html("")
    lists = [
        H.tag("div", graph_title(graph, n, len(graphs)), _passes(graph, f"g{n}", store), class_="graph")
        for n, graph in enumerate(graphs)
    ]
    search = H.tag("input", type="search", id="search", autocomplete="off")
    controls = H.tag(
        "div",
        H.tag("label", "Search passes, their graphs and charts ", search),
        H.tag("label", H.tag("input", type="checkbox", id="unchanged"), " Show unchanged passes"),
        H.tag("button", "Open all", type="button", id="open-all", aria_expanded="false"),
        H.tag("p", "", role="status", id="found"),
        class_="controls", role="search", hidden=True,
    )  # fmt: skip
    legend = H.hint(
        "Lines are matched by what they compute, so that values which are only numbered anew count as ",
        f"equal. {MINUS} removed or was, + added or is; what differs within a line is ",
        H.tag("mark", "marked"), ". A line of yours (#) that is the same as above is not repeated.",
    )  # fmt: skip
    return H.joined([controls, legend, *lists])


def _passes(report: Entries, prefix: str, store: Store) -> Html:
    """The list of a graph's passes, the capture before them; `prefix` begins the ids of its elements."""
    found = []
    last, known = store.add_text(report.captured), read_lines(report.captured)
    if report.captured:
        ops = plural(report.passes[0].before, "op") if report.passes else ""
        spent = _duration(report.capture) if report.capture else ""
        told = "capture", "the graph as it was traced", ops, spent
        found.append(_item("capture", told, [_text(last, len(known))]))
    for number, record in enumerate(report.passes):
        body: list[Html] = []
        if record.text:
            lines, place = read_lines(record.text), store.add_text(record.text)
            title = f"The whole graph after this pass ({plural(len(lines), 'line')})"
            whole = H.tag("details", H.tag("summary", title), _text(place, len(lines)), class_="whole")
            body = [_diff(known, lines, (last, place), store), whole]
            last, known = place, lines
        found.append(_pass(record, f"{prefix}-pass-{number}", body))
    return H.tag("ol", *found, class_="passes")


def _item(kind: str, told: Sequence[str], inside: Sequence[Html], id: str | None = None) -> Html:
    """A stage, folded under a line that says its name, what it did, how many ops there are and the time."""
    words = zip(("name", "state", "count", "time"), told, strict=True)
    head = H.tag("summary", H.joined((H.tag("span", text, class_=of) for of, text in words), " "))
    return H.tag("li", H.tag("details", head, *inside, class_="pass"), id=id, data_kind=kind)


def _pass(record: PassRecord, name: str, body: list[Html]) -> Html:
    count = f"{record.before:,} → {record.after:,} ops" if record.changed else plural(record.after, "op")
    step = record.after - record.before
    if record.changed and step:
        count += f" ({'+' if step > 0 else MINUS}{abs(step):,})"
    said = []
    if record.options:
        said.append(H.tag("p", "Options: ", H.tag("code", record.options)))
    if record.notes:
        said.append(_notes(record.notes))
    if not record.changed:
        said.append(H.tag("p", "The graph is as it was before."))
    elif not body:
        said.append(H.tag("p", "The text of the graph is not part of this report."))
    kind, state = ("changed", "changed") if record.changed else ("unchanged", "no change")
    return _item(kind, (record.name, state, count, _duration(record.seconds)), [*said, *body], name)


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _notes(notes: Sequence[str]) -> Html:
    """The pass's notes, without repetitions."""
    counted = collections.Counter(notes)
    found = [note if n == 1 else f"{note} ({TIMES} {n})" for note, n in counted.items()]
    if len(found) <= _MOST_NOTES:
        return H.items(found, class_="notes")
    first, more = found[: _MOST_NOTES - 1], found[_MOST_NOTES - 1 :]
    folded = H.tag("details", H.tag("summary", f"{len(more)} more notes"), H.items(more, class_="notes"))
    return H.joined([H.items(first, class_="notes"), folded])


def _text(place: int, lines: int) -> Html:
    """Where a whole text will stand, filled when it is opened."""
    pending = H.tag("p", f"{plural(lines, 'line')}, shown by the page's script.", class_="pending")
    return H.tag("div", pending, class_="text", data_text=place)


def _diff(old: list[Line], new: list[Line], places: tuple[int, int], store: Store) -> Html:
    found = fold(compare(old, new), old, new)
    parts = [_hunk(p, old, new) if isinstance(p, Hunk) else _fold(p, places, store) for p in found]
    head = H.tag("div", H.tag("span", "before"), H.tag("span", "after"), class_="sides", aria_hidden="true")
    return H.tag("div", head, *parts, class_="diff", role="group", aria_label="the graph before and after")


def _fold(part: Fold, places: tuple[int, int], store: Store) -> Html:
    place = store.add_fold(*places, part.blocks)
    folded = {"class_": "fold", "aria_expanded": "false", "data_fold": str(place)}
    return H.tag("div", H.tag("button", part.words(), type="button", **folded))


def _hunk(hunk: Hunk, old: list[Line], new: list[Line]) -> Html:
    where = f"in {span_of_names(list(hunk.modules))}: " if hunk.modules else ""
    rows = (row for block in hunk.blocks for row in _rows(block, old, new))
    return H.tag("div", H.tag("p", where, hunk.words(), class_="where"), *rows, class_="hunk")


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
        return H.tag("div", H.tag("pre", *left, aria_hidden="true"), H.tag("pre", *right), class_="equal")
    words = ("was: ", "is: ") if kind == "changed" else ("removed: ", "added: ")
    heads = (H.tag("i", word, class_="vh") for word in words)
    both = zip(heads, (left, right), strict=True)
    sides = (H.tag("pre", head, *lines) if lines else H.tag("pre", class_="none") for head, lines in both)
    return H.tag("div", *sides, class_=kind)


def _lines(lines: Sequence[Line]) -> list[Html]:
    """Lines below each other. A note that the line above has too is not repeated, as in `page.js`."""
    found, note = [], ""
    for line in lines:
        is_module = line.code.startswith("  [")
        code = H.tag("b", line.code) if is_module else H.html(line.code)
        found.append(_line(dataclasses.replace(line, note="") if line.note == note else line, code))
        note = note if is_module or line.is_program else line.note
    return found


def _line(line: Line, code: Html) -> Html:
    return H.tag("span", code, H.tag("small", f"  # {line.note}") if line.note else "")


def _marked(pieces: list[tuple[str, bool]]) -> Html:
    return H.joined(H.tag("mark", text) if is_new else text for text, is_new in pieces)


def render_compared(
    now: Entries, earlier: Entries, graphs: Sequence[Entries], then: Sequence[Entries], store: Store
) -> Html:
    """Numbers of both reports, and a diff for each graph, in the order in which they were traced."""
    rows = zip(_counted(earlier), _counted(now), strict=True)
    counts = ((what, old, new) for (what, old), (_, new) in rows)
    found: list[Html] = [H.table(("", "Before", "Now"), counts, "numbers"), *_attentions(now, earlier)]
    several = max(len(graphs), len(then)) > 1
    for number, (new, old) in enumerate(itertools.zip_longest(graphs, then)):
        if several:
            found.append(H.tag("h3", f"Graph {number}"))
        if new is None or old is None:
            words = "This graph is there only now." if old is None else "This graph was there only earlier."
            found.append(H.tag("p", words))
        elif final_text(new) == final_text(old):
            found.append(H.tag("p", "The graph after all passes is the same."))
        else:
            places = (store.add_text(final_text(old)), store.add_text(final_text(new)))
            found.append(_diff(read_lines(final_text(old)), read_lines(final_text(new)), places, store))
    return H.joined(found)


def _counted(report: Entries) -> Iterator[tuple[str, str]]:
    yield "Attentions fused", f"{len(report.attention):,}"
    yield "Not fused", f"{len(report.missed):,}"
    yield "Operations", f"{report.passes[-1].after:,}" if report.passes else "not known"
    yield "Compiled in", f"{report.seconds:.2f} s"


def _attentions(now: Entries, earlier: Entries) -> Iterator[Html]:
    """Attentions that only one of the reports has: with another program, other heads or another kernel."""
    old, new = (collections.Counter(map(_kind, report.attention)) for report in (earlier, now))
    for words, some, others in (("Only before", old, new), ("Only now", new, old)):
        found = []
        for (heads, program, kernel), count in (some - others).items():
            of = f"attention{repeated(count)} of {heads}: "
            found.append(H.joined([of, H.tag("code", program), " by ", H.tag("code", kernel)]))
        if found:
            yield H.joined([H.tag("p", H.tag("strong", f"{words}:")), H.items(found)])


def _kind(entry: AttentionEntry) -> tuple[str, str, str]:
    """What makes attentions of two reports alike; their lines may have moved."""
    return entry.heads_in_words(), "; ".join(entry.program.splitlines()), str(entry.kernel)
