"""Running passes: each one is timed, verified, recorded and, if asked, dumped.

A pass rewrites a program graph from one level to another and says what it did in words. It knows
neither what came before it nor what comes after.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from attngraph.dump import CAPTURE, Dump, notes_of
from attngraph.entries import PassRecord
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


@dataclasses.dataclass
class Result:
    """What a pipeline did. `captured` is the graph before it, as text."""

    captured: str = ""
    records: list[PassRecord] = dataclasses.field(default_factory=list)
    missed: list[Any] = dataclasses.field(default_factory=list)
    obstacles: set[str] = dataclasses.field(default_factory=set)


def run(
    graph: ProgramGraph,
    passes: Sequence[Pass],
    dump: Dump | None = None,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Run the passes in order on `graph`, in place.

    Args:
        dump: where the graph is written after each pass that changed something.
        progress: told the name of each pass as it starts.

    Raises:
        ValueError: a pass needs another level than the graph has.
        VerificationError: a pass left a graph that breaks its level's rules.
    """
    result = Result(format_graph(graph))
    text = result.captured
    if dump is not None and dump.count == 0:
        dump.stage(CAPTURE, graph.level.name.lower(), [], text)
    for step in passes:
        if graph.level != step.requires:
            raise ValueError(
                f"pass {step.name} needs a graph at level {step.requires.name.lower()}, this one is at "
                f"{graph.level.name.lower()}; check the order of `passes`."
            )
        if progress is not None:
            progress(step.name)
        level = graph.level
        outcome, record, text = _run_one(step, graph, text)
        result.records.append(record)
        result.missed += outcome.missed
        result.obstacles |= outcome.obstacles
        log.info("%s: %d -> %d ops in %.3f s", step.name, record.before, record.after, record.seconds)
        for note in outcome.notes:
            log.debug("%s: %s", step.name, note)
        _trace_artifact(step.name, text)
        if dump is not None and record.changed:
            title = (
                f"{level.name.lower()} -> {graph.level.name.lower()}   {record.before} -> {record.after} ops"
            )
            dump.stage(step.name, title, notes_of(record), text)
    return result


def _run_one(step: Pass, graph: ProgramGraph, text: str) -> tuple[Outcome, PassRecord, str]:
    """Run and verify a pass on a graph that prints as `text`; what it says, its record, the new text."""
    start = time.perf_counter()
    before = graph.op_count()
    outcome = step.run(graph)
    graph.level = step.yields
    graph.clean()
    verify(graph)
    seconds = time.perf_counter() - start
    after = format_graph(graph)
    changed = after != text
    record = PassRecord(
        step.name, changed, seconds, before, graph.op_count(), tuple(outcome.notes), _options(step),
        after if changed else "",
    )  # fmt: skip
    return outcome, record, after


def _options(step: Pass) -> str:
    """The pass's own options in words, where it has any."""
    fields: Any = dataclasses.fields(step) if dataclasses.is_dataclass(step) else ()
    return ", ".join(
        f"{f.name}={getattr(step, f.name)!r}" for f in fields if f.name not in ("name", "requires", "yields")
    )


def _trace_artifact(name: str, text: str) -> None:
    """One artifact per pass, so that tlparse shows them."""
    torch._logging._internal.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"attngraph_{name}", "encoding": "string"},
        payload_fn=lambda: text,
    )
