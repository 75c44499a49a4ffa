"""The loop around a decoder's step that picks one token after another, and what may stand in for the step.

All of it takes the logits of the prompts' last tokens and a function that processes new tokens, and gives new
tokens alone: the plain loop, greedy or sampling, and beam search. Rows are sampled together, each with its
own options (requests have their own), in the order of transformers: temperature first, then top-k, then top-p
among the remaining tokens, then min-p.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.runtime.generation_options import Options
from attngraph.runtime.kv_cache import KVCache

Advance = Callable[[Tensor, list[int]], Tensor]
"""Takes new tokens, packed, and how many each row gets; returns their logits, packed."""
Lead = Callable[[Tensor], Tensor]
"""Takes what was decided here; returns what was decided for all ranks."""


def generate(
    logits: Tensor, advance: Advance, prompts: Tensor, options: Options, lead: Lead = lambda own: own
) -> Tensor:
    """The new tokens, int64 `[B, new]`; rows that ended get no more tokens.

    Args:
        logits: `[B, V]`, of the prompts' last tokens. prompts: as given, for stopping criteria and streamers.
    """
    rows = logits.shape[0]
    generator = generator_of(options)
    running = list(range(rows))
    asked = (options.streamer, options.on_token)
    may_stop = bool(options.ends or options.criteria) or asked != (None, None)
    found = torch.full((rows, options.max_new_tokens), options.pad, dtype=torch.int64, device=logits.device)
    if options.streamer is not None:
        options.streamer.put(prompts.cpu())
    for place in range(options.max_new_tokens):
        logits = without_ends(logits, place, options)
        if options.temperature == 0:
            chosen = lead(logits.argmax(-1))
        else:  # Also rows that have ended draw numbers: a row's tokens do not depend on when others end.
            drawn = torch.rand(rows, generator=generator, dtype=torch.float64).tolist()
            chosen = lead(choose(logits, [options] * len(running), [drawn[row] for row in running]))
        if len(running) == rows:
            found[:, place] = chosen
        else:
            found[running, place] = chosen
        if may_stop:
            stop = lead(torch.tensor(_told(found[:, : place + 1], prompts, options))).tolist()
            kept = [n for n, row in enumerate(running) if not stop[row]]
            if len(kept) < len(running):
                running, chosen = [running[n] for n in kept], chosen[kept]
        if not running or place + 1 == options.max_new_tokens:
            found = found[:, : place + 1]
            break
        counts = [0] * rows
        for row in running:
            counts[row] = 1
        logits = advance(chosen, counts)
    if options.streamer is not None:
        options.streamer.end()
    return found


def without_ends(scores: Tensor, place: int, options: Options) -> Tensor:
    """The scores, where end tokens have none as long as too few tokens are there."""
    if place >= options.min_new_tokens or not options.ends:
        return scores
    return scores.index_fill(-1, torch.tensor(options.ends, device=scores.device), -torch.inf)


def _told(found: Tensor, prompts: Tensor, options: Options) -> list[bool]:
    """Which rows stop after the last of the tokens found; tells the streamer and the caller's function."""
    last = found[:, -1]
    if options.streamer is not None:
        options.streamer.put(last.cpu())
    if options.on_token is not None and options.on_token(last.clone()) is True:
        return [True] * len(last)
    stop = torch.isin(last, torch.tensor(options.ends, dtype=torch.int64, device=last.device))
    whole = torch.cat([prompts.to(found), found], 1) if options.criteria else found
    for criterion in options.criteria:
        stop = stop | torch.as_tensor(criterion(whole, None), device=last.device).bool()
    return stop.tolist()  # type: ignore[no-any-return]


Anew = Callable[[list[Tensor]], Tensor]
"""Takes all tokens of each row, `[T]` (none for rows that are not asked for); returns the logits of the last
tokens of those that have some."""


def renewing(
    advance: Advance, goes_on: Callable[[list[int]], list[int]], anew: Anew, rows: Sequence[Tensor]
) -> Advance:
    """`advance` for those of some rows that go on from what is kept of them; the others are computed anew.

    Args:
        goes_on: tells which of these rows do. rows: the tokens of each row so far, `[T]`.
    """
    tokens_of = list(rows)

    def run(tokens: Tensor, counts: list[int]) -> Tensor:
        given = [row for row, count in enumerate(counts) if count]
        for row, token in zip(given, torch.split(tokens, 1), strict=True):
            tokens_of[row] = torch.cat([tokens_of[row], token])
        kept = goes_on(given)
        if kept == given:
            return advance(tokens, counts)
        again = [row for row in given if row not in kept]
        found = anew([whole if row in again else whole[:0] for row, whole in enumerate(tokens_of)])
        parts = dict(zip(again, found, strict=True))
        if kept:
            one = [int(row in kept) for row in range(len(counts))]
            picked = torch.tensor([row in kept for row in given], device=tokens.device)
            parts |= zip(kept, advance(tokens[picked], one), strict=True)
        return torch.stack([parts[row] for row in given])

    return run


