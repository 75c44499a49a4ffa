"""Checks a derived decoder before its first use: compares it with the whole model, in float64.

Prompts of unequal length are prefilled, then tokens follow one at a time and several at once; at every
position the logits must equal those of the whole sequence. Before each call the cache memory that holds no
token (new pages, the rest of a page, freed slots) is filled with NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from attngraph.capture.structure import flatten
from attngraph.errors import NoDecoderError
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.meaning.check.comparison import Rule, compare
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.kv_cache import KVCache
from attngraph.runtime.machine import Machine
from attngraph.runtime.step import Step
from attngraph.runtime.step_sizes import Call

aten = torch.ops.aten
TOLERANCE = 1e-8
"""Largest accepted difference, relative to the largest logit."""
ENTRIES = 64
"""Where a model has powers of its decays in tables, it does not itself give what their exact values would: a
result follows from so many rounded entries or fewer."""
LONGER = ((31, 259), (1, 1), (3, 0), (10, 1))
"""The same for a model that was traced for few numbers of tokens: longer sequences, one of them longer than
most blocks (256 tokens)."""
BEGINNINGS = 25
"""Such a model may do something else with short sequences, too: all beginnings of fewer tokens are
compared."""
ROUNDING = {8: 1e-7, 4: 2e-3}
"""Accepted there, where the model itself is run, in its own dtype: by the bytes of an element."""
STEPS: tuple[tuple[int, int], ...] = ((4, 2), (1, 1), (0, 3), (2, 1), (1, 1))
"""New tokens of two rows in each call: prompts, single tokens, none for one row, chunks. Both rows end at the
same length. (More rows are like the second.)"""


DIFFERENT = 4
"""So many different tokens tell one attention from another; where a prompt has fewer, others are taken."""
_SAME_IDS = (
    aten._to_copy.default, aten.reshape.default, aten.view.default, aten.clone.default, aten.alias.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.contiguous.default,
)  # fmt: skip
"""Operations whose results are the ids that they are given."""


class Proved(NamedTuple):
    """The largest difference found, relative to the largest logit, and the logits of the decoder, `[rows,
    tokens, V]`."""

    error: float
    logits: Tensor


def prove(whole: ProgramGraph, step: Step, arguments: Mapping[str, Any], name: str, result: int) -> Proved:
    """Compare a decoder with the whole model.

    Args:
        whole: the captured model; divided among ranks as the decoder is, if it is. step: the decoder
            derived from it.
        arguments: the arguments that it was captured with; `name` is the one with the tokens.
        result: the index of the logits among the whole graph's results.

    Raises:
        NoDecoderError: they differ.
    """
    with torch.no_grad():
        rows = arguments[name].shape[0]
        full, steps = sample(step, arguments, name)
        logits = found = _by_steps(step, full, full[name].device, steps)
        machine = Machine(whole, step.owner, names=step.names)

        def of_whole(given: Mapping[str, Any]) -> Tensor:
            ranks = step.ranks
            found: Tensor = ranks.one(machine(given, ranks.own(), ranks.exact)[result])
            return found

        wanted = of_whole(full)
        if wanted.shape != found.shape and not step.plan.length.isdecimal():
            # The model gives one result for a sequence: it is run on each beginning of two tokens or more.
            ends = range(2, found.shape[1] + 1)
            cut = ({**full, **{n: full[n][:, :end] for n in step.arguments}} for end in ends)
            parts = [of_whole(given) for given in cut]
            found, wanted = found[:, 1:], torch.stack([p.reshape(rows, *found.shape[2:]) for p in parts], 1)
        difference = compare(found, wanted, Rule(max(TOLERANCE, ENTRIES * step.plan.rounding)))
    if not difference.holds:
        much = "" if difference.problem else f"; that is {difference.relative:.1e} of the largest logit"
        differs = f"what the whole sequence gives ({difference}{much}; places are [row, token, logit])"
        if step.plan.assumed:
            raise NoDecoderError(
                "with assume_causal it is taken that no token sees a later one, and one does: without later "
                f"tokens the model does not give {differs}. It was not shown of "
                f"{'; '.join(step.plan.assumed)}."
            )
        raise NoDecoderError(f"prefill and decode do not give {differs}. Please report it.")
    return Proved(difference.relative, logits)


def varied(whole: ProgramGraph, tokens: Tensor, place: int) -> Tensor:
    """The tokens to prove with: those of the prompt. If these are hardly different ones (all values that an
    attention weighs are equal then, whatever its weights), others of the vocabulary, from its middle because
    special tokens are at its ends. `place` is the number of the tokens among the tensors of the call."""
    ids = next(
        node for node, given in zip(whole.placeholders(), whole.inputs, strict=True)
        if given.kind == "argument" and int(given.name) == place
    )  # fmt: skip
    limit = min(_tables_of(ids), default=0)
    if tokens.is_floating_point() or limit < DIFFERENT or len(set(tokens.flatten().tolist())) >= DIFFERENT:
        return tokens
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(limit // 4, limit - limit // 4, tokens.shape, generator=generator)
    return found.to(tokens.device, tokens.dtype)


def _tables_of(ids: fx.Node) -> Iterator[int]:
    """How many entries the tables have in which ids are looked up as they are."""
    for user in ids.users:
        if user.target is aten.embedding.default and user.args[1] is ids:
            yield int(user.args[0].meta["val"].shape[0])  # type: ignore[union-attr]
        elif user.target in _SAME_IDS:
            yield from _tables_of(user)


def sample(
    step: Step, arguments: Mapping[str, Any], name: str
) -> tuple[dict[str, Any], tuple[tuple[int, ...], ...]]:
    """Arguments as long as the calls to compare together, made of the given tokens, and these calls."""
    rows, given = arguments[name].shape[:2]
    steps = tuple((first, *[second] * (rows - 1)) for first, second in _steps(step, given, rows))
    places = torch.arange(sum(counts[0] for counts in steps)) % given
    generator = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(given, generator=generator)[places] for _ in range(rows)])
    full = dict(arguments)
    for n in step.arguments:  # their entries for every token, permuted and repeated to the full length
        full[n] = torch.stack([row[picked] for row, picked in zip(arguments[n], order, strict=True)])
    return full, steps


def _steps(step: Step, given: int, rows: int) -> tuple[tuple[int, int], ...]:
    """The calls to compare; as many tokens as were traced, if the graph is of that number alone, or not for
    their number."""
    total = sum(count for count, _ in STEPS)
    call = Call(1 if step.sizes.single else rows, frozenset([total]))
    if not step.plan.length.isdecimal() and not step.sizes.fault(call):
        return STEPS
    if given > total:
        return (*STEPS, (given - total, given - total))
    half = given // 2
    return tuple(c for c in ((half, 1), (1, 0), (given - half - 1, given - 1)) if any(c))


def prove_longer(
    model: Callable[..., Any], step: Step, arguments: Mapping[str, Any], name: str, result: int
) -> None:
    """Compare with the model itself on sequences that are longer than those it was traced for.

    Raises:
        NoDecoderError: they differ, or the model takes other tensors, which cannot be made up.
    """
    others = [n for n, value in arguments.items() if n != name and isinstance(value, Tensor)]
    if others:
        raise NoDecoderError(
            f"the model was traced for few numbers of tokens, and others cannot be tried, because it takes "
            f"{', '.join(others)} as well."
        )
    given = arguments[name]
    generator = torch.Generator().manual_seed(0)
    longer = LONGER
    if step.limit is not None:
        most = max(1, step.limit - sum(counts[0] for counts in LONGER[1:]))
        longer = ((min(LONGER[0][0], most), min(LONGER[0][1], most)), *LONGER[1:])
    total = max(sum(counts) for counts in zip(*longer, strict=True))
    places = torch.randint(0, given.shape[1], (len(LONGER[0]), total), generator=generator)
    state = KVCache(step.plan, len(LONGER[0]), CacheConfig(), given.device)
    ids = torch.stack([row[picked] for row, picked in zip(given, places, strict=True)])
    try:
        _compare_longer(model, step, arguments, name, result, ids, state, longer)
    except NoDecoderError:
        raise
    except Exception as problem:
        raise NoDecoderError(of_few(problem)) from problem


def prove_alone(
    model: Callable[..., Any], examples: Sequence[Mapping[str, Any]], name: str, result: int
) -> None:
    """Compare what the model gives for batches with what it gives for each of their sequences.

    Raises:
        NoDecoderError: they differ.
    """

    def logits(given: Mapping[str, Any], ids: Tensor) -> Tensor:
        leaves = flatten(model(**{**given, name: ids}))[0]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)][result]

    with torch.no_grad():
        for given in examples:
            whole = logits(given, given[name])
            rows = torch.cat([logits(given, row[None]) for row in given[name]])
            difference = compare(rows, whole, Rule(ROUNDING.get(whole.dtype.itemsize, 0.1)))
            if not difference.holds:
                raise NoDecoderError(
                    f"a batch of {len(rows)} sequences gives something else than each of them ({difference})."
                )


def of_few(problem: Exception) -> str:
    """That a graph which was traced for few numbers of tokens fails for others."""
    what = str(problem).partition("\n")[0]
    return f"the model was traced for few numbers of tokens, and others fail: {what}."


def _compare_longer(
    model: Callable[..., Any], step: Step, arguments: Mapping[str, Any], name: str, result: int, ids: Tensor,
    state: KVCache, longer: Sequence[tuple[int, int]],
) -> None:  # fmt: skip
    rows: list[list[Tensor]] = [[] for _ in ids]
    with torch.no_grad():
        for counts in longer:
            parts = [row[at : at + n] for row, at, n in zip(ids, state.lengths, counts, strict=True)]
            given = {n: torch.cat(parts)[None] for n in step.arguments}
            logits = step.advance(state, counts, given, unfinished=range(len(rows)))[0]
            for row, part in zip(rows, torch.split(logits, list(counts)), strict=True):
                row.append(part)
        for row, parts in zip(ids, rows, strict=True):
            found = torch.cat(parts)
            for length in (*range(1, min(BEGINNINGS, len(found))), len(found)):
                _require_as_model(
                    model, step, {**arguments, name: row[None, :length]}, found[:length], result
                )


def _require_as_model(
    model: Callable[..., Any], step: Step, arguments: dict[str, Any], found: Tensor, result: int
) -> None:
    """Compare the logits of one sequence with the model's own, where the graph is for its length.

    Raises:
        NoDecoderError: they differ.
    """
    tokens, length = arguments[step.name], len(found)
    rows = next((n for n in (1, 2) if not step.sizes.fault(Call(n, frozenset([length])))), 0)
    if not rows:
        return
    leaves = flatten(model(**{**arguments, step.name: tokens.expand(rows, *tokens.shape[1:])}))[0]
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor)][result][0]
    if wanted.shape != found.shape:  # one result for a sequence
        found = found[-1].reshape(wanted.shape)
    difference = compare(found, wanted, Rule(ROUNDING.get(wanted.dtype.itemsize, 0.1)))
    if not difference.holds:
        raise NoDecoderError(
            f"the model was traced for few numbers of tokens, and for {length} it gives something else "
            f"({difference})."
        )


def _by_steps(
    step: Step, full: Mapping[str, Any], device: torch.device, steps: Sequence[Sequence[int]]
) -> Tensor:
    """The results of all tokens, `[rows, tokens, ...]`, computed a few at a time."""
    state = empty_state(step, full, device, steps)
    found: list[list[Tensor]] = [[] for _ in steps[0]]
    for counts in steps:
        state.reserve(counts)
        poison(state)
        parts = tokens_of(step, full, state.lengths, counts)
        logits = step.advance(state, counts, parts, run=step.ranks.exact)[0]
        for row, part in enumerate(torch.split(logits, list(counts))):
            found[row].append(part)
    return torch.stack([torch.cat(pieces) for pieces in found])


def empty_state(
    step: Step, full: Mapping[str, Any], device: torch.device, steps: Sequence[Sequence[int]]
) -> KVCache:
    """A state for the calls to compare, that keeps floating values in float64."""
    config = CacheConfig(dtype=torch.float64, layout="paged", page=3)
    state = KVCache(step.plan, len(steps[0]), config, device)
    step.begin(state, {n: full[n] for n in step.prompt_arguments}, step.ranks.exact)
    return state


def tokens_of(
    step: Step, full: Mapping[str, Any], lengths: Sequence[int], counts: Sequence[int]
) -> dict[str, Tensor]:
    """The arguments of the next call, packed: of each row so many tokens after those that it has."""
    return {
        n: torch.cat([full[n][row, at : at + count] for row, (at, count) in
                      enumerate(zip(lengths, counts, strict=True))]).unsqueeze(0)
        for n in step.arguments
    }  # fmt: skip


def poison(state: KVCache) -> None:
    """Fill cache memory that holds no token of any row with NaN. In a ring buffer, a removed token may have
    overwritten an older one; that slot then holds neither."""
    smallest = min((group.reach for group in state.groups.values() if group.ring), default=0)
    for group in state.groups.values():
        kept = []
        for length, lost in zip(state.lengths, state.lost, strict=True):
            own = group.own(length)
            longest = max(own, group.own(lost + smallest)) if group.ring else own
            kept.append(range(max(0, longest - group.capacity), own))
        row = torch.tensor([row for row, positions in enumerate(kept) for _ in positions], dtype=torch.int64)
        position = torch.tensor([p for positions in kept for p in positions], dtype=torch.int64)
        row, slot = row.to(state.device), position.to(state.device) % group.capacity
        places = (slice(None), group.table()[row, slot // group.page], slot % group.page)
        for members, arena in group.arenas.values():
            if arena.is_floating_point():
                slots = arena.movedim((1 + members[0].row_dim, 1 + members[0].token_dim), (1, 2))
                written = slots[places]
                slots.fill_(math.nan)
                slots[places] = written
