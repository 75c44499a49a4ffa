"""Masks as tensors, for operations that take one: made from a program's statements, with plain operations.

The positions of queries and keys may be any tensors: in a decoder's step the first query stands behind the
cache, and padded rows begin later. Nothing here looks at values, so a trace can follow all of it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.exporter.standard import LOWEST, Standard
from attngraph.ir.language import Environment, Expr, Keep, Statement, Tile, evaluate
from attngraph.ir.ops.kernels import accumulation_dtype


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the queries and keys of a call stand.

    Attributes:
        q, k: their positions, broadcastable to `[B, 1, Sq, Skv]`; None: they count from zero.
        real: which keys hold a token, None: all. A query that is padding sees its own key alone.
        own: which key is the query's own; given with `real`.
    """

    q: Tensor | None = None
    k: Tensor | None = None
    real: Tensor | None = None
    own: Tensor | None = None

    @property
    def are_counted(self) -> bool:
        return self.q is None


def environment(
    q: Tensor, k: Tensor, reads: Sequence[Tensor], sizes: Sequence[Any], places: Places
) -> Environment:
    """The names of a program for these operands; sizes become tensors, since a trace has them as symbols."""
    batch, heads, queries, _ = q.shape
    tile = Tile((0, batch), (0, heads), (0, queries), (0, k.shape[2]))
    numbers: list[Any] = [
        n if isinstance(n, int) else torch.scalar_tensor(n, dtype=torch.int64, device=q.device) for n in sizes
    ]
    given = {} if places.q is None or places.k is None else {"q": places.q, "k": places.k}
    return Environment(tile, reads, numbers, accumulation_dtype(q.dtype), q.device, given)


def mask_of(form: Standard, env: Environment, dtype: torch.dtype, places: Places) -> Tensor | None:
    """The mask, `[B or 1, H or 1, Sq, Skv]`: true where a key is seen, or what is added to scores; None where
    all keys are seen. Where it adds, a row without keys is NaN, unless it is to be zero."""
    if not form.mask and places.real is None:
        return None
    if not form.adds:
        seen = _seen(form.mask, env, places)
        if form.blind_is_zero or form.sees_itself:
            return _full(seen, env)
        found = torch.zeros((), dtype=dtype, device=env.device).where(seen, -torch.inf)
    else:
        found = _added(form.mask, env, places).to(dtype)
        if form.sees_itself:
            return _full(found, env)
        lowest = torch.full((), -LOWEST, dtype=dtype, device=env.device)
        found = torch.where((found < -LOWEST) & (found > -torch.inf), lowest, found)
    found = _full(found, env)
    if form.blind_is_zero:
        return found
    return found.masked_fill((found == -torch.inf).all(-1, keepdim=True), torch.nan)


def _seen(mask: Sequence[Statement], env: Environment, places: Places) -> Tensor:
    seen: Tensor | None = None
    for statement in mask:
        assert isinstance(statement, Keep)
        kept = evaluate.as_bool(evaluate.evaluate(statement.predicate, env, {}), env)
        seen = kept if seen is None else seen & kept
    if places.real is not None:
        assert places.own is not None
        seen = places.real if seen is None else seen & places.real
        seen = seen | places.own
    assert seen is not None
    return seen


def _added(mask: Sequence[Statement], env: Environment, places: Places) -> Tensor:
    """What is added to scores: the statements applied to scores of zero."""
    zero = torch.zeros((1, 1, 1, 1), dtype=env.dtype, device=env.device)
    added = evaluate.applied(mask, zero, env)
    if places.real is not None:
        assert places.own is not None
        added = added.masked_fill(~places.real, -torch.inf).masked_fill(places.own, 0.0)
    return added


def _full(mask: Tensor, env: Environment) -> Tensor:
    """The mask with all its queries and keys; runtimes need not broadcast these."""
    mask = mask[(None,) * (4 - mask.ndim)]
    _, _, queries, keys = env.tile.shape
    return mask.expand(mask.shape[0], mask.shape[1], queries, keys)


def with_sink(mask: Tensor | None, sink: Expr, env: Environment, dtype: torch.dtype) -> Tensor:
    """The mask with one more key, whose score is the sink."""
    batch, heads, queries, keys = env.tile.shape
    score = factor_of(sink, env).to(dtype)
    if mask is None:
        mask = torch.zeros((1, 1, queries, keys), dtype=dtype, device=env.device)
    elif mask.dtype == torch.bool:
        mask = torch.zeros((), dtype=dtype, device=env.device).where(mask, -torch.inf)
    score = score.expand(batch, heads, queries, 1)
    return torch.cat([mask.expand(batch, heads, queries, keys), score], -1)


def factor_of(value: Expr, env: Environment) -> Tensor:
    """A factor of queries or results, broadcastable to `[B, H, Sq, 1]`."""
    return evaluate.tensor(evaluate.evaluate(value, env, {}), env)
