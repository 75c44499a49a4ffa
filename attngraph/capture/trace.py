"""From a callable and example inputs to a program graph: the only caller of torch.export.

The model is wrapped so that torch only sees a flat list of tensors (`flat.py`); attngraph itself flattens
and rebuilds the structures of inputs and outputs, with their numbers and None. Every tensor dimension is
dynamic unless the model forbids it. In-place ops are functionalised; writes to buffers and arguments become
results that the executable copies back. Regions without gradients become `detach`.
"""

import contextlib
import dataclasses
import io
import itertools
import linecache
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.parameter import is_lazy

from attngraph.capture import faster
from attngraph.capture.attributes import Given
from attngraph.capture.captured import NOTHING, Assumed, Captured, Structure
from attngraph.capture.first_call import extents_of_loop
from attngraph.capture.flat import Flat, Trace, closed_over_modules
from attngraph.capture.guards import aliases, things
from attngraph.capture.instead import instead, python_followed, silenced
from attngraph.capture.lines import line_using, name_of, refused, whole_stack_traces
from attngraph.capture.program import exported, functional
from attngraph.capture.program.layouts import hold_layouts
from attngraph.capture.side_effects import lost
from attngraph.capture.sides import FIXED, Sides, SizeProblem, short_formulas
from attngraph.capture.state.kinds import hooks_not_traced
from attngraph.capture.state.snapshot import Snapshot
from attngraph.capture.state.walk import Walk
from attngraph.capture.structure import Args, Named, Target, classes_in, flatten
from attngraph.capture.subgraphs import function_refusal
from attngraph.errors import CaptureError
from attngraph.ir.graph import Output, ProgramGraph, short_path
from attngraph.ir.graph.verify import accept
from attngraph.ir.modes import without_collections

_CHATTY = (
    "torch._export.non_strict_utils", "torch.fx.experimental.symbolic_shapes", "torch.export._trace",
    "torch._subclasses.fake_tensor",
)  # fmt: skip
_PLANE, _VOLUME = (nn.Conv2d, nn.ConvTranspose2d), (nn.Conv3d, nn.ConvTranspose3d)


def capture(target: Target, args: Args, kwargs: Named, assumed: Assumed = NOTHING) -> Captured:
    """Trace one call of `target` on these inputs.

    Raises:
        CaptureError: torch.export cannot follow the model; carries torch's reason and the user's line.
    """
    try:
        return _capture(target, args, kwargs, assumed, any_number=not assumed.symbolic)
    except SizeProblem as problem:
        with quiet():
            extents = extents_of_loop(target, args, kwargs, assumed.symbolic)
        if extents is not None:
            raise CaptureError(FIXED, FIXED, extents=extents) from problem
    return _capture(target, args, kwargs, assumed, any_number=True)


def _capture(target: Target, args: Args, kwargs: Named, assumed: Assumed, any_number: bool) -> Captured:
    """As `capture`; may raise a SizeProblem, unless a graph for `any_number` of tokens is wanted."""
    leaves, spec = flatten((args, kwargs))
    if any(isinstance(leaf, nn.Module) for leaf in leaves):
        raise CaptureError(
            "a module is among the arguments, and a graph would hold copies of its weights.\n"
            "What to do: make it a submodule, or compile without strict=True.",
            "a module among the arguments",
        )
    _refuse_what_a_graph_would_lose(target)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    flat = Flat(target, leaves, spec, assumed, faster.forward)
    flat.trace.shared = Given(args, kwargs).shared
    program = _program(flat, tensors, things(leaves), any_number)
    graph = exported.program_graph(program, flat)
    accept(graph.graph)
    exported.write_out(graph.graph)
    if any(o.kind == "argument" for o in graph.outputs) and aliases(tensors) != tuple(range(len(tensors))):
        raise lost("forward() writes to an argument that shares its memory with another")
    found = _with_sizes(graph, program, flat.trace)
    equal = frozenset(map(flat.trace.of, exported.equal_sizes(found.graph.conditions))) - assumed.equal
    if equal:
        told = dataclasses.replace(assumed, equal=assumed.equal | equal)
        return _capture(target, args, kwargs, told, any_number)
    hold_layouts(found.graph, flat.trace.memory)
    return _watched(found, flat.trace, [target, *things(leaves)], frozenset(classes_in(spec)))


