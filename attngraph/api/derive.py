"""Derives a decoder's step from one call of a model, and checks it against the whole model."""

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import attngraph.codegen  # noqa: F401  registers the kernels
from attngraph.api import build
from attngraph.api.beside import join_beside, width_beside
from attngraph.api.build import Found, Rewritten, step_runner_of
from attngraph.api.compare_sides import Again, compare_sides
from attngraph.api.options import Options
from attngraph.api.records import programs_of
from attngraph.capture.captured import Assumed, Captured
from attngraph.capture.instead import LOCK
from attngraph.capture.program.exported import arguments_of, shapes_of
from attngraph.capture.sides import Sides
from attngraph.capture.structure import Laid
from attngraph.errors import CheckError, NoDecoderError
from attngraph.ir.dtypes import SCALED
from attngraph.ir.graph.formula import are_few
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.ops.cached_attention import Store
from attngraph.meaning.algebra.sizes import example_size
from attngraph.passes.divide_cache import DivideCache
from attngraph.passes.insert_kv_cache.analyse import longer_trace
from attngraph.passes.insert_kv_cache.free_tokens import computed_with
from attngraph.passes.insert_kv_cache.insert import InsertKVCache
from attngraph.passes.insert_kv_cache.learned_places import learned_places, of_places
from attngraph.passes.quantise_cache import QuantiseCache, see_rounded
from attngraph.passes.shard_heads.shard import account_cache
from attngraph.pipeline import Pass, Result, split_at
from attngraph.pipeline import run as run_passes
from attngraph.report.cache_entry import CacheEntry, Drift
from attngraph.report.ranks import CacheRanksEntry
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.examples import FAILURES, Example
from attngraph.runtime.proof import (
    SAMPLES,
    Proved,
    of_few,
    prove,
    prove_alone,
    prove_longer,
    prove_other_lengths,
    prove_storage,
    varied,
)  # fmt: skip
from attngraph.runtime.step import Step, StepSizes


@LOCK.trace()
def derive_decoder(
    target: Callable[..., Any], options: Options, config: CacheConfig, example: Example
) -> Step:
    """Capture the example's call of `target`, and derive a decoder for its tokens. CaptureError where
    torch.export cannot capture the model; a NoDecoderError says why none can be derived."""
    start, assumed = time.perf_counter(), example.assumed
    if config.beside is not None and not options.devices.is_one:
        raise NoDecoderError("what a draft is given beside the logits is for one device.")
    first, later = split_at(options.decoder_pipeline(config.rounded), InsertKVCache.name)
    with example_size(assumed.tokens), options.devices.tracing(build.owner_of(target)):
        capture = functools.partial(_captured, target, example, config.beside)
        made = build.rewritten(capture, options, first, assumed, keep=True, only_logits=True)
        learned = _of_places(made, example, options, first)
    make = functools.partial(_derived, target, options, config, example, start, later)
    if learned is not None:
        with contextlib.suppress(NoDecoderError):
            found = make(learned.made, made, learned)
            if made.dump is not None:
                made.dump.discard()
            return found
        if learned.made.dump is not None:
            learned.made.dump.discard()
    return make(made, made)


@dataclasses.dataclass
class _Learned:
    """A call as a graph of places, after the passes; how many learned ones are first, and the new symbols of
    the captured call's sizes."""

    made: Rewritten
    count: int
    symbols: dict[str, Any]


def _of_places(
    made: Rewritten, example: Example, options: Options, passes: Sequence[Pass]
) -> _Learned | None:
    """The same for a graph of places, if the model puts learned values before those of tokens, and tokens are
    all that it is given."""
    captured, before = made.captured, made.before
    length = captured.shapes[example.place][1]
    if example.is_compared or len(example.arguments) > 1 or before is None or isinstance(length, int):
        return None
    of_length = [c for c in captured.graph.conditions if {str(s) for s in c.free_symbols} == {str(length)}]
    if not options.devices.is_one or are_few(of_length, str(length)):
        return None
    count = learned_places(captured.graph, str(length))
    found = of_places(before, str(length), count) if count else None
    if found is None:
        return None
    graph, symbols = found
    shapes = shapes_of(arguments_of(graph))

    def again(_: Assumed) -> Found:
        return dataclasses.replace(captured, graph=graph.copy(), shapes=shapes), made.numbers

    other = build.rewritten(again, options, passes, made.assumed, keep=True, only_logits=True)
    other.seconds += made.seconds
    return _Learned(other, count, symbols)


