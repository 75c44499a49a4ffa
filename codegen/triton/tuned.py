"""Block sizes that were measured: a small table for each device.

A table is a JSON file of block sizes (and schedules) by pass, dtype, widths and kind of program, and for
attention over a cache of how many programs a multiprocessor should have. Those of devices that we
measured are shipped in `tuned/`; those that a user measures (`tuning.py`) lie beside the emitted kernels and
go first. What no table has follows the rules of `plan.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import logging
import re
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
SPECIALISED = "warp-specialised"
"""Stands behind the sizes of such blocks in a table."""
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
    return {line: blocks for path in _paths(name) for line, blocks in _read(path)[0].items()}


@functools.lru_cache(maxsize=16)
def programs(name: str) -> dict[str, int]:
    """How many programs for each multiprocessor of the device were found best, over a cache."""
    return {line: count for path in _paths(name) for line, count in _read(path)[1].items()}


def _paths(name: str) -> tuple[Path, ...]:
    return (_SHIPPED / f"{_slug(name)}.json", _own(name)) if name else ()


def _own(name: str) -> Path:
    return store.directory() / f"tuned_{_slug(name)}.json"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _read(path: Path) -> tuple[dict[str, Blocks], dict[str, int]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        blocks = {str(line): _blocks(numbers) for line, numbers in found["blocks"].items()}
        return blocks, {str(line): _count(n) for line, n in found.get("programs", {}).items()}
    except FileNotFoundError:
        return {}, {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        _log.warning("%s is no table of block sizes and is not used: %r", path, problem)
        return {}, {}


def _blocks(numbers: Any) -> Blocks:
    *sizes, last = numbers
    specialised = last == SPECIALISED
    q, k, warps, stages = sizes = tuple(sizes if specialised else numbers)
    if not all(type(n) is int for n in sizes):
        raise ValueError(f"{numbers} are not four whole numbers")
    powers = all(n & (n - 1) == 0 for n in (q, k, warps))
    if not (powers and 16 <= q <= 256 and 16 <= k <= 256 and 1 <= warps <= 16 and 1 <= stages <= 8):
        raise ValueError(f"{numbers} are no block sizes")
    return Blocks(q, k, warps, stages, specialised)


def _count(number: Any) -> int:
    if type(number) is not int or not 1 <= number <= 64:
        raise ValueError(f"{number} is no number of programs")
    return number


def add(name: str, found: Mapping[str, Blocks], counts: Mapping[str, int] | None = None) -> None:
    """Add lines to the user's table. Readers see the old table or the new one.

    Args:
        counts: of some lines, how many programs each multiprocessor should have.
    """
    path = _own(name)
    lines, numbers = _read(path)
    lines, numbers = {**lines, **found}, {**numbers, **(counts or {})}
    version = importlib.import_module("triton").__version__
    content = {"device": name, "triton": version, "blocks": {
        line: [*dataclasses.astuple(blocks)[:4], *([SPECIALISED] if blocks.specialised else [])]
        for line, blocks in sorted(lines.items())
    }, "programs": dict(sorted(numbers.items()))}  # fmt: skip
    store.write(path, json.dumps(content, indent=1))
    table.cache_clear()
    programs.cache_clear()
