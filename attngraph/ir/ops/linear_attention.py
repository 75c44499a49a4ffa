"""The attngraph dialect: attention without a softmax.

Operands as for `attngraph::attention` (`ir/ops/attention.py`). The weights are the scores themselves: a
multiple of the dot, zero where `keep k <= q` hides them, times the factor of `p = ...`, which may depend on
the query but not on the key. k v^T is summed over keys first, which takes O(T) time and memory; a causal mask
is handled in chunks (Katharopoulos et al. 2020, arXiv 2006.16236). It consists of differentiable ops, so it
needs no backward of its own.
"""

import torch.nn.functional as F
from torch import Tensor

from attngraph.ir.language import Environment, Tile, evaluate, parse
from attngraph.ir.ops.declare import Sizes, declare

CHUNK = 64
"""Queries whose scores are computed at once under a causal mask."""


@declare()
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, reads: list[Tensor], sizes: Sizes, program: str
) -> Tensor:
    parsed = parse(program)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scaled = q if parsed.scale in (None, 1.0) else q * parsed.scale
    out = _causal(scaled, k, v) if parsed.keeps else scaled @ (k.mT @ v)
    if not parsed.changes_weights:
        return out
    tile = Tile((0, q.shape[0]), (0, q.shape[1]), (0, q.shape[2]), (0, 1))
    env = Environment(tile, reads, sizes, out.dtype, out.device)
    return out * evaluate.weights(parsed, out.new_ones((1, 1, 1, 1)).expand(*q.shape[:3], 1), env)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: explicit scores within a chunk, a running sum of k v^T over earlier chunks."""
    tokens, keys = q.shape[2], k.shape[2]
    chunks = (max(tokens, keys) + CHUNK - 1) // CHUNK
    q, k, v = (
        F.pad(t, (0, 0, 0, chunks * CHUNK - t.shape[2])).view(*t.shape[:2], chunks, CHUNK, t.shape[3])
        for t in (q, k, v)
    )
    within = (q @ k.mT).tril() @ v
    states = k.mT @ v
    before = F.pad(states.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))
    return (within + q @ before).flatten(2, 3)[:, :, :tokens]
