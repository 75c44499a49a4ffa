"""From a callable and example inputs to a program graph: the only caller of torch.export.

The model is wrapped so that torch only sees a flat list of tensors (`flat.py`); attngraph itself flattens
and rebuilds the structures of inputs and outputs, with their numbers and None. Every tensor dimension is
dynamic unless the model forbids it. In-place ops are functionalised; writes to buffers and arguments become
results that the executable copies back. Regions without gradients become `detach`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import linecache
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.parameter import is_lazy

from attngraph.capture.asked_sizes import asked_sizes, told
from attngraph.capture.assumed import NOTHING, Assumed
from attngraph.capture.captured import Captured, Structure
from attngraph.capture.faster.calls import equal_calls_inferred_once
from attngraph.capture.faster.formulas import equal_formulas_computed_once
from attngraph.capture.faster.functions import equal_functions_traced_twice
from attngraph.capture.faster.steps import steps_shortened
from attngraph.capture.faster.unwritten import code_written_when_called
from attngraph.capture.flags import flags_of_sizes
from attngraph.capture.flat import Flat, Trace, closed_over_modules
from attngraph.capture.guards import aliases, things
from attngraph.capture.instead import replaced
from attngraph.capture.many_tokens import extents_of_loop
from attngraph.capture.numpy_sizes import numpy_of_sizes
from attngraph.capture.program import exported
from attngraph.capture.program.functional import functional, views_taken_apart
from attngraph.capture.program.hidden_writes import data_of_tensors, hidden_write
from attngraph.capture.program.layouts import hold_layouts
from attngraph.capture.side_effects import line_using, name_of, refusal
from attngraph.capture.sides import Sides
from attngraph.capture.size_formulas import FixedSize, ManyQuotients, SizeProblem, short_formulas
from attngraph.capture.stack_traces import whole_stack_traces
from attngraph.capture.state.parts import hooks_not_traced
from attngraph.capture.state.snapshot import Snapshot
from attngraph.capture.state.walk import Walk
from attngraph.capture.structure import classes_in, flatten
from attngraph.capture.subgraphs import function_refusal
from attngraph.errors import CaptureError
from attngraph.ir.garbage import without_collections
from attngraph.ir.graph.program_graph import Output, ProgramGraph
from attngraph.ir.graph.source import short_path
from attngraph.ir.graph.verify import accept

log = logging.getLogger(__name__)
_CHATTY = (
    "torch._export.non_strict_utils",
    "torch.fx.experimental.symbolic_shapes",
    "torch.export._trace",
    "torch._subclasses.fake_tensor",
)


_PLANE, _VOLUME = (nn.Conv2d, nn.ConvTranspose2d), (nn.Conv3d, nn.ConvTranspose3d)


def capture(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    assumed: Assumed = NOTHING,
) -> Captured:
    """Trace one call of `target` on these inputs.

    Raises:
        CaptureError: torch.export cannot follow the model; carries torch's reason and the user's line.
    """
    try:
        return _capture(target, args, kwargs, assumed, any_number=not assumed.symbolic)
    except ManyQuotients as problem:
        with quiet():
            extents = extents_of_loop(target, args, kwargs, assumed.symbolic)
        if extents is not None:
            fixes = str(FixedSize(problem.symbols))
            raise CaptureError(fixes, fixes, extents=extents) from problem
    return _capture(target, args, kwargs, assumed, any_number=True)


def _capture(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], assumed: Assumed,
    any_number: bool,
) -> Captured:  # fmt: skip
    """As `capture`; may raise ManyQuotients, unless a graph for `any_number` of tokens is wanted."""
    leaves, spec = flatten((args, kwargs))
    if any(isinstance(leaf, nn.Module) for leaf in leaves):
        raise CaptureError(
            "a module is among the arguments, and a graph would hold copies of its weights.\n"
            "What to do: make it a submodule, or compile without strict=True.",
            "a module among the arguments",
        )
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    _refuse_what_a_graph_would_lose(target)
    flat = Flat(target, leaves, spec, assumed)
    flat.training = getattr(target, "training", True)  # of the wrapper alone: submodules keep theirs
    flat.trace.repeats = equal_functions_traced_twice
    # torch.export replaces a module's lists and dicts by copies.
    kept = Snapshot([target, *things(leaves)])
    try:
        with warnings.catch_warnings(), code_written_when_called():
            warnings.simplefilter("ignore")
            program = _export(flat, tensors, any_number)
            exported.complete_users(program.graph_module)
            hidden = hidden_write(program, tensors) or exported.switches_gradients_on(program.graph_module)
            exported.inline_grad_regions(program.graph_module)
            exported.inline_vmap(program.graph_module)
            # The executable checks sizes itself; torch's guard code fails on unused inputs.
            program._guards_code = []
            program = functional(program)
            for node in program.graph.nodes:
                if (refused := function_refusal(node, traced=True)) is not None:
                    raise refused
    except ManyQuotients:
        raise
    except SizeProblem as problem:
        dimensions = flat.trace.of(problem.symbols)
        fixes = None if assumed.symbolic.isdisjoint(dimensions) else flat.trace.extents
        raise CaptureError(str(problem), str(problem), dimensions=dimensions, extents=fixes) from problem
    except Exception as problem:  # torch raises many types; all mean that the capture failed
        if isinstance(problem, CaptureError):
            raise
        if flat.trace.effects.what:
            raise flat.trace.effects.error() from problem
        helps = not isinstance(problem, GuardOnDataDependentSymNode)
        raise _capture_error(problem, flat.trace.of(None) if helps else frozenset()) from problem
    finally:
        kept.restore()
    if flat.trace.effects.what:
        raise flat.trace.effects.error()
    if hidden is not None:
        raise hidden
    graph = exported.program_graph(program, flat)
    accept(graph.graph)
    exported.write_epsilons(graph.graph)
    exported.write_dtypes(graph.graph)
    if any(o.kind == "argument" for o in graph.outputs) and aliases(tensors) != tuple(range(len(tensors))):
        raise refusal("forward() writes to an argument that shares its memory with another")
    found = _with_sizes(graph, program, flat.trace)
    hold_layouts(found.graph, flat.trace.memory)
    return _watched(found, flat.trace, [target, *things(leaves)], frozenset(classes_in(spec)))


def _watched(
    captured: Captured, trace: Trace, targets: Sequence[Any], classes: frozenset[type]
) -> Captured:  # fmt: skip
    """The captured graph, with all that its code read in its scope. `classes`: of its arguments.

    Raises:
        CaptureError: the code read what later calls cannot compare, so that a graph would keep what it was.
    """
    found = Walk(captured.scope)
    found.everything(targets)
    what, line = next(iter(trace.executed.outside), ""), ""
    if not what and (unseen := found.unseen_at_last()) is not None:
        place, value, why = unseen
        what = f"{name_of(place, targets[0])}, a {type(value).__name__}: {why}"
        line = line_using(place.name, targets[0])
    if not what:
        others = classes | found.functions_not_met(trace.executed.codes.values())
        around = dataclasses.replace(captured.around, others=others)
        return dataclasses.replace(captured, around=around)
    raise CaptureError(
        f"a graph of the model would keep what forward() reads in this call: {what}{line and f' at {line}'}."
        "\nWhat to do: read it outside of the model and give it as an argument, or compile without "
        "strict=True.",
        f"forward() reads {what}",
        line,
    )


def _export(flat: Flat, tensors: tuple[Tensor, ...], any_number: bool) -> ExportedProgram:
    """torch.export's trace of the call, with what it cannot follow by itself replaced."""
    target, assumed = flat.trace.target, flat.trace.assumed
    symbolic = assumed.symbolic - assumed.fixed
    shapes = tuple(
        {d: Dim.AUTO for d in _dynamic_dimensions(t, target) if (place, d) not in assumed.fixed}
        for place, t in enumerate(tensors)
    )

    def kept(symbols: frozenset[str]) -> bool:
        return not symbolic.isdisjoint(flat.trace.of(symbols)) if symbolic and symbols else False

    with (
        without_collections(),
        whole_stack_traces(),
        quiet(),
        _without_looking_at_masks(),
        _without_notes(flat.trace.extents),
        numpy_of_sizes(),
        flags_of_sizes(),
        data_of_tensors(),
        exported.batches_left_first(),
        asked_sizes(flat.trace),
        equal_calls_inferred_once(),
        equal_formulas_computed_once(),
        short_formulas(kept, any_number),
        views_taken_apart(),
        steps_shortened(),
        _mode_of_weights(flat),
        _modules_as_they_are(),
    ):
        return torch.export.export(flat, tensors, dynamic_shapes=(shapes,) if tensors else None, strict=False)


