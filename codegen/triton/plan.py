"""The plan of a kernel, which determines its source, and the facts that follow from it.

A plan fixes everything that changes the source: the score program, dtypes, widths, block sizes.
Everything else (lengths, strides, tensors) is an argument of the kernel. Equal plans give equal source.
"""

import dataclasses
import functools
import math

import torch

from attngraph.codegen.remarks import UnsupportedError
from attngraph.ir.language import DOT, SCORE, E, Expr, Keep, S, Score, ScoreProgram, Statement, Weight, parse
from attngraph.ir.ops.kernels import TRUSTED
from attngraph.meaning.masks.causal import examine
from attngraph.meaning.masks.fold import UNDERFLOWS, any_fill, seen
from attngraph.meaning.masks.score_bounds import score_bounds

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""Dtypes of queries, keys and values, and Triton's names of them."""

READS = {
    torch.bool: "bool", torch.int32: "int", torch.int64: "int", torch.float16: "half",
    torch.bfloat16: "half", torch.float32: "float", torch.float64: "double",
}  # fmt: skip
"""The kind in which elements of each dtype are computed with (`ir/dtypes.py` says why some are missing)."""

WIDEST = 512
"""Wider heads do not fit in the registers of one program."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A tile's rows (queries) and columns (keys), and how the GPU computes it: the number of warps, the
    pipeline stages (tiles of keys in flight), whether rows lie in two tiles (`kernels/parts.py`), whether
    products are a tile ahead of weights (`kernels/forward.py`; forward kernels alone), and whether groups of
    warps have parts of their own (`kernels/gluon_forward.py`; then `warps` are those of a group)."""

    q: int
    k: int
    warps: int = 4
    stages: int = 2
    split: bool = False
    ahead: bool = False
    groups: bool = False


@dataclasses.dataclass(frozen=True)
class Read:
    """A tensor that the program reads as `r<number>`: its rank, its kind (a value of `READS`), and
    whether it spans so much memory that offsets need 64 bits."""

    number: int
    rank: int
    kind: str
    wide: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """One kernel.

    Args:
        D, Dv: widths of keys and of values. group: query heads per key head.
        wide: whether some extent or size reaches `SMALL`, so that integers need 64 bits throughout.
        listed: whether the kernel is given lists of the tiles that it visits (`visits.py`).
        exact: whether products of float32 have its precision; else they are of TF32 (`device.is_exact`).

    Raises:
        UnsupportedError: the program's text does not parse to the program, so it cannot be emitted safely.
    """

    program: ScoreProgram
    dtype: torch.dtype
    D: int
    Dv: int
    group: int
    reads: tuple[Read, ...]
    blocks: Blocks
    wide: bool = False
    listed: bool = False
    exact: bool = True

    def __post_init__(self) -> None:
        # The program's text ends up in the source, so it must be nothing but the score language.
        if parse(self.program.text) != self.program:
            raise UnsupportedError("a program that was not made by the parser")

    @functools.cached_property
    def statements(self) -> tuple[Score | Keep, ...]:
        """The statements for each score, with masks split into their parts; without the scale where
        `rate` contains it."""
        program = self.program.without_scale if self.is_linear else self.program
        return tuple(s for s in conjuncts(program) if isinstance(s, (Score, Keep)))

    @property
    def is_linear(self) -> bool:
        return is_linear(self.program)

    @property
    def rate(self) -> float:
        """The factor that turns a linear score into an exponent of 2."""
        return (self.program.scale or 1.0) * math.log2(math.e)

    def guarded_axes(self, number: int) -> tuple[int, ...]:
        """The axes of a read tensor along which the kernel checks indices against the extent."""
        return self._guarded.get(number, ())

    @functools.cached_property
    def _guarded(self) -> dict[int, tuple[int, ...]]:
        axes: dict[int, set[int]] = {}
        for node, axis, index in self.program.places:
            if not is_checked_at_launch(index):
                axes.setdefault(node.value, set()).add(axis)
        return {number: tuple(sorted(found)) for number, found in axes.items()}

    @property
    def keeps_of_whole_tiles(self) -> tuple[Keep, ...]:
        """The masks that hide nothing in the tiles of the first loop."""
        keeps = tuple(s for s in self.statements if isinstance(s, Keep))
        if self.listed:
            return keeps
        own = self.diagonal or soft_diagonal(self.program)
        return () if own is None else tuple(s for s in keeps if s.predicate == own[0].predicate)

    @functools.cached_property
    def diagonal(self) -> tuple[Keep, Expr] | None:
        return diagonal(conjuncts(self.program))

    @property
    def offset(self) -> Expr | None:
        """The last key of a query by a causal mask, hard or by a fill, is at the query's place plus this."""
        own = self.diagonal or soft_diagonal(self.program)
        return None if own is None else own[1]

    @property
    def fill(self) -> float | None:
        """Where tiles behind a finite fill are visited last, and only if need be: the largest score there."""
        if self.listed or (self.diagonal is None and self.offset is not None):
            return largest_filled(self.program)
        return None


