"""In-flight batching: requests start and end while others run.

Every step computes one packed batch: the next token of each running request, and a chunk of the prompts that
are not processed yet, so that a long prompt does not delay the others. Requests run in order of arrival; the
place and the pages of one that ends are free at once. How many tokens of a request were processed is what the
state says, and only that: after a step that is interrupted the next begins with what is there (`_tidy`).
"""

import collections
import functools
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attngraph.capture.state.content import tensor_digest
from attngraph.errors import CacheError
from attngraph.ir.modes import serving
from attngraph.runtime.decoder import Decoder
from attngraph.runtime.generate import choose, generator_of
from attngraph.runtime.generation_options import Options, as_tuple
from attngraph.runtime.kv_cache import Call, KVCache
from attngraph.runtime.packing import Packed, as_ids

DRAWN = 16
"""Random numbers that are drawn at a time."""


class Request:
    """One prompt being continued. Iterating yields new tokens as they are computed; `result()` waits for all.

    Attributes:
        tokens: the new tokens so far. finished: whether the request has ended. error: why it failed, if so.
        longest: the most tokens that it can have, prompt included.
    """

    def __init__(self, engine: "Engine", prompt: Tensor, options: Options) -> None:
        self.engine, self.prompt, self.options = engine, prompt, options
        self.tokens: list[int] = []
        self.longest = len(prompt) + options.max_new_tokens
        self.finished = False
        self.error: Exception | None = None
        self._drawn = list[float](), generator_of(options)
        """Random numbers, one for each token and more, and what draws the next ones."""

    @functools.cached_property
    def _digest(self) -> str:
        return tensor_digest(self.prompt)[:16]

    def described(self) -> str:
        """The request as ranks compare it: its prompt, its options, how far it is."""
        prompt = f"a prompt of {len(self.prompt)} tokens, contents {self._digest}"
        return f"{prompt}, then {self.tokens[-1:]}, {self.options}"

    def left(self, done: int, most: int) -> Tensor:
        """The next tokens to compute after the first `done`: at most so many of the prompt, or the latest."""
        if done < len(self.prompt):
            return self.prompt[done : done + most]
        return torch.tensor(self.tokens[done - len(self.prompt) :], dtype=torch.int64)

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

    def is_complete(self) -> bool:
        """Whether it has its last token."""
        has_ended = bool(self.tokens) and self.tokens[-1] in self.options.ends
        return has_ended or len(self.tokens) >= self.options.max_new_tokens

    def __iter__(self) -> Iterator[int]:
        given = 0
        while True:
            while given < len(self.tokens):
                yield self.tokens[given]
                given += 1
            if self.finished:
                if self.error is not None:
                    raise self.error
                return
            self.engine.step()

    def result(self) -> list[int]:
        """All new tokens; raises the request's own error, if it failed."""
        return list(self)

    def cancel(self) -> None:
        """End the request; its place is free for the next one."""
        self.engine._end(self)


