"""A derived decoder with the face of a model of transformers, for its `generate` and what is built on that.

transformers' loop asks a model for logits and hands the cache back that it returned; here the decoder
computes both. No cache of transformers' is made.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from attngraph.runtime.decoder import Decoder
from attngraph.runtime.kv_cache import KVCache


def generation_model(decoder: Decoder, config: PreTrainedConfig | None = None) -> GenerationModel:
    """A derived decoder as a model of transformers, for its `generate` and for what is built on it.

    Args:
        decoder: of `attngraph.compile(model, cache=True)`, `model` in eval mode, tokens in, logits out.
        config: its sizes and special tokens. None: the model's own, if it is one of transformers', else an
            empty one.

    Raises:
        TypeError: `decoder` is none. ValueError: the model is an encoder-decoder.
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
    model.eval()
    return model


class GenerationModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A decoder with the face of a model of transformers. Weights are the decoder's; nothing is saved or
    initialised here."""

    main_input_name = "input_ids"

    def __init__(self, config: PreTrainedConfig, decoder: Decoder) -> None:
        super().__init__(PreTrainedConfig())  # what it would look up in the model's is for other models
        self.config = config
        self.decoder = decoder

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: State | None = None,
        use_cache: bool | None = None, return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """The logits `[B, S, V]` of `input_ids`, `[B, S]`, and the state after them.

        `attention_mask`, `[B, T]`, covers the tokens of the state as well; padding may be on either side of a
        prompt.
        """
        mask = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        if past_key_values is None:
            logits, state = self.decoder.prefill(input_ids, mask)
            past_key_values = State(state, 0)
        else:
            logits = self.decoder.decode(input_ids, past_key_values.state, mask)
        past_key_values.length += input_ids.shape[1]
        return CausalLMOutputWithPast(
            logits=logits, past_key_values=None if use_cache is False else past_key_values
        )

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: State | None = None, attention_mask: Tensor | None = None,
        use_cache: bool | None = None, **kwargs: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """What `forward` is called with: of the tokens so far, those that the state has not seen. (What else
        transformers prepares, from version to version, says where tokens stand; the state knows.)
        """
        if past_key_values is not None:
            total = input_ids.shape[1] if attention_mask is None else attention_mask.shape[1]
            input_ids = input_ids[:, past_key_values.length - total :]
        return {
            "input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": past_key_values,
            "use_cache": use_cache,
        }  # fmt: skip

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the model behind the decoder has tied its own."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No cache of transformers' is made: the first call returns a `State`."""
        return False


class State:
    """A decoder's state where transformers expects a `Cache`. `length` counts tokens of a row and padding."""

    is_compileable = False

    def __init__(self, state: KVCache, length: int) -> None:
        self.state, self.length = state, length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row n becomes what row `beam_idx[n]` is."""
        self.state.reorder(beam_idx)
