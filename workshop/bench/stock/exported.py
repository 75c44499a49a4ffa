"""Stock decoders and encoders of transformers, exported and run where attngraph is not installed.

    python -m workshop exports --json rows.json --resume --table docs/export.md

Each class is built small, with random weights, and written as pt2 and as ONNX. `alone.py` then runs the files
in a process that cannot import attngraph: greedy tokens of decoders and answers of encoders must be those of
the whole model in PyTorch.
"""

from __future__ import annotations

import datetime
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import attngraph
from attngraph.exporter.lower import OPERATION, PLAIN, SDPA
from workshop.bench.stock.decoders import NotBuilt, build, counts, prompts, stock_cells, whole_sequences
from workshop.harness import Row, Suite, in_one_cell, installed, machine, markdown, short
from workshop.processes import Tasks, limits, quietly

NEW, SKIPPED = 16, 2
"""Greedy tokens that are compared, and how many tokens of the second prompt are padding."""
CLOSE = 1e-4
"""How far answers of an encoder may be off, relative to the largest. `export` itself compares them by a
stricter rule; this shows that the file gives the same where attngraph is not."""
FORMATS = {"onnx": OPERATION, "pt2": SDPA}
DECODERS = (
    "GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM",
    "OPTForCausalLM", "BloomForCausalLM", "GPTNeoXForCausalLM", "GPTJForCausalLM", "GPTNeoForCausalLM",
    "FalconForCausalLM", "MptForCausalLM", "StableLmForCausalLM", "CohereForCausalLM", "OlmoForCausalLM",
    "Olmo2ForCausalLM", "GraniteForCausalLM", "Starcoder2ForCausalLM", "GptOssForCausalLM",
)  # fmt: skip
ENCODERS = (
    "AlbertForMaskedLM", "BertForMaskedLM", "CamembertForMaskedLM", "ConvBertForMaskedLM",
    "Data2VecTextForMaskedLM", "DistilBertForMaskedLM", "ElectraForMaskedLM", "ErnieForMaskedLM",
    "EsmForMaskedLM", "EuroBertForMaskedLM", "LayoutLMForMaskedLM", "MPNetForMaskedLM",
    "MegatronBertForMaskedLM", "MobileBertForMaskedLM", "ModernBertForMaskedLM", "NomicBertForMaskedLM",
    "RemBertForMaskedLM", "RoCBertForMaskedLM", "RoFormerForMaskedLM", "RobertaForMaskedLM",
    "RobertaPreLayerNormForMaskedLM", "XLMRobertaForMaskedLM", "XLMRobertaXLForMaskedLM", "XmodForMaskedLM",
    "DebertaV2ForMaskedLM",
)  # fmt: skip


def examine(name: str) -> dict[str, Any]:
    """What becomes of the class of this name."""
    import transformers

    row: dict[str, Any] = {"task": name, "kind": "decoder" if name in DECODERS else "encoder"}
    try:
        model, _ = build(getattr(transformers, name))
    except (NotBuilt, AttributeError) as problem:
        return {**row, "outcome": "not built", "reason": short(problem)}
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        try:
            found = _decoder(model, Path(folder)) if name in DECODERS else _encoder(model, Path(folder))
        except attngraph.AttnGraphError as problem:
            format = "".join(f"{note}: " for note in getattr(problem, "__notes__", ()))
            return {**row, "outcome": "refused", "reason": f"{format}{short(problem)}"}
        except Exception as problem:
            return {**row, "outcome": "failed", "reason": short(problem)}
    return {**row, **found, "seconds": round(time.monotonic() - start)}


def _decoder(model: Any, folder: Path) -> dict[str, Any]:
    ids = prompts()  # the second with padding before it
    ids[1, :SKIPPED] = 0
    decoder = attngraph.compile(model, cache=attngraph.CacheConfig(proof=False))
    reports = [_exported(decoder, folder, format, (ids,)) for format in FORMATS]
    rows = [ids[:1], ids[1:, SKIPPED:]]
    wanted = [whole_sequences(model, row, NEW)[0, row.shape[1] :].tolist() for row in rows]
    call = {
        "ids": ids, "new": NEW, "lengths": torch.tensor([row.shape[1] for row in rows]),
        "past": [(tuple(t.shape), t.dtype) for t in reports[0].empty_cache(len(rows))],
    }  # fmt: skip
    found = _alone(call, folder)
    return _row(reports, [tokens == wanted for tokens in found], "its tokens are not the model's")


