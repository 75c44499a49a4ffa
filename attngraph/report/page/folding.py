"""What of a diff is shown at once, and what is folded behind a button.

Changes are shown with a few lines around them. Long equal stretches are folded, and so is a layer that
changed just as an earlier one did: of 61 equal layers one is shown. Folded lines are line numbers in
the texts that are packed into the page.
"""

import base64
import dataclasses
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attngraph.report.page.diff import Block, joined
from attngraph.report.page.html import plural, span_of_names
from attngraph.report.page.layers import Line, shape_of, stretches
from attngraph.report.words import alike

_AROUND = 3
"""Equal lines shown before and after a change."""
_LEAST_FOLDED = 4
"""The fewest equal lines that are folded."""
_MOST_SHOWN = 1200
"""Most lines of one diff that are shown at once."""
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


@dataclasses.dataclass(frozen=True)
class Hunk:
    """Changes and the lines around them, and the modules of the lines that changed."""

    blocks: tuple[Block, ...]
    modules: tuple[str, ...]

    def words(self) -> str:
        """`16 lines removed, 20 added`."""
        changed = sum(b.b - b.a for b in self.blocks if b.kind == "changed")
        removed = sum(b.b - b.a for b in self.blocks if b.kind == "replaced")
        added = sum(b.d - b.c for b in self.blocks if b.kind == "replaced")
        counts = ((changed, "changed"), (removed, "removed"), (added, "added"))
        found = [f"{plural(n, 'line')} {word}" for n, word in counts if n][:1]
        found += [f"{n:,} {word}" for n, word in counts if n][1:]
        return ", ".join(found)


@dataclasses.dataclass(frozen=True)
class Fold:
    """Folded lines: `repeated` are the layers among them that changed as an earlier one did, `changed` how
    many other lines changed."""

    blocks: tuple[Block, ...]
    repeated: tuple[str, ...] = ()
    changed: int = 0

    @property
    def lines(self) -> int:
        return sum(block.lines for block in self.blocks)

    def words(self) -> str:
        if self.repeated:
            again = f"the same change in {span_of_names(list(self.repeated))}"
            again += f" ({len(self.repeated)} more times)" if len(self.repeated) > 1 else ""
            return f"{plural(self.lines, 'line')}: {again}"
        if self.changed:
            return f"{plural(self.lines, 'more line')}, {self.changed:,} of them changed"
        return plural(self.lines, "equal line")


@dataclasses.dataclass(frozen=True)
class _Part:
    block: Block
    layer: str
    hidden: bool = False


def fold(blocks: Sequence[Block], old: Sequence[Line], new: Sequence[Line]) -> list[Hunk | Fold]:
    """The diff as it is shown: hunks, and what is folded between them, in order."""
    parts = list(_with_context([*_without_repeated_layers(_by_layer(blocks, old, new), old, new)]))
    shown, found = 0, []
    for part in parts:
        shown += 0 if part.hidden else part.block.lines
        found.append(dataclasses.replace(part, hidden=part.hidden or shown > _MOST_SHOWN))
    repeated = {p.layer for p in parts if p.hidden and p.layer and p.block.kind != "equal"}
    return list(_grouped(found, repeated, old, new))


def _by_layer(blocks: Iterable[Block], old: Sequence[Line], new: Sequence[Line]) -> Iterator[_Part]:
    """Blocks cut where a layer begins. A replaced one belongs to the layer it begins in."""
    for block in blocks:
        if block.kind == "replaced":
            yield _Part(block, new[block.c].layer if block.c < block.d else old[block.a].layer)
            continue
        for layer, start, stop in stretches(line.layer for line in new[block.c : block.d]):
            yield _Part(block.cut(start, stop), layer)


def _without_repeated_layers(
    parts: Iterable[_Part], old: Sequence[Line], new: Sequence[Line]
) -> Iterator[_Part]:
    seen: set[object] = set()
    for layer, group in alike(parts, lambda part: part.layer):
        hidden = False
        if layer and any(p.block.kind != "equal" for p in group):
            form = (
                tuple((p.block.kind, p.block.lines) for p in group),
                shape_of([line.code for p in group for line in old[p.block.a : p.block.b]], layer),
                shape_of([line.code for p in group for line in new[p.block.c : p.block.d]], layer),
            )
            hidden = form in seen
            seen.add(form)
        yield from (dataclasses.replace(p, hidden=hidden) for p in group)


def _with_context(parts: list[_Part]) -> Iterator[_Part]:
    """Show equal lines only near a change that is shown."""
    for place, part in enumerate(parts):
        if part.block.kind != "equal" or part.hidden:
            yield part
            continue
        before, after, size = _near(parts, place, -1), _near(parts, place, 1), part.block.lines
        is_between = (before or place == 0) and (after or place == len(parts) - 1)
        if is_between and before + after and size < before + after + _LEAST_FOLDED:
            yield part
            continue
        ends = (0, before, size - after, size)
        for (start, stop), hidden in zip(itertools.pairwise(ends), (False, True, False), strict=True):
            if start < stop:
                yield _Part(part.block.cut(start, stop), part.layer, hidden)


def _near(parts: list[_Part], place: int, step: int) -> int:
    """How many lines at one end of an equal part are near a change that is shown."""
    left = _AROUND
    while 0 <= place + step < len(parts) and left > 0:
        place += step
        part = parts[place]
        if part.hidden:
            return 0
        if part.block.kind != "equal":
            return left
        left -= part.block.lines
    return 0


def _grouped(
    parts: list[_Part], repeated: set[str], old: Sequence[Line], new: Sequence[Line]
) -> Iterator[Hunk | Fold]:
    for hidden, group in alike(parts, lambda part: part.hidden):
        blocks = tuple(joined(p.block for p in group))
        other = [p for p in group if p.block.kind != "equal"]
        if hidden:
            layers = tuple(dict.fromkeys(p.layer for p in other if p.layer in repeated))
            yield Fold(blocks, layers, sum(p.block.lines for p in other if p.layer not in repeated))
            continue
        lines = [line for p in other for line in (*old[p.block.a : p.block.b], *new[p.block.c : p.block.d])]
        yield Hunk(blocks, tuple(dict.fromkeys(line.module for line in lines if line.module)))
