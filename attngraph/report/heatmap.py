"""Heatmaps of attention weights (`compiled.weights`): as SVG, for a file or the page, and as text.

A square stands for some queries and keys, and is as dark as the largest weight among them, on a scale that
all heads share. Weights that are not a number (a query that sees no key) are crossed. The SVG is
self-contained (`picture.Sheet`).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attngraph.report.picture import CELL, Sheet, clean

SIDE = 48
"""Most squares along a side of a picture."""
HEADS = 8
"""Most heads that are drawn; the others are only counted."""
LEVELS = 12
"""Shades, blank not counted."""
_SHADES = " .:-=+*#%@"


@dataclasses.dataclass(frozen=True)
class Heatmap:
    """Weights joined to squares: `values` is `[heads, rows, columns]`; a square has `tall` queries and `wide`
    keys; `heads` says how many heads there are, `largest` is the largest weight of those drawn."""

    values: Tensor = dataclasses.field(repr=False)
    queries: int
    keys: int
    heads: int
    tall: int
    wide: int
    largest: float

    def notes(self) -> list[str]:
        """What a reader needs besides the picture."""
        found = [
            f"down: {self.queries} queries; across: {self.keys} keys",
            f"darkest: {self.largest:.3g}, the largest weight; blank: 0",
        ]
        if self.tall * self.wide > 1:
            found.append(f"a square is the largest weight of {self.tall} by {self.wide} (queries by keys)")
        if self.values.isnan().any():
            found.append("crossed: not a number, as where a query sees no key")
        if self.heads > len(self.values):
            found.append(f"{self.heads - len(self.values)} more heads are not drawn")
        return found


def heatmap(weights: Tensor, side: int = SIDE) -> Heatmap:
    """The squares of `[heads, queries, keys]`, or of the first row of `[rows, heads, queries, keys]`.

    Raises:
        ValueError: another shape, or nothing to draw.
    """
    if weights.ndim == 4:
        weights = weights[:1].flatten(0, 1)
    if weights.ndim != 3 or 0 in weights.shape:
        shape = tuple(weights.shape)
        raise ValueError(f"a heatmap needs weights [rows, heads, queries, keys], found {shape}.")
    heads, queries, keys = weights.shape
    tall, wide = math.ceil(queries / side), math.ceil(keys / side)
    shown = weights[:HEADS].detach().to("cpu", torch.float32)
    values = torch.nn.functional.max_pool2d(shown, (tall, wide), ceil_mode=True)  # NaN where any is NaN
    known = values[~values.isnan()]
    return Heatmap(values, queries, keys, heads, tall, wide, float(known.max()) if known.numel() else 0.0)


def to_svg(weights: Tensor, title: str = "") -> str:
    """The heatmap as one self-contained SVG element. `title`: whose weights, such as "h.0.attn"."""
    drawn = heatmap(weights)
    title, count = clean(title or "Attention weights"), len(drawn.values)
    sheet = Sheet(max(count, 2), drawn.queries, drawn.keys, 0)
    sheet.write(title, "bold")
    headings = [f"head {head}" for head in range(count)]
    sheet.panels(headings, lambda head, left, top: _panel(drawn, head, left, top, sheet.height))
    for note in drawn.notes():
        sheet.write(note)
    words = f"Attention weights of {drawn.heads} heads. {'. '.join(drawn.notes())}."
    return sheet.document(words, title)


def _panel(drawn: Heatmap, head: int, left: float, top: float, height: float) -> Iterator[str]:
    """One path for each shade; neighbours of a shade in a row are one rectangle."""
    values = drawn.values[head]
    wide, tall = CELL / values.shape[1], height / values.shape[0]
    paths: dict[int, list[str]] = {}
    for i, row in enumerate(_shades(values, drawn.largest, LEVELS)):
        x = 0
        for shade, same in itertools.groupby(row):
            length = len(list(same))
            at = f"M{left + x * wide:.5g} {top + i * tall:.5g}"
            if shade < 0:
                cross = f"l{wide:.4g} {tall:.4g}m0 {-tall:.4g}l{-wide:.4g} {tall:.4g}"
                paths.setdefault(shade, []).append(at + f"m{wide:.4g} {-tall:.4g}".join([cross] * length))
            elif shade:
                box = f"{at}h{length * wide:.5g}v{tall:.4g}h{-length * wide:.5g}z"
                paths.setdefault(shade, []).append(box)
            x += length
    for shade, parts in sorted(paths.items()):
        ink = f'style="fill:var(--attngraph-accent,#3b7dd8)" fill-opacity="{shade / LEVELS:.3g}"'
        cross = 'fill="none" stroke="currentColor" stroke-width=".5" stroke-opacity=".6"'
        yield f'<path {cross if shade < 0 else ink} d="{"".join(parts)}"/>'


def _shades(values: Tensor, largest: float, levels: int) -> list[list[int]]:
    """The shade of each square: 0 for weights of 0 alone, so that what is hidden and what is small differ;
    -1 for what is no number."""
    found = (values / (largest or 1) * levels).round()
    shades: list[list[int]] = torch.where(values > 0, found.clamp_min(1), found).nan_to_num(-1).int().tolist()
    return shades


def to_text(weights: Tensor, side: int = 32) -> str:
    """The heatmap for a terminal, in characters of growing weight."""
    drawn = heatmap(weights, side)
    lines = []
    for head, values in enumerate(drawn.values):
        lines.append(f"head {head}")
        for row in _shades(values, drawn.largest, len(_SHADES) - 1):
            lines.append("  " + "".join("??" if n < 0 else _SHADES[n] * 2 for n in row))
    legend = f"{_SHADES.strip()} from small to large"
    return "\n".join([*lines, *(f"  {note}" for note in [*drawn.notes(), legend])])
