"""What the backward kernels compute for a tile of queries and keys: weights, and the gradients of scores.

Weights are computed again from the scores, as exp(s - top) / total. For most rows top is zero and total is
the exponential of their log-sum-exp. Where that is far from zero (all keys masked by a finite fill, large
scores) float32 cannot hold enough digits of it, so the kernel of queries first recomputes such rows: top
is their largest score, and total the sum of exponentials. With p the weights and
delta = rowsum(dout * out) - dlse:

    ds = p * (f * (dout . v) - delta)         f: the factor by which the program changes a weight

and from ds back through the program's statements to the dot, and to the tensors that they read: a statement
s' = e(s, dot, r) contributes ds * de/dr to the gradient of r.
"""

from __future__ import annotations

from collections.abc import Sequence

from attngraph.codegen.scalar.chain import Chain
from attngraph.codegen.scalar.derivative import derivative
from attngraph.codegen.scalar.read_gradients import read_gradients
from attngraph.codegen.triton.emit import NEGATIVE_INFINITY, Emitter
from attngraph.codegen.triton.plan import BackwardPlan, stays_trusted
from attngraph.ir.ops.kernels import TRUSTED

WITHIN = "(q < Sq) & (k < Skv)"


class TileEmitter(Emitter):
    """Writes the tiles of backward kernels; `emit_backward.py` has the kernels around them."""

    extents = ("OWN", "OTHER")
    splits = False

    def __init__(self, plan: BackwardPlan) -> None:
        super().__init__(plan)
        self.reads = read_gradients(plan.program, plan.wanted)
        self.rate = "RATE" if plan.is_linear else "LOG2E"
        self.is_trusted = stays_trusted(plan.program)

    def rows_of_queries(self) -> list[str]:
        """Load a tile of the queries q `[.., 1]` of head h."""
        return self.address("query", "h", "q", "d", "q < Sq")

    def rows_of_gradients(self) -> list[str]:
        """Load a tile of the gradients of their results."""
        return self.address("grad", "h", "q", self.dv, "q < Sq")

    def delta_of_rows(self) -> list[str]:
        """Compute and store delta of the rows of queries, from the tile of gradients."""
        return [
            *self.address("out", "h", "q", self.dv, "q < Sq"),
            "row_delta = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1, keep_dims=True)",
            "row_delta -= tl.load(grad_lse + row, mask=q < Sq, other=0.0)",
            "tl.store(delta + row, row_delta, mask=q < Sq)",
        ]

    def numbers_of_rows(self, edge: bool = True) -> list[str]:
        """Load the numbers for computing weights that the first kernel stored."""
        names = {"lse": "lse"} if self.is_trusted else {"top": "tops", "total": "totals"}
        guard = ", mask=q < Sq, other=0.0" if edge else ""
        return [
            "row = (tl.cast(b, tl.int64) * Hq + h) * Sq + q",
            *(f"row_{name} = tl.load({tensor} + row{guard})" for name, tensor in names.items()),
        ]

    def tiles_of_keys(self) -> list[str]:
        """Load tiles of the keys of head kv at positions `at` `[.., 1]`."""
        return [
            *self.address("key", "kv", "at", "d", "at < Skv"),
            *self.address("value", "kv", "at", self.dv, "at < Skv"),
        ]

    def address(self, name: str, head: str, rows: str, columns: str, mask: str) -> list[str]:
        where = f"{name}_head + tl.cast({rows}, tl.int64) * {name}_s + {columns} * {name}_d"
        return [
            self.base(name, head),
            f"{name}_tile = tl.load({where}, mask={self.inside(mask, columns)}, other=0.0)",
        ]

    def far_rows(self) -> tuple[list[str], list[str], list[str]]:
        """For rows whose log-sum-exp is too large to trust: lines that tell whether a block has any
        (`is_far`), lines that add a tile to `row_top` and `row_sum`, and lines that compute `row_top` and
        `row_total` (base-2 logarithms) for all rows. Emitted after `tile`, whose lines for queries they
        share."""
        writer = self.writer
        writer.begin_body()
        for statement in self.plan.statements:
            writer.assign("s", statement)
        first = [
            f'far = (tl.abs(row_lse) > {TRUSTED}) & (tl.abs(row_lse) < float("inf"))',
            "is_far = tl.max(tl.cast(far, tl.int32)) > 0",
            f"row_top = tl.zeros([OWN, 1], tl.float32) + {NEGATIVE_INFINITY}",
            "row_sum = tl.zeros([OWN, 1], tl.float32)",
        ]
        tile = [
            f"dot = {self.dot()}", "s = dot", *writer.inside,
            f"s = tl.where(k < Skv, s, {NEGATIVE_INFINITY})",
            "top = tl.maximum(row_top, tl.max(s, 1, keep_dims=True))",
            f"base = tl.where(top == {NEGATIVE_INFINITY}, 0.0, top)  # a row may have no key yet",
            f"row_sum = row_sum * tl.exp2((row_top - base) * {self.rate})",
            f"row_sum += tl.sum(tl.exp2((s - base) * {self.rate}), 1, keep_dims=True)",
            "row_top = top",
        ]  # fmt: skip
        last = []
        if self.plan.program.sink is not None:
            last += [
                f"far = far & (row_top > {NEGATIVE_INFINITY})  # else there is but the sink",
                f"sink = {self.sink()}",
                f"row_sum += tl.exp2((sink - row_top) * {self.rate})",
            ]
        last += [
            "row_top = tl.where(far, row_top, 0.0)",
            "row_total = tl.where(far, tl.log2(row_sum), row_lse * LOG2E)",
        ]
        return first, tile, last

    def tile(
        self, wanted: Sequence[int] = (), within: str = "", turned: bool = False,
        numbers: Sequence[str] = (), delta: Sequence[str] = (),
    ) -> list[str]:  # fmt: skip
        """Lines that compute `p` (weights), `ds` (the gradient of the dot, without the scale of a linear
        program) and `of_read<i>` for the wanted reads. `writer.before` has the lines that they need for the
        queries alone.

        Args:
            within: where a tile is cut off, by the causal mask too if it has a comparison for that; all of
                these are zero outside. "": nowhere, and no mask that whole tiles do without is evaluated.
                turned: keys are the rows of the tile.
        """
        plan, writer, factor = self.plan, self.writer, self.multiple.factor
        writer.begin_body()
        chain = Chain(writer, self.reads)
        skipped = plan.keeps_of_whole_tiles if not within else () if within == WITHIN else self.at_the_end
        statements = [(n, s) for n, s in enumerate(plan.statements) if s not in skipped]
        for number, statement in statements:
            chain.forward(number, statement)
        multiple = writer.real(factor)
        queries, keys = "query_tile", "key_tile"
        dot = self.product_of(keys, queries, True) if turned else self.product_of(queries, keys, True)
        lines = [f"dot = {dot}", "s = dot", *writer.inside, *numbers]
        writer.inside.clear()
        unit = "(s - row_lse) * LOG2E" if self.is_trusted else f"(s - row_top) * {self.rate} - row_total"
        weigh = "" if self.multiple.is_plain else f" * ({multiple})"
        weights = f"tl.where({within}, tl.exp2({unit}), 0.0)" if within else f"tl.exp2({unit})"
        sides = ("value_tile", "grad_tile") if turned else ("grad_tile", "value_tile")
        lines += [
            f"p = {weights}  # the weights again",
            *([] if self.multiple.keeps_nan else ["p = tl.where(p == p, p, 0.0)"]),
            f"weighed = {self.product_of(*sides, self.Dv <= 64)}",
            *delta,
            f"ds = p * (weighed{weigh} - row_delta)  # of the scores, and back to the dots",
        ]
        for number in wanted:
            chain.add(f"of_read{number}", "p * weighed", derivative(factor, self.reads[number].node))
        for number, statement in reversed(statements):
            chain.backward(number, statement, wanted)
        lines += writer.inside
        writer.inside.clear()
        if "of_dot" in chain.written:
            lines.append("ds = ds + of_dot")
        # Outside of the tile, a row's delta or a formula may be NaN or infinite, and zero times that is NaN.
        names = ["ds", *(n for n in sorted(chain.written) if n != "of_dot")] if within else []
        lines += [f"{name} = tl.where({within}, {name}, 0.0)" for name in names]
        if weigh:
            lines.append(f"p = p{weigh}")
        return lines

    def product_of(self, a: str, b: str, turn: bool) -> str:
        """A product with a transposed tile. `turn`: in single precision, which Triton multiplies without
        tensor cores, it is written the other way round, which decides how many registers a kernel takes."""
        if self.exact and turn:
            return f"tl.trans(tl.dot({b}, tl.trans({a}){self.exact}))"
        return f"tl.dot({a}, tl.trans({b}){self.exact})"

    def added(self, total: str, a: str, b: str) -> str:
        return f"{total} = tl.dot({a}.to({b}.dtype), {b}, {total}{self.exact})"