def _with_sizes(graph: ProgramGraph, program: ExportedProgram, trace: Trace) -> Captured:
    """What was captured, with the conditions and the example numbers of the graph's symbolic sizes."""
    assert trace.structure is not None
    arguments = [n for n, i in zip(graph.placeholders(), graph.inputs, strict=True) if i.kind == "argument"]
    sizes = tuple(tuple(exported.size_of(s) for s in n.meta["val"].shape) for n in arguments)
    graph.conditions = tuple(exported.conditions(program, arguments))
    graph.hints = exported.hints(arguments, graph.graph.nodes)
    env = exported.shape_env(arguments)

    def simplified(structure: Structure) -> Structure:
        leaves = (
            (kind, env.simplify(value) if kind == "size" and env is not None else value)
            for kind, value in structure.leaves
        )
        return Structure(structure.tree, tuple(leaves))

    attributes = [
        dataclasses.replace(a, structure=None if a.structure is None else simplified(a.structure))
        for a in trace.attributes
    ]
    _name_outputs(graph, trace.kinds)
    checks = tuple(line for _, line in trace.checks.found)
    sizes_asked = told(trace, sizes, graph.conditions)
    sides = Sides(trace.decisions.found(env))
    asked = trace.questions
    found = frozenset() if asked is None else frozenset(asked.found)
    around = trace.executed.ran.scope(asked=found, layouts=asked is not None and asked.layouts)
    return Captured(
        graph, simplified(trace.structure), sizes, tuple(attributes), checks, sizes_asked, sides, around,
        serves_small="flex_attention" in trace.written_out,
    )  # fmt: skip


