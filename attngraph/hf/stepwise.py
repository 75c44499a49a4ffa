"""transformers' own steps with a cache, as `generate` takes them, for `attngraph.verify`.

`generate` itself is run, with its next token prescribed at each step: so what it gives the model besides the
token (positions, masks, its cache) is what it gives in use.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessor, PreTrainedModel

from attngraph.runtime.wrapper import ModelWrapper

_ENDS = ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id")


class Stepwise(ModelWrapper):
    """Stands for a model of transformers; `in_steps` computes with its cache."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def in_steps(self, ids: Tensor, first: int, **inputs: Any) -> Tensor:
        """The logits of `ids`, `[B, T]`, from token `first - 1` on, `[B, T - first + 1, V]`: `first` tokens
        are the prompt of `generate`, and the others what it chooses."""
        model: Any = self._model
        # Without a mask pad tokens would be taken for padding.
        inputs.setdefault("attention_mask", torch.ones_like(ids))
        by_token = {n for n, v in inputs.items() if isinstance(v, Tensor) and v.shape[:2] == ids.shape}
        settings = model.generation_config
        before = {name: getattr(settings, name, None) for name in (*_ENDS, "pad_token_id")}
        try:
            for name in before:
                setattr(settings, name, 0 if name == "pad_token_id" else None)
            found = model.generate(
                ids[:, :first], do_sample=False, use_cache=True, max_new_tokens=ids.shape[1] - first + 1,
                output_logits=True, return_dict_in_generate=True, logits_processor=[_Prescribed(ids)],
                **{n: v[:, :first] if n in by_token else v for n, v in inputs.items()},
            )  # fmt: skip
        finally:
            for name, value in before.items():
                setattr(settings, name, value)
        return torch.stack(found.logits, 1)


def stepwise(model: PreTrainedModel) -> Stepwise:
    """A model of transformers, of which `attngraph.verify` compares the steps of `generate` with its cache.

    Raises:
        TypeError: `model` has no `generate` of transformers.
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise TypeError(
            f"stepwise takes a model of transformers that generates, found {type(model).__name__}."
        )
    return Stepwise(model)


class _Prescribed(LogitsProcessor):  # type: ignore[misc]
    """Leaves only the next token of given ones."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        length = input_ids.shape[1]
        if length >= self.ids.shape[1]:
            return scores
        return torch.full_like(scores, -torch.inf).scatter(1, self.ids[:, length : length + 1], 0.0)
