"""Attention that reads only the keys that its masks leave, where data choose them.

`visible_keys` gives the places of the keys that any query sees, by the statements of a score program that
hide whatever the products are: a predicate without the product, a low number that is added. `attention_at` is
attention to keys that stand at such places; what the program reads at a key's place is read at these. Where a
query sees none, all keys are given, as its weights then follow from all of them.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attngraph.ir.language import DOT, SCORE, E, Environment, Expr, Keep, Score, ScoreProgram, Tile, parse
from attngraph.ir.language.evaluate import as_bool, evaluate, tensor
from attngraph.ir.ops.declare import INSTEAD, Size, Sizes, declare
from attngraph.ir.ops.kernels import accumulation_dtype, attend

LOW = -1e8
"""A score that is so low, or lower, has weight zero beside any that is not."""


def hiding(program: ScoreProgram) -> Iterator[tuple[Expr, bool]]:
    """What hides a key in a program, whatever its product is: numbers that are added to the score, and (True)
    predicates that keep it."""
    products = {DOT, SCORE}
    for statement in reversed(program.statements):
        if isinstance(statement, Score):
            parts = E.parts(statement.value, "add")
            yield from ((part, False) for part in parts if products.isdisjoint(E.walk(part)))
            if not products & set(parts):
                return  # of what was hidden before something else is made
        elif isinstance(statement, Keep) and products.isdisjoint(E.walk(statement.predicate)):
            fill = statement.fill
            if statement.is_hard or statement.lowers or (fill.op == "const" and float(fill.value) <= LOW):
                yield statement.predicate, True


def _found(a: Any) -> Tensor:
    return a.q.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)  # type: ignore[no-any-return]


@declare(fake=_found, derivatives=INSTEAD)
def visible_keys(q: Tensor, keys: Size, reads: list[Tensor], sizes: Sizes, program: str) -> Tensor:
    rows, heads, queries, _ = q.shape
    tile = Tile((0, rows), (0, heads), (0, queries), (0, keys))
    env = Environment(tile, reads, sizes, accumulation_dtype(q.dtype), q.device)
    hidden = torch.zeros(1, 1, queries, keys, dtype=torch.bool, device=q.device)
    for formula, keeps in hiding(parse(program)):
        found = evaluate(formula, env, {})
        hidden = hidden | (~as_bool(found, env) if keeps else tensor(found, env) <= LOW)
    seen = ~hidden
    if not bool(seen.any(-1).all()):
        return torch.arange(keys, device=q.device)
    return functools.reduce(lambda t, _: t.any(0), range(3), seen).nonzero().flatten()


@declare(fake=lambda a: a.places.new_empty(torch.library.get_ctx().new_dynamic_size()), derivatives=INSTEAD)
def within(places: Tensor, begin: Size, end: Size) -> Tensor:
    """The places, from the first to the last, that stand in one of several parts, counted from its begin."""
    first, last = torch.searchsorted(places, torch.tensor([begin, end], device=places.device)).tolist()
    return places[first:last] - begin


@declare(fake=lambda a: a.q.new_empty([*a.q.shape[:3], a.v.shape[3]]), derivatives=INSTEAD)
def attention_at(
    q: Tensor, k: Tensor, v: Tensor, places: Tensor, reads: list[Tensor], sizes: Sizes, program: str
) -> Tensor:
    (rows, heads, queries, _), dtype, parsed = q.shape, accumulation_dtype(q.dtype), parse(program)
    tile = Tile((0, rows), (0, heads), (0, queries), (0, len(places)))
    env = Environment(tile, reads, sizes, dtype, q.device, {"k": places.view(1, 1, 1, -1)})
    out, _ = attend(parsed, q.to(dtype), [(k.to(dtype), v.to(dtype), env, frozenset())])
    return out.to(v.dtype)