def _program(
    flat: Flat, tensors: tuple[Tensor, ...], others: Sequence[Any], any_number: bool
) -> ExportedProgram:
    """The trace as a pure function of plain operations. `others`: arguments that are no tensors.

    Raises:
        CaptureError: there is none, or it would lose what the call does.
    """
    trace = flat.trace
    kept = Snapshot([trace.target, *others])  # torch.export replaces a module's lists and dicts by copies
    try:
        with warnings.catch_warnings(), faster.whole_capture():
            warnings.simplefilter("ignore")
            program = _export(flat, tensors, any_number)
            functional.complete_users(program.graph_module)
            hidden = functional.hidden_from_gradients(program, tensors)
            functional.inline_grad_regions(program.graph_module)
            functional.inline_vmap(program.graph_module)
            # The executable checks sizes itself; torch's guard code fails on unused inputs.
            program._guards_code = []
            program = faster.functional(program) or functional.functional(program)
            for node in program.graph.nodes:
                if (refusal := function_refusal(node, traced=True)) is not None:
                    raise refusal
    except CaptureError:
        raise
    except SizeProblem as problem:
        if problem.may_hold:
            raise
        dimensions = trace.of(problem.symbols)
        fixes = None if trace.assumed.symbolic.isdisjoint(dimensions) else trace.extents
        raise CaptureError(str(problem), str(problem), dimensions=dimensions, extents=fixes) from problem
    except Exception as problem:  # torch raises many types; all mean that the capture failed
        if trace.effects.problem is not None:
            raise trace.effects.problem from problem
        raise _capture_error(problem, trace) from problem
    finally:
        kept.restore()
    if trace.effects.problem is not None:
        raise trace.effects.problem
    if hidden is not None:
        raise hidden
    return program


def _watched(captured: Captured, trace: Trace, targets: Sequence[Any], classes: frozenset[type]) -> Captured:
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
    if what:
        lead = "a graph of the model would keep what forward() reads in this call: "
        advice = "read it outside of the model and give it as an argument"
        problem = refused(what, line, advice, lead=lead)
        problem.reason = f"forward() reads {what}"
        raise problem
    others = classes | found.functions_not_met(trace.executed.codes.values())
    return dataclasses.replace(captured, around=dataclasses.replace(captured.around, others=others))


def _export(flat: Flat, tensors: tuple[Tensor, ...], any_number: bool) -> ExportedProgram:
    """torch.export's trace of the call, with what it cannot follow by itself replaced."""
    trace, assumed = flat.trace, flat.trace.assumed
    symbolic = assumed.symbolic - assumed.fixed
    dynamic = enumerate(_dynamic_dimensions(t, trace.target) for t in tensors)
    shapes = tuple({d: Dim.AUTO for d in dims if (n, d) not in assumed.fixed} for n, dims in dynamic)

    def kept(symbols: frozenset[str]) -> bool:
        return not symbolic.isdisjoint(trace.of(symbols)) if symbolic and symbols else False

    def noting(_: Any) -> Callable[[Tensor], None]:
        """Each value's layout, which its fake tensor has anyway, is not recorded; its extents are noted."""
        return lambda value: trace.extents.update(n for n in value.shape if isinstance(n, int))

    weights = (*flat.parameters(), *flat.buffers())
    inference = not torch.is_grad_enabled() and any(w.is_inference() for w in weights)
    with (
        without_collections(),
        whole_stack_traces(),
        quiet(),
        instead((fx.experimental.proxy_tensor, "_extract_tensor_metadata", noting)),
        python_followed(),
        trace.numbers.listening(),
        faster.export(),
        short_formulas(kept, any_number),
        functional.views_taken_apart(),
        # torch's stand-ins for weights that were made in inference mode are made in no other.
        torch.inference_mode() if inference else contextlib.nullcontext(),
    ):
        return torch.export.export(flat, tensors, dynamic_shapes=(shapes,) if tensors else None, strict=False)


