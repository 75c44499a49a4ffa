"""Checks a decoder whose cache rounds what it keeps, before its first use.

`proof.py` has shown that the decoder is right with a cache that does not round. Here the one that rounds runs
beside it, both in float64. After every call the wide cache is given what is read of the rounded one; so both
must give the same logits, and what the wide one has just computed must be as near to what is read of the
rounded one as `quantised.largest_error` says. How far the logits are from those without rounding is measured,
not judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attngraph.errors import NoDecoderError
from attngraph.ir.ops.quantised import largest_error, widened
from attngraph.meaning.check.comparison import Rule, compare
from attngraph.report.cache_entry import Drift
from attngraph.runtime.drift import drift_between
from attngraph.runtime.kv_cache import KVCache
from attngraph.runtime.proof import TOLERANCE, empty_state, poison, sample, tokens_of
from attngraph.runtime.step import Step


def prove_storage(wide: Step, step: Step, arguments: Mapping[str, Any], name: str, exact: Tensor) -> Drift:
    """Compare `step`, which rounds, with `wide`, which does not; returns how far its logits are from
    `exact`, those of `proof.prove`.

    Raises:
        NoDecoderError: they differ, or a rounded value is not near to what was computed.
    """
    full, steps = sample(wide, arguments, name)
    rounded, other = (empty_state(one, full, full[name].device, steps) for one in (step, wide))
    rows: list[list[Tensor]] = [[] for _ in steps[0]]
    with torch.no_grad():
        for counts in steps:
            parts = tokens_of(wide, full, rounded.lengths, counts)
            results = []
            for one, state in ((step, rounded), (wide, other)):
                state.reserve(counts)
                poison(state)
                results.append(one.advance(state, counts, parts, run=one.ranks.exact)[0])
            found, wanted = results
            difference = compare(found, wanted, Rule(TOLERANCE))
            if not difference.holds:
                raise NoDecoderError(
                    "a cache of 8 bits is not read as it is written: the logits are not those of the same "
                    f"values without scales ({difference}; places are [token, logit]). Please report it."
                )
            _read_rounded(step, rounded, other)
            for row, part in zip(rows, torch.split(found, list(counts)), strict=True):
                row.append(part)
        return drift_between(torch.stack([torch.cat(pieces) for pieces in rows]), exact)


def _read_rounded(step: Step, rounded: KVCache, wide: KVCache) -> None:
    """Give the wide state what is read of the rounded one, if that is near enough to what it had.

    Raises:
        NoDecoderError: it is not.
    """
    small, large = rounded.stores(), wide.stores()
    for scales in (s for s in step.plan.stores if s.scales_of):
        (about,) = (s for s in step.plan.stores if s.name == scales.scales_of)
        by, exact = small[scales.name], large[about.name]
        read = widened(small[about.name], by, exact.dtype)
        near = (read - exact).abs() <= largest_error(exact, by, about.dtype)
        is_known = ~by.isnan().unsqueeze(-1)
        if not bool((near | ~is_known).all()):
            raise NoDecoderError(
                f"{about.label}: what is kept as {about.dtype} is further from what was computed than "
                "rounding explains. Please report it."
            )
        exact.copy_(torch.where(is_known, read, exact))
