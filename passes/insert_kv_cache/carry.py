"""Sums over earlier tokens (`meaning/tokens/recurrence.py`), carried from step to step.

Each becomes one `attngraph::running_sum`: what a token writes is a product of something along the axes that
are summed over (keys) and something along the others (values), where it is one; axes along which what is
carried decays or is read differently are heads. The claim that the recogniser read from three tokens is then
run: in float64, against the model's own operations, on sequences of several lengths, among them ones of
several chunks where the model computes in chunks. Used by `insert_kv_cache`.
"""

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir import budgets
from attngraph.ir.graph import holds, source_of
from attngraph.ir.language import E, Expr
from attngraph.ir.ops.running_sum import running_sum
from attngraph.meaning.algebra import M
from attngraph.meaning.check.comparison import compare, elementwise
from attngraph.meaning.check.region import bytes_in_float64, region
from attngraph.meaning.check.sample import Sample
from attngraph.meaning.tokens.facts import Kind
from attngraph.meaning.tokens.numbers import reach
from attngraph.meaning.tokens.recurrence import Sums
from attngraph.meaning.tokens.transitions import RunningSum
from attngraph.meaning.tokens.unfold import VIEWS
from attngraph.passes.build import Builder, NoSize
from attngraph.passes.insert_kv_cache.step import RefutedError, Step, carried_in, computed_in, extent_of
from attngraph.passes.insert_kv_cache.write_formula import FormulaWriter, NotWritten

aten = torch.ops.aten
EXACT, ENTRIES = 1e-8, 16
"""How far two values that should be equal may be apart: by rounding in float64, or of so many entries of the
model's tables."""
LENGTHS = (5, 2, 1, 19, 70)
"""Tokens of the sequences on which a claim is compared, besides two and a half times the longest chunk, and
more than the numbers of its operations reach."""
LONGEST_CHUNK = 1024


def carry(step: Step, builder: Builder, node: fx.Node, scan: Sums) -> tuple[fx.Node, str]:
    """A `Rewrite` of sums.

    Raises:
        RefutedError: it is none, or cannot be computed for new tokens.
    """
    sums = _Sums(step, builder, node, scan)
    try:
        new = sums.replace()
    except (NotWritten, NoSize) as problem:
        reason = f"it looks like one, and {problem} cannot be computed for a few new tokens"
        raise RefutedError(node, reason) from problem
    rounding = sums.rounding()
    step.rounding = max(step.rounding, rounding)
    difference = sums.difference(new, rounding)
    if difference:
        raise RefutedError(node, f"three tokens look like one, but more do not ({difference})")
    known = ", as far as the model's tables are exact (they are rounded)" if rounding else ""
    return new, f"the running sum at {source_of(node)} is carried from token to token{known}"


