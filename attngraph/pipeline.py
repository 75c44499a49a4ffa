"""Runs passes: each one is timed, verified, recorded and, on request, dumped.

A pass rewrites a program graph from one level to another and describes in notes what it did. It does not
depend on which passes run before or after it.
"""

import ast
import dataclasses
import logging
import shlex
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from attngraph.errors import AttnGraphError, PassError, VerificationError, meant
from attngraph.ir.graph import Level, ProgramGraph, format_file
from attngraph.ir.graph.verify import is_unchanged, seen, verify
from attngraph.ir.modes import own_modes
from attngraph.meaning.algebra.simplify.remembered import remembering
from attngraph.meaning.check.check import require_same_results
from attngraph.report.dump import CAPTURE, Dump, notes_of, write_failed, write_values
from attngraph.report.entries import PassRecord
from attngraph.report.user_code import UserCode, user_code

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Outcome:
    """What a pass did, as notes, which softmax-like places it left unfused (`report.entries.Missed`), and
    which attentions without a softmax it found (`OtherEntry`).

    `obstacles`: symbolic sizes that prevented a rewrite which might be possible if they were numbers.
    """

    notes: list[str] = dataclasses.field(default_factory=list)
    missed: list[Any] = dataclasses.field(default_factory=list)
    others: list[Any] = dataclasses.field(default_factory=list)
    obstacles: set[str] = dataclasses.field(default_factory=set)


class Pass(Protocol):
    """One rewrite. A frozen dataclass whose fields are its options.

    `run` edits the graph in place. It requires a graph at level `requires` and leaves it at level `yields`.
    Where a pass has an attribute `check` that is true, the graph's results after it are compared with those
    before it in float64 on random inputs.
    """

    @property
    def name(self) -> str: ...

    @property
    def requires(self) -> Level: ...

    @property
    def yields(self) -> Level: ...

    def run(self, graph: ProgramGraph) -> Outcome: ...


@dataclasses.dataclass
class Result(Outcome):
    """The result of a pipeline: what its passes did. `captured` is the text of the graph before it, `code`
    the user's lines that it comes from."""

    captured: str = ""
    code: UserCode = dataclasses.field(default_factory=UserCode)
    records: list[PassRecord] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Disabled:
    """A pass that is skipped. The graph gets the level that the pass would yield and is verified at it."""

    step: Pass
    name = property(lambda self: self.step.name)
    requires = property(lambda self: self.step.requires)
    yields = property(lambda self: self.step.yields)

    def run(self, graph: ProgramGraph) -> Outcome:
        return Outcome(["disabled"])


def split_at(passes: Sequence[Pass], name: str) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """The passes before the one of this name, and the passes from it on."""
    place = next(number for number, step in enumerate(passes) if step.name == name)
    return tuple(passes[:place]), tuple(passes[place:])


def placed(passes: Sequence[Pass], step: Pass, before: str) -> tuple[Pass, ...]:
    """The passes with one more, before the one of this name.

    Raises:
        ValueError: there is none of this name.
    """
    names = [known.name for known in passes]
    if before not in names:
        raise ValueError(f"there is no pass {before!r} in this order; {meant(before, names)}")
    first, rest = split_at(passes, before)
    return (*first, step, *rest)


def without(passes: Sequence[Pass], disabled: Collection[str]) -> tuple[Pass, ...]:
    """The passes, with those of the given names disabled."""
    return tuple(Disabled(step) if step.name in disabled else step for step in passes)


