"""What attention over a long cache takes, and beside it the kernel that joins the parts of a row's keys.

That kernel multiplies no tiles. Its time is what its programs wait: for the parts' numbers, turn after turn,
which the second cache delivers, since the kernel before has just written them. How often a program waits
follows from the source (`codegen/triton/kernels/decode.py`): once for the row, once for each turn of its two
loops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from attngraph.codegen.triton.decode import LEAST_KEYS, parts_for, programs_in
from attngraph.codegen.triton.emit import TOGETHER, WIDEST_SHARE
from attngraph.codegen.triton.plan import DecodePlan
from workshop.bench.scorecard.ahead_of_time import TARGETS, compile_join_ahead
from workshop.bench.scorecard.cards import CARDS
from workshop.bench.scorecard.cells import CELLS, HEADS, plan
from workshop.bench.scorecard.run import OURS, Row

KEPT = 32_768
"""Tokens in the cache."""
CACHED = 300
"""Cycles from a request to the second cache to its answer (H100: 260 to 280, A100: 200; MI300X: more)."""
WARPS = 4
"""Triton's default, with which the second kernel is launched."""


@dataclasses.dataclass(frozen=True)
class Join:
    """A token of one row over `KEPT` kept ones on one target: into how many parts each head's keys are split,
    and the microseconds that the kernel over the keys and the one that joins the parts are predicted to
    take, without the gap between them. spilled: bytes for each lane of the second kernel."""

    cell: str
    target: str
    parts: int
    keys: float
    join: float
    spilled: int


def joins(rows: Sequence[Row]) -> list[Join]:
    """The predictions for those rows of ours that decode. Raises errors of Triton."""
    ours = (row for row in rows if row.who == OURS and CELLS[row.cell].step == "decode")
    return [join(row.cell, row.target, row.predicted) for row in ours if row.predicted is not None]


def join(name: str, target: str, speed: float) -> Join:
    """The prediction for a cell that decodes. Raises errors of Triton.

    Args:
        speed: of the kernel over the keys, predicted, in GB/s.
    """
    cell, card = CELLS[name], CARDS[target]
    made = plan(cell, TARGETS[target])
    assert isinstance(made, DecodePlan)
    heads = max(1, HEADS // cell.group)
    shares = -(-cell.group // made.blocks.q)
    places = card.multiprocessors * programs_in(made, card.shared)
    most = max(1, KEPT // LEAST_KEYS)
    parts = parts_for(heads * shares, places, most)
    width = cell.width + (0 if cell.shared else cell.values)
    keys = heads * KEPT * width * made.dtype.itemsize / (speed * 1e3)
    used = compile_join_ahead(made, TARGETS[target])
    programs = heads * cell.group * -(-cell.values // WIDEST_SHARE)
    at_once = card.multiprocessors * card.programs(used.registers, used.shared, WARPS)
    waits = (1 + 2 * -(-parts // TOGETHER)) * CACHED * -(-programs // at_once)
    moved = heads * cell.group * parts * cell.values * 4 / (card.cache_rate * card.multiprocessors)
    return Join(name, target, parts, keys, max(waits, moved) / (card.gigahertz * 1e3), used.spilled)
