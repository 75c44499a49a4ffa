"""Examples to derive a decoder's graph from, made from a call: two rows of a few tokens.

How many tokens the example has is ours to choose, but the model must take so many, and do with them what it
does with the call's. Where the trace depends on the number of tokens, that number is chosen such that it can
be told from every other number in the graph.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attngraph.capture.compared import SIZES
from attngraph.capture.first_call import without_data
from attngraph.capture.structure import Spread
from attngraph.capture.trace import quiet
from attngraph.errors import AttnGraphError, DisagreementError, NoDecoderError
from attngraph.runtime.packing import Packed
from attngraph.runtime.step import Step

log = logging.getLogger(__name__)
ROWS, TOKENS = 2, 9
OTHERS = (8, 12, 16, 6, 5, 4, 3)
"""Numbers of tokens that are tried where the model takes no example of `TOKENS`."""


class Size(NamedTuple):
    """The size of an example, and whether the graph is to be for calls of a single sequence."""

    tokens: int = TOKENS
    rows: int = ROWS
    single: bool = False


class Examples:
    """Derives graphs for one model.

    Args:
        derive: derives a graph, given the name of the tokens' argument and arguments to trace with.
    """

    def __init__(
        self, model: Callable[..., Any], derive: Callable[..., Step], signature: inspect.Signature
    ) -> None:
        self._model, self._derive, self._signature = model, derive, signature

    def others(self, name: str, packed: Packed, inputs: Mapping[str, Any]) -> Iterator[Size]:
        """Sizes from which a call like this one may be derived, if the model takes no example of `TOKENS`, or
        of a few more: multiples of the call's number of tokens and others, of those that it takes."""
        if self._accepts(name, packed, inputs, TOKENS) and self._accepts(name, packed, inputs, TOKENS + 2):
            return
        longest = max(packed.counts)
        own = {n: None for n in (longest * -(-TOKENS // (longest + 1)), longest) if n > 2}
        for count in dict.fromkeys((*own, *OTHERS)):
            if count != TOKENS and self._accepts(name, packed, inputs, count):
                yield Size(count)

    def _accepts(self, name: str, packed: Packed, inputs: Mapping[str, Any], tokens: int) -> bool:
        """Whether the model runs with so many tokens, found without data."""
        example = self._example(name, packed, inputs, tokens)
        given = {n: v.tensor if isinstance(v, Spread) else v for n, v in example.items()}
        try:
            with quiet(), without_data(self._model, (), given) as run, torch.no_grad():
                run()
        except Exception:  # it takes no so many, or needs data
            return False
        return True

    def derived(
        self, name: str, packed: Packed, inputs: Mapping[str, Any], size: Size, fits: Callable[[Step], bool]
    ) -> Step:
        """A step from an example of this size. Inputs as long as the prompt are cut to its length. They may
        be that long by coincidence, so if deriving fails, it is tried again with an example as long as the
        prompt. `fits`: whether one that was derived in another process will do."""
        tokens, rows, single = size
        rows += rows == tokens  # sizes that are equal would be one symbol
        derive = functools.partial(self._derive, name, fits=fits, single=single)
        width = packed.shape[1]
        inputs = {
            n: Spread(v.flatten(1), v.ndim - 2) if isinstance(v, Tensor) and _is_spread(v, width) else v
            for n, v in inputs.items()
        }
        as_long = [v for v in inputs.values() if isinstance(v, Tensor) and v.shape[1:2] == (width,)]
        try:
            return derive(self._example(name, packed, inputs, tokens, rows))
        except DisagreementError:
            raise
        except AttnGraphError as problem:
            if isinstance(problem, NoDecoderError) and problem.fixes_tokens:
                try:
                    return self._of_one_length(name, packed, inputs, problem.extents, derive)
                except NoDecoderError as other:
                    return self._compared(name, packed, inputs, other, fits)
            if isinstance(problem, NoDecoderError) and problem.fixes_rows:
                return self._compared(name, packed, inputs, problem, fits)
            if as_long and width not in (1, tokens):
                with contextlib.suppress(AttnGraphError):
                    return derive(self._example(name, packed, inputs, width, rows))
            pairs = [n for n, v in inputs.items() if isinstance(v, Tensor) and _is_of_pairs(v, width)]
            if not pairs:
                raise
            shape = list(inputs[pairs[0]].shape)
            raise NoDecoderError(
                f"its argument {pairs[0]} is {shape}, with an entry for each pair of tokens. A decoder "
                "takes what belongs to a token, as [B, T] or [B, 1, 1, T]: give it so, and let the model "
                "combine it with its causal mask."
            ) from problem

    def _of_one_length(
        self, name: str, packed: Packed, inputs: Mapping[str, Any], extents: frozenset[int],
        derive: Callable[..., Step],
    ) -> Step:  # fmt: skip
        """A step of a graph for one number of tokens, which can be told from every other number in it. Where
        that takes a trace for another number as well, this one is told what the first computed with."""
        multiples = frozenset[int]()
        while True:
            count = self._distinct(extents, functools.partial(self._accepts, name, packed, inputs))
            example = self._example(name, packed, inputs, count)
            try:
                return derive(example, distinct=count, multiples=multiples)
            except NoDecoderError as problem:
                found = frozenset(n // count for n in problem.extents if n % count == 0)
                if found <= multiples:
                    raise
                multiples, extents = multiples | found, extents | problem.extents

    def _compared(
        self, name: str, packed: Packed, inputs: Mapping[str, Any], problem: NoDecoderError,
        fits: Callable[[Step], bool],
    ) -> Step:  # fmt: skip
        """A step of a graph that is found by comparing traces of several sizes, at last of calls with one
        sequence at a time.

        Raises:
            NoDecoderError: `problem`, if there is none either.
        """
        if any(isinstance(v, (Tensor, Spread)) for v in inputs.values()):
            raise problem  # what belongs to other sizes cannot be made up
        examples = [self._example(name, packed, inputs, tokens, rows) for rows, tokens in SIZES]
        for alone in (False, True) if problem.fixes_rows else (False,):
            try:
                return self._derive(name, examples[0], examples=examples, alone=alone, fits=fits)
            except AttnGraphError as other:
                log.info("no decoder by comparing traces either: %s", other)
        raise problem

    def _distinct(self, extents: frozenset[int], accepts: Callable[[int], bool]) -> int:
        """A number of tokens that divides no size of the model's tensors but 0, and none of `extents`;
        smaller ones where the model takes no larger ones."""
        tensors = (
            t for m in [self._model] if isinstance(m, nn.Module) for t in (*m.parameters(), *m.buffers())
        )
        sizes = ({n for t in tensors for n in t.shape} | extents) - {0}
        primes = (p for p in range(11, 200, 2) if all(p % n for n in (3, 5, 7, 11, 13) if n != p))
        found = next((p for p in primes if all(n % p for n in sizes)), 29)
        smaller = (p for p in (7, 5, 3) if all(n % p for n in sizes) and accepts(p))
        return found if accepts(found) else next(smaller, found)

    def _example(
        self, name: str, packed: Packed, inputs: Mapping[str, Any], tokens: int, rows: int = ROWS
    ) -> dict[str, Any]:
        """Arguments to trace with: `rows` of `tokens` tokens; two, because torch.export fixes sizes of 1."""
        count = packed.ids.shape[1]
        places = torch.arange(rows * tokens, device=packed.ids.device) % max(count, 1)
        if count == 0:
            raise ValueError("there are no tokens.")
        example: dict[str, Any] = {name: packed.ids[0, places].reshape(rows, tokens, *packed.ids.shape[2:])}
        own, width = packed.shape
        for other, given in inputs.items():
            value = given.tensor if isinstance(given, Spread) else given
            if isinstance(value, Tensor) and value.ndim >= 1 and value.shape[0] == own:
                value = value[torch.arange(rows, device=value.device) % own]
                if value.ndim >= 2 and value.shape[1] == width:
                    value = value[:, torch.arange(tokens, device=value.device) % width]
            example[other] = Spread(value, given.inner) if isinstance(given, Spread) else value
        if "use_cache" in self._signature.parameters and "use_cache" not in inputs:
            example["use_cache"] = False
        return example


def _is_spread(value: Tensor, tokens: int) -> bool:
    """Whether this has an entry for each token in its last dimension, as a mask `[B, 1, 1, T]` has."""
    return value.ndim >= 3 and value.shape[-1] == tokens and all(n == 1 for n in value.shape[1:-1])


def _is_of_pairs(value: Tensor, tokens: int) -> bool:
    """Whether this has an entry for each pair of tokens, as a mask `[B, 1, T, T]` has."""
    return value.ndim >= 3 and tokens > 1 and value.shape[-2:] == (tokens, tokens)
