"""Maps of masks: which pairs of a query and a key a score program keeps, pair by pair or tile by tile.

`tile_map` shows what kernels skip, by the bounds that they use (`meaning/masks/tiles.py`); `mask_map` shows
each pair of a small attention, by evaluation (`meaning/masks/visible.py`). Both give a `TileMap`; in the
second a tile is one pair. `report/picture.py` draws them. What is not known before a call is shown as
unknown, never guessed.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from attngraph.ir.language import Environment, ScoreProgram, Tile, format_expr, parse
from attngraph.meaning.masks import tiles
from attngraph.meaning.masks.tiles import Cut, Grid
from attngraph.meaning.masks.visible import FILLED, HIDDEN, KEPT, unknown_names, visible
from attngraph.meaning.masks.words import describe, named

State = Literal["full", "partial", "filled", "empty", "unknown"]
STATES: tuple[State, ...] = ("full", "partial", "filled", "empty", "unknown")
MOST = 1 << 20
"""Most tiles of one map."""
Rows = tuple[tuple[State, ...], ...]


@dataclasses.dataclass(frozen=True)
class Panel:
    """The tiles of an attention head, one row per block of queries, and all heads that have these tiles."""

    heads: tuple[int, ...]
    rows: Rows = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class TileMap:
    """What becomes of the pairs of each tile of `tile` queries by `tile` keys.

    "full": all are kept, and no mask has to be evaluated. "empty": none has any weight. "filled": none is
    kept, and the score of some is a fill instead of minus infinity. "partial": the mask has to be
    evaluated. "unknown": it depends on `unknown`, which only a call knows. `panels` has one entry for each
    different picture among the heads asked for; `fills` are the fills of the masks, `mask` is
    the mask in words. `looked`: some tiles were decided by evaluating their pairs, where the bounds that
    kernels use do not decide.
    """

    program: str
    mask: str
    queries: int
    keys: int
    tile: int
    panels: tuple[Panel, ...]
    fills: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    looked: bool = False

    @property
    def rows(self) -> Rows:
        """The first panel's."""
        return self.panels[0].rows

    @functools.cached_property
    def pairs(self) -> dict[State, int]:
        """How many pairs of a query and a key lie in tiles of each kind, over all panels."""
        sides = ((n, range(0, n, self.tile)) for n in (self.queries, self.keys))
        heights, widths = ([min(self.tile, n - start) for start in starts] for n, starts in sides)
        found: dict[State, int] = dict.fromkeys(STATES, 0)
        for panel in self.panels:
            for height, row in zip(heights, panel.rows, strict=True):
                for width, state in zip(widths, row, strict=True):
                    found[state] += height * width * len(panel.heads)
        return found

    @property
    def shares(self) -> dict[State, float]:
        """The share of all pairs that lies in tiles of each kind."""
        total = sum(self.pairs.values())
        return {state: count / total for state, count in self.pairs.items()}

    def joined(self, by: int) -> "TileMap":
        """The map with squares of `by` by `by` tiles joined: their common kind, else partial."""
        panels = tuple(dataclasses.replace(p, rows=_joined(p.rows, by)) for p in self.panels)
        return dataclasses.replace(self, tile=self.tile * by, panels=panels)

    def meaning(self, state: State) -> str:
        """What a kind of tile is, in words."""
        single = self.tile == 1
        fill = f"the score of what is hidden becomes {' or '.join(self.fills)}"
        return {
            "full": "kept" if single else "full: every pair is kept, no mask is looked at",
            "partial": "partial: the mask is evaluated for each pair",
            "filled": f"hidden by a fill: {fill}" if single else f"filled: nothing is kept, {fill}",
            "empty": "hidden" if single else "empty: no pair has any weight, nothing is computed",
            "unknown": f"unknown until run: decided by {' and '.join(self.unknown) or 'the scores'}",
        }[state]

    def states(self) -> list[State]:
        """The kinds that occur, in the order of `STATES`."""
        return [state for state in STATES if self.pairs[state]]


def tile_map(
    program: ScoreProgram | str, queries: int, keys: int, tile: int, reads: Sequence[Tensor] = (),
    sizes: Sequence[int] = (), *, heads: Sequence[int] = (0,),
) -> TileMap:  # fmt: skip
    """What has to be computed of an attention, tile by tile.

    Masks of positions are decided by bounds, as kernels do it. Where masks read tensors that are given in
    `reads` (r0, r1, ... in order) and bounds do not decide, the pairs of the tile are evaluated.

    Args:
        sizes: n0, n1, ...
        heads: the numbers h to look at.

    Raises:
        ValueError: a size or a tensor that does not fit the program, too many tiles.
        IndexError: the program reads beyond a tensor that is given.
    """
    program = parse(program) if isinstance(program, str) else program
    _check(program, queries, keys, tile, reads, sizes)
    found: dict[Rows, list[int]] = {}
    seen: dict[int, Rows] = {}
    looked = False
    by_head = any(v.value == "h" for e in program.expressions for v in e.free)
    for h in heads:
        key = h if by_head else 0
        if key not in seen:
            cuts = Cut(0, 1, 1), Cut(h, h + 1, 1), Cut(0, queries, tile), Cut(0, keys, tile)
            grid = Grid(*cuts, tuple(sizes), tuple(reads))
            bounded = seen[key] = _bounded(program, grid)
            # pairs can say more than bounds where masks read tensors (all given, or tiles would be unknown)
            if tile == 1 or tiles.reads_data(program):
                seen[key] = tuple(_row(program, grid, number, row) for number, row in enumerate(bounded))
            looked |= tile > 1 and seen[key] != bounded
        found.setdefault(seen[key], []).append(h)
    panels = tuple(Panel(tuple(alike), rows) for rows, alike in found.items())
    fills = dict.fromkeys(named(format_expr(k.fill)) for k in program.keeps if not k.is_hard and not k.lowers)
    unknown = unknown_names([k.predicate for k in program.keeps], len(reads))
    mask = describe(program)
    return TileMap(str(program), mask, queries, keys, tile, panels, tuple(fills), unknown, looked)


