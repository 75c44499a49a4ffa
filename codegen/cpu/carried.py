"""What a decoder's step does with tokens other than by attention, by C (`c/carried.h`): rows of tables by
index (embeddings, tokens that are picked), whole numbers as numbers of another kind, new tokens to the pages
of a cache, `attngraph::last_tokens` and `attngraph::running_sum`. What is computed is float32, and what is
carried also float64; other dtypes are left to PyTorch.

For PyTorch each is an operation or more. After the weights have passed through the caches, an operation of a
few numbers takes tens of microseconds, in which the memory gives a megabyte of weights.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.codegen.cpu import native
from attngraph.codegen.cpu.native import Link, numbers, struct
from attngraph.codegen.cpu.operands import rows_fit, table_range
from attngraph.ir.ops.cached_attention import numbers_of

aten = torch.ops.aten
INNER, MOST_VECTORS = numbers("carried.h")["INNER"], numbers("carried.h")["MOST_VECTORS"]
"""Dimensions of a token, and vectors of a delta rule."""
FEW = 4096
"""The most whole numbers that one thread computes with."""
SHARED = 1 << 18
"""Bytes of new tokens that several threads write to their pages."""
_STATES = {torch.float32: "float", torch.float64: "double"}
_Gather, _Numbers, _Paged, _Keep, _LastTokens, _Sums = (
    struct("carried.h", name) for name in ("Gather", "Numbers", "Paged", "Keep", "LastTokens", "Sums")
)


# --- rows and numbers ---


def link_of(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Link | None:
    """The call of an operation on tensors that stay where they are, ready to run; None if it is not among
    these copies, or not supported."""
    made = _ROWS.get(target) or _NUMBERS.get(target)
    return None if made is None else made(*args, **kwargs)


def may_be_copy(node: fx.Node) -> bool:
    """Whether `link_of` may support it."""
    if node.target in _ROWS:
        return True
    value = node.all_input_nodes[0].meta.get("val") if node.target in _NUMBERS else None
    return isinstance(value, Tensor) and value.dtype is torch.int64


def _embedding(table: Tensor, index: Tensor, *_: Any, **__: Any) -> Link | None:
    """Rows of a table. (What is left out matters for gradients alone.)"""
    if table.ndim != 2 or table.stride(1) != 1:
        return None
    out = table.new_empty((*index.shape, table.shape[1]))
    return _gather(table, index, out, table.shape[0], table.stride(0) * table.element_size())


def _index_select(x: Tensor, dim: int, index: Tensor) -> Link | None:
    dim %= max(x.ndim, 1)
    if not x.is_contiguous() or any(n != 1 for n in x.shape[:dim]) or index.ndim != 1:
        return None
    shape = list(x.shape)
    count, shape[dim] = shape[dim], len(index)
    out = x.new_empty(shape)
    return _gather(x, index, out, count, x.nbytes // max(count, 1))


def _gather(table: Tensor, index: Tensor, out: Tensor, rows: int, stride: int) -> Link | None:
    code = _code()
    if code is None or not table.is_cpu or not _is_whole(index) or not out.numel():
        return None
    call = _Gather(
        from_=table.data_ptr(), index=index.data_ptr(), to=out.data_ptr(), count=index.numel(), rows=rows,
        stride=stride, bytes=out.nbytes // index.numel(),
    )  # fmt: skip
    counters = native.counters(call, "item", "bad")
    return Link(code.attngraph_gather, call, counters, [out], [table, index], counters[1][0])


def _plus(x: Tensor, other: Any, alpha: int = 1) -> Link | None:
    return _numbers(x, other * alpha, torch.int64) if type(other) is int else None


def _as(
    x: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> Link | None:
    return _numbers(x, 0, dtype) if device in (None, x.device) else None


def _numbers(x: Tensor, add: int, dtype: torch.dtype | None) -> Link | None:
    code = _code()
    if code is None or dtype not in (torch.int64, torch.float32) or not _is_whole(x) or x.numel() > FEW:
        return None
    out = torch.empty(x.shape, dtype=dtype)
    call = _Numbers(from_=x.data_ptr(), count=x.numel(), add=add)
    setattr(call, "real" if dtype is torch.float32 else "whole", out.data_ptr())
    return Link(code.attngraph_numbers, call, native.counters(call, "item"), [out], [x])


_Links = dict[Any, Callable[..., Link | None]]
_ROWS: _Links = {aten.embedding.default: _embedding, aten.index_select.default: _index_select}
_NUMBERS: _Links = {aten.add.Tensor: _plus, aten._to_copy.default: _as}


# --- tokens and pages ---


class _Tokens:
    """New tokens of rows, and pages of earlier ones, in a `call` of C.

    Attributes:
        value: the tokens `[N, ...]`. inner: the dimensions of one.
    """

    def __init__(
        self, call: Any, fresh: Tensor, rows: tuple[Tensor, Tensor, Tensor], row_dim: int, dim: int
    ) -> None:
        self.call, self.rows, self.dims = call, rows, (row_dim, dim)
        self.is_one_row = fresh.shape[row_dim] == 1
        self.value = fresh.movedim((row_dim, dim), (0, 1))[0]
        self.inner = self.value.shape[1:]

    def strides(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(n * tensor.element_size() for n in tensor.stride())

    def whole(self, inner: Sequence[int], filler: int) -> tuple[int, ...]:
        """A number for each of INNER dimensions."""
        return (*(filler,) * (INNER - len(self.inner)), *inner)

    def set_sizes(self) -> bool:
        """Set what the C needs of the tokens and rows; False where they do not go together."""
        table, starts, first = self.rows
        if len(self.inner) > INNER or not self.value.is_cpu or not all(map(_is_whole, self.rows)):
            return False
        if not self.is_one_row or not rows_fit(len(self.value), starts, first):
            return False
        if table_range(table, len(first)) is None:
            return False
        call = self.call
        call.fresh, call.bytes = self.value.data_ptr(), self.value.element_size()
        call.table, call.starts, call.first = (t.data_ptr() for t in self.rows)
        call.rows, call.columns, call.size = len(first), table.shape[1], self.whole(self.inner, 1)
        call.token_stride, *inner = self.strides(self.value)
        call.fresh_strides = self.whole(inner, 0)
        return True

    def move(self, pages: Tensor) -> bool:
        """Read or write other pages; False where tokens do not fit there."""
        store, call = pages.movedim(self.dims, (0, 1)), self.call
        if store.shape[2:] != self.inner or store.dtype != self.value.dtype or not store.shape[1]:
            return False
        call.pages, call.page = store.data_ptr(), store.shape[1]
        call.page_stride, call.slot_stride, *inner = self.strides(store)
        call.page_strides = self.whole(inner, 0)
        return True


class Keeping:
    """Writes new tokens of the rows of a cache to their pages."""

    def __init__(self) -> None:
        self._calls: list[Any] = []
        self._held: list[Tensor] = []
        self._all: Any = None
        self._call, self._bytes = _Keep(), 0

    def add(
        self, fresh: Tensor, pages: Tensor, table: Tensor, starts: Tensor, first: Tensor, row_dim: int,
        dim: int,
    ) -> Callable[[Tensor], bool] | None:  # fmt: skip
        """Also write these. Returns what makes it write to other pages, and says whether it can; None if
        these are not supported."""
        tokens = _Tokens(_Paged(), fresh, (table, starts, first), row_dim, dim)
        value = tokens.value
        if _code() is None or not value.numel() or not tokens.inner or value.stride(-1) != 1:
            return None

        def move(pages: Tensor) -> bool:
            return tokens.move(pages) and pages.movedim(tokens.dims, (0, 1)).stride(-1) == 1

        if not tokens.set_sizes() or not move(pages):
            return None
        self._calls.append(tokens.call)
        self._held += [value, *tokens.rows]
        self._all = (ctypes.c_void_p * len(self._calls))(*map(ctypes.addressof, self._calls))
        self._call.all, self._call.count = ctypes.addressof(self._all), len(self._calls)
        self._bytes += value.nbytes
        return move

    def run(self) -> None:
        if self._calls:
            self._call.item = 0
            members = 1 if self._bytes < SHARED else torch.get_num_threads()
            native.run(_code().attngraph_keep, self._call, members)


def windows_of(
    pages: Tensor, new: Tensor, table: Tensor, starts: Tensor, first: Tensor, row_dim: int, dim: int,
    back: int,
) -> Link | None:  # fmt: skip
    """A call of `attngraph::last_tokens`, ready to run; None if it is not supported."""
    code, call = _code(), _LastTokens(back=back)
    tokens = _Tokens(call.of, new, (table, starts, first), row_dim, dim)
    if code is None or not _are_floats(pages, new) or not tokens.set_sizes() or not tokens.move(pages):
        return None
    _, last = table_range(table, len(first)) or (0, 0)
    if last >= max(pages.shape[row_dim], not max(numbers_of(first), default=0)):
        return None  # rows have no such pages
    out = tokens.value.new_empty((len(tokens.value), back + 1, *tokens.inner))
    call.out, call.out_strides = out.data_ptr(), tokens.whole(tokens.strides(out)[2:], 0)

    def move(pages: Tensor) -> None:
        if not tokens.move(pages):
            raise AssertionError("other pages than those of this cache")

    held, counters = [tokens.value, *tokens.rows], native.counters(call, "item")
    return Link(code.attngraph_last_tokens, call, counters, [out], held, move_pages=move)


def run_last_tokens(*operands: Any) -> Tensor | None:
    """The op's result. Its places, the sixth operand, follow from the others."""
    made = windows_of(*operands[:5], *operands[6:])
    return None if made is None else made.run()[0]


