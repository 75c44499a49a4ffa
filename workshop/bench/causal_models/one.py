"""One class: build it small, see whether it is causal, and compare a derived decoder with it.

The decoder's tokens are compared with a loop that calls the whole model for each token, and with the
`generate` of transformers. Run in a process of its own.
"""

from __future__ import annotations

import copy
import logging
import re
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

import attngraph
from workshop.bench.causal_models.shrink import (
    ATTEMPTS,
    VOCABULARY,
    Settings,
    Sizes,
    changes,
    given_back,
    is_configuration,
    shrunk,
)  # fmt: skip

LARGEST = 4_000_000
"""Parameters that a small model may have."""
LONGEST = 60.0
"""Seconds after which no other sizes are tried."""
PROMPT, NEW = 7, 24
"""Tokens of a prompt, and how many follow it."""
SEEDS = range(1, 7)
"""Of the prompts that are tried, until the model's own tokens for one are decided (`decided_by_length`)."""


class NotBuilt(Exception):
    """No small model of this class could be built."""


def default_settings(config_class: Any) -> Settings:
    """All settings of the class's default configuration."""
    found: Settings = config_class().to_dict()
    parts = [found]
    for part in parts:  # grows
        for name in ("transformers_version", "architectures", "torch_dtype", "dtype", "id2label", "label2id"):
            part.pop(name, None)
        parts += [value for value in part.values() if isinstance(value, dict)]
    return found


def build(model_class: Any) -> tuple[Any, Sizes]:
    """A small model with random weights, in eval mode.

    Raises:
        NotBuilt: with the first error.
    """
    config_class = model_class.config_class
    try:
        before = default_settings(config_class)
    except Exception as problem:
        raise NotBuilt(f"its default configuration: {_short(problem)}") from problem
    first, start = "", time.monotonic()
    for sizes in ATTEMPTS:
        settings = shrunk(before, sizes)
        if time.monotonic() - start > LONGEST:
            break
        for tried in (settings, *(given_back(settings, before, path) for path in changes(before, settings))):
            try:
                return _build(model_class, tried), sizes
            except Exception as problem:
                first = first or _short(problem)
    raise NotBuilt(first)


def _build(model_class: Any, settings: Settings) -> Any:
    """The model; a forward of two short prompts must work and be finite."""
    settings = {**settings, "use_cache": False}
    settings = _completed(model_class, settings)
    torch.manual_seed(0)
    config = model_class.config_class.from_dict(copy.deepcopy(settings))
    config._attn_implementation = "eager"
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count} parameters")
    model = model_class(config).eval()
    _randomise(model)
    logits = logits_of(model, prompts())
    if not logits.isfinite().all():
        raise ValueError("its logits are not finite")
    return model


def _completed(model_class: Any, settings: Settings) -> Settings:
    """Settings with those that a nested configuration lacks and another part of the configuration has."""
    missing = re.compile(r"'\w+' object has no attribute '(\w+)'")
    for _ in range(4):
        try:
            with torch.device("meta"):
                model_class(model_class.config_class.from_dict(copy.deepcopy(settings)))
        except AttributeError as problem:
            name = missing.search(str(problem))
            value = None if name is None else _found(settings, name[1])
            if name is None or value is None:
                break
            settings = {n: {**v, name[1]: value} if is_configuration(v) and name[1] not in v else v
                        for n, v in settings.items()}  # fmt: skip
        except Exception:
            break
        else:
            break
    return settings


def _found(settings: Settings, name: str) -> Any:
    """A setting of this name in any part of the settings."""
    if settings.get(name) is not None:
        return settings[name]
    parts = (_found(v, name) for v in settings.values() if isinstance(v, dict))
    return next((v for v in parts if v is not None), None)


def _randomise(model: Any) -> None:
    """Weights that make attention matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape), alpha=0.15 if parameter.ndim > 1 else 0.1)


def prompts(seed: int = 1, tokens: int = PROMPT) -> Tensor:
    """Two prompts, `[2, tokens]`, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY // 2, (2, tokens), generator=generator)


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """The model's logits for whole sequences, `[B, T, V]`."""
    with torch.no_grad():
        found = model(input_ids=ids)
    logits = found.logits if hasattr(found, "logits") else found[0]
    if not isinstance(logits, Tensor) or logits.shape[:2] != ids.shape:
        raise ValueError(f"its result is {tuple(getattr(logits, 'shape', ()))} for tokens {tuple(ids.shape)}")
    return logits


