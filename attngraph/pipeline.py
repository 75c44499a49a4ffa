"""Running passes: each one is timed, verified, recorded and, if asked, dumped.

A pass rewrites a program graph from one level to another and says what it did in words. It knows
neither what came before it nor what comes after.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from attngraph.ir.graph import Level, ProgramGraph, verify
from attngraph.ir.text import format_graph

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Outcome:
    """What a pass did, in words, and which softmax-like places it left alone (`report.Missed`).

    `obstacles`: symbolic sizes without which it might have done more, if they were numbers.
    """

    notes: list[str] = dataclasses.field(default_factory=list)
    missed: list[Any] = dataclasses.field(default_factory=list)
    obstacles: set[str] = dataclasses.field(default_factory=set)


class Pass(Protocol):
    """One rewrite. A frozen dataclass whose fields are its options.

    `run` edits the graph in place. It may rely on level `requires`, and leaves level `yields`.
    """

    @property
    def name(self) -> str: ...

    @property
    def requires(self) -> Level: ...

    @property
    def yields(self) -> Level: ...

    def run(self, graph: ProgramGraph) -> Outcome: ...


@dataclasses.dataclass(frozen=True)
class PassRecord:
    """One run of one pass. `before` and `after` count computing ops."""

    name: str
    changed: bool
    seconds: float
    before: int
    after: int
    notes: tuple[str, ...]


@dataclasses.dataclass
class Result:
    """What a pipeline did."""

    records: list[PassRecord] = dataclasses.field(default_factory=list)
    missed: list[Any] = dataclasses.field(default_factory=list)
    obstacles: set[str] = dataclasses.field(default_factory=set)


def run(
    graph: ProgramGraph,
    passes: Sequence[Pass],
    dump: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Run the passes in order on `graph`, in place.

    Args:
        dump: a directory for one text file per pass that changed something, and an index.
        progress: told the name of each pass as it starts.

    Raises:
        ValueError: a pass needs another level than the graph has.
        VerificationError: a pass left a graph that breaks its level's rules.
    """
    result = Result()
    writer = _Dump(dump) if dump is not None else None
    if writer is not None:
        writer.write("capture", graph, "captured", [])
    text = format_graph(graph)
    for step in passes:
        if graph.level != step.requires:
            raise ValueError(
                f"pass {step.name} needs a graph at level {step.requires.name.lower()}, this one is at "
                f"{graph.level.name.lower()}; check the order of `passes`."
            )
        if progress is not None:
            progress(step.name)
        start = time.perf_counter()
        before, level = graph.op_count(), graph.level
        outcome = step.run(graph)
        graph.level = step.yields
        graph.clean()
        verify(graph)
        seconds = time.perf_counter() - start
        text, previous = format_graph(graph), text
        changed = text != previous
        record = PassRecord(step.name, changed, seconds, before, graph.op_count(), tuple(outcome.notes))
        result.records.append(record)
        result.missed += outcome.missed
        result.obstacles |= outcome.obstacles
        log.info("%s: %d -> %d ops in %.3f s", step.name, before, record.after, seconds)
        for note in outcome.notes:
            log.debug("%s: %s", step.name, note)
        _trace_artifact(step.name, text)
        if writer is not None and changed:
            title = f"{level.name.lower()} -> {graph.level.name.lower()}   {before} -> {record.after} ops"
            writer.write(step.name, graph, title, [*_options(step), *outcome.notes])
    if writer is not None:
        writer.index(result)
    return result


def _options(step: Pass) -> list[str]:
    """The pass's own options, where it has any."""
    fields: Any = dataclasses.fields(step) if dataclasses.is_dataclass(step) else ()
    shown = [
        f"{f.name}={getattr(step, f.name)!r}" for f in fields if f.name not in ("name", "requires", "yields")
    ]
    return [f"options: {', '.join(shown)}"] if shown else []


class _Dump:
    """`NN-<pass>.txt` files in a directory of their own, and `index.json` with the timings."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        number = 0
        while (root / f"graph-{number}").exists():
            number += 1
        self.folder = root / f"graph-{number}"
        self.folder.mkdir()
        self.count = 0

    def write(self, name: str, graph: ProgramGraph, title: str, notes: Sequence[str]) -> None:
        head = [f"# {self.count:02d} {name}   {title}", *(f"# {n}" for n in notes)]
        path = self.folder / f"{self.count:02d}-{name}.txt"
        path.write_text("\n".join([*head, format_graph(graph)]) + "\n")
        self.count += 1

    def index(self, result: Result) -> None:
        entries = [dataclasses.asdict(r) for r in result.records]
        (self.folder / "index.json").write_text(json.dumps(entries, indent=2) + "\n")


def _trace_artifact(name: str, text: str) -> None:
    """One artifact per pass, so that tlparse shows them."""
    torch._logging._internal.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"attngraph_{name}", "encoding": "string"},
        payload_fn=lambda: text,
    )
