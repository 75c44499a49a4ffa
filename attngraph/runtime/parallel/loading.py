"""Weights of a model whose parameters ranks divide, read part by part: no rank ever has a whole one.

    with torch.device("meta"):
        model = Model(config)                       # no memory
    compiled = attngraph.compile(model, mesh=mesh)
    compiled.place(ids)                             # memory for this rank's part, not filled yet
    attngraph.load_weights(model, "weights.safetensors")

`torch.distributed.checkpoint.load` does the same for its own files, except for packed projections, whose
parts it refuses.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.errors import PlacementError


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Fill the parameters and buffers of a model from safetensors, of each only what this rank has.

    Args:
        path: a file; or a folder with `model.safetensors`, or with several files and
            `model.safetensors.index.json`.

    Raises:
        PlacementError: a weight is missing, or has another shape; nothing is changed. FileNotFoundError.
    """
    with contextlib.ExitStack() as stack:
        stored = dict(_stored(Path(path), stack))
        wanted: dict[int, tuple[list[str], Tensor]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            wanted.setdefault(id(tensor), ([], tensor))[0].append(name)
        chosen = [(_named(names, tensor, stored), tensor) for names, tensor in wanted.values()]
        with torch.no_grad():
            for source, tensor in chosen:
                local: Any = getattr(tensor, "_local_tensor", tensor)
                local.copy_(_part(source, tensor))


def _stored(path: Path, stack: contextlib.ExitStack) -> Iterator[tuple[str, Any]]:
    """The weights in files, by name; nothing of them is read yet."""
    from safetensors import safe_open

    index = path / "model.safetensors.index.json"
    files = [path / "model.safetensors" if path.is_dir() else path]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise PlacementError(f"{index} names {outside[0]!r:.80}, which is no file beside it.")
        files = [path / name for name in names]
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"there is no {file}.")
        opened = stack.enter_context(safe_open(str(file), framework="pt"))
        yield from ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118


def _named(names: list[str], tensor: Tensor, stored: Mapping[str, Any]) -> Any:
    """What is stored of a weight, under one of its names."""
    source = next((stored[name] for name in names if name in stored), None)
    if source is None:
        raise PlacementError(f"the files have no {names[0]}.")
    if list(source.get_shape()) != list(tensor.shape):
        found = list(source.get_shape())
        raise PlacementError(f"{names[0]} is {list(tensor.shape)} in the model, and {found} in the files.")
    if not _is_in_runs(tensor):
        raise PlacementError(
            f"{names[0]} is divided along two axes of the mesh, or unevenly.\nWhat to do: load weights "
            "before fully_shard, or with torch.distributed.checkpoint."
        )
    return source


def _is_in_runs(tensor: Any) -> bool:
    """Whether a tensor is whole, or what a rank has of it are equal runs of one dimension."""
    divided: list[Any] = [p for p in getattr(tensor, "placements", ()) if not p.is_replicate()]
    if not divided:
        return True
    parts = tensor.device_mesh.size() * getattr(divided[0], "split_factor", 1)
    return tensor.device_mesh.ndim == 1 and bool(tensor.shape[divided[0].dim] % parts == 0)


def _part(source: Any, tensor: Any) -> Tensor:
    """What this rank has of a stored weight: equal runs of one dimension, or all of it."""
    placement = next((p for p in getattr(tensor, "placements", ()) if not p.is_replicate()), None)
    if placement is None:
        found: Tensor = source[...]
        return found
    dim, runs = placement.dim, getattr(placement, "split_factor", 1)
    ranks, rank = tensor.device_mesh.size(), tensor.device_mesh.get_local_rank()
    size = tensor.shape[dim] // (ranks * runs)
    before = (slice(None),) * dim
    starts = [(run * ranks + rank) * size for run in range(runs)]
    return torch.cat([source[(*before, slice(start, start + size))] for start in starts], dim)
