"""Beam search: of all continuations of a row's beams the best are kept, as in transformers.

Finished beams are ranked by the sum of log-probabilities / length ** penalty. A row is done when enough beams
have finished and no running one can beat them, judged at its present length (with early_stopping="never" at
the length at which it would be best); with early_stopping=True as soon as enough have finished.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from attngraph.runtime.generate import Advance, Lead, without_ends
from attngraph.runtime.generation_options import Options
from attngraph.runtime.kv_cache import KVCache


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
    beams: list[_Beam], finished: list[tuple[float, list[int]]], length: int, options: Options
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