# --- sums ---


def sums_of(
    q: Tensor | None, k: Tensor | None, v: Tensor, decay: Tensor | None, state: Tensor,
    starts: Tensor, inclusive: bool = True, left: Tensor | None = None, right: Tensor | None = None,
    less_one: bool = False, in_order: bool = False,
) -> Link | None:  # fmt: skip
    """A call of `attngraph::running_sum`, ready to run; None if it is not supported. It is in order, asked or
    not."""
    code = _code(_STATES.get(state.dtype, ""))
    given = {"q": q, "k": k, "v": v, "decay": decay, "left": left, "right": right}
    present = [t for t in given.values() if t is not None]
    vectors = 0 if left is None else left.shape[2]
    if code is None or not _are_floats(*present) or vectors > MOST_VECTORS or not state.is_cpu:
        return None
    if not (state.is_contiguous() and _is_whole(starts) and _fit(given, vectors, state, starts)):
        return None
    rows, heads, depth, width = state.shape
    out, after = v.new_empty(v.shape), torch.empty_like(state)
    call = _Sums(
        state=state.data_ptr(), out=out.data_ptr(), after=after.data_ptr(), starts=starts.data_ptr(),
        rows=rows, heads=heads, depth=depth, width=width, vectors=vectors, inclusive=inclusive,
        less_one=less_one,
    )  # fmt: skip
    for name, tensor in given.items():
        if tensor is not None:
            setattr(call, name, tensor.data_ptr())
            strides = zip(tensor.shape, tensor.stride(), strict=True)
            setattr(call, f"{name}_stride", tuple(0 if n == 1 else s for n, s in strides))

    def carry(before: Tensor) -> Tensor:
        following = torch.empty_like(before)
        call.state, call.after = before.data_ptr(), following.data_ptr()
        return following

    held, counters = [*present, state, starts], native.counters(call, "item")
    return Link(code.attngraph_sums, call, counters, [out, after], held, carry=carry)


