"""The attention nodes of a graph, whichever op they are, by their parts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from attngraph.ir.ops import attention as ops
from attngraph.ir.ops import latent_attention as latent

assert latent and ops  # imported for the ops that they register
ATTENTION = torch.ops.attngraph.attention.default
LATENT = torch.ops.attngraph.latent_attention.default
WHOLE = (ATTENTION, LATENT)
"""Attention over whole sequences."""
CACHED = {
    ATTENTION: torch.ops.attngraph.cached_attention.default,
    LATENT: torch.ops.attngraph.cached_latent_attention.default,
}
"""The same over a cache. Its arguments: the query, the new tokens' keys, their pages, and the rest."""


class Parts(NamedTuple):
    """What an attention node is given: `keys` are the tensors whose tokens are looked at (keys and values, or
    the latents that both are made from); `weights` stand between them and the reads, and project them up;
    `chosen` says how the node is computed."""

    q: fx.Node
    keys: tuple[fx.Node, ...]
    weights: tuple[Any, ...]
    reads: tuple[fx.Node, ...]
    sizes: tuple[Any, ...]
    program: str
    chosen: tuple[Any, ...]

    @property
    def operands(self) -> list[fx.Node]:
        """The tensors among the weights."""
        return [w for w in self.weights if isinstance(w, fx.Node)]


def parts(node: fx.Node) -> Parts:
    """The parts of an attention over whole sequences."""
    args: Any = node.args
    if node.target is LATENT:
        q, shared, *weights, reads, sizes, program, absorb, family = args
        return Parts(q, (shared,), tuple(weights), tuple(reads), tuple(sizes), program, (absorb, family))
    q, k, v, reads, sizes, program, *chosen = args
    return Parts(q, (k, v), (), tuple(reads), tuple(sizes), program, tuple(chosen))
