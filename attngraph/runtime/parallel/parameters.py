"""Parameters of a model that several ranks run: each a DTensor that says what a rank has of it.

What a graph divides is `Shard`, or `_StridedShard` where a packed projection is cut in equal runs; everything
else is replicated. Compiling replaces the parameters by DTensors of the whole shapes, so optimisers (made
afterwards), state dicts, gradient clipping and checkpoints work; the first call lets each rank keep its part,
in the same objects. While a graph is traced the model has stand-ins without memory in their place. Parameters
on `meta` get memory for the rank's part alone (`loading.py` fills it)."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.errors import PlacementError
from attngraph.ir.graph.program_graph import Input, ProgramGraph
from attngraph.ir.graph.ranks import Shard
from attngraph.ir.versions import version_of
from attngraph.meaning.check.ranks import PerRank, parts_of
from attngraph.meaning.placement.table import Table
from attngraph.runtime.inputs import own_tensor
from attngraph.runtime.parallel.fully_sharded import is_fully_sharded
from attngraph.runtime.parallel.mesh import MeshAxis, RankMesh

_WHOLE = "_attngraph_needed_whole"
"""Marks parameters that a graph needs whole on every rank."""


def require_undivided(model: nn.Module, ranks: RankMesh) -> None:
    """Check that nobody else divides the parameters of a model.

    Raises:
        PlacementError: a parameter is a DTensor of another mesh, as after `fully_shard`.
    """
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
    """Make the parameters of a model DTensors that every rank has whole: what is divided is known after the
    first trace."""
    from torch.distributed.tensor import DTensor, Replicate

    made: dict[int, nn.Parameter] = {}
    for store, name, parameter in _parameters(model):
        if isinstance(parameter, DTensor):
            continue
        if id(parameter) not in made:
            local = _unfilled(parameter, axis.mesh.device_type) if parameter.is_meta else parameter.detach()
            whole = DTensor.from_local(local, axis.mesh, [Replicate()], run_check=False)
            made[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        store[name] = made[id(parameter)]


def distribute(graph: ProgramGraph, owner: nn.Module, axis: MeshAxis) -> None:
    """Let each rank keep of the parameters what the graph says.

    Raises:
        PlacementError: another graph of the model divides a parameter otherwise, or it is no replicated
        DTensor; or `fully_shard` was applied before.
    """
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
    for parameter in owner.parameters():
        local = getattr(parameter, "_local_tensor", parameter)
        if has_no_memory(local):
            local.untyped_storage().resize_(local.numel() * local.itemsize)


def has_no_memory(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and a device, but no memory for its elements."""
    return not tensor.is_meta and tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def is_unfilled(model: nn.Module) -> bool:
    """Whether parameters of a model have no memory yet."""
    return any(has_no_memory(getattr(p, "_local_tensor", p)) for p in model.parameters())


def require_contents(model: Any) -> None:
    """Check that the buffers of a model have contents: masks and positions are derived from them.

    Raises:
        PlacementError: one is on meta.
    """
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
    return torch.empty_like(
        shard.of(torch.empty_like(whole, device="meta"), rank), device=whole.device
    ).contiguous()


def _unfilled(parameter: Tensor, device: Any) -> Tensor:
    """A tensor of the shape and strides of a parameter, without memory."""
    whole = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
    whole.untyped_storage().resize_(0)
    return whole


def _inputs(graph: ProgramGraph) -> set[Input]:
    """The inputs of a graph and of its stages, without parameters that nothing uses."""
    return {
        i
        for part in (graph, *graph.stages.values())
        for node, i in zip(part.placeholders(), part.inputs, strict=True)
        if node.users or i.kind != "parameter"
    }


def _parameters(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Every place of a model that has a parameter: the module's store, the name, the parameter."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                yield module._parameters, name, parameter


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
    changed: list[tuple[dict[str, Any], str, Any]] = []
    made: dict[int, nn.Parameter] = {}
    try:
        for store, name, parameter in _parameters(owner):
            if id(parameter) not in made:
                made[id(parameter)] = _without_memory(parameter)
            changed.append((store, name, parameter))
            store[name] = made[id(parameter)]
        yield
    finally:
        for store, name, parameter in changed:
            store[name] = parameter


def _without_memory(parameter: Any) -> nn.Parameter:
    local = getattr(parameter, "_local_tensor", parameter)
    whole = torch.empty_strided(parameter.shape, parameter.stride(), dtype=local.dtype, device="meta")
    return nn.Parameter(_unfilled(whole, local.device), requires_grad=parameter.requires_grad)


class Own:
    """What one rank, or every simulated one, has of the inputs that differ by rank of a graph and its stages.

    `keeps`: whether parts that are cut out of whole parameters are kept between calls, as decoders need."""

    def __init__(self, graph: ProgramGraph, owner: nn.Module, mesh: RankMesh, keeps: bool = False) -> None:
        assert graph.ranks is not None
        self.mesh, self.ranks = mesh, graph.ranks
        self._kept: dict[str, tuple[Any, Any]] | None = {} if keeps else None
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
        """The part of a parameter that every rank has whole; kept, where that was asked for, until the
        parameter changes."""
        version = None if self._kept is None or torch.is_grad_enabled() else version_of(parameter)
        stamp = parameter.data_ptr(), version, parameter.dtype, parameter.device
        if self._kept is not None and version is not None and name in self._kept:
            before, kept = self._kept[name]
            if before == stamp:
                return kept
        part: Any
        if self.mesh.is_simulated:
            part = parts_of(shard, parameter, self.ranks)
        else:
            whole = torch.ops.attngraph.sum_gradients(parameter, shard.group)
            part = shard.of(whole, self.mesh.place(shard.group))
        if self._kept is not None and version is not None:
            self._kept[name] = stamp, part
        return part
