"""Prompts continued with a derived step: what begins alike is computed once, guesses that do not stand leave
the state again, and a row that its graph or its context cannot go on with is computed anew."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngraph.errors import CacheError
from attngraph.ir.modes import serving
from attngraph.runtime.beams import search
from attngraph.runtime.calls import Calls
from attngraph.runtime.draft import propose_by, takes_beside
from attngraph.runtime.generate import Rows, generate
from attngraph.runtime.generation_options import Options
from attngraph.runtime.kv_cache import Call, KVCache
from attngraph.runtime.packing import Packed
from attngraph.runtime.step import Step

WORTH_SHARING = 64
"""So many tokens that need not be computed are worth a step of their own."""


@dataclasses.dataclass(frozen=True)
class Generated:
    """What `Decoder.generate(..., return_dict_in_generate=True)` returns.

    Attributes:
        sequences: the prompts as given, and the new tokens, int64 `[B, T + new]`.
        logprobs: of the new tokens, `[B, new]`: with `consistent=True` the bits of `Decoder.logprobs` for the
            sequence; 0 behind a row's end.
        scores, logits: if `output_scores`, `output_logits` asked for them: for each new token `[B, V]`, after
            and before the processors.
    """

    sequences: Tensor
    logprobs: Tensor
    scores: tuple[Tensor, ...] | None
    logits: tuple[Tensor, ...] | None
    _run: "Continuation"

    @functools.cached_property
    def state(self) -> KVCache:
        """The state with all these tokens, for `decode`, or for `generate(ids, state=...)` with the tokens
        that come next. The last token of each row, whose logits nobody has asked for, is computed now."""
        return self._run.whole_state()


def repeated(
    times: int, prompts: Tensor, packed: Packed, inputs: Mapping[str, Any]
) -> tuple[Tensor, Packed, dict[str, Any]]:
    """Prompts, as given and packed, and what has an entry for each of them, each row so many times."""
    of_rows = {n: v for n, v in inputs.items() if isinstance(v, Tensor) and v.shape[:1] == prompts.shape[:1]}
    more = {name: value.repeat_interleave(times, 0) for name, value in of_rows.items()}
    return prompts.repeat_interleave(times, 0), packed.repeated(times), {**inputs, **more}


class Continuation:
    """A batch of prompts, the step that goes on with them, and their state.

    Args:
        given: the prompts as given, `[B, T]`.
        state: of what came before the prompts (None: nothing did).
        limit: the length at which a row's context rolls (None: at none).
    """

    def __init__(
        self, calls: Calls, step: Step, packed: Packed, inputs: Mapping[str, Any], given: Tensor,
        options: Options, state: KVCache | None, limit: int | None,
    ) -> None:  # fmt: skip
        self.calls, self.step, self.packed, self.inputs = calls, step, packed, dict(inputs)
        self.options, self.limit, self.goes_on = options, limit, state is not None
        self._joined = step.plan.beside if takes_beside(options.draft) else 0
        """How many numbers behind the logits the draft is given."""
        beside = self._beside if self._joined else None
        self._propose = propose_by(options.draft, options.draft_tokens, packed.rows(), beside)
        if state is not None:
            self._require_same(state)
        if self._propose is not None:
            self._require_draft(state)
        self._before = [0] * len(packed.counts) if state is None else state.lengths
        self._prompts = [sum(pair) for pair in zip(self._before, packed.counts, strict=True)]
        self._latest, self._values = _Given(torch.empty(0), [], [], True), torch.empty(0)
        if state is None:
            found, self.state = self._begun()
            self.logits = self._apart(found)
        else:
            self.state = state
            with state.changing():
                self.logits = self.advance(packed.ids[0], packed.counts, packed.last())
        self.rows = Rows(given, options, calls.devices.lead)

    def generated(self) -> Tensor | Generated:
        """The prompts and the new tokens, `[B, T + new]`, or all that was asked for."""
        try:
            new = self._new_tokens()
        except BaseException:
            if self.goes_on and not self.state.unfinished:
                self.state.crop(self._before)
            raise
        prompts, details = self.rows.prompts, self.rows.details
        found = torch.cat([prompts.repeat_interleave(len(new) // len(prompts), 0), new], 1)
        if not details:
            return found
        scores, logits = (tuple(details[name]) if name in details else None for name in ("scores", "logits"))
        return Generated(found, torch.stack(details["logprobs"], 1), scores, logits, self)

    def _new_tokens(self) -> Tensor:
        if self.options.num_beams > 1:
            lead = self.calls.devices.lead
            return search(self.logits, self.advance, self.state, self.rows.prompts, self.options, lead)
        advance = self._renewing if self.limit is not None or self._depends() else self.advance
        propose = None if self._propose is None else self._proposed
        return generate(self.logits, advance, self.rows, propose, self._settle)

    def advance(self, tokens: Tensor, counts: list[int], picked: Tensor | None = None) -> Tensor:
        """The logits of new tokens, packed, of which each row gets so many; or of those `picked`."""
        return self._apart(self._advanced(tokens, counts, picked))

    def _advanced(self, tokens: Tensor, counts: list[int], picked: Tensor | None = None) -> Tensor:
        """The same, with what a draft is given behind them."""
        self._latest = _Given(tokens, counts, self.state.lengths, picked is not None)
        packed = self.calls.as_in_prompt(self.step, Packed(tokens.unsqueeze(0), counts))
        given = self.calls.arguments(self.step, packed, {})
        return self.step.advance(self.state, counts, given, picked, joined=bool(self._joined))[0]

    def _apart(self, found: Tensor) -> Tensor:
        """The logits; what a draft is given is kept for it."""
        if not self._joined:
            return found
        self._values = found[:, -self._joined :]
        return found[:, : -self._joined]

    def _beside(self, row: int) -> Tensor:
        """What a draft is given for a row's last token that is computed and stands."""
        latest = self._latest
        if latest.is_last:
            return self._values[row]
        stand = self.state.lengths[row] - latest.before[row]
        return self._values[sum(latest.counts[:row]) + stand - 1]

    @serving
    def whole_state(self) -> KVCache:
        """The state with all tokens, also the last ones."""
        if self.limit is not None:
            raise ValueError('context="roll" keeps no state that has all tokens.')
        total = [sum(pair) for pair in zip(self._prompts, self.rows.counts, strict=True)]
        missing = [a - b for a, b in zip(total, self.state.lengths, strict=True)]
        if any(missing):
            news = [self.rows.news(row) for row in range(len(missing))]
            left = [new[len(new) - count :] for new, count in zip(news, missing, strict=True)]
            with self.state.changing():
                self.advance(torch.cat(left), missing)
        return self.state

    def _require_same(self, state: KVCache) -> None:
        """Raise an error where the prompts cannot go on from a state."""
        if self.limit is not None or self.inputs or self.options.num_beams > 1:
            others = ", ".join(["beams", "a rolling context", *self.inputs])
            raise ValueError(f"generate(..., state=...) goes on with tokens alone, without {others}.")
        if state.rows != len(self.packed.counts):
            raise CacheError(f"tokens for {len(self.packed.counts)} row(s), but the state has {state.rows}.")

    # --- prompts that begin alike ---

    def _begun(self) -> tuple[Tensor, KVCache]:
        """The logits of the prompts' last tokens `[B, V]`, and a state that holds the prompts. Equal prompts
        are computed once, and once is what all others begin with."""
        step, packed, own = self.step, self.packed, self.calls.config
        if self._propose is not None:
            own = dataclasses.replace(own, snapshots=max(own.snapshots, 1))
        begin = functools.partial(self.calls.begin, step, config=own, joined=bool(self._joined))
        known = (
            self.inputs or step.prompt_arguments or packed.ids.is_floating_point() or self.limit is not None
        )
        rows = packed.rows()
        different = list(dict.fromkeys(map(_ids, rows))) if len(rows) > 1 and not known else []
        shared = _beginning(different)
        saved = shared * (len(different) - 1)
        calls = [Call(count, frozenset(packed.counts)) for count in (1, len(different))]
        if (len(different) in (0, len(rows)) and saved < WORTH_SHARING) or any(map(step.sizes.fault, calls)):
            found, state = begin(packed, self.inputs, packed.last())
            return found[0], state
        places = [different.index(_ids(row)) for row in rows]
        firsts = [rows[places.index(n)] for n in range(len(different))]
        if saved >= WORTH_SHARING:
            head = Packed.of_rows([firsts[0][:shared]])
            _, self.state = begin(head, {}, head.last(), unfinished=[0])
            self.state.reorder([0] * len(firsts))
            firsts = [row[shared:] for row in firsts]
            tails = Packed.of_rows(firsts)
            found, state = self._advanced(tails.ids[0], tails.counts, tails.last()), self.state
        else:
            once = Packed.of_rows(firsts)
            whole, state = begin(once, {}, once.last())
            found = whole[0]
        if places != list(range(len(firsts))):
            state.reorder(places)
        return found[places], state

    # --- drafts ---

    def _require_draft(self, state: KVCache | None) -> None:
        """Raise ValueError where a draft does not go with the call."""
        plan, options = self.step.plan, self.options
        config = self.calls.config if state is None else state.config
        if self._joined and (self.limit is not None or self.step.sizes.depends):
            raise ValueError(
                "a draft that is given what forward returns beside the logits goes with no rolling context, "
                "and with no model that does something else at other lengths."
            )
        if self.calls.devices.has_peers:
            raise ValueError("a draft goes with one device: several may not guess the same.")
        if options.looks_at_all_rows and len(self.packed.counts) > 1:
            raise ValueError(
                "with a draft each row has its own number of tokens, so several rows go with no streamer, "
                "on_token, stopping_criteria, stop_strings, logits_processor or repetition_penalty."
            )
        if any(store.window is not None for store in plan.stores) and config.rollback < options.draft_tokens:
            raise ValueError(
                f"{options.draft_tokens} tokens of a draft may have to leave a sliding window again: "
                f"CacheConfig(rollback=...) must be as large, and is {config.rollback}."
            )
        if plan.carried and state is not None and not config.snapshots:
            raise ValueError(
                "tokens of a draft may have to leave the sums that rows carry again: this state needs "
                "CacheConfig(snapshots=1)."
            )

    def _proposed(self, rows: list[int], news: list[Tensor]) -> list[list[int]]:
        """The draft's guesses, where the step can go on with all of them."""
        assert self._propose is not None
        known, counts = range(self.logits.shape[-1]), self.rows.counts
        room = [self.options.max_new_tokens - counts[row] - 1 for row in rows]
        if self.state.limit is not None:
            left = [max(0, self.state.limit - self.state.lengths[row] - 1) for row in rows]
            room = list(map(min, room, left))
        found = [
            list(itertools.takewhile(known.__contains__, guess[:most]))
            for guess, most in zip(self._propose(rows, news), room, strict=True)
        ]
        counts = [0] * len(counts)
        for row, guess in zip(rows, found, strict=True):
            counts[row] = 1 + len(guess)
        return found if self._going_on(counts) == rows else [[] for _ in rows]

    def _settle(self, stand: dict[int, int]) -> None:
        """Take the tokens out of the state that do not stand. `stand`: how many of those that were given do,
        for rows of which not all do. A sum over tokens goes back to before them, and has these anew."""
        if not stand:
            return
        given, anew = self._latest, bool(self.step.plan.carried)
        kept = [
            before + (0 if anew and row in stand else stand.get(row, count))
            for row, (before, count) in enumerate(zip(given.before, given.counts, strict=True))
        ]
        self.state.crop(kept)
        if anew:
            parts = [
                part[: stand.get(row, 0)] for row, part in enumerate(torch.split(given.tokens, given.counts))
            ]
            self.advance(torch.cat(parts), [*map(len, parts)])

    # --- rows that are computed anew ---

    def _depends(self) -> bool:
        """Whether other lengths have other graphs, and all tokens are known, for those."""
        return self.step.sizes.depends and not self.packed.ids.is_floating_point() and not self.goes_on

    def _renewing(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """`advance` for those of some rows that go on from what is kept of them; the others are computed anew
        from all their tokens, or from the last that fit."""
        given = [row for row, count in enumerate(counts) if count]
        kept = self._going_on(counts)
        if kept == given:
            return self.advance(tokens, counts)
        whole = map(torch.cat, zip(self.packed.rows(), map(self.rows.news, range(len(counts))), strict=True))
        again = [row for row in given if row not in kept]
        found = self._anew([row[0 if n in again else len(row) :] for n, row in enumerate(whole)])
        parts = dict(zip(again, found, strict=True))
        if kept:
            one = [int(row in kept) for row in range(len(counts))]
            picked = torch.tensor([row in kept for row in given], device=tokens.device)
            parts |= zip(kept, self.advance(tokens[picked], one), strict=True)
        return torch.stack([parts[row] for row in given])

    def _going_on(self, counts: list[int]) -> list[int]:
        """Of the rows that get new tokens those that the step can give so many."""
        rows, lengths = [row for row, count in enumerate(counts) if count], self.state.lengths
        if self.limit is not None:
            return [row for row in rows if lengths[row] + counts[row] <= self.limit]
        return [] if self._depends() and self.step.sizes.fault(self.state.call(counts)) else rows

    def _anew(self, rows: list[Tensor]) -> Tensor:
        """The logits of the last tokens of those rows that have some, `[R, V]`."""
        if self.limit is not None:
            whole = self.calls.pack([row[-self.limit :] for row in rows], None)
            return self.calls.begin(self.step, whole, {}, whole.last())[0][0]
        whole = self.calls.pack(rows, None)
        self.step = self.calls.derived.of_call(whole, self.inputs)
        found, self.state = self.calls.begin(self.step, whole, self.inputs, whole.last())
        return found[0]


class _Given(NamedTuple):
    """Tokens that were given, packed, how many each row got, and how many it had before. `is_last`: whether
    results were of each row's last token alone."""

    tokens: Tensor
    counts: list[int]
    before: list[int]
    is_last: bool


def _ids(row: Tensor) -> tuple[int, ...]:
    return tuple(row.tolist())


def _beginning(rows: Sequence[tuple[int, ...]]) -> int:
    """How many tokens all rows begin with, and have more behind."""
    if len(rows) < 2:
        return 0
    low, high = min(rows), max(rows)  # in the order of their tokens: what these share, all do
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))
    return min(sum(1 for _ in same), *(len(row) - 1 for row in rows))
