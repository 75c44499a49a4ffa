"""Values that a step computes from earlier tokens, over a cache of what they are computed from.

Of the last tokens (`meaning/tokens/windows.py`): a step gets the new tokens with the few before them
(`attngraph::with_earlier`). A convolution then runs as the model has it, on this longer sequence; everything
else is computed from its formula, in which an element of token t - j is the one that stands j places before.

Of all earlier tokens (`looks_back.py`): a step puts together what every row has of all its tokens
(`attngraph::history`), or of each block of them (`streams.py`), and runs the model's own operations on it,
for the new tokens where that is possible (`each_row.py`). Used by `insert_kv_cache`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from attngraph.capture.trace import quiet
from attngraph.errors import NoDecoderError
from attngraph.ir.graph import op_name, source_of
from attngraph.ir.language import E, Expr
from attngraph.ir.language.step_program import parse_row
from attngraph.ir.ops.each_row import each_block, each_row
from attngraph.ir.ops.history import history, with_earlier
from attngraph.meaning.algebra import M, size_expression
from attngraph.meaning.tokens.streams import Stream
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.meaning.tokens.windows import History, Window
from attngraph.passes.build import Builder, NoSize
from attngraph.passes.insert_kv_cache.each_row import BlockWriter, OwnWriter
from attngraph.passes.insert_kv_cache.free_tokens import repeated
from attngraph.passes.insert_kv_cache.step import RowProgram, Step
from attngraph.passes.insert_kv_cache.write_formula import ByIndex, NotWritten

aten = torch.ops.aten
_OF_KINDS = frozenset({aten.isnan.default, aten.isinf.default, aten.isfinite.default})
"""Questions about a number which rounding does not answer."""


def look_back(step: Step, builder: Builder, node: fx.Node, scan: Window) -> tuple[fx.Node, str]:
    """A `Rewrite` of windows of tokens."""
    longer, place = _longer(step, builder, scan)
    if scan.formula is None:  # the model's own operations on the longer sequence
        done = rerun(step.tokens, builder, scan.region, longer)
        new = builder.call(aten.index_select.default, done[node], step.tokens.token_dim(node), place)
    else:
        new = _WithEarlier(step, builder, node, scan.formula, longer, place).write()
    return new, f"{op_name(node)} at {source_of(node)} is computed from the last {scan.latest} tokens"


def _longer(step: Step, builder: Builder, scan: Window | Stream) -> tuple[dict[fx.Node, fx.Node], fx.Node]:
    """The operands' new tokens with those before them, and where each new one stands then, `[N]`."""
    assert scan.latest is not None
    tokens, rows, back = step.tokens, step.inputs.rows, scan.latest - 1
    place = builder.trace(lambda n, row: n + (row + 1) * back, _in_order(step, builder), rows("row"))
    longer: dict[fx.Node, fx.Node] = {}
    for operand in scan.operands:
        pages, store = step.kept.pages_of(builder, operand)
        longer[operand] = builder.call(
            with_earlier, pages, operand, step.inputs.table(store), rows("starts"), rows("first"), place,
            tokens.row_dim(operand), tokens.token_dim(operand), back,
        )  # fmt: skip
    return longer, place


def _in_order(step: Step, builder: Builder) -> fx.Node:
    """The numbers of the new tokens."""
    row = step.inputs.rows("row")
    count = builder.call(aten.sym_size.int, row, 0)
    return builder.call(aten.arange.default, count, device=row.meta["val"].device)