def _encoder(model: Any, folder: Path) -> dict[str, Any]:
    ids = prompts()
    mask = torch.ones_like(ids)
    mask[1, -SKIPPED:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    compiled = attngraph.compile(model)
    reports = [_exported(compiled, folder, format, (), given) for format in FORMATS]
    with torch.no_grad():
        result = model(**given)
    wanted = result.logits if hasattr(result, "logits") else result[0]
    found = _alone({"inputs": [ids, mask], "wanted": wanted}, folder)
    return _row(reports, [difference < CLOSE for difference in found], "its answers are not the model's")


def _exported(
    compiled: Any, folder: Path, format: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> attngraph.ExportReport:
    """Export a call to a format, which an error names."""
    try:
        return attngraph.export(compiled, folder / f"model.{format}", args, kwargs)
    except attngraph.AttnGraphError as problem:
        problem.add_note(format)
        raise


def _alone(call: dict[str, Any], folder: Path) -> list[Any]:
    """What the files give in a process without attngraph."""
    torch.save(call, folder / "call.pt")
    files = [str(folder / f"model.{format}") for format in FORMATS]
    script = str(Path(__file__).with_name("alone.py"))
    run = subprocess.run(
        [sys.executable, "-I", script, str(folder / "call.pt"), *files], capture_output=True, text=True
    )
    if run.returncode:
        raise RuntimeError(run.stderr.strip().splitlines()[-1])
    return [json.loads(line) for line in run.stdout.splitlines()]


def _row(reports: list[attngraph.ExportReport], equal: list[bool], reason: str) -> dict[str, Any]:
    row: dict[str, Any] = {"outcome": "equal" if all(equal) else "wrong"}
    if not all(equal):
        row["reason"] = reason
    for report, (format, how) in zip(reports, FORMATS.items(), strict=True):
        row["attentions"] = len(report.attentions)
        row[format] = _operations(report.path) if format == "onnx" else report.count(how)
        row[f"{format} words"] = sorted({a.words for a in report.attentions})
    row["plain"] = reports[0].count(PLAIN)
    row["left"] = sum(r.startswith("not recognised") for r in reports[0].remarks)
    return row


def _operations(file: Path) -> int:
    """How many Attention operations a file has."""
    nodes = importlib.import_module("onnx").load(file).graph.node
    return sum(node.op_type == "Attention" for node in nodes)


def work(name: str, answer: Connection) -> None:
    """Send the row of a class; the target of a process."""
    quietly()
    answer.send(examine(name))


# --- the suite ---

HEADING = "## Models of transformers\n"
_SAID = """
Each class is built small from its default configuration, with random weights, and written in both formats.
The files are run in a process that cannot import attngraph or transformers. Of a decoder {new} greedy tokens
of two prompts, one of them padded, are those of a loop that calls the whole model for each token; of an
encoder the answers for two sequences, one of them padded, are the model's. Run on {date} with
{versions},
on {machine}. One command writes this part:

    python -m workshop exports --json rows.json --resume --table docs/export.md
"""
_COLUMNS = ["classes", "attentions", "Attention operations in ONNX", "SDPA in pt2", "what is said", "outcome"]
TASKS = Tasks(work, "workshop.bench.stock.preload")


def write(page: Path, rows: Sequence[Row]) -> None:
    """Replace the page's last part: a table of the decoders and one of the encoders."""
    before, _, _ = page.read_text(encoding="utf-8").partition(HEADING)
    here = machine()
    about = f"{here['processor']} ({', '.join(here['features'])})"
    when = f"{datetime.date.today():%-d %B %Y}"
    parts = [before, HEADING, _SAID.format(new=NEW, date=when, versions=_versions(), machine=about)]
    for kind in ("decoder", "encoder"):
        found = [row for row in rows if row.get("kind") == kind]
        equal = sum(row["outcome"] == "equal" for row in found)
        parts.append(f"\n### {kind.capitalize()}s: {equal} of {len(found)} equal\n\n")
        parts.append(markdown([_COLUMNS, *_lines(found)]) + "\n")
    page.write_text("".join(parts), encoding="utf-8")


def _lines(rows: Sequence[Row]) -> list[list[str]]:
    """A line for all classes of which the same is said."""
    classes: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        classes.setdefault(_said(row), []).append(row["cell"])
    return [[", ".join(names), *said] for said, names in classes.items()]


def _said(row: Row) -> tuple[str, ...]:
    numbers = [str(row.get(name, "")) for name in ("attentions", "onnx", "pt2")]
    words = "; ".join(w for w in row.get("onnx words", ()) if w)
    outcome = row["outcome"] + (f": {row['reason']}" if "reason" in row else "")
    return *numbers, in_one_cell(words), in_one_cell(outcome)


def _versions() -> str:
    """The versions of the packages that a file depends on, as far as they are installed."""
    names = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")
    found = [f"{name} {version}" for name in names if (version := installed(name)) is not None]
    return ", ".join(found)


MAIN = Suite(
    "exports", __doc__, lambda options: stock_cells((*DECODERS, *ENCODERS), TASKS, options), limits,
    after=counts, fails=lambda rows: any(row["outcome"] in ("wrong", "failed") for row in rows), page=write,
    tabled=False,
).main  # fmt: skip