def _derived(
    target: Callable[..., Any], options: Options, config: CacheConfig, example: Example, start: float,
    passes: Sequence[Pass], made: Rewritten, plain: Rewritten, learned: _Learned | None = None,
) -> Step:  # fmt: skip
    """A decoder made of a rewritten call; `plain`: the call as the model is given it."""
    _, *later = passes
    owner, assumed = build.owner_of(target), example.assumed
    rounding = [step for step in later if step.name == QuantiseCache.name]
    divide = dividing(later, config)
    later = [step for step in later if step.name not in (QuantiseCache.name, DivideCache.name)]
    with example_size(assumed.tokens), options.devices.tracing(owner):
        divided = made.captured.graph.copy() if config.proof and made.captured.graph.ranks else None
        insert = InsertKVCache(example.place, 0, assumed.tokens, example.is_compared, config.assume_causal)
        inserted = _with_cache(made, (insert, *divide), options)
        asked = _sides(target, plain, example, options, config.beside)
        sides = asked if learned is None else Sides()
        graph, logits = made.captured.graph, build.place_of_logits(made.captured.structure)
        kept = None if graph.ranks is None else account_cache(graph, config.floating)
        rest = run_passes(graph, later, made.dump, options.progress)

    def stepped(of: ProgramGraph, **told: Any) -> Step:
        """The step of a graph. `told`: what its plan has then, and that of the graph which is rounded."""
        for each in (of, graph) if told else ():
            assert each.state is not None
            each.state = dataclasses.replace(each.state, **told)
        return _step(of, owner, made.captured, sides, example, options)

    step = stepped(graph.copy() if rounding else graph)
    proved = _proved(target, made, divided, step, example, options, config)
    if proved is not None and step.plan.least > 1 and options.devices.is_one:
        others = prove_other_lengths(target, step, proved.arguments, logits)
        step = stepped(step.graph, others=others) if others else step
    if learned is not None:
        sides = asked.renamed(learned.symbols)
        step = stepped(step.graph, begins=learned.count)
        arguments = {n: v.tensor if isinstance(v, Laid) else v for n, v in example.arguments.items()}
        prove_longer(target, step, arguments, logits)
    drift = None
    if rounding:
        wide, more = step, run_passes(graph, rounding, made.dump, options.progress)
        rest.records += more.records
        step = stepped(graph)
        if proved is not None:
            drift = prove_storage(wide, step, proved)
    if graph.unordered is not None and config.floating is not None:
        names = [s.name for s in _rounded(step, config)]
        see_rounded(graph, names, str(config.floating).removeprefix("torch."))
        graph.clean()
        step = stepped(graph)
    if config.beside is not None:
        assert made.before is not None
        step = stepped(graph, beside=width_beside(made.before, logits))
    cache = _cache_entry(step, config, made.captured, None if proved is None else proved.error, drift, kept)
    records = (*inserted.records, *rest.records)
    step.report = made.report(options, start, records, cache=cache, programs=programs_of(graph))
    build.require_ordered(options, step.report)
    if made.dump is not None:
        made.dump.finish(step.report)
    return step


