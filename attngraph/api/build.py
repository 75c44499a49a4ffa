"""Builds what runs from one call of a model: capture, passes, kernels, and the report of all three.

What torch cannot capture as it is given is captured in another way: with sizes as numbers, with attributes
watched, or after a first call that fills tables. Which graph is used for which call is decided elsewhere
(`compiled`, `runtime/decoder`); `derive` makes the step of a decoder.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

import attngraph.codegen  # noqa: F401  registers the kernels
from attngraph.api.compare_sides import Again, compare_sides
from attngraph.api.options import Options
from attngraph.api.records import entries_of, later_of
from attngraph.capture import trace as capturing
from attngraph.capture.captured import NOTHING, Assumed, Captured, Structure
from attngraph.capture.compared import compared
from attngraph.capture.first_call import answers_alike, fills_a_table, run_first, writes_to_tensors
from attngraph.capture.flat import hold
from attngraph.capture.instead import LOCK
from attngraph.capture.program.exported import arguments_of
from attngraph.capture.structure import flatten, unflatten
from attngraph.codegen.cpu.record.replay import Replay
from attngraph.errors import CaptureError, NoDecoderError, NotFusedError
from attngraph.ir.graph.program_graph import ProgramGraph, computed_from, is_measured, is_size
from attngraph.ir.ops import cached_attention as cached
from attngraph.ir.ops import latent_attention as latent
from attngraph.ir.ops.token_program import token_program
from attngraph.passes.insert_kv_cache.insert import only_result
from attngraph.pipeline import Pass, Result
from attngraph.pipeline import run as run_passes
from attngraph.report.dump import Dump
from attngraph.report.entries import Break, PassRecord
from attngraph.report.report import CompileReport
from attngraph.runtime.devices import Runner
from attngraph.runtime.executable import Executable
from attngraph.runtime.step import prepare_programs

aten, ours = torch.ops.aten, torch.ops.attngraph
Found = tuple[Captured, tuple[Break, ...]]
"""A captured call, and why sizes are numbers that torch could not follow as symbols."""


@dataclasses.dataclass
class Rewritten:
    """A captured call after the passes; `before` is the captured graph, if it was asked for. `numbers`: why
    sizes are numbers that torch could not follow as symbols. `seconds`: of capture. `assumed`: what
    the trace was to take for granted."""

    captured: Captured
    result: Result
    dump: Dump | None
    before: ProgramGraph | None
    numbers: tuple[Break, ...]
    seconds: float
    assumed: Assumed = NOTHING

    def report(
        self, options: Options, start: float, records: Sequence[PassRecord] = (), **more: Any
    ) -> CompileReport:
        """What was done since `start`; `records`: of the passes that ran after these."""
        graph, result = self.captured.graph, self.result
        return CompileReport(
            tuple(entries_of(graph)), tuple(result.missed), (*result.records, *records),
            seconds=time.perf_counter() - start, captured=result.captured, code=result.code,
            numbers=self.numbers, capture=self.seconds, others=tuple(result.others),
            unordered=graph.unordered, **options.devices.reported(graph), **more,
        )  # fmt: skip


def rewritten(
    capture: Callable[[Assumed], Found], options: Options, passes: Sequence[Pass], assumed: Assumed = NOTHING,
    keep: bool = False, only_logits: bool = False,
) -> Rewritten:  # fmt: skip
    """Capture a call and run the passes. If a symbolic size was an obstacle to a pass, or to torch, do both
    again with that size as a number.

    Args:
        capture: captures it, given what to take for granted.
        keep: whether the captured graph is asked for. only_logits: drop the model's other results before.
    """
    tell = options.progress or (lambda stage: None)

    def attempt(assumed: Assumed) -> Rewritten:
        tell("capture")
        start = time.perf_counter()
        captured, numbers = capture(assumed)
        seconds = time.perf_counter() - start
        options.devices.captured(captured.graph)
        before = captured.graph.copy() if keep else None
        if only_logits:
            only_result(captured.graph, place_of_logits(captured.structure))
        dump = None if options.dump is None else Dump(options.dump)
        result = run_passes(captured.graph, passes, dump, options.progress)
        return Rewritten(captured, result, dump, before, numbers, seconds, assumed)

    first = attempt(assumed)
    if not first.result.obstacles:
        return first
    second = attempt(assumed.with_numbers(first.captured.dimensions(first.result.obstacles)))
    better = len(second.result.missed) < len(first.result.missed)
    kept, other = (second, first) if better else (first, second)
    if other.dump is not None:
        other.dump.discard()
    return dataclasses.replace(kept, seconds=first.seconds + second.seconds)


def capturing_again(target: Callable[..., Any], assumed: Assumed, tables: bool) -> Again:
    """Captures other calls of a model that was captured, with numbers for the same dimensions."""
    assumed = dataclasses.replace(assumed, symbolic=frozenset())
    return lambda args, kwargs: capture_call(target, args, kwargs, assumed, tables)[0]


def compare_calls(
    target: Callable[..., Any], calls: Sequence[dict[str, Any]], tokens: int, assumed: Assumed
) -> Found:
    """A graph for any number of sequences and tokens, from calls of the sizes `compared.SIZES` with numbers
    for all sizes. `tokens`: the number of the tokens among their tensors."""
    tensors = [leaf for leaf in flatten(calls[0])[0] if isinstance(leaf, Tensor)]
    fixed = frozenset((n, dim) for n, tensor in enumerate(tensors) for dim in range(tensor.ndim))
    assumed = dataclasses.replace(assumed, fixed=fixed, symbolic=frozenset())
    found = [capture_call(target, (), call, assumed, tables=True)[0] for call in calls]
    return compared(found, tokens), ()


def capture_call(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], assumed: Assumed = NOTHING,
    tables: bool = False,
) -> Found:  # fmt: skip
    """One call, with numbers for the sizes that torch cannot follow as symbols, and why. Attributes that the
    call sets are taken as results where that is possible; with `tables` also those that a first call fills
    for later ones, if what it fills them with follows from sizes and weights; where a first call sets other
    things, or writes to weights, it is run before."""
    numbers: list[Break] = []
    first: CaptureError | None = None
    while True:
        try:
            found = capturing.capture(target, args, kwargs, assumed)
            if first is not None and _attributes_follow_data(found):
                raise first
            return found, (*numbers, *found.asked)
        except CaptureError as problem:
            if problem.extents is not None:
                raise NoDecoderError(problem.reason, True, problem.extents) from problem
            may_fill = tables and first is None and not (problem.settings and not assumed.settings)
            fills = may_fill and fills_a_table(problem, target, args, kwargs)
            if fills and answers_alike(target, args, kwargs):
                if assumed.settings and not writes_to_tensors(target, args, kwargs):
                    first, assumed = problem, dataclasses.replace(assumed, reads=True)
                else:
                    run_first(target, args, kwargs)
                    assumed, tables = dataclasses.replace(assumed, settings={}), False
                continue
            other = assumed.after(problem)
            if other is None:
                raise
            if other.fixed != assumed.fixed:
                numbers.append(Break(problem.reason, problem.source))
            assumed = other


def _attributes_follow_data(captured: Captured) -> bool:
    """Whether what attributes are set to is computed from the values of arguments, not only from weights and
    sizes."""
    graph = captured.graph
    results: Any = graph.graph.output_node().args[0]
    set_to = [n for n, o in zip(results, graph.outputs, strict=True) if o.kind == "attribute"]
    sizes = [n for n in graph.graph.nodes if is_size(n) and not is_measured(n)]
    return not (computed_from(set_to, sizes) - set(sizes)).isdisjoint(arguments_of(graph))


def owner_of(target: Callable[..., Any]) -> nn.Module:
    """The module in which parameter names are looked up: a holder with the names of capture's wrapper."""
    holder = nn.Module()
    hold(holder, target)
    return holder


