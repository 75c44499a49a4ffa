"""What a decoder's step computes from earlier tokens other than by attention, by C (`c/carried.h`):
`attngraph::running_sum` and `attngraph::last_tokens`. Float32, and what is carried also float64; other dtypes
are left to PyTorch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.cpu import native
from attngraph.codegen.cpu.native import Link, numbers, struct
from attngraph.codegen.cpu.operands import rows_fit, table_range
from attngraph.ir.ops.cached_attention import numbers_of

INNER, MOST_VECTORS = numbers("carried.h")["INNER"], numbers("carried.h")["MOST_VECTORS"]
"""Dimensions of a token, and vectors of a delta rule."""
_STATES = {torch.float32: "float", torch.float64: "double"}
_LastTokens, _Sums = struct("carried.h", "LastTokens"), struct("carried.h", "Sums")


class LastTokens:
    """`attngraph::last_tokens`."""

    def run(
        self, pages: Tensor, new: Tensor, table: Tensor, starts: Tensor, first: Tensor, place: Tensor,
        *dims: int,
    ) -> Tensor | None:  # fmt: skip
        made = self.link(pages, new, table, starts, first, *dims)
        return None if made is None else made.run()[0]

    def link(
        self, pages: Tensor, new: Tensor, table: Tensor, starts: Tensor, first: Tensor, row_dim: int,
        dim: int, back: int,
    ) -> Link | None:  # fmt: skip
        """The call, ready to run; None if it is not supported."""
        code = _code()
        value = new.movedim((row_dim, dim), (0, 1))[0]  # [N, ...]
        rows = (table, starts, first)
        inner = value.shape[1:]
        if code is None or len(inner) > INNER or not _are_floats(pages, new) or not _are_whole(rows):
            return None
        if not self._fit(value, pages.movedim((row_dim, dim), (0, 1)), *rows) or new.shape[row_dim] != 1:
            return None
        out = value.new_empty((value.shape[0], back + 1, *inner))
        call = _LastTokens(
            fresh=value.data_ptr(), out=out.data_ptr(), table=table.data_ptr(), starts=starts.data_ptr(),
            first=first.data_ptr(), rows=first.shape[0], columns=table.shape[1], back=back,
            token_stride=value.stride(0),
        )  # fmt: skip
        missing = INNER - len(inner)
        call.size = (*(1,) * missing, *inner)
        call.fresh_strides = (*(0,) * missing, *value.stride()[1:])

        def move(pages: Tensor) -> None:
            store = pages.movedim((row_dim, dim), (0, 1))
            assert store.shape[2:] == inner and store.dtype is torch.float32
            call.pages, call.page = store.data_ptr(), store.shape[1]
            call.page_stride, call.slot_stride = store.stride()[:2]
            call.page_strides = (*(0,) * missing, *store.stride()[2:])

        move(pages)
        counters = native.counters(call, "item")
        return Link(code.attngraph_last_tokens, call, counters, [out], [value, *rows], move_pages=move)

    @staticmethod
    def _fit(value: Tensor, store: Tensor, table: Tensor, starts: Tensor, first: Tensor) -> bool:
        """Whether new tokens `[N, ...]` and pages `[pages, page, ...]` go together, and rows have pages."""
        if (
            not rows_fit(len(value), starts, first)
            or store.shape[2:] != value.shape[1:]
            or not store.shape[1]
        ):
            return False
        found = table_range(table, len(first))
        return found is not None and found[1] < max(len(store), not max(numbers_of(first), default=0))


class RunningSum:
    """`attngraph::running_sum`."""

    def run(self, *operands: Any) -> tuple[Tensor, Tensor] | None:
        made = self.link(*operands)
        if made is None:
            return None
        out, after = made.run()
        return out, after

    def link(
        self, q: Tensor | None, k: Tensor | None, v: Tensor, decay: Tensor | None, state: Tensor,
        starts: Tensor, inclusive: bool = True, left: Tensor | None = None, right: Tensor | None = None,
        less_one: bool = False,
    ) -> Link | None:  # fmt: skip
        """The call, ready to run; None if it is not supported."""
        code = _code(_STATES.get(state.dtype, ""))
        given: dict[str, Tensor | None] = {
            "q": q, "k": k, "v": v, "decay": decay, "left": left, "right": right,
        }  # fmt: skip
        present = [t for t in given.values() if t is not None]
        vectors = 0 if left is None else left.shape[2]
        if code is None or not _are_floats(*present) or vectors > MOST_VECTORS or not state.is_cpu:
            return None
        if not state.is_contiguous() or not _are_whole([starts]):
            return None
        if not self._fit(given, vectors, state, starts):
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

        counters = native.counters(call, "item")
        held = [*present, state, starts]
        return Link(code.attngraph_sums, call, counters, [out, after], held, carry=carry)

    @staticmethod
    def _fit(given: Mapping[str, Tensor | None], vectors: int, state: Tensor, starts: Tensor) -> bool:
        """Whether the operands have the shapes that `ir/ops/running_sum.py` says."""
        v, left, right = given["v"], given["left"], given["right"]
        if v is None or v.ndim != 3 or state.ndim != 4 or (left is None) != (right is None):
            return False
        rows, heads, depth, width = state.shape
        if v.shape[1:] != (heads, width) or not rows_fit(len(v), starts) or len(starts) != rows + 1:
            return False
        wanted: dict[str, tuple[int, ...]] = {name: (len(v), heads, depth) for name in ("q", "k", "decay")}
        wanted |= {name: (len(v), heads, vectors, depth) for name in ("left", "right")}
        others = [(t.shape, wanted[name]) for name, t in given.items() if t is not None and name != "v"]
        return all(
            len(shape) == len(whole) and all(n in (1, m) for n, m in zip(shape, whole, strict=True))
            for shape, whole in others
        )


def _code(state: str = "float") -> Any:
    """The compiled functions, for sums of this type; None where there is no compiler, or no such type."""
    otherwise = "running sums and windows of tokens are computed by PyTorch"
    return native.functions("carried.h", f"STATE {state}", otherwise=otherwise) if state else None


def _are_floats(*tensors: Tensor) -> bool:
    return all(t.is_cpu and t.dtype is torch.float32 for t in tensors)


def _are_whole(tensors: Sequence[Tensor]) -> bool:
    return all(t.is_cpu and t.dtype is torch.int64 and t.is_contiguous() for t in tensors)


LAST_TOKENS, RUNNING_SUM = LastTokens(), RunningSum()
