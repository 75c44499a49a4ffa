"""Builds executables from one call of a model: capture, passes, kernels, and the report of all three.

`compile_graph` makes an executable for calls like this one; `derive_decoder` makes a decoder's step and
checks it against the whole model. Which graph is used for which call is decided elsewhere (`compiled`,
`runtime/decoder`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import attngraph.codegen  # noqa: F401  registers the kernels
from attngraph.api.options import Options
from attngraph.api.runners import require_whole_parameters, runner_of, step_on_ranks
from attngraph.capture import trace as capturing
from attngraph.capture.attributes import Settings
from attngraph.capture.captured import Captured, Structure
from attngraph.capture.first_call import answers_alike, fills_a_table, run_first, writes_to_tensors
from attngraph.capture.flat import closed_over_modules
from attngraph.capture.structure import Spread, flatten, unflatten
from attngraph.capture.trace_lock import LOCK
from attngraph.errors import CaptureError, NoDecoderError, NotFusedError
from attngraph.ir.graph.program_graph import ProgramGraph, is_measured, is_size
from attngraph.ir.graph.source import module_of
from attngraph.ir.language.token_program import parse
from attngraph.ir.ops import nodes, token_program
from attngraph.ir.ops.cached_attention import source_for_short_queries
from attngraph.ir.ops.kernels import KERNELS
from attngraph.ir.ops.latent_attention import absorbed_operands
from attngraph.meaning.algebra.sizes import example_size
from attngraph.passes.insert_kv_cache.free_tokens import computed_with
from attngraph.passes.insert_kv_cache.insert import InsertKVCache, only_result
from attngraph.passes.quantise_cache import QuantiseCache
from attngraph.passes.shard_heads.account import account_cache
from attngraph.pipeline import Pass, Result, split_at
from attngraph.pipeline import run as run_passes
from attngraph.report.dump import Dump
from attngraph.report.entries import (
    AttentionEntry,
    Break,
    CacheEntry,
    Drift,
    KernelEntry,
    TokenProgramEntry,
)
from attngraph.report.report import CompileReport
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.executable import Executable
from attngraph.runtime.parallel.agree import agree_on_graph
from attngraph.runtime.parallel.parameters import Own, distribute, stand_ins
from attngraph.runtime.parallel.simulated import simulated
from attngraph.runtime.proof import Proved, prove, prove_longer
from attngraph.runtime.proof_of_storage import prove_storage
from attngraph.runtime.step import Step


@dataclasses.dataclass
class _Rewritten:
    """A captured call after the passes; `before` is the captured graph, if it was asked for. `numbers`: why
    sizes are numbers that torch could not follow as symbols. `seconds`: of capture."""

    captured: Captured
    result: Result
    dump: Dump | None
    before: ProgramGraph | None
    numbers: tuple[Break, ...]
    seconds: float


def _rewritten(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options,
    passes: Sequence[Pass], keep: bool = False, only_logits: bool = False,
    numbers_at: frozenset[tuple[int, int]] = frozenset(),
    symbolic_at: frozenset[tuple[int, int]] = frozenset(),
    check: Callable[[ProgramGraph], None] = lambda graph: None,
) -> _Rewritten:  # fmt: skip
    """Capture one call, with numbers for some dimensions of its tensors, and run the passes. If a symbolic
    size was an obstacle to a pass, or to torch, do both again with that size as a number. `only_logits`: the
    model's other results are dropped before. `check`: of the captured graph, raises where it will not do."""
    tell = options.progress or (lambda stage: None)

    def attempt(fixed: frozenset[tuple[int, int]] = frozenset()) -> _Rewritten:
        tell("capture")
        start = time.perf_counter()
        captured, numbers = _captured(target, args, kwargs, fixed, only_logits, symbolic_at)
        seconds = time.perf_counter() - start
        check(captured.graph)
        before = captured.graph.copy() if keep else None
        if only_logits:
            only_result(captured.graph, _place_of_logits(captured.structure))
        dump = None if options.dump is None else Dump(options.dump)
        result = run_passes(captured.graph, passes, dump, options.progress)
        return _Rewritten(captured, result, dump, before, numbers, seconds)

    first = attempt(numbers_at)
    if not first.result.obstacles:
        return first
    second = attempt(numbers_at | first.captured.dimensions(first.result.obstacles))
    better = len(second.result.missed) < len(first.result.missed)
    kept, other = (second, first) if better else (first, second)
    if other.dump is not None:
        other.dump.discard()
    return dataclasses.replace(kept, seconds=first.seconds + second.seconds)


