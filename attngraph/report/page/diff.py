"""What a pass changed in the text of a graph: lines matched by what they compute, not by their numbers.

Values are numbered in order, so removing one op at the top renumbers all that follow. Lines are therefore
matched without numbers, by patience diff (Bram Cohen: lines that occur once on both sides are anchors) with
difflib between anchors, which is fast for long graphs. Afterwards every value of the old text has its
counterpart in the new one, and a line whose operands are not the counterparts of the old ones counts as
changed.
"""

import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import Literal

from attngraph.report.page.layers import Line

Kind = Literal["equal", "changed", "replaced"]
Pairs = list[tuple[int, int]]
_MOST_CELLS = 250_000
"""difflib compares every pair of lines of two stretches up to this many pairs."""
_ALIKE = 0.5
"""Two lines may be one changed line if this share of their words is the same."""
_MOST_PAIRED = 0.6
_WORDS = re.compile(r"%\w+(?:\.\d+)*|\$[\w.\-]+|[\w.\-]+|\s+|.")


@dataclasses.dataclass(frozen=True)
class Block:
    """Lines `old[a:b]` and `new[c:d]`: equal, changed one by one (as many on both sides), or replaced."""

    kind: Kind
    a: int
    b: int
    c: int
    d: int

    @property
    def lines(self) -> int:
        return max(self.b - self.a, self.d - self.c)

    def cut(self, start: int, stop: int) -> "Block":
        """Some lines of a block that has as many on both sides."""
        return Block(self.kind, self.a + start, self.a + stop, self.c + start, self.c + stop)


def compare(old: Sequence[Line], new: Sequence[Line]) -> list[Block]:
    """Blocks that together cover both texts, in order."""
    pairs = _match(tuple(line.key for line in old), tuple(line.key for line in new))
    kinds: dict[tuple[int, int], Kind] = dict.fromkeys(pairs, "equal")
    for a, b, c, d in _gaps(pairs, len(old), len(new)):
        kinds.update(dict.fromkeys(_alike(old, new, a, b, c, d), "changed"))
    for pair in _read_other_values(old, new, sorted(kinds)):
        kinds[pair] = "changed"
    return _blocks(kinds, len(old), len(new))


def _match(old: tuple[str, ...], new: tuple[str, ...]) -> Pairs:
    """Pairs of places of equal items, increasing on both sides."""
    start, end = 0, 0
    least = min(len(old), len(new))
    while start < least and old[start] == new[start]:
        start += 1
    while end < least - start and old[-1 - end] == new[-1 - end]:
        end += 1
    found = [(n, n) for n in range(start)]
    inner_old, inner_new = old[start : len(old) - end], new[start : len(new) - end]
    anchors = _anchors(inner_old, inner_new)
    if anchors:
        for a, b, c, d in _gaps(anchors, len(inner_old), len(inner_new)):
            inside = _match(inner_old[a:b], inner_new[c:d])
            found += [(start + a + i, start + c + j) for i, j in inside]
        found += [(start + i, start + j) for i, j in anchors]
    elif inner_old and inner_new:
        found += [(start + i, start + j) for i, j in _common(inner_old, inner_new)]
    found += [(len(old) - n, len(new) - n) for n in range(1, end + 1)]
    return sorted(found)


def _anchors(old: Sequence[str], new: Sequence[str]) -> Pairs:
    """Items that occur once on both sides, in the same order."""
    counts = Counter(old), Counter(new)
    sides = [[n for n, item in enumerate(side) if all(c[item] == 1 for c in counts)] for side in (old, new)]
    alike = _common(tuple(old[n] for n in sides[0]), tuple(new[n] for n in sides[1]))
    return [(sides[0][i], sides[1][j]) for i, j in alike]


@functools.lru_cache(maxsize=4096)
def _common(old: tuple[str, ...], new: tuple[str, ...]) -> Pairs:
    """difflib's matches, cached because equal layers repeat the same comparison."""
    is_long = len(old) * len(new) > _MOST_CELLS
    blocks = SequenceMatcher(None, old, new, autojunk=is_long).get_matching_blocks()
    return [(a + n, b + n) for a, b, size in blocks for n in range(size)]


def _gaps(pairs: Pairs, old: int, new: int) -> list[tuple[int, int, int, int]]:
    """The stretches between pairs, where there is something on either side."""
    ends = [(-1, -1), *pairs, (old, new)]
    found = [(i + 1, k, j + 1, l) for (i, j), (k, l) in itertools.pairwise(ends)]
    return [(a, b, c, d) for a, b, c, d in found if a < b or c < d]


