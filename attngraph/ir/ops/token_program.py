"""The attngraph dialect: what is computed from each token alone, as one operation.

`program` is a token program (`ir/language/token_program.py`); the tensors have the shapes that it names, with
the same number of tokens. In the memory of a result a token's elements are contiguous. A registered runner
computes the calls that it supports, plain PyTorch the others: operation by operation, in float32 or, where it
is given float64, in that.
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from attngraph.ir.dtypes import NAMED
from attngraph.ir.language import E, Expr, operation_of
from attngraph.ir.language.token_derivative import GIVEN, GRADIENT, RESULT, backward
from attngraph.ir.language.token_program import TOKEN, Definition, Given, Result, TokenProgram, extent, parse
from attngraph.ir.ops import memory
from attngraph.ir.ops.panels import from_panels
from attngraph.ir.ops.quantised import dequantised

from attngraph.ir.ops.declare import (  # isort: skip
    INSTEAD, are_batched, declare, has_tangent, is_recorded, is_transformed, require_no_derivative,
    require_no_order, run_kernel,
)  # fmt: skip


class Runner(Protocol):
    """Computes token programs; returns None for a call that it does not support. `device`: the type of those
    whose tensors it is made for."""

    name: str
    device: str

    def panel(self) -> int:
        """How many outputs a panel of a weight has that is given `in panels`; 0 where none is taken so."""

    def prepare(self, text: str, given: Sequence[Tensor]) -> None:
        """Calls with such tensors (fake ones are fine) will follow: begin what takes long."""

    def run(self, text: str, given: Sequence[Tensor]) -> list[Tensor] | None: ...

    def source(self, program: TokenProgram) -> str:
        """The source of the code that computes tokens; "" if the program is not supported."""

    def remarks(self, text: str) -> tuple[str, ...]:
        """Remarks for the report from running the program: who multiplied."""


RUNNERS: list[Runner] = []
"""In order of preference."""


def is_supported(program: TokenProgram, device: str = "cpu") -> bool:
    """Whether a runner for this type of device supports the program."""
    return any(runner.device == device and runner.source(program) for runner in RUNNERS)


def prepare(given: Sequence[Tensor], program: str) -> None:
    """Begin what a program's runners need, in the background."""
    for runner in RUNNERS:
        runner.prepare(program, given)


def _memory(a: Any) -> list[Tensor]:
    parsed = parse(a.program)
    tokens, like = tokens_in(parsed, a.given), floating(a.given)
    return [allocated(result, tokens, like) for result in parsed.results]


class _TokenProgram(torch.autograd.Function):
    """The op with its gradients in reverse mode: what computes them is a token program too."""

    @staticmethod
    def forward(ctx: Any, keys: Any, program: str, *given: Tensor) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            found = run_kernel(_OP, keys, list(given), program, kernel=token_program)
        ctx.wanted = [n for n in range(len(given)) if ctx.needs_input_grad[n + 2]]
        ctx.made, ctx.program = backward(program, frozenset(ctx.wanted)), program
        values = {GIVEN: given, RESULT: found}
        ctx.save_for_backward(*(values[kind][n] for kind, n in ctx.made.given if kind != GRADIENT))
        ctx.shapes = [t.shape for t in given]
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        made, saved = ctx.made, iter(ctx.saved_tensors)
        given = [grads[place] if kind == GRADIENT else next(saved) for kind, place in made.given]
        results: list[Tensor] = []
        if made.program:
            by_torch = are_batched(grads)
            found = reference(parse(made.program), given) if by_torch else _OP(given, made.program)
            numbers = [r.number for r in parse(made.program).results]
            each = enumerate(zip(numbers, found, strict=True))
            results = [t.clone() if n in numbers[:p] else t for p, (n, t) in each]
        values: list[Any] = [None] * len(ctx.shapes)
        for number, of in made.gradients.items():
            value = grads[of.place] if of.kind == GRADIENT else results[of.place]
            if of.sums:
                about = (parse(ctx.program) if of.kind == GRADIENT else parse(made.program)).results[of.place]
                value = value.sum(about.token_dim).view(ctx.shapes[number])
            values[number] = value
        return (None, None, *values)