def run_sums(*operands: Any) -> tuple[Tensor, ...] | None:
    """The op's results."""
    made = sums_of(*operands)
    return None if made is None else tuple(made.run())


def _fit(given: Mapping[str, Tensor | None], vectors: int, state: Tensor, starts: Tensor) -> bool:
    """Whether the operands have the shapes that `ir/ops/running_sum.py` says."""
    v, left, right = given["v"], given["left"], given["right"]
    if v is None or v.ndim != 3 or state.ndim != 4 or (left is None) != (right is None):
        return False
    rows, heads, depth, width = state.shape
    if v.shape[1:] != (heads, width) or not rows_fit(len(v), starts) or len(starts) != rows + 1:
        return False
    for name, tensor in given.items():
        wanted = (len(v), heads, vectors, depth) if name in ("left", "right") else (len(v), heads, depth)
        if tensor is None or tensor is v:
            continue
        sizes = zip(tensor.shape, wanted, strict=False)
        if tensor.ndim != len(wanted) or any(n not in (1, m) for n, m in sizes):
            return False
    return True


def _code(state: str = "float") -> Any:
    """The compiled functions, for sums of this type; None where there is no compiler, or no such type."""
    otherwise = "running sums and windows of tokens are computed by PyTorch"
    return native.functions("carried.h", f"STATE {state}", otherwise=otherwise) if state else None


def _are_floats(*tensors: Tensor) -> bool:
    return all(t.is_cpu and t.dtype is torch.float32 for t in tensors)


def _is_whole(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.dtype is torch.int64 and tensor.is_contiguous()
