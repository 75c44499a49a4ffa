"""A decoder: prefill, decode and generate with a model that has no cache of its own.

Rows are packed: the tokens of all sequences are concatenated into one, without padding, each with its own
position. So prompts of unequal length, padded on either side, get the same results as each would alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.capture.guards import call_key
from attngraph.capture.structure import flatten
from attngraph.capture.trace_lock import LOCK
from attngraph.errors import AttnGraphError, CacheError, NoDecoderError
from attngraph.ir import budgets
from attngraph.report.report import CompileReport
from attngraph.runtime import generate as generating
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.kv_cache import KVCache
from attngraph.runtime.step import Step

Ids = Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]
MASK, DECODER_IDS = "attention_mask", "decoder_input_ids"
EXAMPLE_ROWS, EXAMPLE_TOKENS = 2, 9


@dataclasses.dataclass(frozen=True)
class Packed:
    """Packed tokens of several rows. `ids`: `[1, N]` (or `[1, N, C]`); `counts`: tokens of each row; `mask`:
    their places in the caller's layout, `[B, T]`."""

    ids: Tensor
    counts: list[int]
    mask: Tensor

    def last(self) -> Tensor:
        """The packed index of each row's last token, for rows that have tokens."""
        ends = torch.tensor(self.counts).cumsum(0) - 1
        return ends[torch.tensor(self.counts) > 0].to(self.ids.device)