def _name_outputs(graph: ProgramGraph, kinds: Mapping[int, tuple[str, str]]) -> None:
    """Say which of the graph's results are what an attribute is set to, or a condition that is checked."""
    values = itertools.count()

    def named(output: Output) -> Output:
        if output.kind != "value":
            return output
        kind, name = kinds.get(next(values), ("value", ""))
        return dataclasses.replace(output, kind=kind, name=name)

    graph.outputs = tuple(map(named, graph.outputs))


def _refuse_what_a_graph_would_lose(target: Callable[..., Any]) -> None:
    """Raise if torch.export would silently drop something."""
    modules = [target] if isinstance(target, nn.Module) else closed_over_modules(target)
    for path, kind, hook in (found for module in modules for found in hooks_not_traced(module)):
        function = getattr(hook, "__qualname__", type(hook).__qualname__)
        where = f"the module {path}" if path else "the model"
        moves = kind == "hook"  # those of torch.distributed, as `fully_shard` registers them
        advice = "call fully_shard once, on the compiled module" if moves else "remove the hook"
        raise refusal(f"the {kind} {function} of {where} would not run", advice=advice)
    if any(is_lazy(p) for module in modules for p in module.parameters()):
        raise CaptureError("the model has lazy modules that are not initialised yet", "lazy modules")


def _dynamic_dimensions(tensor: Tensor, target: Callable[..., Any]) -> list[int]:
    """All dimensions of a tensor, except those marked by `torch._dynamo.mark_static` and, in a model with
    convolutions, the spatial ones: strides and padding lead to size formulas that are too complex for
    symbolic algebra. Other sizes of excluded dimensions get separate graphs."""
    spatial = 0
    if isinstance(target, nn.Module) and tensor.ndim >= 4 and tensor.is_floating_point():
        for kinds, sides in ((_PLANE, 2), (_VOLUME, 3)):
            spatial = sides if any(isinstance(m, kinds) for m in target.modules()) else spatial
    static = getattr(tensor, "_dynamo_static_indices", ())
    return [d for d in range(tensor.ndim - spatial) if d not in static]


