"""The loop around a decoder's step that picks one token after another.

It takes the logits of the prompts' last tokens and a function that processes new tokens, and gives new tokens
alone. A draft may guess several tokens of a row at once (`draft.py`): one step then computes them together,
and those guesses stand that are what is picked in their place. So a draft changes how many tokens a step
gives, and never which. Beams have a loop of their own (`beams.py`).
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attngraph.ir.ops.in_order import logprobs
from attngraph.runtime.generation_options import Options, without_ends
from attngraph.runtime.sampling import choose, generator_of

Advance = Callable[[Tensor, list[int]], Tensor]
"""Takes new tokens, packed, and how many each row gets; returns their logits, packed."""
Lead = Callable[[Tensor], Tensor]
"""Takes what was decided here; returns what was decided for all ranks."""
Propose = Callable[[list[int], list[Tensor]], list[list[int]]]
"""Takes the numbers of some rows and their new tokens `[T]`; returns the ids that each may go on with, no
more than it has room for."""
Settle = Callable[[dict[int, int]], None]
"""Takes, for rows of which not all tokens stand that they were given last, how many do."""


class Rows:
    """The rows of a call as they grow.

    Args:
        prompts: as given, `[B, T]`, for what is asked about all tokens so far.

    Attributes:
        found: the new tokens, int64 `[B, max_new_tokens]`. counts: how many each row has.
        running: the rows that get more. last: the latest token of each row, `[B]`.
        details: what else was asked for, by name: for each place the values of all rows, `[B, ...]`.
    """

    def __init__(self, prompts: Tensor, options: Options, lead: Lead = lambda own: own) -> None:
        rows, self.prompts, self.options, self.lead = len(prompts), prompts, options, lead
        shape = rows, options.max_new_tokens
        self.found = torch.full(shape, options.pad, dtype=torch.int64, device=prompts.device)
        self.counts, self.running = [0] * rows, list(range(rows))
        self.last = self.found[:, 0]
        self.details: dict[str, list[Tensor]] = {name: [] for name in options.details}
        self._drawn, self._generator = list[list[float]](), generator_of(options)
        if options.streamer is not None:
            options.streamer.put(prompts.cpu())

    def whole(self) -> Tensor:
        """The prompts as given and the new tokens of all rows, which have equally many, `[B, T]`."""
        return torch.cat([self.prompts, self.found[:, : self.counts[self.running[0]]]], 1)

    def news(self, row: int) -> Tensor:
        """The new tokens of a row, `[T]`."""
        return self.found[row, : self.counts[row]]

    def take(self, logits: Tensor, rows: list[int]) -> None:
        """Pick the next token of these running rows by their logits `[R, V]`; those that end leave `running`.
        All that run are asked for, unless the options look at each row alone."""
        options, counts = self.options, self.counts
        scores = self._processed(logits, rows)
        if options.temperature == 0:
            chosen = self.lead(scores.argmax(-1))
        else:
            drawn = [self._draw(counts[row])[row] for row in rows]
            chosen = self.lead(choose(scores, [options] * len(rows), drawn))
        if len(rows) == len(counts) and len({*counts}) == 1:
            self.found[:, counts[0]] = self.last = chosen
        else:
            index = torch.tensor(rows, device=chosen.device)
            places = torch.tensor([counts[row] for row in rows], device=chosen.device)
            self.found[index, places] = chosen
            self.last = self.last.index_copy(0, index, chosen)
        if self.details:
            self._keep(rows, logprobs=logprobs(logits, chosen), scores=scores, logits=logits)
        for row in rows:
            counts[row] += 1
        over = {row for row in rows if counts[row] == options.max_new_tokens}
        if options.may_stop:
            stop = self.lead(torch.tensor(self._told(rows, chosen))).tolist()
            over |= {row for row, ends in zip(rows, stop, strict=True) if ends}
        if over:
            self.running = [row for row in self.running if row not in over]

    def _processed(self, logits: Tensor, rows: list[int]) -> Tensor:
        """The logits as the end tokens and the options' processors leave them. As in transformers, processors
        are given all rows, also those that have ended."""
        places = [self.counts[row] for row in rows]
        scores = without_ends(logits, places, self.options)
        if not self.options.processors:
            return scores
        dtype = torch.promote_types(scores.dtype, torch.float32)
        given = scores.new_zeros((len(self.counts), scores.shape[-1]), dtype=dtype)
        given[rows] = scores.to(dtype)
        return self.options.processed(self.whole(), given)[rows]

    def _draw(self, place: int) -> list[float]:
        """The random numbers of all rows for a place. Rows that have ended have theirs too: a row's tokens do
        not depend on when others end."""
        while len(self._drawn) <= place:
            drawn = torch.rand(len(self.counts), generator=self._generator, dtype=torch.float64)
            self._drawn.append(drawn.tolist())
        return self._drawn[place]

    def _keep(self, rows: list[int], **values: Tensor) -> None:
        for name, kept in self.details.items():
            for value, row in zip(values[name], rows, strict=True):
                if len(kept) == self.counts[row]:
                    kept.append(value.new_zeros((len(self.counts), *value.shape)))
                kept[self.counts[row]][row] = value

    def _told(self, rows: list[int], chosen: Tensor) -> list[bool]:
        """Which rows stop after these tokens; tells the streamer and the caller's function."""
        options = self.options
        stop = torch.isin(chosen, torch.tensor(options.ends, dtype=torch.int64, device=chosen.device))
        last = self.found[:, self.counts[rows[0]] - 1]
        if options.streamer is not None:
            options.streamer.put(last.cpu())
        if options.on_token is not None and options.on_token(last.clone()) is True:
            return [True] * len(rows)
        for criterion in options.criteria:
            told = torch.as_tensor(criterion(self.whole(), None), device=stop.device).bool()
            stop = stop | (told if told.ndim == 0 else told[rows])
        return stop.tolist()  # type: ignore[no-any-return]