@dataclasses.dataclass(frozen=True)
class BackwardPlan(Plan):
    """`wanted`: numbers of the reads whose gradients are asked for; `operands`: whether those of q, k and v
    are; `ordered`: whether groups of warps add up those of q in a fixed order."""

    wanted: tuple[int, ...] = ()
    operands: tuple[bool, ...] = (True, True, True)
    ordered: bool = True


@dataclasses.dataclass(frozen=True)
class DecodePlan(Plan):
    """`shared`: values are the first Dv elements of the keys. `window`: the most keys that a query sees
    (0: all). `kept`: the dtype of pages of 8 bits, which have scales; None: they have the queries' dtype.
    `page`: tokens of a page; 0: each row has one page, of any length."""

    shared: bool = False
    window: int = 0
    kept: torch.dtype | None = None
    page: int = 0

    @property
    def rest(self) -> int:
        """The number of a key's elements that are not part of its value."""
        return self.D - self.Dv if self.shared else 0


def is_checked_at_launch(index: Expr) -> bool:
    """Whether an index need not be checked per element, because a check of the call's sizes covers all."""
    return index.op == "const" or index in (S.index("b"), S.index("h"))


def conjuncts(program: ScoreProgram) -> tuple[Statement, ...]:
    """The statements with `keep a and b` split into `keep a`, `keep b` where the fill is
    minus infinity."""
    found: list[Statement] = []
    for statement in program.statements:
        if isinstance(statement, Keep) and statement.is_hard:
            found += [Keep(p) for p in _split(statement.predicate) if p is not E.TRUE]
        else:
            found.append(statement)
    return tuple(found)


def _split(predicate: Expr) -> list[Expr]:
    if predicate.op == "and":
        return [part for arg in predicate.args for part in _split(arg)]
    return [predicate]


@functools.lru_cache(maxsize=1024)
def is_linear(program: ScoreProgram) -> bool:
    """Whether scores are a positive multiple of the dot wherever they are kept. Then the multiple and
    log2(e) are one factor, and subtracting the maximum takes one multiply-add. In other programs
    scores may be as large as floats get (a fill of -3.4e38), and the factor would make them infinite."""
    if program.scale is None or not 0 < program.scale < math.inf:
        return False
    predicates = [n for s in program.keeps for n in E.walk(s.predicate)]
    return all(s.is_hard for s in program.keeps) and DOT not in predicates and SCORE not in predicates


@functools.lru_cache(maxsize=1024)
def stays_trusted(program: ScoreProgram) -> bool:
    """Whether every row's log-sum-exp is at most TRUSTED in size for any operands (softcapped scores)."""
    exponents = [program] if program.sink is None else [program, ScoreProgram((Score(program.sink),))]
    bounds = [score_bounds(p, dot=3e38).score for p in exponents]
    # No sum has 2**64 terms.
    return all(low >= -TRUSTED and high <= TRUSTED - 64 * math.log(2) for low, high in bounds)


@functools.lru_cache(maxsize=1024)
def largest_filled(program: ScoreProgram) -> float | None:
    """A number that no score hidden by a finite fill exceeds, whatever the operands; None if there is no such
    fill, or none is known that is far from usual scores. Where a row's largest score is `soft.UNDERFLOW`
    above it, hidden keys weigh exactly zero."""
    if all(keep.is_hard for keep in program.keeps) or any(keep.lowers for keep in program.keeps):
        return None
    bound = score_bounds(program, dot=3e38).filled
    return bound if -math.inf < bound <= -UNDERFLOWS else None


