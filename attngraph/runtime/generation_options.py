"""How to generate: checked options, and the names that transformers gives them.

`generate` of transformers has over fifty arguments. Those that mean something here are read by either name;
each other one is refused with what to write instead, unless its value asks for nothing.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

DECODER_IDS = "decoder_input_ids"
Criterion = Callable[[Tensor, Any], Any]
"""Takes all tokens so far, `[B, T]`, and None; says for which rows to stop, `[B]` or one answer for all."""
Processor = Callable[[Tensor, Tensor], Tensor]
"""Takes all tokens so far, `[B, T]`, and the scores of the next ones, `[B, V]`; returns other scores."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How to generate; see `Decoder.generate`. `ends`: the end tokens; `samples`: continuations of each
    prompt; `details`: what is asked for beside the tokens (`generate.Rows`)."""

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
    processors: tuple[Processor, ...] = ()
    samples: int = 1
    details: tuple[str, ...] = ()
    draft: Any = None
    draft_tokens: int = 8

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
        if self.draft_tokens < 1:
            raise ValueError(f"draft_tokens must be at least 1, found {self.draft_tokens}.")
        most = self.num_beams if self.num_beams > 1 else math.inf if self.temperature > 0 else 1
        if not 1 <= self.samples <= most:
            raise ValueError(
                f"num_return_sequences={self.samples}: at least 1, and more are sampled (do_sample=True), or "
                "are beams (at most num_beams)."
            )
        if self.num_beams == 1:
            return
        if self.temperature > 0:
            raise ValueError("num_beams above 1 goes with temperature=0 only: beams are not sampled.")
        if self.on_token is not None or self.streamer is not None or self.criteria:
            raise ValueError(
                "num_beams above 1 goes with no streamer, on_token or stopping_criteria: which beam is best "
                "is known only at the end."
            )
        if self.details or self.draft is not None:
            raise ValueError("num_beams above 1 goes with no draft, and without return_dict_in_generate.")

    @property
    def looks_at_all_rows(self) -> bool:
        """Whether something is asked about all rows at once, which then have equally many tokens."""
        return bool(self.criteria or self.processors or self.on_token or self.streamer)

    @property
    def may_stop(self) -> bool:
        """Whether rows may end before they have all their tokens."""
        return bool(self.ends or self.looks_at_all_rows)

    def processed(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """The scores `[B, V]` as the processors leave them. `tokens`: all so far, `[B, T]`."""
        for processor in self.processors:
            scores = processor(tokens, scores)
        return scores

    @property
    def pad(self) -> int:
        return self.pad_token_id if self.pad_token_id is not None else self.ends[0] if self.ends else 0


def without_ends(scores: Tensor, places: Sequence[int], options: Options) -> Tensor:
    """The scores `[R, V]`; end tokens have none in rows with too few tokens. `places`: how many each has."""
    early = [place < options.min_new_tokens for place in places]
    if not options.ends or not any(early):
        return scores
    none = scores.index_fill(-1, torch.tensor(options.ends, device=scores.device), -torch.inf)
    return torch.where(torch.tensor(early, device=scores.device).unsqueeze(1), none, scores)


def repetition_penalty(penalty: float) -> Processor:
    """Makes tokens less likely that a row has already (Keskar et al., arXiv 1909.05858, section 4.1)."""

    def processed(tokens: Tensor, scores: Tensor) -> Tensor:
        had = scores.gather(1, tokens)
        return scores.scatter(1, tokens, torch.where(had < 0, had * penalty, had / penalty))

    return processed


def stops_at(strings: Sequence[str], tokenizer: Any) -> Criterion:
    """Stops a row when its last token has completed one of these strings."""
    if not hasattr(tokenizer, "decode"):
        raise ValueError("stop_strings needs tokenizer=..., which turns tokens into text (`decode`).")
    reach = 1 + max((len(s.encode()) for s in strings), default=0)
    # Each token adds a byte or more, unless it is a special one, which a text does not show.

    def stop(tokens: Tensor, scores: Any) -> Tensor:
        rows = tokens[:, -reach:].tolist()
        texts = [(tokenizer.decode(row[:-1]), tokenizer.decode(row)) for row in rows]
        return torch.tensor([any(b.rfind(s) > a.rfind(s) for s in strings) for a, b in texts])

    return stop


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
    sampled, criteria = inputs.pop("do_sample", None), as_tuple(inputs.pop("stopping_criteria", None))
    processors = as_tuple(inputs.pop("logits_processor", None))
    penalty = inputs.pop("repetition_penalty", None)
    if penalty not in (None, 1.0):
        processors = (repetition_penalty(penalty), *processors)
    strings, tokenizer = inputs.pop("stop_strings", None), inputs.pop("tokenizer", None)
    if strings:
        criteria = (*criteria, stops_at([strings] if isinstance(strings, str) else strings, tokenizer))
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
    samples, details = inputs.pop("num_return_sequences", None) or 1, tuple(_details(inputs))
    unknown = [n for n, value in inputs.items() if n not in names and not isinstance(value, Tensor)]
    if unknown:
        raise TypeError(
            f"neither generate nor the model's forward has an argument {', '.join(sorted(unknown))}."
        )
    return Options(
        ends=ends, streamer=streamer, criteria=criteria, processors=processors, samples=samples,
        details=details, **given,
    )  # fmt: skip


def _details(inputs: dict[str, Any]) -> Iterator[str]:
    """What is asked for beside the tokens, removed from the arguments."""
    asked = {name: inputs.pop(name, None) for name in ("return_dict_in_generate", *_DETAILS)}
    if asked["return_dict_in_generate"]:
        yield from ("logprobs", *(kind for name, kind in _DETAILS.items() if asked[name]))


_DETAILS = {"output_scores": "scores", "output_logits": "logits"}


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
    "logits_processor=[...] takes the LogitsProcessor of transformers that does it, and "
    "attngraph.hf.generation_model(decoder).generate(...) is the loop of transformers over this decoder, and "
    "takes it"
)
_STATE = "state=... goes on from what return_dict_in_generate=True gives as `.state`"
_INSTEAD: dict[str, str] = {
    "generation_config": "pass its values as arguments",
    "past_key_values": _STATE,
    "cache": _STATE,
    "use_cache": "the cache is what a decoder is; call the model itself to compute without it",
    "output_attentions": "the weights are never written out; call the model itself",
    "output_hidden_states": "call the model itself",
    "assistant_model": "draft=attngraph.compile(assistant, cache=True)",
    "prompt_lookup_num_tokens": 'draft="lookup", draft_tokens=...',
    "max_time": "pass on_token, which ends the generation by returning True",
}
_OTHERS = (
    "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "force_words_ids", "constraints", "prefix_allowed_tokens_fn", "penalty_alpha", "typical_p",
    "epsilon_cutoff", "num_beam_groups", "diversity_penalty", "eta_cutoff", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "guidance_scale",
    "negative_prompt_ids", "watermarking_config", "exponential_decay_length_penalty", "remove_invalid_values",
    "renormalize_logits", "cache_implementation", "custom_generate", "bos_token_id", "decoder_start_token_id",
    "low_memory", "top_h", "dola_layers", "compile_config", "synced_gpus",
)  # fmt: skip
_ALWAYS = ("use_cache", "past_key_values", "output_attentions", "output_hidden_states")
"""Arguments of generate that forwards of models have too."""
_NOTHING: dict[str, Any] = {
    "encoder_repetition_penalty": 1.0,
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
