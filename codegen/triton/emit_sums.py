"""Sums that a decoder carries from token to token (`ir/ops/running_sum.py`) as Triton source.

A program takes one row, one head and some columns of its matrix, which stays in registers while the row's few
new tokens are added: a column depends on no other one. The matrix is read and written once, whatever the
tokens. The module holds what the operands ask for, and nothing else: no decay where there is none, no delta
rule where no vectors are given.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from attngraph.codegen.triton.module import Groups, Kernel, flat, function, indented
from attngraph.codegen.triton.plan import DTYPES, padded

STATES = {**DTYPES, torch.float64: "float64"}
"""Dtypes of the matrix."""

DEEPEST = 256
"""The most elements of a key whose matrix fits in registers, together with enough columns."""
TILE, NARROWEST, WIDEST = 2048, 16, 64
"""Elements of a program's part of the matrix, and the fewest and most of its columns."""
OF_WARP = 512
"""Elements that a warp takes: with twice as many, some compiled kernels spill registers."""


@dataclasses.dataclass(frozen=True)
class SumsPlan:
    """What fixes a kernel: the operands that are present, the elements of a key (1 without keys), the vectors
    of a delta rule (0: none), whether a decay has one number or one for each element of a key ("", "one",
    "each"), whether a token reads what it has added itself, and whether a decay is given less one."""

    depth: int
    has_queries: bool
    has_keys: bool
    decay: str
    vectors: int
    inclusive: bool
    dtype: torch.dtype
    state: torch.dtype
    less_one: bool = False

    @property
    def rows(self) -> int:
        """Rows of the matrix, a power of two."""
        return 1 if self.depth == 1 else padded(self.depth)

    @property
    def columns(self) -> int:
        """Columns of the matrix that one program takes."""
        return max(NARROWEST, min(WIDEST, TILE // (self.rows if self.sums == "float32" else 2 * self.rows)))

    @property
    def sums(self) -> str:
        """The dtype of sums."""
        return "float64" if self.state == torch.float64 else "float32"

    @property
    def warps(self) -> int:
        return max(1, self.rows * self.columns // OF_WARP)


def arguments(plan: SumsPlan) -> tuple[str, ...]:
    """The kernel's arguments in order: operands, the matrix before and after, the result, where rows begin,
    the numbers of heads and columns, and strides of tokens, heads (vectors) and elements."""
    return flat(_groups(plan))


def operands(plan: SumsPlan) -> dict[str, str]:
    """The tensors that are given with strides, and the letters of their dimensions."""
    present = {
        "q": plan.has_queries, "k": plan.has_keys, "v": True, "decay": bool(plan.decay),
        "left": plan.vectors > 0, "right": plan.vectors > 0,
    }  # fmt: skip
    return {
        name: "thmd" if name in ("left", "right") else "thd" for name, is_given in present.items() if is_given
    }


def _groups(plan: SumsPlan) -> Groups:
    given = operands(plan)
    strides = [tuple(f"{name}_{axis}" for axis in axes) for name, axes in given.items()]
    return [tuple(given), ("state", "after", "out", "starts"), ("heads", "width"), *strides]


def emit_sums(plan: SumsPlan) -> Kernel:
    """The kernel of a plan."""
    groups = _groups(plan)
    contract = "A row's new tokens, for one head and some columns of its matrix."
    text = "\n\n\n".join([_header(plan), function("running_sum", groups, contract, _lines(plan))])
    return Kernel(text + "\n", "running_sum", flat(groups))


def _header(plan: SumsPlan) -> str:
    before = "S" if not plan.decay else "decay S"
    key = " + k v^T" if plan.has_keys else " + v"
    delta = " + left^T (right S)" if plan.vectors else ""
    read = ("q S" if plan.has_queries else "S") + ("" if plan.inclusive else ", with S before the token")
    dtypes = f"{STATES[plan.state]} in memory, the operands {DTYPES[plan.dtype]}; sums are {plan.sums}."
    return "\n".join([
        "# running_sum, written by attngraph. For each row, head and token, with a matrix S that is carried:",
        f"#     S = {before}{delta}{key}        out = {read}",
        f"# S [rows, heads, {plan.depth}, width] is {dtypes}", "",
        "import triton", "import triton.language as tl", "",
        f"DEPTH = tl.constexpr({plan.depth})", f"COLUMNS = tl.constexpr({plan.columns})",
        *([f"VECTORS = tl.constexpr({plan.vectors})"] if plan.vectors else []),
    ])  # fmt: skip


def _lines(plan: SumsPlan) -> list[str]:
    loaded = functools.partial(_loaded, plan.sums)
    loop = [f"values = {loaded('v', 'e', 'inside')}[None, :]"]
    if plan.has_keys:
        loop.append(f"keys = {loaded('k', 'd', 'd < DEPTH')}[:, None]")
    kept, added = "matrix", "keys * values" if plan.has_keys else "values"
    if plan.decay:
        which, mask = ("d", "d < DEPTH") if plan.decay == "each" else ("0", "")
        whole = " + 1.0" if plan.less_one else ""
        loop.append(
            f"rate = {loaded('decay', which, mask)}{'[:, None]' if plan.decay == 'each' else ''}{whole}"
        )
        kept = "matrix * rate"
    loop.append(f"following = {kept} + {added}")
    if plan.vectors:
        loop += [
            "for m in tl.static_range(VECTORS):",
            f"    reading = {loaded('right', 'd', 'd < DEPTH')}[:, None]",
            f"    writing = {loaded('left', 'd', 'd < DEPTH')}[:, None]",
            "    following += writing * tl.sum(matrix * reading, 0)[None, :]",
        ]
    read = "following" if plan.inclusive else "matrix"
    if plan.has_queries:
        loop.append(f"queries = {loaded('q', 'd', 'd < DEPTH')}[:, None]")
        read = f"queries * {read}"
    loop += [
        f"tl.store(out + (t * heads + h) * width + e, tl.sum({read}, 0), mask=inside)",
        "matrix = following",
    ]
    return [
        "head = tl.program_id(0)",
        "b, h = head // heads, head % heads",
        "e = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)",
        f"d = tl.arange(0, {plan.rows})",
        "inside = e < width",
        "place = (tl.cast(head, tl.int64) * DEPTH + d[:, None]) * width + e[None, :]",
        "within = (d < DEPTH)[:, None] & inside[None, :]",
        f"matrix = tl.load(state + place, mask=within, other=0.0).to(tl.{plan.sums})",
        "for t in tl.range(tl.load(starts + b), tl.load(starts + b + 1)):",
        *indented(loop),
        "tl.store(after + place, matrix, mask=within)",
    ]


def _loaded(sums: str, name: str, element: str, mask: str) -> str:
    """An operand of token t and head h (vector m), as sums are."""
    vector = f" + m * {name}_m" if name in ("left", "right") else ""
    place = "" if element == "0" else f" + {element} * {name}_d"
    masked = f", mask={mask}, other=0.0" if mask else ""
    return f"tl.load({name} + t * {name}_t + h * {name}_h{vector}{place}{masked}).to(tl.{sums})"
