"""The section that compares a report with an earlier one: in numbers, which attentions came or went, and the
last graphs of both side by side.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence

from attngraph.report.entries import AttentionEntry, Entries
from attngraph.report.page.graphs import final_text
from attngraph.report.page.html import TIMES, Html, joined, tag
from attngraph.report.page.passes import Store, render_texts


def render_compared(
    now: Entries, earlier: Entries, graphs: Sequence[Entries], then: Sequence[Entries], store: Store
) -> Html:
    """Numbers of both reports, and a diff for each graph, in the order in which they were traced."""
    found: list[Html] = [_numbers(now, earlier), *_attentions(now, earlier)]
    several = max(len(graphs), len(then)) > 1
    for number, (new, old) in enumerate(itertools.zip_longest(graphs, then)):
        if several:
            found.append(tag("h3", f"Graph {number}"))
        if new is None or old is None:
            words = "This graph is there only now." if old is None else "This graph was there only earlier."
            found.append(tag("p", words))
        elif final_text(new) == final_text(old):
            found.append(tag("p", "The graph after all passes is the same."))
        else:
            found.append(render_texts(final_text(old), final_text(new), store))
    return joined(found)


def _numbers(now: Entries, earlier: Entries) -> Html:
    """What can be counted, before and now."""
    rows = zip(_counted(earlier), _counted(now), strict=True)
    head = tag("tr", *(tag("th", name, scope="col") for name in ("", "Before", "Now")))
    body = (
        tag("tr", tag("th", what, scope="row"), tag("td", old), tag("td", new))
        for (what, old), (_, new) in rows
    )
    return tag("table", tag("thead", head), tag("tbody", *body), class_="numbers")


def _counted(report: Entries) -> Iterator[tuple[str, str]]:
    yield "Attentions fused", f"{len(report.attention):,}"
    yield "Not fused", f"{len(report.missed):,}"
    yield "Operations", f"{report.passes[-1].after:,}" if report.passes else "not known"
    yield "Compiled in", f"{report.seconds:.2f} s"


def _attentions(now: Entries, earlier: Entries) -> Iterator[Html]:
    """Attentions that only one of the reports has: with another program, other heads or another kernel."""
    old, new = (collections.Counter(map(_kind, report.attention)) for report in (earlier, now))
    for words, some, others in (("Only before", old, new), ("Only now", new, old)):
        items = [tag("li", *_told(kind, count)) for kind, count in (some - others).items()]
        if items:
            yield joined([tag("p", tag("strong", f"{words}:")), tag("ul", *items)])


def _kind(entry: AttentionEntry) -> tuple[str, str, str]:
    """What makes attentions of two reports alike; their lines may have moved."""
    return entry.heads_in_words(), "; ".join(entry.program.splitlines()), str(entry.kernel)


def _told(kind: tuple[str, str, str], count: int) -> tuple[str, ...]:
    heads, program, kernel = kind
    times = f" {TIMES} {count}" if count > 1 else ""
    return f"attention{times} of {heads}: ", tag("code", program), " by ", tag("code", kernel)
