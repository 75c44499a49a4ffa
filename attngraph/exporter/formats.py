"""Writing an exported program to a file, and running the file for the check: torch's pt2, and ONNX."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from attngraph.capture.trace_lock import LOCK
from attngraph.errors import ExportError
from attngraph.exporter.tracing import varies

OPSET = 23
"""The first version of ONNX's operations that has Attention."""
Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Check = Callable[[Run], str]


def require_onnx() -> None:
    """Raise unless the packages that write ONNX are installed."""
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(
            f"ONNX files are written with {' and '.join(missing)}, which is not installed. What to do: "
            'pip install "attngraph[export]".'
        )


def write(
    program: ExportedProgram, path: Path, format: str, names: tuple[Sequence[str], Sequence[str]],
    check: Check | None, sizes: Sequence[Mapping[int, str]] = (),
) -> str:  # fmt: skip
    """Write the program; returns what the check says. Nothing new is at `path` unless the check passes.
    `sizes`: names for dimensions of the inputs.

    Raises:
        ExportError: the file cannot be written, or the check fails.
    """
    try:
        require_place(path)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".attngraph-") as folder:
            made = Path(folder) / path.name
            if format == "pt2":
                _quietly(lambda: torch.export.save(program, made))
            else:
                _write_onnx(program, made, names, sizes)
            told = "" if check is None else check(reader(made, format, names[1]))
            for file in Path(folder).iterdir():
                os.replace(file, path.parent / file.name)
    except OSError as problem:
        raise _unwritable(path, problem) from problem
    return told


def require_place(path: Path) -> None:
    """Raise unless a file can be written at the path; its folder is made.

    Raises:
        ExportError: says why not.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "that is a folder")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as problem:
        raise _unwritable(path, problem) from problem


def _unwritable(path: Path, problem: OSError) -> ExportError:
    why = problem.strerror or str(problem)
    return ExportError(f"cannot write {path}: {why}. What to do: name a file where you may write.")


def reader(path: Path, format: str, outputs: Sequence[str]) -> Run:
    """Runs a file: from its inputs in order to its outputs.

    Raises:
        ExportError: onnxruntime is not installed, or does not load the file.
    """
    return _pt2(path) if format == "pt2" else _session(path, outputs)


def became_numbers(
    program: ExportedProgram, names: Sequence[str], dynamic: Sequence[Sequence[int]]
) -> list[str]:  # fmt: skip
    """Remarks on dimensions that were to vary and do not."""
    nodes = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
    inputs = [nodes[str(given)] for given in program.graph_signature.user_inputs if str(given) in nodes]
    tensors = [n.meta["val"] for n in inputs if isinstance(n.meta.get("val"), Tensor)]
    return [
        f"dimension {d} of {name} is always {value.shape[d]}"
        for name, value, dims in zip(names, tensors, dynamic, strict=True)
        for d in dims
        if not varies(value.shape[d])
    ]


def _pt2(path: Path) -> Run:
    program = _quietly(lambda: torch.export.load(path))
    module = program.module()

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        spec = program.call_spec.in_spec
        assert spec is not None
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in _leaves(program)]
        args, kwargs = torch.utils._pytree.tree_unflatten(leaves, spec)
        with torch.no_grad():
            result = module(*args, **kwargs)
        return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor)]

    return run


def _leaves(program: ExportedProgram) -> list[Any]:
    example: Any = program.example_inputs
    return torch.utils._pytree.tree_leaves(example, is_leaf=lambda x: x is None)


def _write_onnx(
    program: ExportedProgram, path: Path, names: tuple[Sequence[str], Sequence[str]],
    sizes: Sequence[Mapping[int, str]],
) -> None:  # fmt: skip
    given: dict[str, Any] = {
        "input_names": list(names[0]),
        "output_names": list(names[1]),
        "opset_version": OPSET,
    }

    def made() -> Any:
        # torch's own optimisation also fuses rotary embeddings, and takes their angles to have a batch.
        found: Any = torch.onnx.export(program, dynamo=True, verbose=False, optimize=False, **given)
        importlib.import_module("onnxscript.optimizer").optimize(found.model)
        _name_sizes(found.model, sizes)
        return found

    try:
        with LOCK.trace():
            _quietly(lambda: made().save(str(path)))
    except Exception as problem:
        root: BaseException = problem
        while root.__cause__ is not None:
            root = root.__cause__
        raise ExportError(f"torch.onnx cannot write the model: {_first_line(root)}") from problem


def _name_sizes(model: Any, sizes: Sequence[Mapping[int, str]]) -> None:
    """Give symbolic sizes the names of the inputs' dimensions everywhere, in place of torch's (`s14`)."""
    known = {
        str(given.shape[dim].value): name
        for given, dims in zip(model.graph.inputs, sizes, strict=False)
        for dim, name in dims.items()
        if not isinstance(given.shape[dim], int)
    }
    if not known:
        return
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, known)) + r")\b")
    values = (*model.graph.inputs, *(v for node in model.graph for v in node.outputs))
    for value in (v for v in values if v.shape is not None and not v.shape.frozen):
        for dim, size in enumerate(value.shape):
            if not isinstance(size, int) and size.value is not None:
                value.shape[dim] = pattern.sub(lambda found: known[found[1]], str(size.value))


def _session(path: Path, outputs: Sequence[str]) -> Run:
    """Runs a file in onnxruntime."""
    if importlib.util.find_spec("onnxruntime") is None:
        raise ExportError(
            "the check runs the file in onnxruntime, which is not installed. What to do: "
            'pip install "attngraph[export]", or export with check=False.'
        )
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as problem:
        raise ExportError(f"onnxruntime does not load the file: {_first_line(problem)}") from problem
    inputs = [given.name for given in session.get_inputs()]

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        try:
            feeds = {n: t.detach().cpu().numpy() for n, t in zip(inputs, tensors, strict=True)}
            found = session.run(list(outputs), feeds)
        except Exception as problem:
            raise ExportError(f"onnxruntime cannot run the file: {_first_line(problem)}") from problem
        return [torch.from_numpy(a) for a in found]

    return run


def _first_line(problem: BaseException) -> str:
    return next((line for line in str(problem).splitlines() if line.strip()), type(problem).__name__)


def _quietly(act: Callable[[], Any]) -> Any:
    """Without the progress and the warnings of torch's exporters."""
    loud = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [logger.level for logger in loud]
    try:
        for logger in loud:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return act()
    finally:
        for logger, level in zip(loud, levels, strict=True):
            logger.setLevel(level)
