"""Proof before use: a derived decoder and the whole model on the same tokens, in float64.

Prompts of unequal length are prefilled, then tokens come one at a time and several at once; at every place
the logits must be those of the whole sequence. What no token has been written to holds NaN meanwhile.
Weights are widened where they are used, one at a time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from attngraph.errors import NoDecoderError
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.ops import nodes
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.kv_cache import KVCache
from attngraph.runtime.machine import Machine
from attngraph.runtime.step import Step

TOLERANCE = 1e-8
"""Largest accepted difference, relative to the largest logit."""
STEPS: tuple[tuple[int, int], ...] = ((4, 2), (1, 1), (0, 3), (2, 1), (1, 1))
"""New tokens of two rows in each call: prompts, single tokens, a row that waits, chunks."""


class Widened(fx.Interpreter):
    """A graph computed in float64 whatever its dtypes are, by reference kernels."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = str(target)
        if name.startswith("aten._assert_tensor_metadata"):
            return None  # of the dtypes as they were
        args, kwargs = pytree.tree_map(_widened, (args, kwargs))
        attention = nodes.called(target, args, kwargs)
        if attention is None:
            return pytree.tree_map(_widened, super().call_function(target, args, kwargs))
        # Any order of multiplication may be chosen later: where they differ, nothing is right.
        one, *others = (target(*way.args) for way in attention.references())
        same = all(torch.allclose(one, o, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True) for o in others)
        return one if same else torch.full_like(one, math.inf)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return value.double()
    return value


def prove(whole: ProgramGraph, step: Step, arguments: Mapping[str, Any], name: str, result: int) -> float:
    """The largest difference found, relative to the largest logit.

    Args:
        whole: the model as captured. step: what was derived from it.
        arguments: those it was captured with; `name` is the one with the tokens.
        result: the number of the logits among the whole graph's results.

    Raises:
        NoDecoderError: they differ.
    """
    with torch.no_grad(), _double_by_default():
        tokens: Tensor = arguments[name]
        rows, given = tokens.shape[:2]
        lengths = [sum(s[row] for s in STEPS) for row in range(rows)]
        places = torch.arange(max(lengths)) % given
        generator = torch.Generator().manual_seed(0)
        order = torch.stack([torch.randperm(given, generator=generator)[places] for _ in range(rows)])
        full = {n: _stretched(v, order) if n in step.arguments else v for n, v in arguments.items()}
        wanted = Machine(whole, step.owner, names=step.names)(full, interpret=Widened)[result]
        found = _by_steps(step, full, name, lengths)
        scale = float(wanted.abs().nan_to_num(0.0, 0.0, 0.0).max()) or 1.0
        worst = 0.0
        for row, pieces in enumerate(found):
            have = torch.cat(pieces)
            want = wanted[row, : lengths[row]]
            if not torch.equal(have.isfinite(), want.isfinite()):
                raise _differs(row, "NaN or infinity in one and not in the other")
            difference = (have - want).nan_to_num(0.0, 0.0, 0.0).abs()
            worst = max(worst, float(difference.max()) / scale)
            if worst > TOLERANCE:
                place = int(difference.amax(-1).argmax())
                raise _differs(row, f"token {place} by {worst:.1e} of the largest logit")
    return worst


def _differs(row: int, what: str) -> NoDecoderError:
    return NoDecoderError(
        f"prefill and decode do not give what the whole sequence gives (row {row}: {what}). Please report it."
    )


def _by_steps(step: Step, full: Mapping[str, Any], name: str, lengths: Sequence[int]) -> list[list[Tensor]]:
    device = full[name].device
    state = KVCache(step.plan, len(lengths), CacheConfig(dtype=torch.float64, layout="paged", page=3), device)
    step.begin(state, {n: full[n] for n in step.prompt_arguments}, Widened)
    found: list[list[Tensor]] = [[] for _ in lengths]
    for counts in STEPS:
        state.reserve(counts)
        for store in state.stores().values():
            _poison(store, state)
        parts = {
            n: torch.cat([full[n][row, at : at + count] for row, (at, count) in
                          enumerate(zip(state.lengths, counts, strict=True))]).unsqueeze(0)
            for n in step.arguments
        }  # fmt: skip
        logits = step.advance(state, counts, parts, run=Widened)[0]
        for row, part in enumerate(torch.split(logits, list(counts))):
            found[row].append(part)
    return found


def _poison(store: Tensor, state: KVCache) -> None:
    """NaN in whatever nobody has written to, at the beginning all of it."""
    if store.is_floating_point() and not any(state.lengths):
        store.fill_(math.nan)


def _stretched(value: Tensor, order: Tensor) -> Tensor:
    """What an argument brings for every token, for as many tokens as the trial has."""
    return torch.stack([row[places] for row, places in zip(value, order, strict=True)])


@contextlib.contextmanager
def _double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
