"""Which ranks run a model together: a mesh of torch.distributed's, or ranks simulated in this process."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ShardConfig:
    """What is divided along which axis of the mesh, by the axes' names.

    Attributes:
        tensor: the axis along which heads, hidden units and vocabulary are divided; None: along none.
        context: the axis along which tokens are divided; None: along none.
        parameters: "sharded": the model's parameters become DTensors, each rank holding its part; "whole":
            every rank keeps all of them and takes its part in each call.
        agree: whether ranks compare what they are called with before each call.
    """

    tensor: str | None = "tensor"
    context: str | None = "context"
    parameters: str = "sharded"
    agree: bool = True

    def __post_init__(self) -> None:
        if self.parameters not in ("sharded", "whole"):
            raise ValueError(f'parameters must be "sharded" or "whole", found {self.parameters!r}.')


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
        self.axes = axes

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return tuple(self.axes)

    def __repr__(self) -> str:
        return f"SimulatedMesh({', '.join(f'{k}={v}' for k, v in self.axes.items())})"


@dataclasses.dataclass(frozen=True)
class TensorAxis:
    """The ranks among which tensors are divided: by heads, hidden units and vocabulary, or by `tokens`.

    `mesh` is their one-dimensional DeviceMesh, None where they are simulated; `group` the name of their
    process group.
    """

    count: int
    group: str
    config: ShardConfig
    mesh: Any = None
    tokens: bool = False

    @property
    def holds_parts(self) -> bool:
        """Whether each rank holds a part of the parameters, as DTensors. Ranks that divide tokens use all
        parameters, and add up what they learn of them."""
        return self.mesh is not None and self.config.parameters == "sharded" and not self.tokens

    @property
    def rank(self) -> int:
        return int(self.mesh.get_local_rank())

    def gathered(self, numbers: Tensor) -> Tensor:
        """A vector of whole numbers of every rank, `[ranks, n]`."""
        device = torch.device(self.mesh.device_type)
        found = [torch.empty_like(numbers, device=device) for _ in range(self.count)]
        torch.distributed.all_gather(found, numbers.to(device), group=self.mesh.get_group())
        return torch.stack(found).cpu()


def tensor_axis(mesh: Any, config: ShardConfig) -> TensorAxis | None:
    """The axis along which a mesh divides tensors; None where it does not.

    Raises:
        TypeError: it is no mesh. ValueError: its axes have no names, or not those of the config, or it
        divides tensors in both ways.
    """
    simulated = isinstance(mesh, SimulatedMesh)
    if not simulated and not _is_device_mesh(mesh):
        raise TypeError(
            f"mesh must be a torch.distributed.device_mesh.DeviceMesh or a SimulatedMesh, found "
            f"{type(mesh).__name__}."
        )
    names = mesh.mesh_dim_names
    if not names:
        raise ValueError(
            "the axes of the mesh must have names, as in init_device_mesh(..., mesh_dim_names=('tensor',))."
        )
    usual, found = ShardConfig(), list[TensorAxis]()
    for field in ("tensor", "context"):
        name = getattr(config, field)
        if name in names:
            found.append(_axis(mesh, name, config, field == "context"))
        elif name is not None and name != getattr(usual, field):
            raise ValueError(f"the mesh has no axis {name!r}; it has {', '.join(names)}.")
    several = [axis for axis in found if axis.count > 1]
    if len(several) > 1:
        raise ValueError(
            f"the mesh has {several[0].count} ranks along {config.tensor!r} and {several[1].count} along "
            f"{config.context!r}: heads and tokens are not divided together yet. Leave out one axis."
        )
    return next(iter([*several, *found]), None)


def _axis(mesh: Any, name: str, config: ShardConfig, tokens: bool) -> TensorAxis:
    """One axis of a mesh."""
    if isinstance(mesh, SimulatedMesh):
        return TensorAxis(mesh.axes[name], name, config, None, tokens)
    axis = mesh[name] if mesh.ndim > 1 else mesh
    return TensorAxis(axis.size(), axis.get_group().group_name, config, axis, tokens)


def _is_device_mesh(mesh: Any) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(mesh, DeviceMesh)
