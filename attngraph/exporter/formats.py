"""What a format of files is, torch.export's own, and writing a program: whole and checked, or not at all."""

import contextlib
import dataclasses
import errno
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from attngraph.capture.instead import silenced
from attngraph.errors import ExportError, told_as

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Check = Callable[[Run], str]


@dataclasses.dataclass(frozen=True)
class Names:
    """The names of a program's inputs and results, in order; `sizes`: of dimensions of the inputs."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: Sequence[Mapping[int, str]] = ()


class Format:
    """A format; this one is torch.export's own, which `torch.export.load` reads. `has_attention`: whether it
    has an operation of its own for attention."""

    name = "pt2"
    has_attention = False

    def require(self) -> None:
        """Raise ExportError unless the packages that write it are installed."""

    def save(self, program: ExportedProgram, path: Path, names: Names) -> None:
        """Write a program."""
        with quiet():
            torch.export.save(program, path)

    def reader(self, path: Path, outputs: Sequence[str]) -> Run:
        """Runs a file: from its inputs in order to its outputs; ExportError where what runs it is not
        installed, or does not load the file."""
        with quiet():
            program = torch.export.load(path)
        module, spec = program.module(), program.call_spec.in_spec
        example = pytree.tree_leaves(program.example_inputs, is_leaf=lambda x: x is None)

        def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            given = iter(tensors)
            leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in example]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            with torch.no_grad():
                result: Any = module(*args, **kwargs)
            return [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]

        return run

    def guarded(self, tensor: Tensor, holds: Tensor, words: str) -> Tensor:
        """The tensor, in a program that fails where `holds` is not true, as `words` say."""
        torch._assert_async(holds, f"this file is for sizes with {words}")
        return tensor


PT2 = Format()


def write(program: ExportedProgram, path: Path, format: Format, names: Names, check: Check | None) -> str:
    """Write the program; returns what the check says. Nothing new is at `path` unless the check passes.
    ExportError where the file cannot be written, or the check fails."""
    require_place(path)
    with _writing(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=".attngraph-") as folder:
        made = Path(folder) / path.name
        format.save(program, made, names)
        told = "" if check is None else check(format.reader(made, names.outputs))
        for file in Path(folder).iterdir():
            os.replace(file, path.parent / file.name)
    return told


def require_place(path: Path) -> None:
    """Raise an ExportError that says why unless a file can be written at the path; its folder is made."""
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "that is a folder")
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def _writing(path: Path) -> contextlib.AbstractContextManager[None]:
    advice = ". What to do: name a file where you may write."
    return told_as(ExportError, OSError, before=f"cannot write {path}: ", after=advice)


@contextlib.contextmanager
def quiet(*others: str) -> Iterator[None]:
    """Without the progress and the warnings of torch's exporters, and what these `others` log."""
    loggers = silenced("torch.onnx", "onnxscript", "onnx_ir", "torch.export", *others)
    with loggers, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
