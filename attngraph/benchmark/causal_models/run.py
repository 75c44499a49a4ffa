"""Gives every class a process with a time limit, one after the other, and keeps the rows in a file.

A row that the file has already is not computed again, so a run that was cut off goes on.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attngraph.benchmark.causal_models import one

Row = dict[str, Any]


def classes() -> list[str]:
    """The classes that `AutoModelForCausalLM` of the installed transformers can make, in order."""
    from transformers.models.auto import modeling_auto

    return sorted(set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()), key=str.lower)


def version() -> str:
    """Of the installed transformers."""
    import transformers

    return str(transformers.__version__)


def known(file: Path | None) -> list[Row]:
    """The rows of an earlier run; a later row of a class replaces an earlier one."""
    if file is None or not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return list({row["class"]: row for row in rows}.values())


def run(names: Sequence[str], file: Path | None, limit: float, tell: Callable[[str], None]) -> list[Row]:
    """The rows of these classes; new ones are appended to the file at once.

    Args:
        limit: seconds that a class may take.
    """
    found = {row["class"]: row for row in known(file)}
    for number, name in enumerate(names):
        if name in found:
            continue
        tell(f"{number + 1} of {len(names)}: {name}")
        found[name] = _one(name, limit)
        if file is not None:
            with file.open("a") as out:
                out.write(json.dumps(found[name]) + "\n")
    return [found[name] for name in names]


def _one(name: str, limit: float) -> Row:
    """The row of one class, from a process that has everything imported already when it starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["attngraph.benchmark.causal_models.preload"])
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=one.work, args=(name, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if mine.poll(limit):
            row: Row = mine.recv()
            return row
        return {"class": name, "outcome": "out of time", "reason": f"longer than {limit:.0f} s"}
    except EOFError:
        process.join(5)
        return {"class": name, "outcome": "failed", "reason": f"its process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()
