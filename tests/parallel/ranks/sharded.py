"""Tasks for processes that are ranks, as in `run.py`: `fully_shard` on a compiled module."""

import copy
import runpy
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import attngraph

COMMON = runpy.run_path(str(Path(__file__).parent / "run.py"), run_name="common")
Block, whole, said_by, on_axes = (COMMON[name] for name in ("Block", "whole", "said_by", "on_axes"))
IDS = torch.randint(0, 64, (4, 9), generator=torch.Generator().manual_seed(1))


def compiled_on(mesh, config=None, packed=False, seed=0):
    """A model, compiled and then divided along the axis `data` too, and itself on one device."""
    torch.manual_seed(seed)
    alone = Block(packed=packed)
    model = copy.deepcopy(alone)
    if mesh.mesh_dim_names == ("data",):
        compiled = attngraph.compile(model, min_scores=0)
    else:
        compiled = attngraph.compile(model, mesh=mesh, shard=config)
    if "tensor" in mesh.mesh_dim_names and (config is None or config.parameters != "whole"):
        compiled.place(own(mesh)[:, :-1])
    assert fully_shard(compiled, mesh=mesh["data"]) is compiled
    assert isinstance(compiled, FSDPModule) and isinstance(compiled, Block)
    return compiled, alone


def own(mesh):
    """The rows of this rank along the axis `data`."""
    return IDS.chunk(mesh["data"].size())[mesh["data"].get_local_rank()]


def train(mesh, config=None, packed=False):
    """Five steps of training, each rank of `data` on rows of its own, beside one device; then a checkpoint,
    loaded by another model. How many elements of parameters this rank has, and all there are."""
    compiled, alone = compiled_on(mesh, config, packed)
    both = [(compiled, own(mesh)), (alone, IDS)]
    optimisers = [torch.optim.SGD(m.parameters(), 0.5, momentum=0.9) for m, _ in both]
    for _ in range(5):
        found = []
        for (module, ids), optimiser in zip(both, optimisers, strict=True):
            loss = nn.functional.cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            norm = whole(nn.utils.clip_grad_norm_(module.parameters(), 1.0))
            optimiser.step()
            optimiser.zero_grad()
            found.append([loss.detach(), norm])
        dist.all_reduce(found[0][0], group=mesh["data"].get_group())
        found[0][0] /= mesh["data"].size()
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert len(compiled._graphs) == 1, compiled.report
    state = compiled.state_dict()
    for name, wanted in alone.state_dict().items():
        torch.testing.assert_close(whole(state[name]), wanted, rtol=1e-3, atol=1e-4)
    held = sum(p._local_tensor.numel() for p in compiled.parameters())
    with torch.no_grad():
        wanted = alone.eval()(IDS[:2, :5])
        torch.testing.assert_close(compiled.eval()(IDS[:2, :5]), wanted, rtol=1e-3, atol=1e-4)
        other, _ = compiled_on(mesh, config, packed, seed=1)
        dcp.save(compiled.state_dict(), checkpoint_id=f"{MEETING}.{packed}.{config}")
        loaded = other.state_dict()
        dcp.load(loaded, checkpoint_id=f"{MEETING}.{packed}.{config}")
        other.load_state_dict(loaded)
        torch.testing.assert_close(other.eval()(IDS[:2, :5]), wanted, rtol=1e-3, atol=1e-4)
    return f"{held} of {sum(p.numel() for p in alone.parameters())}"


def data(_, rank):
    """Two ranks, each with rows of its own; no other axis."""
    return train(on_axes(2, names=("data",)))


def data_and_tensor(_, rank):
    """2 x 2 ranks."""
    return train(on_axes(2, 2, names=("data", "tensor")))


def data_and_whole(_, rank):
    """Packed projections that stay whole along the axis that divides heads, and then all parameters do."""
    mesh = on_axes(2, 2, names=("data", "tensor"))
    configs = (attngraph.ShardConfig(parameters=how) for how in ("even", "whole"))
    return "; ".join(train(mesh, config, packed=True) for config in configs)


def data_and_context(_, rank):
    mesh = on_axes(2, 2, names=("data", "context"))
    return train(mesh)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.inner = Block(packed=False)

    def forward(self, ids):
        logits = self.inner(ids)
        for block in self.blocks:
            logits = logits + block(logits)
        return logits


def refusals(_, rank):
    """What cannot be right is refused: each with what to do."""
    mesh = on_axes(1, 2, names=("data", "tensor"))
    ids, found = IDS[:2, :5], []

    packed = attngraph.compile(Block(), mesh=mesh)
    packed.place(ids)
    found.append(said_by(lambda: fully_shard(packed, mesh=mesh["data"]), attngraph.PlacementError))

    early = attngraph.compile(Block(packed=False), mesh=mesh)
    fully_shard(early, mesh=mesh["data"])
    found.append(said_by(lambda: early(ids), attngraph.PlacementError))

    blocks = attngraph.compile(Twice(), mesh=mesh)
    blocks.place(ids)
    for block in blocks.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(blocks, mesh=mesh["data"])
    found.append(said_by(lambda: blocks(ids), attngraph.CaptureError))

    data = on_axes(2, names=("data",))
    decoder = attngraph.compile(Block(packed=False).eval(), cache=True)
    decoder.prefill(ids)
    fully_shard(decoder, mesh=data)
    found.append(said_by(lambda: decoder.prefill(ids), attngraph.PlacementError))
    return " | ".join(found)


if __name__ == "__main__":
    MEETING = given[3]  # noqa: F821  (a global that `runpy` was given)
    COMMON["start"](globals(), *given)  # noqa: F821
