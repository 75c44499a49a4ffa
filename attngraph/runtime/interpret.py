"""Interprets the graph of a call: for the weights of its fused attentions, or the time of each operation.

A fused node never has its weights in memory. To look at them the graph is run by an interpreter that keeps
the node's operands and stops after the last node that was asked for. To time operations it is run node by
node, so nothing overlaps and the sum may be more than a call takes. Nothing is written to the model's buffers
or to the arguments, and nothing else depends on this file.
"""

import contextlib
import statistics
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph import ProgramGraph, module_of, op_name, source_of
from attngraph.ir.ops import nodes
from attngraph.ir.ops.latent_attention import absorbed_operands
from attngraph.ir.ops.weights import Places, attention_weights
from attngraph.report.account import OpTime, Times
from attngraph.runtime.executable import Executable
from attngraph.runtime.measure import wait


def names_of_attentions(graph: ProgramGraph) -> dict[str, fx.Node]:
    """The attentions of a graph by the module that computes them, "attention" if it is the model itself.
    Where a module has several they are numbered: `attn#0`, `attn#1`."""
    found: dict[str, list[fx.Node]] = {}
    for node in graph.attentions():
        found.setdefault(node.meta["attention"].name or "attention", []).append(node)
    return {
        name if len(members) == 1 else f"{name}#{number}": node
        for name, members in found.items()
        for number, node in enumerate(members)
    }


def weights_of(
    executable: Executable, tensors: Sequence[Tensor], names: Collection[str], rows: Places, queries: Places
) -> dict[str, Tensor]:
    """The weights of the attentions of these names in a call with these tensors."""
    known = names_of_attentions(executable.captured.graph)
    wanted, calls = {known[name] for name in names}, dict[fx.Node, nodes.AttentionOp]()

    class Keeping(fx.Interpreter):
        """Keeps the operands of attentions. (A stage has none of them, and runs as it is.)"""

        def run_node(self, node: fx.Node) -> Any:
            if node in wanted:
                found = nodes.called(node.target, *self.fetch_args_kwargs_from_env(node))
                assert found is not None
                calls[node] = found
                if len(calls) == len(wanted):
                    raise _Done
            return super().run_node(node)

    with _looking(tensors):
        with contextlib.suppress(_Done):
            executable.machine(tensors, interpret=Keeping)
        return {name: _weights(calls[known[name]], rows, queries) for name in names}


def times_of(executable: Executable, tensors: Sequence[Tensor], rounds: int) -> Times:
    """What the operations take in a call with these tensors, after one call to warm up."""
    spent: dict[fx.Node, list[float]] = {}

    class Timed(fx.Interpreter):
        """Notes what each operation takes, but those of stages."""

        def run_node(self, node: fx.Node) -> Any:
            if node.op != "call_function" or node.graph is not executable.captured.graph.graph:
                return super().run_node(node)
            wait()
            start = time.perf_counter()
            found = super().run_node(node)
            wait()
            spent.setdefault(node, []).append(time.perf_counter() - start)
            return found

    with _looking(tensors):
        executable.machine(tensors, interpret=Timed)
        spent.clear()
        for _ in range(rounds):
            executable.machine(tensors, interpret=Timed)
    return Times(tuple(_told(node, statistics.median(s)) for node, s in spent.items()), rounds)


@contextlib.contextmanager
def _looking(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Neither gradients nor random numbers of the caller are touched."""
    devices = sorted({t.device.index or 0 for t in tensors if t.is_cuda})
    with torch.no_grad(), torch.random.fork_rng(devices):
        yield


def _weights(called: nodes.AttentionOp, rows: Places, queries: Places) -> Tensor:
    match called:
        case nodes.LatentAttention(q=q, latent=latent, key_up=key_up, value_up=value_up, values=values):
            q, (k, _) = absorbed_operands(q, latent, key_up, value_up, values)
        case nodes.Attention(q=q, k=k):
            pass
        case _:
            raise TypeError(f"{type(called).__name__} has no weights over whole sequences")
    return attention_weights(called.program, q, k, called.reads, called.sizes, rows, queries)


class _Done(Exception):
    """Everything that was asked for is known; the rest of the graph is not needed."""


def chosen_names(
    at: str | Sequence[str] | None, known: Collection[str], missed: Mapping[str, str]
) -> tuple[str, ...]:
    """The names that are meant by `at` (None: all), of those that there are. `missed`: why others were not
    fused, by name."""
    if not isinstance(at, Iterable | None):
        raise TypeError(f"at takes the name of an attention, or several names, found {at!r}.")
    names = tuple(known) if at is None else (at,) if isinstance(at, str) else tuple(at)
    for name in names:
        if name in known:
            continue
        several = [k for k in known if k.rpartition("#")[0] == name]
        about = "is no fused attention of this call"
        if several:
            about = "is several attentions"
        elif name in missed:
            about = f"was not fused, so the model computes its weights itself ({missed[name]})"
        raise ValueError(f"{name!r} {about}; there are: {', '.join(several or known) or 'none'}.")
    return names


def _told(node: fx.Node, seconds: float) -> OpTime:
    found = nodes.view(node)
    kernel = getattr(found, "kernel", "") or ("chosen at each call" if found is not None else "")
    return OpTime(op_name(node), module_of(node), source_of(node), seconds, kernel)
