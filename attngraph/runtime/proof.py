"""Checks a derived decoder before its first use: compares it with the whole model, in float64.

Prompts of unequal length are prefilled, then tokens follow one at a time and several at once; at every
position the logits must equal those of the whole sequence. Before each call the cache memory that holds no
token (new pages, the rest of a page, freed slots) is filled with NaN.

A decoder that was derived from traces of few sizes is compared with the model itself too, in its own dtype,
on longer sequences. One whose cache rounds what it keeps is derived and proved without rounding first. Then
both run side by side: after every call the wide cache is given what is read of the rounded one; so both must
give the same logits, and what the wide one has just computed must be as near to what is read of the rounded
one as `quantised.largest_error` says. How far the logits are from those without rounding is measured only.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngraph.capture.structure import put_together
from attngraph.errors import NoDecoderError
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.in_order import InOrder
from attngraph.ir.ops.quantised import largest_error, widened
from attngraph.ir.walk import reached
from attngraph.meaning.check.comparison import Rule, compare
from attngraph.report.cache_entry import Drift
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.examples import FAILURES
from attngraph.runtime.kv_cache import Call, KVCache
from attngraph.runtime.machine import Machine
from attngraph.runtime.step import Step
from attngraph.runtime.verify import tensors_of

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
SAMPLES = 20
"""Prompts that are tried where a decoder does not take all."""
DIFFERENT = 4
"""So many different tokens tell one attention from another; where a prompt has fewer, others are taken."""
_SAME_IDS = (
    aten._to_copy.default, aten.reshape.default, aten.view.default, aten.clone.default, aten.alias.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.contiguous.default,
)  # fmt: skip
"""Operations whose results are the ids that they are given."""


class Proved(NamedTuple):
    """The largest difference found, relative to the largest logit; the logits of the decoder, `[rows,
    tokens, V]`; and the arguments that they were computed with."""

    error: float
    logits: Tensor
    arguments: Mapping[str, Any]


def prove(whole: ProgramGraph, step: Step, arguments: Mapping[str, Any], result: int) -> Proved:
    """Compare a decoder with the whole model; that they differ is a NoDecoderError, as for all proofs here.

    Args:
        whole: the captured model; divided among ranks as the decoder is, if it is. step: the decoder
            derived from it.
        arguments: the arguments that it was captured with.
        result: the index of the logits among the whole graph's results.
    """
    with torch.no_grad():
        rows = arguments[step.name].shape[0]
        full, steps = _sample(step, arguments)
        state = _empty_state(step, full, steps)
        logits = found = torch.stack(_by_row((c, _advanced(step, state, full, c)) for c in steps))
        machine, ranks = Machine(whole, step.owner, names=step.names), step.ranks

        def of_whole(given: Mapping[str, Any]) -> Tensor:
            return ranks.one(machine(given, ranks.own(), ranks.exact)[result])  # type: ignore[no-any-return]

        wanted = _as_it_grew(of_whole, step, full, steps) if step.plan.anew else of_whole(full)
        if wanted.shape != found.shape and not step.plan.length.isdecimal():
            # The model gives one result for a sequence: it is run on each beginning of two tokens or more.
            ends = range(2, found.shape[1] + 1)
            cut = ({**full, **{n: full[n][:, :end] for n in step.arguments}} for end in ends)
            parts = [of_whole(given) for given in cut]
            found, wanted = found[:, 1:], torch.stack([p.reshape(rows, *found.shape[2:]) for p in parts], 1)
        difference = compare(found, wanted, Rule(max(TOLERANCE, ENTRIES * step.plan.rounding)))
        if not difference.holds and not step.sizes.fault(Call(1, frozenset([full[step.name].shape[1]]))):
            _require_rows_alone(of_whole, full, step.arguments)
    if not difference.holds:
        much = "" if difference.problem else f"; that is {difference.relative:.1e} of the largest logit"
        differs = f"what the whole sequence gives ({difference}{much}; places are [row, token, logit])"
        if step.plan.assumed:
            raise NoDecoderError(
                "with assume_causal it is taken that no token sees a later one, but the decoder does not "
                f"give {differs}. It was not shown of {'; '.join(step.plan.assumed)}."
            )
        raise NoDecoderError(f"prefill and decode do not give {differs}. Please report it.")
    return Proved(difference.relative, logits, arguments)


def _as_it_grew(
    of_whole: Callable[[Mapping[str, Any]], Tensor], step: Step, full: Mapping[str, Any],
    steps: Sequence[Sequence[int]],
) -> Tensor:  # fmt: skip
    """What the model gives for each row's new tokens of each call, of sequences that end with them: which of
    equal values it chooses (`topk`) may follow from how many there are. (Of a few more tokens, where the
    captured graph is not for so many.)"""
    found, total, rows = list[Tensor](), full[step.name].shape[1], 1 if step.sizes.single else len(steps[0])
    for row in range(len(steps[0])):
        parts, length = list[Tensor](), 0
        for counts in steps:
            before, length = length, length + counts[row]
            of = next(
                (n for n in range(length, total) if not step.sizes.fault(Call(rows, frozenset([n])))), total
            )
            cut = {**full, **{n: full[n][:, :of].contiguous() for n in step.arguments}}
            parts.append(of_whole(cut)[row, before:length])
        found.append(torch.cat(parts))
    return torch.stack(found)


def varied(whole: ProgramGraph, step: Step, tokens: Tensor, place: int, attempt: int = 0) -> Tensor:
    """The tokens to prove with: those of the prompt. If these are hardly different ones (all values that an
    attention weighs are equal then, whatever its weights), others of the vocabulary, from its middle because
    special tokens are at its ends; and where data may choose what is seen, as many as are compared, each of
    them once, so that none is chosen by the rounding of equal scores. `place` is the number of the tokens
    among the tensors of the call."""
    ids = next(n for n, i in whole.given().items() if i.kind == "argument" and int(i.name) == place)
    same = list(reached([ids], lambda node: (u for u in node.users if u.target in _SAME_IDS)))
    tables = (u for node in same for u in node.users if u.target is aten.embedding.default)
    limit = min((int(t.args[0].meta["val"].shape[0]) for t in tables if t.args[1] in same), default=0)  # type: ignore[union-attr]
    if tokens.is_floating_point() or limit < DIFFERENT:
        return tokens
    generator = torch.Generator().manual_seed(attempt)
    rows, given = tokens.shape[:2]
    if step.plan.anew and len(step.arguments) == 1:
        given = max(given, sum(count for count, _ in _steps(step, given, rows)))
        if given <= limit:
            drawn = [torch.randperm(limit, generator=generator)[:given] for _ in range(rows)]
            return torch.stack(drawn).to(tokens.device, tokens.dtype)
    if not attempt and len(set(tokens.flatten().tolist())) >= DIFFERENT:
        return tokens
    found = torch.randint(limit // 4, limit - limit // 4, tokens.shape, generator=generator)
    return found.to(tokens.device, tokens.dtype)


def _sample(step: Step, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[tuple[int, ...], ...]]:
    """Arguments as long as the calls to compare together, made of the given tokens, and these calls."""
    rows, given = arguments[step.name].shape[:2]
    steps = tuple((first, *[second] * (rows - 1)) for first, second in _steps(step, given, rows))
    places = torch.arange(sum(counts[0] for counts in steps)) % given
    generator = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(given, generator=generator)[places] for _ in range(rows)])
    full = dict(arguments)
    for n in step.arguments:  # their entries for every token, permuted and repeated to the full length
        full[n] = torch.stack([row[picked] for row, picked in zip(arguments[n], order, strict=True)])
    return full, steps


def _steps(step: Step, given: int, rows: int) -> tuple[tuple[int, int], ...]:
    """The calls to compare; as many tokens as were traced, where the graph is for no others."""
    blocks = 3 * max((s.size for s in step.plan.stores), default=1)
    more = max(blocks, step.plan.least)
    steps = ((more + 1, more), *STEPS, (0, 1)) if step.plan.anew else STEPS
    total = sum(count for count, _ in steps)
    call = Call(1 if step.sizes.single else rows, frozenset([total]))
    if not step.plan.length.isdecimal() and not step.sizes.fault(call):
        return steps
    if given > total:
        return (*STEPS, (given - total, given - total))
    half = given // 2
    return tuple(c for c in ((half, 1), (1, 0), (given - half - 1, given - 1)) if any(c))


def prove_longer(model: Callable[..., Any], step: Step, arguments: Mapping[str, Any], result: int) -> None:
    """Compare with the model itself on sequences that are longer than those it was traced for."""
    others = [n for n, value in arguments.items() if n != step.name and isinstance(value, Tensor)]
    if others:
        raise NoDecoderError(
            f"the model was traced for few numbers of tokens, and others cannot be tried, because it takes "
            f"{', '.join(others)} as well."
        )
    given, longer = arguments[step.name], LONGER
    if step.limit is not None:
        most = max(1, step.limit - sum(counts[0] for counts in LONGER[1:]))
        longer = ((min(LONGER[0][0], most), min(LONGER[0][1], most)), *LONGER[1:])
    total = max(sum(counts) for counts in zip(*longer, strict=True))
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(0, given.shape[1], (len(LONGER[0]), total), generator=generator)
    ids = torch.stack([row[picked] for row, picked in zip(given, places, strict=True)])
    state = KVCache(step.plan, len(ids), CacheConfig(), given.device)
    full, unfinished = dict.fromkeys(step.arguments, ids), range(len(ids))
    news = ((counts, _next(step, state, full, counts)) for counts in longer)
    try:
        with torch.no_grad():
            results = ((c, step.advance(state, c, new, unfinished=unfinished)[0]) for c, new in news)
            for row, found in zip(ids, _by_row(results), strict=True):
                for length in (*range(1, min(BEGINNINGS, len(found))), len(found)):
                    call = {**arguments, step.name: row[None, :length]}
                    _require_as_model(model, step, call, found[:length], result)
    except NoDecoderError:
        raise
    except Exception as problem:
        raise NoDecoderError(of_few(problem)) from problem


def prove_other_lengths(
    model: Callable[..., Any], step: Step, arguments: Mapping[str, Any], result: int
) -> int:
    """From how many tokens on the decoder gives what the model itself gives for numbers of tokens that the
    graph's conditions leave out, with which the model may do something else: fewer than its operations on
    blocks need, and some between. Compared is one of each length among the first, and at the ends of what was
    asked for sizes. If all are alike that the model takes, the step takes such rows; 0 if not."""
    given, sizes = arguments[step.name], step.sizes
    most = step.plan.least + 2 * max((s.size for s in step.plan.stores), default=1)
    if any(isinstance(v, Tensor) for n, v in arguments.items() if n not in step.arguments):
        return 0
    rows = 1 if sizes.single else 2
    left_out = [n for n in range(1, most + 1) if sizes.fault(Call(rows, frozenset([n])))]
    lengths = [n for n in left_out if n < BEGINNINGS or sizes.is_border(n)]
    places = torch.randint(0, given.shape[1], (most,), generator=torch.Generator().manual_seed(0))
    full = {n: arguments[n][:1, places].expand(rows, -1, *arguments[n].shape[2:]) for n in step.arguments}
    state = KVCache(step.plan, rows, CacheConfig(), given.device)
    least = 1
    sizes.take_others(step.plan.least, 1)
    try:
        with torch.no_grad(), InOrder():  # type: ignore[no-untyped-call]
            step.begin(state, {n: arguments[n] for n in step.prompt_arguments})
            counts = [[1] * rows] * 2 + [[most - 2] * rows]
            found = _by_row((c, step.advance(state, c, _next(step, state, full, c))[0]) for c in counts)[0]
            for length in lengths:
                call = {**arguments, **{n: t[:1, :length] for n, t in full.items()}}
                try:
                    _require_as_model(model, step, call, found[:length], result)
                except NoDecoderError:
                    raise
                except FAILURES:  # the model itself takes no sequences that are so short
                    if least < length:
                        raise
                    least = length + 1
    except (NoDecoderError, *FAILURES):
        least = 0
    sizes.take_others(step.plan.least if least else 0, least)
    return least


def prove_alone(
    model: Callable[..., Any], examples: Sequence[Mapping[str, Any]], name: str, result: int
) -> None:
    """Compare what the model gives for batches with what it gives for each of their sequences."""
    with torch.no_grad():
        for given in examples:
            _require_rows_alone(lambda call: tensors_of(model(**put_together(call)))[result], given, [name])


def _require_rows_alone(
    of_whole: Callable[[Mapping[str, Any]], Tensor], call: Mapping[str, Any], names: Collection[str]
) -> None:
    """That a batch gives what each of its sequences gives, whose arguments are `names`."""
    whole = of_whole(call)
    parts = zip(*(call[name].split(1) for name in names), strict=True)
    rows = [of_whole({**call, **dict(zip(names, part, strict=True))}) for part in parts]
    difference = compare(torch.cat(rows), whole, Rule(ROUNDING.get(whole.dtype.itemsize, 0.1)))
    if not difference.holds:
        raise NoDecoderError(
            f"a batch of {len(rows)} sequences gives something else than each of them ({difference})."
        )


def of_few(problem: Exception) -> str:
    """That a graph which was traced for few numbers of tokens fails for others."""
    what = str(problem).partition("\n")[0]
    return f"the model was traced for few numbers of tokens, and others fail: {what}."


def _require_as_model(
    model: Callable[..., Any], step: Step, arguments: dict[str, Any], found: Tensor, result: int
) -> None:
    """Compare the logits of one sequence with the model's own, where the graph is for its length."""
    tokens, length = arguments[step.name], len(found)
    rows = next((n for n in (1, 2) if not step.sizes.fault(Call(n, frozenset([length])))), 0)
    if not rows:
        return
    call = {**arguments, step.name: tokens.expand(rows, *tokens.shape[1:])}
    wanted = tensors_of(model(**put_together(call)))[result][0]
    if wanted.ndim == found.ndim and len(wanted) == length + step.plan.begins:
        wanted = wanted[step.plan.begins :]  # those of learned places, too
    if wanted.shape != found.shape:  # one result for a sequence
        found = found[-1].reshape(wanted.shape)
    difference = compare(found, wanted, Rule(ROUNDING.get(wanted.dtype.itemsize, 0.1)))
    if not difference.holds:
        raise NoDecoderError(
            f"the model was traced for few numbers of tokens, and for {length} it gives something else "
            f"({difference})."
        )


