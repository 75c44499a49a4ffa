"""What a decoder's step copies, by C (`c/copies.h`): rows of tables by index (embeddings, tokens that are
picked), whole numbers as numbers of another kind, and new tokens to the pages of a cache.

For PyTorch each is an operation or more. After the weights have passed through the caches, an operation of a
few numbers takes tens of microseconds, in which the memory gives a megabyte of weights.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.codegen.cpu import native
from attngraph.codegen.cpu.native import Link, numbers, struct
from attngraph.codegen.cpu.operands import rows_fit, table_range

aten = torch.ops.aten
INNER = numbers("copies.h")["INNER"]
"""Dimensions of a token."""
FEW = 4096
"""The most whole numbers that one thread computes with."""
SHARED = 1 << 18
"""Bytes of new tokens that several threads write to their pages."""
_Gather, _Numbers, _Kept, _Keep = (struct("copies.h", name) for name in ("Gather", "Numbers", "Kept", "Keep"))


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
        value = fresh.movedim((row_dim, dim), (0, 1))[0]  # [N, ...]
        inner, bytes_ = value.shape[1:], value.element_size()
        rows = (table, starts, first)
        if _code() is None or not value.is_cpu or not all(map(_is_whole, rows)) or not value.numel():
            return None
        if fresh.shape[row_dim] != 1 or not rows_fit(len(value), starts, first):
            return None
        if table_range(table, len(first)) is None:
            return None
        if not 0 < len(inner) <= INNER or value.stride(-1) != 1 or pages.dtype != value.dtype:
            return None
        missing = INNER - len(inner)

        def strides(tensor: Tensor) -> tuple[int, ...]:
            return (*(0,) * missing, *(n * bytes_ for n in tensor.stride()[-len(inner) :]))

        call = _Kept(
            fresh=value.data_ptr(), table=table.data_ptr(), starts=starts.data_ptr(), first=first.data_ptr(),
            rows=first.shape[0], columns=table.shape[1], bytes=bytes_, token_stride=value.stride(0) * bytes_,
            size=(*(1,) * missing, *inner), fresh_strides=strides(value),
        )  # fmt: skip

        def move(pages: Tensor) -> bool:
            store = pages.movedim((row_dim, dim), (0, 1))
            if store.shape[2:] != inner or store.dtype != value.dtype or not store.shape[1]:
                return False
            call.pages, call.page = store.data_ptr(), store.shape[1]
            call.page_stride, call.slot_stride = (n * bytes_ for n in store.stride()[:2])
            call.page_strides = strides(store)
            return store.stride(-1) == 1

        if not move(pages):
            return None
        self._calls.append(call)
        self._held += [value, *rows]
        self._all = (ctypes.c_void_p * len(self._calls))(*map(ctypes.addressof, self._calls))
        self._call.all, self._call.count = ctypes.addressof(self._all), len(self._calls)
        self._bytes += value.nbytes
        return move

    def run(self) -> None:
        if self._calls:
            self._call.item = 0
            members = 1 if self._bytes < SHARED else torch.get_num_threads()
            native.run(_code().attngraph_keep, self._call, members)


def _code() -> Any:
    """The compiled functions; None where there is no compiler (chains say so)."""
    return native.functions("copies.h")


def _is_whole(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.dtype is torch.int64 and tensor.is_contiguous()
