"""Train a byte-level language model on several ranks, and beside it on one device, and compare the losses.

    torchrun --nproc-per-node 2 examples/train_on_ranks.py --steps 20
    torchrun --nproc-per-node 4 examples/train_on_ranks.py --steps 20 --context 2

Heads, hidden units and the vocabulary of the plain decoder of `attngraph.models.decoder_lm` are divided among
the ranks, and with `--context` tokens too; nothing of the model says how. Rank 0 prints both losses of every
step, the largest difference, and what each rank holds, sends and receives.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import attngraph
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.text import byte_batch


def main() -> None:
    """Train both, step by step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--context", type=int, default=1, help="how many ranks divide the tokens")
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    ranks = torch.distributed.get_world_size()
    shape = (ranks // options.context, options.context)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("tensor", "context"))

    torch.manual_seed(0)  # ranks begin with equal weights
    alone = DecoderLM(DecoderLMConfig(width=options.width, heads=options.width // 16, layers=2))
    model = copy.deepcopy(alone)
    compiled = attngraph.compile(model, mesh=mesh)
    steps = [_step(compiled, model), _step(alone, alone)]
    worst = 0.0
    for number in range(options.steps):
        batch = byte_batch(4, options.tokens + 1, seed=number)
        mine, theirs = (step(batch) for step in steps)
        worst = max(worst, abs(mine - theirs))
        if torch.distributed.get_rank() == 0:
            print(f"step {number}: loss {mine:.6f} on {ranks} ranks, {theirs:.6f} on one device")
    if torch.distributed.get_rank() == 0:
        print(f"largest difference {worst:.1e}")
        heads, tokens = compiled.report.ranks, compiled.report.context
        if heads is not None:
            everything, held = heads.parameters
            print(f"a rank holds {held:,} of {everything:,} parameters")
            print(f"and sends {heads.sent_per_token:,} bytes for each of its tokens, forward")
        if tokens is not None:
            print(f"of other ranks' tokens it receives {tokens.received[0]:,} bytes a call, forward")
    # The group is not destroyed: after that, gloo in torch 2.14 sometimes aborts when Python exits.


def _step(module: nn.Module, model: nn.Module) -> Callable[[torch.Tensor], float]:
    """A function that trains on one batch and returns the loss."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: torch.Tensor) -> float:
        logits = module(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        return loss.item()

    return step


if __name__ == "__main__":
    main()
