"""Panels: for each distinct attention what it computes, by which kernel, and what that costs; for each token
program what it computes, and by which kernel."""

from collections.abc import Iterator, Mapping, Sequence

from attngraph.meaning.masks.words import remarks
from attngraph.report.account import Times
from attngraph.report.entries import AttentionEntry, KernelEntry, TokenProgramEntry
from attngraph.report.page import html as H
from attngraph.report.page.code import render_excerpt, render_source
from attngraph.report.page.html import Html, picture, plural, repeated
from attngraph.report.picture import TileMap, tile_map, to_svg
from attngraph.report.user_code import UserCode
from attngraph.report.words import milliseconds, operations, short_binary

_SIDE = 32
"""About how many tiles are drawn along a side of the picture."""
_KERNEL_TILE = 64
"""Queries, and keys, of the tiles that kernels skip."""
_MOST_HEADS = 16
Groups = Sequence[list[AttentionEntry]]
_PROGRAMS = (
    "Between two attentions each token is computed by itself: all of that is one operation, a program of "
    "single elements."
)


def panels(groups: Groups, programs: Sequence[TokenProgramEntry]) -> dict[tuple[str, str] | str, str]:
    """The id of the panel of each attention, by its module and source, and of each program, by its text."""
    found: dict[tuple[str, str] | str, str] = {e.program: f"program-{n}" for n, e in enumerate(programs)}
    found.update({(e.name, e.source): f"attention-{n}" for n, group in enumerate(groups) for e in group})
    return found


def render_attentions(groups: Groups, code: UserCode, boxes: Mapping[str, str], times: Times | None) -> Html:
    """Panels, one for each group of equal attentions; `boxes` are those of charts, by panel, `times` what was
    measured."""
    sources, found = dict[str, str](), list[Html]()
    for name, group in ((f"attention-{n}", group) for n, group in enumerate(groups)):
        first, drawn = group[0], _tiles(group[0])
        if isinstance(drawn, str):
            shown = H.hint(drawn)
        else:
            svg = to_svg(drawn, f"Mask: {drawn.mask}")
            shown = H.tag("div", picture(svg, f"{name}-mask"), class_="picture")
        excerpt = render_excerpt(code.how(first.source, first.name), code)
        facts = _facts(group, drawn, excerpt, times)
        told = H.tag("dl", *(row for what, value in facts for row in (H.tag("dt", what), H.tag("dd", value))))
        program = H.tag("h4", "Score program"), H.listing("score program", H.tag("code", first.program))
        columns = (
            H.tag("div", *program, *(H.hint(f"{remark}.") for remark in remarks(first.program)), shown),
            H.tag("div", told, _led(boxes, name)),
        )
        title = H.heading(name, f"attention{repeated(len(group))}", first.caller or first.source)
        body = H.tag("div", *columns, class_="columns")
        found.append(H.panel(name, title, body, _kernel(first.kernel, name, sources)))
    return H.joined(found)


def render_programs(programs: Sequence[TokenProgramEntry], boxes: Mapping[str, str]) -> Html:
    """Panels of token programs; `boxes` as above."""
    if not programs:
        return H.html("")
    sources: dict[str, str] = {}
    found = [H.hint(_PROGRAMS)]
    for name, entry in ((f"program-{n}", entry) for n, entry in enumerate(programs)):
        names = H.span_of_names(list(entry.names))
        title = H.heading(name, f"token program{repeated(len(entry.names))}", names)
        text = H.listing("token program", H.tag("code", entry.program), class_="program")
        found.append(H.panel(name, title, text, _led(boxes, name), _kernel(entry.kernel, name, sources)))
    return H.joined(found)


def _led(boxes: Mapping[str, str], name: str) -> str:
    """A link to the box of a chart."""
    if name not in boxes:
        return ""
    return H.tag("p", H.tag("a", "Show it in the graph", href=f"#{boxes[name]}"), class_="led")


def _facts(
    group: list[AttentionEntry], drawn: TileMap | str, excerpt: Html, times: Times | None
) -> Iterator[tuple[str, str]]:
    first = group[0]
    yield "Your line", H.joined([H.tag("code", first.caller or first.source or "not known"), excerpt])
    if first.caller and not excerpt:
        yield "It calls", H.tag("code", first.source)
    names = H.span_of_names([entry.name for entry in group])
    if names:
        yield ("Modules" if len(group) > 1 else "Module"), H.tag("code", names)
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
    yield "Kernel", H.joined([kernel if " " in kernel else H.tag("code", kernel), f", {first.numerics}"])
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
        yield "Operations", f"{operations(first.flops)}FLOP{each} over all pairs{_share(first.flops, drawn)}"
    if first.bytes is not None and first.score_bytes is not None:
        least, scores = short_binary(first.bytes), short_binary(first.score_bytes)
        floor = f"{least}{each} at the least, fused: operands read once, the result written once. "
        more = f"Unfused, each matrix of scores is {scores} more, and there are several."
        yield "Memory traffic", floor + more
    if first.cached_bytes is not None:
        yield "Kept by a cache", f"{first.cached_bytes:,} bytes per token{each}"
    if first.latent is not None:
        yield "Latent", H.joined((H.html(line) for line in first.latent.lines()), "\n")


def _share(flops: int, drawn: TileMap | str) -> str:
    if isinstance(drawn, str):
        return ""
    left, filled = 1 - drawn.shares["empty"], drawn.shares["filled"]
    size = "pair by pair" if drawn.tile == 1 else f"in tiles of {drawn.tile} by {drawn.tile}"
    words = f"; {size}, {100 * left:.0f} % ({operations(flops * left)}FLOP) are not empty"
    fill = f", {100 * filled:.0f} % hidden by a finite fill, which a kernel may skip where it underflows"
    return words + fill if filled else words


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


def _kernel(kernel: KernelEntry, name: str, sources: dict[str, str]) -> Html:
    """The source of a kernel; `sources` maps those already shown in a panel above to their ids."""
    if not kernel.source and (" " in str(kernel) or not kernel.name):
        return H.hint("The kernel is chosen at each call, so there is no one text of it.")
    if not kernel.source:
        return H.hint(f"There is no text of {kernel}: it is a library's, or the report was read from JSON.")
    above = sources.setdefault(kernel.source, f"{name}-source")
    if above != f"{name}-source":
        return H.hint(f"The source of {kernel} is ", H.tag("a", "the same as above", href=f"#{above}"), ".")
    return render_source(kernel.name, kernel.source, f"{name}-source")
