"""Figures of our kernels that may not get worse, in `budgets.json` beside this file.

They hold for the version of Triton that they were made with: another compiler makes other machine code.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workshop.bench.scorecard.run import GROUPS, OURS, Row

PATH = Path(__file__).with_name("budgets.json")
_MORE_IS_BETTER = ("pending", "beside", "predicted", "programs")
_DIGITS = {"cycles": 0, "edge_cycles": 0, "predicted": 0}
_NAMES = {
    "tensor": "operations of tensor cores over the fewest", "exponentials": "exponentials for each score",
    "others": "other instructions for each score", "edge": "the same under a mask",
    "stops": "waits for products and barriers in a tile", "pending": "loads under way during a tile",
    "beside": "part of the exponentials that lies beside products",
    "serialised": "remarks of ptxas that products wait for each other", "spilled": "bytes spilled",
    "shared": "bytes of shared memory", "registers": "registers", "programs": "programs on a multiprocessor",
    "cycles": "cycles for 64 x 64 scores", "edge_cycles": "cycles under a mask",
    "predicted": "predicted speed", "barriers": "barriers in a tile",
}  # fmt: skip
Budget = Mapping[str, float | None]


def triton_version() -> str:
    return str(importlib.import_module("triton").__version__)


def known(path: Path = PATH) -> dict[str, dict[str, Budget]]:
    """Budgets by target and row; none if they are of another Triton."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return dict(found["targets"]) if found["triton"] == triton_version() else {}


def budget(row: Row) -> Budget:
    """A row's figures as they are kept."""
    assert row.figures is not None and row.predicted is not None
    found = {**dataclasses.asdict(row.figures), "predicted": row.predicted}
    return {
        name: None if found[name] is None else round(found[name], _DIGITS.get(name, 2)) for name in _NAMES
    }


def regressions(rows: Sequence[Row], budgets: Mapping[str, Mapping[str, Budget]]) -> list[str]:
    """What is worse than its budget, in words; also a kernel of ours that has one and did not compile."""
    found = []
    for row in rows:
        own = budgets.get(row.target, {})
        where = f"{row.cell}{', ' if row.part else ''}{row.part} on {row.target}"
        if row.who not in (OURS, GROUPS):
            continue
        if row.figures is None:
            if any(key.startswith(f"{row.cell}, {row.who}") for key in own):
                found.append(f"{where}: {row.problem}")
        elif row.key in own:
            found += [f"{where}: {text}" for text in _worse(budget(row), own[row.key])]
    return found


def _worse(now: Budget, allowed: Budget) -> list[str]:
    found = []
    for name, words in _NAMES.items():
        is_value, limit = now[name], allowed.get(name)
        if is_value is None or limit is None:
            continue
        if (is_value < limit) if name in _MORE_IS_BETTER else (is_value > limit):
            found.append(f"{words}: {is_value:g}, the budget is {limit:g}")
    return found


def rewrite(rows: Sequence[Row], path: Path = PATH) -> None:
    """Make the figures of these rows their budgets; those of other rows stay, if they are of this Triton."""
    targets = {target: dict(own) for target, own in known(path).items()}
    for row in rows:
        if row.who in (OURS, GROUPS) and row.figures is not None:
            targets.setdefault(row.target, {})[row.key] = budget(row)
    lines = [
        f'  "{target}": {{\n'
        + ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(own.items()))
        + "\n  }"
        for target, own in sorted(targets.items())
    ]
    text = f'{{"triton": "{triton_version()}", "targets": {{\n' + ",\n".join(lines) + "\n}}\n"
    path.write_text(text, encoding="utf-8")