class _WithEarlier(ByIndex):
    """Writes a formula that reads values at this token and at earlier ones. `longer`: the sequences with the
    tokens before; `place`: where each token stands in them."""

    def __init__(
        self, step: Step, builder: Builder, node: fx.Node, formula: Expr, longer: dict[fx.Node, fx.Node],
        place: fx.Node,
    ) -> None:  # fmt: skip
        fact = dataclasses.replace(step.tokens[node], formula=_without_beginning(formula, step.tokens))
        super().__init__(builder, step.tokens, node, fact, step.inputs.rows("positions"))
        self.step, self.longer, self.place = step, longer, place
        self.shifted: dict[tuple[fx.Node, int], fx.Node] = {}

    def read(self, node: Expr) -> fx.Node:
        """An element of a table, or of a value at this or an earlier token."""
        if not any(self.step.tokens[node.value].axes):
            return super().read(node)
        value: fx.Node
        dim = self.step.tokens.token_dim(node.value)
        if dim is None:
            value, indices = node.value, list(node.args)
        else:
            earlier = M.sub(self.space.token, node.args[dim])
            if earlier.op != "const":
                return self._at_each_place(node, dim, earlier)
            value = self._shifted(node.value, dim, int(earlier.value))
            indices = [self.space.token if place == dim else a for place, a in enumerate(node.args)]
        if self._is_whole(value, indices):
            return value
        return self.indexed(value, [self._within(value, d, index) for d, index in enumerate(indices)])

    def _shifted(self, value: fx.Node, dim: int, earlier: int) -> fx.Node:
        """The value that each token's predecessor `earlier` places before has; zero before the first."""
        if earlier == 0:
            return value
        if (value, earlier) not in self.shifted:
            there = self.builder.call(aten.sub.Tensor, self.place, earlier)
            made = self.builder.call(aten.index_select.default, self.longer[value], dim, there)
            self.shifted[value, earlier] = made
        return self.shifted[value, earlier]

    def _at_each_place(self, node: Expr, dim: int, earlier: Expr) -> fx.Node:
        """Elements of tokens that stand before the own one by another number at each place of a window."""
        there = self.builder.call(aten.sub.Tensor, self.at_token(self.place), self.value(earlier))
        return self.indexed(self.longer[node.value], [
            there if d == dim else self._within(node.value, d, index) for d, index in enumerate(node.args)
        ])  # fmt: skip

    def _is_whole(self, value: fx.Node, indices: list[Expr]) -> bool:
        """Whether these indices read every element of the value at its own place in the result."""
        if value.meta["val"].ndim != len(self.shape):
            return False
        return all(
            (E.is_const(index, 0) and size_expression(extent) is E.ONE)
            or index is E.var(f"own{place}", self.shape[place])
            or self.fact.axes[place] == (index,)
            for place, (index, extent) in enumerate(zip(indices, value.meta["val"].shape, strict=True))
        )

    def _within(self, value: fx.Node, dim: int, index: Expr) -> Any:
        """An index as a place that there is: beyond the ends, formulas choose something else."""
        if index is self.space.row:
            return 0
        if index is self.space.token:
            return self.at_token(_in_order(self.step, self.builder))
        written = self.value(index)
        if index.op in ("var", "const"):
            return written
        return self.builder.call(aten.clamp.default, written, 0, value.meta["val"].shape[dim] - 1)