def run(
    graph: ProgramGraph,
    passes: Sequence[Pass],
    dump: Dump | None = None,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Run the passes in order on `graph`, in place.

    Args:
        dump: where the graph is written after each pass that changed it.
        progress: called with the name of each pass as it starts.

    Raises:
        ValueError: a pass needs another level than the graph has, or cannot be disabled.
        PassError: a pass failed, or left a graph that violates its level's invariants; the graph before it is
            written to a file, and the message has the command that runs the pass on it again.
    """
    with own_modes(), remembering():
        return _run(graph, passes, dump, progress)


def _run(
    graph: ProgramGraph, passes: Sequence[Pass], dump: Dump | None, progress: Callable[[str], None] | None
) -> Result:
    head, text = format_file(graph)
    result = Result(captured=text, code=user_code(graph))
    if dump is not None and dump.count == 0:
        write_values(graph, dump.folder)
        dump.stage(CAPTURE, graph.level.name.lower(), [], head, text)
    for number, step in enumerate(passes):
        step = _at(step, graph.level)
        if graph.level != step.requires:
            raise ValueError(
                f"pass {step.name} needs a graph at level {step.requires.name.lower()}, this one is at "
                f"{graph.level.name.lower()}; check the order of `passes`."
            )
        if progress is not None:
            progress(step.name)
        level = graph.level
        try:
            outcome, record, head, text = _run_one(step, graph, head, text, number == 0)
        except Exception as problem:
            if isinstance(problem, AttnGraphError) and not isinstance(problem, VerificationError):
                raise
            raise _failed(step, problem, head, text, graph, dump) from problem
        result.records.append(record)
        result.missed += outcome.missed
        result.others += outcome.others
        result.obstacles |= outcome.obstacles
        log.info("%s: %d -> %d ops in %.3f s", step.name, record.before, record.after, record.seconds)
        for note in outcome.notes:
            log.debug("%s: %s", step.name, note)
        _trace_artifact(step.name, text)
        if dump is not None and record.changed:
            levels = f"{level.name.lower()} -> {graph.level.name.lower()}"
            title = f"{levels}   {record.before} -> {record.after} ops"
            dump.stage(step.name, title, notes_of(record), head, text)
    return result


def _at(step: Pass, level: Level) -> Pass:
    """The pass for a graph at this level, if it is one that serves several (`serves`, levels)."""
    if isinstance(step, Disabled):
        return Disabled(_at(step.step, level))
    if level not in getattr(step, "serves", ()):
        return step
    yields = level if step.yields == step.requires else step.yields
    return dataclasses.replace(step, requires=level, yields=yields)  # type: ignore[type-var]


def _run_one(
    step: Pass, graph: ProgramGraph, head: str, text: str, is_first: bool
) -> tuple[Outcome, PassRecord, str, str]:
    """Run a pass on a graph that prints as `head` and `text`, and verify what it leaves. A graph that an
    earlier pass left is verified. Returns the pass's outcome, its record, and the graph's new header and
    text."""
    start = time.perf_counter()
    before, parts = graph.op_count(), seen(graph)
    kept = graph.copy() if getattr(step, "check", False) else None
    outcome = step.run(graph)
    if kept is not None:
        require_same_results(kept, graph)
    graph.reach(step.yields)
    after = text
    if is_first or not is_unchanged(parts, graph):
        graph.clean()
        verify(graph)
        head, after = format_file(graph)
    seconds = time.perf_counter() - start
    changed = after != text
    record = PassRecord(
        step.name, changed, seconds, before, graph.op_count(), tuple(outcome.notes), _options(step),
        after if changed else "",
    )  # fmt: skip
    return outcome, record, head, after


def _failed(
    step: Pass, problem: Exception, head: str, text: str, graph: ProgramGraph, dump: Dump | None
) -> Exception:
    """The exception to raise for a failed pass; writes the graph before it to a file."""
    if isinstance(step, Disabled):
        return ValueError(f"{step.name} cannot be disabled for this model: {problem}")
    about = f"pass {step.name} failed: {type(problem).__name__}: {problem}"
    try:
        file = write_failed(dump, step.name, about, head, text, graph)
    except OSError as reason:
        return PassError(f"{about}\n(The graph before it could not be written: {reason}.)", step.name)
    ours = type(step).__module__.startswith("attngraph.")
    advice = " What to do: report it with that file." if ours else ""
    return PassError(
        f"{about}\nThe graph before it is in {file}.{advice} To run the pass on it again:\n"
        f"{_again(step, str(file), ours)}",
        step.name, str(file),
    )  # fmt: skip


def _again(step: Pass, file: str, ours: bool) -> str:
    """What runs a pass on a file again: a command, or the lines of Python where none can name the pass."""
    options, name = _options(step), step.name if ours else _imported(type(step))
    if name and all(_is_plain(getattr(step, f.name)) for f in _fields(step)):
        command = f"{name}({options})" if options else name
        return f"    attngraph opt {shlex.quote(file)} -p {shlex.quote(command)}"
    return (
        "    from pathlib import Path\n"
        "    from attngraph import pipeline\n"
        "    from attngraph.report.dump import read_graph_file\n"
        f"    pipeline.run(read_graph_file(Path({file!r})), [your_pass])"
    )


def _imported(kind: type) -> str:
    """How a command names a class: by its module where that is in a package, else by its file; "" where
    there is neither, or it is made in a function."""
    module, name = sys.modules.get(kind.__module__), kind.__qualname__
    if not name.isidentifier() or getattr(module, name, None) is not kind:
        return ""
    if getattr(module, "__package__", ""):
        return f"{kind.__module__}:{name}"
    file = getattr(module, "__file__", None)
    return f"{Path(file).resolve()}:{name}" if file else ""


def _is_plain(value: Any) -> bool:
    """Whether a value is written as a literal."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _options(step: Pass) -> str:
    """The pass's own options as `name=value` pairs."""
    return ", ".join(f"{f.name}={getattr(step, f.name)!r}" for f in _fields(step))


def _fields(step: Pass) -> list[dataclasses.Field[Any]]:
    """The fields of a pass that are options of its own."""
    plain: Any = None if isinstance(step, Disabled) or not dataclasses.is_dataclass(step) else step
    fields = () if plain is None else dataclasses.fields(plain)
    return [f for f in fields if f.name not in ("name", "requires", "yields")]


def _trace_artifact(name: str, text: str) -> None:
    """Log the graph as a structured trace artifact, which tlparse shows."""
    torch._logging._internal.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"attngraph_{name}", "encoding": "string"},
        payload_fn=lambda: text,
    )
