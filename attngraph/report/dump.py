"""A dump on disk: what was compiled, in files that a person can read and `attngraph inspect` can show.

    DIR/graph-0/00-capture.txt            the graph as it was traced
    DIR/graph-0/02-fuse-attention.txt     the graph after each pass that changed something, as it happens
    DIR/graph-0/index.json                every pass with its timing
    DIR/graph-0/report.json               the report, without texts
    DIR/breaks-0.json                     why a model was captured in pieces, if it was
    DIR/graph-0/values.json               contents of buffers, which passes may look at
    DIR/graph-0/code.json                 the user's functions that the graph comes from
    DIR/graph-0/kernel-00.cpu.compiled.c  source emitted for attention, each distinct text once

Every graph has a folder of its own. Existing files are never overwritten.
"""

import contextlib
import dataclasses
import itertools
import json
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from attngraph.errors import DumpError, reason_of, told_as
from attngraph.ir.graph import ProgramGraph, read_graph
from attngraph.ir.graph.literals import decode, encode
from attngraph.ir.graph.printer import input_name
from attngraph.ir.records import made
from attngraph.report.entries import AttentionEntry, Break, KernelEntry, PassRecord, TokenProgramEntry
from attngraph.report.report import CompileReport
from attngraph.report.user_code import UserCode

CAPTURE = "capture"
VALUES = "values.json"
CODE = "code.json"
_ENDINGS = {"cpu": "c", "triton": "py"}


class Dump:
    """Writes one graph's folder, pass by pass; DumpError where it cannot be created, or not written to."""

    def __init__(self, root: Path) -> None:
        self.folder = _free(root, "graph-{}")
        self.count = 0
        before, after = f"cannot write a dump to {root}: ", ". Name a folder that can be made."
        with told_as(DumpError, OSError, before=before, after=after):
            self.folder.mkdir(parents=True)

    def stage(self, name: str, title: str, notes: Sequence[str], head: str, text: str) -> Path:
        """Write the graph after a pass; return the file. `head` and `text` are by `ir/graph/printer.py`."""
        path = self.folder / f"{self.count:02d}-{name}.txt"
        _write_graph(path, [f"{self.count:02d} {name}   {title}", *notes], head, text)
        self.count += 1
        return path

    def finish(self, report: CompileReport) -> None:
        """Write the index, the report, and the kernels' texts."""
        found = json.loads(report.to_json())
        self._json("index.json", found["passes"])
        told: tuple[AttentionEntry | TokenProgramEntry, ...] = (*report.attention, *report.programs)
        kernels = list(dict.fromkeys(a.kernel for a in told if a.kernel.source))
        for number, kernel in enumerate(kernels):
            (self.folder / kernel_file(number, kernel)).write_text(kernel.source, encoding="utf-8")
        for entry, given in zip((*found["attention"], *found["programs"]), told, strict=True):
            if given.kernel.source:
                entry["kernel"]["file"] = kernel_file(kernels.index(given.kernel), given.kernel)
        self._json("report.json", found)
        self._json(CODE, dataclasses.asdict(report.code))

    def discard(self) -> None:
        """Remove the folder, which belongs to an attempt that was discarded."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _json(self, name: str, data: object) -> None:
        (self.folder / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def kernel_file(number: int, kernel: KernelEntry) -> str:
    """The name of the file with a kernel's source."""
    ending = _ENDINGS.get(kernel.name.split(".")[0], "txt")
    return f"kernel-{number:02d}.{re.sub(r'[^a-z0-9._-]', '-', kernel.name)}.{ending}"


def read_dump(root: Path) -> tuple[CompileReport, ...]:
    """The reports of all graphs of a dump, with their texts: of `DIR`, or of one `DIR/graph-N`. DumpError
    where there is no dump, or a file of it is missing, truncated, or of another version."""
    folders = sorted(root.glob("graph-*"), key=lambda p: (len(p.name), p.name)) or [root]
    if not root.is_dir() or not any((f / f"00-{CAPTURE}.txt").exists() for f in folders):
        raise DumpError(
            f"there is no dump in {root}: a dump is a folder with graph-0/00-{CAPTURE}.txt in it, as "
            'attngraph.compile(model, dump="DIR") or `attngraph compile TARGET --dump DIR` writes.'
        )
    if any(folder.is_symlink() for folder in folders if folder != root):
        raise DumpError(f"{root} has links in it. Copy it with what they point to (cp -rL).")
    first, *others = (_read_graph(folder) for folder in folders)
    found = (b for path in sorted(root.glob("breaks-*.json")) for b in _records(path, tuple[Break, ...]))
    return dataclasses.replace(first, breaks=(*dict.fromkeys(found), *first.breaks)), *others


def write_breaks(root: Path, breaks: Sequence[Break]) -> None:
    """Write where capture of the whole model stopped, if it was captured in pieces."""
    text = json.dumps([dataclasses.asdict(b) for b in breaks], indent=2) + "\n"
    _free(root, "breaks-{}.json").write_text(text, encoding="utf-8")


def _free(root: Path, name: str) -> Path:
    """The first path of names with numbers that is not there."""
    return next(path for n in itertools.count() if not (path := root / name.format(n)).exists())


def _records(path: Path, kind: Any) -> Any:
    """The records of a file."""
    with _whole(path):
        return made(kind, json.loads(_text_of(path)), path.name)


def _whole(path: Path, more: str = "") -> contextlib.AbstractContextManager[None]:
    """Tells of a file that is not as it was written."""
    kinds = OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError
    before, after = f"{path} is cut off or of another version (", f").{more}"
    return told_as(DumpError, *kinds, before=before, after=after, words=str)


