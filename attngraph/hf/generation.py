"""Wraps a derived decoder as a transformers model, for its `generate` and what is built on it.

The loop of transformers calls a model for logits and a cache, which it passes to the next call; here the
decoder computes both. No transformers cache is used.
"""

import copy
import dataclasses
import inspect
import logging
from collections.abc import Mapping
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
        TypeError: `decoder` is not a `Decoder`.
    """
    if not isinstance(decoder, Decoder):
        raise TypeError(
            f"generation_model takes what attngraph.compile(model, cache=True) returns, found "
            f"{type(decoder).__name__}."
        )
    if config is None:
        found = getattr(decoder, "config", None)
        config = found if isinstance(found, PreTrainedConfig) else PreTrainedConfig()
    config, kind = copy.deepcopy(config), type(decoder._model)
    base = kind if issubclass(kind, PreTrainedModel) and issubclass(kind, GenerationMixin) else _Plain
    model: GenerationModel = type(GenerationModel.__name__, (GenerationModel, base), {})(config, decoder)
    own = getattr(decoder, "generation_config", None)
    model.generation_config = (
        copy.deepcopy(own)
        if isinstance(own, GenerationConfig)
        else GenerationConfig.from_model_config(config)
    )
    model.training = False  # of this module alone: generating changes no mode of the model
    return model


NOT_BY_A_DECODER = (
    "assistant_model", "cache_implementation", "encoder_outputs", "output_attentions",
    "output_hidden_states", "prompt_lookup_num_tokens",
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
        before anything is generated. ValueError where the call asks for something that a decoder does not
        have, NoDecoderError where there is none."""
        asked = [
            name for name in NOT_BY_A_DECODER if not any(options.get(name) is no for no in (None, False))
        ]
        asked += [name for name in CACHE_NAMES if not isinstance(options.get(name), State | None)]
        if asked:
            raise ValueError(f"a derived decoder has no {asked[0]}")
        if self._runs is None:
            self._runs = generation_model(self.decoder)
        if isinstance(ids, Tensor) and not self.model.config.is_encoder_decoder:
            self.decoder.calls.new_state(self.decoder.calls.pack(ids, options.get("attention_mask")), 1)
        self._runs.config, self._runs.generation_config = self.model.config, self.model.generation_config
        return self._runs


