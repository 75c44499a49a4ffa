"""The rows as the last part of a page of the documentation."""

from __future__ import annotations

import datetime
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workshop.bench.processes import cell, machine

HEADING = "## Models of transformers\n"
_SAID = """
Each class is built small from its default configuration, with random weights, and written in both formats.
The files are run in a process that cannot import attngraph or transformers. Of a decoder {new} greedy tokens
of two prompts, one of them padded, are those of a loop that calls the whole model for each token; of an
encoder the answers for two sequences, one of them padded, are the model's. Run on {date} with
{versions},
on {machine}. One command writes this part:

    python -m workshop.bench.exports --json rows.jsonl --table docs/export.md
"""
_HEAD = "| class | attentions | Attention operations in ONNX | SDPA in pt2 | what is said | outcome |\n"


def write(page: Path, rows: Sequence[dict[str, Any]], new: int) -> None:
    """Replace the page's last part."""
    before, _, _ = page.read_text(encoding="utf-8").partition(HEADING)
    page.write_text(before + table(rows, new), encoding="utf-8")


def table(rows: Sequence[dict[str, Any]], new: int) -> str:
    """A table of the decoders and one of the encoders."""
    when = f"{datetime.date.today():%-d %B %Y}"
    lines = [HEADING, _SAID.format(new=new, date=when, versions=_versions(), machine=machine())]
    for kind in ("decoder", "encoder"):
        found = [row for row in rows if row.get("kind") == kind]
        equal = sum(row["outcome"] == "equal" for row in found)
        lines.append(f"\n### {kind.capitalize()}s: {equal} of {len(found)} equal\n\n")
        lines.append(_HEAD + "|---|---|---|---|---|---|\n")
        for row in found:
            words = "; ".join(w for w in row.get("onnx words", ()) if w)
            numbers = " | ".join(str(row.get(name, "")) for name in ("attentions", "onnx", "pt2"))
            outcome = row["outcome"] + (f": {row['reason']}" if "reason" in row else "")
            lines.append(f"| {row['class']} | {numbers} | {cell(words)} | {cell(outcome)} |\n")
    return "".join(lines)


def _versions() -> str:
    """The versions of the packages that a file depends on, as far as they are installed."""
    names = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")
    found = [f"{name} {version}" for name in names if (version := _version(name)) is not None]
    return ", ".join(found)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