@contextlib.contextmanager
def _modules_as_they_are() -> Iterator[None]:
    """Let torch hand out modules that are registered twice themselves, and no stand-in for each name: a model
    may ask whether two are the same. (A stand-in would say by which name its operations were reached.)"""
    tracer: Any = fx.experimental.proxy_tensor._ModuleStackTracer
    begin = tracer.__init__

    def begins(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.enable_attr_proxy = False

    with replaced(tracer, "__init__", begins):
        yield


def _mode_of_weights(flat: Flat) -> contextlib.AbstractContextManager[Any]:
    """Inference mode for weights that were made in it: torch's stand-ins for them are made in no other."""
    weights = (*flat.parameters(), *flat.buffers())
    if torch.is_grad_enabled() or not any(w.is_inference() for w in weights):
        return contextlib.nullcontext()
    return torch.inference_mode()


@contextlib.contextmanager
def _without_looking_at_masks() -> Iterator[None]:
    """Skip the check in torch.nn's transformer layers whether a mask's values are causal, which they do to
    pass a hint with the mask. A trace has no values, and the mask itself is sufficient."""

    def hint(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return bool(is_causal)

    with replaced(nn.modules.transformer, "_detect_is_causal_mask", hint):
        yield


@contextlib.contextmanager
def _without_notes(extents: set[int]) -> Iterator[None]:
    """Disable two steps of tracing that are slow with symbolic sizes: the cache of fake-tensor results, which
    takes longer than recomputing them, and recording each value's memory layout, which its fake tensor has
    anyway (its extents that are numbers are noted)."""

    def note(value: Tensor) -> None:
        extents.update(n for n in value.shape if isinstance(n, int))

    with (
        replaced(torch._dynamo.config, "fake_tensor_cache_enabled", False),
        replaced(fx.experimental.proxy_tensor, "_extract_tensor_metadata", note),
    ):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide torch's messages about a failed or specialised export: attngraph's errors and reports contain what
    matters of them."""
    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _capture_error(problem: Exception, dimensions: frozenset[tuple[int, int]]) -> CaptureError:
    """Torch's message, shortened, with the line of the user's code if it is known."""
    text = str(problem).strip()
    reason = next((line.strip() for line in text.splitlines() if line.strip()), type(problem).__name__)
    frames = re.findall(r'File "([^"]+)", line (\d+)', text)
    ours = os.path.dirname(os.path.dirname(__file__)) + os.sep
    frames = [f for f in frames if "/torch/" not in f[0] and not f[0].startswith(("<", ours))]
    if not frames:
        trace = problem.__traceback__
        while trace is not None:
            path = trace.tb_frame.f_code.co_filename
            if "/torch/" not in path and "attngraph/" not in path and not path.startswith("<"):
                frames.append((path, str(trace.tb_lineno)))
            trace = trace.tb_next
    source = f"{short_path(frames[-1][0])}:{frames[-1][1]}" if frames else ""
    if "non-nested SymInt" in reason:
        reason = "a size is a key of a dict or of a cache of results, which takes its number alone"
    if "fake tensor in the exported program" in reason:
        reason = "torch.export takes a value that the model computes for a constant"
    if mutated := re.search(r"Constant (?:model\.)?(\S+) is mutated", reason):
        reason = f"forward() changes the tensor {mutated[1]} in place, which is no buffer of the model"
    if "unbacked symbols" in reason:
        reason = "the size of a tensor depends on the values of another"
    if isinstance(problem, GuardOnDataDependentSymNode):
        line = linecache.getline(frames[-1][0], int(frames[-1][1])).strip() if frames else ""
        reason = f"what Python does depends on the values of a tensor{f': {line}' if line else ''}"
    return CaptureError(
        f"torch.export cannot capture the model{' at ' + source if source else ''}: {reason}\n"
        "What to do: make the control flow at that line independent of tensor values (torch.where, a "
        "fixed bound), or compile without strict=True, which lets torch.compile capture the model in pieces.",
        reason,
        source,
        dimensions=dimensions,
    )
