"""The weights of attentions as heatmaps, if some were given with the report."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from attngraph.report.heatmap import to_svg
from attngraph.report.page.html import Html, tag, visible


def render_weights(weights: Mapping[str, Tensor]) -> Html:
    """A panel for each attention: the heads of its first row."""
    panels = (_panel(name, given, number) for number, (name, given) in enumerate(weights.items()))
    return tag("div", *panels, class_="maps")


def _panel(name: str, weights: Tensor, number: int) -> Html:
    own = f"weights-{number}"
    # Equal pictures would have equal ids, and an id must occur only once in a page.
    drawn = re.sub(r"\battngraph-[0-9a-f]{10}\b", f"{own}-map", to_svg(weights, visible(name)))
    several = weights.ndim == 4 and len(weights) > 1
    note = [tag("p", f"The first of {len(weights):,} rows.", class_="hint")] if several else []
    title = tag("h3", name, id=own, class_="vh")  # the picture has it too
    return tag("article", title, *note, tag("div", Html(drawn)), class_="panel", aria_labelledby=own)