def _captured(target: Callable[..., Any], example: Example, beside: str | None, assumed: Assumed) -> Found:
    """The graph of an example.

    Raises: NoDecoderError: it is for one number of tokens, and computes with multiples of it that may be
        something else: others than in a trace for another number; or it is of too few tokens."""
    if example.is_compared and beside is None:
        return build.compare_calls(target, example.given, example.place, assumed)
    found = build.capture_call(target, (), example.given[0], assumed, tables=True)
    numbers = computed_with(found[0].graph, assumed.tokens)
    unclear = {n for n in numbers if n // assumed.tokens not in assumed.multiples}
    if unclear:
        told = f"it computes with {min(unclear)}, which may be a number of tokens or not."
        raise NoDecoderError(told, True, unclear)
    _require_longer(found[0], example)
    if beside is not None:
        join_beside(found[0], beside)
    return found


def _again(target: Callable[..., Any], assumed: Assumed, beside: str | None) -> Again:
    """Captures other calls, as the first one was."""
    again = build.capturing_again(target, assumed, tables=True)

    def captured(args: Any, kwargs: Any) -> Captured:
        found = again(args, kwargs)
        if beside is not None:
            join_beside(found, beside)
        return found

    return captured


def _require_longer(captured: Captured, example: Example) -> None:
    """Raise NoDecoderError where the trace is of too few tokens for what the model does with blocks."""
    length = captured.shapes[example.place][1]
    name = "" if isinstance(length, int) else str(length)
    wanted = longer_trace(captured.graph, name) if name and not example.as_is else 0
    if wanted > captured.graph.hints.get(name, wanted):
        problem = NoDecoderError(
            f"the model was traced for few numbers of tokens, and for {wanted} it may do something else."
        )
        problem.longer = wanted
        raise problem


def _sides(
    target: Callable[..., Any], made: Rewritten, example: Example, options: Options, beside: str | None
) -> Sides:
    """What the trace decided about sizes, and for which of them that makes no difference."""
    captured = made.captured
    if example.is_compared:
        return captured.sides
    assert made.before is not None
    ones = [str(captured.shapes[example.place][0])] if example.single else ()
    return compare_sides(
        captured, made.before, build.owner_of(target), (), example.given[0],
        _again(target, made.assumed, beside),
        [build.place_of_logits(captured.structure)], ones, options.devices.has_weights,
    )  # fmt: skip


def _step(
    graph: ProgramGraph, owner: nn.Module, captured: Captured, sides: Sides, example: Example,
    options: Options,
) -> Step:  # fmt: skip
    layouts = {n: v.layout for n, v in example.arguments.items() if isinstance(v, Laid)}
    sizes = StepSizes(graph, example.names, captured.shapes, example.name, layouts, sides, example.single)
    plain = step_runner_of(options, records=graph.ranks is None)
    run, ranks = options.devices.steps(graph, owner, plain)
    return Step(graph, owner, run, sizes, captured.scope, ranks)


def _rounded(step: Step, config: CacheConfig) -> list[Store]:
    """The values that are kept as floating numbers of fewer digits than they are computed with."""
    own = [s for s in step.plan.stores if s.dtype.is_floating_point and s.dtype not in SCALED]
    narrow = config.floating
    return [s for s in own if narrow is not None and torch.promote_types(s.dtype, narrow) != narrow]


def dividing(steps: Sequence[Pass], config: CacheConfig) -> list[Pass]:
    """Of these, what divides a cache among ranks; it counts with the cache's options."""
    dtype = "" if config.floating is None else str(config.floating).removeprefix("torch.")
    about: dict[str, Any] = {"dtype": dtype, "most_tokens": config.max_length, "rollback": config.rollback}
    return [dataclasses.replace(step, **about) for step in steps if isinstance(step, DivideCache)]


def _proved(
    target: Callable[..., Any], made: Rewritten, divided: ProgramGraph | None, step: Step, example: Example,
    options: Options, config: CacheConfig,
) -> Proved | None:  # fmt: skip
    """Compare a decoder that rounds nothing with the model, or with the graph that is divided among ranks;
    None where that is not wanted. Raises NoDecoderError if they differ."""
    logits = build.place_of_logits(made.captured.structure)
    if example.alone:
        prove_alone(target, example.calls, example.name, logits)
    if not config.proof or made.before is None:
        return None
    arguments = {n: v.tensor if isinstance(v, Laid) else v for n, v in example.arguments.items()}
    if options.progress is not None:
        options.progress("proof")
    few, tokens = example.is_compared or step.traced_few(), arguments[step.name]
    try:
        for attempt in range(SAMPLES):
            arguments[step.name] = varied(made.before, step, tokens, example.place, attempt)
            try:
                found = prove(divided or made.before, step, arguments, 0 if divided else logits)
                break
            except CheckError as problem:  # a prompt that the decoder refuses
                if attempt + 1 == SAMPLES:
                    raise NoDecoderError(f"of {SAMPLES} prompts it takes none: {problem}") from problem
    except NoDecoderError:
        raise
    except FAILURES as problem:
        what = str(problem).partition("\n")[0]
        told = f"what was derived fails where the model does not: {what}. Please report it."
        raise NoDecoderError(of_few(problem) if few else told) from problem
    if few:
        options.devices.require_whole_parameters()
        prove_longer(target, step, arguments, logits)
    return found


def _with_cache(made: Rewritten, passes: Sequence[Pass], options: Options) -> Result:
    """Run the passes that make a decoder's step of a graph, the insertion of caches first. Raises
    NoDecoderError, which says why none can be derived, and what came before it."""
    graph = made.captured.graph
    try:
        return run_passes(graph, passes, made.dump, options.progress)
    except NoDecoderError as problem:
        problem.asked = bool(made.captured.sides.decisions)
        for node in graph.graph.nodes if problem.fixes_tokens else ():
            # The numbers that are sizes of values, or that operations are given.
            shape = getattr(node.meta.get("val"), "shape", ())
            given = pytree.tree_leaves((node.args, node.kwargs))
            problem.extents |= {n for n in shape if isinstance(n, int)}
            problem.extents |= {abs(n) for n in given if type(n) is int and abs(n) < sys.maxsize}
        first = next((missed for missed in made.result.missed if not missed.is_routing), None)
        if made.numbers:
            stop = made.numbers[0]
            where = f" at {stop.source}" if stop.source else ""
            more = f"Sizes of the model are numbers, because torch cannot follow them as symbols{where}"
            more = f"({more}: {stop.reason}.)"
        elif first is not None:
            more = f"(What looks like a softmax at {first.source} is not fused: {first.reason}.)"
        else:
            raise
        told = f"{problem.reason}\n{more}"
        found = NoDecoderError(told, problem.fixes_tokens, problem.extents, problem.fixes_rows)
        found.asked = problem.asked
        raise found from problem


def _rules(step: Step) -> tuple[str, ...]:
    """By which rules arguments go on that have an entry for each pair of tokens."""
    rules = {name: layout.pairs for name, layout in step.sizes.layouts.items()}
    one = ", which is taken from you: one entry tells no rule"
    return tuple(
        f"{name} goes on by the rule {rule.text}{one * (rule.told == 'one')}"
        for name, rule in rules.items() if rule is not None
    )  # fmt: skip


def _cache_entry(
    step: Step, config: CacheConfig, captured: Captured, error: float | None, drift: Drift | None,
    ranks: CacheRanksEntry | None,
) -> CacheEntry:  # fmt: skip
    plan = step.graph.state
    assert plan is not None
    scales = {s.scales_of: s.bytes_per_token for s in plan.stores if s.scales_of}
    own = [s for s in plan.stores if not s.scales_of]
    stores = tuple(
        (s.label, s.entry_bytes(config.floating) + scales.get(s.name, 0), s.window, s.size) for s in own
    )
    if ranks is not None:
        sizes = {label: size for label, size, *_ in stores}
        alike = tuple((label, sizes.get(label, size), per, why) for label, size, per, why in ranks.alike)
        ranks = dataclasses.replace(ranks, alike=alike)
    return CacheEntry(
        sum(size // each for _, size, _, each in stores), plan.expanded, plan.attentions, stores,
        len(plan.fixed),
        step.limit, error, config.rollback, config.page if config.layout == "paged" else 1,
        tuple(a.label.removeprefix("model.") for a in captured.attributes),
        tuple(dict.fromkeys(captured.checks)),
        tuple((value.label, value.bytes_per_row) for value in plan.carried), plan.anew,
        config.rounded if scales else "", drift if scales else None,
        tuple(s.label for s in own if config.rounded and s.name not in scales),
        assumed=plan.assumed, ranks=ranks, asked=step.asked, begins=plan.begins,
        ruled=_rules(step),
    )  # fmt: skip
