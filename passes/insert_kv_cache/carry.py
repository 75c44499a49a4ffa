"""Sums, loops and folds over earlier tokens, carried from step to step.

Each sum (`meaning/tokens/recurrence.py`) becomes one `attngraph::running_sum`: what a token writes is a
product of something along the axes that are summed over (keys) and something along the others (values), where
it is one; axes along which what is carried decays or is read differently are heads. The claim that the
recogniser read from three tokens is then run: in float64, against the model's own operations, on sequences of
several lengths, among them ones of several chunks where the model computes in chunks.

A loop (`loops.py`) becomes one `attngraph::loop`: the step program of the model's own operations, which takes
new tokens one after the other, and hands on what the model hands on. A fold (a running maximum, say;
`windows.py`) becomes one `attngraph::running_fold`. Used by `insert_kv_cache`.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir import budgets
from attngraph.ir.graph import holds, source_of
from attngraph.ir.language import E, Expr
from attngraph.ir.ops.loop import EXACT, loop, running_fold
from attngraph.ir.ops.running_sum import running_sum
from attngraph.ir.walk import reached
from attngraph.meaning.algebra import M
from attngraph.meaning.attention.layout import NoView, solve
from attngraph.meaning.check.comparison import compare, elementwise
from attngraph.meaning.check.region import bytes_in_float64, region
from attngraph.meaning.check.sample import Sample
from attngraph.meaning.tokens.facts import Kind, Scan
from attngraph.meaning.tokens.loops import TokenLoop
from attngraph.meaning.tokens.numbers import reach
from attngraph.meaning.tokens.recurrence import RunningSum, Sums
from attngraph.meaning.tokens.unfold import VIEWS
from attngraph.meaning.tokens.windows import RunningFold
from attngraph.passes.build import Builder, NoSize
from attngraph.passes.insert_kv_cache.step import RefutedError, Step
from attngraph.passes.insert_kv_cache.write_formula import FormulaWriter, NotWritten, extent_of

aten = torch.ops.aten
ALIKE, ENTRIES = 1e-8, 16
"""How far two values that should be equal may be apart: by rounding in float64, or of so many entries of the
model's tables."""
LENGTHS = (5, 2, 1, 19, 70)
"""Tokens of the sequences on which a claim is compared, besides two and a half times the longest chunk, and
more than the numbers of its operations reach."""
LONGEST_CHUNK = 1024


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which one token's part is computed: not 16 bits."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def carried_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a sum is carried. It is rounded with every token, and the model's own is not:
    PyTorch adds up a whole sequence in float64 (float32 for 16 bits), or by blocks."""
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float64 if dtype == torch.float32 else computed_in(dtype)


def take_steps(step: Step, builder: Builder, node: fx.Node, scan: TokenLoop) -> tuple[fx.Node, str]:
    """A `Rewrite` of loops."""
    tokens, rows, device = step.tokens, step.inputs.rows, node.meta["val"].device
    states = step.states(node, scan.handed)
    taken = []
    for element, own, dtype in scan.taken:
        taken.append(FormulaWriter(builder, tokens, own, dtype, device).tensor(element, own))
    given = taken, list(scan.shared), list(states), rows("starts"), rows("first"), scan.program
    out = step.carry(builder, builder.call(loop, *given), states)
    token = tokens.space.token
    shape = (token.args[0], *tokens.meaning.shape(out)[1:])
    try:  # the program's first result as `[tokens, *variables]`
        views = solve(shape, (token, *scan.result), ((token,), *((v,) for v in scan.variables)))
    except NoView:
        raise NotWritten("its result, which is no view of what a step gives,") from None
    return step.in_place(builder, builder.view(out, views), node), _note(node, scan)


def fold(step: Step, builder: Builder, node: fx.Node, scan: RunningFold) -> tuple[fx.Node, str]:
    """A `Rewrite` of folds."""
    value, rows = node.meta["val"], step.inputs.rows
    dtype = computed_in(value.dtype)
    writer = FormulaWriter(builder, step.tokens, scan.variables, dtype, value.device)
    given = writer.tensor(scan.element, scan.variables)
    kept = dtype if scan.how in EXACT else carried_in(value.dtype)
    states = step.states(node, [(tuple(map(extent_of, scan.variables)), kept)])
    both = builder.call(running_fold, given, *states, rows("starts"), rows("first"), scan.how)
    out = step.carry(builder, both, states)
    return step.in_place(builder, builder.to(out, value.dtype), node), _note(node, scan)


def _note(node: fx.Node, scan: Scan) -> str:
    return f"{scan.reason}, at {source_of(node)}, is carried from token to token"


def carry(step: Step, builder: Builder, node: fx.Node, scan: Sums) -> tuple[fx.Node, str]:
    """A `Rewrite` of sums. Raises `RefutedError`: it is none, or cannot be computed for new tokens."""
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
        self.graph, self.tokens, self.inputs = step.tokens.graph, step.tokens, step.inputs
        self.dtype: torch.dtype = node.meta["val"].dtype

    def _writer(self, variables: tuple[Expr, ...]) -> FormulaWriter:
        dtype = computed_in(self.dtype) if self.dtype.is_floating_point else torch.int64
        return FormulaWriter(self.builder, self.tokens, variables, dtype, self.node.meta["val"].device)

    def replace(self) -> fx.Node:
        """The node that computes the value for new tokens. Raises `NotWritten`: a formula of the claim cannot
        be written as operations."""
        parts = [self._sum(part) for part in self.scan.sums]
        if not E.is_const(self.scan.rest, 0):
            parts.append(self._writer(self.scan.variables).tensor(self.scan.rest, self.scan.variables))
        value = functools.reduce(functools.partial(self.builder.call, aten.add.Tensor), parts)
        return self.step.in_place(self.builder, self.builder.to(value, self.dtype), self.node)

    def _sum(self, part: RunningSum) -> fx.Node:
        """One running sum, `[tokens, *variables]`."""
        call, variables = self.builder.call, self.scan.variables
        of_heads, of_values, key_factors, value_factors = _arranged(variables, part)
        writer = self._writer((*of_heads, *part.over, *of_values))
        tokens = self.builder.size(self.tokens.space.tokens)
        heads, width, values = (extent_of(*v) for v in (of_heads, part.over, of_values))

        def written(formula: Expr, dims: tuple[Expr, ...], sizes: list[int]) -> fx.Node:
            return call(aten.reshape.default, writer.tensor(formula, dims), [tokens, *sizes])

        plain = not part.over and E.is_const(part.read, 1) and not part.across
        q = k = decay = None
        less_one = self._less_one(part.decay)
        if not plain:
            q = written(part.read, (*of_heads, *part.over), [heads, width])
            k = written(M.mul(*key_factors), (*of_heads, *part.over), [heads, width])
        v = written(part.write if plain else M.mul(*value_factors), (*of_heads, *of_values), [heads, values])
        if not E.is_const(part.decay, 1):
            along = part.over if not part.decay.free.isdisjoint(part.over) else ()
            decay = written(less_one or part.decay, (*of_heads, *along), [heads, extent_of(*along)])
        states = self.step.states(self.node, [((heads, width, values), carried_in(self.dtype))])
        across: list[Any] = []
        for side in zip(*part.across, strict=True):
            vectors = [written(f, (*of_heads, *part.over), [heads, 1, width]) for f in side]
            across.append(self.builder.side_by_side(vectors, 2))
        if less_one is not None and decay is not None:
            across = [*(across or (None, None)), True]
        starts = self.inputs.rows("starts")
        both = call(running_sum, q, k, v, decay, *states, starts, part.inclusive, *across)
        out = self.step.carry(self.builder, both, states)
        dims = (*of_heads, *of_values)
        out = call(aten.reshape.default, out, [tokens, *(int(v.args[0].value) for v in dims)])
        return self.builder.permuted(out, [0, *(1 + dims.index(v) for v in variables)])

    def _less_one(self, decay: Expr) -> Expr | None:
        """A decay less 1, where the model has no rounded decay that it multiplies by, but computes the
        exponential of what is added up. (A number that it raises to powers is rounded first.)"""
        if decay.op == "exp":
            (x,) = decay.args  # e^x - 1, to its last digit where x is small
            return M.mul(M.function("tanh", M.mul(E.const(0.5), x)), M.add(E.ONE, decay))
        if decay.op != "const":
            return None

        def before(node: fx.Node) -> list[fx.Node]:
            facts = ((n, self.tokens.facts.get(n)) for n in node.all_input_nodes)
            return [n for n, f in facts if f is None or f.kind not in (Kind.TOKEN, Kind.ATTENTION)]

        names = {str(n.target) for n in reached([self.node], before)}
        is_exponential = "aten.exp.default" in names and not any(".pow." in name for name in names)
        return E.const(decay.value - 1) if is_exponential else None

    # --- the check ---

    def rounding(self) -> float:
        """By how much entries of tables, from which decays are read by comparing some, are off: a model with
        tables of a decay's powers computes them in its own dtype. 0 without such tables."""
        found = 0.0
        for read in (n for e in self.scan.formulas for n in E.reads(e)):
            dtype = read.value.meta["val"].dtype
            if dtype.is_floating_point and self.tokens[read.value].kind is Kind.FIXED:
                places = zip(read.args, self.tokens.meaning.shape(read.value), strict=True)
                if any(index.op == "const" and extent is not E.ONE for index, extent in places):
                    found = max(found, torch.finfo(dtype).eps)
        return found

    def difference(self, new: fx.Node, rounding: float) -> str:
        """How the new value differs from the model's own operations; empty if nowhere. `rounding`: of tables,
        which is not taken for a difference."""
        node, facts, scan = self.node, self.tokens.facts, self.scan
        given_ones = {n for n, f in facts.items() if f.is_of_token and str(n.target) not in VIEWS}
        given_ones |= {n for n in scan.reads if facts[n].is_of_token}
        leaves = list(given_ones - {node, new, *scan.through})
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
            verdict = compare(found, wanted, elementwise(max(ALIKE, ENTRIES * rounding)))
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
        far = max(LENGTHS) + reach(order, self.graph.known_values(), self.tokens.facts.of_sizes)
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
        extents = (n for node in order for n in getattr(node.meta.get("val"), "shape", ()))
        numbers = (n for n in extents if isinstance(n, int) and max(LENGTHS) / 3 < n <= LONGEST_CHUNK)
        chunk = max(numbers, default=0)
        if chunk:
            yield 2 * chunk + chunk // 2 + 1

    def _sizes(self, length: int, rows: int) -> dict[str, int]:
        sizes = self.tokens.probe.counted(rows, length)
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
            for about in self.step.carried.values()
        }
        return {**self._tables(length), **carried}


_Factors = tuple[Expr, ...]


def _arranged(variables: _Factors, part: RunningSum) -> tuple[_Factors, _Factors, _Factors, _Factors]:
    """The variables of a sum: heads are those along which it decays or is read differently, values the
    others. What is written, as factors of keys and of values."""
    factors = E.parts(part.write, "mul")
    apart = part.read.free.union(part.decay.free, *(e.free for pair in part.across for e in pair))
    values = tuple(v for v in variables if v not in apart)
    of_values = tuple(f for f in factors if not f.free.isdisjoint(values))
    if any(not f.free.isdisjoint(part.over) for f in of_values):  # no product of keys and values
        return variables, (), factors, (E.ONE,)
    of_keys = tuple(f for f in factors if f not in of_values)
    return tuple(v for v in variables if v in apart), values, of_keys, of_values or (E.ONE,)
