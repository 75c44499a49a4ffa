"""Builds what runs from one call of a model: capture, passes, kernels, and the report of all three.

Which graph is used for which call is decided elsewhere (`compiled`, `runtime/decoder`); `derive` makes the
step of a decoder.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

import attngraph.codegen  # noqa: F401  registers the kernels
from attngraph.api.compare_sides import compare_sides
from attngraph.api.options import Options
from attngraph.api.records import later_of
from attngraph.api.rewritten import capture_call, capturing_again, owner_of, rewritten
from attngraph.capture.instead import LOCK
from attngraph.capture.structure import flatten
from attngraph.codegen.cpu.record.replay import Replay
from attngraph.errors import NotFusedError
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.ops import cached_attention as cached
from attngraph.ir.ops import latent_attention as latent
from attngraph.ir.ops.token_program import token_program
from attngraph.runtime.devices import Runner
from attngraph.runtime.executable import Executable
from attngraph.runtime.step import prepare_programs

aten, ours = torch.ops.aten, torch.ops.attngraph


@LOCK.trace()
def compile_graph(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options,
    sides: bool = False,
) -> Executable:  # fmt: skip
    """Capture one call of `target`, run the passes, and make it executable. `sides`: find out for which sizes
    of 1 the graph is right, too. (A compiled module has other graphs for these.)

    Raises:
        CaptureError: torch.export cannot capture it. NotFusedError: under `strict`, something that looks
            like attention was not fused. DumpError: the dump cannot be written.
    """
    start = time.perf_counter()
    if options.inductor and torch.is_grad_enabled():
        # The graph is one operation for gradients: its results cannot follow from one that waits.
        options = dataclasses.replace(options, later=())
    owner = owner_of(target)
    with options.devices.tracing(owner):
        capture = functools.partial(capture_call, target, args, kwargs)
        made = rewritten(capture, options, options.pipeline(), keep=sides)
    if made.before is not None:
        again = capturing_again(target, made.assumed, tables=False)
        found_sides = compare_sides(made.captured, made.before, owner, args, kwargs, again)
        made.captured = dataclasses.replace(made.captured, sides=found_sides)
    graph = made.captured.graph
    found = Executable(made.captured, owner, *options.devices.runs(graph, owner, runner_of(options)))
    tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    if found.scores is None or found.scores(tensors) >= options.fused_from:
        prepare_programs(graph)  # a smaller call runs the model itself
    report = made.report(options, start, later=later_of(made.captured))
    if made.dump is not None:
        made.dump.finish(report)
    if options.strict and report.unfused:
        first = report.unfused[0]
        raise NotFusedError(
            f"{len(report.unfused)} softmax-like place(s) were not fused; the first is at "
            f"{first.source or 'an unknown line'}: {first.reason}.\n"
            "What to do: rewrite that place, or compile without strict=True, which leaves it as it is."
        )
    found.report = report
    return found


def runner_of(options: Options) -> Runner:
    """A graph's module, or that compiled by Inductor."""

    def run(graph: ProgramGraph) -> Callable[..., Any]:
        if not options.inductor:
            return graph.module
        if options.progress is not None:
            options.progress("inductor")
        compiled: Callable[..., Any] = torch.compile(graph.written(), dynamic=True, fullgraph=True)
        return compiled

    return run


def step_runner_of(options: Options, records: bool = True) -> Runner:
    """As `runner_of`, for a decoder's step and its stage of the prompt. `records`: whether steps are recorded
    and replayed. (What is recorded when follows from where tensors lie, so ranks, which must all exchange the
    same, do not.)"""

    def run(graph: ProgramGraph) -> Callable[..., Any]:
        return Replay(graph, shortened) if records and graph.state is not None else shortened(graph.module)

    return runner_of(options) if options.inductor else run


def _ours(function: Callable[..., Any], op: Callable[..., Any]) -> Callable[..., Any]:
    """What the op computes without its dispatch, but for modes that want to see ops (FlopCounterMode)."""

    def call(*args: Any) -> Any:
        return (op if torch._C._len_torch_dispatch_stack() else function)(*args)

    return call


SHORTER: dict[Any, Callable[..., Any]] = {
    op: getattr(torch, op._schema.name.removeprefix("aten::"))
    for op in (
        aten.reshape.default, aten.permute.default, aten.transpose.int, aten.narrow.default, aten.select.int,
        aten.unsqueeze.default, aten.unflatten.int, aten.index_select.default, aten.add.Tensor,
        aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar, aten.neg.default,
        aten.rsqrt.default, aten.tanh.default, aten.sigmoid.default, aten.relu.default, aten.cos.default,
        aten.sin.default, aten.cat.default, aten.addmm.default, aten.mm.default, aten.bmm.default,
        aten.matmul.default, aten.layer_norm.default, aten.mean.dim,
    )
} | {
    aten.sym_size.int: lambda tensor, dim: tensor.shape[dim], aten.silu.default: torch.nn.functional.silu,
    aten.gelu.default: torch._C._nn.gelu, aten.linear.default: torch._C._nn.linear,
} | {
    op.default: _ours(function, op.default)
    for op, function in (
        (ours.token_program, token_program), (ours.cached_attention, cached.cached_attention),
        (ours.cached_latent_attention, latent.cached_latent_attention),
    )
}  # fmt: skip


def shortened(module: fx.GraphModule) -> fx.GraphModule:
    """The same computation with these operations called through faster Python bindings.

    `torch.ops.aten.add.Tensor` parses its arguments by a schema, `torch.add` with a generated parser, which
    saves about a microsecond per call; a decoder's step makes hundreds of calls. Only operations whose two
    forms take the same arguments in the same positions are replaced."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "call_function" and node.target in SHORTER:
            copies[node].target = SHORTER[node.target]
    return fx.GraphModule({}, graph)