def generate(
    logits: Tensor, advance: Advance, rows: Rows, propose: Propose | None = None, settle: Settle | None = None
) -> Tensor:
    """The new tokens, int64 `[B, new]`; rows that ended get no more tokens.

    Args:
        logits: `[B, V]`, of the prompts' last tokens.
        propose: a draft. settle: needed with it.
    """
    rows.take(logits, rows.running)
    while rows.running:
        given = rows.running
        counts = [0] * len(rows.counts)
        for row in given:
            counts[row] = 1
        tokens = rows.last if len(given) == len(counts) else rows.last[given]
        if propose is None or settle is None:
            rows.take(advance(tokens, counts), given)
            continue
        guesses = propose(given, [rows.news(row) for row in given])
        for row, guess in zip(given, guesses, strict=True):
            counts[row] += len(guess)
        pieces = zip(tokens.unsqueeze(1), guesses, strict=True)
        packed = torch.cat([torch.cat([token, token.new_tensor(guess)]) for token, guess in pieces])
        settle(_checked(advance(packed, counts), given, guesses, rows))
    if rows.options.streamer is not None:
        rows.options.streamer.end()
    return rows.found[:, : max(rows.counts)]


def _checked(logits: Tensor, given: list[int], guesses: Sequence[list[int]], rows: Rows) -> dict[int, int]:
    """Pick tokens by the logits of each row's last token and of its guesses, as long as these are right.
    Returns, for rows with a wrong one, how many of the tokens that they were given stand."""
    starts = list(itertools.accumulate((1 + len(guess) for guess in guesses), initial=0))
    right, place, stand = list(range(len(given))), 0, dict[int, int]()
    while right:
        here = [given[n] for n in right]
        rows.take(logits[[starts[n] + place for n in right]], here)
        picked = dict(zip(right, rows.last[here].tolist(), strict=True))
        goes_on = [
            n for n in right if guesses[n][place : place + 1] == [picked[n]] and given[n] in rows.running
        ]
        place += 1
        stand |= {given[n]: place for n in right if n not in goes_on and place <= len(guesses[n])}
        right = goes_on
    return stand
