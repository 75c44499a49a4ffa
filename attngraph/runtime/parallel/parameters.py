"""Parameters of a model that several ranks run: each a DTensor that says what a rank has of it.

What a graph divides is `Shard`, or `_StridedShard` where a packed projection is cut in equal runs; everything
else is replicated. Compiling replaces the parameters by DTensors of the whole shapes, so optimisers (made
afterwards), state dicts, gradient clipping and checkpoints work; the first call lets each rank keep its part,
in the same objects. While a graph is traced the model has stand-ins without memory in their place.

Weights are read part by part, so that no rank ever has a whole one:

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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.errors import PlacementError
from attngraph.ir.graph.program_graph import Input, ProgramGraph
from attngraph.ir.graph.ranks import Shard
from attngraph.ir.versions import version_of
from attngraph.meaning.check.ranks import PerRank, parts_of
from attngraph.meaning.placement.table import Table
from attngraph.runtime.machine import own_tensor
from attngraph.runtime.parallel.fully_sharded import is_fully_sharded
from attngraph.runtime.parallel.mesh import MeshAxis, RankMesh

_WHOLE = "_attngraph_needed_whole"
"""Marks parameters that a graph needs whole on every rank."""


def require_undivided(model: nn.Module, ranks: RankMesh) -> None:
    """Check that no parameter of a model is a DTensor of another mesh, as after `fully_shard`."""
    own = None if ranks.tensor is None else ranks.tensor.mesh
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh != own:
            placed = ", ".join(map(str, parameter.placements))  # type: ignore[attr-defined]
            raise PlacementError(
                f"{name} is a DTensor of another mesh already ({placed}), as fully_shard makes them. A "
                "compiled model does not run the hooks of its modules, by which fully_shard collects them.\n"
                "What to do: compile the model first, call compiled.place(example), and then "
                "fully_shard(compiled, mesh=...) along the other axis, once for all of it."
            )


def replicate(model: nn.Module, axis: MeshAxis) -> None:
    """Make parameters DTensors that every rank has whole: what is divided is known after the first trace."""
    from torch.distributed.tensor import DTensor, Replicate

    def whole(parameter: Tensor) -> Tensor:
        if isinstance(parameter, DTensor):
            return parameter
        local = _unfilled(parameter, axis.mesh.device_type) if parameter.is_meta else parameter.detach()
        made = DTensor.from_local(local, axis.mesh, [Replicate()], run_check=False)
        return nn.Parameter(made, requires_grad=parameter.requires_grad)

    replace(model, whole)


def distribute(graph: ProgramGraph, owner: nn.Module, axis: MeshAxis) -> None:
    """Let each rank keep of the parameters what the graph says, unless another graph of the model divides one
    otherwise, it is no replicated DTensor, or `fully_shard` was applied before: these are errors."""
    from torch.distributed.tensor import DTensor

    assert graph.ranks is not None
    named = dict(owner.named_parameters(remove_duplicate=False))
    inputs = _inputs(graph)
    for name in (i.name for i in inputs if i.kind == "parameter" and i.name in named):
        if any(not p.is_replicate() for p in getattr(named[name], "placements", ())):
            raise PlacementError(
                f"this call needs all of {name.removeprefix('model.')} on every rank, but an earlier one "
                'divided it.\nWhat to do: shard=ShardConfig(parameters="whole").'
            )
        vars(named[name])[_WHOLE] = True
    for shard in (graph.ranks.shards[i.name] for i in inputs if i.kind == "shard"):
        parameter: Any = named[shard.parameter]
        wanted = _placement(shard, parameter)
        placements: tuple[Any, ...] = getattr(parameter, "placements", ())
        if placements == (wanted,):
            continue
        if is_fully_sharded(owner):
            raise PlacementError(
                f"this call divides {shard.parameter.removeprefix('model.')} as {wanted}, but fully_shard "
                "has it already.\nWhat to do: compiled.place(example) before fully_shard(compiled, mesh=...)."
            )
        if _WHOLE in vars(parameter) or not (len(placements) == 1 and placements[0].is_replicate()):
            name, found = shard.parameter.removeprefix("model."), ", ".join(map(str, placements))
            raise PlacementError(
                f"this call divides {name} as {wanted}, but since an earlier one, or since the model was "
                f"changed, it is {found or 'no DTensor'} and needed so.\n"
                'What to do: shard=ShardConfig(parameters="whole").'
            )
        part = _part(shard, parameter._local_tensor.detach(), axis.mesh.get_local_rank())
        made: Any = DTensor.from_local(
            part, axis.mesh, [wanted], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        # The same object: optimisers refer to it.
        parameter._spec, parameter._local_tensor = made._spec, made._local_tensor
        parameter.grad = None
    for local in unfilled(owner):
        local.untyped_storage().resize_(local.numel() * local.itemsize)


def unfilled(model: nn.Module) -> list[Tensor]:
    """What this rank has of parameters of a model that have no memory yet."""
    return [local for p in model.parameters() if has_no_memory(local := getattr(p, "_local_tensor", p))]


def has_no_memory(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and a device, but no memory for its elements."""
    return not tensor.is_meta and tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def require_contents(model: Any) -> None:
    """Check that the buffers of a model have contents: masks and positions are derived from them."""
    for name, buffer in model.named_buffers() if isinstance(model, nn.Module) else ():
        if buffer.is_meta:
            raise PlacementError(
                f"buffer {name} is on meta, and what it holds may decide masks and positions.\nWhat to do: "
                "put parameters alone on meta, as accelerate.init_empty_weights does, or fill the buffer."
            )


