"""How to generate: checked options, and the names that transformers gives them.

`generate` of transformers has over fifty arguments. Those that mean something here are read by either name;
each other one is refused with what to write instead, unless its value asks for nothing.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

DECODER_IDS = "decoder_input_ids"
Criterion = Callable[[Tensor, Any], Any]
"""Takes all tokens so far, `[B, T]`, and None; says for which rows to stop, `[B]` or one answer for all."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How to generate; see `Decoder.generate`. `ends`: the end tokens."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    num_beams: int = 1
    ends: tuple[int, ...] = ()
    seed: int | None = None
    pad_token_id: int | None = None
    length_penalty: float = 1.0
    min_p: float | None = None
    min_new_tokens: int = 0
    early_stopping: bool | str = False
    on_token: Callable[[Tensor], Any] | None = None
    streamer: Any = None
    criteria: tuple[Criterion, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, found {self.max_new_tokens}.")
        if not self.temperature >= 0 or math.isinf(self.temperature):
            raise ValueError(f"temperature must be 0 or a positive number, found {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, found {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, found {self.top_p}.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be from 0 to 1, found {self.min_p}.")
        if self.num_beams < 1:
            raise ValueError(f"num_beams must be at least 1, found {self.num_beams}.")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f'early_stopping is True, False or "never", found {self.early_stopping!r}.')
        if self.num_beams == 1:
            return
        if self.temperature > 0:
            raise ValueError("num_beams above 1 goes with temperature=0 only: beams are not sampled.")
        if self.on_token is not None or self.streamer is not None or self.criteria:
            raise ValueError(
                "num_beams above 1 goes with no streamer, on_token or stopping_criteria: which beam is best "
                "is known only at the end."
            )

    @property
    def pad(self) -> int:
        return self.pad_token_id if self.pad_token_id is not None else self.ends[0] if self.ends else 0


def as_tuple(value: Any) -> tuple[Any, ...]:
    """One value, several (a tensor, say), or None."""
    if isinstance(value, Tensor):
        value = value.tolist()
    return () if value is None else tuple(value) if isinstance(value, Iterable) else (value,)


def read_options(
    width: int, given: dict[str, Any], inputs: dict[str, Any], names: Container[str] = ()
) -> Options:
    """The options, from the arguments of `Decoder.generate`, and from those that `inputs` has under their
    names in transformers, which are removed from there.

    Args:
        width: tokens of the prompts as given, which `max_length` and `min_length` count.
        names: the arguments of the model's forward.

    Raises:
        ValueError: an option is out of range, or asks for something that is not done here. TypeError: there
            is no such argument (a model's `**kwargs` would ignore it).
    """
    _refuse_others(inputs, names)
    longest: int | None = inputs.pop("max_length", None)
    least: int | None = inputs.pop("min_length", None)
    sampled, criteria = inputs.pop("do_sample", None), inputs.pop("stopping_criteria", None)
    if given["max_new_tokens"] is None:
        new = 64 if longest is None else longest - width
        if new < 1:
            raise ValueError(f"max_length={longest} leaves no room: the prompts have {width} tokens.")
        given["max_new_tokens"] = new
    if given["min_new_tokens"] is None:
        given["min_new_tokens"] = 0 if least is None else max(0, least - width)
    if given["temperature"] is None:
        given["temperature"] = 1.0 if sampled else 0.0
    if sampled and given["temperature"] == 0:
        raise ValueError("do_sample=True needs a temperature above 0; leave it out for 1.")
    if sampled is False:
        given["temperature"] = 0.0
    streamer, ends = inputs.pop("streamer", None), as_tuple(given.pop("eos_token_id"))
    unknown = [n for n, value in inputs.items() if n not in names and not isinstance(value, Tensor)]
    if unknown:
        raise TypeError(
            f"neither generate nor the model's forward has an argument {', '.join(sorted(unknown))}."
        )
    return Options(ends=ends, streamer=streamer, criteria=as_tuple(criteria), **given)


def prompts_of(model: object, name: str, inputs: dict[str, Any]) -> Any:
    """The prompts, removed from the arguments by `name`, that of the model for tokens; for an encoder-decoder
    model without any, the token with which every answer begins, if the model's configuration names one."""
    if "inputs" in inputs:
        inputs.setdefault("input_ids" if name == DECODER_IDS else name, inputs.pop("inputs"))
    if name in inputs:
        return inputs.pop(name)
    sources = [getattr(model, part, None) for part in ("generation_config", "config")]
    starts = [getattr(source, "decoder_start_token_id", None) for source in sources]
    start = next((n for n in starts if isinstance(n, int)), None)
    source = next((v for v in inputs.values() if isinstance(v, Tensor)), None)
    if name != DECODER_IDS or start is None or source is None:
        raise ValueError(f"there are no prompts: generate needs the tokens to begin with, as {name}=.")
    return torch.full((source.shape[0], 1), start, dtype=torch.int64, device=source.device)


