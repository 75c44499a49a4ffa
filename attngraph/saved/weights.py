"""Weights beside a saved model, as safetensors, and a module that is made of them alone."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.errors import SavedError, told_as
from attngraph.saved.folder import WEIGHTS, read_file


def weights_of(target: Callable[..., Any], about: dict[str, Any]) -> dict[str, bytes]:
    """The weights as safetensors; `about` gets what a model without its class needs."""
    if not isinstance(target, nn.Module):
        raise SavedError("a function has no weights of its own; save it without weights=True.")
    safetensors = _safetensors()
    named = {
        **dict(target.named_parameters(remove_duplicate=False)),
        **dict(target.named_buffers(remove_duplicate=False)),
    }
    first: dict[int, str] = {}
    about["weights"] = {
        name: {
            "same": first.setdefault(id(t), name), "parameter": isinstance(t, nn.Parameter),
            "gradient": t.requires_grad,
        } for name, t in named.items()
    }  # fmt: skip
    about["training"] = target.training
    about["signature"] = [
        [p.name, p.kind.name, p.default is not p.empty]
        for p in inspect.signature(target.forward).parameters.values()
    ]
    own = {name: named[name].detach().contiguous() for name in first.values()}
    return {WEIGHTS: safetensors.save(own)}


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as problem:
        raise SavedError(
            "weights are saved as safetensors, which is not installed: pip install safetensors; or save "
            "without weights=True."
        ) from problem
    return safetensors.torch


def put(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Register a parameter or a buffer by its name in a module, in modules that are made where needed."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(last, tensor)
    else:
        root.register_buffer(last, tensor)


class Skeleton(nn.Module):
    """A model's weights without its code: it has the names of its weights, and no forward of its own."""

    def __init__(self, about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        made_once: dict[str, Tensor] = {}
        for name, entry in about["weights"].items():
            if entry["same"] not in made_once:
                value = weights[entry["same"]]
                made_once[entry["same"]] = (
                    nn.Parameter(value, entry["gradient"]) if entry["parameter"] else value
                )
            put(self, name, made_once[entry["same"]])
        self.train(about["training"])
        kinds = {kind.name: kind for kind in inspect._ParameterKind}
        parameters = [
            inspect.Parameter(name, kinds[kind], default=None if has else inspect.Parameter.empty)
            for name, kind, has in about["signature"]
        ]

        def forward(*args: Any, **kwargs: Any) -> Any:
            raise SavedError(
                "no saved graph serves this call, and the model's code is not there to trace another; load "
                "it with its model: attngraph.load(path, model)."
            )

        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward


def load_skeleton(path: Path, about: Mapping[str, Any]) -> Skeleton:
    """The weights of a saved model as a module. `about`: its manifest. SavedError where they were not saved,
    or do not go together, or safetensors is missing."""
    if "weights" not in about:
        raise SavedError(
            f"{path} has no weights: it was saved without weights=True. Give the model: "
            "attngraph.load(path, model)."
        )
    data, library = read_file(path, about, WEIGHTS), _safetensors()
    before = f"the weights of {path} cannot be put together: "
    with told_as(SavedError, Exception, before=before, words="{!r:.300}.".format):  # names are the file's
        weights = library.load(data)
        for name, tensor in weights.items():
            if tensor.dtype is torch.bool and tensor.numel() and tensor.view(torch.uint8).max() > 1:
                raise ValueError(f"{name} has a truth that is neither 0 nor 1")
        return Skeleton(about, weights)
