"""A plan as the Triton source of its backward pass: two kernels, each a loop, without atomics.

As in FlashAttention-2 (Dao 2023, algorithm 2) weights are computed again from the scores and the rows'
log-sum-exp, but in two kernels: one program for each block of queries sums what its keys give to dq, one for
each block of keys what the queries of all its heads give to dk and dv. Sums are taken in one order, so the
same call gives the same gradients. With p the weights and delta = rowsum(dout * out) - dlse:

    ds = p * (f * (dout . v) - delta)         f: what the program makes of a weight, as a multiple

and from ds back through the program's statements to the dot.
"""

from __future__ import annotations

import math

from attngraph.codegen.triton.derivative import derivative
from attngraph.codegen.triton.emit import NEGATIVE_INFINITY, Emitter, Kernel, indented, names_of_reads
from attngraph.codegen.triton.helpers import helpers
from attngraph.codegen.triton.plan import DTYPES, Plan, UnsupportedError
from attngraph.ir import expr as E
from attngraph.ir.score import DOT, SCORE, Keep, Score, Statement

OF_QUERIES, OF_KEYS = "gradient_of_queries", "gradients_of_keys"
"""The names of the two kernels."""
_TENSORS = ("query", "key", "value", "grad")


def emit_backward(plan: Plan) -> Kernel:
    """The two kernels of a plan, which have the same arguments; `name` is the first one's.

    Raises:
        UnsupportedError: the program has something whose derivative is not written yet; says what.
    """
    return _BackwardEmitter(plan).kernel()


def arguments(plan: Plan) -> tuple[str, ...]:
    """The arguments of either kernel in order: tensors, rows' numbers, what a row that sees no key gives to
    all values (`unseen` `[B, Hkv]`: NaN, as its weights are, or zero), results (dense), lengths, strides,
    then reads and sizes as in `emit.arguments`."""
    found = [*_TENSORS, "lse", "delta", "unseen", "grad_query", "grad_key", "grad_value", "Hq", "Sq", "Skv"]
    found += [f"{tensor}_{axis}" for tensor in _TENSORS for axis in "bhsd"]
    return (*found, *names_of_reads(plan))