def embeddings_in(inputs: Mapping[str, Any], signature: inspect.Signature) -> str:
    """The name of the only argument that has numbers `[B, T, C]`, of a model that can do without its first
    argument; "" if there is none. (An encoder's embeddings are no prompts.)"""
    if DECODER_IDS in signature.parameters:
        return ""
    first = next(iter(signature.parameters.values()), None)
    numbers = [
        n for n, v in inputs.items() if isinstance(v, Tensor) and v.is_floating_point() and v.ndim == 3
    ]
    takes = first is not None and first.default is None and first.name not in inputs
    return numbers[0] if takes and len(numbers) == 1 and numbers[0] in signature.parameters else ""


def tokens_of(signature: inspect.Signature, asked: str | None, inputs: dict[str, Any]) -> Any:
    """The prompts of `prefill`, removed from the arguments: by the name that `CacheConfig(tokens=...)` gives,
    or transformers' name, or else the only argument, if it is the model's first."""
    known = asked or (DECODER_IDS if DECODER_IDS in signature.parameters else None)
    first = next((n for n in signature.parameters if n not in ("args", "kwargs")), "")
    name = known or (first if list(inputs) == [first] else "")
    if name in inputs:
        return inputs.pop(name)
    example = name or next(reversed(inputs), "input_ids")
    others = "".join(f", {n}=..." for n in inputs if n != example)
    raise TypeError(
        "prefill cannot tell which argument has the tokens. Give them first and the others by name, "
        f"prefill(tokens{others}), or name them for good: CacheConfig(tokens={example!r})."
    )


_THEIR_LOOP = (
    "attngraph.hf.generation_model(decoder).generate(...) is the loop of transformers over this decoder, and "
    "takes it"
)
_LOGITS = "call prefill and decode, which return the logits"
_INSTEAD: dict[str, str] = {
    "num_return_sequences": "repeat the prompts: ids.repeat_interleave(n, 0)",
    "generation_config": "pass its values as arguments",
    "past_key_values": "prefill returns a state, and decode goes on from it",
    "cache": "prefill returns a state, and decode goes on from it",
    "use_cache": "the cache is what a decoder is; call the model itself to compute without it",
    "return_dict_in_generate": _LOGITS,
    "output_scores": _LOGITS,
    "output_logits": _LOGITS,
    "output_attentions": "the weights are never written out; call the model itself",
    "output_hidden_states": "call the model itself",
    "max_time": "pass on_token, which ends the generation by returning True",
}
_OTHERS = (
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids", "force_words_ids", "constraints", "logits_processor", "prefix_allowed_tokens_fn",
    "assistant_model", "prompt_lookup_num_tokens", "penalty_alpha", "typical_p", "epsilon_cutoff",
    "num_beam_groups", "diversity_penalty", "eta_cutoff", "suppress_tokens", "begin_suppress_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "guidance_scale", "negative_prompt_ids",
    "watermarking_config", "exponential_decay_length_penalty", "remove_invalid_values", "renormalize_logits",
    "stop_strings", "tokenizer", "cache_implementation", "custom_generate", "bos_token_id",
    "decoder_start_token_id", "low_memory", "top_h", "dola_layers", "compile_config", "synced_gpus",
)  # fmt: skip
_ALWAYS = ("use_cache", "past_key_values", "output_attentions", "output_hidden_states")
"""Arguments of generate that forwards of models have too."""
_NOTHING: dict[str, Any] = {
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "num_return_sequences": 1,
    "num_beam_groups": 1, "typical_p": 1.0, "diversity_penalty": 0.0, "use_cache": True, "bos_token_id": ...,
}  # fmt: skip
"""The values that ask for nothing, where they are not None, False, 0 or empty; `...`: all values."""


def _refuse_others(inputs: dict[str, Any], names: Container[str]) -> None:
    known = (n for n in inputs if n in _INSTEAD or n in _OTHERS)
    theirs = (*_ALWAYS, "cache") if hasattr(inputs.get("cache"), "get_seq_length") else _ALWAYS
    for name in [n for n in known if n not in names or n in theirs]:
        value = inputs.pop(name)
        nothing = _NOTHING.get(name)
        asks = value is not None and nothing is not ... and (isinstance(value, Tensor) or value != nothing)
        if asks and (name == "use_cache" or isinstance(value, Tensor) or value):
            raise ValueError(f"generate takes no {name}: {_INSTEAD.get(name, _THEIR_LOOP)}.")
