"""Derives a decoder's step from one call of a model, and checks it against the whole model."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

import attngraph.codegen  # noqa: F401  registers the kernels
from attngraph.api.build import step_runner_of
from attngraph.api.compare_sides import compare_sides
from attngraph.api.options import Options
from attngraph.api.records import entries_of, programs_of
from attngraph.api.rewritten import Rewritten, captured_again, owner_of, place_of_logits, rewritten
from attngraph.capture.assumed import Assumed
from attngraph.capture.captured import Captured
from attngraph.capture.structure import Spread, flatten
from attngraph.capture.trace_lock import LOCK
from attngraph.errors import NoDecoderError
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.meaning.algebra.sizes import example_size
from attngraph.passes.divide_cache import DivideCache
from attngraph.passes.insert_kv_cache.free_tokens import computed_with
from attngraph.passes.insert_kv_cache.insert import InsertKVCache
from attngraph.passes.quantise_cache import QuantiseCache
from attngraph.passes.shard_heads.account import account_cache
from attngraph.pipeline import Pass, Result, split_at
from attngraph.pipeline import run as run_passes
from attngraph.report.cache_entry import CacheEntry, Drift
from attngraph.report.report import CompileReport
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.proof import (
    Proved,
    of_few,
    prove,
    prove_alone,
    prove_longer,
    prove_storage,
    varied,
)
from attngraph.runtime.step import Step


@LOCK.trace()
def derive_decoder(
    target: Callable[..., Any], options: Options, config: CacheConfig, name: str, arguments: dict[str, Any],
    distinct: int = 0, multiples: frozenset[int] = frozenset(), examples: Sequence[dict[str, Any]] = (),
    alone: bool = False, single: bool = False,
) -> Step:  # fmt: skip
    """Capture `target(**arguments)` and derive a decoder for its argument `name`.

    Args:
        distinct: the number of tokens, if it is a size of nothing else: the trace may then be one for this
            number alone.
        multiples: of the number of tokens, with which operations computed in a trace for another one.
        examples: arguments of other sizes, where the graph is found by comparing traces (`compared.py`).
        alone: whether the model is called with one sequence at a time (`capture/assumed.py`).
        single: whether the graph is for calls of one sequence alone (`capture/assumed.py`).

    Raises:
        CaptureError: torch.export cannot capture the model. NoDecoderError: none can be derived; says why.
    """
    start, owner = time.perf_counter(), owner_of(target)
    first, (_, *later) = split_at(options.decoder_pipeline(config.rounded), InsertKVCache.name)
    rounding = [step for step in later if step.name == QuantiseCache.name]
    divide = dividing(later, config)
    later = [step for step in later if step.name not in (QuantiseCache.name, DivideCache.name)]
    names = [n for n, v in arguments.items() for leaf in flatten(v)[0] if isinstance(leaf, Tensor)]
    place = names.index(name)
    tokens, none = frozenset({(place, 1)}), frozenset[tuple[int, int]]()
    assumed = Assumed(
        fixed=tokens if distinct else none, symbolic=none if distinct else tokens, tokens=distinct,
        multiples=multiples, rows_alone=alone, one_row=(place, 0) if single else None,
    )  # fmt: skip
    with example_size(distinct), options.devices.tracing(owner):
        made = rewritten(
            target, (), arguments, options, first, True, True, assumed=assumed,
            check=functools.partial(_require_no_others, assumed=assumed),
            examples=examples, tokens=place,
        )  # fmt: skip
        divided = made.captured.graph.copy() if config.proof and made.captured.graph.ranks else None
        inserted = _with_cache(
            made, (InsertKVCache(place, 0, distinct, bool(examples), config.assume_causal), *divide), options
        )
        captured, result, graph = made.captured, made.result, made.captured.graph
        sides = captured.sides
        if not examples:
            again = functools.partial(captured_again, target, assumed=made.assumed, tables=True)
            logits = [place_of_logits(captured.structure)]
            assert made.before is not None
            ones = [str(captured.shapes[place][0])] if single else ()
            sides = compare_sides(
                captured, made.before, owner, (), arguments, again, logits, ones, options.devices.has_weights
            )
        kept = None if graph.ranks is None else account_cache(graph, config.floating)
        rest = run_passes(graph, later, made.dump, options.progress)
    spread = frozenset(n for n, v in arguments.items() if isinstance(v, Spread))
    arguments = {n: v.tensor if isinstance(v, Spread) else v for n, v in arguments.items()}

    def step_of(graph: ProgramGraph) -> Step:
        plain = step_runner_of(options, records=graph.ranks is None)
        run, ranks = options.devices.steps(graph, owner, plain)
        return Step(
            graph, owner, name, names, CompileReport(), run, captured.shapes, sides, captured.scope,
            spread, single, ranks,
        )  # fmt: skip

    step = step_of(graph.copy() if rounding else graph)
    proved, drift = None, None
    if alone:
        prove_alone(target, examples, name, place_of_logits(captured.structure))
    if config.proof and made.before is not None:
        arguments[name] = varied(made.before, arguments[name], place)
        proved = _proved(target, made.before, divided, step, arguments, captured, options, bool(examples))
    if rounding:
        wide, more = step, run_passes(graph, rounding, made.dump, options.progress)
        rest.records += more.records
        step = step_of(graph)
        if proved is not None:
            drift = prove_storage(wide, step, arguments, name, proved.logits)
    report = CompileReport(
        tuple(entries_of(graph)), tuple(result.missed), (*result.records, *inserted.records, *rest.records),
        captured=result.captured, code=result.code, programs=programs_of(graph), numbers=made.numbers,
        capture=made.seconds, **options.devices.reported(graph),
    )  # fmt: skip
    cache = _cache_entry(step, config, captured, None if proved is None else proved.error, drift)
    if kept is not None:
        sizes = {label: size for label, size, _ in cache.stores}
        alike = tuple((label, sizes.get(label, size), per, why) for label, size, per, why in kept.alike)
        cache = dataclasses.replace(cache, ranks=dataclasses.replace(kept, alike=alike))
    step.report = dataclasses.replace(report, cache=cache, seconds=time.perf_counter() - start)
    if made.dump is not None:
        made.dump.finish(step.report)
    return step


def dividing(steps: Sequence[Pass], config: CacheConfig) -> list[Pass]:
    """Of these, what divides a cache among ranks; it counts with the cache's options."""
    dtype = "" if config.floating is None else str(config.floating).removeprefix("torch.")
    return [
        dataclasses.replace(step, dtype=dtype, most_tokens=config.max_length, rollback=config.rollback)
        for step in steps
        if isinstance(step, DivideCache)
    ]


