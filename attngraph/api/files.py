"""Sides that are files: a saved folder of attngraph, and an ONNX file, which onnxruntime runs."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attngraph.api.compile import load
from attngraph.api.compiled import CompiledModule
from attngraph.errors import SavedError
from attngraph.runtime.decoder import Decoder
from attngraph.saved.folder import MANIFEST


class OnnxFile:
    """An ONNX file as a function of its inputs, in their order or by name. It returns arrays."""

    untraced = "it is an ONNX file"

    def __init__(self, path: Path) -> None:
        if importlib.util.find_spec("onnxruntime") is None:
            raise SavedError(
                f"{path} is run by onnxruntime, which is not installed: pip install onnxruntime."
            )
        runtime = importlib.import_module("onnxruntime")
        try:
            self.session: Any = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        except Exception as problem:  # onnxruntime's exceptions have no class in common
            raise SavedError(f"onnxruntime cannot read {path}: {problem}") from problem
        self.names: list[str] = [given.name for given in self.session.get_inputs()]

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> list[Any]:
        if len(args) > len(self.names):
            raise TypeError(
                f"the file takes {len(self.names)} input(s), {', '.join(self.names)}; found {len(args)}"
            )
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        found: list[Any] = self.session.run(None, {n: t.detach().numpy() for n, t in given.items()})
        return found


class SavedGraphs:
    """What a folder of saved graphs computes, for the dtypes and sizes that they serve."""

    untraced = "it is a folder of saved graphs"
    has_gradients = False

    def __init__(self, loaded: CompiledModule) -> None:
        self.loaded = loaded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        try:
            with torch.no_grad():
                return self.loaded(*args, **kwargs)
        except SavedError:
            with torch.enable_grad():
                return self.loaded(*args, **kwargs)


def is_file_of_a_side(name: str | Path) -> bool:
    """Whether a name is that of an ONNX file, or of a folder that `save` wrote."""
    return str(name).endswith(".onnx") or (Path(name) / MANIFEST).is_file()


def side_in(path: str | Path) -> Any:
    """What a file or a folder holds, to be called.

    Raises:
        SavedError: it cannot be read; a folder has no weights, or has changed.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        loaded = load(path)
        if not isinstance(loaded, Decoder):
            return SavedGraphs(loaded)
        return SimpleNamespace(  # which keeps its weights: a module would be given the reference's
            prefill=loaded.prefill, decode=loaded.decode, config_of_cache=loaded.config_of_cache
        )
    if not path.is_file():
        raise SavedError(f"there is no file {path}.")
    return OnnxFile(path)
