"""Every causal language model of the installed transformers, small and with random weights, as a decoder.

    python -m workshop transformers --json rows.json --resume --table docs/transformers.md

Each class has a process of its own: it is built small (`shrink.py`), one sees whether it is causal, and the
tokens of a derived decoder are compared with a loop that calls the whole model for each token, and with the
`generate` of transformers.
"""

from __future__ import annotations

import collections
import copy
import functools
import re
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attngraph
from workshop.bench.stock.shrink import (
    ATTEMPTS,
    VOCABULARY,
    Settings,
    Sizes,
    changes,
    given_back,
    is_configuration,
    shrunk,
)  # fmt: skip
from workshop.harness import Cell, Options, Row, Suite, in_one_cell, markdown, short
from workshop.processes import Tasks, limits, quietly

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
        raise NotBuilt(f"its default configuration: {short(problem)}") from problem
    first, start = "", time.monotonic()
    for sizes in ATTEMPTS:
        settings = shrunk(before, sizes)
        if time.monotonic() - start > LONGEST:
            break
        for tried in (settings, *(given_back(settings, before, path) for path in changes(before, settings))):
            try:
                return _build(model_class, tried), sizes
            except Exception as problem:
                first = first or short(problem)
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

    row: dict[str, Any] = {"task": name}
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
        return {**row, "outcome": "refused", "reason": short(problem), "error": type(problem).__name__}
    except Exception as problem:
        return {**row, "outcome": "failed", "reason": short(problem), "error": type(problem).__name__}
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


def work(name: str, answer: Connection) -> None:
    """Send the row of a class; the target of a process."""
    quietly()
    answer.send(examine(name))


# --- the suite ---

_HEAD = """# Causal language models of transformers

Every class that `AutoModelForCausalLM` of transformers {version} can make, as a decoder. Each is built
small from its default configuration, by rules about the names of settings, with random weights. The decoder's
greedy tokens ({new} for each of two prompts) are compared with those of a loop that calls the whole model for
each token. One command makes this page:

    python -m workshop transformers --json rows.json --resume --table docs/transformers.md

"""
_MEANING = {
    "equal": "the decoder's tokens are those of the whole model",
    "wrong": "they are not",
    "undecided": "the model itself gives a token other logits when more tokens follow: it chooses among "
    "equal scores, and PyTorch's `topk` leaves open which of these it takes",
    "refused": "no decoder is derived; the reason says why",
    "not causal": "the class itself lets a token see a later one",
    "not built": "no small model could be built, or run with tokens alone; what stood in the way",
    "failed": "an error that is no refusal",
    "out of time": "longer than the time limit",
}
TASKS = Tasks(work, "workshop.bench.stock.preload")


def classes() -> list[str]:
    """The classes that `AutoModelForCausalLM` of the installed transformers can make, in order."""
    from transformers.models.auto import modeling_auto

    return sorted(set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()), key=str.lower)


def stock_cells(names: Sequence[str], tasks: Tasks, options: Options) -> Iterator[Cell]:
    """A cell for each class, whose one row is that of a task."""

    def measure(name: str) -> dict[str, Row]:
        row = tasks.one(name, options.seconds)
        return {row.pop("task"): row}

    for name in names:
        yield Cell(name, functools.partial(measure, name))


def counts(_: Options, rows: Sequence[Row]) -> str:
    """How many rows are of each outcome."""
    found = collections.Counter(row["outcome"] for row in rows).most_common()
    return "\n".join(f"{count:>4} of {len(rows)} {outcome}" for outcome, count in found)


def page(rows: Sequence[Row], version: str) -> str:
    """The page: what became of every class, and why."""
    rows = sorted(rows, key=lambda row: row["cell"].lower())
    count = collections.Counter(row["outcome"] for row in rows)
    summary = [
        [name, f"{count[name]} of {len(rows)}", said] for name, said in _MEANING.items() if count[name]
    ]
    lines = [
        _HEAD.format(version=version, new=NEW),
        markdown([["outcome", "classes", "meaning"], *summary]),
        "\n",
    ]
    for name in _MEANING:
        found = [row for row in rows if row["outcome"] == name]
        if found and name == "equal":
            lines.append("\n## equal\n\n" + ", ".join(row["cell"] for row in found) + ".\n")
            lines += _remarks(found)
        elif found:
            told = [[row["cell"], _reason(row.get("reason", ""))] for row in found]
            lines.append(f"\n## {name}\n\n{markdown([['class', 'reason'], *told])}\n")
    return "".join(lines)


def _remarks(equal: Sequence[dict[str, Any]]) -> list[str]:
    """What is worth saying of decoders whose tokens are the model's."""
    said = (
        ("For these the first prompts were left out, because the model's own tokens are undecided there (it "
         "chooses among equal scores)", lambda row: row.get("undecided")),
        ("For these transformers' own `generate` with its cache gives other tokens than calling the whole "
         "model does ([where they part](steps.md))", lambda row: row.get("generate") is False),
    )  # fmt: skip
    named = [(text, [row["cell"] for row in equal if which(row)]) for text, which in said]
    return [f"\n{text}: {', '.join(names)}.\n" for text, names in named if names]


def _reason(reason: str) -> str:
    """A reason in one cell: without what all refusals say."""
    reason = re.sub(r"^\w+Error: (no decoder can be derived from this model: )?", "", reason)
    reason = reason.split(" A decoder needs every token")[0].split(" What to do:")[0]
    return in_one_cell(reason)


def _write(file: Path, rows: Sequence[Row]) -> None:
    import transformers

    file.write_text(page(rows, transformers.__version__))


MAIN = Suite(
    "transformers", __doc__, lambda options: stock_cells(classes(), TASKS, options), limits, after=counts,
    fails=lambda rows: any(row["outcome"] == "wrong" for row in rows), page=_write, tabled=False,
).main  # fmt: skip