def _proved(
    target: Callable[..., Any], before: ProgramGraph, divided: ProgramGraph | None, step: Step,
    arguments: Mapping[str, Any], captured: Captured, options: Options, few: bool,
) -> Proved:  # fmt: skip
    """Compare a decoder that rounds nothing with the model, or with the graph that is divided among ranks.
    `few`: it follows from traces of few sizes.

    Raises:
        NoDecoderError: they differ.
    """
    logits = place_of_logits(captured.structure)
    if options.progress is not None:
        options.progress("proof")
    few = few or step.traced_few()
    try:
        found = prove(divided or before, step, arguments, step.name, 0 if divided else logits)
    except NoDecoderError:
        raise
    except (RuntimeError, IndexError) as problem:
        what = str(problem).partition("\n")[0]
        told = f"what was derived fails where the model does not: {what}. Please report it."
        raise NoDecoderError(of_few(problem) if few else told) from problem
    if few:
        options.devices.require_whole_parameters()
        prove_longer(target, step, arguments, step.name, logits)
    return found


def _require_no_others(graph: ProgramGraph, assumed: Assumed) -> None:
    """Raise if a captured graph for one number of tokens computes with multiples of it that may be something
    else: others than in a trace for another number."""
    number = assumed.tokens
    unclear = {n for n in computed_with(graph, number) if n // number not in assumed.multiples}
    if unclear:
        raise NoDecoderError(
            f"it computes with {min(unclear)}, which may be a number of tokens or not.", True, unclear
        )


def _with_cache(made: Rewritten, passes: Sequence[Pass], options: Options) -> Result:
    """Run the passes that make a decoder's step of a graph, the insertion of caches first.

    Raises:
        NoDecoderError: none can be derived; says why, and what came before it.
    """
    graph = made.captured.graph
    try:
        return run_passes(graph, passes, made.dump, options.progress)
    except NoDecoderError as problem:
        problem.asked = bool(made.captured.sides.decisions)
        if problem.fixes_tokens:
            problem.extents |= _extents(graph)
        if made.numbers:
            stop = made.numbers[0]
            where = f" at {stop.source}" if stop.source else ""
            more = (
                f"(Sizes of the model are numbers, because torch cannot follow them as symbols{where}: "
                f"{stop.reason}.)"
            )
        else:
            first = next((missed for missed in made.result.missed if not missed.is_routing), None)
            if first is None:
                raise
            more = f"(What looks like a softmax at {first.source} is not fused: {first.reason}.)"
        told = f"{problem.reason}\n{more}"
        found = NoDecoderError(told, problem.fixes_tokens, problem.extents, problem.fixes_rows)
        found.asked = problem.asked
        raise found from problem


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
        assumed=plan.assumed,
    )  # fmt: skip


def _extents(graph: ProgramGraph) -> set[int]:
    """The numbers in a graph that are sizes of its values, or that its operations are given."""
    values = (n.meta.get("val") for n in graph.graph.nodes)
    found = {n for value in values if isinstance(value, Tensor) for n in value.shape if isinstance(n, int)}
    given = (pytree.tree_leaves((n.args, n.kwargs)) for n in graph.graph.nodes)
    return found | {abs(n) for leaves in given for n in leaves if type(n) is int and abs(n) < sys.maxsize}
