"""`attngraph.load`: a compiled model, or a decoder, from the folder that `save` wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attngraph.api import saving
from attngraph.api.compiled import CompiledModule
from attngraph.api.methods import decoder_of
from attngraph.runtime.decoder import Decoder
from attngraph.saved.weights import load_skeleton


def load(
    path: str | Path, model: Callable[..., Any] | None = None, *, strict: bool = False
) -> CompiledModule | Decoder:
    """A compiled model, or a decoder, from the folder that its `save` wrote.

    Every file is compared with its digest. Whether a graph still fits is looked at when a call needs it: the
    model's structure and attributes, the code that was traced, buffers whose values were read, versions, the
    processor. Where something does not fit, it is named in a warning, and the model is traced anew.

    Args:
        model: the model, with its weights. None: the weights that were saved with `weights=True`; then the
            model's code is not needed, and only calls are served for which there is a graph.
        strict: raise where something does not fit, instead of tracing anew.

    Raises:
        SavedError: a file is missing or has changed, nothing was saved with weights, or, with `strict`,
            something does not fit.
    """
    folder = saving.Folder(Path(path), strict or model is None)
    target = load_skeleton(folder.path, folder.about) if model is None else model
    options, said = folder.options(), folder.said
    compiled = CompiledModule(target, options, saved=folder if said.config is None else None)
    return compiled if said.config is None else decoder_of(compiled, options, said.config, folder)
