"""`attngraph::token_program` on a GPU, in one order of sums: a kernel for each product with a weight
(`kernels/product.py`), and one for what is computed between two products, with a program for each token.

A program takes the definitions one after another, and writes each one's elements to memory, from which
later ones read them. A sum over an index takes BLOCK elements at a time, from the first one on, and adds up
what its places have at the end; so its order follows from the sizes in the program's text alone.
"""

import dataclasses
import functools
import importlib
import logging
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.remarks import UnsupportedError
from attngraph.codegen.scalar.form import Lowering, Scalar
from attngraph.codegen.triton import device as gpu
from attngraph.codegen.triton import fold, store
from attngraph.codegen.triton.formulas import Writer
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.token_program import TOKEN, Definition, Given, TokenProgram, extent, parse
from attngraph.ir.ops.token_program import floating, memory_of_results, tokens_in
from attngraph.meaning.algebra import intervals
from attngraph.meaning.algebra.intervals import Interval

_log = logging.getLogger("attngraph.codegen.triton")
BLOCK = 2048
"""The most elements that a program computes at a time."""
SHORT = {"float16", "bfloat16"}
"""Dtypes of weights whose products are of 16 bits."""


class Tokens:
    """The runner of programs in order; others are left to PyTorch."""

    name, device = "triton.tokens", "cuda"

    def panel(self) -> int:
        return 0

    def prepare(self, text: str, given: Sequence[Tensor]) -> None:
        return

    def remarks(self, text: str) -> tuple[str, ...]:
        return ()

    def source(self, program: TokenProgram) -> str:
        try:
            return emitted(program.text)
        except UnsupportedError:
            return ""

    def run(self, text: str, given: Sequence[Tensor]) -> list[Tensor] | None:
        program, like = parse(text), floating(given)
        if not program.in_order or like.dtype == torch.float64 or gpu.no_device(like) is not None:
            return None
        try:
            emitted(text)
        except UnsupportedError as problem:
            _log.warning("not compiled: %s\n%s", problem, text)
            return None
        return _run(program, [t.to(like.device) for t in given])


@dataclasses.dataclass(frozen=True)
class Stage:
    """A product, or definitions that one kernel computes one after another."""

    numbers: tuple[int, ...]
    is_product: bool


def stages(program: TokenProgram) -> Iterator[Stage]:
    """What is computed by one kernel each, in order. Raises UnsupportedError: a weight that these do not
    read."""
    if any(g.packed is not None or g.in_panels for g in program.given):
        raise UnsupportedError("a weight whose elements are packed, or lie in panels")
    waiting: list[int] = []
    for number in range(len(program.given), len(program.given) + len(program.definitions)):
        product = program.product(number)
        if product is None:
            waiting.append(number)
            continue
        if product.left in waiting:
            yield Stage(tuple(waiting), is_product=False)
            waiting.clear()
        yield Stage((number,), is_product=True)
    if waiting:
        yield Stage(tuple(waiting), is_product=False)


# --- launching ---


def _run(program: TokenProgram, given: list[Tensor]) -> list[Tensor]:
    tokens = tokens_in(program, given)
    results = memory_of_results(program, tokens, floating(given))
    if not tokens:
        return results
    given = [t.contiguous() if g.token_dim is None else t for t, g in zip(given, program.given, strict=True)]
    values = {
        result.number: made.movedim(result.token_dim, 0).view(tokens, -1)
        for result, made in zip(program.results, results, strict=True) if result.dtype == "float32"
    }  # fmt: skip
    for number, made in enumerate(program.definitions, start=len(given)):
        if number not in values:
            values[number] = results[0].new_empty((tokens, math.prod(made.extents)), dtype=torch.float32)
    for place, stage in enumerate(stages(program)):
        if stage.is_product:
            _multiply(program, stage.numbers[0], given, values)
            continue
        arguments: list[Any] = [*given, *(values[n] for n in sorted(values))]
        for tensor, about in zip(given, program.given, strict=True):
            arguments += [] if about.token_dim is None else tensor.stride()
        kernel = _loaded(program.text)[place]
        store.launch_kernel(kernel, (tokens,), arguments, {"num_warps": 4}, results[0].device)
    for result, found in zip(program.results, results, strict=True):
        if result.dtype != "float32":
            found.movedim(result.token_dim, 0).view(tokens, -1).copy_(values[result.number])
    return results