def _captured(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fixed: frozenset[tuple[int, int]],
    tables: bool,
    symbolic: frozenset[tuple[int, int]],
) -> tuple[Captured, tuple[Break, ...]]:
    """One call, with numbers for the sizes that torch cannot follow as symbols, and why. Attributes that the
    call sets are taken as results where that is possible; with `tables` also those that a first call fills
    for later ones, if what it fills them with follows from sizes and weights; where a first call sets other
    things, or writes to weights, it is run before."""
    numbers: list[Break] = []
    settings: Settings = {}
    first: CaptureError | None = None
    while True:
        try:
            found = capturing.capture(target, args, kwargs, fixed, settings, first is not None, symbolic)
            if first is not None and _attributes_follow_data(found):
                raise first
            return found, tuple(numbers)
        except CaptureError as problem:
            if problem.extents is not None:
                raise NoDecoderError(problem.reason, True, problem.extents) from problem
            if problem.settings and not settings:
                settings = problem.settings
                continue
            fills = tables and first is None and fills_a_table(problem, target, args, kwargs)
            if fills and answers_alike(target, args, kwargs):
                if settings and not writes_to_tensors(target, args, kwargs):
                    first = problem
                else:
                    run_first(target, args, kwargs)
                    settings, tables = {}, False
                continue
            if not problem.dimensions - fixed:
                raise
            fixed |= problem.dimensions
            numbers.append(Break(problem.reason, problem.source))


def _attributes_follow_data(captured: Captured) -> bool:
    """Whether what attributes are set to is computed from the values of arguments, not only from weights and
    sizes."""
    graph = captured.graph
    results: Any = graph.graph.output_node().args[0]
    stack = [n for n, o in zip(results, graph.outputs, strict=True) if o.kind == "attribute"]
    arguments = [n for n, i in zip(graph.placeholders(), graph.inputs, strict=True) if i.kind == "argument"]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in seen and not (is_size(node) and not is_measured(node)):
            seen.add(node)
            stack += node.all_input_nodes
    return not seen.isdisjoint(arguments)


