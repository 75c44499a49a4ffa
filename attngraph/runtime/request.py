"""One of an engine's requests: a prompt, its new tokens, and when it got them."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attngraph.capture.state.content import tensor_digest
from attngraph.runtime.generation_options import Options, without_ends
from attngraph.runtime.sampling import generator_of

DRAWN = 16
"""Random numbers that are drawn at a time."""


class Request:
    """One prompt being continued. Iterating (`for` or `async for`) yields new tokens as they are computed;
    `result()` waits for all.

    Attributes:
        tokens: the new tokens so far. finished: whether the request has ended. error: why it failed, if so.
        longest: the most tokens that it can have, prompt included.
        shared: how many tokens of its prompt were taken from another request that begins like it.
        number: how many requests had got a place before it.
    """

    def __init__(
        self, step: Callable[[], bool], end: Callable[["Request"], None], prompt: Tensor, options: Options,
        priority: int = 0,
    ) -> None:  # fmt: skip
        """`step`, `end`: the engine's, to compute next tokens and to end a request."""
        self._step, self._end = step, end
        self.prompt, self.options, self.priority = prompt, options, priority
        self.tokens: list[int] = []
        self.longest = len(prompt) + options.max_new_tokens
        self.shared = 0
        self.number = 0
        self.finished = self.stopped = False
        self.error: Exception | None = None
        self._times = {"submitted": time.monotonic()}
        self._drawn = list[float](), generator_of(options)
        """Random numbers, one for each token and more, and what draws the next ones."""

    def times(self) -> dict[str, float]:
        """Seconds from the submission: until it was `admitted` (got a place), had its `first_token`, and was
        `finished`, as far as it has come."""
        begin = self._times["submitted"]
        return {name: at - begin for name, at in self._times.items() if name != "submitted"}

    def mark(self, name: str) -> None:
        """What happens now, if for the first time."""
        self._times.setdefault(name, time.monotonic())

    @functools.cached_property
    def _digest(self) -> str:
        return tensor_digest(self.prompt)[:16]

    def described(self) -> tuple[Any, ...]:
        """The request as ranks compare it: its prompt, its options, how far it is."""
        prompt = f"a prompt of {len(self.prompt)} tokens, contents {self._digest}, then {self.tokens[-1:]}"
        return prompt, self.priority, vars(self.options)

    def whole(self) -> Tensor:
        """The prompt and the new tokens, `[T]`."""
        return torch.cat([self.prompt, torch.tensor(self.tokens, dtype=torch.int64)])

    def left(self, done: int, most: int) -> Tensor:
        """The next tokens to compute after the first `done`: at most so many of the prompt, or the latest."""
        if done < len(self.prompt):
            return self.prompt[done : done + most]
        return torch.tensor(self.tokens[done - len(self.prompt) :], dtype=torch.int64)

    @property
    def is_steered(self) -> bool:
        """Whether its scores are other than its logits."""
        return bool(self.options.processors or self.options.min_new_tokens)

    def scores(self, logits: Tensor) -> Tensor:
        """Those of the next token, `[V]`, by its logits."""
        scores = without_ends(logits.unsqueeze(0), [len(self.tokens)], self.options)
        if self.options.processors:
            scores = self.options.processed(self.whole().unsqueeze(0).to(scores.device), scores.float())
        return scores[0].to(logits.dtype)

    def draw(self) -> float:
        """The random number for the next token, the same however often it is asked for."""
        if self.options.temperature == 0:
            return 0.0
        numbers, generator = self._drawn
        if len(self.tokens) >= len(numbers):
            generator = generator.clone_state()
            drawn = [float(torch.rand((), generator=generator, dtype=torch.float64)) for _ in range(DRAWN)]
            numbers = [*numbers, *drawn]
            self._drawn = numbers, generator
        return numbers[len(self.tokens)]

    def stops(self, token: int) -> bool:
        """Whether the caller's criteria end it with this token."""
        if not self.options.criteria:
            return False
        whole = torch.cat([self.whole(), torch.tensor([token])]).unsqueeze(0)
        return any(bool(torch.as_tensor(criterion(whole, None)).all()) for criterion in self.options.criteria)

    def is_complete(self) -> bool:
        """Whether it has its last token."""
        has_ended = self.stopped or (bool(self.tokens) and self.tokens[-1] in self.options.ends)
        return has_ended or len(self.tokens) >= self.options.max_new_tokens

    def _ended(self, given: int) -> bool:
        """Whether no more tokens come behind so many; raises the request's own error, if it failed."""
        ended = self.finished and given == len(self.tokens)
        if ended and self.error is not None:
            raise self.error
        return ended

    def __iter__(self) -> Iterator[int]:
        given = 0
        while not self._ended(given):
            if given < len(self.tokens):
                yield self.tokens[given]
                given += 1
            else:
                self._step()

    async def __aiter__(self) -> AsyncIterator[int]:
        given = 0
        while not self._ended(given):
            if given < len(self.tokens):
                yield self.tokens[given]
                given += 1
            else:
                await asyncio.to_thread(self._step)

    def result(self) -> list[int]:
        """All new tokens; raises the request's own error, if it failed."""
        return list(self)

    def cancel(self) -> None:
        """End the request; its place is free for the next one."""
        self._end(self)
