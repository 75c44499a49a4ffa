"""Block sizes that were measured: a small table for each device.

A table is a JSON file of block sizes by pass, dtype, widths, kind of program, window, heads
that share keys and number of queries, and, for attention over a cache, the number of programs per
multiprocessor:

    {"device": "NVIDIA H200", "triton": "3.9.0",
     "blocks": {"forward, bfloat16, 64 wide, values 64, causal": [64, 64, 4, 3, "rows in two tiles"],
                "decode of 16 queries, bfloat16, 128 wide, values 128, causal": [16, 64, 4, 3]},
     "programs": {"decode of 16 queries, bfloat16, 128 wide, values 128, causal": 4}}

A line's numbers are those of `Blocks`: queries, keys, warps, stages. What a user measures
(`attngraph.codegen.triton.tune`) is stored beside the emitted kernels as `tuned_<device>.json`. Without an
entry the rules of `blocks.py` apply. Malformed tables are logged and ignored; tables measured with another
version of Triton are logged.
"""

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

from attngraph.codegen.triton import plan as P
from attngraph.codegen.triton import store, visits
from attngraph.codegen.triton.plan import Blocks, in_two, padded
from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops.kernels import Operands
from attngraph.ir.records import write_whole

_log = logging.getLogger("attngraph.codegen.triton")
SPLIT = "rows in two tiles"
"""Follow the sizes of such blocks in a table."""
AHEAD = "products a tile ahead"
GROUPS = "groups of warps"
_WORDS = {SPLIT: "split", AHEAD: "ahead", GROUPS: "groups"}
_FEW = (128, 1024)
"""Calls of at most so many queries have entries of their own: they fill a GPU otherwise."""
_UP_TO = ", up to "


def key(
    step: str, program: ScoreProgram, D: int, Dv: int, dtype: torch.dtype, group: int = 1,
    queries: int | None = None,
) -> str:  # fmt: skip
    """The key of a table's entry: "forward, bfloat16, 128 wide, values 64, causal masked, window within 512,
    8 heads on one, up to 128 queries". What is usual is not said: heads of their own, many queries."""
    words = {
        "scored": not P.is_linear(program), "causal": P.diagonal(P.conjuncts(program)),
        "masked": visits.masks(program), "biased": P.tiles_read(program),
    }  # fmt: skip
    kind = " ".join(word for word, is_said in words.items() if is_said) or "plain"
    window, few = P.window_of(program), next((n for n in _FEW if queries is not None and queries <= n), None)
    about = [f"window within {padded(window)}"] if window else []
    about += [f"{group} heads on one"] if group > 1 else []
    widths = f"{sum(in_two(D))} wide", f"values {sum(in_two(Dv))}"
    line = ", ".join([step, P.DTYPES[dtype], *widths, kind, *about])
    return line if few is None else f"{line}{_UP_TO}{few} queries"


def key_of_call(step: str, program: ScoreProgram, operands: Operands) -> str:
    q, k, v = operands
    group = q.shape[1] // k.shape[1]
    return key(step, program, q.shape[3], v.shape[3], q.dtype, group, q.shape[2])


def find(name: str, line: str, Sq: int) -> Blocks | None:
    """The blocks measured on the device of that name, or None. Without an entry for few queries, that for
    many is taken."""
    known = measured(name).blocks
    blocks = known.get(line) or known.get(line.partition(_UP_TO)[0])
    if blocks is not None and Sq < blocks.q and not blocks.groups:
        return dataclasses.replace(blocks, q=padded(Sq), warps=min(blocks.warps, 4))
    return blocks


_written = 0


def changes() -> int:
    """How often tables were written in this process: what follows from them holds until then."""
    return _written


@dataclasses.dataclass(frozen=True)
class Table:
    """The contents of a file: blocks, for attention over a cache the best number of programs per
    multiprocessor, and the version of Triton that these were measured with."""

    blocks: Mapping[str, Blocks]
    programs: Mapping[str, int]
    triton: str | None = None


@functools.lru_cache(maxsize=16)
def measured(name: str) -> Table:
    """The table of a device; empty where it has no name."""
    path = _own(name)
    found = _read(path) if name else Table({}, {})
    if found.blocks and found.triton != _version():
        again = "`attngraph.codegen.triton.tune` measures anew"
        _log.warning("%s was measured with Triton %s, not %s; %s", path, found.triton, _version(), again)
    return found


def _own(name: str) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return store.directory() / f"tuned_{slug}.json"


def _read(path: Path) -> Table:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        blocks = {str(line): _blocks(numbers) for line, numbers in found["blocks"].items()}
        counts = {str(line): _count(n) for line, n in found.get("programs", {}).items()}
        return Table(blocks, counts, found.get("triton"))
    except FileNotFoundError:
        return Table({}, {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        _log.warning("%s is no table of block sizes and is not used: %r", path, problem)
        return Table({}, {})


def _version() -> str:
    return str(importlib.import_module("triton").__version__)


def _blocks(numbers: Any) -> Blocks:
    words = [word for word in numbers if word in _WORDS]
    q, k, warps, stages = sizes = [n for n in numbers if n not in _WORDS]
    if not all(type(n) is int for n in sizes):
        raise ValueError(f"{numbers} are not four whole numbers")
    powers = all(n & (n - 1) == 0 for n in (q, k, warps))
    if not (powers and 16 <= q <= 256 and 16 <= k <= 256 and 1 <= warps <= 16 and 1 <= stages <= 8):
        raise ValueError(f"{numbers} are no block sizes")
    return Blocks(q, k, warps, stages, **{_WORDS[word]: True for word in words})


def _count(number: Any) -> int:
    if type(number) is not int or not 1 <= number <= 64:
        raise ValueError(f"{number} is no number of programs")
    return number


def add(name: str, found: Mapping[str, Blocks], counts: Mapping[str, int] | None = None) -> None:
    """Add entries to the user's table, or start a new one if the old was measured with another Triton. It is
    written atomically.

    Args:
        counts: the number of programs per multiprocessor, for some of the entries.
    """
    path = _own(name)
    old = _read(path)
    if old.triton != _version():
        old = Table({}, {})
    lines, numbers = {**old.blocks, **found}, {**old.programs, **(counts or {})}
    content = {"device": name, "triton": _version(), "blocks": {
        line: [blocks.q, blocks.k, blocks.warps, blocks.stages,
               *(word for word, field in _WORDS.items() if getattr(blocks, field))]
        for line, blocks in sorted(lines.items())
    }, "programs": dict(sorted(numbers.items()))}  # fmt: skip
    write_whole(path, json.dumps(content, indent=1))
    measured.cache_clear()
    global _written
    _written += 1
