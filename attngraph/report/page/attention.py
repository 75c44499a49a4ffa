"""A panel for each distinct attention: what it computes, by which kernel, and what that costs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from attngraph.meaning.masks.words import remarks
from attngraph.report.entries import AttentionEntry, KernelEntry
from attngraph.report.page.code import render_excerpt
from attngraph.report.page.html import TIMES, Html, html, joined, plural, span_of_names, tag
from attngraph.report.page.source import render_source
from attngraph.report.picture import TileMap, tile_map, to_svg
from attngraph.report.times import Times, milliseconds
from attngraph.report.user_code import UserCode

_SIDE = 32
"""About how many tiles are drawn along a side of the picture."""
_KERNEL_TILE = 64
"""Queries, and keys, of the tiles that kernels skip."""
_MOST_HEADS = 16
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def panels(groups: Sequence[Sequence[AttentionEntry]]) -> dict[tuple[str, str] | str, str]:
    """The id of the panel of each attention, by its module and source."""
    return {(e.name, e.source): f"attention-{n}" for n, group in enumerate(groups) for e in group}


def render_attentions(
    groups: Sequence[Sequence[AttentionEntry]], code: UserCode, boxes: Mapping[str, str], times: Times | None
) -> Html:
    """Panels, one for each group of equal attentions; `boxes` are those of charts, by panel, `times` what was
    measured."""
    sources: dict[str, str] = {}
    return joined(
        _panel(list(group), f"attention-{n}", sources, code, boxes.get(f"attention-{n}", ""), times)
        for n, group in enumerate(groups)
    )


def _panel(group: list[AttentionEntry], name: str, sources: dict[str, str], code: UserCode, box: str,
    times: Times | None,
) -> Html:  # fmt: skip
    first = group[0]
    drawn = _tiles(first)
    count = f" {TIMES} {len(group)}" if len(group) > 1 else ""
    title = tag(
        "h3", f"attention{count}", tag("span", f" {first.caller or first.source}", class_="sub"), id=name
    )
    picture = (
        tag("p", drawn, class_="hint")
        if isinstance(drawn, str)
        else tag("div", _picture(drawn, f"{name}-mask"), class_="picture")
    )
    excerpt = render_excerpt(code.how(first.source, first.name), code)
    facts = tag(
        "dl",
        *(
            row
            for what, value in _facts(group, drawn, excerpt, times)
            for row in (tag("dt", what), tag("dd", value))
        ),
    )
    link = tag("p", tag("a", "Show it in the graph", href=f"#{box}"), class_="led") if box else ""
    program = joined([
        tag("h4", "Score program"),
        tag("pre", tag("code", first.program), tabindex=0, aria_label="score program", role="group"),
        *(tag("p", f"{remark}.", class_="hint") for remark in remarks(first.program)),
    ])  # fmt: skip
    body = tag("div", tag("div", program, picture), tag("div", facts, link), class_="columns")
    return tag(
        "article",
        title,
        body,
        render_kernel(first.kernel, name, sources),
        class_="panel",
        aria_labelledby=name,
    )


def _picture(drawn: TileMap, name: str) -> Html:
    """The mask's SVG. Equal pictures would have equal ids, and an id must occur only once in a page."""
    return Html(re.sub(r"\battngraph-[0-9a-f]{10}\b", name, to_svg(drawn, f"Mask: {drawn.mask}")))


