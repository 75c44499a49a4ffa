"""In-flight batching: requests start and end while others run.

Every step computes one packed sequence: the next token of each running request, and a chunk of the prompts
that are not processed yet, so that a long prompt does not delay the other requests. When a request ends, its
place and its pages are free for the next one at once. Nothing is padded, so requests of similar length need
not be grouped: they run in order of arrival.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attngraph.errors import CacheError
from attngraph.runtime.decoder import Decoder
from attngraph.runtime.generation_options import Options, as_tokens
from attngraph.runtime.kv_cache import KVCache
from attngraph.runtime.packing import Packed, as_ids
from attngraph.runtime.parallel.in_step import digest
from attngraph.runtime.sampling import sample
from attngraph.runtime.serving_mode import serving
from attngraph.runtime.step_sizes import Call


class Request:
    """One prompt being continued. Iterating yields new tokens as they are computed; `result()` waits for all.

    Attributes:
        tokens: the new tokens so far. finished: whether the request has ended. error: why it failed, if so.
    """

    def __init__(self, engine: Engine, prompt: Tensor, options: Options) -> None:
        self.engine, self.prompt, self.options = engine, prompt, options
        self.tokens: list[int] = []
        self.finished = False
        self.error: Exception | None = None
        self.generator: torch.Generator | None = None
        if options.temperature > 0:
            self.generator = torch.Generator()
            if options.seed is not None:
                self.generator.manual_seed(options.seed)
            else:
                self.generator.seed()
        self.read = 0
        """How many tokens of the prompt were processed."""

    @functools.cached_property
    def _prompt(self) -> str:
        return f"a prompt of {len(self.prompt)} tokens, contents {digest(self.prompt)}"

    def described(self) -> str:
        """The request as ranks compare it: its prompt, its options, how far it is."""
        return f"{self._prompt}, {self.read} read, then {self.tokens[-1:]}, {self.options}"

    @property
    def longest(self) -> int:
        """The most tokens that it can have, prompt included."""
        return len(self.prompt) + self.options.max_new_tokens

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
        """All new tokens.

        Raises:
            Exception: the request's own error, if it failed.
        """
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
        options = Options(
            max_new_tokens, temperature, top_k, top_p, 1, as_tokens(eos_token_id), seed, None, 1.0
        )
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
            self._agree()
            self._admit()
            parts = self._parts()
            if not any(len(p) for p in parts):
                return False
            try:
                logits = self._advance(parts)
            except Exception:
                self._find_the_cause(parts)
                return True
            self._take(parts, logits)
            return True

    # --- parts of a step ---

    def _agree(self) -> None:
        """Check that all ranks run and wait with the same requests."""
        if self.decoder.in_step.mesh is None:
            return
        requests = [*self.places, *self.waiting]
        self.decoder.in_step.agree("a step of an engine", [r and r.described() for r in requests])

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
            request = self.waiting.popleft()
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

    def _serves(self, request: Request) -> bool:
        """Whether the state goes on as its model is now, and its graph is for prompts as long as this."""
        assert self.state is not None
        try:
            step = self.decoder.step_of(self.state)
        except CacheError:
            return False
        return not step.sizes.fault(Call(1, frozenset([len(request.prompt)])))

    def _new_state(self, request: Request) -> KVCache:
        packed = self.decoder.pack(request.prompt, None)
        state = self.decoder.new_state(packed, len(self.places), "paged")
        step = self.decoder.step_of(state)
        if step.prompt_arguments or len(step.arguments) > 1:
            raise ValueError("an engine serves models with one input, the tokens.")
        return state

    def _parts(self) -> list[Tensor]:
        """The tokens to compute next for each place."""
        left = self.chunk
        found: list[Tensor] = []
        for request in self.places:
            none = torch.empty(0, dtype=torch.int64)
            if request is None:
                found.append(none)
            elif request.read < len(request.prompt):
                part = request.prompt[request.read : request.read + left]
                left -= len(part)
                found.append(part)
            else:
                found.append(torch.tensor(request.tokens[-1:], dtype=torch.int64))
        return found

    def _advance(self, parts: Sequence[Tensor]) -> Tensor:
        """The logits of the last token of every place that has tokens."""
        assert self.state is not None
        counts = [len(p) for p in parts]
        ids = torch.cat(list(parts)).unsqueeze(0).to(self.state.device)
        packed = Packed(ids, counts)
        step = self.decoder.step_of(self.state)
        logits: Tensor = step.advance(
            self.state, counts, {step.name: ids}, packed.last(), unfinished=self._unfinished(parts)
        )[0]
        return logits

    def _unfinished(self, parts: Sequence[Tensor]) -> list[int]:
        """The places of which more of the prompt follows."""
        return [
            place for place, (request, part) in enumerate(zip(self.places, parts, strict=True))
            if request is not None and request.read + len(part) < len(request.prompt)
        ]  # fmt: skip

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
        active = [n for n, part in enumerate(parts) if len(part)]
        for place in active:
            request = self.places[place]
            assert request is not None
            request.read = min(request.read + len(parts[place]), len(request.prompt))
        chosen = self.decoder.in_step.lead(torch.tensor(self._choose(active, logits)))
        for place, token in zip(active, chosen.tolist(), strict=True):
            request = self.places[place]
            assert request is not None
            if request.read < len(request.prompt):
                continue
            request.tokens.append(token)
            if token in request.options.ends or len(request.tokens) == request.options.max_new_tokens:
                self._end(request)

    def _choose(self, active: Sequence[int], logits: Tensor) -> list[int]:
        """One token for each active place, chosen with its request's options."""
        requests = [self.places[n] for n in active]
        options = [r.options for r in requests if r is not None]
        if all(o.temperature == 0 for o in options):
            found: list[int] = logits.argmax(-1).tolist()
            return found
        uniform = torch.tensor([self._draw(r) for r in requests], dtype=torch.float64)
        device = logits.device
        return sample(
            logits,
            torch.tensor([o.temperature for o in options], device=device),
            torch.tensor([o.top_k or 0 for o in options], device=device),
            torch.tensor([1.0 if o.top_p is None else o.top_p for o in options], device=device),
            uniform.to(device),
        ).tolist()  # type: ignore[no-any-return]

    @staticmethod
    def _draw(request: Request | None) -> float:
        """The random number for the request's next token; none is drawn while its prompt is processed."""
        if request is None or request.generator is None or request.read < len(request.prompt):
            return 0.0
        return float(torch.rand((), generator=request.generator, dtype=torch.float64))

    def _fail(self, request: Request, problem: Exception) -> None:
        request.error = problem
        self._end(request)

    def _end(self, request: Request) -> None:
        """Remove a request, whether it waits or runs."""
        with self._lock:
            request.finished = True
            if request in self.waiting:
                self.waiting.remove(request)
            for place, current in enumerate(self.places):
                if current is request:
                    self.places[place] = None
                    if self.state is not None:
                        self.state.reset(place)
