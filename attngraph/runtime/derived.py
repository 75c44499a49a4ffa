"""The graphs over a cache that are derived for a model: one for each kind of call, at the first such call.

Calls are of one kind if their keys are equal, as for graphs of whole sequences. A graph is traced with an
example of two rows of a few tokens, which is made from the call. Where the trace depends on the number of
tokens, that number is chosen such that it can be told from every other number in the graph.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.capture.compared import SIZES
from attngraph.capture.guards import call_key
from attngraph.capture.state.scope import Scope
from attngraph.capture.structure import Spread, flatten
from attngraph.capture.trace_lock import LOCK
from attngraph.errors import AttnGraphError, CacheError, DisagreementError, NoDecoderError
from attngraph.ir import budgets
from attngraph.runtime.fingerprints import Fingerprints
from attngraph.runtime.generation_options import DECODER_IDS
from attngraph.runtime.kv_cache import KVCache
from attngraph.runtime.packing import Packed
from attngraph.runtime.step import Step

log = logging.getLogger(__name__)
EXAMPLE_ROWS, EXAMPLE_TOKENS = 2, 9
MASK = "attention_mask"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class DerivedSteps:
    """The derived graphs of one decoder.

    Args:
        derive: derives a graph, given the name of the tokens' argument and arguments to trace with.
        tokens: the model's argument that takes the tokens, if the user has named it.
    """

    def __init__(self, model: Callable[..., Any], derive: Callable[..., Step], tokens: str | None) -> None:
        self._model, self._derive, self._tokens = model, derive, tokens
        self._signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
        self._fingerprints = Fingerprints(model)
        self._kept: dict[Any, Step] = {}

    @property
    def latest(self) -> Step | None:
        """The graph that was derived last."""
        return next(reversed(self._kept.values()), None)

    def all(self) -> tuple[Step, ...]:
        return tuple(self._kept.values())

    def of_state(self, state: KVCache) -> Step:
        """The graph that goes on with a state.

        Raises:
            CacheError: the state was loaded from a file, and no graph is for it; or it is another rank's.
        """
        found: Step | None = state.step
        if found is not None:
            return found
        known = [s for s in self._kept.values() if s.plan == state.plan]
        if known and known[-1].ranks.rank != state.rank:
            raise CacheError(_of_another_rank(state.rank, known[-1].ranks.rank))
        if not known:
            raise CacheError(
                "this state was loaded, and the decoder has not been derived for it yet: call prefill "
                "with a prompt of the same kind once."
            )
        return known[-1]

    def argument(self, inputs: Mapping[str, Any]) -> str:
        """The model's argument that takes the tokens."""
        names = list(self._signature.parameters)
        asked = self._tokens
        if asked is not None:
            if asked not in names:
                raise ValueError(f"the model has no argument {asked!r}; it has {', '.join(names)}.")
            return asked
        if DECODER_IDS in names:
            return DECODER_IDS
        found = next((n for n in names if n not in inputs and n not in ("args", "kwargs")), None)
        if found is None:
            raise ValueError(
                "the model has no argument left for the tokens; CacheConfig(tokens=...) names it."
            )
        return found

    def of_call(self, packed: Packed, inputs: Mapping[str, Any]) -> Step:
        """The derived graph for calls like this one; derived now if there is none yet."""
        model = self._model
        if isinstance(model, nn.Module) and model.training:
            raise NoDecoderError("the model is in training mode. Call model.eval() first.")
        name = self.argument(inputs)
        unknown = set(inputs) - set(self._signature.parameters)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self._signature.parameters.values())
        if unknown and not takes_any:
            raise TypeError(f"the model's forward takes no {', '.join(sorted(unknown))}.")
        self._require_arguments({name, *inputs})
        leaves, spec = flatten({name: packed.ids, **dict(sorted(inputs.items()))})
        width = tuple(packed.ids.shape[2:])

        def key(scope: Scope) -> Any:
            return scope, call_key(leaves, spec, self._fingerprints, scope), width

        with LOCK.call():
            found = self._valid(key)
        if found is not None:
            return found
        with LOCK.trace():
            found = self._valid(key)  # another thread may have derived it meanwhile
            if found is None:
                found = self._derived(name, packed, inputs)
                with torch.no_grad():
                    kept_as = key(found.scope)
                self._kept.pop(kept_as, None)
                self._kept[kept_as] = found
                while len(self._kept) > budgets.GRAPHS_KEPT:
                    self._kept.pop(next(iter(self._kept)))
            return found

    def _require_arguments(self, given: Collection[str]) -> None:
        """Raise TypeError if the model's forward needs arguments that are not given."""
        needed = [
            n for n, p in self._signature.parameters.items() if p.default is p.empty and p.kind in _NAMED
        ]
        missing = [n for n in needed if n not in given]
        if MASK in missing:
            raise TypeError(
                f"the model's forward needs {MASK}, and a decoder gives it none: padding is removed before. "
                f"Let forward do without ({MASK}=None)."
            )
        if missing:
            raise TypeError(
                f"the model's forward needs {', '.join(missing)} as well: give it by name ({missing[0]}=...)."
            )

    def _valid(self, key: Callable[[Scope], Any]) -> Step | None:
        """A step that was derived for this call, if the buffers that it relies on are unchanged. `key`: of
        the call, without some attributes."""
        for scope in {step.scope for step in tuple(self._kept.values())}:
            found = self._kept.get(key(scope))
            if found is not None and found.is_valid():
                return found
        return None

    def _derived(self, name: str, packed: Packed, inputs: Mapping[str, Any]) -> Step:
        """A new step. Inputs as long as the prompt are cut to the example's length. They may be that long by
        coincidence, so if deriving fails, it is tried again with an example as long as the prompt."""
        width = packed.shape[1]
        inputs = {
            n: Spread(v.flatten(1), v.ndim - 2) if isinstance(v, Tensor) and _is_spread(v, width) else v
            for n, v in inputs.items()
        }
        as_long = [v for v in inputs.values() if isinstance(v, Tensor) and v.shape[1:2] == (width,)]
        try:
            return self._derive(name, self._example(name, packed, inputs, EXAMPLE_TOKENS))
        except DisagreementError:
            raise
        except AttnGraphError as problem:
            if isinstance(problem, NoDecoderError) and problem.fixes_tokens:
                try:
                    return self._of_one_length(name, packed, inputs, problem.extents)
                except NoDecoderError as other:
                    return self._compared(name, packed, inputs, other)
            if isinstance(problem, NoDecoderError) and problem.fixes_rows:
                return self._compared(name, packed, inputs, problem)
            if as_long and width not in (1, EXAMPLE_TOKENS):
                with contextlib.suppress(AttnGraphError):
                    return self._derive(name, self._example(name, packed, inputs, width))
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
        self, name: str, packed: Packed, inputs: Mapping[str, Any], extents: frozenset[int]
    ) -> Step:
        """A step of a graph for one number of tokens, which can be told from every other number in it. Where
        that takes a trace for another number as well, this one is told what the first computed with."""
        multiples = frozenset[int]()
        while True:
            count = self._distinct(extents)
            example = self._example(name, packed, inputs, count)
            try:
                return self._derive(name, example, distinct=count, multiples=multiples)
            except NoDecoderError as problem:
                found = frozenset(n // count for n in problem.extents if n % count == 0)
                if found <= multiples:
                    raise
                multiples, extents = multiples | found, extents | problem.extents

    def _compared(
        self, name: str, packed: Packed, inputs: Mapping[str, Any], problem: NoDecoderError
    ) -> Step:
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
                return self._derive(name, examples[0], examples=examples, alone=alone)
            except AttnGraphError as other:
                log.info("no decoder by comparing traces either: %s", other)
        raise problem

    def _distinct(self, extents: frozenset[int]) -> int:
        """A number of tokens that divides no size of the model's tensors but 0, and none of `extents`."""
        tensors = (
            t for m in [self._model] if isinstance(m, nn.Module) for t in (*m.parameters(), *m.buffers())
        )
        sizes = ({n for t in tensors for n in t.shape} | extents) - {0}
        primes = (p for p in range(11, 200, 2) if all(p % n for n in (3, 5, 7, 11, 13) if n != p))
        return next((p for p in primes if all(n % p for n in sizes)), 29)

    def _example(
        self, name: str, packed: Packed, inputs: Mapping[str, Any], tokens: int, rows: int = EXAMPLE_ROWS
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


def _of_another_rank(saved: tuple[int, int], own: tuple[int, int]) -> str:
    (rank, ranks), (mine, of) = saved, own
    return (
        f"this state was saved by rank {rank} of {ranks}, and this is rank {mine} of {of}. What to do: give "
        "each rank a file of its own."
    )
