"""What a run prints: a table for each model, the floors of its tokens, and the cells that attngraph lost."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from workshop.bench.plot import Bars

OURS = "attngraph"
NOISE = 1.03
"""A cell is lost where the best of the others is faster by more than this."""


def text(results: Mapping[str, Any]) -> str:
    """The whole report, in Markdown."""
    about = results["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in results["packages"].items())
    lines = [
        f"{about['date']}, {about['processor']} ({', '.join(about['features'])}), {about['threads']} threads",
        f"{packages}; float32, random weights, medians in milliseconds",
    ]
    for model in results["models"].values():
        lines += ["", *_table(model)]
    lost = [line for model in results["models"].values() for line in _lost(model)]
    return "\n".join([*lines, "", *(lost or ["attngraph lost no cell."])])


def medians(cell: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of each candidate."""
    return {name: statistics.median(spent) * 1000 for name, spent in cell["seconds"].items() if spent}


def floor(model: Mapping[str, Any], cell: Mapping[str, Any]) -> float | None:
    """Milliseconds that reading the weights takes; None for a prompt, which reads them for many tokens."""
    if cell["kept"] is None:
        return None
    bandwidth: float = statistics.median(cell["bandwidth"])
    bytes_: int = model["bytes"]
    return bytes_ / bandwidth * 1000


def _table(model: Mapping[str, Any]) -> Iterator[str]:
    names = list(model["made"])
    yield "| | " + " | ".join(names) + " | floor | behind the best |"
    yield "|---" * (len(names) + 3) + "|"
    for title, cell in model["cells"].items():
        found, least = medians(cell), floor(model, cell)
        times = [f"{found[n]:.1f}" if n in found else "-" for n in names]
        shown = "" if least is None else f"{least:.1f}"
        yield f"| {title} | " + " | ".join(times) + f" | {shown} | {_behind(found)} |"
    made = [f"{seconds:.1f} s" for seconds in model["made"].values()]
    yield "| compiling or converting | " + " | ".join(made) + " | | |"
    first = [f"{sum(c['first'].get(n, 0.0) for c in model['cells'].values()):.1f} s" for n in names]
    yield "| first calls, caches filled | " + " | ".join(first) + " | | |"
    yield ""
    read = [b for cell in model["cells"].values() for b in cell["bandwidth"]]
    yield (
        f"The floor is {model['bytes'] / 1e6:.0f} MB of weights at the bandwidth that was measured beside "
        f"each cell: {min(read) / 1e9:.1f} to {max(read) / 1e9:.1f} GB/s."
    )
    for name, reason in model["left out"].items():
        yield f"{name} is left out: {reason}."
    for title, cell in model["cells"].items():
        for name, reason in cell["problems"].items():
            yield f"{title}: no figure for {name}: {reason}."


def _behind(found: Mapping[str, float]) -> str:
    best = min((spent for name, spent in found.items() if name != OURS), default=None)
    if OURS not in found or best is None:
        return ""
    return "ahead" if found[OURS] <= best else f"{found[OURS] / best:.2f}"


def _lost(model: Mapping[str, Any]) -> Iterator[str]:
    for title, cell in model["cells"].items():
        found = medians(cell)
        others = {name: spent for name, spent in found.items() if name != OURS}
        if OURS not in found:
            yield f"LOST: {title}: attngraph has no figure."
        elif others and found[OURS] > NOISE * min(others.values()):
            best = min(others, key=others.__getitem__)
            yield (
                f"LOST: {title}: attngraph takes {found[OURS]:.1f} ms, {best} {others[best]:.1f} ms "
                f"({found[OURS] / others[best]:.2f} times as long)."
            )


def bars(results: Mapping[str, Any]) -> Bars:
    """The times of all cells as multiples of attngraph's, from what `--json` writes; floors are a bar too."""
    cells: dict[str, dict[str, float]] = {}
    for model in results["models"].values():
        for title, cell in model["cells"].items():
            found, least = medians(cell), floor(model, cell)
            if least is not None:
                found["floor"] = least
            if OURS in found:
                cells[title] = {name: spent / found[OURS] for name, spent in found.items()}
    about = results["machine"]
    title = f"{about['processor']} ({', '.join(about['features'])}), {about['threads']} threads"
    return Bars(title, "times as long as attngraph", cells)
