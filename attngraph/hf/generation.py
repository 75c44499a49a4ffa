"""Wraps a derived decoder as a transformers model, for its `generate` and what is built on it.

The loop of transformers calls a model for logits and a cache, which it passes to the next call; here the
decoder computes both. No transformers cache is used.
"""

import copy
import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from attngraph.errors import AttnGraphError, DisagreementError
from attngraph.runtime.decoder import Decoder
from attngraph.runtime.kv_cache import KVCache

log = logging.getLogger(__name__)
CACHE_NAMES = ("cache", "past_key_values")
"""What transformers has called the cache among arguments and results of a model, the newest (from 5.24 on)
first."""
CACHE = next(n for n in CACHE_NAMES if n in {f.name for f in dataclasses.fields(CausalLMOutputWithPast)})
"""What the installed one calls it."""


def generation_model(decoder: Decoder, config: PreTrainedConfig | None = None) -> "GenerationModel":
    """A derived decoder as a transformers model, for its `generate` and what is built on it.

    Args:
        decoder: from `attngraph.compile(model, cache=True)`; `model` is in eval mode, takes tokens and
            returns logits.
        config: sizes and special tokens. None: the config of the model, if it is a transformers model, else
            an empty one.

    Raises:
        TypeError: `decoder` is not a `Decoder`. ValueError: the model is an encoder-decoder.
    """
    if not isinstance(decoder, Decoder):
        raise TypeError(
            f"generation_model takes what attngraph.compile(model, cache=True) returns, found "
            f"{type(decoder).__name__}."
        )
    if config is None:
        found = getattr(decoder, "config", None)
        config = found if isinstance(found, PreTrainedConfig) else PreTrainedConfig()
    if config.is_encoder_decoder:
        raise ValueError("generation_model takes decoder-only models; call decoder.generate for this one.")
    config = copy.deepcopy(config)
    model = GenerationModel(config, decoder)
    own = getattr(decoder, "generation_config", None)
    model.generation_config = (
        copy.deepcopy(own)
        if isinstance(own, GenerationConfig)
        else GenerationConfig.from_model_config(config)
    )
    model.training = False  # of this module alone: generating changes no mode of the model
    return model


NOT_BY_A_DECODER = (
    "assistant_model", "cache_implementation", "inputs_embeds", "output_attentions", "output_hidden_states",
    "prompt_lookup_num_tokens",
)  # fmt: skip
"""Arguments of `generate` that ask for something that a derived decoder does not have."""


class Generation:
    """transformers' `generate` for a compiled model, on a derived decoder. Where none can be derived, or a
    call asks for what it does not have, the model's own runs, uncompiled; the reason is logged once."""

    def __init__(self, decoder: Decoder, model: PreTrainedModel) -> None:
        self.decoder, self.model = decoder, model
        self._runs: GenerationModel | None = None
        self._told: set[str] = set()

    def __call__(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """See transformers' documentation of `generate`."""
        state = torch.get_rng_state()
        try:
            runs = self._prepared(kwargs.get("input_ids") if inputs is None else inputs, kwargs)
            return runs.generate(inputs, *args, **kwargs)
        except DisagreementError:
            raise  # a rank alone cannot go on by itself
        except (AttnGraphError, ValueError, TypeError, NotImplementedError, AttributeError) as problem:
            # An invalid call fails in the model's own generate too, with the clearer error.
            torch.set_rng_state(state)
            found = self.model.generate(inputs, *args, **kwargs)
            reason = getattr(problem, "reason", str(problem))
            if reason not in self._told:
                self._told.add(reason)
                log.warning("generate runs the uncompiled model: %s", reason)
            return found

    def _prepared(self, ids: Any, options: dict[str, Any]) -> "GenerationModel":
        """The decoder as a transformers model, with the settings that the model has now. It is derived
        before anything is generated.

        Raises:
            ValueError: the call asks for something that a decoder does not have. NoDecoderError: there is
                none.
        """
        asked = [
            name for name in NOT_BY_A_DECODER if not any(options.get(name) is no for no in (None, False))
        ]
        asked += [name for name in CACHE_NAMES if not isinstance(options.get(name), State | None)]
        if asked:
            raise ValueError(f"a derived decoder has no {asked[0]}")
        if self._runs is None:
            self._runs = generation_model(self.decoder)
        if isinstance(ids, Tensor):
            self.decoder.new_state(self.decoder.pack(ids, options.get("attention_mask")), 1)
        self._runs.config, self._runs.generation_config = self.model.config, self.model.generation_config
        return self._runs


class GenerationModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A decoder with the interface of a transformers model. It uses the decoder's weights; it saves and
    initialises none."""

    main_input_name = "input_ids"

    def __init__(self, config: PreTrainedConfig, decoder: Decoder) -> None:
        super().__init__(PreTrainedConfig())  # settings of the model's config do not apply here
        self.config = config
        self.decoder = decoder

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: "State | None" = None,
        use_cache: bool | None = None, return_dict: bool | None = None, *, cache: "State | None" = None,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """The logits `[B, S, V]` of `input_ids`, `[B, S]`, and the state after them.

        `attention_mask`, `[B, T]`, also covers the tokens of the state; padding may be on either side of a
        prompt. The state is given by either of its names, and returned by the one that transformers has for
        it.
        """
        past_key_values = cache if past_key_values is None else past_key_values
        mask = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        if past_key_values is None:
            logits, state = self.decoder.prefill(input_ids, mask)
            past_key_values = State(state, 0)
        else:
            logits = self.decoder.decode(input_ids, past_key_values.state, mask)
        past_key_values.length += input_ids.shape[1]
        return CausalLMOutputWithPast(
            logits=logits, **{CACHE: None if use_cache is False else past_key_values}
        )

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: "State | None" = None, attention_mask: Tensor | None = None,
        use_cache: bool | None = None, *, cache: "State | None" = None, **kwargs: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """The arguments of the next `forward`: only the tokens that the state does not contain yet.

        Newer versions of transformers say how many these are (`next_sequence_length`; None: all that are
        given), because they leave out a mask without padding. (Other inputs that versions of transformers
        prepare give token positions, which the state knows.)
        """
        past_key_values = cache if past_key_values is None else past_key_values
        if past_key_values is not None:
            total = input_ids.shape[1] if attention_mask is None else attention_mask.shape[1]
            new = kwargs.get("next_sequence_length", total - past_key_values.length)
            input_ids = input_ids if new is None else input_ids[:, -new:]
        return {
            "input_ids": input_ids, "attention_mask": attention_mask, CACHE: past_key_values,
            "use_cache": use_cache,
        }  # fmt: skip

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the decoder's model has tied its weights itself."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """False, so that transformers makes no cache: the first call returns a `State`."""
        return False


class State:
    """A decoder's state, passed where transformers expects a `Cache`. `length` includes padding."""

    is_compileable = False
    is_linear = (False,)
    """As layers of a `Cache` say it: `get_seq_length` tells how many tokens it contains."""

    def __init__(self, state: KVCache, length: int) -> None:
        self.state, self.length = state, length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row n becomes a copy of row `beam_idx[n]`."""
        self.state.reorder(beam_idx)
