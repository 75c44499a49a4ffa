"""The section that compares a report with an earlier one: the last graphs of both, side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from attngraph.report.entries import Entries
from attngraph.report.page.graphs import final_text
from attngraph.report.page.html import Html, joined, tag
from attngraph.report.page.passes import Store, render_texts


def render_compared(now: Sequence[Entries], earlier: Sequence[Entries], store: Store) -> Html:
    """A diff for each graph, in the order in which they were traced."""
    found: list[Html] = []
    several = max(len(now), len(earlier)) > 1
    for number, (new, old) in enumerate(itertools.zip_longest(now, earlier)):
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
