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
from attngraph.errors import ExportError, first_line
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
        def made() -> Any:
            # torch's own optimisation also fuses rotary embeddings, and takes their angles to have a batch.
            found: Any = torch.onnx.export(
                program, dynamo=True, verbose=False, optimize=False, opset_version=OPSET,  # type: ignore[arg-type]
                input_names=list(names.inputs), output_names=list(names.outputs),
            )  # fmt: skip
            importlib.import_module("onnxscript.optimizer").optimize(found.model)
            _name_sizes(found.model, names.sizes)
            return found

        try:
            with LOCK.trace(), quiet():
                made().save(str(path))
        except Exception as problem:
            root: BaseException = problem
            while root.__cause__ is not None:
                root = root.__cause__
            raise ExportError(f"torch.onnx cannot write the model: {first_line(root)}") from problem

    def reader(self, path: Path, outputs: Sequence[str]) -> Run:
        if importlib.util.find_spec("onnxruntime") is None:
            raise ExportError(
                "the check runs the file in onnxruntime, which is not installed. What to do: "
                "pip install onnxruntime, or export with check=False."
            )
        runtime = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.log_severity_level = 4
        try:
            session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as problem:
            raise ExportError(f"onnxruntime does not load the file: {first_line(problem)}") from problem
        inputs = [given.name for given in session.get_inputs()]

        def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            try:
                feeds = {n: t.detach().cpu().numpy() for n, t in zip(inputs, tensors, strict=True)}
                found = session.run(list(outputs), feeds)
            except Exception as problem:
                raise ExportError(f"onnxruntime cannot run the file: {first_line(problem)}") from problem
            return [torch.from_numpy(a) for a in found]

        return run

    def guarded(self, tensor: Tensor, holds: Tensor, words: str) -> Tensor:
        place = torch.where(holds, 0, _NOWHERE).reshape(1)
        nothing = torch.zeros(1, dtype=tensor.dtype, device=tensor.device).index_select(0, place)
        return tensor + nothing.reshape(()) if tensor.dtype != torch.bool else tensor | nothing.reshape(())


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
