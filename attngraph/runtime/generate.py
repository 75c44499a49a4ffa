"""The loop around a decoder's step that picks one token after another, greedily or by sampling.

Takes the logits of the prompts' last tokens and a function that processes new tokens; returns only the new
tokens. Beam search is `beams.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attngraph.runtime.generation_options import Options, stops
from attngraph.runtime.sampling import sample

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
    generator = _generator(options)
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


def _generator(options: Options) -> torch.Generator | None:
    if options.temperature == 0:
        return None
    generator = torch.Generator()
    if options.seed is not None:
        generator.manual_seed(options.seed)
    else:
        generator.seed()
    return generator


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
    logits: Tensor, rows: int, running: Sequence[int], options: Options, generator: torch.Generator | None
) -> Tensor:
    if generator is None:
        return logits.argmax(-1)
    count, device = logits.shape[0], logits.device
    # Every row draws a number, even if it has ended, so a row's tokens do not depend on when others end.
    uniform = torch.rand(rows, generator=generator, dtype=torch.float64)[list(running)].to(device)
    temperature = torch.full((count,), options.temperature, device=device)
    top_k = None if options.top_k is None else torch.full((count,), options.top_k, device=device)
    top_p = None if options.top_p is None else torch.full((count,), options.top_p, device=device)
    return sample(logits, temperature, top_k, top_p, uniform, options.min_p)
