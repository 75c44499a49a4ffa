"""Which kernels the scorecard has: programs, widths and passes, and the plan that a call of each gets on a
target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from attngraph.codegen.triton import visits
from attngraph.codegen.triton.blocks import (
    BACKWARD_OF_GROUPS,
    backward_blocks,
    blocks_for,
    blocks_of_groups,
    decode_blocks,
    no_backward_groups,
    no_groups,
)
from attngraph.codegen.triton.plan import (
    BackwardPlan,
    Blocks,
    DecodePlan,
    Plan,
    Read,
    is_linear,
    soft_diagonal,
)
from attngraph.ir.language.parser import parse
from attngraph.ir.language.score import ScoreProgram
from attngraph.meaning.masks import tiles
from attngraph.meaning.masks.tiles import Cut, Grid
from workshop.bench.scorecard.ahead_of_time import Target
from workshop.bench.scorecard.flex import Mods, Pass

DTYPE = torch.bfloat16
TOKENS, WINDOW, DOCUMENTS, HEADS = 8192, 1024, 8, 16
LOWEST = "3.4028234663852886e+38"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One program at one width, forward, backward or over a cache.

    Attributes:
        text: the program, in which `{scale}` stands for 1 / sqrt(width). kept: the share of all pairs that it
        keeps,
            which is what counts as useful. group: query heads per key head. shared: whether values are a part
            of the keys. mods: the program as FlexAttention's template takes it, if it can be said there;
            `mask` is what its list of blocks follows from.
    """

    name: str
    text: str
    width: int
    values: int
    step: Pass = "forward"
    kept: float = 1.0
    group: int = 1
    reads: tuple[Read, ...] = ()
    shared: bool = False
    mods: Mods | None = None
    mask: str = ""

    @property
    def program(self) -> ScoreProgram:
        return parse(self.text.format(scale=self.width**-0.5))

    @property
    def is_plain(self) -> bool:
        """Whether a kernel without scores of its own and without lists computes the same."""
        simple = self.text in (FULL, CAUSAL) and self.group == 1 and self.step == "forward"
        return simple and self.width == self.values and self.width in (64, 128, 256)


FULL = "s = {scale} * dot"
CAUSAL = "s = {scale} * dot; keep k <= q"
_HALF = 0.5 + 0.5 / TOKENS
_WINDOWED = (WINDOW * TOKENS - WINDOW * (WINDOW - 1) / 2) / TOKENS**2
_CAUSAL_MASK = "mask_mod_output = ({m}) >= ({n})"
_PLAIN_SCORE, _PLAIN_GRADIENT = "post_mod_scores = ({score})", "grad_scores = ({grad_score_mod})"
_CAUSAL_MODS = Mods(_PLAIN_SCORE, _CAUSAL_MASK, _PLAIN_GRADIENT)
_WINDOW_MODS = Mods(
    _PLAIN_SCORE, f"mask_mod_output = (({{m}}) >= ({{n}})) & ((({{m}}) - ({{n}})) < {WINDOW})"
)
_DOCUMENT_MODS = Mods(
    _PLAIN_SCORE,
    "mask_mod_output = (({m}) >= ({n})) & (tl.load(in_ptr0 + ({m})) == tl.load(in_ptr0 + ({n})))",
    reads=("*i64",),
)  # fmt: skip
_RICH_MODS = Mods(
    "tmp0 = libdevice.tanh(({score}) * 0.02) * 50.0\n"
    "post_mod_scores = tmp0 + tl.load(in_ptr0 + ({h})) * (({n}) - ({m})).to(tl.float32)",
    _CAUSAL_MASK, reads=("*fp32",),
)  # fmt: skip
_BUCKET = (
    "where(k >= q - 7 and k <= q + 7, abs(k - q), "
    "min(int(log(abs(k - q) / 8) / 2.772588722239781 * 8) + 8, 15)) + where(k > q, 16, 0)"
)
_T5 = f"s = dot + r0[{_BUCKET}, h]"
_T5_BUCKET = (
    "tmp0 = ({n}) - ({m})\ntmp1 = tl.abs(tmp0)\n"
    "tmp2 = (tl.log(tmp1.to(tl.float32) * 0.125) * 0.36067376022224085 * 8.0).to(tl.int32) + 8\n"
    "tmp3 = tl.where(tmp1 < 8, tmp1, tl.minimum(tmp2, 15)) + tl.where(tmp0 > 0, 16, 0)\n"
)
_T5_MODS = Mods(
    f"{_T5_BUCKET}post_mod_scores = ({{score}}) + tl.load(in_ptr0 + tmp3 * {HEADS} + ({{h}}))", "",
    _PLAIN_GRADIENT, ("*fp32",),
)  # fmt: skip
_TABLE = (Read(0, 2, "float"),)


