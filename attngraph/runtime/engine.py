"""In-flight batching: requests start and end while others run.

Every step computes one packed batch: the next token of each running request, and a chunk of the prompts that
are not processed yet, so that a long prompt does not delay the others. Requests run in order of priority,
then of arrival; the place of one that ends is free at once, and its tokens are kept for prompts that begin
like it (`shared.py`). How many tokens of a request were processed is what the state says, and only that:
after a step that is interrupted the next begins with what is there (`_tidy`).
"""

import bisect
import collections
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.errors import CacheError
from attngraph.ir.modes import serving
from attngraph.runtime.decoder import Decoder
from attngraph.runtime.generation_options import read_options
from attngraph.runtime.kv_cache import Call, KVCache
from attngraph.runtime.packing import as_ids
from attngraph.runtime.request import Request
from attngraph.runtime.sampling import choose
from attngraph.runtime.shared import Beginnings


class Engine:
    """Runs many requests through one decoder.

    Args:
        decoder: of a model whose only input is the tokens.
        max_batch: the most requests that run at once.
        max_tokens: the most tokens that all running requests together can reach (None: any number).
        max_waiting: the most requests that may wait (None: any number).
        chunk: the most prompt tokens that one step processes.
        max_bytes: the most bytes of cached values that all running requests together can reach, sliding
            windows not considered (None: any number).
        kept: of how many requests that have ended the tokens are kept, for prompts that begin like them. They
            give way where running requests need `max_tokens` or `max_bytes`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, decoder: Decoder, max_batch: int = 8, max_tokens: int | None = None,
        max_waiting: int | None = None, chunk: int = 128, max_bytes: int | None = None, kept: int = 8,
    ) -> None:  # fmt: skip
        if not isinstance(decoder, Decoder):
            raise TypeError(
                f"Engine takes what attngraph.compile(model, cache=True) returns, found "
                f"{type(decoder).__name__}."
            )
        if min(n for n in (max_batch, chunk, max_tokens, max_bytes) if n is not None) < 1 or kept < 0:
            raise ValueError(
                "max_batch, max_tokens, max_bytes and chunk must be at least 1, and kept at least 0."
            )
        self.decoder, self.max_tokens, self.max_bytes, self.chunk = decoder, max_tokens, max_bytes, chunk
        self.max_waiting = max_waiting
        self.places: list[Request | None] = [None] * max_batch
        self.waiting: list[Request] = []
        self.state: KVCache | None = None
        self._beginnings = Beginnings(range(max_batch, max_batch + kept))
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.RLock()

    def submit(
        self, prompt: Tensor | Sequence[int], max_new_tokens: int | None = None,
        temperature: float | None = None, top_k: int | None = None, top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None, seed: int | None = None, *, priority: int = 0,
        **more: Any,
    ) -> Request:  # fmt: skip
        """Add a request, at any time; it runs as the engine is stepped (by `step`, `run`, or iterating).

        Args:
            prompt: int64 `[T]`, at least one token; the other arguments as for `Decoder.generate`.
            priority: a request with a larger one gets the next free place; requests that run are not
                interrupted.
            more: `min_p`, `min_new_tokens`, `max_length`, `do_sample`, `logits_processor`,
                `repetition_penalty`, `stopping_criteria`, `stop_strings` with `tokenizer`, as for
                `Decoder.generate`. They see this request alone, `[1, T]`.

        Raises:
            TypeError: the prompt holds no token ids. ValueError: it is empty, or an option is out of range.
            CacheError: the request can never fit, or too many are waiting; other requests are not affected.
        """
        ids = as_ids(prompt)
        if ids.ndim != 1 or len(ids) == 0:
            raise ValueError(
                f"a prompt must be one sequence of at least one token, found a shape of {tuple(ids.shape)}."
            )
        given = {
            "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
            "eos_token_id": eos_token_id, "seed": seed, "min_p": more.pop("min_p", None),
            "min_new_tokens": more.pop("min_new_tokens", None),
        }  # fmt: skip
        options = read_options(len(ids), given, more)
        if options.samples > 1 or options.details or options.streamer is not None:
            raise ValueError(
                "a request has one continuation, which it gives token by token: no num_return_sequences, "
                "return_dict_in_generate or streamer."
            )
        request = Request(self.step, self._end, ids, options, priority)
        with self._lock:
            try:
                self._require_fits(request)
            except CacheError:
                self._counts["refused"] += 1
                raise
            self._counts["submitted"] += 1
            bisect.insort(self.waiting, request, key=lambda r: -r.priority)
        return request

    def _require_fits(self, request: Request) -> None:
        limits = (self._most_tokens(), None if self.state is None else self.state.limit)
        most = min((n for n in limits if n is not None), default=None)
        if most is not None and request.longest > most:
            raise CacheError(f"a request of up to {request.longest} tokens never fits into {most}.")
        if self.max_waiting is not None and len(self.waiting) >= self.max_waiting:
            raise CacheError(f"{len(self.waiting)} requests are waiting already; submit it again later.")

    def _most_tokens(self) -> int | None:
        """The most tokens that running requests can reach together."""
        limits = [self.max_tokens]
        if self.max_bytes is not None and self.state is not None and self.state.bytes_per_token:
            limits.append(self.max_bytes // self.state.bytes_per_token)
        return min((n for n in limits if n is not None), default=None)

    def counters(self) -> dict[str, int]:
        """What has happened so far: requests `submitted`, `refused`, `finished`, `failed`, `cancelled`;
        tokens of admitted prompts (`prompt_tokens`), how many of them were `shared_tokens` of another
        request, and `new_tokens`; `steps`. And what is now: requests `running`, `waiting`, `state_bytes`."""
        found = {name: self._counts[name] for name in _COUNTED}
        found |= {"running": self.running, "waiting": len(self.waiting)}
        return found | {"state_bytes": 0 if self.state is None else self.state.nbytes}

    def open_metrics(self) -> str:
        """The counters in the text format of OpenMetrics (and Prometheus)."""
        lines = list[str]()
        for name, value in self.counters().items():
            kind, suffix = ("counter", "_total") if name in _COUNTED else ("gauge", "")
            lines += [f"# TYPE attngraph_{name} {kind}", f"attngraph_{name}{suffix} {value}"]
        return "\n".join((*lines, "# EOF\n"))

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
            self._share()
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
            self._forget()
        for place, request in enumerate(self.places):
            if request is not None and (request.finished or request.is_complete()):
                self._over(request, "finished" if request.error is None else "failed")
                if self.state is not None and request.error is None:
                    self._beginnings.keep(self.state, place, request.whole())
                self.places[place] = None
        self.waiting = [r for r in self.waiting if not r.finished and r not in self.places]
        if self.state is not None:
            self._beginnings.tidy(self.state)
            for place, request in enumerate(self.places):
                known = 0 if request is None else len(request.prompt) + len(request.tokens)
                if self.state.lengths[place] > max(0, known - 1):
                    self._go_back(place, request, known - 1)

    def _forget(self) -> None:
        """Have no state."""
        self.state = None
        self._beginnings.forget()

    def _over(self, request: Request, how: str) -> None:
        """Count a request that has ended, once."""
        self._counts[how] += "finished" not in request.times()
        request.finished = True
        request.mark("finished")

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
        """Give free places to waiting requests, in their order."""
        held = sum(r.longest for r in self.places if r is not None)
        for place, current in enumerate(self.places):
            if current is not None or not self.waiting:
                continue
            request = self.waiting[0]
            if self.state is not None and not self._serves(request):
                if self.running:  # another graph is for it, which begins when these have ended
                    return
                self._forget()
            if self.state is None:
                try:
                    self.state = self._new_state(request)
                except Exception as problem:
                    self._fail(request, problem)
                    raise
            most = self._most_tokens()
            limits = [n for n in (self.state.limit, most) if n is not None]
            if limits and request.longest > min(limits):
                fault = CacheError(f"{request.longest} tokens do not fit: at most {min(limits)}.")
                self._fail(request, fault)
                continue
            if most is not None and held + request.longest > most:
                return
            if most is not None:
                self._beginnings.give_way(self.state, most - held - request.longest)
            held += request.longest
            self.places[place] = request
            self.waiting.pop(0)
            self._counts["prompt_tokens"] += len(request.prompt)
            self._counts["admitted"] += 1
            request.number = self._counts["admitted"]
            request.mark("admitted")

    def _share(self) -> None:
        """Give requests that begin what others have of their prompts."""
        if self.state is not None:
            before = sum(r.shared for r in self.places if r is not None)
            self._beginnings.share(self.state, self.places)
            after = sum(r.shared for r in self.places if r is not None)
            self._counts["shared_tokens"] += after - before

    def _serves(self, request: Request) -> bool:
        """Whether the state goes on as its model is now, and its graph is for prompts as long as this."""
        assert self.state is not None
        try:
            step = self.decoder.calls.step_of(self.state)
        except CacheError:
            return False
        return not step.sizes.fault(Call(1, frozenset([len(request.prompt)])))

    def _new_state(self, request: Request) -> KVCache:
        config = dataclasses.replace(self.decoder.config_of_cache, layout="paged")
        rows = len(self.places) + len(self._beginnings.rows)
        state = self.decoder.calls.new_state(self.decoder.calls.pack(request.prompt, None), rows, config)
        step = self.decoder.calls.step_of(state)
        if step.prompt_arguments or len(step.arguments) > 1:
            raise ValueError("an engine serves models with one input, the tokens.")
        return state

    def _parts(self) -> list[Tensor]:
        """The tokens to compute next for each row of the state."""
        left, found = self.chunk, list[Tensor]()
        for place, request in enumerate(self.places):
            if request is None or self.state is None:
                found.append(torch.empty(0, dtype=torch.int64))
                continue
            done = self.state.lengths[place]
            found.append(request.left(done, min(left, self._beginnings.most(place, done))))
            left -= len(found[-1]) if done < len(request.prompt) else 0
        return [*found, *(torch.empty(0, dtype=torch.int64) for _ in self._beginnings.rows)]

    def _advance(self, parts: Sequence[Tensor]) -> Tensor:
        """The logits of the last token of every place that has tokens."""
        state = self.state
        assert state is not None
        more_follow = [
            place for place, request in enumerate(self.places)
            if request is not None and state.lengths[place] + len(parts[place]) < len(request.prompt)
        ]  # fmt: skip
        return self.decoder.calls.last_logits(state, parts, more_follow)

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
        self._counts["steps"] += 1
        ready = {n: r for n, r in active if self.state.lengths[n] >= len(r.prompt)}
        problems: dict[int, Exception] = {}  # of the caller's functions
        for row, (place, request) in enumerate(active):
            if place in ready and request.is_steered:
                try:
                    logits[row] = request.scores(logits[row])
                except Exception as problem:
                    problems[place] = problem
        chosen = choose(logits, [r.options for _, r in active], [r.draw() for _, r in active])
        tokens = self.decoder.devices.lead(chosen.cpu()).tolist()
        for (place, request), token in zip(active, tokens, strict=True):
            if place in ready and place not in problems:
                try:
                    request.stopped = request.stops(token)
                except Exception as problem:
                    problems[place] = problem
                    continue
                request.tokens.append(token)
                request.mark("first_token")
                self._counts["new_tokens"] += 1
        for place, found in problems.items():
            self._fail(ready[place], found)
        self._tidy()

    def _fail(self, request: Request, problem: Exception) -> None:
        request.error = problem
        self._end(request, "failed")

    def _end(self, request: Request, how: str = "cancelled") -> None:
        """Remove a request, whether it waits or runs."""
        with self._lock:
            if not request.finished:
                self._over(request, how)
            if request in self.waiting:
                self.waiting.remove(request)
            self._tidy()


_COUNTED = (
    "submitted", "refused", "finished", "failed", "cancelled", "prompt_tokens", "shared_tokens", "new_tokens",
    "steps",
)  # fmt: skip
