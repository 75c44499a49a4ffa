"""Beam search: the likeliest continuations of each row, several at a time."""

import dataclasses

import torch
from torch import Tensor

from attngraph.runtime.generate import Advance, Lead
from attngraph.runtime.generation_options import Options, without_ends
from attngraph.runtime.kv_cache import KVCache

Finished = list[tuple[float, list[int]]]
"""The continuations of a row that have ended: how good they are, and their tokens."""


def search(
    logits: Tensor, advance: Advance, state: KVCache, prompts: Tensor, options: Options, lead: Lead
) -> Tensor:
    """The new tokens of the best beams of each row, int64 `[B * options.samples, new]`.

    Args:
        logits: `[B, V]`, of the prompts' last tokens. prompts: as given, `[B, T]`, for processors.
    """
    beams = [[_Beam(row, [], 0.0)] for row in range(logits.shape[0])]
    finished: list[Finished] = [[] for _ in beams]
    for place in range(options.max_new_tokens):
        scores = logits.double().log_softmax(-1)
        scores = without_ends(scores, [place] * len(scores), options)
        if options.processors:
            own = [(prompts[row], beam.tokens) for row, of_row in enumerate(beams) for beam in of_row]
            whole = torch.stack([torch.cat([prompt, prompt.new_tensor(new)]) for prompt, new in own])
            scores = options.processed(whole, scores)
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
    """The best continuations of each row, finished or not."""
    found: list[list[int]] = []
    for row, ended in zip(beams, finished, strict=True):
        penalty = options.length_penalty
        ranked = [*ended, *((b.score / len(b.tokens) ** penalty, b.tokens) for b in row if b.tokens)]
        found += [tokens for _, tokens in sorted(ranked, key=lambda f: -f[0])[: options.samples]]
    longest = max(len(f) for f in found)
    padded = [f + [options.pad] * (longest - len(f)) for f in found]
    return torch.tensor(padded, dtype=torch.int64, device=device)
