"""One class: build it small, export it in both formats, run the files alone, and compare."""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import attngraph
from attngraph.exporter.lower import OPERATION, PLAIN, SDPA
from workshop.bench.causal_models.one import NotBuilt, build, prompts, whole_sequences
from workshop.bench.exports.classes import DECODERS

NEW, SKIPPED = 16, 2
"""Greedy tokens that are compared, and how many tokens of the second prompt are padding."""
CLOSE = 1e-4
"""How far answers of an encoder may be off, relative to the largest. `export` itself compares them by a
stricter rule; this shows that the file gives the same where attngraph is not."""
FORMATS = {"onnx": OPERATION, "pt2": SDPA}


def examine(name: str) -> dict[str, Any]:
    """What becomes of the class of this name."""
    import transformers

    row: dict[str, Any] = {"class": name, "kind": "decoder" if name in DECODERS else "encoder"}
    try:
        model, _ = build(getattr(transformers, name))
    except (NotBuilt, AttributeError) as problem:
        return {**row, "outcome": "not built", "reason": _short(problem)}
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        try:
            found = _decoder(model, Path(folder)) if name in DECODERS else _encoder(model, Path(folder))
        except attngraph.AttnGraphError as problem:
            format = "".join(f"{note}: " for note in getattr(problem, "__notes__", ()))
            return {**row, "outcome": "refused", "reason": f"{format}{_short(problem)}"}
        except Exception as problem:
            return {**row, "outcome": "failed", "reason": _short(problem)}
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


def _short(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:600]


def work(name: str, answer: Connection) -> None:
    """Send the row of a class; the target of a process."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    answer.send(examine(name))