def _by_row(results: Iterable[tuple[Sequence[int], Tensor]]) -> list[Tensor]:
    """The results of each row, `[tokens, ...]`, from calls that had so many tokens of each."""
    parts = [torch.split(found, list(counts)) for counts, found in results]
    return [torch.cat(row) for row in zip(*parts, strict=True)]


def _empty_state(step: Step, full: Mapping[str, Any], steps: Sequence[Sequence[int]]) -> KVCache:
    """A state for the calls to compare, that keeps floating values in float64."""
    config = CacheConfig(dtype=torch.float64, layout="paged", page=3)
    state = KVCache(step.plan, len(steps[0]), config, full[step.name].device)
    step.begin(state, {n: full[n] for n in step.prompt_arguments}, step.ranks.exact)
    return state


def _advanced(step: Step, state: KVCache, full: Mapping[str, Any], counts: Sequence[int]) -> Tensor:
    """The results of the next tokens, so many of each row, in float64."""
    state.reserve(counts)
    poison(state)
    return step.advance(state, counts, _next(step, state, full, counts), run=step.ranks.exact)[0]


def _next(step: Step, state: KVCache, full: Mapping[str, Any], counts: Sequence[int]) -> dict[str, Tensor]:
    """The arguments of the next tokens, so many of each row."""
    places = list(zip(state.lengths, counts, strict=True))
    parts = {n: [full[n][r, at : at + count] for r, (at, count) in enumerate(places)] for n in step.arguments}
    return {n: torch.cat(each).unsqueeze(0) for n, each in parts.items()}


