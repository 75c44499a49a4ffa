"""Drafts: guesses at a row's next tokens, which a decoder then computes together (speculative decoding).

A guess that is wrong costs its part of a step and changes no token (`generate.py`). A draft is a decoder of a
smaller model, the prompt itself ("lookup"), or a function of the tokens so far.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.runtime.calls import Calls
from attngraph.runtime.generate import Propose
from attngraph.runtime.packing import Packed, equal_tokens

LONGEST = 3
"""How many of the latest tokens are looked for in the text before, at first; then fewer."""


def propose_by(draft: Any, most: int, prompts: Sequence[Tensor]) -> Propose | None:
    """What proposes tokens, at most so many at a time; None without a draft. `prompts`: of each row, `[T]`.

    Raises:
        TypeError: a draft is nothing that can propose tokens.
    """
    if draft is None:
        return None
    guess: Callable[[Tensor], Sequence[int]]
    if draft == "lookup":
        guess = functools.partial(looked_up, most=most)
    elif isinstance(calls := getattr(draft, "calls", None), Calls):
        return _OfDecoder(calls, most, prompts)
    elif callable(draft) and not isinstance(draft, nn.Module):
        guess = draft
    else:
        raise TypeError(
            'draft is "lookup", a decoder (attngraph.compile(model, cache=True)), or a function from tokens '
            f"[T] to the ids that may follow; found {type(draft).__name__}."
        )
    return lambda rows, news: [
        [*map(int, guess(torch.cat([prompts[row], new])))][:most] for row, new in zip(rows, news, strict=True)
    ]


def looked_up(tokens: Tensor, most: int) -> list[int]:
    """What followed the last time that the latest tokens stood in the text before (Saxena, "Prompt lookup
    decoding", 2023); after the end of the text what followed is taken to repeat. `tokens`: `[T]`."""
    for length in range(min(LONGEST, len(tokens) - 1), 0, -1):
        same = (tokens[:-1].unfold(0, length, 1) == tokens[-length:]).all(1).nonzero()
        if len(same):
            followed = tokens[int(same[-1]) + length :].tolist()
            return list(itertools.islice(itertools.cycle(followed), most))
    return []


class _OfDecoder:
    """The likeliest tokens by another decoder, which keeps a state of its own."""

    def __init__(self, calls: Calls, most: int, prompts: Sequence[Tensor]) -> None:
        self.calls, self.most, self.prompts = calls, most, prompts
        own = calls.config
        # Each token is a call, back to which a row can go, whatever is kept of it.
        own = dataclasses.replace(
            own, rollback=max(own.rollback, most + 1), snapshots=max(own.snapshots, most + 2)
        )
        packed = calls.pack(list(prompts), None)
        self.state = calls.new_state(packed, len(prompts), own)
        self.known = [row[:0] for row in prompts]
        """The tokens that the state has, of each row."""

    def __call__(self, rows: list[int], news: list[Tensor]) -> list[list[int]]:
        wanted = list(self.known)  # rows that have ended are left as they are
        for row, new in zip(rows, news, strict=True):
            wanted[row] = torch.cat([self.prompts[row], new])
        kept = [equal_tokens(known, own) for known, own in zip(self.known, wanted, strict=True)]
        kept = [min(n, len(wanted[row]) - 1) if row in rows else n for row, n in enumerate(kept)]
        self.state.crop(kept)
        self.known = wanted
        given = [own[n:] for own, n in zip(wanted, kept, strict=True)]
        found: list[list[int]] = [[] for _ in rows]
        limit = self.state.limit
        room = self.most if limit is None else limit - max(len(wanted[row]) for row in rows) + 1
        for _ in range(min(self.most, room)):
            chosen = self._likeliest(given)
            for place, (row, token) in enumerate(zip(rows, torch.split(chosen, 1), strict=True)):
                given[row] = token
                found[place].append(int(token))
        return found

    def _likeliest(self, given: list[Tensor]) -> Tensor:
        """The likeliest tokens after some new ones, of the rows that have such."""
        packed, step = (
            Packed(torch.cat(given).unsqueeze(0), [*map(len, given)]),
            self.calls.step_of(self.state),
        )
        with self.state.changing():
            found = step.advance(self.state, packed.counts, {step.name: packed.ids}, packed.last())
        return found[0].argmax(-1)