class _Sums:
    """The rewriting of one value, and its check."""

    def __init__(self, step: Step, builder: Builder, node: fx.Node, scan: Sums) -> None:
        self.step, self.builder, self.node, self.scan = step, builder, node, scan
        self.graph, self.tokens, self.inputs, self.carried = (
            step.graph, step.tokens, step.inputs, step.carried,
        )  # fmt: skip
        self.dtype: torch.dtype = node.meta["val"].dtype

    def _writer(self, variables: tuple[Expr, ...]) -> FormulaWriter:
        tokens, dtype = self.tokens, computed_in(self.dtype)
        device = self.node.meta["val"].device
        return FormulaWriter(self.builder, tokens.meaning, tokens.space, variables, dtype, device)

    def replace(self) -> fx.Node:
        """The node that computes the value for new tokens.

        Raises:
            NotWritten: a formula of the claim cannot be written as operations.
        """
        sums, call = self.scan, self.builder.call
        parts = [self._sum(part) for part in sums.sums]
        if not E.is_const(sums.rest, 0):
            parts.append(self._writer(sums.variables).tensor(sums.rest, sums.variables))
        value = parts[0]
        for part in parts[1:]:
            value = call(aten.add.Tensor, value, part)
        if value.meta["val"].dtype != self.dtype:
            value = call(aten._to_copy.default, value, dtype=self.dtype)
        return self.step.in_place(self.builder, value, self.node)

    def _sum(self, part: RunningSum) -> fx.Node:
        """One running sum, `[tokens, *variables]`."""
        call, variables = self.builder.call, self.scan.variables
        layout = _arranged(variables, part)
        writer = self._writer((*layout.heads, *part.over, *layout.values))
        tokens = self.builder.size(self.tokens.space.tokens)
        heads, width, values = (extent_of(*v) for v in (layout.heads, part.over, layout.values))

        def written(formula: Expr, dims: tuple[Expr, ...], sizes: list[int]) -> fx.Node:
            return call(aten.reshape.default, writer.tensor(formula, dims), [tokens, *sizes])

        plain = not part.over and E.is_const(part.read, 1) and not part.across
        q = k = decay = None
        less_one = self._less_one(part.decay)
        if not plain:
            q = written(part.read, (*layout.heads, *part.over), [heads, width])
            k = written(M.mul(*layout.of_keys), (*layout.heads, *part.over), [heads, width])
        of_values = part.write if plain else M.mul(*layout.of_values)
        v = written(of_values, (*layout.heads, *layout.values), [heads, values])
        if not E.is_const(part.decay, 1):
            along = part.over if not part.decay.free.isdisjoint(part.over) else ()
            decay = written(less_one or part.decay, (*layout.heads, *along), [heads, extent_of(*along)])
        ((state, about),) = self.step.states(
            self.node, [((heads, width, values), carried_in(self.dtype))]
        ).items()
        across: list[Any] = []
        for side in zip(*part.across, strict=True):
            vectors = [written(f, (*layout.heads, *part.over), [heads, 1, width]) for f in side]
            across.append(vectors[0] if len(vectors) == 1 else call(aten.cat.default, vectors, 2))
        if less_one is not None and decay is not None:
            across = [*(across or (None, None)), True]
        starts = self.inputs.rows("starts")
        both = call(running_sum, q, k, v, decay, state, starts, part.inclusive, *across)
        out, after = (call(operator.getitem, both, n) for n in (0, 1))
        self.carried[after] = about
        dims = (*layout.heads, *layout.values)
        out = call(aten.reshape.default, out, [tokens, *(int(v.args[0].value) for v in dims)])
        order = [0, *(1 + dims.index(v) for v in variables)]
        return out if order == sorted(order) else call(aten.permute.default, out, order)

    def _less_one(self, decay: Expr) -> Expr | None:
        """A decay less 1, where the model has no rounded decay that it multiplies by, but computes the
        exponential of what is added up. (A number that it raises to powers is rounded first.)"""
        if decay.op == "exp":
            (x,) = decay.args  # e^x - 1, to its last digit where x is small
            return M.mul(M.function("tanh", M.mul(E.const(0.5), x)), M.add(E.ONE, decay))
        if decay.op != "const":
            return None
        seen, waiting = set[fx.Node](), [self.node]
        while waiting:
            current = waiting.pop()
            fact = self.tokens.facts.get(current)
            if current not in seen and (fact is None or fact.kind not in (Kind.TOKEN, Kind.ATTENTION)):
                seen.add(current)
                waiting += current.all_input_nodes
        names = {str(n.target) for n in seen}
        is_exponential = "aten.exp.default" in names and not any(".pow." in name for name in names)
        return E.const(decay.value - 1) if is_exponential else None

    # --- the check ---

    def rounding(self) -> float:
        """By how much entries of tables, from which decays are read by comparing some, are off: a model with
        tables of a decay's powers computes them in its own dtype. 0 without such tables."""
        found = 0.0
        for read in (n for e in self.scan.formulas for n in E.reads(e)):
            shape = self.tokens.meaning.shape(read.value)
            dtype = read.value.meta["val"].dtype
            if dtype.is_floating_point and any(
                index.op == "const" and extent is not E.ONE
                for index, extent in zip(read.args, shape, strict=True)
                if self.tokens[read.value].kind is Kind.FIXED
            ):
                found = max(found, torch.finfo(dtype).eps)
        return found

    def difference(self, new: fx.Node, rounding: float) -> str:
        """How the new value differs from the model's own operations; empty if nowhere. `rounding`: of tables,
        which is not taken for a difference."""
        node, facts, scan = self.node, self.tokens.facts, self.scan
        known = (Kind.TOKEN, Kind.ATTENTION, Kind.SCAN)
        given_ones = {n for n, f in facts.items() if f.kind in known and str(n.target) not in VIEWS}
        leaves = list(
            (given_ones | {n for n in scan.reads if facts[n].kind in known}) - {node, new, *scan.through}
        )
        before, after = region([node], leaves), region([new], leaves)
        compared, needed = 0, self._needed(before)
        if needed > budgets.CARRY_TOKENS:
            return f"its numbers reach over {budgets.CARRY_TOKENS} tokens, too many to try"
        for seed, length in enumerate(self._lengths(before, needed)):
            if not all(holds(c, self._sizes(length, 2)) for c in self.graph.conditions):
                continue
            sizes = self._sizes(length, 1)
            if bytes_in_float64(before, sizes) > budgets.CHECK_BYTES:
                continue
            run = Sample(self.graph.known_values(), sizes, seed)
            with torch.no_grad():
                given: dict[fx.Node, Tensor] = {n: run.draw(n) for n in leaves if n in {*before, *after}}
                given |= self._rows(length, run)
                (wanted,) = run.evaluate(before, given, node)
                (found,) = run.evaluate(after, given, new)
            verdict = compare(found, wanted, elementwise(max(EXACT, ENTRIES * rounding)))
            if not verdict.holds:
                return f"for {length} token(s): {verdict}"
            compared = max(compared, length)
        self.tokens.meaning.rely_on((*before, *after))
        if compared <= 2:
            return "it can be run on no sequence of more than two tokens"
        far = f"{needed} tokens, over which its numbers reach, are too many to try"
        return "" if compared >= needed else far

    def _needed(self, order: list[fx.Node]) -> int:
        """So many tokens show what the operations do with more (`meaning/tokens/numbers.py`)."""
        if self.tokens.space.is_of_one_length:
            return 0
        far = max(LENGTHS) + reach(order, self.graph.known_values(), self.tokens.probe.of_sizes)
        needed = int(min(far, budgets.CARRY_TOKENS + 1))
        while needed > 3 and not self.graph.admits(self._sizes(needed, 2)):
            needed -= 1  # a table ends before
        return needed

    def _lengths(self, order: list[fx.Node], needed: int) -> Iterator[int]:
        traced = self.tokens.traced
        if self.tokens.space.is_of_one_length:
            yield traced
            return
        yield from dict.fromkeys((*LENGTHS, traced, needed))
        extents = {
            n for node in order for n in getattr(node.meta.get("val"), "shape", ()) if isinstance(n, int)
        }
        chunk = max((n for n in extents if max(LENGTHS) / 3 < n <= LONGEST_CHUNK), default=0)
        if chunk:
            yield 2 * chunk + chunk // 2 + 1

    def _sizes(self, length: int, rows: int) -> dict[str, int]:
        space, sizes = self.tokens.space, dict(self.graph.hints)
        for name in sizes:
            size = self.tokens.meaning.named(E.size(name))
            if size is space.tokens:
                sizes[name] = length
            elif size is space.rows:
                sizes[name] = rows
        for node, tensor in self._tables(length).items():
            for extent, number in zip(node.meta["val"].shape, tensor.shape, strict=True):
                if not isinstance(extent, int) and extent.node.expr.is_Symbol:
                    sizes[str(extent.node.expr)] = number
        return sizes

    def _tables(self, length: int) -> dict[fx.Node, Tensor]:
        tables = {
            "starts": torch.tensor([0, length]), "first": torch.tensor([0]),
            "row": torch.zeros(length, dtype=torch.int64), "positions": torch.arange(length),
        }  # fmt: skip
        return {self.inputs.rows(name): tensor for name, tensor in tables.items()}

    def _rows(self, length: int, run: Sample) -> Mapping[fx.Node, Tensor]:
        """The step's inputs for one row that begins."""
        carried = {
            self.inputs[about.name]: run.oracle.widened(torch.zeros((1, *about.shape), dtype=about.dtype))
            for about in self.carried.values()
        }
        return {**self._tables(length), **carried}


@dataclasses.dataclass(frozen=True)
class _Arranged:
    """The variables of a sum: heads are those along which it decays or is read differently, values the
    others. What is written, as factors of keys and of values."""

    heads: tuple[Expr, ...]
    values: tuple[Expr, ...]
    of_keys: tuple[Expr, ...]
    of_values: tuple[Expr, ...]


def _arranged(variables: tuple[Expr, ...], part: RunningSum) -> _Arranged:
    factors = E.parts(part.write, "mul")
    apart = part.read.free.union(part.decay.free, *(e.free for pair in part.across for e in pair))
    values = tuple(v for v in variables if v not in apart)
    of_values = tuple(f for f in factors if not f.free.isdisjoint(values))
    if any(not f.free.isdisjoint(part.over) for f in of_values):  # no product of keys and values
        return _Arranged(variables, (), factors, (E.ONE,))
    of_keys = tuple(f for f in factors if f not in of_values)
    return _Arranged(tuple(v for v in variables if v in apart), values, of_keys, of_values or (E.ONE,))
