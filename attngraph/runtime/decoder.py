"""A decoder: prefill, decode and generate with a model that has no cache of its own.

Rows are packed: the tokens of all sequences are concatenated into one, without padding, each with its own
position. So prompts of unequal length, padded on either side, get the same results as each would alone.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.errors import CacheError
from attngraph.ir.modes import serving
from attngraph.ir.ops.logprobs import logprobs
from attngraph.report.cache_entry import Drift
from attngraph.report.report import CompileReport, with_remarks
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.derived import MASK, DerivedSteps
from attngraph.runtime.devices import ONE, OneDevice
from attngraph.runtime.generate import generate, renewing, search
from attngraph.runtime.generation_options import (
    DECODER_IDS,
    Options,
    embeddings_in,
    prompts_of,
    read_options,
    tokens_of,
)
from attngraph.runtime.kv_cache import KVCache
from attngraph.runtime.packing import Ids, Packed, as_given, pack, unpacked
from attngraph.runtime.proof import drift_between
from attngraph.runtime.step import Step
from attngraph.runtime.wrapper import ModelWrapper


class Decoder(ModelWrapper):
    """What `attngraph.compile(model, cache=True)` returns. Calling it runs the model on whole sequences.

    Its weights, state dict and attributes are the model's.

    Attributes:
        report: what was fused and what is cached, for the latest derived graph.
    """

    whole: nn.Module
    config_of_cache: CacheConfig
    _derived: DerivedSteps
    _save: Callable[[str | Path, Sequence[Step], bool], Path]
    _again: Callable[[Any], "Decoder"]
    devices: OneDevice

    def __init__(
        self, model: Callable[..., Any], config: CacheConfig, whole: nn.Module,
        derive: Callable[..., Step], save: Callable[[str | Path, Sequence[Step], bool], Path],
        again: Callable[[Any], "Decoder"], devices: OneDevice = ONE,
    ) -> None:  # fmt: skip
        """`again`: makes a decoder for a copy of `whole`."""
        super().__init__(model)
        object.__setattr__(self, "whole", whole)  # no submodule: its weights are the model's
        self.config_of_cache = config
        self._derived = DerivedSteps(model, derive, config.tokens)
        self._save = save
        self._again = again
        self.devices = devices

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.whole(*args, **kwargs)

    @property
    def report(self) -> CompileReport:
        """The report of the latest derived decoder; before the first, of the compiled model."""
        latest = self._derived.latest
        return self.whole.report if latest is None else with_remarks(latest.report)  # type: ignore[return-value]

    def save(self, path: str | Path, weights: bool = False) -> Path:
        """Write what was derived into a folder, for `attngraph.load`.

        Args:
            path: a new folder, or one of an earlier `save`, which is replaced. weights: also the model's
                weights, as safetensors.

        Raises:
            SavedError: nothing has been derived yet, it has no form in files, or they cannot be written.
        """
        return self._save(path, self._derived.all(), weights)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Decoder":
        """A copy has the model and the options; what was derived is derived again."""
        return self._again(copy.deepcopy(self.whole, memo))

    # --- the three calls ---

    @serving
    def prefill(
        self, ids: Ids | None = None, attention_mask: Tensor | None = None, **inputs: Any
    ) -> tuple[Tensor, KVCache]:
        """Process prompts, and cache what later tokens need.

        Args:
            ids: `[B, T]` (`[T]` for one prompt, or embeddings `[B, T, C]`), or a list of prompts of any
                lengths. They may also be given by the name that the model has for them
                (`inputs_embeds=...`). Behind embeddings, ids go on where the model takes what one of its
                embedding layers makes of them for the ids themselves.
            attention_mask: `[B, T]`, nonzero at real tokens; padding may be on either side and does not
                affect results. (With an encoder-decoder model it is the encoder's mask, and
                `decoder_attention_mask` is the mask of the tokens.)
            inputs: the model's other arguments. Those with an entry for every token may have rows and tokens
                in any two dimensions, or one entry for all rows (`[T]`, `[1, T]`, `[3, B, T]`).

        Returns:
            The logits, `[B, T, V]` (zeros at padding), and the state.

        Raises:
            NoDecoderError: no decoder can be derived; says why and where. CacheError: the prompts do not fit.
        """
        self.devices.agree("prefill", ids, attention_mask, inputs)
        name = embeddings_in(inputs, self._derived.signature) if ids is None else ""
        if ids is None:
            asked = name or self.config_of_cache.tokens
            ids = tokens_of(self._derived.signature, asked, inputs)
        packed = self.pack(ids, self._mask(attention_mask, inputs), name)
        step = self._derived.of_call(packed, inputs)
        logits, state = self._begin(step, packed, inputs)
        return unpacked(logits, packed), state

    @serving
    def logprobs(self, ids: Ids, attention_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """The log-probability of each token after those before it, `[B, T]`; 0 for first tokens and padding.

        With `consistent=True` these are the bits of `attngraph.logprobs(logits, tokens)` for the logits that
        `prefill` and `decode` give. Arguments and errors are those of `prefill`.
        """
        packed = self.pack(ids, self._mask(attention_mask, inputs))
        logits, _ = self._begin(self._derived.of_call(packed, inputs), packed, inputs)
        found = logits.new_zeros(packed.ids.shape, dtype=torch.float32)
        found[:, 1:] = logprobs(logits[:, :-1], packed.ids[:, 1:])
        starts = list(itertools.accumulate(packed.counts, initial=0))
        found[:, [start for start, count in zip(starts, packed.counts, strict=False) if count]] = 0.0
        return unpacked(found.unsqueeze(-1), packed).squeeze(-1)

    @serving
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
            CacheError: the tokens do not fit, or a buffer that the decoder relies on has changed since the
                prompt; the state is unchanged.
        """
        whose = self.devices.whose(state.rank)
        self.devices.agree("decode", next_ids, attention_mask, inputs, state.lengths, whose)
        if isinstance(next_ids, Tensor) and next_ids.ndim == 1 and not next_ids.is_floating_point():
            next_ids = next_ids.unsqueeze(1)
        packed = self.pack(next_ids, attention_mask)
        step = self.step_of(state)
        if len(packed.counts) != state.rows:
            raise CacheError(f"tokens for {len(packed.counts)} row(s), but the state has {state.rows}.")
        if packed.ids.shape[1] == 0:
            return step.nothing(state, packed.shape)
        packed = self._as_in_prompt(step, packed)
        if not step.takes(packed.ids):
            raise CacheError(
                f"these tokens are {packed.ids.dtype}{list(packed.ids.shape[2:])}, and those of the prompt "
                "were not: ids go on with ids, embeddings go on with embeddings or ids. Nothing was written."
            )
        with state.changing():
            logits = step.advance(state, packed.counts, self._arguments(step, packed, inputs))
            return unpacked(logits, packed)

    @serving
    def generate(
        self, ids: Ids | None = None, max_new_tokens: int | None = None, temperature: float | None = None,
        top_k: int | None = None, top_p: float | None = None, num_beams: int = 1,
        eos_token_id: int | Sequence[int] | None = None, seed: int | None = None,
        pad_token_id: int | None = None, length_penalty: float = 1.0, attention_mask: Tensor | None = None, *,
        min_p: float | None = None, min_new_tokens: int | None = None,
        early_stopping: bool | str = False, on_token: Callable[[Tensor], Any] | None = None,
        context: str | None = None, **inputs: Any,
    ) -> Tensor:  # fmt: skip
        """Continue prompts.

        Args:
            ids, attention_mask, inputs: as for `prefill`; the prompts may also be given by the name that the
                model has for them.
            max_new_tokens: 64 by default. min_new_tokens: no end token before so many.
            temperature: 0 (the default) takes the most likely token; otherwise logits are divided by it and
                sampled.
            top_k: sample from the k most likely tokens. top_p: from the fewest tokens whose probabilities sum
                to at least p. min_p: from those at least min_p times as likely as the likeliest. Applied in
                this order, each to what the one before leaves, as in transformers.
            num_beams: more than 1 means beam search: beams are ranked by the sum of log-probabilities divided
                by length ** length_penalty, with the number of new tokens as length. early_stopping: as in
                transformers; True ends a row when num_beams beams have ended.
            eos_token_id: one or more tokens that end a row. pad_token_id: fills rows that ended earlier
                (default: the first end token if there is one, else 0).
            seed: of sampling; the same seed gives the same tokens.
            on_token: is called with each row's new token, `[B]`; returning True ends the generation.
            context: "roll" goes on past the model's own context, by computing each token anew from the last
                tokens that fit; None is an error there.
            inputs: also `max_length`, `min_length`, `do_sample`, `streamer` and `stopping_criteria`, which
                mean what they mean in transformers.

        Returns:
            int64 `[B, T + new]`: the prompts as given (a list: padded on the left), then the new tokens; of
            embeddings the new tokens alone.

        Raises:
            ValueError: an option is out of range, or asks for something that is not done here; says what to
                write instead. NoDecoderError, CacheError: as for `prefill`.
        """
        given = {
            "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
            "num_beams": num_beams, "eos_token_id": eos_token_id, "seed": seed, "pad_token_id": pad_token_id,
            "length_penalty": length_penalty, "min_p": min_p, "min_new_tokens": min_new_tokens,
            "early_stopping": early_stopping, "on_token": on_token,
        }  # fmt: skip
        self.devices.agree("generate", ids, attention_mask, context, inputs, given)
        name = embeddings_in(inputs, self._derived.signature) if ids is None else ""
        ids = prompts_of(self._model, name or self._derived.argument({}), inputs) if ids is None else ids
        packed = self.pack(ids, self._mask(attention_mask, inputs), name)
        options = read_options(packed.shape[1], given, inputs, self._derived.signature.parameters)
        if min(packed.counts, default=1) == 0:
            raise ValueError("a prompt has no tokens; give each at least one to begin with.")
        prompts = as_given(ids, packed, options.pad)
        if packed.ids.is_floating_point():
            prompts = prompts.new_empty((len(packed.counts), 0), dtype=torch.int64)
        step = self._derived.of_call(packed, inputs)
        unknown = step.arguments - {step.name, MASK}
        if unknown:
            raise ValueError(
                f"generate cannot make up what the model's argument(s) {', '.join(sorted(unknown))} bring "
                "for new tokens; call prefill and decode."
            )
        limit = self._rolls(step, context, num_beams)
        if limit is not None:
            packed = self.pack([row[-limit:] for row in packed.rows()], None)
        return torch.cat([prompts, self._continued(step, packed, inputs, prompts, options, limit)], 1)

    def _continued(
        self, step: Step, packed: Packed, inputs: dict[str, Any], prompts: Tensor, options: Options,
        limit: int | None,
    ) -> Tensor:  # fmt: skip
        """The new tokens, `[B, new]`. `limit`: the length at which a row's context rolls."""
        found, state = self._begin(step, packed, inputs, packed.last())
        first, lead = found.squeeze(0), self.devices.lead

        def advance(tokens: Tensor, counts: list[int]) -> Tensor:
            one = self._as_in_prompt(step, Packed(tokens.unsqueeze(0), counts))
            return step.advance(state, counts, self._arguments(step, one, {}))[0]

        if options.num_beams > 1:
            return search(first, advance, state, options, lead)
        if limit is None and (not step.sizes.depends or packed.ids.is_floating_point()):
            return generate(first, advance, prompts, options, lead)

        def goes_on(rows: list[int]) -> list[int]:
            if limit is not None:
                return [row for row in rows if state.lengths[row] < limit]
            one_each = [int(row in rows) for row in range(state.rows)]
            return [] if step.sizes.fault(state.call(one_each)) else rows

        def anew(rows: list[Tensor]) -> Tensor:
            nonlocal step, state
            if limit is not None:
                whole = self.pack([row[-limit:] for row in rows], None)
                return self._begin(step, whole, {}, whole.last())[0].squeeze(0)
            whole = self.pack(rows, None)
            step = self._derived.of_call(whole, inputs)
            found, state = self._begin(step, whole, inputs, whole.last())
            return found.squeeze(0)

        return generate(first, renewing(advance, goes_on, anew, packed.rows()), prompts, options, lead)

    @serving
    def drift(self, ids: Tensor) -> Drift:
        """How far the logits of tokens that are decoded one by one from the cache are from those of the same
        tokens all at once, which see each other's values as they are computed: what rounding in the cache
        (`CacheConfig(dtype=torch.int8)`) changes on these sequences.

        Args:
            ids: `[B, T]`.

        Raises:
            ValueError: there is no second token. NoDecoderError, CacheError: as for `prefill`.
        """
        if ids.ndim != 2 or ids.shape[1] < 2:
            raise ValueError(f"sequences of two tokens or more are needed, [B, T]; found {list(ids.shape)}.")
        wanted, _ = self.prefill(ids)
        _, state = self.prefill(ids[:, :1])
        found = [self.decode(ids[:, at : at + 1], state) for at in range(1, ids.shape[1])]
        return drift_between(torch.cat(found, 1), wanted[:, 1:])

    # --- parts ---

    def _rolls(self, step: Step, context: str | None, num_beams: int) -> int | None:
        """The length at which a row's context begins to roll; None if it does not."""
        if context is None:
            return None
        if context != "roll":
            raise ValueError(f'context is "roll" or None, found {context!r}.')
        if step.dtype_of(step.name).is_floating_point:
            raise ValueError('context="roll" computes prompts anew from ids, and these are embeddings.')
        if num_beams > 1 or step.prompt_arguments:
            raise ValueError('context="roll" goes with one beam and a model without an encoder.')
        return min((n for n in (step.limit, self.config_of_cache.max_length) if n is not None), default=None)

    def _mask(self, mask: Tensor | None, inputs: dict[str, Any]) -> Tensor | None:
        """The mask of the tokens. In an encoder-decoder model `attention_mask` is an ordinary input, and the
        mask of the decoder's tokens is called `decoder_attention_mask`."""
        if self._derived.argument(inputs) != DECODER_IDS:
            return mask
        if mask is not None:
            inputs[MASK] = mask
        found: Tensor | None = inputs.pop(f"decoder_{MASK}", None)
        return found

    def pack(self, ids: Ids, mask: Tensor | None, name: str = "") -> Packed:
        """All real tokens, packed. `name`: of the argument that has them, if it is not the usual one."""
        owner = self._model if isinstance(self._model, nn.Module) else nn.Module()
        found = pack(ids, mask, lambda: next((p.device for p in owner.parameters()), torch.device("cpu")))
        return dataclasses.replace(found, name=name) if name else found

    def _as_in_prompt(self, step: Step, packed: Packed) -> Packed:
        """Ids behind a prompt of embeddings as the embeddings that the model has of them."""
        if packed.ids.is_floating_point() or step.takes(packed.ids):
            return packed
        return dataclasses.replace(packed, ids=self._derived.embedding(step.name)(packed.ids))

    @serving
    def new_state(self, packed: Packed, rows: int, layout: str | None = None) -> KVCache:
        """An empty state of so many rows, each a call of its own, for tokens like these."""
        step, config = self._derived.of_call(packed, {}, alone=True), self.config_of_cache
        config = config if layout is None else dataclasses.replace(config, layout=layout)
        state = self._empty(step, rows, config, packed)
        state.alone = True
        return state

    def step_of(self, state: KVCache) -> Step:
        """The graph that goes on with a state (`DerivedSteps.of_state`)."""
        return self._derived.of_state(state)

    def _begin(
        self, step: Step, packed: Packed, inputs: Mapping[str, Any], picked: Tensor | None = None
    ) -> tuple[Tensor, KVCache]:
        """The logits of the prompts' tokens, or of those `picked`, and a state that holds the prompts."""
        state = self._empty(step, len(packed.counts), self.config_of_cache, packed)
        state.sizes = step.sizes.of_inputs(inputs, *packed.shape) or {}
        step.begin(state, {n: inputs[n] for n in step.prompt_arguments})
        return step.advance(state, packed.counts, self._arguments(step, packed, inputs), picked), state

    def _empty(self, step: Step, rows: int, config: CacheConfig, packed: Packed) -> KVCache:
        state = KVCache(step.plan, rows, config, packed.ids.device, step.limit)
        state.origin, state.rank = self._derived.origin(step), step.ranks.rank
        return state

    def _arguments(self, step: Step, packed: Packed, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The step's arguments that have an entry for every token, packed like the tokens."""
        found: dict[str, Tensor] = {}
        for name in step.arguments:
            if name == step.name:
                found[name] = packed.ids
            elif name in inputs:
                value, layout = inputs[name], step.sizes.layouts.get(name)
                if layout is not None and layout.fits(value):
                    value = layout.taken(value, packed.shape[0])
                if value.shape[:2] != packed.shape:
                    raise ValueError(f"{name} is {tuple(value.shape)}, the tokens {packed.shape}.")
                found[name] = value[packed.mask].unsqueeze(0)
            elif name == MASK:
                shape, device = packed.ids.shape[:2], packed.ids.device
                found[name] = torch.ones(shape, dtype=step.dtype_of(name), device=device)
            else:
                raise ValueError(f"the model needs {name} for every token; give it to decode as well.")
        return found