def _facts(
    group: list[AttentionEntry], drawn: TileMap | str, excerpt: Html, times: Times | None
) -> Iterator[tuple[str, str]]:
    first = group[0]
    yield "Your line", joined([tag("code", first.caller or first.source or "not known"), excerpt])
    if first.caller and not excerpt:
        yield "It calls", tag("code", first.source)
    names = span_of_names([entry.name for entry in group])
    if names:
        yield ("Modules" if len(group) > 1 else "Module"), tag("code", names)
    yield "Heads", first.heads_in_words()
    if first.call is not None:
        call = first.call
        sizes = f"{plural(call.queries, 'query', 'queries')} and {plural(call.keys, 'key')}"
        yield "Traced call", f"{plural(call.batch, 'row')} of {sizes}, {call.dtype}"
    yield "Mask", first.mask
    if first.warning:
        yield "Look", first.warning
    if first.again:
        yield "Scores", first.again
    kernel = str(first.kernel)
    yield "Kernel", joined([kernel if " " in kernel else tag("code", kernel), f", {first.numerics}"])
    spent = None if times is None else times.of(group)
    if times is not None and spent is not None:
        count = f"{milliseconds(spent / len(group))} each, " if len(group) > 1 else ""
        yield "Measured", f"{count}{milliseconds(spent)} of {milliseconds(times.seconds)} of all operations"
    worst = max(entry.error for entry in group)
    yield "Checked", f"in float64 against the model's own ops: largest error {worst:.0e}"
    if first.merged > 1:
        yield "Merged", f"stands for {first.merged} attentions of the model"
    each = " each" if len(group) > 1 else ""
    if first.flops is not None:
        yield "Operations", f"{_count(first.flops)}FLOP{each} over all pairs{_share(first.flops, drawn)}"
    if first.bytes is not None and first.score_bytes is not None:
        floor = (
            f"{_bytes(first.bytes)}{each} at the least, fused: operands read once, the result written once. "
        )
        scores = f"Unfused, each matrix of scores is {_bytes(first.score_bytes)} more, and there are several."
        yield "Memory traffic", floor + scores
    if first.cached_bytes is not None:
        yield "Kept by a cache", f"{first.cached_bytes:,} bytes per token{each}"
    if first.latent is not None:
        yield "Latent", joined((html(line) for line in first.latent.lines()), "\n")


def _share(flops: int, drawn: TileMap | str) -> str:
    if isinstance(drawn, str):
        return ""
    left, filled = 1 - drawn.shares["empty"], drawn.shares["filled"]
    size = "pair by pair" if drawn.tile == 1 else f"in tiles of {drawn.tile} by {drawn.tile}"
    words = f"; {size}, {100 * left:.0f} % ({_count(flops * left)}FLOP) are not empty"
    if filled:
        words += (
            f", {100 * filled:.0f} % hidden by a finite fill, which a kernel may skip where it underflows"
        )
    return words


def _tiles(entry: AttentionEntry) -> TileMap | str:
    """The mask in tiles, or why there is none. A short call is drawn in smaller tiles than kernels have."""
    call = entry.call
    if call is None:
        return "No picture of the mask: the sizes of the call are not known."
    longest = max(call.queries, call.keys)
    tile = _KERNEL_TILE
    while tile > 1 and longest < tile * _SIDE // 2:
        tile //= 2
    while longest > tile * _SIDE * 16:
        tile *= 2
    try:
        heads = range(min(entry.heads, _MOST_HEADS))
        return tile_map(entry.program, call.queries, call.keys, tile, sizes=call.numbers, heads=heads)
    except (ValueError, IndexError) as problem:
        return f"No picture of the mask: {problem}"


def render_kernel(kernel: KernelEntry, name: str, sources: dict[str, str]) -> Html:
    """The source of a kernel; `sources` maps those already shown in a panel above to their ids."""
    if not kernel.source:
        chosen = " " in str(kernel) or not kernel.name
        words = (
            "The kernel is chosen at each call, so there is no one text of it."
            if chosen
            else f"There is no text of {kernel}: it is a library's, or the report was read from JSON."
        )
        return tag("p", words, class_="hint")
    above = sources.setdefault(kernel.source, f"{name}-source")
    if above != f"{name}-source":
        link = tag("a", "the same as above", href=f"#{above}")
        return tag("p", f"The source of {kernel} is ", link, ".", class_="hint")
    return render_source(kernel.name, kernel.source, f"{name}-source")


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g} "


def _bytes(number: float) -> str:
    unit = 0
    while number >= 1024 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:.3g} {_UNITS[unit]}" if number < 1000 else f"{number:,.0f} {_UNITS[unit]}"
