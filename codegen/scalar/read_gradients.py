"""Gradients of the tensors that scores read: which kernel sums them, and to which elements the sums belong.

One score contributes ds times the derivative of its statement by a read to an element of that read. An
element's gradient is the sum over all (b, h, q, k) that read it, and the index expressions say which those
are:

    without `k`           the keys of a row are summed by the program that owns the row      [B, Hq, Sq]
    without `q`           the queries of a key by the program that owns the key              [B, Hq, Skv]
    with both             a separate program for each tile sums over b and h if no index has them;
                          a limited number of rows at a time                                 [.., rows, Skv]

The remaining sums are computed here, in an order that does not change from call to call: an index that is a
plain variable is an axis of the sums; computed indices are accumulated by `index_put_`. Where q and k occur
only as k - q, sums are first taken along the diagonals.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.remarks import UnsupportedError
from attngraph.codegen.scalar.weights import weight_multiple
from attngraph.ir.language import E, Environment, Expr, S, Tile, evaluate
from attngraph.ir.language.derivative import ZERO, derivative
from attngraph.ir.language.score import DOT, SCORE, WEIGHT, Keep, Score, ScoreProgram
from attngraph.ir.ops.kernels import Reads, Sizes, gradients

ROWS, COLUMNS, PAIRS = "rows", "columns", "pairs"
PAIRS_AT_ONCE = 1 << 24
"""About how many sums of single pairs are held at once (64 MiB)."""
PAIRS_ON_CPU = 1 << 18
"""The same on the CPU, where starting a kernel costs almost nothing."""
_B, _H, _Q, _K = (S.index(name) for name in S.INDICES)


def wanted_gradients(operands: Sequence[Tensor], reads: Reads) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """Which of q, k, v want gradients, and the numbers of the floating reads that do.

    If any tensor has `requires_grad`, only those that have it get gradients; if none has (a call of the op in
    a traced graph), all do.
    """
    said = any(t.requires_grad for t in (*operands, *reads))
    numbers = [n for n, r in enumerate(reads) if r.is_floating_point() and (r.requires_grad or not said)]
    return tuple(t.requires_grad or not said for t in operands), tuple(numbers)


@dataclasses.dataclass(frozen=True)
class ReadGradient:
    """A read whose gradient the kernels sum: which kernel does, and whether a row that sees no key makes the
    gradient NaN at every key (as for a read that multiplies a weight)."""

    node: Expr
    kind: str
    spoils: bool

    @property
    def owned(self) -> tuple[bool, bool]:
        """Whether batches, and heads, have separate sums."""
        return _B in self.node.free, _H in self.node.free


@functools.lru_cache(maxsize=1024)
def read_gradients(program: ScoreProgram, wanted: tuple[int, ...]) -> tuple[ReadGradient, ...]:
    """The sums that a program's kernels compute for the reads with these numbers. Raises UnsupportedError: an
    operation without a derivative, or a read whose index depends on scores."""
    scored = [s.value if isinstance(s, Score) else s.fill for s in program.statements
              if isinstance(s, (Score, Keep))]  # fmt: skip
    multiple = weight_multiple(program)
    factor = multiple.factor
    nodes = dict.fromkeys(
        n for e in (*scored, factor) for n in E.walk(e) if n.op == "read" and n.value in wanted
    )
    found = []
    for node in nodes:
        weighs = derivative(factor, node) is not ZERO
        if not weighs and all(derivative(e, node) is ZERO for e in scored):
            continue
        if any(n in (DOT, SCORE, WEIGHT) for n in E.walk(node)):
            raise UnsupportedError("the gradient of a tensor that is read where a score says")
        if weighs and not _weighs_last(program):
            raise UnsupportedError("the gradient of what weights are multiplied by before NaN is taken away")
        both = _Q in node.free and _K in node.free
        kind = PAIRS if both else COLUMNS if _K in node.free else ROWS
        found.append(ReadGradient(node, kind, weighs and multiple.keeps_nan))
    return tuple(found)


def _weighs_last(program: ScoreProgram) -> bool:
    """Whether a NaN row is replaced by zeros before all multiplications of weights, or never."""
    weights = [s.value for s in program.statements if isinstance(s, S.Weight)]
    guard = [place for place, w in enumerate(weights) if any(n.op == "isnan" for n in E.walk(w))]
    first = weights[0]
    plain = first.op == "where" and first.args[0].op == "isnan" and first.args[2] is WEIGHT
    return not guard or (guard == [0] and plain)


# --- from sums to gradients ---------------------------------------------------------------------------


class Totals:
    """Gradients of the reads of one call, to which sums are added.

    Args:
        lengths: B, Hq, Sq and Skv.
        lse: the rows' log-sum-exp `[B, Hq, Sq]`: a row that sees no key makes NaN what it spoils. None: the
            sums are NaN there already.
    """

    def __init__(
        self, wanted: Sequence[int], reads: Reads, sizes: Sizes,
        lengths: tuple[int, int, int, int], lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.wanted, self.reads, self.sizes, self._lse = wanted, reads, sizes, lse
        self.B, self.Hq, self.Sq, self.Skv = lengths
        self.totals: list[Tensor | None] = []
        for number, read in enumerate(reads):
            dtype = torch.promote_types(read.dtype, torch.float32) if number in wanted else read.dtype
            zeros = read.is_floating_point()
            self.totals.append(torch.zeros(read.shape, dtype=dtype, device=read.device) if zeros else None)

    def results(self) -> list[Tensor | None]:
        return [t if t is None else t.to(r.dtype) for t, r in zip(self.totals, self.reads, strict=True)]

    @functools.cached_property
    def _unseen(self) -> Tensor:
        """NaN where a row sees no key, else zero."""
        assert self._lse is not None
        return torch.where(self._lse.isfinite(), 0.0, math.nan)

    def places(self, reads: Sequence[ReadGradient]) -> list[Tensor]:
        """Memory for the sums of these reads, as `add` takes them: empty for sums of pairs."""
        lengths = {ROWS: self.Sq, COLUMNS: self.Skv, PAIRS: 0}
        about = [((self.B, self.Hq, lengths[r.kind]), self.reads[r.node.value].device) for r in reads]
        return [torch.empty(shape, dtype=torch.float32, device=device) for shape, device in about]

    def add(self, found: ReadGradient, sums: Tensor, block: int, compute: "Compute") -> None:
        """Add a read's sums: of rows `[B, Hq, Sq]`, of columns `[B, Hq, Skv]`, or of single pairs, which
        `compute` computes, some rows (a multiple of `block`) at a time."""
        if found.kind == PAIRS:
            self._add_pairs(found, block, compute)
            return
        are_rows = found.kind == ROWS
        if found.spoils and self._lse is not None:
            sums = sums + (self._unseen if are_rows else self._unseen.sum(2, keepdim=True))
        q, k = ((0, self.Sq), (0, 1)) if are_rows else ((0, 1), (0, self.Skv))
        self._add(found.node, sums.unsqueeze(3 if are_rows else 2), Tile((0, self.B), (0, self.Hq), q, k))

    def _add_pairs(self, found: ReadGradient, block: int, compute: "Compute") -> None:
        each_batch, each_head = found.owned
        along = follows_distance(found.node)
        H = self.Hq if each_head else 1
        device = self.reads[found.node.value].device
        held = min(PAIRS_AT_ONCE, PAIRS_ON_CPU) if device.type == "cpu" else PAIRS_AT_ONCE
        rows = most = -(-self.Sq // block) * block
        rows = max(block, min(most, held // (H * self.Skv) // block * block))
        batches = max(1, min(self.B, held // (H * rows * self.Skv))) if each_batch else 1
        shift = rows - 1 if along else 0
        sums = torch.zeros((batches, H, rows, self.Skv + 2 * shift), dtype=torch.float32, device=device)
        hidden = None
        if found.spoils and self._lse is not None:
            sinks = [axis for axis, is_own in enumerate(found.owned) if not is_own]
            hidden = self._unseen.sum(sinks, keepdim=True) if sinks else self._unseen
        for b in range(0, self.B if each_batch else 1, batches):
            count = min(batches, self.B - b) if each_batch else 1
            own = (b, b + count) if each_batch else (0, 1)
            diagonals = sums.new_zeros((count, H, 1, -(-self.Sq // rows) * rows + self.Skv - 1))
            for q in range(0, self.Sq, rows):
                here, stop = sums[:count], min(q + rows, self.Sq)
                compute(here[..., shift : shift + self.Skv], b, q)
                tile = here[:, :, : stop - q, shift : shift + self.Skv]
                if hidden is not None:
                    tile += hidden[own[0] : own[1], :, q:stop, None]
                if along:
                    start = diagonals.shape[3] - self.Skv + 1 - rows - q
                    diagonals[..., start : start + self.Skv + shift] += _along_diagonals(here)
                else:
                    self._add(found.node, tile, Tile(own, (0, H), (q, stop), (0, self.Skv)))
            if along:
                distances = diagonals[..., diagonals.shape[3] - self.Skv + 1 - self.Sq :]
                self._add(found.node, distances, Tile(own, (0, H), (0, 1), (1 - self.Sq, self.Skv)))

    def add_sink(self, program: ScoreProgram, lse: Tensor, delta: Tensor) -> None:
        """The sink's gradient. A sink is one more key whose value is zero, so it is -exp(sink - lse) * delta
        for each row. `lse` may be float64, for rows that need the precision."""
        if program.sink is None or not any(self.reads[n].is_floating_point() for n in self.wanted):
            return
        tile = Tile((0, self.B), (0, self.Hq), (0, self.Sq), (0, 1))
        with torch.enable_grad():
            inputs = [
                r.detach().requires_grad_() if n in self.wanted else r for n, r in enumerate(self.reads)
            ]
            sink = evaluate.sink(program, Environment(tile, inputs, self.sizes, torch.float32, lse.device))
            assert sink is not None
            sink = sink.expand(*lse.shape, 1)
            of_sink = -(sink.detach() - lse.unsqueeze(3)).exp().to(sink.dtype) * delta.unsqueeze(3)
            found = gradients(inputs, (sink, sink), (of_sink, torch.zeros_like(of_sink)))
        for total, grad in zip(self.totals, found, strict=True):
            if total is not None and grad is not None:
                total += grad

    def _add(self, node: Expr, sums: Tensor, tile: Tile) -> None:
        """Add `sums` to the gradients of the elements that `node` reads on the tile."""
        total = self.totals[node.value]
        assert total is not None
        axes = [a for a, name in enumerate(S.INDICES) if S.index(name) not in node.free and sums.shape[a] > 1]
        sums = (sums.sum(axes, keepdim=True) if axes else sums).to(total.dtype)
        env = Environment(tile, self.reads, self.sizes, total.dtype, total.device)
        plain = [a for a in node.args if a.op == "var"]
        if len(set(plain)) == len(plain) and all(a.op in ("var", "const") for a in node.args):
            own: Sequence[Any] = self.totals  # typed so that it can be indexed to a view of the total
            evaluate.read(node, dataclasses.replace(env, reads=own), {}).add_(sums)
            return
        values = (evaluate.evaluate(arg, env, {}) for arg in node.args)
        places = [torch.as_tensor(value, device=env.device).to(torch.int64) for value in values]
        inside = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=total.device)
        for extent, place in zip(total.shape, places, strict=True):
            inside = inside & (place >= 0) & (place < extent)
        picks = tuple(p.clamp(0, n - 1).expand(sums.shape) for n, p in zip(total.shape, places, strict=True))
        sums = torch.where(inside, sums, 0)
        if total.device.type == "cpu":  # where the order in which index_put_ adds depends on threads
            place = sum(p * step for p, step in zip(picks, total.stride(), strict=True))
            assert isinstance(place, Tensor)
            total.view(-1).index_add_(0, place.reshape(-1), sums.reshape(-1))
        else:
            total.index_put_(picks, sums, accumulate=True)


Compute = Callable[[Tensor, int, int], None]
"""Writes sums `[batches or 1, Hq or 1, rows, Skv]` starting at a batch and a row."""


def _along_diagonals(sums: Tensor) -> Tensor:
    """Sums over the diagonals of `[.., rows, rows - 1 + Skv + rows - 1]`, where key k stands at k + rows - 1
    and the rest is zero: `[.., 1, Skv + rows - 1]`, for k - q from 1 - rows upwards."""
    *outer, rows, width = sums.shape
    *strides, along, _ = sums.stride()
    skewed = sums.as_strided((*outer, rows, width - rows + 1), (*strides, along + 1, 1))
    return skewed.sum(-2, keepdim=True)


@functools.lru_cache(maxsize=1024)
def follows_distance(node: Expr) -> bool:
    """Whether an expression depends on q and k only through k - q. Then it may be evaluated at q = 0, with
    k as the distance."""
    return all(_step(arg) == 0 for arg in node.args)


def _step(node: Expr) -> int | None:
    """By how much an expression grows when q and k both grow by one; None where that is not a constant."""
    if node in (_Q, _K):
        return 1
    if _Q not in node.free and _K not in node.free:
        return 0
    steps = [_step(arg) for arg in node.args]
    known = [s for s in steps if s is not None]
    if len(known) < len(steps):
        return None
    match node.op:
        case "add":
            return sum(known)
        case "sub" | "neg":
            return known[0] - known[1] if node.op == "sub" else -known[0]
        case "min" | "max" if len(set(known)) == 1:
            return known[0]
        case "where" if known[0] == 0 and known[1] == known[2]:
            return known[1]
        case "eq" | "ne" | "le" | "lt" | "ge" | "gt" if known[0] == known[1]:
            return 0
    return 0 if not any(known) else None
