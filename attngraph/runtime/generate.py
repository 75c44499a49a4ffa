"""The generation loops around a decoder's step: one for sampling, one for beam search.

Both take the logits of the prompts' last tokens and a function that processes new tokens; both return only
the new tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attngraph.runtime.kv_cache import KVCache
from attngraph.runtime.sampling import sample

Advance = Callable[[Tensor, list[int]], Tensor]
"""Takes new tokens, packed, and how many each row gets; returns their logits, packed."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How to generate; see `Decoder.generate`."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    num_beams: int = 1
    ends: tuple[int, ...] = ()
    seed: int | None = None
    pad_token_id: int | None = None
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, found {self.max_new_tokens}.")
        if not self.temperature >= 0 or math.isinf(self.temperature):
            raise ValueError(f"temperature must be 0 or a positive number, found {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, found {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, found {self.top_p}.")
        if self.num_beams < 1:
            raise ValueError(f"num_beams must be at least 1, found {self.num_beams}.")
        if self.num_beams > 1 and self.temperature > 0:
            raise ValueError("num_beams above 1 goes with temperature=0 only: beams are not sampled.")

    @property
    def pad(self) -> int:
        return self.pad_token_id if self.pad_token_id is not None else self.ends[0] if self.ends else 0


def as_tokens(value: int | Sequence[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def generate(first: Tensor, advance: Advance, state: KVCache, options: Options) -> Tensor:
    """The new tokens, int64 `[B, new]`, given the logits `[B, V]` of the prompts' last tokens."""
    run = _beams if options.num_beams > 1 else _samples
    return run(first, advance, state, options)


def _samples(logits: Tensor, advance: Advance, state: KVCache, options: Options) -> Tensor:
    """Greedy search or sampling; rows that ended get no more tokens."""
    rows = logits.shape[0]
    generator = None
    if options.temperature > 0:
        generator = torch.Generator()
        if options.seed is not None:
            generator.manual_seed(options.seed)
        else:
            generator.seed()
    ends = torch.tensor(options.ends, dtype=torch.int64, device=logits.device)
    running = list(range(rows))
    found = torch.full((rows, options.max_new_tokens), options.pad, dtype=torch.int64, device=logits.device)
    for place in range(options.max_new_tokens):
        chosen = _choose(logits, rows, running, options, generator)
        if len(running) == rows:
            found[:, place] = chosen
        else:
            found[running, place] = chosen
        if options.ends:
            over = torch.isin(chosen, ends).tolist()
            if any(over):
                kept = [n for n, is_over in enumerate(over) if not is_over]
                running, chosen = [running[n] for n in kept], chosen[kept]
                if not running:
                    return found[:, : place + 1]
        if place + 1 < options.max_new_tokens:
            counts = [0] * rows
            for row in running:
                counts[row] = 1
            logits = advance(chosen, counts)
    return found


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
    return sample(logits, temperature, top_k, top_p, uniform)


def _beams(logits: Tensor, advance: Advance, state: KVCache, options: Options) -> Tensor:
    """Beam search: of all continuations of a row's beams the best are kept. Finished ones are ranked by the
    sum of log-probabilities / length ** penalty; a row is done when no running beam can beat them."""
    rows, width = logits.shape[0], options.num_beams
    beams = [[_Beam(row, [], 0.0)] for row in range(rows)]
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(rows)]
    done = [False] * rows
    for place in range(options.max_new_tokens):
        scores = logits.double().log_softmax(-1)
        sources: list[int] = []
        tokens: list[int] = []
        offset = 0
        for row in range(rows):
            here = scores[offset : offset + len(beams[row])]
            offset += len(beams[row])
            if not beams[row]:
                continue
            beams[row] = _continue(beams[row], here, finished[row], options)
            length = (place + 1) ** options.length_penalty
            best = beams[row][0].score / length if beams[row] else -math.inf
            if len(finished[row]) >= width:
                worst = sorted(finished[row], key=lambda f: -f[0])[width - 1][0]
                done[row] = done[row] or worst >= best
            if done[row]:
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


@dataclasses.dataclass
class _Beam:
    """A continuation: its row in the state, its tokens, and the sum of their log-probabilities."""

    source: int
    tokens: list[int]
    score: float


def _continue(
    beams: list[_Beam], scores: Tensor, finished: list[tuple[float, list[int]]], options: Options
) -> list[_Beam]:
    """The best unfinished continuations; finished ones are appended to `finished`."""
    width, vocabulary = options.num_beams, scores.shape[1]
    total = scores + torch.tensor([[b.score] for b in beams], dtype=scores.dtype, device=scores.device)
    count = min(width * (1 + len(options.ends)), total.numel())
    values, places = total.flatten().topk(count)
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