class _Plain(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """What a model that is not of transformers needs for its `generate`."""


class GenerationModel:
    """A decoder with the interface of a transformers model. Its class is also the model's: what that does
    around `generate` (Whisper's segments of a long recording) is done here. It uses the decoder's weights; it
    saves and initialises none.

    An encoder is part of a decoder's first step: its inputs take the place of its outputs.
    """

    config: PreTrainedConfig
    generation_config: GenerationConfig
    decoder: Decoder
    training: bool

    def __init__(self, config: PreTrainedConfig, decoder: Decoder) -> None:
        PreTrainedModel.__init__(self, PreTrainedConfig())  # settings of the model's config do not apply here
        self.config = config
        self.decoder = decoder
        self.main_input_name = getattr(decoder, "main_input_name", "input_ids")

    def __getattr__(self, name: str) -> Any:
        """What is not declared here is the model's."""
        parts = self.__dict__.get("_modules", {})
        if "decoder" not in parts or name in parts:
            return super().__getattr__(name)  # type: ignore[misc]
        return getattr(parts["decoder"], name)

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        past_key_values: "State | None" = None, use_cache: bool | None = None,
        return_dict: bool | None = None, *, cache: "State | None" = None,
        decoder_input_ids: Tensor | None = None, decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Mapping[str, Any] | None = None, inputs_embeds: Tensor | None = None, **inputs: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """The logits `[B, S, V]` of the tokens, `[B, S]`, or of a prompt of embeddings, and the state after
        them.

        The mask of the tokens, `[B, T]`, also covers those of the state; padding may be on either side of a
        prompt. The state is given by either of its names, and returned by the one that transformers has for
        it. Of an encoder-decoder the tokens and their mask are the decoder's, and all else is the encoder's.
        """
        past_key_values = cache if past_key_values is None else past_key_values
        inputs |= encoder_outputs or {}
        whole = self.config.is_encoder_decoder
        ids, mask = (decoder_input_ids, decoder_attention_mask) if whole else (input_ids, attention_mask)
        if inputs_embeds is not None and whole:
            inputs["inputs_embeds"] = inputs_embeds
        elif inputs_embeds is not None:
            logits, state = self.decoder.prefill(None, mask, inputs_embeds=inputs_embeds, **inputs)
            return CausalLMOutputWithPast(logits=logits, **{CACHE: State(state, inputs_embeds.shape[1])})
        assert ids is not None
        mask = None if mask is None else mask[:, -ids.shape[1] :]
        if past_key_values is not None:
            logits = self.decoder.decode(ids, past_key_values.state, mask)
        else:
            if whole:
                inputs |= {} if input_ids is None else {"input_ids": input_ids}
                inputs |= {} if mask is None else {"decoder_attention_mask": mask}
                mask = attention_mask
            logits, state = self.decoder.prefill(ids, mask, **inputs)
            past_key_values = State(state, 0)
        past_key_values.length += ids.shape[1]
        return CausalLMOutputWithPast(
            logits=logits, **{CACHE: None if use_cache is False else past_key_values}
        )

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: "State | None" = None, attention_mask: Tensor | None = None,
        use_cache: bool | None = None, *, cache: "State | None" = None, encoder_outputs: Any = None,
        decoder_attention_mask: Tensor | None = None, inputs_embeds: Tensor | None = None, **kwargs: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """The arguments of the next `forward`: only the tokens that the state does not contain yet.

        Newer versions of transformers say how many these are (`next_sequence_length`; None: all that are
        given), because they leave out a mask without padding. (Other inputs that versions of transformers
        prepare give token positions, which the state knows.)
        """
        past_key_values = cache if past_key_values is None else past_key_values
        whole = self.config.is_encoder_decoder
        mask = decoder_attention_mask if whole else attention_mask
        if past_key_values is not None:
            total = input_ids.shape[1] if mask is None else mask.shape[1]
            new = kwargs.get("next_sequence_length", total - past_key_values.length)
            input_ids = input_ids if new is None else input_ids[:, -new:]
        elif inputs_embeds is not None and not whole:
            return {"inputs_embeds": inputs_embeds, "attention_mask": attention_mask}
        given = {"attention_mask": attention_mask, CACHE: past_key_values, "use_cache": use_cache}
        if not whole:
            return {"input_ids": input_ids, **given}
        own = {"decoder_attention_mask": decoder_attention_mask, "encoder_outputs": encoder_outputs}
        return {"decoder_input_ids": input_ids, **given, **own}

    def _maybe_prepare_encoder_kwargs_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any], model_input_name: str | None, *_: Any,
        **__: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """The encoder's inputs, gathered where transformers has its outputs, so that they become beams with
        them. Before 5.24 transformers calls the method by another name."""
        if self.config.is_encoder_decoder:
            names = inspect.signature(self.decoder._model.forward).parameters  # type: ignore[attr-defined]
            own = [n for n in names if n != "attention_mask" and not n.startswith("decoder_")]
            found = {n: model_kwargs.pop(n) for n in own if isinstance(model_kwargs.get(n), Tensor)}
            model_kwargs["encoder_outputs"] = {
                model_input_name or self.main_input_name: inputs_tensor,
                **found,
            }
        return model_kwargs

    _prepare_encoder_decoder_kwargs_for_generation = _maybe_prepare_encoder_kwargs_for_generation

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """An encoder-decoder takes what the model takes; any other, tokens and their mask."""
        if self.config.is_encoder_decoder:
            self.decoder._validate_model_kwargs(model_kwargs)
        else:
            GenerationMixin._validate_model_kwargs(self, model_kwargs)

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