@functools.lru_cache(maxsize=1024)
def soft_masks(program: ScoreProgram) -> tuple[Keep, ...]:
    """Masks that hold for all pairs but those that a mask hides, be it by a finite fill."""
    if largest_filled(program) is None:
        return ()
    parts = _split(seen((s for s in program.statements if not isinstance(s, Weight)), any_fill))
    return tuple(Keep(part) for part in parts if part is not E.TRUE)


@functools.lru_cache(maxsize=1024)
def soft_diagonal(program: ScoreProgram) -> tuple[Keep, Expr] | None:
    """As `diagonal`, of the masks with finite fills too."""
    offsets = ((keep, _offset(keep.predicate)) for keep in soft_masks(program))
    return next(((keep, offset) for keep, offset in offsets if offset is not None), None)


def diagonal(statements: tuple[Statement, ...]) -> tuple[Keep, Expr] | None:
    """The statement `keep k <= q + offset` and its offset, if there is one that no later statement undoes."""
    offsets = [(keep, _offset(keep.predicate)) for keep in reversed(lasting_masks(statements))]
    return next(((keep, offset) for keep, offset in offsets if offset is not None), None)


def lasting_masks(statements: tuple[Statement, ...]) -> tuple[Keep, ...]:
    """Those of `conjuncts` whose masked keys no later statement reveals. Changes of weights are
    multiplications here, so zero stays zero."""
    lasting = _split(seen(s for s in statements if not isinstance(s, Weight)))
    hard = (s for s in statements if isinstance(s, Keep) and s.is_hard)
    return tuple(keep for keep in hard if keep.predicate in lasting)


def _offset(predicate: Expr) -> Expr | None:
    if predicate.op != "le" or predicate.args[0] is not S.index("k"):
        return None
    bound = predicate.args[1]
    if bound is S.index("q"):
        return E.ZERO
    if bound.op not in ("add", "sub") or bound.args[0] is not S.index("q"):
        return None
    offset = bound.args[1]
    if offset.op == "size" or (offset.op == "const" and offset.kind == "int"):
        return offset if bound.op == "add" else E.make("neg", (offset,), None, "int")
    return None


def padded(width: int) -> int:
    """The width of a tile that holds rows of this width: a power of two, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def in_two(width: int) -> tuple[int, int]:
    """The widths of two tiles that hold rows of this width: the largest power of two below it, and the rest,
    padded. Where that is no narrower than one tile: that tile, and 0."""
    whole = padded(width)
    tile = whole // 2
    rest = padded(width - tile) if width > tile else tile
    return (tile, rest) if tile + rest < whole else (whole, 0)


def tiles_read(program: ScoreProgram) -> int:
    """How many tensor elements the program reads for each score."""
    return sum({S.index("q"), S.index("k")} <= n.free for n in reads_of(program))


def reads_of(program: ScoreProgram) -> set[Expr]:
    """The elements that the program reads."""
    return {n for e in program.expressions for n in E.reads(e)}


def window_of(program: ScoreProgram) -> int:
    """The most keys that a query sees, itself included; 0: no limit, or it sees later keys too."""
    return examine(program, True, frozenset()).window or 0


# --- sums that are carried ---

STATES = {**DTYPES, torch.float64: "float64"}
"""Dtypes of the matrix."""

DEEPEST = 256
"""The most elements of a key whose matrix fits in registers, together with enough columns."""
OF_MATRIX, FEWEST_COLUMNS, MOST_COLUMNS = 2048, 16, 64
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
    def operands(self) -> dict[str, str]:
        """The tensors that are given with strides, and the letters of their dimensions."""
        present = {"q": self.has_queries, "k": self.has_keys, "v": True, "decay": bool(self.decay)}
        rows = {name: "thd" for name, is_given in present.items() if is_given}
        return {**rows, **dict.fromkeys(("left", "right") if self.vectors else (), "thmd")}

    @property
    def rows(self) -> int:
        """Rows of the matrix, a power of two."""
        return 1 if self.depth == 1 else padded(self.depth)

    @property
    def columns(self) -> int:
        """Columns of the matrix that one program takes."""
        elements = OF_MATRIX if self.sums == "float32" else OF_MATRIX // 2
        return max(FEWEST_COLUMNS, min(MOST_COLUMNS, elements // self.rows))

    @property
    def sums(self) -> str:
        """The dtype of sums."""
        return "float64" if self.state == torch.float64 else "float32"

    @property
    def warps(self) -> int:
        return max(1, self.rows * self.columns // OF_WARP)
