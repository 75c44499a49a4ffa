"""Calls a graph's operations through faster Python bindings.

`torch.ops.aten.add.Tensor` parses its arguments by a schema, `torch.add` with a generated parser, which saves
about a microsecond per call; a decoder's step makes hundreds of calls. Only operations whose two forms take
the same arguments in the same positions are replaced. Results are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.ops import cached_attention as cached
from attngraph.ir.ops import latent_attention as latent
from attngraph.ir.ops.token_program import token_program

aten, ours = torch.ops.aten, torch.ops.attngraph


def _size(tensor: Tensor, dim: int) -> int:
    return tensor.shape[dim]


def _ours(function: Callable[..., Any], op: Callable[..., Any]) -> Callable[..., Any]:
    """What the op computes without its dispatch, but for modes that want to see ops (FlopCounterMode)."""

    def call(*args: Any) -> Any:
        return (op if torch._C._len_torch_dispatch_stack() else function)(*args)

    return call


SHORTER: dict[Any, Callable[..., Any]] = {
    aten.sym_size.int: _size,
    aten.reshape.default: torch.reshape,
    aten.permute.default: torch.permute,
    aten.transpose.int: torch.transpose,
    aten.narrow.default: torch.narrow,
    aten.select.int: torch.select,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.unflatten.int: torch.unflatten,
    aten.index_select.default: torch.index_select,
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.neg.default: torch.neg,
    aten.rsqrt.default: torch.rsqrt,
    aten.tanh.default: torch.tanh,
    aten.sigmoid.default: torch.sigmoid,
    aten.relu.default: torch.relu,
    aten.cos.default: torch.cos,
    aten.sin.default: torch.sin,
    aten.cat.default: torch.cat,
    aten.silu.default: torch.nn.functional.silu,
    aten.gelu.default: torch._C._nn.gelu,
    aten.linear.default: torch._C._nn.linear,
    aten.addmm.default: torch.addmm,
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.matmul.default: torch.matmul,
    aten.layer_norm.default: torch.layer_norm,
    aten.mean.dim: torch.mean,
    ours.token_program.default: _ours(token_program, ours.token_program.default),
    ours.cached_attention.default: _ours(cached.cached_attention, ours.cached_attention.default),
    ours.cached_latent_attention.default: _ours(
        latent.cached_latent_attention, ours.cached_latent_attention.default
    ),
}


def shortened(module: fx.GraphModule) -> fx.GraphModule:
    """The same computation with these operations called through the faster bindings."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "call_function" and node.target in SHORTER:
            copies[node].target = SHORTER[node.target]
    return fx.GraphModule({}, graph)
