"""The text of the user's code from which a graph comes, and how each of its lines was reached.

A report keeps the functions, so that a page can show them where the model's files are not. Lines are named as
in the graph's text (`source_of`). Nothing is imported or run: lines are read from files that the trace named.
"""

import bisect
import dataclasses
import linecache
import re
import sys
from collections.abc import Iterable, Sequence

from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.graph.source import PASSES_ON, Frame, call_stack, module_of, short_path, source_of

_MOST_LINES = 120
"""Most lines of one function that are kept, around those that ops come from."""
_AROUND = 5
"""Lines kept around one that is in no function."""
_DEFINITION = re.compile(r"\s*(async\s+def|def|class)\s")
_NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Lines of a file, from line `first` on: a function, or a part of a long one."""

    file: str
    first: int
    text: str


@dataclasses.dataclass(frozen=True)
class Reached:
    """How a line was reached by the modules of one name (numbers in it are `#`): the lines that call each
    other, the line itself last. `own` is the place among them of the model's own line: not the library's."""

    source: str
    module: str
    frames: tuple[str, ...]
    own: int


@dataclasses.dataclass(frozen=True)
class UserCode:
    """The lines that a graph comes from."""

    stretches: tuple[Stretch, ...] = ()
    reached: tuple[Reached, ...] = ()

    def how(self, source: str, module: str) -> Reached | None:
        """How a line was reached in a module; by any module, if not by one of that name."""
        of_line = [r for r in self.reached if r.source == source]
        alike = (r for r in of_line if r.module == like(module))
        return next(alike, of_line[0] if of_line else None)

    def line(self, frame: str) -> tuple[Stretch, int] | None:
        """The stretch that a line is in, and its place there."""
        file, _, number = frame.rpartition(":")
        for stretch in self.stretches:
            place = int(number) - stretch.first
            if stretch.file == file and 0 <= place <= stretch.text.count("\n"):
                return stretch, place
        return None


def like(module: str) -> str:
    """A module's name with its numbers as `#`: equal for equal layers."""
    return _NUMBER.sub("#", module)


def user_code(graph: ProgramGraph) -> UserCode:
    """The code that the ops of a graph come from."""
    stacks: dict[str, tuple[list[Frame], int]] = {}
    reached: dict[tuple[str, str], Reached] = {}
    lines: dict[Frame, None] = {}
    for node in graph.graph.nodes:
        trace, source = node.meta.get("stack_trace"), source_of(node)
        key = source, like(module_of(node))
        if not trace or not source or "source" in node.meta or key in reached:
            continue
        if trace not in stacks:
            stacks[trace] = _without_what_passes_on(*call_stack(trace))
        frames, own = stacks[trace]
        if frames:
            reached[key] = Reached(*key, tuple(f.source for f in frames), own)
            lines |= dict.fromkeys(frames)
    return UserCode(tuple(_stretches(lines)), tuple(reached.values()))


def code_at(sources: Iterable[str]) -> UserCode:
    """The functions around lines that are named as in a report, of files that this process has loaded."""
    files = [*linecache.cache, *(str(getattr(m, "__file__", "")) for m in [*sys.modules.values()])]
    paths = {short_path(path): path for path in files if path.endswith(".py")}
    frames = []
    for source in dict.fromkeys(sources):
        file, _, line = source.rpartition(":")
        if file in paths and line.isdecimal():
            frames.append(Frame(paths[file], int(line)))
    reached = tuple(Reached(f.source, "", (f.source,), 0) for f in frames)
    return UserCode(tuple(_stretches(frames)), reached)


def _without_what_passes_on(frames: Sequence[Frame], own: int) -> tuple[list[Frame], int]:
    """The frames without those that only pass their arguments on, as decorators do."""
    passes_on = [PASSES_ON.search(linecache.getline(f.path, f.line)) for f in frames[:-1]]
    kept = [n for n in range(len(frames)) if n == len(frames) - 1 or not passes_on[n]]
    return [frames[n] for n in kept], min(bisect.bisect_left(kept, own), len(kept) - 1)


def _stretches(frames: Iterable[Frame]) -> list[Stretch]:
    """The functions around lines, each once, in the order of their files and lines."""
    found: dict[tuple[str, str], dict[int, int]] = {}
    for frame in frames:
        text = linecache.getlines(frame.path)
        if 0 < frame.line <= len(text):
            start, stop = _function(text, frame.line - 1)
            spans = found.setdefault((frame.file, frame.path), {})
            spans[start] = max(spans.get(start, 0), stop)
    return [
        Stretch(file, start + 1, "".join(linecache.getlines(path)[start:stop]).rstrip("\n"))
        for (file, path), spans in found.items()
        for start, stop in _joined(sorted(spans.items()))
    ]


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans that overlap, as one."""
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def _function(text: Sequence[str], line: int) -> tuple[int, int]:
    """Where the function around a line begins and ends, by its indentation: its file need not be valid
    Python any more."""
    depth, start = _depth(text[line]), line
    while start >= 0:
        if text[start].strip() and _depth(text[start]) < depth:
            if _DEFINITION.match(text[start]):
                break
            depth = depth if text[start].lstrip().startswith((")", "]", "}")) else _depth(text[start])
        start -= 1
    if start < 0:
        return max(line - _AROUND, 0), min(line + _AROUND + 1, len(text))
    stop = start + 1
    while stop < len(text) and (
        not text[stop].strip()
        or _depth(text[stop]) > _depth(text[start])
        or text[stop].lstrip().startswith((")", "]", "}", "#"))
    ):
        stop += 1
    stop = max(stop, line + 1)
    while start > 0 and text[start - 1].lstrip().startswith("@"):
        start -= 1
    if stop - start > _MOST_LINES:
        start = max(start, line - _MOST_LINES // 2)
        stop = min(stop, start + _MOST_LINES)
    return start, stop


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())
