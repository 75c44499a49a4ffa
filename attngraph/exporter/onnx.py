"""ONNX files: torch's exporter writes them, onnxruntime runs them."""

import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from attngraph.capture.instead import LOCK
from attngraph.errors import ExportError, first_line, told_as
from attngraph.exporter.formats import Format, Names, Run, quiet

OPSET = 23
"""The first version of ONNX's operations that has Attention."""
_NOWHERE = 1 << 20
"""An index that nothing has."""


class Onnx(Format):
    """A model for onnxruntime and others."""

    name, has_attention = "onnx", True

    def require(self) -> None:
        missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
        if missing:
            raise ExportError(
                f"ONNX files are written with {' and '.join(missing)}, which is not installed. What to do: "
                "pip install onnx onnxscript onnxruntime."
            )

    def save(self, program: ExportedProgram, path: Path, names: Names) -> None:
        before = "torch.onnx cannot write the model: "
        with told_as(ExportError, Exception, before=before, words=_first_cause), LOCK.trace(), quiet():
            # torch's own optimisation also fuses rotary embeddings, and takes their angles to have a batch.
            made: Any = torch.onnx.export(
                program, dynamo=True, verbose=False, optimize=False, opset_version=OPSET,  # type: ignore[arg-type]
                input_names=list(names.inputs), output_names=list(names.outputs),
            )  # fmt: skip
            importlib.import_module("onnxscript.optimizer").optimize(made.model)
            _name_sizes(made.model, names.sizes)
            made.save(str(path))

    def reader(self, path: Path, outputs: Sequence[str]) -> Run:
        if importlib.util.find_spec("onnxruntime") is None:
            raise ExportError(
                "the check runs the file in onnxruntime, which is not installed. What to do: "
                "pip install onnxruntime, or export with check=False."
            )
        runtime = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.log_severity_level = 4
        with told_as(ExportError, Exception, before="onnxruntime does not load the file: ", words=first_line):
            session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        inputs = [given.name for given in session.get_inputs()]

        def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            with told_as(
                ExportError, Exception, before="onnxruntime cannot run the file: ", words=first_line
            ):
                feeds = {n: t.detach().cpu().numpy() for n, t in zip(inputs, tensors, strict=True)}
                found = session.run(list(outputs), feeds)
            return [torch.from_numpy(a) for a in found]

        return run

    def guarded(self, tensor: Tensor, holds: Tensor, words: str) -> Tensor:
        place = torch.where(holds, 0, _NOWHERE).reshape(1)
        nothing = torch.zeros(1, dtype=tensor.dtype, device=tensor.device).index_select(0, place)
        return tensor + nothing.reshape(()) if tensor.dtype != torch.bool else tensor | nothing.reshape(())


def _first_cause(problem: BaseException) -> str:
    return first_line(problem) if problem.__cause__ is None else _first_cause(problem.__cause__)


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
