"""What compiled code takes for granted of its operands, looked at before it gets their addresses.

C reads where shapes, strides and numbers in tensors point. In a graph that this process made they are what
its passes proved; a graph from a file may give any tensor to any operand. What does not fit is left to
PyTorch's operations, which raise errors of their own. Numbers of rows are looked at call by call, or, for
calls that are recorded and run again, are those of the state that the decoder keeps (`record/links.py`).
"""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops.cached_attention import UNSCALED, Pair, Rows, Scales, numbers_of
from attngraph.ir.ops.kernels import Reads, Sizes


class OverCache(NamedTuple):
    """A call of attention over a cache, with what `CachedKernel.attend` is given."""

    program: ScoreProgram
    q: Tensor
    new: Pair
    pages: Pair
    reads: Reads
    sizes: Sizes
    rows: Rows
    scales: Scales = UNSCALED
    lse: Tensor | None = None


def rows_fit(tokens: int, starts: Tensor, *of_rows: Tensor) -> bool:
    """Whether rows divide so many tokens between them, and each of `of_rows` has a number from 0 on for each
    row."""
    if any(t.dtype is not torch.int64 or t.ndim != 1 or not t.is_cpu for t in (starts, *of_rows)):
        return False
    ends = numbers_of(starts)
    if not ends or ends[0] != 0 or ends[-1] != tokens or any(a > b for a, b in itertools.pairwise(ends)):
        return False
    return all(len(t) == len(ends) - 1 and min(numbers_of(t), default=0) >= 0 for t in of_rows)


def table_range(table: Tensor, rows: int) -> tuple[int, int] | None:
    """The least and the largest page in the table of so many rows; None if it is no such table."""
    if table.dtype is not torch.int64 or table.ndim != 2 or len(table) != rows or not table.numel():
        return None
    low, high = map(int, table.aminmax())
    return (low, high) if low >= 0 else None


def attention_fits(call: OverCache, rows: int, queries: int, keys: int) -> bool:
    """Whether queries, new keys and pages go together, and what the program reads at a position or a row is
    there. `queries`, `keys`: how many positions there are at most, in any of the rows."""
    q, (k, v), (k_new, v_new) = call.q, call.pages, call.new
    if any(t.ndim != 4 for t in (q, k, v, k_new, v_new)) or q.shape[0] != 1 or not k.shape[1]:
        return False
    heads, tokens, width = q.shape[1:]
    if heads % k.shape[1] or k.shape[3] != width or k.shape[:3] != v.shape[:3] or not k.shape[2]:
        return False
    count = k_new.shape[2]
    if count not in (0, tokens) or k_new.dtype is not q.dtype or v_new.dtype is not q.dtype:
        return False
    if count and (k_new.shape != (1, k.shape[1], tokens, width) or v_new.shape[:3] != k_new.shape[:3]):
        return False
    if count and v_new.shape[3] != v.shape[3]:
        return False
    scales = [by for by in call.scales if by is not None]
    if any(by.shape != k.shape[:3] or by.dtype is not torch.float32 for by in scales):
        return False
    extents = {"b": rows, "h": heads, "q": queries, "k": keys}
    return call.program.sizes <= len(call.sizes) and _reads_fit(call.program, call.reads, extents)


def _reads_fit(program: ScoreProgram, reads: Reads, extents: Mapping[str, int]) -> bool:
    """Whether the tensors that a program reads are there, with an element at each plain index."""
    for number, rank in program.reads.items():
        if number >= len(reads) or reads[number].ndim != rank:
            return False
    for node, axis, index in program.places:
        extent = reads[node.value].shape[axis]
        if index.op == "var" and extent < extents[index.value]:
            return False
        if index.op == "const" and not 0 <= index.value < extent:
            return False
    return True


def most_tokens(program: ScoreProgram, reads: Reads) -> int:
    """The most tokens of a row for which a program that reads these tensors at positions finds its places."""
    extents = (
        reads[node.value].shape[axis]
        for node, axis, index in program.places if index.op == "var" and index.value in ("q", "k")
    )  # fmt: skip
    return min(extents, default=1 << 31)