def _alike(old: Sequence[Line], new: Sequence[Line], a: int, b: int, c: int, d: int) -> Pairs:
    """Lines of a replaced stretch that are one line changed.

    Lines that read the same weights, at any place; between these, lines of the same op, if that pairs most
    lines of both sides, or equally many lines that are each similar to the line in the same place.
    """
    if a == b or c == d:
        return []
    keys = [tuple(_rough_key(line) for line in lines) for lines in (old[a:b], new[c:d])]
    pairs = [(a + i, c + j) for i, j in _match(*keys)]
    pairs = [(i, j) for i, j in pairs if _likeness(old[i].key, new[j].key) >= _ALIKE]
    sure = [(i, j) for i, j in pairs if any(name[0] == "$" for name in new[j].references)]
    if sure and len(sure) < len(pairs):
        inner = _gaps([(i - a, j - c) for i, j in sure], b - a, d - c)
        return sorted(
            [*sure, *(p for i, k, j, l in inner for p in _alike(old, new, a + i, a + k, c + j, c + l))]
        )
    if sure or len(pairs) >= _MOST_PAIRED * max(b - a, d - c):
        return pairs
    if b - a != d - c:
        return []
    in_place = list(zip(range(a, b), range(c, d), strict=True))
    return in_place if all(_likeness(old[i].key, new[j].key) >= _ALIKE for i, j in in_place) else []


def _rough_key(line: Line) -> str:
    """The op and the weights it reads; an input's name; else the line itself."""
    names = [name for name in line.references if name[0] == "$"]
    if line.op:
        return f"{line.op}({', '.join(names)})"
    return names[0] if len(names) == 1 else line.key.lstrip().split(" ")[0]


@functools.lru_cache(maxsize=65536)
def _likeness(old: str, new: str) -> float:
    return SequenceMatcher(None, _WORDS.findall(old), _WORDS.findall(new), autojunk=False).ratio()


def _read_other_values(old: Sequence[Line], new: Sequence[Line], pairs: Pairs) -> Pairs:
    """The pairs whose operands are not each other's counterparts."""
    counterpart = {old[i].value: new[j].value for i, j in pairs if old[i].value}
    found = []
    for i, j in pairs:
        if old[i].key == new[j].key and old[i].code != new[j].code:
            read = zip(old[i].references, new[j].references, strict=True)
            if any(_in_new(name, counterpart) != other for name, other in read):
                found.append((i, j))
    return found


def _in_new(name: str, counterpart: dict[str, str]) -> str:
    """The counterpart of `%3` or of a part of it, `%3.1`; names of inputs are unchanged."""
    value, dot, part = name.partition(".")
    if name[0] != "%" or name.startswith("%arg"):
        return name
    return counterpart.get(value, "") + dot + part


def _blocks(kinds: dict[tuple[int, int], Kind], old: int, new: int) -> list[Block]:
    found: list[Block] = []
    a = c = 0
    for (i, j), kind in [*sorted(kinds.items()), ((old, new), None)]:
        if (a, c) != (i, j):
            found.append(Block("replaced", a, i, c, j))
        if kind is not None:
            found.append(Block(kind, i, i + 1, j, j + 1))
        a, c = i + 1, j + 1
    return list(joined(found))


def joined(blocks: Iterable[Block]) -> Iterator[Block]:
    """Blocks of one kind that follow each other, as one."""
    for kind, group in itertools.groupby(blocks, lambda block: block.kind):
        first, *others = group
        if kind == "replaced":
            yield from (first, *others)
        else:
            last = others[-1] if others else first
            yield Block(kind, first.a, last.b, first.c, last.d)


def changed_words(old: Line, new: Line) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Both lines in pieces, each with whether only one side has it. A renumbered result is no change."""
    first, second = ([line.value, line.code.partition(" = ")[2]] if line.value else ["", line.code]
                     for line in (old, new))  # fmt: skip
    a, b = _WORDS.findall(first[1]), _WORDS.findall(second[1])
    left: list[tuple[str, bool]] = [(f"  {first[0]} = ", False)] if old.value else []
    right: list[tuple[str, bool]] = [(f"  {second[0]} = ", False)] if new.value else []
    for kind, i, j, k, l in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        left.append(("".join(a[i:j]), kind != "equal"))
        right.append(("".join(b[k:l]), kind != "equal"))
    return [p for p in left if p[0]], [p for p in right if p[0]]