def poison(state: KVCache) -> None:
    """Fill cache memory that holds no token of any row with NaN. In a ring buffer, a removed token may have
    overwritten an older one; that slot then holds neither."""
    smallest = min((group.reach for group in state.groups.values() if group.ring), default=0)
    for group in state.groups.values():
        kept = []
        for length, lost in zip(state.lengths, state.now.lost, strict=True):
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


def prove_storage(wide: Step, step: Step, proved: Proved) -> Drift:
    """Compare `step`, which rounds, with `wide`, which does not and is proved: also each rounded value with
    what was computed. Returns how far its logits are from those."""
    full, steps = _sample(wide, proved.arguments)
    rounded, other = (_empty_state(one, full, steps) for one in (step, wide))

    def results() -> Iterator[tuple[Sequence[int], Tensor]]:
        for counts in steps:
            found = _advanced(step, rounded, full, counts)
            difference = compare(found, _advanced(wide, other, full, counts), Rule(TOLERANCE))
            if not difference.holds:
                raise NoDecoderError(
                    "a cache of 8 bits is not read as it is written: the logits are not those of the same "
                    f"values without scales ({difference}; places are [token, logit]). Please report it."
                )
            _read_rounded(step, rounded, other)
            yield counts, found

    with torch.no_grad():
        return drift_between(torch.stack(_by_row(results())), proved.logits)


def _read_rounded(step: Step, rounded: KVCache, wide: KVCache) -> None:
    """Give the wide state what is read of the rounded one, if that is near enough to what it had."""
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


def drift_between(found: Tensor, wanted: Tensor) -> Drift:
    """How far logits, `[..., V]`, are from those wanted, as distributions over the vocabulary."""
    ours, theirs = (t.detach().flatten(0, -2).double().log_softmax(-1) for t in (found, wanted))
    divergence = (theirs.exp() * (theirs - ours)).nansum(-1).clamp(min=0)  # 0 * (inf - inf) is 0
    same = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    return Drift(len(ours), float(divergence.mean()), float(divergence.max()), same)
