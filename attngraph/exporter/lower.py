"""Attention as operations that other runtimes have: torch's own, or the Attention operation of ONNX.

`Lowering.attention` computes what `attngraph::attention` means and notes how it is written. What the usual
operations cannot say is computed by the program's definition in plain operations, where all scores are in
memory at once.

Masks are tensors, made from a program's statements. The positions of queries and keys may be any tensors: in
a decoder's step the first query stands behind the cache, and padded rows begin later. Nothing here looks at
values, so a trace can follow all of it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attngraph.exporter.formats import PT2, Format
from attngraph.exporter.report import ExportedAttention
from attngraph.exporter.tracing import varies
from attngraph.ir.language import Environment, Expr, Keep, ScoreProgram, Statement, Tile, evaluate
from attngraph.ir.ops import kernels
from attngraph.ir.ops.kernels import accumulation_dtype
from attngraph.meaning.masks.standard import LOWEST, NotStandard, Standard, sdpa_form, standard_form

OPERATION, SDPA, PLAIN = "Attention operation", "scaled_dot_product_attention", "plain operations"


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


ANYWHERE = Places()
"""Queries and keys that count from zero."""


@dataclasses.dataclass(frozen=True)
class Operands:
    """What an attention is computed from; `[B, H, tokens, width]`. `past`: earlier keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor
    reads: Sequence[Tensor]
    sizes: Sequence[Any]
    past: tuple[Tensor, Tensor] | None = None

    def joined(self) -> "Operands":
        """The same with earlier keys and values before the new ones."""
        if self.past is None:
            return self
        k, v = (torch.cat([old, new], 2) for old, new in zip(self.past, (self.k, self.v), strict=True))
        return dataclasses.replace(self, k=k, v=v, past=None)


Result = tuple[Tensor, tuple[Tensor, Tensor] | None]
"""The result, and earlier and new keys and values where the operation gives them; None: all of these are in
the operands."""


class Lowering:
    """How attentions are written. `way`: OPERATION, SDPA or PLAIN, where it can say the program."""

    def __init__(self, way: str, format: Format = PT2) -> None:
        self.way, self.format = way, format
        self.found: list[ExportedAttention] = []
        self.by_expert = False
        """Whether there are products by expert ."""
        self._masks: dict[Any, tuple[Any, Tensor | None]] = {}

    def begin(self) -> None:
        """Forget what was written: a trace begins."""
        self.found.clear()
        self._masks.clear()

    def attention(
        self, name: str, program: ScoreProgram, operands: Operands, places: Places = ANYWHERE
    ) -> Result:
        """One attention, called `name` in the report."""
        joined = operands.joined()
        how, reason = self.way, ""
        form = None
        if how != PLAIN:
            try:
                form = (sdpa_form if how == SDPA else standard_form)(program, operands.q.dtype)
                if how == OPERATION and varies(operands.q.shape[1]):
                    raise NotStandard("the number of heads follows from the sizes of the call")
                if places.are_counted and not _same(joined.q.shape[2], joined.k.shape[2]):
                    form = dataclasses.replace(form, sees_itself=False)  # there is no key for every query
            except NotStandard as problem:
                how, reason, form = PLAIN, str(problem), None
        env = environment(joined.q, joined.k, joined.reads, joined.sizes, places)
        if form is None:
            self.found.append(ExportedAttention(name, how, reason, str(program)))
            return _by_definition(program, joined, env, places), None
        result, words = self._standard(form, operands, joined, env, places)
        self.found.append(ExportedAttention(name, how, words, str(program)))
        return result

    def _standard(
        self, form: Standard, operands: Operands, joined: Operands, env: Environment, places: Places
    ) -> tuple[Result, str]:
        q, dtype = operands.q, operands.q.dtype
        if form.queries is not None:
            q = q * factor_of(form.queries, env).to(dtype)
        by_itself = form.causal and places.real is None and form.sink is None
        if self.way == SDPA:
            by_itself &= places.are_counted
        mask = None if by_itself else self._mask(form, env, dtype, places)
        words = "causal" if by_itself else "" if mask is None else "with a mask"
        if form.sink is not None:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (joined.k, joined.v))
            joined = dataclasses.replace(joined, k=k, v=v)
            operands = dataclasses.replace(joined, q=q)
            mask, words = with_sink(mask, form.sink, env, dtype), "with a mask; a sink is one more key"
        if self.way == SDPA:
            k, v, present = joined.k, joined.v, None
            grouped = not _same(q.shape[1], k.shape[1])
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=by_itself, scale=form.scale, enable_gqa=grouped
            )
        else:
            if by_itself and not places.are_counted and operands.past is None:
                by_itself, mask = False, self._mask(form, env, dtype, places)
                words = "with a mask"
            out, present = _operation(q, operands, mask, by_itself, form)
        if form.results is not None:
            out = out * factor_of(form.results, env).to(dtype)
        if form.blind_is_zero and form.adds and mask is not None and form.sink is None:
            out = out.masked_fill((mask == -torch.inf).all(-1, keepdim=True), 0.0)
        return (out, present), words

    def _mask(self, form: Standard, env: Environment, dtype: torch.dtype, places: Places) -> Tensor | None:
        """The mask; layers with equal masks share one."""
        sizes = tuple(str(n) for n in env.tile.shape)
        own = (places.q, places.k, places.real, places.own)
        key = (
            form.mask, form.blind_is_zero, form.sees_itself, dtype, sizes, tuple(map(str, env.sizes)),
            tuple(map(id, env.reads)), tuple(map(id, own)),
        )  # fmt: skip
        if key not in self._masks:
            # The tensors are kept as well, so that none of them gets the number of another.
            self._masks[key] = ((tuple(env.reads), own), mask_of(form, env, dtype, places))
        return self._masks[key][1]


def _same(a: Any, b: Any) -> bool:
    """Whether two sizes are one number or one symbol; nothing is assumed about symbols."""
    return str(a) == str(b)


def _operation(
    q: Tensor, operands: Operands, mask: Tensor | None, causal: bool, form: Standard
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The Attention operation of ONNX; torch only records it."""
    past_key, past_value = operands.past or (None, None)
    out, key, value, _ = torch.onnx.ops.attention(
        q, operands.k, operands.v, mask, past_key, past_value, is_causal=causal, scale=form.scale,
        softcap=form.softcap,
    )  # fmt: skip
    return out, None if operands.past is None else (key, value)


def _by_definition(program: ScoreProgram, joined: Operands, env: Environment, places: Places) -> Tensor:
    """The program's own formulas, in plain operations."""
    q, k, v = (t.to(env.dtype) for t in (joined.q, joined.k, joined.v))
    dot = kernels.dot(q, k)
    scores = evaluate.scores(program, dot, env)
    if places.real is not None and places.own is not None:
        scores = scores.masked_fill(~places.real, -torch.inf).masked_fill(places.own, 0.0)
    weights = kernels.normalised(scores, evaluate.sink(program, env))
    return kernels.grouped(evaluate.weights(program, weights, env, dot), v).to(joined.v.dtype)


# --- masks ---


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
