"""A decoder's steps as results for whole sequences, which are compared with those of the whole model.

A prompt of every length is prefilled and the rest decoded token by token, all rows together; then each row
alone. The whole model is called for the same rows, and where a mask hides tokens, for each row without them.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attngraph.api.arguments import by_name
from attngraph.api.verify.matched import Matched
from attngraph.api.verify.verdict import Difference, Incomparable
from attngraph.runtime.verify import logits_of_tokens

SHORT = 9
"""Prompts of up to so many tokens are split at every token, longer ones in the middle."""
_OF_TOKENS = "decoder_"
"""What the names of the tokens and their mask begin with in a model that has an encoder too."""


class ByWay(dict[str, Tensor]):
    """Logits, `[B, T, V]`, by how they were computed; 0 at tokens that are not compared."""


class Way(NamedTuple):
    """Which rows are computed together, and how many tokens of each are prefilled."""

    rows: list[int]
    first: int
    alone: bool

    def __str__(self) -> str:
        alone = f" of row {self.rows[0]} alone" if self.alone else ""
        return f"the logits{alone}, {self.first} token(s) prefilled and the others decoded one by one,"


@dataclasses.dataclass(frozen=True)
class Given:
    """The arguments of a call by name, and the name of those that are the tokens, `[B, T, ...]`."""

    name: str
    inputs: dict[str, Any]

    @property
    def ids(self) -> Tensor:
        found: Tensor = self.inputs[self.name]
        return found

    @property
    def mask(self) -> Tensor:
        """Which tokens are real, bool `[B, T]`."""
        given = self.inputs.get(self.mask_name)
        return torch.ones(self.ids.shape[:2], dtype=torch.bool) if given is None else given.bool()

    @property
    def mask_name(self) -> str:
        return f"{_OF_TOKENS if self.name.startswith(_OF_TOKENS) else ''}attention_mask"

    @property
    def others(self) -> dict[str, Any]:
        return {n: v for n, v in self.inputs.items() if n != self.name}

    def is_by_token(self, name: str) -> bool:
        """Whether an argument has an entry for every token. An encoder's has not, in a model that has one."""
        value, prefix = self.inputs[name], _OF_TOKENS if self.name.startswith(_OF_TOKENS) else ""
        return isinstance(value, Tensor) and value.shape[:2] == self.ids.shape[:2] and name.startswith(prefix)

    def taken(self, rows: Sequence[int], tokens: slice | Tensor = slice(None)) -> "Given":
        """The same call for some rows and tokens."""

        def part(name: str, value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.ndim or len(value) != len(self.ids):
                return value
            return value[list(rows)][:, tokens] if self.is_by_token(name) else value[list(rows)]

        return Given(self.name, {n: part(n, v) for n, v in self.inputs.items()})


class Sequences(nn.Module):
    """One side. `late`: the steps give no logits before those of a prompt's last token. `most`: so many ways
    are enough."""

    def __init__(self, side: Any, signature: inspect.Signature, late: bool) -> None:
        super().__init__()
        self.side, self.signature, self.late = side, signature, late
        self.most: int | None = None

    def forward(self, *args: Any, **kwargs: Any) -> ByWay:
        given, found = self.read(args, kwargs), ByWay()
        ways = itertools.islice(self.ways(given), self.most)
        for rows, several in itertools.groupby(ways, lambda way: way.rows):
            own, group = given.taken(rows), [*several]
            for way, logits in zip(group, self.logits(own, group), strict=True):
                seen = own.mask.clone()
                seen[:, : way.first - 1 if self.late else 0] = False
                found[str(way)] = torch.where(seen[..., None].to(logits.device), logits, 0)
        if not found:
            raise ValueError("every prompt has rows of hidden tokens alone, or is followed by hidden tokens")
        return found

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """A call's arguments by the names that the model has for them."""
        inputs = by_name(self.signature, args, kwargs)
        tensors = [n for n, v in inputs.items() if isinstance(v, Tensor) and not n.endswith("mask")]
        return Given(([n for n in tensors if n.startswith(_OF_TOKENS)] or tensors)[0], inputs)

    def ways(self, given: Given) -> Iterator[Way]:
        rows, tokens = given.ids.shape[:2]
        for first in range(1, tokens + 1) if tokens <= SHORT else (tokens // 2, tokens):
            begins = given.mask[:, :first].any(1) & given.mask[:, first:].all(1)
            if not self.late or bool(begins.all()):  # `generate` goes on from a real token, without padding
                yield Way([*range(rows)], first, False)
        for row in range(rows) if rows > 1 else ():
            if bool(given.mask[row].all()):
                yield Way([row], max(1, tokens // 2), True)

    def logits(self, given: Given, ways: Sequence[Way]) -> Iterator[Tensor]:
        """The logits of all tokens, `[B, T, V]`, for each way."""
        raise NotImplementedError


class Whole(Sequences):
    """The whole model, called for the same rows and tokens."""

    def logits(self, given: Given, ways: Sequence[Way]) -> Iterator[Tensor]:
        yield from [self._of(given)] * len(ways)

    def _of(self, given: Given) -> Tensor:
        if bool(given.mask.all()):
            rows, tokens = range(len(given.ids)), given.ids.shape[1]
            return logits_of_tokens(lambda end: self.side(**given.taken(rows, slice(end)).inputs), tokens)
        found: Tensor | None = None
        for row, real in enumerate(given.mask):
            if real.any():
                logits = self._of(given.taken([row], real))
                found = logits.new_zeros(*given.mask.shape, *logits.shape[2:]) if found is None else found
                found[row, real] = logits[0]
        return torch.zeros(*given.mask.shape, 1) if found is None else found


class Steps(Sequences):
    """The decoder, call by call."""

    untraced = "it has steps alone"

    def logits(self, given: Given, ways: Sequence[Way]) -> Iterator[Tensor]:
        rows, tokens = range(len(given.ids)), given.ids.shape[1]
        for first in (way.first for way in ways):
            if self.late:
                found = [self.side.in_steps(given.ids, first, **given.others)]
                found.insert(0, found[0].new_zeros(len(rows), first - 1, *found[0].shape[2:]))
            else:
                prompt = given.taken(rows, slice(first))
                logits, state = self.side.prefill(prompt.ids, **prompt.others)
                found = [logits]
                for token in range(first, tokens):
                    new = given.taken(rows, slice(token, token + 1))
                    by_token = {n: v for n, v in new.others.items() if given.is_by_token(n)}
                    found.append(self.side.decode(new.ids, state, **by_token))
            yield torch.cat(found, 1)


def is_decoder(side: Any) -> bool:
    """Whether a side computes tokens step by step: it has `in_steps`, or `prefill` and `decode`."""
    has = {name for name in ("in_steps", "prefill", "decode") if callable(getattr(side, name, None))}
    return "in_steps" in has or has >= {"prefill", "decode"}


def require_exact(candidate: Any) -> None:
    """Refuse a decoder whose steps are not those of its model."""
    config = getattr(candidate, "config_of_cache", None)
    if is_decoder(candidate) and getattr(config, "rounded", None):
        why = "its cache rounds, so its steps are not the model's"
        said = f"{why}: `drift` of the decoder says how far they are"
        raise Incomparable(Difference("call", said, code="cache-rounds"))


def as_sequences(matched: Matched) -> Matched:
    """Both sides as functions of the whole model's arguments, which return the logits of every way."""
    model, decoder = matched.reference, matched.candidate
    signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    late = hasattr(decoder, "in_steps")
    whole, steps = Whole(model, signature, late), Steps(decoder, signature, late)
    return dataclasses.replace(matched, reference=whole, candidate=steps)