class Decoder(nn.Module):
    """What `attngraph.compile(model, cache=True)` returns. Calling it runs the model on whole sequences.

    Attributes:
        report: what was fused and what is cached, for the latest derived graph.
    """

    def __init__(
        self, model: Callable[..., Any], config: CacheConfig, whole: nn.Module,
        derive: Callable[[str, dict[str, Any]], Step],
    ) -> None:  # fmt: skip
        super().__init__()
        self.whole = whole
        self.config_of_cache = config
        object.__setattr__(self, "_model", model)  # its weights are those of `whole`
        self._derive = derive
        self._steps: dict[Any, Step] = {}
        self._signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.whole(*args, **kwargs)

    @property
    def report(self) -> CompileReport:
        """The report of the latest derived decoder; before the first, of the compiled model."""
        if self._steps:
            return next(reversed(self._steps.values())).report
        return self.whole.report  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "whole" in self.__dict__.get("_modules", {}):
                return getattr(self.whole, name)
            raise

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of the model itself."""
        return self.whole.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict into the model itself."""
        return self.whole.load_state_dict(*args, **kwargs)

    # --- the three calls ---

    def prefill(
        self, ids: Ids, attention_mask: Tensor | None = None, **inputs: Any
    ) -> tuple[Tensor, KVCache]:
        """Process prompts, and cache what later tokens need.

        Args:
            ids: `[B, T]` (`[T]` for one prompt, or embeddings `[B, T, C]`), or a list of prompts of any
                lengths.
            attention_mask: `[B, T]`, nonzero at real tokens; padding may be on either side and does not
                affect results. (With an encoder-decoder model it is the encoder's mask, and
                `decoder_attention_mask` is the mask of the tokens.)
            inputs: the model's other arguments.

        Returns:
            The logits, `[B, T, V]` (zeros at padding), and the state.

        Raises:
            NoDecoderError: no decoder can be derived; says why and where. CacheError: the prompts do not fit.
        """
        packed = self.pack(ids, self._mask(attention_mask, inputs))
        step = self._step(packed, inputs)
        state = self._begin(step, packed, inputs)
        with torch.no_grad():
            logits = step.advance(state, packed.counts, self._arguments(step, packed, inputs))
        return _unpacked(logits, packed), state

    def decode(
        self, next_ids: Ids, state: KVCache, attention_mask: Tensor | None = None, **inputs: Any
    ) -> Tensor:
        """Compute one or several new tokens of every row.

        Args:
            next_ids: `[B]` or `[B, S]`, or a list with each row's new tokens.
            state: modified in place; `KVCache` has methods to remove tokens, copy, reorder and save it.
            attention_mask: `[B, S]`, nonzero at real tokens.
            inputs: the model's other arguments that have an entry for every token.

        Returns:
            The logits, `[B, S, V]`.

        Raises:
            CacheError: the tokens do not fit; the state is unchanged.
        """
        if isinstance(next_ids, Tensor) and next_ids.ndim == 1 and not next_ids.is_floating_point():
            next_ids = next_ids.unsqueeze(1)
        packed = self.pack(next_ids, attention_mask)
        step = self._of(state)
        if len(packed.counts) != state.rows:
            raise CacheError(f"tokens for {len(packed.counts)} row(s), but the state has {state.rows}.")
        if packed.ids.shape[1] == 0:
            return step.nothing(state, packed.mask.shape)
        with torch.no_grad():
            logits = step.advance(state, packed.counts, self._arguments(step, packed, inputs))
        return _unpacked(logits, packed)

    def generate(
        self, ids: Ids, max_new_tokens: int = 64, temperature: float = 0.0, top_k: int | None = None,
        top_p: float | None = None, num_beams: int = 1, eos_token_id: int | Sequence[int] | None = None,
        seed: int | None = None, pad_token_id: int | None = None, length_penalty: float = 1.0,
        attention_mask: Tensor | None = None, **inputs: Any,
    ) -> Tensor:  # fmt: skip
        """Continue prompts.

        Args:
            ids, attention_mask, inputs: as for `prefill`.
            temperature: 0 takes the most likely token; otherwise logits are divided by it and sampled.
            top_k: sample from the k most likely tokens. top_p: from the fewest tokens whose probabilities sum
                to at least p.
            num_beams: more than 1 means beam search: beams are ranked by the sum of log-probabilities divided
                by length ** length_penalty, with the number of new tokens as length.
            eos_token_id: one or more tokens that end a row. pad_token_id: fills rows that ended earlier
                (default: the first end token if there is one, else 0).
            seed: of sampling; the same seed gives the same tokens.

        Returns:
            int64 `[B, T + new]`: the prompts as given (a list: padded on the left), then the new tokens.

        Raises:
            ValueError: an option is out of range. NoDecoderError, CacheError: as for `prefill`.
        """
        options = generating.Options(
            max_new_tokens, temperature, top_k, top_p, num_beams,
            generating.as_tokens(eos_token_id), seed, pad_token_id, length_penalty,
        )  # fmt: skip
        packed = self.pack(ids, self._mask(attention_mask, inputs))
        if min(packed.counts, default=1) == 0:
            raise ValueError("a prompt has no tokens; give each at least one to begin with.")
        step = self._step(packed, inputs)
        state = self._begin(step, packed, inputs)
        extra = step.arguments - {step.name}
        unknown = extra - {MASK}
        if unknown:
            raise ValueError(
                f"generate cannot make up what the model's argument(s) {', '.join(sorted(unknown))} bring "
                "for new tokens; call prefill and decode."
            )
        with torch.no_grad():
            arguments = self._arguments(step, packed, inputs)
            first = step.advance(state, packed.counts, arguments, packed.last())[0]

            def advance(tokens: Tensor, counts: list[int]) -> Tensor:
                one = Packed(tokens.unsqueeze(0), counts, torch.ones(1))
                return step.advance(state, counts, self._arguments(step, one, {}))[0]

            new = generating.generate(first, advance, state, options)
        return torch.cat([self._given(ids, packed, options), new], 1)

    def _given(self, ids: Ids, packed: Packed, options: Any) -> Tensor:
        if isinstance(ids, Tensor):
            return ids.unsqueeze(0) if ids.ndim == 1 else ids
        rows = torch.split(packed.ids[0], packed.counts)
        longest = max(packed.counts)
        return torch.stack([nn.functional.pad(r, (longest - len(r), 0), value=options.pad) for r in rows])

    # --- parts ---

    def _mask(self, mask: Tensor | None, inputs: dict[str, Any]) -> Tensor | None:
        """The mask of the tokens. In an encoder-decoder model `attention_mask` is an ordinary input, and the
        mask of the decoder's tokens is called `decoder_attention_mask`."""
        if self._name(inputs) != DECODER_IDS:
            return mask
        if mask is not None:
            inputs[MASK] = mask
        found: Tensor | None = inputs.pop(f"decoder_{MASK}", None)
        return found

    def pack(self, ids: Ids, mask: Tensor | None) -> Packed:
        """All real tokens, packed.

        Raises:
            ValueError: the shapes do not fit.
        """
        if not isinstance(ids, Tensor):
            if mask is not None:
                raise ValueError("a list of prompts has no padding, so no attention_mask.")
            rows = [torch.as_tensor(row) for row in ids]
            rows = [torch.stack(rows)] if rows and rows[0].ndim == 0 else rows
            counts = [len(row) for row in rows]
            if not rows:
                raise ValueError("there are no prompts.")
            kept = torch.arange(max(counts)) < torch.tensor(counts).unsqueeze(1)
            device = self._device()
            return Packed(torch.cat(rows).unsqueeze(0).to(device), counts, kept.to(device))
        rank = 3 if ids.is_floating_point() else 2
        if ids.ndim == rank - 1:
            ids, mask = ids.unsqueeze(0), None if mask is None else mask.reshape(1, -1)
        if ids.ndim != rank or 0 in ids.shape[:1]:
            raise ValueError(f"tokens must be [batch, tokens], found {tuple(ids.shape)}.")
        if mask is None:
            kept = torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device)
            return Packed(ids.flatten(0, 1).unsqueeze(0), [ids.shape[1]] * ids.shape[0], kept)
        if mask.shape != ids.shape[:2]:
            raise ValueError(f"attention_mask is {tuple(mask.shape)}, the tokens are {tuple(ids.shape[:2])}.")
        kept = mask.to(device=ids.device) != 0
        return Packed(ids[kept].unsqueeze(0), kept.sum(1).tolist(), kept)

    def _device(self) -> torch.device:
        parameters = self._model.parameters() if isinstance(self._model, nn.Module) else iter(())
        return next((p.device for p in parameters), torch.device("cpu"))

    def _name(self, inputs: Mapping[str, Any]) -> str:
        """The model's argument that takes the tokens."""
        names = list(self._signature.parameters)
        asked = self.config_of_cache.tokens
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

    def _step(self, packed: Packed, inputs: Mapping[str, Any]) -> Step:
        """The derived graph for calls like this one; derived now if there is none yet."""
        model = self._model
        if isinstance(model, nn.Module) and model.training:
            raise NoDecoderError("the model is in training mode. Call model.eval() first.")
        name = self._name(inputs)
        unknown = set(inputs) - set(self._signature.parameters)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self._signature.parameters.values())
        if unknown and not takes_any:
            raise TypeError(f"the model's forward takes no {', '.join(sorted(unknown))}.")
        leaves, spec = flatten({name: packed.ids, **dict(sorted(inputs.items()))})
        with LOCK.call(), torch.no_grad():
            key = call_key(leaves, spec, model), tuple(packed.ids.shape[2:])
            found = self._valid(key)
        if found is not None:
            return found
        with LOCK.trace():
            found = self._valid(key)  # another thread may have derived it meanwhile
            if found is None:
                found = self._derived(name, packed, inputs)
                self._steps.pop(key, None)
                self._steps[key] = found
                while len(self._steps) > budgets.GRAPHS_KEPT:
                    self._steps.pop(next(iter(self._steps)))
            return found

    def _valid(self, key: Any) -> Step | None:
        """The step that was derived for this key, if the buffers that it relies on are unchanged."""
        found = self._steps.get(key)
        return found if found is not None and found.is_valid() else None

    def _derived(self, name: str, packed: Packed, inputs: Mapping[str, Any]) -> Step:
        """A new step. Inputs as long as the prompt are cut to the example's length. They may be that long by
        coincidence, so if deriving fails, it is tried again with an example as long as the prompt."""
        width = packed.mask.shape[1]
        as_long = [v for v in inputs.values() if isinstance(v, Tensor) and v.shape[1:2] == (width,)]
        with torch.no_grad():
            try:
                return self._derive(name, self._example(name, packed, inputs, EXAMPLE_TOKENS))
            except AttnGraphError:
                if not as_long or width in (1, EXAMPLE_TOKENS):
                    raise
                with contextlib.suppress(AttnGraphError):
                    return self._derive(name, self._example(name, packed, inputs, width))
                raise

    def _example(self, name: str, packed: Packed, inputs: Mapping[str, Any], tokens: int) -> dict[str, Any]:
        """Arguments to trace with: two rows of `tokens` tokens, because torch.export fixes sizes of 1."""
        count = packed.ids.shape[1]
        places = torch.arange(EXAMPLE_ROWS * tokens, device=packed.ids.device) % max(count, 1)
        if count == 0:
            raise ValueError("there are no tokens.")
        example: dict[str, Any] = {
            name: packed.ids[0, places].reshape(EXAMPLE_ROWS, tokens, *packed.ids.shape[2:])
        }
        rows, width = packed.mask.shape
        for other, value in inputs.items():
            if isinstance(value, Tensor) and value.ndim >= 1 and value.shape[0] == rows:
                value = value[torch.arange(EXAMPLE_ROWS, device=value.device) % rows]
                if value.ndim >= 2 and value.shape[1] == width:
                    value = value[:, torch.arange(tokens, device=value.device) % width]
            example[other] = value
        if "use_cache" in self._signature.parameters and "use_cache" not in inputs:
            example["use_cache"] = False
        return example

    def new_state(self, packed: Packed, rows: int, layout: str | None = None) -> KVCache:
        """An empty state of so many rows for tokens like these."""
        step, config = self._step(packed, {}), self.config_of_cache
        if layout is not None:
            config = dataclasses.replace(config, layout=layout)
        state = KVCache(step.plan, rows, config, packed.ids.device, step.limit)
        state.step = step
        return state

    def _begin(self, step: Step, packed: Packed, inputs: Mapping[str, Any]) -> KVCache:
        state = KVCache(step.plan, len(packed.counts), self.config_of_cache, packed.ids.device, step.limit)
        state.step = step
        with torch.no_grad():
            step.begin(state, {n: inputs[n] for n in step.prompt_arguments})
        return state

    def _of(self, state: KVCache) -> Step:
        found: Step | None = state.step
        if found is None:
            known = [s for s in self._steps.values() if s.plan == state.plan]
            if not known:
                raise CacheError(
                    "this state was loaded, and the decoder has not been derived for it yet: call prefill "
                    "with a prompt of the same kind once."
                )
            found = known[-1]
        return found

    def _arguments(self, step: Step, packed: Packed, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The step's arguments that have an entry for every token, packed like the tokens."""
        found: dict[str, Tensor] = {}
        for name in step.arguments:
            if name == step.name:
                found[name] = packed.ids
            elif name in inputs:
                value = inputs[name]
                if value.shape[:2] != packed.mask.shape:
                    raise ValueError(
                        f"{name} is {tuple(value.shape)}, the tokens {tuple(packed.mask.shape)}."
                    )
                found[name] = value[packed.mask].unsqueeze(0)
            elif name == MASK:
                found[name] = torch.ones(packed.ids.shape[:2], dtype=torch.int64, device=packed.ids.device)
            else:
                raise ValueError(f"the model needs {name} for every token; give it to decode as well.")
        return found


def _unpacked(logits: Tensor, packed: Packed) -> Tensor:
    """The logits `[1, N, V]` in the caller's layout, `[B, T, V]`, with zeros at padding."""
    rows, width = packed.mask.shape
    if len(set(packed.counts)) == 1 and packed.counts[0] == width:
        return logits[0].reshape(rows, width, *logits.shape[2:])
    found = logits.new_zeros((rows, width, *logits.shape[2:]))
    found[packed.mask] = logits[0]
    return found
