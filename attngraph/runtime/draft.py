"""Drafts: guesses at a row's next tokens, which a decoder then computes together (speculative decoding).

A guess that is wrong costs its part of a step and changes no token (`generate.py`). A draft is a decoder of a
smaller model, the prompt itself ("lookup"), a function of the tokens so far, or heads of the model's own,
which are given what forward returns beside the logits (Cai et al., "Medusa", 2024; Li et al., "EAGLE", 2024).
"""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.runtime.calls import Calls
from attngraph.runtime.generate import Propose
from attngraph.runtime.packing import equal_tokens

_IN_ORDER = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
LONGEST = 3
"""How many of the latest tokens are looked for in the text before, at first; then fewer."""


def takes_beside(draft: Any) -> bool:
    """Whether a draft is a function or a module of two arguments: a row's tokens, and what the decoder gives
    beside the logits for the last of them that it has computed (`CacheConfig.beside`)."""
    if not callable(draft) or isinstance(getattr(draft, "calls", None), Calls):
        return False
    try:
        signature = inspect.signature(draft.forward if isinstance(draft, nn.Module) else draft)
    except ValueError:
        return False
    needed = [p for p in signature.parameters.values() if p.default is p.empty and p.kind in _IN_ORDER]
    return len(needed) == 2


def propose_by(
    draft: Any, most: int, prompts: Sequence[Tensor], beside: Callable[[int], Tensor] | None = None
) -> Propose | None:
    """What proposes tokens, at most so many at a time; None without a draft. `prompts`: of each row, `[T]`.
    `beside`: what the decoder gives beside the logits for a row's last token that it has computed.

    Raises:
        TypeError: a draft is nothing that can propose tokens. ValueError: it takes what the decoder gives
            beside the logits, and that is nothing.
    """
    if draft is None:
        return None
    guess: Callable[..., Sequence[int]]
    if takes_beside(draft):
        if beside is None:
            raise ValueError(
                "this draft takes what the decoder gives beside the logits, and that is nothing: "
                "CacheConfig(beside=...) names a result of forward for it."
            )
        return lambda rows, news: [
            [*map(int, draft(torch.cat([prompts[row], new]), beside(row)))][:most]
            for row, new in zip(rows, news, strict=True)
        ]
    if draft == "lookup":
        guess = functools.partial(looked_up, most=most)
    elif isinstance(calls := getattr(draft, "calls", None), Calls):
        return _OfDecoder(calls, most, prompts)
    elif callable(draft) and not isinstance(draft, nn.Module):
        guess = draft
    else:
        raise TypeError(
            'draft is "lookup", a decoder (attngraph.compile(model, cache=True)), a function from tokens [T] '
            "to the ids that may follow, or a function or module of tokens and of what "
            f"CacheConfig(beside=...) gives for the last one; found {type(draft).__name__}."
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
            chosen = self.calls.last_logits(self.state, given).argmax(-1)
            for place, (row, token) in enumerate(zip(rows, torch.split(chosen, 1), strict=True)):
                given[row] = token
                found[place].append(int(token))
        return found