class Engine:
    """Runs many requests through one decoder.

    Args:
        decoder: of a model whose only input is the tokens.
        max_batch: the most requests that run at once.
        max_tokens: the most tokens that all running requests together can reach (None: any number).
        max_waiting: the most requests that may wait (None: any number).
        chunk: the most prompt tokens that one step processes.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, decoder: Decoder, max_batch: int = 8, max_tokens: int | None = None,
        max_waiting: int | None = None, chunk: int = 128,
    ) -> None:  # fmt: skip
        if not isinstance(decoder, Decoder):
            raise TypeError(
                f"Engine takes what attngraph.compile(model, cache=True) returns, found "
                f"{type(decoder).__name__}."
            )
        if max_batch < 1 or chunk < 1 or (max_tokens is not None and max_tokens < 1):
            raise ValueError("max_batch, max_tokens and chunk must be at least 1.")
        self.decoder, self.max_tokens, self.chunk = decoder, max_tokens, chunk
        self.max_waiting = max_waiting
        self.places: list[Request | None] = [None] * max_batch
        self.waiting: collections.deque[Request] = collections.deque()
        self.state: KVCache | None = None
        self._lock = threading.RLock()

    def submit(
        self, prompt: Tensor | Sequence[int], max_new_tokens: int = 64, temperature: float = 0.0,
        top_k: int | None = None, top_p: float | None = None, eos_token_id: int | Sequence[int] | None = None,
        seed: int | None = None,
    ) -> Request:  # fmt: skip
        """Add a request, at any time; it runs as the engine is stepped (by `step`, `run`, or iterating).

        Args:
            prompt: int64 `[T]`, at least one token; the other arguments as for `Decoder.generate`.

        Raises:
            TypeError: the prompt holds no token ids. ValueError: it is empty, or an option is out of range.
            CacheError: the request can never fit, or too many are waiting; other requests are not affected.
        """
        ids = as_ids(prompt)
        if ids.ndim != 1 or len(ids) == 0:
            raise ValueError(
                f"a prompt must be one sequence of at least one token, found a shape of {tuple(ids.shape)}."
            )
        ends = as_tuple(eos_token_id)
        options = Options(max_new_tokens, temperature, top_k, top_p, ends=ends, seed=seed)
        request = Request(self, ids, options)
        with self._lock:
            limits = (self.max_tokens, None if self.state is None else self.state.limit)
            most = min((n for n in limits if n is not None), default=None)
            if most is not None and request.longest > most:
                raise CacheError(f"a request of up to {request.longest} tokens never fits into {most}.")
            if self.max_waiting is not None and len(self.waiting) >= self.max_waiting:
                raise CacheError(f"{len(self.waiting)} requests are waiting already; submit it again later.")
            self.waiting.append(request)
        return request

    @property
    def running(self) -> int:
        """The number of running requests."""
        return sum(1 for place in self.places if place is not None)

    def run(self) -> None:
        """Step until no request runs or waits."""
        while self.step():
            pass

    @serving
    def step(self) -> bool:
        """Compute the next tokens. Returns False if there was nothing to do."""
        with self._lock:
            self._tidy()
            if self.decoder.devices.has_peers:  # which run and wait with the same requests
                requests = [r and r.described() for r in (*self.places, *self.waiting)]
                done = [] if self.state is None else self.state.lengths
                self.decoder.devices.agree("a step of an engine", requests, done)
            self._admit()
            parts = self._parts()
            if not any(map(len, parts)):
                return False
            try:
                logits = self._advance(parts)
            except Exception:
                self._find_the_cause(parts)
            else:
                self._take(parts, logits)
            return True

    # --- parts of a step ---

    def _tidy(self) -> None:
        """Free the places of requests that have ended. What an interrupted step computed and nobody has taken
        is computed again; a request that cannot go back fails; all do if the state cannot be used."""
        if self.state is not None and self.state.unfinished:
            for request in self.places:
                if request is not None:
                    request.error, request.finished = CacheError(self.state.unfinished), True
            self.state = None
        for place, request in enumerate(self.places):
            if request is not None:
                request.finished = request.finished or request.is_complete()
                self.places[place] = None if request.finished else request
        while self.waiting and (self.waiting[0].finished or self.waiting[0] in self.places):
            self.waiting.popleft()
        if self.state is not None:
            for place, request in enumerate(self.places):
                known = 0 if request is None else len(request.prompt) + len(request.tokens)
                if self.state.lengths[place] > max(0, known - 1):
                    self._go_back(place, request, known - 1)

    def _go_back(self, place: int, request: Request | None, length: int) -> None:
        assert self.state is not None
        try:
            self.state.crop([max(0, length) if n == place else m for n, m in enumerate(self.state.lengths)])
        except CacheError as problem:
            assert request is not None
            fault = CacheError(f"a step was interrupted, and cannot be repeated: {problem}")
            request.error, request.finished, self.places[place] = fault, True, None
            self.state.reset(place)

    def _admit(self) -> None:
        """Give free places to waiting requests, in order of arrival."""
        held = sum(r.longest for r in self.places if r is not None)
        for place, current in enumerate(self.places):
            if current is not None or not self.waiting:
                continue
            if self.max_tokens is not None and held + self.waiting[0].longest > self.max_tokens:
                return
            if self.state is not None and not self._serves(self.waiting[0]):
                if self.running:  # another graph is for it, which begins when these have ended
                    return
                self.state = None
            request = self.waiting[0]
            if self.state is None:
                try:
                    self.state = self._new_state(request)
                except Exception as problem:
                    self._fail(request, problem)
                    raise
            if self.state.limit is not None and request.longest > self.state.limit:
                fault = CacheError(f"{request.longest} tokens do not fit: at most {self.state.limit}.")
                self._fail(request, fault)
                continue
            held += request.longest
            self.places[place] = request
            self.waiting.popleft()

    def _serves(self, request: Request) -> bool:
        """Whether the state goes on as its model is now, and its graph is for prompts as long as this."""
        assert self.state is not None
        try:
            step = self.decoder.step_of(self.state)
        except CacheError:
            return False
        return not step.sizes.fault(Call(1, frozenset([len(request.prompt)])))

    def _new_state(self, request: Request) -> KVCache:
        state = self.decoder.new_state(self.decoder.pack(request.prompt, None), len(self.places), "paged")
        step = self.decoder.step_of(state)
        if step.prompt_arguments or len(step.arguments) > 1:
            raise ValueError("an engine serves models with one input, the tokens.")
        return state

    def _parts(self) -> list[Tensor]:
        """The tokens to compute next for each place."""
        left, found = self.chunk, list[Tensor]()
        for place, request in enumerate(self.places):
            if request is None or self.state is None:
                found.append(torch.empty(0, dtype=torch.int64))
                continue
            done = self.state.lengths[place]
            found.append(request.left(done, left))
            left -= len(found[-1]) if done < len(request.prompt) else 0
        return found

    def _advance(self, parts: Sequence[Tensor]) -> Tensor:
        """The logits of the last token of every place that has tokens."""
        state = self.state
        assert state is not None
        counts = [len(p) for p in parts]
        packed = Packed(torch.cat(list(parts)).unsqueeze(0).to(state.device), counts)
        step = self.decoder.step_of(state)
        more_follow = [
            place for place, request in enumerate(self.places)
            if request is not None and state.lengths[place] + counts[place] < len(request.prompt)
        ]  # fmt: skip
        with state.changing():
            return step.advance(
                state, counts, {step.name: packed.ids}, packed.last(), unfinished=more_follow
            )[0]  # fmt: skip

    def _find_the_cause(self, parts: Sequence[Tensor]) -> None:
        """After a failed step, which cached nothing: run each place separately, and end those that fail."""
        for place, request in enumerate(self.places):
            if request is None or not len(parts[place]):
                continue
            alone = [p if n == place else p[:0] for n, p in enumerate(parts)]
            try:
                logits = self._advance(alone)
            except Exception as problem:
                self._fail(request, problem)
            else:
                self._take(alone, logits)

    def _take(self, parts: Sequence[Tensor], logits: Tensor) -> None:
        """Choose the next token of every place whose prompt is fully processed."""
        assert self.state is not None
        active = [(n, r) for n, r in enumerate(self.places) if r is not None and len(parts[n])]
        chosen = choose(logits, [r.options for _, r in active], [r.draw() for _, r in active])
        tokens = self.decoder.devices.lead(chosen.cpu()).tolist()
        for (place, request), token in zip(active, tokens, strict=True):
            if self.state.lengths[place] >= len(request.prompt):
                request.tokens.append(token)
        self._tidy()

    def _fail(self, request: Request, problem: Exception) -> None:
        request.error = problem
        self._end(request)

    def _end(self, request: Request) -> None:
        """Remove a request, whether it waits or runs."""
        with self._lock:
            request.finished = True
            if request in self.waiting:
                self.waiting.remove(request)
            self._tidy()