def _causal(name: str, width: int, values: int | None = None, **more: object) -> Cell:
    made = Cell(name, CAUSAL, width, values or width, kept=_HALF, mods=_CAUSAL_MODS, mask="keep k <= q")
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]


_LIST = (
    Cell("full 64", FULL, 64, 64, mods=Mods(_PLAIN_SCORE, "")),
    Cell("full 128", FULL, 128, 128, mods=Mods(_PLAIN_SCORE, "")),
    _causal("causal 64", 64),
    _causal("causal 80", 80),
    _causal("causal 96", 96),
    _causal("causal 128", 128),
    _causal("causal 192 + 128", 192, 128),
    _causal("causal 256", 256),
    _causal("grouped 128", 128, group=4),
    Cell(
        "window 128", f"{FULL}; keep k <= q and q - k < {WINDOW}", 128, 128, kept=_WINDOWED,
        mods=_WINDOW_MODS, mask=f"keep k <= q and q - k < {WINDOW}",
    ),
    Cell(
        "documents 128", f"{FULL}; keep k <= q and r0[b, k] == r0[b, q]", 128, 128,
        reads=(Read(0, 2, "int"),),
        kept=(0.5 + 0.5 * DOCUMENTS / TOKENS) / DOCUMENTS, mods=_DOCUMENT_MODS,
        mask="keep k <= q and r0[b, k] == r0[b, q]",
    ),
    Cell(
        "finite fill 128", f"{FULL}; keep k <= q else -{LOWEST}", 128, 128, kept=_HALF, mods=_CAUSAL_MODS,
        mask="keep k <= q",
    ),
    Cell(
        "softcap, ALiBi, sink 128",
        f"{FULL}; s = 50.0 * tanh(s / 50.0) + r0[h] * (k - q); keep k <= q; sink r1[h]", 128, 128, kept=_HALF,
        reads=(Read(0, 1, "float"), Read(1, 1, "float")), mods=_RICH_MODS, mask="keep k <= q",
    ),
    Cell("T5 64", _T5, 64, 64, reads=_TABLE, mods=_T5_MODS),
    _causal("backward, causal 64", 64, step="backward"),
    _causal("backward, causal 128", 128, step="backward"),
    Cell(
        "backward, finite fill 128", f"{FULL}; keep k <= q else -{LOWEST}", 128, 128, "backward", _HALF,
        mods=_CAUSAL_MODS, mask="keep k <= q",
    ),
    Cell("backward, T5 64", _T5, 64, 64, "backward", reads=_TABLE),
    _causal("decode 64", 64, step="decode", kept=1.0, mods=Mods(_PLAIN_SCORE, "")),
    _causal("decode 128, 8 heads on 1", 128, step="decode", group=8, kept=1.0, mods=Mods(_PLAIN_SCORE, "")),
    _causal("decode latents, 16 heads", 576, 512, step="decode", group=16, shared=True, kept=1.0, mods=None),
    _causal(
        "decode latents, 128 heads", 576, 512, step="decode", group=128, shared=True, kept=1.0, mods=None
    ),
)  # fmt: skip
CELLS = {cell.name: cell for cell in _LIST}