def _with_sizes(graph: ProgramGraph, program: ExportedProgram, trace: Trace) -> Captured:
    """What was captured, with the conditions and the example numbers of the graph's symbolic sizes."""
    assert trace.structure is not None and trace.asked is not None
    arguments = exported.arguments_of(graph)
    sizes = exported.shapes_of(arguments)
    env: Any = getattr(graph.fake_mode(), "shape_env", None)
    graph.conditions = tuple(exported.conditions(program, env))
    graph.hints = exported.hints(arguments, graph.graph.nodes)

    def simplified(part: Any) -> Any:
        """A structure, or what has one, with its sizes as they are at the end of the trace."""
        if not isinstance(part, Structure):
            return dataclasses.replace(part, structure=part.structure and simplified(part.structure))
        is_symbolic = env is not None
        leaves = ((k, env.simplify(v) if k == "size" and is_symbolic else v) for k, v in part.leaves)
        return Structure(part.tree, tuple(leaves))

    _name_outputs(graph, trace.kinds)
    return Captured(
        graph, simplified(trace.structure), sizes, tuple(map(simplified, trace.attributes)),
        tuple(map(simplified, trace.changes)),
        checks=tuple(line for _, line in trace.answered.checks),
        asked=trace.numbers.told(sizes, graph.conditions), sides=Sides(trace.answered.decisions(env)),
        around=trace.executed.scope(asked=frozenset(trace.asked.found), layouts=trace.asked.layouts),
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


def _refuse_what_a_graph_would_lose(target: Target) -> None:
    """Raise if torch.export would silently drop something."""
    modules = closed_over_modules(target)
    for path, kind, hook in (found for module in modules for found in hooks_not_traced(module)):
        function = getattr(hook, "__qualname__", type(hook).__qualname__)
        where = f"the module {path}" if path else "the model"
        moves = kind == "hook"  # those of torch.distributed, as `fully_shard` registers them
        advice = "call fully_shard once, on the compiled module" if moves else "remove the hook"
        raise lost(f"the {kind} {function} of {where} would not run", advice=advice)
    if any(is_lazy(p) for module in modules for p in module.parameters()):
        raise CaptureError("the model has lazy modules that are not initialised yet", "lazy modules")


def _dynamic_dimensions(tensor: Tensor, target: Target) -> list[int]:
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
def quiet() -> Iterator[None]:
    """Hide torch's messages about a failed or specialised export: attngraph's errors and reports contain what
    matters of them."""
    with silenced(*_CHATTY), contextlib.redirect_stderr(io.StringIO()):
        yield


_IN_OUR_WORDS = (
    ("non-nested SymInt", "a size is a key of a dict or of a cache of results, which takes its number alone"),
    ("fake tensor in the exported", "torch.export takes a value that the model computes for a constant"),
    (r"Constant (?:model\.)?(\S+) is mutated",
     r"forward() changes the tensor \1 in place, which is no buffer of the model"),
    ("unbacked symbols", "the size of a tensor depends on the values of another"),
)  # fmt: skip
"""What torch's reasons mean."""


def _capture_error(problem: Exception, trace: Trace) -> CaptureError:
    """Torch's message, shortened, with the line of the user's code if it is known."""
    of_values = isinstance(problem, GuardOnDataDependentSymNode)  # numbers for sizes would not help
    text = str(problem).strip()
    reason = next((line.strip() for line in text.splitlines() if line.strip()), type(problem).__name__)
    ours = os.path.dirname(os.path.dirname(__file__)) + os.sep
    called = [(f.f_code.co_filename, str(line)) for f, line in traceback.walk_tb(problem.__traceback__)]
    frames: list[tuple[str, str]] = []
    for found in (called, re.findall(r'File "([^"]+)", line (\d+)', text)):
        users = [f for f in found if "/torch/" not in f[0] and not f[0].startswith(("<", ours))]
        frames = users or frames
    source = f"{short_path(frames[-1][0])}:{frames[-1][1]}" if frames else ""
    for pattern, told in _IN_OUR_WORDS:
        if meant := re.search(pattern, reason):
            reason = meant.expand(told)
    if of_values:
        line = linecache.getline(frames[-1][0], int(frames[-1][1])).strip() if frames else ""
        reason = f"what Python does depends on the values of a tensor{f': {line}' if line else ''}"
    return CaptureError(
        f"torch.export cannot capture the model{f' at {source}' if source else ''}: {reason}\n"
        "What to do: make the control flow at that line independent of tensor values (torch.where, a "
        "fixed bound), or compile without strict=True, which lets torch.compile capture the model in pieces.",
        reason,
        source,
        dimensions=frozenset() if of_values else trace.of(None),
    )
