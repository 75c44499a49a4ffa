"""Benchmark results as a bar chart, a group of bars for each cell; needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Bars(NamedTuple):
    """What is drawn: `cells` has the number of each candidate, by cell; `log`: the axis is logarithmic."""

    title: str
    unit: str
    cells: Mapping[str, Mapping[str, float]]
    log: bool = False


def formats() -> list[str]:
    """How the name of a picture may end, without the dot."""
    canvas = importlib.import_module("matplotlib.backend_bases").FigureCanvasBase
    return sorted(canvas.get_supported_filetypes())


def draw(bars: Bars, path: Path) -> None:
    """Write the picture; the format follows the file's name.

    Raises:
        ModuleNotFoundError: matplotlib is not installed. ValueError: it does not support the format.
    """
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    names = list(dict.fromkeys(name for found in bars.cells.values() for name in found))
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.12 * len(bars.cells) * (len(names) + 1)))
    height = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        rows = [row for row, found in enumerate(bars.cells.values()) if name in found]
        values = [found[name] for found in bars.cells.values() if name in found]
        axes.barh([row + place * height for row in rows], values, height, label=name)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(bars.cells))], list(bars.cells), fontsize=7)
    axes.invert_yaxis()
    if bars.log:
        axes.set_xscale("log")
    axes.set_xlabel(bars.unit)
    axes.set_title(bars.title, fontsize=9)
    axes.legend(fontsize=7)
    figure.tight_layout()
    try:
        figure.savefig(path)
    finally:
        pyplot.close(figure)