class _BackwardEmitter(Emitter):
    def kernel(self) -> Kernel:
        if any(read.kind in ("half", "float", "double") for read in self.plan.reads):
            raise UnsupportedError("gradients of floating tensors that scores read")
        queries, keys = self.of_queries(), self.of_keys()
        sizes = [a for a in arguments(self.plan) if a.startswith("n")]
        decorator = f"@triton.jit(do_not_specialize={sizes!r})" if sizes else "@triton.jit"
        head = [f"def {OF_QUERIES}(", *self.signature(), "):"]
        other = [f"def {OF_KEYS}(", *self.signature(), "):"]
        text = "\n\n\n".join([
            self.header(),
            *(h.rstrip() for h in helpers(self.writer.calls)),
            "\n".join([decorator, *head, *indented(queries)]),
            "\n".join([decorator, *other, *indented(keys)]),
        ])  # fmt: skip
        return Kernel(text + "\n", OF_QUERIES, arguments(self.plan))

    def header(self) -> str:
        plan = self.plan
        program = [f"#     {line}" for line in (str(plan.program) or "s = dot").split("\n")]
        return "\n".join([
            f"# {self.name}, backward, written by attngraph. For each batch b, head h, query q and key k:",
            *program,
            f"# query [B, Hq, Sq, {plan.D}], key [B, Hkv, Skv, {plan.D}], value [B, Hkv, Skv, {plan.Dv}], "
            f"{DTYPES[plan.dtype]};",
            f"# Hkv = Hq // {plan.group}; grad like out, lse and delta [B, Hq, Sq]; results dense.",
            "",
            "import triton",
            "import triton.language as tl",
            "",
            f"BLOCK_Q = tl.constexpr({plan.blocks.q})",
            f"BLOCK_K = tl.constexpr({plan.blocks.k})",
            f"LOG2E = tl.constexpr({math.log2(math.e)!r})",
            *([f"RATE = tl.constexpr({plan.rate!r})  # scale times log2(e)"] if plan.is_linear else []),
        ])  # fmt: skip

    def signature(self) -> list[str]:
        names = list(arguments(self.plan))
        counts = [4, 6, 3, 4, 4, 4, 4]
        counts += [1 + read.rank + len(self.plan.guarded_axes(read.number)) for read in self.plan.reads]
        rows = []
        for count in [*counts, self.plan.program.sizes]:
            rows.append(names[:count])
            names = names[count:]
        return [f"    {', '.join(row)}," for row in rows if row]

    # --- what both kernels compute of a tile ---

    def tile(self) -> tuple[list[str], list[str]]:
        """Lines that make `p` (weights) and `ds` (the gradient of the dot) of a tile of queries and keys, and
        the lines that they need of the queries alone."""
        plan, writer = self.plan, self.writer
        writer.begin_body()
        writer.before.clear()
        writer._outer.clear()
        statements = list(plan.statements)
        for number, statement in enumerate(statements):
            self.forward(number, statement)
        multiple = writer.expression(self.multiple.factor).code
        lines = list(writer.inside)
        writer.inside.clear()
        unit = "s * RATE - row_lse * LOG2E" if plan.is_linear else "(s - row_lse) * LOG2E"
        weigh = "" if self.multiple.is_plain else f" * ({multiple})"
        back = [
            f"s = tl.where((q < Sq) & (k < Skv), s, {NEGATIVE_INFINITY})",
            f"p = tl.exp2({unit})",
            *([] if self.multiple.keeps_nan else ["p = tl.where(p == p, p, 0.0)"]),
            f"ds = p * ({self.product_of('grad_tile', 'value_tile')}{weigh} - row_delta)",
        ]
        writer.inside.clear()
        for number in reversed(range(len(statements))):
            self.backward(number, statements[number])
        back += list(writer.inside)
        if plan.is_linear:
            back.append(f"ds = ds * {plan.program.scale!r}")
        if not self.multiple.is_plain:
            back.append(f"p = p{weigh}")
        return [f"dot = {self.dot()}", "s = dot", *lines, *back], list(writer.before)

    def forward(self, number: int, statement: Statement) -> None:
        """A statement, leaving what its derivative needs."""
        writer = self.writer
        formula = statement.value if isinstance(statement, Score) else statement.fill  # type: ignore[union-attr]
        if any(n in (DOT, SCORE) for n in E.walk(derivative(_joined(formula), DOT))):
            writer.inside.append(f"before{number} = s")
        if isinstance(statement, Score):
            self.score(statement)
            return
        assert isinstance(statement, Keep)
        keep = writer.truth(statement.predicate)
        writer.inside.append(f"kept{number} = {keep}")
        fill = writer.expression(statement.fill)
        code = fill.code if fill.is_integer else self.narrow(fill.code)
        writer.inside.append(f"s = tl.where(kept{number}, s, {code})")

    def backward(self, number: int, statement: Statement) -> None:
        """`ds` of a statement's result becomes that of what it was made from."""
        writer = self.writer
        assert isinstance(statement, (Score, Keep))
        formula = statement.value if isinstance(statement, Score) else statement.fill
        if number > 0 and any(n is DOT for n in E.walk(formula)):
            raise UnsupportedError("the dot in a statement after the first")
        # Before the first statement the score is the dot.
        whole = derivative(formula, SCORE) if number > 0 else derivative(_joined(formula), DOT)
        if any(n in (DOT, SCORE) for n in E.walk(whole)):
            writer.inside.append(f"s = before{number}")
            writer._inner.clear()
        code = self.narrow(writer.expression(whole).code)
        if isinstance(statement, Keep):
            hidden = "0.0" if E.is_const(whole, 0) else f"ds * ({code})"
            writer.inside.append(f"ds = tl.where(kept{number}, ds, {hidden})")
        elif not E.is_const(whole, 1):
            writer.inside.append(f"ds = ds * ({code})")

    def product_of(self, a: str, b: str) -> str:
        exact = ', input_precision="ieee"' if DTYPES[self.plan.dtype] == "float32" else ""
        return f"tl.dot({a}, tl.trans({b}){exact})"

    def added(self, total: str, a: str, b: str) -> str:
        exact = ', input_precision="ieee"' if DTYPES[self.plan.dtype] == "float32" else ""
        return f"{total} = tl.dot({a}.to({b}.dtype), {b}, {total}{exact})"

    # --- the two kernels ---

    def places(self, axis: str) -> list[str]:
        plan = self.plan
        widths = [f"d = tl.cast(tl.arange(0, {self.D}), tl.int64)[None, :]"]
        if plan.Dv != plan.D:
            widths.append(f"dv = tl.cast(tl.arange(0, {self.Dv}), tl.int64)[None, :]")
        heads = "Hq" if axis == "q" else f"(Hq // {plan.group})" if plan.group > 1 else "Hq"
        long = "tl.cast({}, tl.int64)".format if plan.wide else "{}".format
        owner = "h" if axis == "q" else "kv"
        return [
            "place = tl.program_id(0)",
            f"blocks = tl.cdiv({'Sq' if axis == 'q' else 'Skv'}, BLOCK_{axis.upper()})",
            f"first = (place % blocks) * BLOCK_{axis.upper()}",
            f"b = {long(f'place // blocks // {heads}')}",
            f"{owner} = {long(f'place // blocks % {heads}')}",
            *widths,
        ]

    def rows_of_queries(self) -> list[str]:
        """Tiles of the queries q of head h."""
        return [
            *self.address("query", "h", "q", "d", "q < Sq"),
            *self.address("grad", "h", "q", self.dv, "q < Sq"),
            "row = (tl.cast(b, tl.int64) * Hq + h) * Sq + q",
            "row_lse = tl.load(lse + row, mask=q < Sq, other=0.0)",
            "row_delta = tl.load(delta + row, mask=q < Sq, other=0.0)",
        ]

    def tiles_of_keys(self) -> list[str]:
        """Tiles of the keys of head kv whose places are `at` `[BLOCK_K, 1]`."""
        return [
            *self.address("key", "kv", "at", "d", "at < Skv"),
            *self.address("value", "kv", "at", self.dv, "at < Skv"),
        ]

    def address(self, name: str, head: str, rows: str, columns: str, mask: str) -> list[str]:
        where = f"tl.cast(b, tl.int64) * {name}_b + tl.cast({head}, tl.int64) * {name}_h"
        return [
            f"{name}_rows = {name} + {where} + tl.cast({rows}, tl.int64) * {name}_s",
            f"{name}_tile = tl.load({name}_rows + {columns} * {name}_d, "
            f"mask={self.inside(mask, columns)}, other=0.0)",
        ]

    def of_queries(self) -> list[str]:
        tile, before = self.tile()
        stop, lines = self.stop()
        long = "tl.cast({}, tl.int64)".format if self.plan.wide else "{}".format
        body = [
            f"k = {long('start + tl.arange(0, BLOCK_K)[None, :]')}",
            "at = start + tl.arange(0, BLOCK_K)[:, None]",
            *self.tiles_of_keys(), *tile, self.added("sum", "ds", "key_tile"),
        ]  # fmt: skip
        kv = f"h // {self.plan.group}" if self.plan.group > 1 else "h"
        return [
            *self.places("q"),
            f"kv = {kv}",
            f"q = {long('first + tl.arange(0, BLOCK_Q)[:, None]')}",
            *self.rows_of_queries(), *before, *lines,
            f"sum = tl.zeros([BLOCK_Q, {self.D}], tl.float32)",
            f"for start in tl.range(0, {stop}, BLOCK_K):", *indented(body),
            f"result = grad_query + row * {self.plan.D} + d",
            "tl.store(result, sum.to(grad_query.dtype.element_ty), "
            f"mask={self.inside('q < Sq', 'd')})",
        ]  # fmt: skip

    def of_keys(self) -> list[str]:
        tile, before = self.tile()
        begin, lines = self.begin_of_queries()
        long = "tl.cast({}, tl.int64)".format if self.plan.wide else "{}".format
        body = [
            f"q = {long('start + tl.arange(0, BLOCK_Q)[:, None]')}",
            *self.rows_of_queries(), *before, *tile,
            self.added("sum_value", "tl.trans(p)", "grad_tile"),
            self.added("sum_key", "tl.trans(ds)", "query_tile"),
        ]  # fmt: skip
        loop = [f"for start in tl.range({begin}, Sq, BLOCK_Q):", *indented(body)]
        heads = [f"h = kv * {self.plan.group} + member", *loop]
        stores = []
        for name, columns, width in (("key", "d", self.plan.D), ("value", self.dv, self.plan.Dv)):
            total = f"sum_{name}"
            if name == "value" and self.multiple.keeps_nan:
                total = "(sum_value + tl.load(unseen + place // blocks))"
            stores += [
                f"result = grad_{name} + (tl.cast(place // blocks, tl.int64) * Skv + at) * {width}",
                f"result += {columns}",
                f"tl.store(result, {total}.to(grad_{name}.dtype.element_ty), "
                f"mask={self.inside('at < Skv', columns)})",
            ]
        return [
            *self.places("k"),
            "at = first + tl.arange(0, BLOCK_K)[:, None]",
            f"k = {long('first + tl.arange(0, BLOCK_K)[None, :]')}",
            *self.tiles_of_keys(), *lines,
            f"sum_key = tl.zeros([BLOCK_K, {self.D}], tl.float32)",
            f"sum_value = tl.zeros([BLOCK_K, {self.Dv}], tl.float32)",
            f"for member in range({self.plan.group}):", *indented(heads), *stores,
        ]  # fmt: skip

    def stop(self) -> tuple[str, list[str]]:
        """Where the keys end that any query of the block sees."""
        if self.plan.diagonal is None:
            return "Skv", []
        shift, lines = self.shift()
        return "stop", [*lines, f"stop = tl.minimum(first + BLOCK_Q + {shift}, Skv)"]

    def begin_of_queries(self) -> tuple[str, list[str]]:
        """Where the queries begin of which any sees a key of the block."""
        if self.plan.diagonal is None:
            return "0", []
        shift, lines = self.shift()
        return "begin", [*lines, f"begin = tl.maximum(first - {shift}, 0) // BLOCK_Q * BLOCK_Q"]

    def shift(self) -> tuple[str, list[str]]:
        assert self.plan.diagonal is not None
        if self.plan.diagonal[1] is E.ZERO:
            return "0", []
        self.writer.before.clear()
        code = self.writer.expression(self.plan.diagonal[1]).code
        lines = list(self.writer.before)
        return (f"tl.cast({code}, tl.int64)" if self.plan.wide else f"({code})"), lines


def _joined(formula: E.Expr) -> E.Expr:
    """A first statement's formula, where the score is the dot itself."""
    return E.rebuild(
        formula, lambda n, args: DOT if n is SCORE else E.make(n.op, args, n.value, n.kind) if args else n
    )