def sees_later(model: Any) -> tuple[int, int] | None:
    """A token of the model itself whose logits change when a later token does."""
    ids = prompts()
    before = logits_of(model, ids)
    for later in range(PROMPT - 1, 0, -1):
        other = ids.clone()
        other[:, later] = (ids[:, later] + 1) % (VOCABULARY // 2 - 3) + 3
        change = (logits_of(model, other) - before)[:, :later].abs().amax((0, 2))
        seen = (change > 1e-4 * before.abs().max()).nonzero()
        if len(seen):
            return int(seen[0]), later
    return None


def whole_sequences(model: Any, ids: Tensor, new: int) -> Tensor:
    """Greedy tokens, from the whole model called for each of them."""
    for _ in range(new):
        ids = torch.cat([ids, logits_of(model, ids)[:, -1:].argmax(-1)], 1)
    return ids


def theirs(model: Any, ids: Tensor, new: int) -> Tensor | None:
    """The tokens of transformers' `generate`; None if it does not run."""
    own = getattr(model, "generation_config", None)
    try:
        own.eos_token_id = own.forced_eos_token_id = own.forced_bos_token_id = None  # type: ignore[union-attr]
        own.pad_token_id = 0  # type: ignore[union-attr]
        found: Tensor = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, use_cache=True
        )
    except Exception:
        return None
    return found


def examine(name: str) -> dict[str, Any]:
    """What becomes of the class of this name."""
    import transformers

    row: dict[str, Any] = {"class": name}
    start = time.monotonic()
    try:
        model, _ = build(getattr(transformers, name))
    except NotBuilt as problem:
        return {**row, "outcome": "not built", "reason": str(problem)}
    row["parameters"] = sum(p.numel() for p in model.parameters())
    pair = sees_later(model)
    decoder = attngraph.compile(model, cache=True)
    if pair is not None:
        seen = {"reason": f"token {pair[0]} sees token {pair[1]}"}
        return {**row, **seen, "outcome": "wrong" if _derives(decoder, prompts()) else "not causal"}
    try:
        compiling = time.monotonic()
        decoder.prefill(prompts())
        row["seconds"] = round(time.monotonic() - compiling, 1)
        row |= compared(model, decoder)
    except attngraph.AttnGraphError as problem:
        return {**row, "outcome": "refused", "reason": _short(problem), "error": type(problem).__name__}
    except Exception as problem:
        return {**row, "outcome": "failed", "reason": _short(problem), "error": type(problem).__name__}
    row["attentions"] = len(decoder.report.attention)
    row["whole seconds"] = round(time.monotonic() - start, 1)
    return row


def compared(model: Any, decoder: attngraph.Decoder) -> dict[str, Any]:
    """Whether the decoder's tokens are those of the whole model: on the first prompts for which the model's
    own tokens are decided."""
    undecided: list[str] = []
    for seed in SEEDS:
        ids = prompts(seed)
        found, wanted = decoder.generate(ids, NEW), whole_sequences(model, ids, NEW)
        if torch.equal(wanted, found):
            generated = theirs(model, ids, NEW)
            same = None if generated is None else bool(torch.equal(generated, found))
            return {"outcome": "equal", "generate": same} | ({"undecided": undecided} if undecided else {})
        reason = decided_by_length(model, wanted)
        if reason is None:
            place = int((wanted != found).any(0).nonzero()[0]) - PROMPT
            return {"outcome": "wrong", "reason": f"{place} tokens are equal, then not"}
        undecided.append(reason)
    return {"outcome": "undecided", "reason": undecided[0]}


def decided_by_length(model: Any, ids: Tensor) -> str | None:
    """A token of which the model itself computes other logits when more tokens follow it, although none of
    them is seen: it chooses among equal scores, and which of these `topk` returns depends on how many there
    are. A decoder that computes each token once may choose another way. None where there is none."""
    whole = logits_of(model, ids)
    for count in range(2, ids.shape[1]):
        change = (logits_of(model, ids[:, :count]) - whole[:, :count]).abs().amax((0, 2))
        if bool((change > 1e-4 * whole.abs().max()).any()):
            token = int((change > 1e-4 * whole.abs().max()).nonzero()[0])
            return f"token {token} has other logits in a sequence of {count} than in one of {ids.shape[1]}"
    return None


def _derives(decoder: attngraph.Decoder, ids: Tensor) -> bool:
    """Whether there is a decoder."""
    try:
        decoder.prefill(ids)
    except attngraph.AttnGraphError:
        return False
    return True


def _short(problem: BaseException) -> str:
    text = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {text}"[:600]


def work(name: str, answer: Connection) -> None:
    """Send the row of a class; the target of a process."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    answer.send(examine(name))