def _autograd(keys: Any, given: Sequence[Tensor], program: str) -> list[Tensor]:
    """Which of the three computes a call: plain PyTorch in torch.func's transformations and forward mode."""
    if has_tangent((given,)) or (is_recorded((given,)) and is_transformed()):
        return reference(parse(program), given)
    if is_recorded((given,)):
        return list(_TokenProgram.apply(keys, program, *given))
    found: list[Tensor] = run_kernel(_OP, keys, given, program, kernel=token_program)
    return found


@declare(fake=_memory, derivatives=_autograd, batched=lambda *_: None, plain=True)
def token_program(given: Sequence[Tensor], program: str) -> list[Tensor]:
    """The results of a token program."""
    require_no_derivative("token_program", INSTEAD, (given,))  # where a decoder calls this directly
    for runner in RUNNERS:
        found = runner.run(program, given)
        if found is not None:
            return found
    parsed = parse(program)
    require_no_order(parsed.in_order, floating(given), "what follows from each token")
    return reference(parsed, given)


_OP = torch.ops.attngraph.token_program.default


def tokens_in(program: TokenProgram, given: Sequence[Tensor]) -> int:
    """The number of tokens of a call."""
    each = zip(given, program.given, strict=True)
    return next(t.shape[about.token_dim] for t, about in each if about.token_dim is not None)


def floating(given: Sequence[Tensor]) -> Tensor:
    """A floating tensor among those given: those that count tokens are. Of float64, if there is one, and of
    the most dimensions: a number may lie on the CPU, whatever the device of the tokens."""
    found = [t for t in given if t.is_floating_point()]
    return max([t for t in found if t.dtype == torch.float64] or found, key=torch.Tensor.dim)


def allocated(result: Result, tokens: int, like: Tensor) -> Tensor:
    """Memory for a result, in which a token's elements are contiguous. What is given in float64 gives results
    in float64."""
    dtype = torch.float64 if like.dtype == torch.float64 else NAMED[result.dtype].torch
    shape = [tokens, *(n for n in result.shape if n is not None)]
    order = list(range(1, len(shape)))
    order.insert(result.token_dim, 0)
    return memory.empty(shape, dtype, like.device).permute(order)


def memory_of_results(program: TokenProgram, tokens: int, like: Tensor) -> list[Tensor]:
    """Memory for all results. Those of the same definition and dtype share it, as each definition is computed
    once."""
    results = [allocated(result, tokens, like) for result in program.results]
    first: dict[tuple[int, str], int] = {}
    for place, result in enumerate(program.results):
        shared = first.setdefault((result.number, result.dtype), place)
        if shared != place:
            whole = results[shared].movedim(program.results[shared].token_dim, 0)
            shape = results[place].movedim(result.token_dim, 0).shape
            results[place] = whole.view(shape).movedim(0, result.token_dim)
    return results


# --- in plain PyTorch ---


def reference(program: TokenProgram, given: Sequence[Tensor]) -> list[Tensor]:
    """The results by PyTorch's operations on whole tensors."""
    like = floating(given)
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    given = [t.to(dtype) if t.is_floating_point() else t for t in given]
    dims = (about.token_dim for about in program.given)
    found = [t if dim is None else t.movedim(dim, 0) for t, dim in zip(given, dims, strict=True)]
    tokens = tokens_in(program, given)
    for number, made in enumerate(program.definitions, start=len(given)):
        product = program.product(number)
        if product is not None:
            left = found[product.left]
            weight = weight_rows(program, number, given, left.dtype)
            found.append(left @ (weight if product.turned else weight.T))
        else:
            found.append(_Evaluation(program, made, found, tokens).value())
    results: list[Tensor] = []
    for result in program.results:
        value = found[result.number].reshape([tokens, *(n for n in result.shape if n is not None)])
        own = dtype if dtype == torch.float64 else NAMED[result.dtype].torch
        results.append(value.to(own).movedim(0, result.token_dim))
    return results


def weight_rows(
    program: TokenProgram, number: int, given: Sequence[Tensor], dtype: torch.dtype, rows: slice | None = None
) -> Tensor:
    """The weight of a product in a floating dtype; of one `[out, in]` only some rows, if that is said."""
    product, by = program.product(number), program.scales(number)
    assert product is not None
    part = rows or slice(None)
    weight = _some_rows(given[product.weight], program.given[product.weight], part)
    if by is None:
        return weight if weight.is_floating_point() else weight.to(dtype)
    zeros = None if by.zeros is None else given[by.zeros][part]
    return dequantised(weight, given[by.scales][part], zeros, dtype)


