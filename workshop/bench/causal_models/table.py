"""The rows as a page of the documentation: what became of every class, and why."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from typing import Any

from workshop.bench.processes import cell

_HEAD = """# Causal language models of transformers

Every class that `AutoModelForCausalLM` of transformers {version} can make, as a decoder. Each is built
small from its default configuration, by rules about the names of settings, with random weights. The decoder's
greedy tokens ({new} for each of two prompts) are compared with those of a loop that calls the whole model for
each token. One command makes this page:

    python -m workshop.bench.causal_models --json rows.jsonl --table docs/transformers.md

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


def table(rows: Sequence[dict[str, Any]], version: str, new: int) -> str:
    """The page."""
    counts = collections.Counter(row["outcome"] for row in rows)
    lines = [_HEAD.format(version=version, new=new), "| outcome | classes | meaning |\n|---|---|---|\n"]
    lines += [f"| {name} | {counts[name]} of {len(rows)} | {said} |\n" for name, said in _MEANING.items()
              if counts[name]]  # fmt: skip
    for name in _MEANING:
        found = [row for row in rows if row["outcome"] == name]
        if found and name == "equal":
            lines.append("\n## equal\n\n" + ", ".join(f"{row['class']}" for row in found) + ".\n")
            lines += _remarks(found)
        elif found:
            lines.append(f"\n## {name}\n\n| class | reason |\n|---|---|\n")
            lines += [f"| {row['class']} | {_cell(row.get('reason', ''))} |\n" for row in found]
    return "".join(lines)


def _remarks(equal: Sequence[dict[str, Any]]) -> list[str]:
    """What is worth saying of decoders whose tokens are the model's."""
    said = (
        ("For these the first prompts were left out, because the model's own tokens are undecided there (it "
         "chooses among equal scores)", lambda row: row.get("undecided")),
        ("For these transformers' own `generate` with its cache gives other tokens than calling the whole "
         "model does", lambda row: row.get("generate") is False),
    )  # fmt: skip
    named = [(text, [row["class"] for row in equal if which(row)]) for text, which in said]
    return [f"\n{text}: {', '.join(names)}.\n" for text, names in named if names]


def _cell(reason: str) -> str:
    """A reason in one cell: without what all refusals say."""
    reason = re.sub(r"^\w+Error: (no decoder can be derived from this model: )?", "", reason)
    reason = reason.split(" A decoder needs every token")[0].split(" What to do:")[0]
    return cell(reason)