def _read_graph(folder: Path) -> CompileReport:
    path = folder / "report.json"
    text = _text_or(path, "It is written when compiling ends; compile again.")
    with _whole(path, " Write the dump again."):
        data = json.loads(text)
        told = [*data["attention"], *data.get("programs", ())]
        files = [str(entry["kernel"].pop("file", "")) for entry in told]
        report = CompileReport.from_json(json.dumps(data))
    texts = {p.stem.split("-", 1)[1]: _graph_text(p) for p in sorted(folder.glob("[0-9][0-9]-*.txt"))}
    lost = [name for name in (CAPTURE, *(r.name for r in report.passes if r.changed)) if name not in texts]
    if lost:
        raise DumpError(f"{folder} lacks the graph after {', '.join(lost)}. Write the dump again.")
    sources = (_kernel_text(folder, file) for file in files)

    def with_source(entry: Any) -> Any:
        return dataclasses.replace(entry, kernel=dataclasses.replace(entry.kernel, source=next(sources)))

    return dataclasses.replace(
        report,
        attention=tuple(map(with_source, report.attention)),
        programs=tuple(map(with_source, report.programs)),
        passes=tuple(dataclasses.replace(r, text=texts[r.name] if r.changed else "") for r in report.passes),
        captured=texts[CAPTURE],
        code=_records(folder / CODE, UserCode) if (folder / CODE).exists() else UserCode(),
    )


def _graph_text(path: Path) -> str:
    """A graph's text, without the notes and the head before it."""
    lines = _text_or(path, "Write the dump again.").splitlines()
    begins = next((n for n, line in enumerate(lines) if line.endswith("(")), len(lines))
    return "\n".join(lines[begins:])


def _text_or(path: Path, advice: str) -> str:
    with told_as(DumpError, OSError, UnicodeDecodeError, before=f"cannot read {path}: ", after=f". {advice}"):
        return _text_of(path)


def _kernel_text(folder: Path, name: str) -> str:
    """The text of a kernel's file; only files of this folder are read."""
    if not name:
        return ""
    path = folder / Path(name).name
    said = f"{folder} lacks {path.name:.80}, the source of a kernel. Write the dump again."
    with told_as(DumpError, OSError, ValueError, words=lambda _: said):
        return _text_of(path)


def write_values(graph: ProgramGraph, folder: Path) -> None:
    """Write the known contents of a graph's inputs, which passes look at; no file if none are known."""
    inputs = ((input_name(given), node.name) for node, given in graph.given().items())
    known = {label: encode(graph.values[name]) for label, name in inputs if name in graph.values}
    if known:
        (folder / VALUES).write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def _write_graph(path: Path, words: Sequence[str], head: str, text: str) -> None:
    path.write_text("\n".join([*(f"# {line}" for line in words), head, text]) + "\n", encoding="utf-8")


def write_failed(dump: Dump | None, name: str, about: str, head: str, text: str, graph: ProgramGraph) -> Path:
    """Write the graph before a pass that failed, into the dump or else a new folder; return the file. OSError
    where it cannot be written."""
    folder = Path(tempfile.mkdtemp(prefix="attngraph-failed-")) if dump is None else dump.folder
    path = folder / f"before-{name}.txt"
    _write_graph(path, about.splitlines(), head, text)
    write_values(graph, folder)
    return path


def read_graph_file(path: Path, libraries: Collection[str] = ()) -> ProgramGraph:
    """The graph of a dump's file, with the contents of buffers that are stored beside it. `libraries`: whose
    operations it may have, besides PyTorch's and attngraph's. DumpError where a file cannot be read; a
    TextError names the line where the text is truncated or wrong."""
    with told_as(
        DumpError, OSError, UnicodeDecodeError, before=f"cannot read {path}: ",
        after=f". Name a file of a dump, {_files_near(path)}.",
        words=lambda p: reason_of(p) if isinstance(p, OSError) else "it is no text",
    ):  # fmt: skip
        text = _text_of(path.resolve())
    graph, beside = read_graph(text, path.name, None, libraries), path.with_name(VALUES)
    if not beside.exists():
        return graph
    with _whole(beside):
        known = {name: decode(value) for name, value in json.loads(_text_of(beside)).items()}
    for node, given in graph.given().items():
        if input_name(given) in known:
            found, wanted = known[input_name(given)], node.meta["val"]
            if found.dtype != wanted.dtype or found.ndim != wanted.ndim:
                raise DumpError(f"{beside} and {path} do not go together: {input_name(given)}.")
            graph.values[node.name] = found
    return graph


MOST_BYTES = 1 << 29
"""Of a file of a dump."""


def _text_of(path: Path) -> str:
    """The text of a plain file: through a link a page would show what is elsewhere."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise OSError(0, "it is no plain file")
    if found.st_size > MOST_BYTES:
        raise OSError(0, f"it is larger than {MOST_BYTES} bytes")
    return path.read_text(encoding="utf-8")


def _files_near(path: Path) -> str:
    """The graphs' files in the folder of a path, or how such files are named. (A pass that changed nothing
    has none.)"""
    folder = path if path.is_dir() else path.parent
    found = sorted(folder.glob("[0-9]*-*.txt")) or sorted(folder.glob("graph-*/[0-9]*-*.txt"))
    return "one of " + ", ".join(map(str, found[:8])) if found else "NN-<pass>.txt"


def notes_of(record: PassRecord) -> list[str]:
    """The notes at the beginning of a pass's file."""
    return [f"options: {record.options}"] * bool(record.options) + list(record.notes)
