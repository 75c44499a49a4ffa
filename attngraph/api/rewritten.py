"""Captures one call of a model and runs passes on its graph.

What torch cannot capture as it is given is captured in another way: with sizes as numbers, with attributes
watched, or after a first call that fills tables.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

import attngraph.codegen  # noqa: F401  registers the kernels
from attngraph.api.options import Options
from attngraph.api.records import entries_of
from attngraph.capture import trace as capturing
from attngraph.capture.captured import NOTHING, Assumed, Captured, Structure
from attngraph.capture.compared import compared
from attngraph.capture.first_call import answers_alike, fills_a_table, run_first, writes_to_tensors
from attngraph.capture.flat import hold
from attngraph.capture.program.exported import arguments_of
from attngraph.capture.structure import flatten, unflatten
from attngraph.errors import CaptureError, NoDecoderError
from attngraph.ir.graph.program_graph import ProgramGraph, computed_from, is_measured, is_size
from attngraph.passes.insert_kv_cache.insert import only_result
from attngraph.pipeline import Pass, Result
from attngraph.pipeline import run as run_passes
from attngraph.report.dump import Dump
from attngraph.report.entries import Break, PassRecord
from attngraph.report.report import CompileReport

Found = tuple[Captured, tuple[Break, ...]]
"""A captured call, and why sizes are numbers that torch could not follow as symbols."""
Again = Callable[[tuple[Any, ...], dict[str, Any]], Captured]
"""Captures another call of the model."""


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
            **options.devices.reported(graph), **more,
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
    places = [value if kind == "tensor" else None for kind, value in structure.leaves]
    result = unflatten(places, structure.tree)
    named = getattr(result, "logits", None)
    if named is None and isinstance(result, Mapping):
        named = result.get("logits")
    found = named if isinstance(named, int) else next((p for p in places if p is not None), None)
    if found is None:
        raise NoDecoderError("the model returns no tensor.")
    return found