def _some_rows(tensor: Tensor, about: Given, rows: slice) -> Tensor:
    """Rows of a given tensor that all tokens share, with their elements apart if they are packed."""
    if about.packed is not None:
        return about.packed.unpacked(tensor, int(about.shape[0] or 0), rows)
    if about.in_panels:
        tensor = from_panels(tensor, int(about.shape[0] or 0))
    return tensor[rows]


class _Evaluation:
    """The value of one definition, `[tokens, *indices]`; expressions broadcast against that and `over`."""

    def __init__(self, program: TokenProgram, made: Definition, known: Sequence[Tensor], tokens: int) -> None:
        self.program, self.made, self.known = program, made, known
        over = () if made.over is None else (made.over,)
        self.axes = (TOKEN, *made.indices, *over)
        self.shape = (tokens, *(extent(i) for i in (*made.indices, *over)))
        self.done: dict[Expr, Tensor] = {}
        self.like = floating(known)

    def value(self) -> Tensor:
        whole = self.of(self.made.value).to(self.like.dtype).expand(self.shape)
        if self.made.fold == "sum":
            return whole.sum(-1)
        return whole.amax(-1) if self.made.fold else whole.contiguous()

    def of(self, node: Expr) -> Tensor:
        if node not in self.done:
            self.done[node] = self._of(node)
        return self.done[node]

    def _of(self, node: Expr) -> Tensor:
        match node.op:
            case "const":
                value = float("nan") if node is E.NAN else node.value
                dtype = self.like.dtype if node.kind == "float" else None
                return torch.tensor(value, dtype=dtype, device=self.like.device)
            case "var":
                axis = self.axes.index(node)
                shape = [1] * len(self.axes)
                shape[axis] = self.shape[axis]
                return torch.arange(self.shape[axis], device=self.like.device).view(shape)
            case "read":
                return self._read(node)
            case "float":
                return self.of(node.args[0]).to(self.like.dtype)
        row = operation_of(node.op)
        assert row is not None, node.op
        args = [self.of(a) for a in node.args]
        if row.takes == "reals":
            args = [a.to(self.like.dtype) for a in args]
        elif row.takes == "truths":
            args = [a != 0 for a in args]
        if node.op == "where":
            args = [args[0] != 0, *_broadcast(_promoted(args[1:]))]
        found: Tensor = row.torch(*(args if node.op == "where" else _promoted(args)))
        return found

    def _read(self, node: Expr) -> Tensor:
        """An element for each token and index: the tensor itself where these count its dimensions. Indices
        that a selection does not choose may be out of range: those elements are read at the last place."""
        tensor: Tensor = self.known[node.value]
        indices = list(node.args)
        if self.program.definition(node.value) is not None:
            indices.insert(0, TOKEN)
        elif self.program.given[node.value].packed is not None or self.program.given[node.value].in_panels:
            tensor = _some_rows(tensor, self.program.given[node.value], slice(None))
        elif self.program.given[node.value].token_dim is not None:
            indices.insert(0, indices.pop(self.program.given[node.value].token_dim))
        if not indices:
            return tensor
        axes = [self.axes.index(i) for i in indices if i in self.axes]
        if len(set(axes)) == len(indices) and [self.shape[a] for a in axes] == list(tensor.shape):
            shape = [n if a in axes else 1 for a, n in enumerate(self.shape)]
            return tensor.permute(sorted(range(len(axes)), key=axes.__getitem__)).reshape(shape)
        places = [self.of(i).clamp(0, n - 1) for i, n in zip(indices, tensor.shape, strict=True)]
        found: Tensor = tensor[tuple(_broadcast(places))]
        return found


def _broadcast(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    found: Sequence[Tensor] = torch.broadcast_tensors(*tensors)  # type: ignore[no-untyped-call]
    return found


def _promoted(args: Sequence[Tensor]) -> list[Tensor]:
    """The operands in the last of their kinds, as numbers of rank zero do not decide in PyTorch."""
    dtype = functools.reduce(torch.promote_types, [a.dtype for a in args])
    return [a.to(dtype) for a in args]