Finished = list[tuple[float, list[int]]]
"""The continuations of a row that have ended: how good they are, and their tokens."""


def search(
    logits: Tensor, advance: Advance, state: KVCache, options: Options, lead: Lead = lambda own: own
) -> Tensor:
    """The new tokens, int64 `[B, new]`, of the best beam of each row.

    Args:
        logits: `[B, V]`, of the prompts' last tokens.
    """
    beams = [[_Beam(row, [], 0.0)] for row in range(logits.shape[0])]
    finished: list[Finished] = [[] for _ in beams]
    for place in range(options.max_new_tokens):
        scores = without_ends(logits.double().log_softmax(-1), place, options)
        for row, here in enumerate(torch.split(scores, [len(row) for row in beams])):
            if beams[row]:
                beams[row] = _continue(beams[row], here, finished[row], options, lead)
                if _is_done(beams[row], finished[row], place + 1, options):
                    beams[row] = []
        running = [beam for row in beams for beam in row]
        if not running or place + 1 == options.max_new_tokens:
            break
        state.reorder([beam.source for beam in running])
        for number, beam in enumerate(running):
            beam.source = number
        tokens = torch.tensor([beam.tokens[-1] for beam in running], device=logits.device)
        logits = advance(tokens, [1] * len(running))
    return _best(beams, finished, options, logits.device)


def _is_done(beams: "list[_Beam]", finished: Finished, length: int, options: Options) -> bool:
    """Whether no running beam can be better than the finished ones, or enough are finished for the caller."""
    if len(finished) < options.num_beams:
        return False
    if options.early_stopping is True or not beams:
        return True
    if options.early_stopping == "never" and options.length_penalty > 0:
        length = options.max_new_tokens
    worst = sorted(finished, key=lambda f: -f[0])[options.num_beams - 1][0]
    return bool(worst >= beams[0].score / length**options.length_penalty)


@dataclasses.dataclass
class _Beam:
    """A continuation: its row in the state, its tokens, and the sum of their log-probabilities."""

    source: int
    tokens: list[int]
    score: float


def _continue(
    beams: list[_Beam], scores: Tensor, finished: Finished, options: Options, lead: Lead
) -> list[_Beam]:
    """The best unfinished continuations; finished ones are appended to `finished`."""
    width, vocabulary = options.num_beams, scores.shape[1]
    total = scores + torch.tensor([[b.score] for b in beams], dtype=scores.dtype, device=scores.device)
    count = min(width * (1 + len(options.ends)), total.numel())
    values, places = map(lead, total.flatten().topk(count))
    kept: list[_Beam] = []
    for rank, (value, place) in enumerate(zip(values.tolist(), places.tolist(), strict=True)):
        source, token = beams[place // vocabulary], place % vocabulary
        tokens = [*source.tokens, token]
        if token in options.ends:
            if rank < width:
                finished.append((value / len(tokens) ** options.length_penalty, tokens))
        elif len(kept) < width:
            kept.append(_Beam(source.source, tokens, value))
    return kept


def _best(
    beams: list[list[_Beam]], finished: list[Finished], options: Options, device: torch.device
) -> Tensor:
    """The best continuation of each row, finished or not."""
    found: list[list[int]] = []
    for row, ended in zip(beams, finished, strict=True):
        penalty = options.length_penalty
        ranked = [*ended, *((b.score / len(b.tokens) ** penalty, b.tokens) for b in row if b.tokens)]
        found.append(max(ranked, key=lambda f: f[0])[1])
    longest = max(len(f) for f in found)
    padded = [f + [options.pad] * (longest - len(f)) for f in found]
    return torch.tensor(padded, dtype=torch.int64, device=device)


def choose(logits: Tensor, options: Sequence[Options], drawn: Sequence[float]) -> Tensor:
    """One token for each row of the logits `[R, V]`, by its options and a random number in [0, 1)."""
    if all(o.temperature == 0 for o in options):
        return logits.argmax(-1)

    def each(values: Sequence[Any], unlimited: Any) -> Tensor | None:
        limited = any(v is not None for v in values)
        given = [unlimited if v is None else v for v in values]
        return torch.tensor(given, device=logits.device) if limited else None

    temperature = torch.tensor([o.temperature for o in options], device=logits.device)
    top_k, top_p = each([o.top_k for o in options], 0), each([o.top_p for o in options], 1.0)
    uniform = torch.tensor(drawn, dtype=torch.float64, device=logits.device)
    return sample(logits, temperature, top_k, top_p, uniform, options[0].min_p)


def generator_of(options: Options) -> torch.Generator:
    """Draws the random numbers of a row, or of rows that have them together."""
    generator = torch.Generator()
    if options.seed is None:
        generator.seed()
    else:
        generator.manual_seed(options.seed)
    return generator


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None,
    uniform: Tensor, min_p: float | None = None,
) -> Tensor:  # fmt: skip
    """One token for each row.

    Args:
        logits: `[R, V]`.
        temperature: `[R]`; 0 takes the most likely token.
        top_k: int64 `[R]`, 0 for no limit; None: no limit for any row. top_p: `[R]`, 1 for no limit; or None.
        uniform: `[R]` numbers in [0, 1), by which the token is drawn.
        min_p: leaves out tokens whose probability is below min_p times the largest.

    Returns:
        int64 `[R]`.
    """
    count = logits.shape[-1]
    for most in (min(LIKELY, count), count):
        weights, order, total = kept_weights(logits, temperature, top_k, top_p, min_p, most)
        sums = weights.cumsum(-1)
        drawn = uniform.double() * torch.where(temperature > 0, total, 0.0)
        if most == count or bool((drawn < sums[:, -1]).all()):
            break
    place = torch.searchsorted(sums, drawn.unsqueeze(1), right=True).clamp_max(most - 1)
    rank = torch.arange(most, device=weights.device)
    last = (weights > 0).long().mul(rank).amax(-1, keepdim=True)  # so that rounding picks no excluded token
    sampled = order.gather(1, torch.minimum(place, last)).squeeze(1)
    return torch.where(temperature > 0, sampled, logits.argmax(-1))