@LOCK.trace()
def compile_graph(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Executable:
    """Capture one call of `target`, run the passes, and make it executable.

    Raises:
        CaptureError: torch.export cannot capture it. NotFusedError: under `strict`, something that looks
            like attention was not fused. DumpError: the dump cannot be written.
    """
    start = time.perf_counter()
    owner = owner_of(target)
    shared = options.mesh is not None and not options.mesh.is_simulated
    with stand_ins(owner) if shared else contextlib.nullcontext():
        made = _rewritten(target, args, kwargs, options, options.pipeline())
    result, graph = made.result, made.captured.graph
    entries = tuple(_entries(graph))
    found = _executable(made.captured, owner, options)
    seconds = time.perf_counter() - start
    report = CompileReport(
        entries, tuple(result.missed), tuple(result.records), (), seconds, captured=result.captured,
        code=result.code, ranks=None if graph.ranks is None else graph.ranks.entry,
        context=None if graph.ranks is None else graph.ranks.context, numbers=made.numbers,
        capture=made.seconds,
    )  # fmt: skip
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


def _executable(captured: Captured, owner: nn.Module, options: Options) -> Executable:
    """What runs a graph: on this device, on this rank of several, or on simulated ranks."""
    mesh, graph = options.mesh, captured.graph
    if mesh is None or graph.ranks is None:
        return Executable(captured, owner, runner_of(options))
    if mesh.is_simulated:
        return Executable(captured, owner, simulated, Own(graph, owner, mesh))
    agree_on_graph(mesh, graph)
    if mesh.tensor is not None and mesh.holds_parts:
        distribute(graph, owner, mesh.tensor)
    return Executable(captured, owner, runner_of(options), Own(graph, owner, mesh))


def owner_of(target: Callable[..., Any]) -> nn.Module:
    """The module in which parameter names are looked up: a holder with the names of capture's wrapper."""
    holder = nn.Module()
    if isinstance(target, nn.Module):
        holder.model = target
    else:
        for place, module in enumerate(closed_over_modules(target)):
            holder.add_module(f"closure_{place}", module)
    return holder


@LOCK.trace()
def derive_decoder(
    target: Callable[..., Any], options: Options, config: CacheConfig, name: str, arguments: dict[str, Any],
    distinct: int = 0, multiples: frozenset[int] = frozenset(),
) -> Step:  # fmt: skip
    """Capture `target(**arguments)` and derive a decoder for its argument `name`.

    Args:
        distinct: the number of tokens, if it is a size of nothing else: the trace may then be one for this
            number alone.
        multiples: of the number of tokens, with which operations computed in a trace for another one.

    Raises:
        CaptureError: torch.export cannot capture the model. NoDecoderError: none can be derived; says why.
    """
    start, mesh, owner = time.perf_counter(), options.mesh, owner_of(target)
    shared = mesh is not None and not mesh.is_simulated
    first, (_, *later) = split_at(options.decoder_pipeline(config.rounded), InsertKVCache.name)
    rounding = [step for step in later if step.name == QuantiseCache.name]
    later = [step for step in later if step.name != QuantiseCache.name]
    names = [n for n, v in arguments.items() for leaf in flatten(v)[0] if isinstance(leaf, Tensor)]
    place = names.index(name)
    tokens, none = frozenset({(place, 1)}), frozenset[tuple[int, int]]()
    with example_size(distinct), stand_ins(owner) if shared else contextlib.nullcontext():
        made = _rewritten(
            target, (), arguments, options, first, config.proof, True,
            numbers_at=tokens if distinct else none, symbolic_at=none if distinct else tokens,
            check=functools.partial(_require_no_others, number=distinct, multiples=multiples),
        )  # fmt: skip
        divided = made.captured.graph.copy() if config.proof and made.captured.graph.ranks else None
        inserted = _with_cache(made, (InsertKVCache(place, 0, distinct),), options)
        captured, result, graph = made.captured, made.result, made.captured.graph
        kept = None if graph.ranks is None else account_cache(graph, config.floating)
        rest = run_passes(graph, later, made.dump, options.progress)
    spread = frozenset(n for n, v in arguments.items() if isinstance(v, Spread))
    arguments = {n: v.tensor if isinstance(v, Spread) else v for n, v in arguments.items()}

    def step_of(graph: ProgramGraph) -> Step:
        run, ranks = step_on_ranks(graph, owner, options)
        return Step(graph, owner, name, names, CompileReport(), run, captured.left_out, spread, ranks)

    step = step_of(graph.copy() if rounding else graph)
    proved, drift = None, None
    if made.before is not None:
        proved = _proved(target, made.before, divided, step, arguments, captured, options)
    if rounding:
        wide, more = step, run_passes(graph, rounding, made.dump, options.progress)
        rest.records += more.records
        step = step_of(graph)
        if proved is not None:
            drift = prove_storage(wide, step, arguments, name, proved.logits)
    report = CompileReport(
        tuple(_entries(graph)), tuple(result.missed), (*result.records, *inserted.records, *rest.records),
        captured=result.captured, code=result.code, programs=_programs(graph), numbers=made.numbers,
        capture=made.seconds, ranks=None if graph.ranks is None else graph.ranks.entry,
    )  # fmt: skip
    cache = _cache_entry(step, config, captured, None if proved is None else proved.error, drift)
    cache = dataclasses.replace(cache, ranks=kept)
    step.report = dataclasses.replace(report, cache=cache, seconds=time.perf_counter() - start)
    if made.dump is not None:
        made.dump.finish(step.report)
    return step


def _proved(
    target: Callable[..., Any], before: ProgramGraph, divided: ProgramGraph | None, step: Step,
    arguments: Mapping[str, Any], captured: Captured, options: Options,
) -> Proved:  # fmt: skip
    """Compare a decoder that rounds nothing with the model, or with the graph that is divided among ranks.

    Raises:
        NoDecoderError: they differ.
    """
    logits = _place_of_logits(captured.structure)
    if options.progress is not None:
        options.progress("proof")
    found = prove(divided or before, step, arguments, step.name, 0 if divided else logits)
    if step.traced_few():
        require_whole_parameters(options.mesh)
        prove_longer(target, step, arguments, step.name, logits)
    return found


def _require_no_others(graph: ProgramGraph, number: int, multiples: frozenset[int]) -> None:
    """Raise if a captured graph for one number of tokens computes with multiples of it that may be something
    else: others than in a trace for another number."""
    unclear = {n for n in computed_with(graph, number) if n // number not in multiples}
    if unclear:
        raise NoDecoderError(
            f"it computes with {min(unclear)}, which may be a number of tokens or not.", True, unclear
        )


def _with_cache(made: _Rewritten, passes: Sequence[Pass], options: Options) -> Result:
    """Run the passes that make a decoder's step of a graph, the insertion of caches first.

    Raises:
        NoDecoderError: none can be derived; says why, and what came before it.
    """
    graph = made.captured.graph
    try:
        return run_passes(graph, passes, made.dump, options.progress)
    except NoDecoderError as problem:
        if problem.fixes_tokens:
            problem.extents |= _extents(graph)
        if made.numbers:
            stop = made.numbers[0]
            where = f" at {stop.source}" if stop.source else ""
            more = (
                f"(Sizes of the model are numbers, because torch cannot follow them as symbols{where}: "
                f"{stop.reason}.)"
            )
        elif made.result.missed:
            first = made.result.missed[0]
            more = f"(The softmax at {first.source} was not recognised as attention: {first.reason}.)"
        else:
            raise
        raise NoDecoderError(
            f"{problem.reason}\n{more}", problem.fixes_tokens, problem.extents
        ) from problem  # fmt: skip


def _cache_entry(
    step: Step, config: CacheConfig, captured: Captured, error: float | None, drift: Drift | None
) -> CacheEntry:
    plan = step.graph.state
    assert plan is not None
    scales = {s.scales_of: s.bytes_per_token for s in plan.stores if s.scales_of}
    stores = tuple(
        (s.label, s.bytes_in(config.floating) + scales.get(s.name, 0), s.window)
        for s in plan.stores
        if not s.scales_of
    )
    return CacheEntry(
        sum(size for _, size, _ in stores), plan.expanded, plan.attentions, stores, len(plan.fixed),
        step.limit, error, config.rollback, config.page if config.layout == "paged" else 1,
        tuple(a.label.removeprefix("model.") for a in captured.attributes),
        tuple(dict.fromkeys(captured.checks)),
        tuple((value.label, value.bytes_per_row) for value in plan.carried), plan.anew,
        config.rounded if scales else "", drift if scales else None,
        tuple(s.label for s in plan.stores if config.rounded and not s.scales_of and s.name not in scales),
    )  # fmt: skip


def _extents(graph: ProgramGraph) -> set[int]:
    """The numbers in a graph that are sizes of its values, or that its operations are given."""
    values = (n.meta.get("val") for n in graph.graph.nodes)
    found = {n for value in values if isinstance(value, Tensor) for n in value.shape if isinstance(n, int)}
    given = (pytree.tree_leaves((n.args, n.kwargs)) for n in graph.graph.nodes)
    return found | {abs(n) for leaves in given for n in leaves if type(n) is int and abs(n) < sys.maxsize}


def _entries(graph: ProgramGraph) -> Iterator[AttentionEntry]:
    """The report's entries, one for each attention."""
    for part in (*graph.stages.values(), graph):
        for node in (n for n in part.graph.nodes if "attention" in n.meta):
            yield dataclasses.replace(node.meta["attention"], kernel=_kernel(node))


def _programs(graph: ProgramGraph) -> tuple[TokenProgramEntry, ...]:
    """The token programs of a graph, equal ones once, with the source that is emitted for few tokens."""
    names: dict[str, dict[str, None]] = {}
    for node in graph.graph.nodes:
        if node.target is torch.ops.attngraph.token_program.default:
            names.setdefault(str(node.args[1]), {})[module_of(node)] = None
    found = []
    for text, modules in names.items():
        sources = ((runner.name, runner.source(parse(text))) for runner in token_program.RUNNERS)
        name, source = next(((n, s) for n, s in sources if s), ("", ""))
        found.append(TokenProgramEntry(text, tuple(modules), KernelEntry(name, source)))
    return tuple(found)


def _kernel(node: fx.Node) -> KernelEntry:
    """The kernel of an attention, with its emitted source. Where the kernel is chosen at each call, the one
    for rows with one new token."""
    chosen = "", ""
    match nodes.called(node.target, fx.node.map_arg(node.args, lambda n: n.meta["val"]), {}):  # type: ignore[arg-type]
        case nodes.Attention(q=q, k=k, v=v, kernel=name) as found:
            source = KERNELS[name].source(found.program, (q, k, v), found.reads) if name else ""
            return KernelEntry(name, source)
        case nodes.CachedAttention(k_pages=k, v_pages=v) as found:
            chosen = source_for_short_queries(found.program, found.q, (k, v), found.reads, found.by)
        case nodes.CachedLatentAttention(absorb="auto" | "always") as found:
            operands = absorbed_operands(found.q, found.pages, found.key_up, found.value_up, found.values)
            chosen = source_for_short_queries(found.program, *operands, found.reads, found.family)
    name, source = chosen
    return KernelEntry(f"{name} for few new tokens" if name else "chosen by the number of new tokens", source)


def _place_of_logits(structure: Structure) -> int:
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