def _multiply(
    program: TokenProgram, number: int, given: Sequence[Tensor], values: dict[int, Tensor]
) -> None:  # fmt: skip
    about, by = program.product(number), program.scales(number)
    assert about is not None
    kernels, weight, left, out = _products(), given[about.weight], values[about.left], values[number]
    tokens, depth, width = left.shape[0], left.shape[1], out.shape[1]
    scales, zeros, group = None, None, depth
    if by is not None:
        scales, zeros, group = given[by.scales], None if by.zeros is None else given[by.zeros], by.group
    arguments = [left, weight, scales, zeros, out, tokens, depth, width, group]
    is_short = program.given[about.weight].dtype in SHORT
    sizes = kernels.ROWS, kernels.COLUMNS, kernels.AT_ONCE
    known = [about.turned, by is not None, zeros is not None, is_short, *sizes]
    grid = -(-tokens // kernels.ROWS), -(-width // kernels.COLUMNS)
    store.launch_kernel(kernels.multiply, grid, [*arguments, *known], {"num_warps": 4}, out.device)


@functools.cache
def _products() -> Any:
    return importlib.import_module("attngraph.codegen.triton.kernels.product")


@functools.cache
def _loaded(text: str) -> dict[int, Any]:
    """The kernels of a program's stages, by their places. (They are never dropped: `store.loading`.)"""
    module = store.import_source(emitted(text), "tokens")
    return {place: getattr(module, _name(place)) for place, s in enumerate(stages(parse(text)))
            if not s.is_product}  # fmt: skip


# --- source ---


@functools.lru_cache(maxsize=1024)
def emitted(text: str) -> str:
    """The module of a program's kernels but for products. Raises UnsupportedError: what is not emitted."""
    program, calls = parse(text), set[str]()
    bodies = [
        _kernel(program, _name(place), stage.numbers, calls)
        for place, stage in enumerate(stages(program)) if not stage.is_product
    ]  # fmt: skip
    known = fold.read("functions.py").functions
    head = [f"# {line}" for line in ("A token program, written by attngraph:", *text.splitlines())]
    imports = ["import triton", "import triton.language as tl"]
    called = [source for function, source in known.items() if function in calls]
    return "\n\n\n".join(["\n".join([*head, *imports]), *called, *bodies]) + "\n"


def _name(place: int) -> str:
    return f"stage{place}"


def _kernel(program: TokenProgram, name: str, numbers: Sequence[int], calls: set[str]) -> str:
    every = range(len(program.given) + len(program.definitions))
    strides = [
        f"r{n}_stride{axis}" for n, g in enumerate(program.given) if g.token_dim is not None
        for axis in range(len(g.shape))
    ]  # fmt: skip
    parameters = ", ".join([*(f"r{n}" for n in every), *strides])
    lines = [line for n in numbers for line in (*_definition(program, n, calls), "tl.debug_barrier()")]
    return "\n".join([
        f"@triton.jit(do_not_specialize={strides!r})", f"def {name}({parameters}):",
        "    t = tl.program_id(0).to(tl.int64)", *(f"    {line}" for line in lines[:-1]),
    ])  # fmt: skip


def _definition(program: TokenProgram, number: int, calls: set[str]) -> Iterator[str]:
    """The lines that compute all elements of a value of one token."""
    made = program.definition(number)
    assert made is not None
    count = math.prod(made.extents)
    terms = 1 if made.over is None else extent(made.over)
    across = min(power_above(terms), BLOCK)
    down = min(power_above(count), max(1, BLOCK // across))
    value = _Formula(program, made, calls)
    shape = "[:, None]" if made.fold else ""
    yield f"# r{number}"
    yield f"for start in range(0, {count}, {down}):"
    yield f"    place = start + tl.arange(0, {down}){shape}"
    yield f"    inside = place < {count}"
    stride = count
    for index in made.indices:
        stride //= extent(index)
        yield f"    {index.value} = place{f' // {stride}' * (stride > 1)} % {extent(index)}"
    out = f"tl.store(r{number} + t * {count} + place, {{}}, mask=inside)"
    if not made.fold:
        yield from (f"    {line}" for line in value.lines)
        yield "    " + out.format(f"tl.where(inside, {value.text}, 0.0)")
        return
    assert made.over is not None
    nothing = "0.0" if made.fold == "sum" else 'float("-inf")'
    yield f"    total = tl.zeros([{down}, {across}], tl.float32) + {nothing}"
    yield f"    for first in range(0, {terms}, {across}):"
    yield f"        {made.over.value} = first + tl.arange(0, {across})[None, :]"
    yield from (f"        {line}" for line in value.lines)
    term = f"tl.where(inside & ({made.over.value} < {terms}), {value.text}, {nothing})"
    if made.fold == "sum":
        yield f"        total += {term}"
        yield "    " + out.format("tl.sum(total, 1)[:, None]")
        return
    yield f"        total = tl.maximum(total, {term}, propagate_nan=tl.PropagateNan.ALL)"
    yield "    unknown = tl.max((total != total).to(tl.int32), 1)[:, None]"
    yield "    " + out.format('tl.where(unknown > 0, float("nan"), tl.max(total, 1)[:, None])')


def power_above(count: int) -> int:
    """The least power of two that is not less."""
    return 1 << (count - 1).bit_length()


class _Lowering(Lowering):
    """Lowers the formulas of a token, whose indices have extents."""

    def bounds(self, node: Expr) -> Interval:
        for index in node.free:
            if index.op == "var":
                most = self._most if index is TOKEN else float(extent(index) - 1)
                self._bounds.setdefault(index, intervals.of_interval((0.0, most), "int"))
        return super().bounds(node)


class _Formula(Writer):
    """A definition's formula: its `text`, and the `lines` before it. What an index that a selection does not
    choose would read is not read."""

    def __init__(self, program: TokenProgram, made: Definition, calls: set[str]) -> None:
        super().__init__(SimpleNamespace(reads=(), wide=True, dtype=torch.float32), "")  # type: ignore[arg-type]
        self.program, self.made, self.calls = program, made, calls
        self.lower = _Lowering(lambda number: "float", "long", powers_by_exp2=True)
        self.lines: list[str] = []
        self.text = self.real(made.value)

    def name(self, value: Scalar, code: str) -> str:
        self.lines.append(f"x{len(self.lines)} = {code}")
        return f"x{len(self.lines) - 1}"

    def read(self, value: Scalar) -> str:
        number, indices = value.source.value, list(zip(value.source.args, value.args, strict=True))
        made = self.program.definition(number)
        if made is not None:
            shape: Sequence[int | None] = made.extents
            address = [f"r{number}", f"t * {math.prod(made.extents)}"]
        else:
            shape, address = self.program.given[number].shape, [f"r{number}"]
        strides = _strides(number, shape, None if made is not None else self.program.given[number])
        inside = []
        for (node, index), size, stride in zip(indices, shape, strides, strict=True):
            code = self.atom(index)
            address.append(f"{code} * {stride}")
            if node is self.made.over:
                inside.append(f"({code} < {min(extent(node), size or extent(node))})")
            elif node is not TOKEN and not (node in self.made.indices and extent(node) <= (size or 0)):
                inside.append(f"({code} >= 0) & ({code} < {size})")
        mask = f", mask={' & '.join(inside)}, other=0" if inside else ""
        return f"tl.load({' + '.join(address)}{mask}).to(tl.float32)"


def _strides(number: int, shape: Sequence[int | None], given: Given | None) -> list[str]:
    """From one element to the next one of each dimension: known where the tensor is contiguous."""
    if given is not None and given.token_dim is not None:
        return [f"r{number}_stride{axis}" for axis in range(len(shape))]
    return [str(math.prod(n or 1 for n in shape[axis + 1 :])) for axis in range(len(shape))]


TOKENS = Tokens()