LIKELY = 1024
"""How many of the likeliest tokens are looked at first: the token that is drawn is nearly always one of them,
and to sort all of them takes a good part of a token's time."""


def kept_weights(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None,
    min_p: float | None = None, most: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The probabilities of the `most` likeliest tokens (None: of all), `[R, most]`, from the largest down,
    zero for those left out; which token each belongs to; and the sum for all tokens that are not left out,
    `[R]`, NaN where it needs more tokens."""
    count = logits.shape[-1]
    most = count if most is None else most
    scaled = logits.double() / torch.where(temperature > 0, temperature, 1.0).double().unsqueeze(1)
    values, order = _largest(scaled, most)
    rank = torch.arange(most, device=values.device)
    weights = (values - scaled.logsumexp(-1, keepdim=True)).exp()
    of_all = torch.ones_like(weights[:, 0])  # the sum over tokens here and elsewhere, NaN if it is not known
    if top_k is not None:
        limit = torch.where(top_k > 0, top_k, count).unsqueeze(1)
        weights = weights.masked_fill(rank >= limit, 0.0)
        known = torch.where(limit[:, 0] <= most, weights.sum(-1), math.nan)
        of_all = torch.where(limit[:, 0] < count, known, of_all)
    ends = weights[:, -1] == 0 if most < count else torch.ones_like(weights[:, 0], dtype=torch.bool)
    if top_p is not None:
        part = top_p.double().unsqueeze(1) * of_all.unsqueeze(1)
        before = weights.cumsum(-1) - weights
        left_out = (before >= part) & (rank > 0) & (top_p < 1).unsqueeze(1)
        weights = weights.masked_fill(left_out, 0.0)
        ends, of_all = _cut(weights, left_out, ends, of_all, top_p < 1)
    if min_p is not None:
        left_out = weights < min_p * weights[:, :1]
        weights = weights.masked_fill(left_out, 0.0)
        ends, of_all = _cut(weights, left_out, ends, of_all, torch.ones_like(ends))
    return weights, order, of_all


def _cut(
    weights: Tensor, left_out: Tensor, ends: Tensor, of_all: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Whether all tokens that are not left out are here, and their sum, after `rows` have left out some."""
    ends = ends | (left_out[:, -1] & rows)
    return ends, torch.where(rows, torch.where(ends, weights.sum(-1), math.nan), of_all)


def _largest(values: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """So many of the values of each row from the largest down, equal ones in order, and their places."""
    if most < values.shape[-1]:
        found, order = values.topk(most + 1)
        if not bool((found[:, -2] == found[:, -1]).any()):  # else it is not known which of them is next
            order = order[:, :most].sort(dim=-1).values
            found, places = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
            return found, order.gather(1, places)
    found, order = torch.sort(values, dim=-1, descending=True, stable=True)
    return found[:, :most], order[:, :most]