def place_of_logits(structure: Structure) -> int:
    """The index of the logits among the tensors that a model returns: the entry named "logits", else the
    first."""
    return _logits([value if kind == "tensor" else None for kind, value in structure.leaves], structure.tree)


def logits_among(leaves: Sequence[Any], tree: Any) -> int:
    """The same among the leaves of what a call has returned."""
    return _logits([n if isinstance(leaf, Tensor) else None for n, leaf in enumerate(leaves)], tree)


def _logits(places: list[int | None], tree: Any) -> int:
    result = unflatten(places, tree)
    named = getattr(result, "logits", None)
    if named is None and isinstance(result, Mapping):
        named = result.get("logits")
    found = named if isinstance(named, int) else next((p for p in places if p is not None), None)
    if found is None:
        raise NoDecoderError("the model returns no tensor.")
    return found


# --- what runs ---


@LOCK.trace()
def compile_graph(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options,
    sides: bool = False,
) -> Executable:  # fmt: skip
    """Capture one call of `target`, run the passes, and make it executable. `sides`: find out for which sizes
    of 1 the graph is right, too. (A compiled module has other graphs for these.) CaptureError where
    torch.export cannot capture it, NotFusedError where, under `strict`, something that looks like attention
    was not fused, DumpError where the dump cannot be written."""
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
    scores = 0 if found.scores is None else found.scores(tensors)
    if found.scores is None or scores >= options.fused_from:
        prepare_programs(graph, scores)  # a smaller call runs the model itself
    report = made.report(options, start, later=later_of(made.captured))
    if made.dump is not None:
        made.dump.finish(report)
    if options.strict and report.unfused:
        first = report.unfused[0]
        raise NotFusedError(
            f"{len(report.unfused)} softmax-like place(s) were not fused; the first is at "
            f"{first.source or 'an unknown line'}: {first.reason}.\n"
            "What to do: rewrite that place, or compile without strict=True, which leaves it as it is.",
            first.reason,
        )
    require_ordered(options, report)
    found.report = report
    return found


def require_ordered(options: Options, report: CompileReport) -> None:
    """Raise NotFusedError where something has no order of sums, and `strict` forbids that."""
    if options.strict and report.unordered:
        raise NotFusedError(
            "under consistent=True and strict=True all sums must have one order, and there is none in "
            f"{', '.join(report.unordered)}.\nWhat to do: leave strict=True out; the report names them."
        )


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