def _part(shard: Shard, whole: Tensor, rank: int) -> Tensor:
    """A rank's part of a parameter; without contents where the parameter has none."""
    if not has_no_memory(whole):
        return shard.of(whole, rank).contiguous()
    part = shard.of(torch.empty_like(whole, device="meta"), rank)
    return torch.empty_like(part, device=whole.device).contiguous()


def _unfilled(parameter: Tensor, device: Any) -> Tensor:
    """A tensor of the shape and strides of a parameter, without memory."""
    whole = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
    whole.untyped_storage().resize_(0)
    return whole


def _inputs(graph: ProgramGraph) -> set[Input]:
    """The inputs of a graph and of its stages, without parameters that nothing uses."""
    given = [pair for part in (graph, *graph.stages.values()) for pair in part.given().items()]
    return {i for node, i in given if node.users or i.kind != "parameter"}


def replace(model: nn.Module, make: Callable[[Tensor], Tensor]) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Put what `make` gives in every place of a parameter. Returns what was there: store, name, parameter."""
    found: list[tuple[dict[str, Any], str, Tensor]] = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    made = {id(parameter): make(parameter) for parameter in {id(p): p for *_, p in found}.values()}
    for store, name, parameter in found:
        store[name] = made[id(parameter)]
    return found


def _placement(shard: Shard, parameter: Tensor) -> Any:
    from torch.distributed.tensor import Shard as Even
    from torch.distributed.tensor.placement_types import _StridedShard

    (dim,), (places,) = shard.dims, shard.places
    runs = Table(places.cpu(), int(parameter.shape[dim])).runs()
    assert runs is not None, "a parameter is held divided only in equal runs"
    return Even(dim) if runs == 1 else _StridedShard(dim, split_factor=runs)


@contextlib.contextmanager
def stand_ins(owner: nn.Module) -> Iterator[None]:
    """While a graph is traced: plain parameters of the whole shapes, without memory, instead of the model's.
    (A trace keeps weak references to what it saw, and such parameters could not be replaced.)"""

    def stand_in(parameter: Any) -> Tensor:
        device = getattr(parameter, "_local_tensor", parameter).device
        return nn.Parameter(_unfilled(parameter, device), requires_grad=parameter.requires_grad)

    changed = replace(owner, stand_in)
    try:
        yield
    finally:
        for store, name, parameter in changed:
            store[name] = parameter


class Own:
    """What one rank, or every simulated one, has of the inputs that differ by rank of a graph and its stages.

    `keeps`: whether parts that are cut out of whole parameters are kept between calls, as decoders need."""

    def __init__(self, graph: ProgramGraph, owner: nn.Module, mesh: RankMesh, keeps: bool = False) -> None:
        assert graph.ranks is not None
        self.mesh, self.ranks, self._keeps = mesh, graph.ranks, keeps
        self._kept: dict[str, tuple[Any, Any]] = {}
        inputs = _inputs(graph)
        axis = mesh.tensor.mesh if mesh.tensor is not None and mesh.holds_parts else None
        self._shards = [
            (name, shard, own_tensor(Input("parameter", shard.parameter), owner, {}, axis))
            for name, shard in graph.ranks.shards.items()
            if Input("shard", name) in inputs
        ]
        self._places: dict[str, Any] = {
            name: PerRank(graph.ranks.of_each(numbers.group, list(numbers.of))) if mesh.is_simulated
            else numbers.of[mesh.place(numbers.group)]
            for name, numbers in graph.ranks.places.items()
        }  # fmt: skip

    def __call__(self) -> dict[str, Any]:
        found = dict(self._places)
        for name, shard, fetch in self._shards:
            parameter = fetch(None)
            found[name] = parameter if self.mesh.holds_parts else self._cut(name, shard, parameter)
        return found

    def _cut(self, name: str, shard: Shard, parameter: Tensor) -> Any:
        """The part of a whole parameter; kept, where that was asked for, until the parameter changes."""
        version = version_of(parameter) if self._keeps and not torch.is_grad_enabled() else None
        stamp = parameter.data_ptr(), version, parameter.dtype, parameter.device
        before, part = self._kept.get(name, (None, None))
        if version is not None and before == stamp:
            return part
        if self.mesh.is_simulated:
            part = parts_of(shard, parameter, self.ranks)
        else:
            whole = torch.ops.attngraph.sum_gradients(parameter, shard.group)
            part = shard.of(whole, self.mesh.place(shard.group))
        if version is not None:
            self._kept[name] = stamp, part
        return part


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
                local.copy_(_read(source, tensor))


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


def _read(source: Any, tensor: Any) -> Tensor:
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
