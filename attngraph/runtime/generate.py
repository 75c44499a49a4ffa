"""The loop around a decoder's step that picks one token after another, and what may stand in for the step.

Everything here takes the logits of the prompts' last tokens and a function that processes new tokens, and
gives new tokens alone: the plain loop, greedy or sampling, and beam search.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attngraph.runtime.generation_options import Options, stops
from attngraph.runtime.kv_cache import KVCache
from attngraph.runtime.sampling import choose, generator_of

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
        chosen = lead(_choose(logits, rows, running, options, generator))
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
    answer: list[bool] = stops(options, last, lambda: torch.cat([prompts.to(found), found], 1)).tolist()
    return answer


def _choose(
    logits: Tensor, rows: int, running: Sequence[int], options: Options, generator: torch.Generator
) -> Tensor:
    if options.temperature == 0:
        return logits.argmax(-1)
    # Every row draws a number, even if it has ended, so a row's tokens do not depend on when others end.
    drawn = torch.rand(rows, generator=generator, dtype=torch.float64).tolist()
    return choose(logits, [options] * len(running), [drawn[row] for row in running])


Anew = Callable[[list[Tensor]], Tensor]
"""Takes all tokens of each row, `[T]` (none for rows that have ended); returns the logits of the last tokens
of those that have some."""


def crossing(
    advance: Advance, is_right: Callable[[list[int]], bool], anew: Anew, rows: Sequence[Tensor]
) -> Advance:
    """`advance` where its graph is right for so many new tokens of each row, and else all rows anew.

    Args:
        rows: the tokens of each row so far, `[T]`.
    """
    tokens_of = list(rows)

    def run(tokens: Tensor, counts: list[int]) -> Tensor:
        given = iter(torch.split(tokens, [n for n in counts if n]))
        for row, count in enumerate(counts):
            new = next(given) if count else tokens[:0]
            tokens_of[row] = torch.cat([tokens_of[row], new]) if count else new
        return advance(tokens, counts) if is_right(counts) else anew(tokens_of)

    return run


Restart = Callable[[list[Tensor]], Tensor]
"""Takes prompts, `[T]` each; returns the logits of their last tokens, `[prompts, V]`."""


def rolling(
    advance: Advance, restart: Restart, state: KVCache, rows: Sequence[Tensor], limit: int
) -> Advance:
    """`advance` for rows that have room, and a restart from the last `limit` tokens for those that are full.

    Args:
        rows: the tokens of each row so far, `[T]`.
    """
    tokens_of = list(rows)

    def run(tokens: Tensor, counts: list[int]) -> Tensor:
        given = [row for row, count in enumerate(counts) if count]
        for row, token in zip(given, tokens, strict=True):
            tokens_of[row] = torch.cat([tokens_of[row], token.reshape(1)])[-limit:]
        full = [row for row in given if state.lengths[row] >= limit]
        open_rows = [row for row in given if row not in full]
        parts: dict[int, Tensor] = {}
        if open_rows:
            one = [int(row in open_rows) for row in range(len(counts))]
            kept = torch.tensor([row in open_rows for row in given], device=tokens.device)
            parts |= zip(open_rows, advance(tokens[kept], one), strict=True)
        if full:
            parts |= zip(full, restart([tokens_of[row] for row in full]), strict=True)
        return torch.stack([parts[row] for row in given])

    return run


def search(
    logits: Tensor, advance: Advance, state: KVCache, options: Options, lead: Lead = lambda own: own
) -> Tensor:
    """The new tokens, int64 `[B, new]`, of the best beam of each row.

    Args:
        logits: `[B, V]`, of the prompts' last tokens.
    """
    rows = logits.shape[0]
    beams = [[_Beam(row, [], 0.0)] for row in range(rows)]
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(rows)]
    for place in range(options.max_new_tokens):
        scores = without_ends(logits.double().log_softmax(-1), place, options)
        sources: list[int] = []
        tokens: list[int] = []
        offset = 0
        for row in range(rows):
            here = scores[offset : offset + len(beams[row])]
            offset += len(beams[row])
            if not beams[row]:
                continue
            beams[row] = _continue(beams[row], here, finished[row], options, lead)
            if _is_done(beams[row], finished[row], place + 1, options):
                beams[row] = []
            sources += [b.source for b in beams[row]]
            tokens += [b.tokens[-1] for b in beams[row]]
        if not sources or place + 1 == options.max_new_tokens:
            break
        state.reorder(sources)
        number = 0
        for row in range(rows):
            for beam in beams[row]:
                beam.source = number
                number += 1
        logits = advance(torch.tensor(tokens, device=logits.device), [1] * len(tokens))
    return _best(beams, finished, options, logits.device)


def _is_done(
    beams: "list[_Beam]", finished: list[tuple[float, list[int]]], length: int, options: Options
) -> bool:
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
    beams: list[_Beam], scores: Tensor, finished: list[tuple[float, list[int]]], options: Options, lead: Lead
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
    beams: list[list[_Beam]], finished: list[list[tuple[float, list[int]]]], options: Options,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """The best continuation of each row, finished or not."""
    found: list[list[int]] = []
    for row, ended in zip(beams, finished, strict=True):
        penalty = options.length_penalty
        ranked = [*ended, *((b.score / len(b.tokens) ** penalty, b.tokens) for b in row if b.tokens)]
        found.append(max(ranked, key=lambda f: f[0])[1])
    longest = max(len(f) for f in found)
    padded = [f + [options.pad] * (longest - len(f)) for f in found]
    return torch.tensor(padded, dtype=torch.int64, device=device)