def _without_beginning(formula: Expr, tokens: Tokens) -> Expr:
    """The formula without what chooses zero before the first token: a longer sequence has zeros there."""
    token = tokens.space.token

    def leaf(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op == "where":
            condition, chosen, other = args
            for inside, read, outside in ((M.not_(condition), other, chosen), (condition, chosen, other)):
                if read.op == "read" and E.is_const(outside, 0):
                    steps = (M.sub(token, index) for index in read.args if token in index.free)
                    if any(n.op == "const" and inside is M.le(n, token) for n in steps):
                        return read
        return M.construct(node, args)

    return E.rebuild(formula, leaf)


def run_again(step: Step, builder: Builder, node: fx.Node, scan: History) -> tuple[fx.Node, str]:
    """A `Rewrite` of values that are computed from all earlier tokens."""
    where = f"{op_name(node)} at {source_of(node)}"
    try:
        new = _run_again(step, builder, node, scan)
    except (NoSize, NotWritten, RuntimeError) as problem:  # torch may not follow them for such sizes
        raise NoDecoderError(
            f"{where}: it is computed from all earlier tokens, and what computes it cannot be traced for "
            "sequences of any length."
        ) from problem
    seen = " (of keys and values those that are seen)" * bool(step.programs[node].read)
    chosen = " (of equal scores it may choose others than a whole sequence does)" * _chooses(scan)
    step.anew.append(f"{source_of(node)}{seen}{chosen}")
    if node in step.tokens.assumed:
        step.assumed.append(f"{where} ({step.tokens.assumed[node]})")
    until = f"; that it looks back alone was seen at numbers of tokens up to {scan.seen}" * bool(scan.seen)
    return new, (
        f"{where} is computed for the new tokens by the model's own operations, on what is kept of all "
        f"tokens before, one row after the other{until}"
    )


def _chooses(scan: History) -> bool:
    """Whether something is chosen by floating numbers that follow from the tokens, so that their rounding
    decides between equal ones."""
    moving, floating = set(scan.operands), set[fx.Node]()
    for node in (*scan.operands, *(n for n in scan.region if n not in moving)):
        if node in scan.operands or not moving.isdisjoint(node.all_input_nodes):
            moving.add(node)
            tensors = (t for t in pytree.tree_leaves(node.meta["val"]) if hasattr(t, "dtype"))
            kinds = {t.is_floating_point() for t in tensors}
            if True in kinds:
                floating.add(node)
            decides = False in kinds and node.target not in _OF_KINDS
            if decides and not floating.isdisjoint(node.all_input_nodes):
                return True
    return False


def with_program(step: Step, builder: Builder, node: fx.Node, scan: History) -> History:
    """The scan with its program, and of its operands those that are read at earlier tokens alone. Raises
    `NotWritten`: there is no program."""
    places = step.inputs.rows("positions")
    writer = OwnWriter(step.tokens, scan.region, scan.operands, scan.streams, builder, places)
    program = writer.program(writer.own(node, step.tokens[node].axes))
    step.programs[node] = RowProgram(program, writer.new, writer.shared, writer.whole, writer.read)
    return dataclasses.replace(scan, operands=tuple(dict.fromkeys((*writer.whole, *writer.read))))


def _run_again(step: Step, builder: Builder, node: fx.Node, scan: History) -> fx.Node:
    """The node that computes the value for new tokens."""
    inputs, rows, tokens = step.inputs, step.inputs.rows, step.tokens
    program, whole, as_long = step.programs[node], list[fx.Node](), dict[int, fx.Node]()
    operands = (*program.whole, *program.read)
    sizes = [scan.streams[n].size if n in scan.streams else 1 for n in operands]
    for operand, size in zip(program.whole, sizes, strict=False):
        pages, store = step.kept.pages_of(builder, operand)
        dim = tokens.token_dim(operand)
        whole.append(builder.call(
            history, pages, operand, inputs.table(store), rows("starts"), rows("first"), dim,
            as_long.get(size), size,
        ))  # fmt: skip
        as_long.setdefault(size, builder.call(aten.movedim.int, whole[-1], dim, 0))
    stored = [step.kept.pages_of(builder, operand) for operand in program.read]
    tables = [inputs.table(store) for _, store in stored]
    least = step.least if _fails_on_fewer(step, scan, program) else 1
    made = builder.call(
        each_row, program.new, whole, program.shared, program.read, [pages for pages, _ in stored], tables,
        rows("starts"), rows("first"), rows("positions"), program.text,
        [tokens.token_dim(n) for n in (*program.new, *operands)], sizes, least, _shape(tokens, node),
        _dtype(node),
    )  # fmt: skip
    for inner in scan.region:
        if "attention" in inner.meta:
            made.meta["attention"] = inner.meta["attention"]
    # A step has one sequence, and what follows counts it as the model counts its rows.
    count = builder.call(aten.sym_size.int, inputs.ids, 0)
    return builder.call(aten.expand.default, made, [count, *[-1] * (made.meta["val"].ndim - 1)])


def _fails_on_fewer(step: Step, scan: History, program: RowProgram) -> bool:
    """Whether a program cannot be run for a row of fewer tokens than the graph's operations are for: tried
    on zeros, for one token and around the ends of blocks."""
    tokens, run = step.tokens, parse_row(program.text)
    sizes = {n: scan.streams[n].size if n in scan.streams else 1 for n in scan.operands}
    counts = {n for size in sizes.values() for n in (1, size - 1, size, size + 1, 2 * size) if n}

    def zeros(node: fx.Node, count: int) -> torch.Tensor:
        value, dim = node.meta["val"], tokens.token_dim(node)
        shape = list(value.shape) if dim is None else _shape(tokens, node)
        return torch.zeros([count if d == dim else n for d, n in enumerate(shape)], dtype=value.dtype)

    with quiet(), torch.no_grad():
        place = torch.zeros(1, dtype=torch.int64)
        new, shared = ([zeros(n, 1) for n in nodes] for nodes in (program.new, program.shared))
        stored = [lambda places, n=n: zeros(n, len(places)) for n in program.read]  # type: ignore[misc]
        for count in sorted(counts):
            whole = [zeros(n, count // sizes[n]) for n in program.whole]
            try:
                run(count, 1, count - 1, new, whole, shared, [place], stored)
            except (RuntimeError, IndexError, ValueError, TypeError):
                return True
    return False


def _shape(tokens: Tokens, node: fx.Node) -> list[int]:
    """The extents of a value for one row, 0 for its tokens. Raises `NotWritten`: they are no numbers."""
    place, row = tokens.token_dim(node), tokens.row_dim(node)
    found = [0 if d == place else 1 if d == row else n for d, n in enumerate(node.meta["val"].shape)]
    if not all(isinstance(n, int) for n in found):
        raise NotWritten(f"%{node.name}")
    return found


def _dtype(node: fx.Node) -> str:
    """The name of a value's dtype, if it holds no floating numbers."""
    dtype = node.meta["val"].dtype
    return "" if dtype.is_floating_point else str(dtype).removeprefix("torch.")


def add_blocks(step: Step, builder: Builder, node: fx.Node, scan: Stream) -> tuple[fx.Node, str]:
    """A `Rewrite` of streams: entries of the blocks that new tokens complete."""
    tokens, rows = step.tokens, step.inputs.rows
    every, _ = _longer(step, builder, scan)
    writer = BlockWriter(tokens, scan.region, scan.operands, scan.size)
    program = writer.program(writer.of_all(node))
    longer, dims = [every[n] for n in writer.whole], [tokens.token_dim(n) for n in writer.whole]
    new = builder.call(
        each_block, longer, writer.shared, rows("starts"), rows("first"), rows("positions"), program, dims,
        scan.size, scan.before, _shape(tokens, node), _dtype(node),
    )  # fmt: skip
    return new, (
        f"{op_name(node)} at {source_of(node)} has an entry for each {scan.size} tokens, computed when the "
        "last of them is there"
    )


def rerun(
    tokens: Tokens, builder: Builder, region: Sequence[fx.Node], given: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """The operations of a region on other sequences. `given`: what some of its operands are there, the first
    with its rows and tokens where the original has them."""
    space = tokens.space
    operand, sequence = next(iter(given.items()))
    sizes: dict[Expr, Any] = {
        space.tokens: (sequence, tokens.token_dim(operand)), space.rows: (sequence, tokens.row_dim(operand)),
    }  # fmt: skip
    done: dict[fx.Node, fx.Node] = dict(given)
    values = pytree.tree_leaves([step.meta.get("val") for step in region])
    extents = {size_expression(n) for v in values if isinstance(v, torch.Tensor) for n in v.shape}
    for step in region:
        done[step] = repeated(tokens, builder, step, done, sizes, extents)
        if "attention" in step.meta:
            done[step].meta["attention"] = step.meta["attention"]
    return done