def mask_map(
    program: ScoreProgram | str, queries: int = 24, keys: int = 24, reads: Sequence[Tensor] = (),
    sizes: Sequence[int] = (), *, heads: Sequence[int] = (0,),
) -> TileMap:  # fmt: skip
    """Each pair of a small attention by itself: as `tile_map` with tiles of one pair, all evaluated."""
    return tile_map(program, queries, keys, 1, reads, sizes, heads=heads)


def _bounded(program: ScoreProgram, grid: Grid) -> Rows:
    """The tiles by bounds, as kernels decide them. Single pairs are left open, to be evaluated."""
    left_open: State = "partial"
    if grid.q.step == 1:
        return ((left_open,) * grid.k.stop,) * grid.q.stop
    if unknown_names([k.predicate for k in program.keeps], len(grid.reads)):
        left_open = "unknown"

    def state(hard: int, soft: int) -> State:
        if hard == tiles.EVALUATE:
            return "filled" if soft == tiles.SKIP else left_open
        return "empty" if hard == tiles.SKIP else "full"

    maps = (tiles.block_map(program, grid, soft)[0, 0].tolist() for soft in (False, True))
    return tuple(tuple(map(state, *rows)) for rows in zip(*maps, strict=True))


def _row(program: ScoreProgram, grid: Grid, number: int, row: tuple[State, ...]) -> tuple[State, ...]:
    """A row with its partial tiles decided by evaluating their pairs."""
    places = [place for place, state in enumerate(row) if state == "partial"]
    if not places:
        return row
    first, end, tile = places[0], places[-1] + 1, grid.q.step
    queries = (number * tile, min(number * tile + tile, grid.q.stop))
    keys = (first * tile, min(end * tile, grid.k.stop))
    box = Tile((grid.b.start, grid.b.stop), (grid.h.start, grid.h.stop), queries, keys)
    env = Environment(box, grid.reads, grid.sizes, torch.float64, torch.device("cpu"))
    return (*row[:first], *_states(visible(program, env)[0, 0], tile), *row[end:])


def _states(pairs: Tensor, tile: int) -> list[State]:
    """One row of tiles from what can become of each of its pairs, `[queries, keys]`."""
    last = pairs[:, -1:].expand(-1, -pairs.shape[1] % tile)
    blocks = torch.cat([pairs, last], 1).reshape(len(pairs), -1, tile).transpose(0, 1).flatten(1)

    def some(*kinds: int) -> Tensor:
        return torch.stack([(blocks == kind).any(1) for kind in kinds]).any(0)

    kept, dropped, filled = some(KEPT), some(HIDDEN, FILLED, HIDDEN | FILLED), some(FILLED)
    open_question = ~torch.stack([blocks == kind for kind in (KEPT, HIDDEN, FILLED)]).any(0).all(1)
    found = torch.stack([kept & dropped, open_question, kept, filled], 1).tolist()
    kinds: tuple[State, ...] = ("partial", "unknown", "full", "filled", "empty")
    return [kinds[(*holds, True).index(True)] for holds in found]


def _check(
    program: ScoreProgram, queries: int, keys: int, tile: int, reads: Sequence[Tensor], sizes: Sequence[int]
) -> None:
    for name, value in (("queries", queries), ("keys", keys), ("tile", tile)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, found {value}.")
    if len(sizes) < program.sizes:
        raise ValueError(f"the program names the size n{len(sizes)}, which is not given.")
    for number, rank in program.reads.items():
        if number < len(reads) and reads[number].ndim != rank:
            raise ValueError(
                f"r{number} is read with {rank} indices; the one given has {reads[number].ndim} dimensions."
            )
    count = -(-queries // tile) * -(-keys // tile)
    if count > MOST:
        raise ValueError(f"{count:,} tiles are more than {MOST:,}; make the tile larger than {tile}.")


def _joined(rows: Rows, by: int) -> Rows:
    def kind(i: int, j: int) -> State:
        parts: set[State] = {state for row in rows[i : i + by] for state in row[j : j + by]}
        if len(parts) == 1:
            return parts.pop()
        if parts == {"empty", "filled"}:
            return "filled"
        decided = "partial" in parts or ("full" in parts and parts & {"empty", "filled"})
        return "partial" if decided else "unknown"

    return tuple(tuple(kind(i, j) for j in range(0, len(rows[0]), by)) for i in range(0, len(rows), by))
