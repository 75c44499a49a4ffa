"""A decoder: prefill, decode and generate with a model that has no cache of its own.

Rows are packed: the tokens of all sequences are concatenated into one, without padding, each with its own
position. So prompts of unequal length, padded on either side, get the same results as each would alone.
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.errors import CacheError
from attngraph.ir.modes import serving
from attngraph.ir.ops.in_order import logprobs
from attngraph.report.cache_entry import Drift
from attngraph.report.report import CompileReport, with_remarks
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.calls import Calls
from attngraph.runtime.continuation import Continuation, repeated
from attngraph.runtime.derived import MASK, DerivedSteps
from attngraph.runtime.devices import ONE, OneDevice
from attngraph.runtime.generation_options import (
    DECODER_IDS,
    embeddings_in,
    prompts_of,
    read_options,
    tokens_of,
)
from attngraph.runtime.kv_cache import KVCache
from attngraph.runtime.packing import Ids, as_given, unpacked
from attngraph.runtime.proof import drift_between
from attngraph.runtime.step import Step
from attngraph.runtime.tree import Tree, rows_of
from attngraph.runtime.wrapper import ModelWrapper


class Decoder(ModelWrapper):
    """What `attngraph.compile(model, cache=True)` returns. Calling it runs the model on whole sequences.

    Its weights, state dict and attributes are the model's.

    Attributes:
        report: what was fused and what is cached, for the latest derived graph.
    """

    whole: nn.Module
    config_of_cache: CacheConfig
    calls: Calls
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
        self.calls = Calls(model, self._derived, config, devices)
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
        packed = self.calls.pack(ids, self._mask(attention_mask, inputs), name)
        step = self._derived.of_call(packed, inputs)
        logits, state = self.calls.begin(step, packed, inputs)
        return unpacked(logits, packed), state

    @serving
    def logprobs(self, ids: Ids, attention_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """The log-probability of each token after those before it, `[B, T]`; 0 for first tokens and padding.

        With `consistent=True` these are the bits of `attngraph.logprobs(logits, tokens)` for the logits that
        `prefill` and `decode` give. Arguments and errors are those of `prefill`.
        """
        packed = self.calls.pack(ids, self._mask(attention_mask, inputs))
        logits, _ = self.calls.begin(self._derived.of_call(packed, inputs), packed, inputs)
        found = logits.new_zeros(packed.ids.shape, dtype=torch.float32)
        found[:, 1:] = logprobs(logits[:, :-1], packed.ids[:, 1:])
        starts = list(itertools.accumulate(packed.counts, initial=0))
        found[:, [start for start, count in zip(starts, packed.counts, strict=False) if count]] = 0.0
        return unpacked(found.unsqueeze(-1), packed).squeeze(-1)

    @serving
    def decode(
        self, next_ids: Ids, state: KVCache, attention_mask: Tensor | None = None,
        parents: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None, **inputs: Any,
    ) -> Tensor:  # fmt: skip
        """Compute one or several new tokens of every row, one after the other, or as a tree.

        Args:
            next_ids: `[B]` or `[B, S]`, or a list with each row's new tokens.
            state: modified in place; `KVCache` has methods to remove tokens, copy, reorder and save it.
            attention_mask: `[B, S]`, nonzero at real tokens.
            parents: `[S]` or `[B, S]`: which of the new tokens each one follows (-1: the row's last one). It
                sees its ancestors alone. The state then has a row for each leaf, until `state.keep(path)`.
            inputs: the model's other arguments that have an entry for every token.

        Returns:
            The logits, `[B, S, V]`.

        Raises:
            CacheError: the tokens do not fit, or a buffer that the decoder relies on has changed since the
                prompt; the state is unchanged.
        """
        if parents is not None:
            return self._decode_tree(next_ids, state, parents, attention_mask, inputs)
        whose = self.devices.whose(state.rank)
        self.devices.agree("decode", next_ids, attention_mask, inputs, state.lengths, whose)
        if isinstance(next_ids, Tensor) and next_ids.ndim == 1 and not next_ids.is_floating_point():
            next_ids = next_ids.unsqueeze(1)
        step = self.calls.step_of(state)
        if attention_mask is not None and attention_mask.ndim > 2:
            inputs, attention_mask = {**inputs, MASK: attention_mask}, None
        packed = self.calls.pack(next_ids, attention_mask)
        if len(packed.counts) != state.rows:
            raise CacheError(f"tokens for {len(packed.counts)} row(s), but the state has {state.rows}.")
        if packed.ids.shape[1] == 0:
            return step.nothing(state, packed.shape)
        packed = self.calls.as_in_prompt(step, packed)
        if not step.takes(packed.ids):
            raise CacheError(
                f"these tokens are {packed.ids.dtype}{list(packed.ids.shape[2:])}, and those of the prompt "
                "were not: ids go on with ids, embeddings go on with embeddings or ids. Nothing was written."
            )
        with state.changing():
            self.calls.require_rules(step, state, packed, inputs)
            logits = step.advance(state, packed.counts, self.calls.arguments(step, packed, inputs))
            return unpacked(logits, packed)

    @serving
    def generate(
        self, ids: Ids | None = None, max_new_tokens: int | None = None, temperature: float | None = None,
        top_k: int | None = None, top_p: float | None = None, num_beams: int = 1,
        eos_token_id: int | Sequence[int] | None = None, seed: int | None = None,
        pad_token_id: int | None = None, length_penalty: float = 1.0, attention_mask: Tensor | None = None, *,
        min_p: float | None = None, min_new_tokens: int | None = None,
        early_stopping: bool | str = False, on_token: Callable[[Tensor], Any] | None = None,
        context: str | None = None, draft: Any = None, draft_tokens: int = 8, state: KVCache | None = None,
        **inputs: Any,
    ) -> Any:  # fmt: skip
        """Continue prompts.

        Args:
            ids, attention_mask, inputs: as for `prefill`.
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
            draft: guesses at most `draft_tokens` next tokens of a row, which are then computed together:
                another decoder, "lookup" (what followed the last time that the text had the latest tokens),
                a function from a row's tokens `[T]` to ids, or a function or module of these and of what
                `CacheConfig(beside=...)` gives for the last one: heads of the model's own. It changes no
                token, but for rounding (`consistent=True`: not at all).
            state: goes on from here, which is modified; `ids` are the tokens that come next, and all that
                the other options are told.
            inputs: also `max_length`, `min_length`, `do_sample`, `streamer`, `stopping_criteria`,
                `logits_processor`, `repetition_penalty`, `num_return_sequences`, `stop_strings` with
                `tokenizer`, `return_dict_in_generate`, `output_scores` and `output_logits`, which mean what
                they mean in transformers.

        Returns:
            int64 `[B, T + new]`: the prompts as given (a list: padded on the left), then the new tokens; of
            embeddings the new tokens alone. With `return_dict_in_generate` a `Generated`, which also has
            the log-probabilities and the state (`runtime/continuation.py`).

        Raises:
            ValueError: an option is out of range, or asks for something that is not done here; says what to
                write instead. NoDecoderError, CacheError: as for `prefill`.
        """
        given = {
            "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
            "num_beams": num_beams, "eos_token_id": eos_token_id, "seed": seed, "pad_token_id": pad_token_id,
            "length_penalty": length_penalty, "min_p": min_p, "min_new_tokens": min_new_tokens,
            "early_stopping": early_stopping, "on_token": on_token, "draft": draft,
            "draft_tokens": draft_tokens,
        }  # fmt: skip
        self.devices.agree("generate", ids, attention_mask, context, inputs, given)
        name = embeddings_in(inputs, self._derived.signature) if ids is None else ""
        ids = prompts_of(self._model, name or self._derived.argument({}), inputs) if ids is None else ids
        packed = self.calls.pack(ids, self._mask(attention_mask, inputs), name)
        options = read_options(packed.shape[1], given, inputs, self._derived.signature.parameters)
        if min(packed.counts, default=1) == 0:
            raise ValueError("a prompt has no tokens; give each at least one to begin with.")
        prompts = as_given(ids, packed, options.pad)
        if packed.ids.is_floating_point():
            prompts = prompts.new_empty((len(packed.counts), 0), dtype=torch.int64)
        if options.samples > 1 and options.num_beams == 1:
            prompts, packed, inputs = repeated(options.samples, prompts, packed, inputs)
        step = self._derived.of_call(packed, inputs) if state is None else self.calls.step_of(state)
        ruled = {name for name, layout in step.sizes.layouts.items() if layout.pairs is not None}
        unknown = step.arguments - {step.name, MASK} - ruled
        if unknown:
            raise ValueError(
                f"generate cannot make up what the model's argument(s) {', '.join(sorted(unknown))} bring "
                "for new tokens; call prefill and decode."
            )
        limit = self._rolls(step, context, num_beams)
        if limit is not None:
            packed = self.calls.pack([row[-limit:] for row in packed.rows()], None)
        return Continuation(self.calls, step, packed, inputs, prompts, options, state, limit).generated()

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

    def _decode_tree(
        self, ids: Ids, state: KVCache, parents: Any, mask: Tensor | None, inputs: Mapping[str, Any]
    ) -> Tensor:
        """The logits of new tokens that are a tree, `[B, S, V]`."""
        ids = ids if isinstance(ids, Tensor) else torch.as_tensor(ids, device=state.device)
        if mask is not None or inputs or ids.ndim != 2 or ids.shape[0] != state.rows or not ids.shape[1]:
            raise ValueError(
                f"a tree has ids [B, S] for the state's {state.rows} row(s), all of them real, and no other "
                f"inputs; found {list(ids.shape)}."
            )
        tree = Tree.of(rows_of(parents, (ids.shape[0], ids.shape[1])), state.lengths)
        state.reorder(tree.sources)
        try:
            logits = self.decode(tree.tokens(ids), state)
        except BaseException:
            if not state.unfinished:
                state.reorder(tree.firsts())
            raise
        state.tree = tree
        return tree.gathered(logits, ids.shape)

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
        mask of the decoder's tokens is called `decoder_attention_mask`. One of pairs of tokens is an ordinary
        input, too."""
        if mask is not None and mask.ndim > 2 and mask.shape[-2] == mask.shape[-1] > 1:
            inputs[MASK] = mask
            return None
        if self._derived.argument(inputs) != DECODER_IDS:
            return mask
        if mask is not None:
            inputs[MASK] = mask
        found: Tensor | None = inputs.pop(f"decoder_{MASK}", None)
        return found
