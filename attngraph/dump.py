"""A dump on disk: what was compiled, in files that a person can read and `attngraph inspect` can show.

    DIR/graph-0/00-capture.txt            the graph as it was traced
    DIR/graph-0/02-fuse-attention.txt     the graph after each pass that changed something, as it happens
    DIR/graph-0/index.json                every pass with its timing
    DIR/graph-0/report.json               the report, without texts
    DIR/graph-0/kernel-00.cpu.compiled.c  what was emitted for attention, each distinct text once

Every graph has a folder of its own. Nothing that is there already is written over.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from attngraph.entries import KernelEntry, PassRecord
from attngraph.errors import DumpError
from attngraph.report import CompileReport

CAPTURE = "capture"
_ENDINGS = {"cpu": "c", "triton": "py"}


class Dump:
    """Writes one graph's folder, pass by pass.

    Raises:
        DumpError: the folder cannot be made, or written to.
    """

    def __init__(self, root: Path) -> None:
        number = 0
        while (root / f"graph-{number}").exists():
            number += 1
        self.folder = root / f"graph-{number}"
        self.count = 0
        try:
            self.folder.mkdir(parents=True)
        except OSError as problem:
            raise DumpError(
                f"cannot write a dump to {root}: {problem.strerror or problem}. "
                "Name a folder that can be made."
            ) from problem

    def stage(self, name: str, title: str, notes: Sequence[str], text: str) -> Path:
        """Write the graph after a pass; the file."""
        head = [f"# {self.count:02d} {name}   {title}", *(f"# {n}" for n in notes)]
        path = self.folder / f"{self.count:02d}-{name}.txt"
        path.write_text("\n".join([*head, text]) + "\n", encoding="utf-8")
        self.count += 1
        return path

    def finish(self, report: CompileReport) -> None:
        """Write the index, the report, and the kernels' texts."""
        entries = [{k: v for k, v in dataclasses.asdict(r).items() if k != "text"} for r in report.passes]
        self._json("index.json", entries)
        found = json.loads(report.to_json())
        kernels = list(dict.fromkeys(a.kernel for a in report.attention if a.kernel.source))
        for number, kernel in enumerate(kernels):
            (self.folder / _kernel_file(number, kernel)).write_text(kernel.source, encoding="utf-8")
        for entry, given in zip(found["attention"], report.attention, strict=True):
            if given.kernel.source:
                entry["kernel"]["file"] = _kernel_file(kernels.index(given.kernel), given.kernel)
        self._json("report.json", found)

    def discard(self) -> None:
        """Remove the folder: what it holds is of an attempt that was not kept."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _json(self, name: str, data: object) -> None:
        (self.folder / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _kernel_file(number: int, kernel: KernelEntry) -> str:
    ending = _ENDINGS.get(kernel.name.split(".")[0], "txt")
    return f"kernel-{number:02d}.{re.sub(r'[^a-z0-9._-]', '-', kernel.name)}.{ending}"


def read_dump(root: Path) -> tuple[CompileReport, ...]:
    """The reports of all graphs of a dump, with their texts: of `DIR`, or of one `DIR/graph-N`.

    Raises:
        DumpError: there is no dump, or a file of it is missing, cut off, or of another version.
    """
    folders = sorted(root.glob("graph-*"), key=lambda p: (len(p.name), p.name)) or [root]
    if not root.is_dir() or not any((f / f"00-{CAPTURE}.txt").exists() for f in folders):
        raise DumpError(
            f"there is no dump in {root}: a dump is a folder with graph-0/00-{CAPTURE}.txt in it, as "
            'attngraph.compile(model, dump="DIR") or `attngraph compile TARGET --dump DIR` writes.'
        )
    return tuple(_read_graph(folder) for folder in folders)


def _read_graph(folder: Path) -> CompileReport:
    path = folder / "report.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        files = [entry["kernel"].pop("file", "") for entry in data["attention"]]
        report = CompileReport.from_json(json.dumps(data))
    except OSError as problem:
        raise DumpError(
            f"cannot read {path}: {problem.strerror or problem}. "
            "It is written when compiling ends; compile again."
        ) from problem
    except (ValueError, KeyError, TypeError) as problem:
        raise DumpError(
            f"{path} is cut off or of another version of attngraph ({problem}). Write the dump again."
        ) from problem
    texts = {p.stem.split("-", 1)[1]: _graph_text(p) for p in sorted(folder.glob("[0-9][0-9]-*.txt"))}
    lost = [r.name for r in report.passes if r.changed and r.name not in texts]
    if lost:
        raise DumpError(f"{folder} lacks the graph after {', '.join(lost)}. Write the dump again.")
    passes = tuple(dataclasses.replace(r, text=texts[r.name] if r.changed else "") for r in report.passes)
    attention = tuple(
        dataclasses.replace(a, kernel=KernelEntry(a.kernel.name, _kernel_text(folder, file)))
        for a, file in zip(report.attention, files, strict=True)
    )
    return dataclasses.replace(report, passes=passes, attention=attention, captured=texts[CAPTURE])


def _graph_text(path: Path) -> str:
    """A graph's text, without the words before it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    begins = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "\n".join(lines[begins:])


def _kernel_text(folder: Path, name: str) -> str:
    """The text of a kernel's file; only files of this folder are read."""
    if not name:
        return ""
    path = folder / Path(name).name
    if not path.is_file():
        raise DumpError(f"{folder} lacks {path.name}, the source of a kernel. Write the dump again.")
    return path.read_text(encoding="utf-8")


def notes_of(record: PassRecord) -> list[str]:
    """What a pass's file says at its head."""
    return [f"options: {record.options}"] * bool(record.options) + list(record.notes)
