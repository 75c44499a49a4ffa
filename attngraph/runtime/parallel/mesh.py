"""Which ranks run a model together: a mesh of torch.distributed's, or ranks simulated in this process."""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ShardConfig:
    """What is divided along which axis of the mesh, by the axes' names.

    Attributes:
        tensor: the axis along which heads, hidden units and vocabulary are divided; None: along none.
        context: the axis along which tokens are divided; None: along none.
        parameters: "sharded": the model's parameters become DTensors, each rank holding its part; "even":
            the same, but those of which a part is several runs (packed projections) stay whole, because
            checkpoints and `fully_shard` cannot say what such a part is; "whole": every rank keeps all of
            them and takes its part in each call.
        cache: what ranks that divide heads divide of a decoder's cache: "heads": every rank keeps what its
            heads attend to; "tokens": of what several of them attend to (latents, key/value heads that are
            fewer than ranks) each keeps a part of the tokens; "auto": tokens where that saves bytes.
        agree: whether ranks compare what they are called with before each call.
    """

    tensor: str | None = "tensor"
    context: str | None = "context"
    parameters: str = "sharded"
    cache: str = "auto"
    agree: bool = True

    def __post_init__(self) -> None:
        if self.parameters not in ("sharded", "even", "whole"):
            raise ValueError(f'parameters must be "sharded", "even" or "whole", found {self.parameters!r}.')
        if self.cache not in ("auto", "heads", "tokens"):
            raise ValueError(f'cache must be "auto", "heads" or "tokens", found {self.cache!r}.')


class SimulatedMesh:
    """Ranks that are simulated in this process, one after the other: for tests, and to see what a model would
    send on so many devices. Results and gradients are those that every rank would have.

    Args:
        axes: the number of ranks along each axis, by name.
    """

    def __init__(self, **axes: int) -> None:
        for name, count in axes.items():
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"axis {name!r} must have at least one rank, found {count!r}.")
        self.axes, self.mesh_dim_names = axes, tuple(axes)

    def __repr__(self) -> str:
        return f"SimulatedMesh({', '.join(f'{k}={v}' for k, v in self.axes.items())})"


@dataclasses.dataclass(frozen=True)
class MeshAxis:
    """One axis: its ranks, the name of their process group, and their mesh (None where simulated)."""

    count: int
    group: str
    mesh: Any = None


@dataclasses.dataclass(frozen=True)
class RankMesh:
    """Ranks that run a model together: `tensor` divide heads, hidden units, vocabulary; `context` tokens."""

    config: ShardConfig
    tensor: MeshAxis | None = None
    context: MeshAxis | None = None

    @property
    def axes(self) -> tuple[MeshAxis, ...]:
        return tuple(axis for axis in (self.tensor, self.context) if axis is not None)

    @property
    def count(self) -> int:
        return math.prod(axis.count for axis in self.axes)

    @property
    def is_simulated(self) -> bool:
        return self.axes[0].mesh is None

    @property
    def holds_parts(self) -> bool:
        """Whether each rank holds a part of the parameters, as DTensors. Ranks that divide tokens use all
        parameters, and add up what they learn of them."""
        return self.tensor is not None and not self.is_simulated and self.config.parameters != "whole"

    def place(self, group: str) -> int:
        """Where this process is along an axis."""
        return int(next(axis for axis in self.axes if axis.group == group).mesh.get_local_rank())

    @property
    def rank(self) -> int:
        """The number of this process among all, those along the last axis next to each other."""
        found = 0
        for axis in self.axes:
            found = found * axis.count + self.place(axis.group)
        return found

    def gathered(self, numbers: Tensor) -> Tensor:
        """A vector of whole numbers of every rank, `[ranks, n]`."""
        device, found = torch.device(self.axes[0].mesh.device_type), numbers.unsqueeze(0)
        for axis in reversed(self.axes):
            own = found.to(device)
            every = [torch.empty_like(own) for _ in range(axis.count)]
            torch.distributed.all_gather(every, own, group=axis.mesh.get_group())
            found = torch.cat(every)
        return found.cpu()

    def everything(self, own: Any) -> list[Any]:
        """An object of every rank."""
        found = [own]
        for axis in reversed(self.axes):
            every: list[Any] = [None] * axis.count
            torch.distributed.all_gather_object(every, found, group=axis.mesh.get_group())
            found = [one for of_rank in every for one in of_rank]
        return found


def rank_mesh(mesh: Any, config: ShardConfig) -> RankMesh | None:
    """The axes along which a mesh, if it is one and its axes have the names that the config says, divides
    tensors; None where it does not."""
    is_device_mesh = torch.distributed.is_available() and isinstance(
        mesh, torch.distributed.device_mesh.DeviceMesh
    )
    if not isinstance(mesh, SimulatedMesh) and not is_device_mesh:
        raise TypeError(
            f"mesh must be a torch.distributed.device_mesh.DeviceMesh or a SimulatedMesh, found "
            f"{type(mesh).__name__}."
        )
    names = mesh.mesh_dim_names
    if not names:
        raise ValueError(
            "the axes of the mesh must have names, as in init_device_mesh(..., mesh_dim_names=('tensor',))."
        )
    if config.tensor is not None and config.tensor == config.context:
        raise ValueError(f"one axis of the mesh, {config.tensor!r}, cannot divide both heads and tokens.")
    usual, found = ShardConfig(), dict[str, MeshAxis]()
    for field in ("tensor", "context"):
        name = getattr(config, field)
        if name in names:
            axis = mesh[name] if is_device_mesh and mesh.ndim > 1 else mesh
            found[field] = (
                MeshAxis(axis.size(), axis.get_group().group_name, axis) if is_device_mesh
                else MeshAxis(mesh.axes[name], name)
            )  # fmt: skip
        elif name is not None and name != getattr(usual, field):
            raise ValueError(f"the mesh has no axis {name!r}; it has {', '.join(names)}.")
    several = {field: axis for field, axis in found.items() if axis.count > 1}
    one = dict(list(found.items())[:1])
    return RankMesh(config, **(several or one)) if found else None
