"""Operations of the model that a step runs for one row at a time, on what the row has of all its tokens.

A step computes new tokens of several rows, packed (`ir/ops/cached_attention.py`). `each_row` gives them what
follows from all earlier tokens: `program` (`ir/language/step_program.py`) gets, for one row after the other,

    t0, ...   of the values `new`, the row's new tokens
    h0, ...   of the values `whole` (from `history`, a row of the batch each), all that the row has; `sizes`
              says for how many tokens each has an entry
    k0, ...   of the values `read`, which lie in `pages`, what stands at some places: `at(k0, v0)`
    s0, ...   what all rows share
    p0        the positions of the new tokens
    tokens, new, first   how many tokens the row has, how many are new, and the first new one's position

A row is taken to have at least `least` tokens: none sees a later one, so more, zeros, change nothing.

`each_block` computes the entries of blocks of `size` tokens that the new tokens complete, each in the place
of the token that completes it, zeros elsewhere. `longer` are values with the tokens before (`with_earlier`),
as many as the open block and `before` more blocks have. The program gets of them whole blocks:

    h0, ...   the tokens of the blocks, `tokens` in number
    p0, p1    the positions of these tokens, and the numbers of the blocks
    new       how many tokens there are from the row's beginning to the end of the last block

`shape` is that of the result, with 0 for the new tokens, and `dims` says where tokens are in each operand.
`dtype` is the result's, if it is none of floating numbers; else it is that of the operands.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngraph.ir.language.step_program import parse_row
from attngraph.ir.ops.cached_attention import numbers_of
from attngraph.ir.ops.declare import INSTEAD, are_wide, declare


def _result(tensors: Sequence[Tensor], shape: Sequence[int], count: Any, dtype: str) -> Tensor:
    like = next(t for t in tensors if t.is_floating_point())
    kind = getattr(torch, dtype) if dtype else like.dtype
    return like.new_zeros([count if n == 0 else n for n in shape], dtype=kind)


class Stored(NamedTuple):
    """A value of which a row has new tokens, and pages of earlier ones: an entry for each `size` tokens."""

    new: Tensor
    pages: Tensor
    table: Tensor
    dim: int
    size: int

    def at(self, row: int, begin: int, end: int, first: int, places: Tensor) -> Tensor:
        """What a row has at these places, from the first to the last, as one row; zeros behind its end."""
        size, length = self.size, first // self.size
        store, news = self.pages.movedim(self.dim, 1), self.new[0].movedim(self.dim - 1, 0)
        news = news[begin + size - 1 - first % size : end : size]
        count = int((places < length).sum())
        found = [torch.cat([news, news.new_zeros(1, *news.shape[1:])])[
            (places[count:] - length).clamp(max=len(news))
        ]]  # fmt: skip
        if count:
            page = store.shape[1]
            slots = places[:count] % (self.table.shape[1] * page)
            found.insert(0, store[self.table[row, slots // page], slots % page].to(news.dtype))
        return torch.cat(found)[None].movedim(1, self.dim)


@declare(
    fake=lambda a: _result([*a.new, *a.whole, *a.read], a.shape, a.positions.shape[0], a.dtype),
    derivatives=INSTEAD,
)
def each_row(
    new: list[Tensor], whole: list[Tensor], shared: list[Tensor], read: list[Tensor], pages: list[Tensor],
    tables: list[Tensor], starts: Tensor, held: Tensor, positions: Tensor, program: str, dims: list[int],
    sizes: list[int], least: int, shape: list[int], dtype: str,
) -> Tensor:  # fmt: skip
    run, of_whole = parse_row(program, are_wide([*new, *whole, *read])), dims[len(new) :]
    of_read = zip(read, pages, tables, of_whole[len(whole) :], sizes[len(whole) :], strict=True)
    stored = [Stored(*about) for about in of_read]
    out = _result([*new, *whole, *read], shape, positions.shape[0], dtype)
    spans = itertools.pairwise(numbers_of(starts))
    for row, ((begin, end), first) in enumerate(zip(spans, numbers_of(held), strict=True)):
        count, place = end - begin, shape.index(0)
        if not count:
            continue
        tokens = max(first + count, least)
        own = [x.narrow(dim, begin, count) for x, dim in zip(new, dims, strict=False)]
        places = zip(whole, of_whole, sizes, strict=False)
        every = [_as_long(x[row : row + 1], dim, tokens // size) for x, dim, size in places]
        kept = [partial(each.at, row, begin, end, first) for each in stored]
        (found,) = run(tokens, count, first, own, every, shared, [positions[begin:end]], kept)
        out.narrow(place, begin, count).copy_(found)
    return out


def _as_long(tensor: Tensor, dim: int, length: int) -> Tensor:
    """The first entries along a dimension, so many, zeros where there are no more."""
    more = length - tensor.shape[dim]
    if more <= 0:
        return tensor.narrow(dim, 0, length)
    shape = [more if d == dim else n for d, n in enumerate(tensor.shape)]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


@declare(fake=lambda a: _result(a.longer, a.shape, a.positions.shape[0], a.dtype), derivatives=INSTEAD)
def each_block(
    longer: list[Tensor], shared: list[Tensor], starts: Tensor, held: Tensor, positions: Tensor, program: str,
    dims: list[int], size: int, before: int, shape: list[int], dtype: str,
) -> Tensor:  # fmt: skip
    run, back = parse_row(program, are_wide(longer)), (before + 1) * size - 1
    out, place = _result(longer, shape, positions.shape[0], dtype), shape.index(0)
    spans = itertools.pairwise(numbers_of(starts))
    for row, ((begin, end), first) in enumerate(zip(spans, numbers_of(held), strict=True)):
        full, last = first // size, (first + end - begin) // size
        if full == last:
            continue
        block = max(full - before, 0)
        at = begin + (row + 1) * back + block * size - first
        blocks = [x.narrow(dim, at, (last - block) * size) for x, dim in zip(longer, dims, strict=True)]
        numbers = [torch.arange(block * n, last * n, device=starts.device) for n in (size, 1)]
        (found,) = run((last - block) * size, last * size, block * size, [], blocks, shared, numbers, [])
        ends = torch.arange(full, last, device=starts.device) * size + (size - 1 - first + begin)
        out.index_copy_(place, ends, found.narrow(place, full - block, last - full).to(out.dtype))
    return out