def plan(cell: Cell, target: Target) -> Plan:
    """The plan that a long call gets, without measured block sizes."""
    program, (D, Dv) = cell.program, (cell.width, cell.values)
    if cell.step == "decode":
        blocks = decode_blocks(cell.group, D, DTYPE, target.shared, capability=target.capability)
        return DecodePlan(program, DTYPE, D, Dv, cell.group, cell.reads, blocks, shared=cell.shared, page=64)
    blocks = blocks_for(program, D, Dv, DTYPE, TOKENS, target.shared, target.capability)
    made = Plan(program, DTYPE, D, Dv, cell.group, cell.reads, blocks)
    operands = tuple(torch.empty(1, HEADS, TOKENS, 1, device="meta") for _ in "qkv")
    q, k, v = operands
    made = dataclasses.replace(made, listed=visits.are_listed(program, (q, k, v)))
    if cell.step == "forward":
        return made
    floats = tuple(read.number for read in cell.reads if read.kind in ("half", "float", "double"))
    blocks = backward_blocks(
        max(D, Dv), DTYPE, target.shared, bool(floats), is_linear(program), target.capability
    )
    fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(Plan)}
    return BackwardPlan(**{**fields, "blocks": blocks}, wanted=floats)


def with_groups(cell: Cell, target: Target) -> Plan | None:
    """The plan of a long call by groups of warps (`gluon.forward`), or None: there is none."""
    q, k, v = (
        torch.empty(1, 1, 1, n, dtype=DTYPE, device="meta") for n in (cell.width, cell.width, cell.values)
    )
    if cell.step == "decode" or no_groups((q, k, v), target.capability) is not None:
        return None
    made = plan(cell, target)
    if isinstance(made, BackwardPlan):
        served = no_backward_groups(made) is None
        return dataclasses.replace(made, blocks=BACKWARD_OF_GROUPS) if served else None
    return dataclasses.replace(made, blocks=blocks_of_groups(cell.program, cell.width, cell.values))


def visited(cell: Cell, mask: str, blocks: Blocks) -> tuple[float, float]:
    """How many tiles a head visits: those in which all pairs are kept, and others, if all that hold a pair
    that the mask keeps are visited ("": all tiles)."""
    rows, columns = -(-TOKENS // blocks.q), -(-TOKENS // blocks.k)
    if not mask:
        return rows * columns, 0
    reads = (torch.arange(TOKENS)[None] * DOCUMENTS // TOKENS,) if "r0" in mask else ()
    grid = Grid(Cut(0, 1, 1), Cut(0, 1, 1), Cut(0, TOKENS, blocks.q), Cut(0, TOKENS, blocks.k), (), reads)
    found = tiles.block_map(parse(mask), grid)
    is_open = int((found == tiles.OPEN).sum())
    return is_open, int((found != tiles.SKIP).sum()) - is_open


def skips(made: Plan) -> bool:
    """Whether the plan's kernel leaves out tiles behind its masks. (Tiles behind a finite fill are left out
    where a score is far above the fill, as here.)"""
    return made.listed or made.diagonal is not None or soft_diagonal(made.program) is not None


Least = Callable[[int, int], int]


def least(cell: Cell, part: str, blocks: Blocks) -> int:
    """The fewest operations of products for one tile of a part of a kernel's work."""
    d, dv = cell.width, cell.values
    widths = {"queries": 2 * d + dv, "keys": 2 * d + 2 * dv, "read": d + dv, "all": 3 * d + 2 * dv}
    return 2 * blocks.q * blocks.k * widths.get(part, d + dv)


def useful(cell: Cell) -> float:
    """The operations that a head's work on the whole sequence is counted as: two products forward, five
    backward."""
    d, dv = cell.width, cell.values
    products = 3 * d + 2 * dv if cell.step == "backward" else d + dv
    return 2 * TOKENS**2 * cell.kept * products
