"""A compiled module whose parameters `torch.distributed.fsdp.fully_shard` divides along another axis.

    compiled = attngraph.compile(model, mesh=mesh, shard=ShardConfig(tensor="tensor"))
    compiled.place(ids)                            # each rank's part along "tensor"
    fully_shard(compiled, mesh=mesh["data"])       # and of that its part along "data"

Its hooks are those of the compiled module: before a call they collect the parameters along "data", after the
backward pass they add up gradients and divide both again. The graph reads what they have collected. Where
nothing was collected it would read parts as if they were whole, so that is an error.
"""

from typing import Any

from torch import Tensor, nn

from attngraph.errors import PlacementError


def is_fully_sharded(owner: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a model, or to the one that `owner` holds."""
    return any(getattr(m, "_is_fsdp_managed_module", False) for m in (owner, *owner.children()))


def collected(tensor: Any, name: str, axis: Any) -> Tensor:
    """What a rank has of a parameter: all, or its part along `axis`, a mesh of one dimension, no other."""
    if not hasattr(tensor, "_local_tensor"):
        return tensor  # type: ignore[no-any-return]
    if tensor.device_mesh != axis and not all(p.is_replicate() for p in tensor.placements):
        raise PlacementError(
            f"{name} is divided ({', '.join(map(str, tensor.placements))}) and was not collected: "
            "fully_shard does that where the compiled module is called, not for its other methods.\n"
            "What to do: call compiled.unshard() before and compiled.reshard() after, or the module itself."
        )
    return tensor.to_local()  # type: ignore[no-any-return]


def require_whole_again(model: nn.Module) -> None:
    """Check that parameters which `fully_shard` has just divided can be put together again: where a rank had
    several runs of one, and was given a part of these, they cannot."""
    for name, parameter in model.named_parameters():
        placements: Any = getattr(parameter, "placements", (None,))
        *added, first = placements
        runs = getattr(first, "split_factor", 1)
        if runs > 1 and any(not p.is_replicate() and p.dim == first.dim for p in added):
            raise PlacementError(
                f"fully_shard divided {name}, a packed projection of which a rank has {runs} runs, and "
                "torch's DTensors have no way to say which rows these parts are: full_tensor() and "
                "checkpoints would be wrong.\n"
                'What to do: shard=ShardConfig(parameters="even"), with which such parameters are whole for '
                "fully_shard to divide."
            )
