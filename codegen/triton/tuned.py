"""Block sizes that were measured: a small table for each device.

A table is a JSON file of block sizes by pass, dtype, widths and kind of program. Those of devices that we
measured are shipped in `tuned/`; those that a user measures (`tuning.py`) lie beside the emitted kernels and
go first. What no table has follows the rules of `plan.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attngraph.codegen.triton import store, visits
from attngraph.codegen.triton.plan import (
    DTYPES,
    Blocks,
    conjuncts,
    diagonal,
    is_linear,
    padded,
    tiles_read,
)
from attngraph.ir.score import ScoreProgram

_log = logging.getLogger("attngraph.codegen.triton")
_SHIPPED = Path(__file__).parent / "tuned"


def key(step: str, program: ScoreProgram, D: int, Dv: int, dtype: torch.dtype) -> str:
    """The line of a table: "forward, bfloat16, 128 wide, values 128, causal"."""
    found = diagonal(conjuncts(program))
    words = ["" if is_linear(program) else "scored", "causal" if found else ""]
    words += ["masked" if visits.masks(program, found and found[0]) else ""]
    words += ["biased" if tiles_read(program) else ""]
    kind = " ".join(filter(None, words)) or "plain"
    return f"{step}, {DTYPES[dtype]}, {padded(D)} wide, values {padded(Dv)}, {kind}"


def find(name: str, line: str, Sq: int) -> Blocks | None:
    """What was measured on the device of that name, or None."""
    blocks = table(name).get(line) if name else None
    if blocks is not None and Sq < blocks.q:
        return dataclasses.replace(blocks, q=padded(Sq), warps=min(blocks.warps, 4))
    return blocks


@functools.lru_cache(maxsize=16)
def table(name: str) -> dict[str, Blocks]:
    """The table of a device: what is shipped, and over it what the user measured."""
    return {**_read(_SHIPPED / f"{_slug(name)}.json"), **_read(_own(name))}


def _own(name: str) -> Path:
    return store.directory() / f"tuned_{_slug(name)}.json"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _read(path: Path) -> dict[str, Blocks]:
    try:
        lines = json.loads(path.read_text(encoding="utf-8"))["blocks"]
        return {str(line): _blocks(numbers) for line, numbers in lines.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        _log.warning("%s is no table of block sizes and is not used: %r", path, problem)
        return {}


def _blocks(numbers: Any) -> Blocks:
    q, k, warps, stages = numbers
    sizes = (q, k, warps, stages)
    if not all(type(n) is int for n in sizes):
        raise ValueError(f"{numbers} are not four whole numbers")
    powers = all(n & (n - 1) == 0 for n in (q, k, warps))
    if not (powers and 16 <= q <= 256 and 16 <= k <= 256 and 1 <= warps <= 16 and 1 <= stages <= 8):
        raise ValueError(f"{numbers} are no block sizes")
    return Blocks(*sizes)


def add(name: str, found: Mapping[str, Blocks]) -> None:
    """Add lines to the user's table. Readers see the old table or the new one."""
    path = _own(name)
    lines = {**_read(path), **found}
    version = importlib.import_module("triton").__version__
    content = {"device": name, "triton": version, "blocks": {
        line: dataclasses.astuple(blocks) for line, blocks in sorted(lines.items())
    }}  # fmt: skip
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    table.cache_clear()
