"""`attngraph compile TARGET`: the report on a model, a check against eager, and timings."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.api.compiled import CompiledModule
from attngraph.api.options import make_options
from attngraph.cli.target import changed_by, load_target, run_as_given, shapes_of
from attngraph.cli.terminal import Progress, TargetError, check_writable
from attngraph.errors import CaptureError, told_as
from attngraph.report.entries import AttentionEntry, folded
from attngraph.report.report import CompileReport
from attngraph.runtime.graphs import TURNS
from attngraph.runtime.measure import Measurement, measure
from attngraph.runtime.verify import compare

_MOST_BYTES = 1 << 26
"""Most bytes of the weights of one attention that is drawn in a page."""


def run(options: argparse.Namespace) -> int:
    check_writable(options.page, "--page")
    if options.page is not None and len(options.target) > 1:
        raise TargetError("--page shows one target; name one.")
    return max(compile_target(target, options, options.tokens)[0] for target in options.target)


def compile_target(
    target: str, options: argparse.Namespace, tokens: int | None
) -> tuple[int, dict[str, Any]]:
    """Compile, check and time one target, and print what was found. Returns the exit code, and the results as
    --json prints them. TargetError where options do not go together, or the model cannot be run on its
    inputs."""
    tell = Progress()
    with told_as(TargetError, ValueError):
        made = make_options(
            tell, backend=options.backend, inductor=options.inductor, strict=options.strict,
            consistent=options.consistent, freeze=options.freeze, dump=options.dump, absorb=options.absorb,
            disable=options.disable, min_scores=options.min_scores, passes=changed_by(options.add),
        )  # fmt: skip
    tell(f"building {target}")
    model, inputs = load_target(target, batch=options.batch, tokens=tokens)
    compiled = CompiledModule(model, made)
    with torch.no_grad():
        try:
            run_as_given(compiled, model, inputs, target)
        except ValueError as problem:
            if not options.disable:
                raise
            raise TargetError(str(problem).splitlines()[0]) from problem
        tell("the first calls, by the graph and by the model")
        _first_calls(compiled, inputs)
        tell("checking against eager")
        agreement = compare(_graph_of(compiled), model, inputs)
        candidates = _candidates(model, compiled, inputs, options, tell)
        found = measure(candidates, rounds=options.rounds, progress=tell)
        report = compiled.report
        if options.page is not None:
            tell("measuring single operations")
            _write_page(compiled, inputs, options.page, target)
    tell.done()
    shapes = shapes_of(inputs)
    result = {
        "target": target, "inputs": shapes, "report": json.loads(report.to_json()),
        "agreement": {**asdict(agreement), "holds": agreement.holds},
        "measured": {name: asdict(m) for name, m in found.items()},
    }  # fmt: skip
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        told = "" if options.command == "bench" else f"{report}\n\n"
        print(f"== {target}, inputs {shapes}\n\n{told}  {agreement}\n\n{_table(found)}{_itself(report)}\n")
    return (0 if agreement.holds else 1), result


def _graph_of(compiled: CompiledModule) -> Callable[..., Any]:
    """The answers of the graph, also to calls that the model itself would serve; of pieces, where there is no
    one graph."""

    def run(*given: Any) -> Any:
        try:
            found, call = compiled._whole(given, {}, "the check")
        except CaptureError:
            return compiled(*given)
        return found(call.tensors, (call.args, call.kwargs))

    return run


def _itself(report: CompileReport) -> str:
    """A line below the measurements, where calls of this size run the model itself."""
    if not report.small_calls and not report.slower:
        return ""
    why = "attention is too small here to gain from fusing" if report.small_calls else "it was faster"
    return f"\n  (attngraph ran the model itself: {why}; --min-scores 0 measures the graph)"


def _candidates(
    model: nn.Module, compiled: CompiledModule, inputs: tuple[Any, ...], options: argparse.Namespace,
    tell: Progress,
) -> dict[str, Any]:  # fmt: skip
    candidates: dict[str, Any] = {"eager": lambda: model(*inputs), "attngraph": lambda: compiled(*inputs)}
    if options.no_torch_compile:
        return candidates
    tell("torch.compile")
    reference = torch.compile(model)
    reference(*inputs)
    candidates["torch.compile"] = lambda: reference(*inputs)
    if options.full and not options.inductor:
        both = CompiledModule(model, make_options(backend=options.backend, inductor=True))
        tell("with inductor")
        both(*inputs)
        _first_calls(both, inputs)
        candidates["with inductor"] = lambda: both(*inputs)
    return candidates


def _first_calls(compiled: CompiledModule, inputs: tuple[Any, ...]) -> None:
    """Call it until it is decided who serves calls of this size: no call before is like the later ones."""
    for _ in range(2 * TURNS):
        if compiled._paces.is_deciding:
            compiled(*inputs)


def _table(found: dict[str, Measurement]) -> str:
    base = found["eager"]
    lines = [f"  {'':<16}{'median':>10}{'least':>10}{'speed':>9}{'peak memory':>14}"]
    for name, m in found.items():
        speed, memory = f"{base.seconds / m.seconds:.2f}x", f"{m.peak_bytes / 2**20:>10.0f} MiB"
        lines.append(f"  {name:<16}{m.seconds * 1000:>7.0f} ms{m.least * 1000:>7.0f} ms{speed:>9}{memory}")
    return "\n".join(lines)


def _write_page(compiled: CompiledModule, inputs: tuple[Any, ...], page: Path, title: str) -> None:
    """Write the report as a page, with what a sample input shows (times of operations, and weights of one of
    each group of equal attentions), and print its name."""
    report, times, weights = compiled.report, None, dict[str, Tensor]()
    try:
        times = compiled.times(*inputs)
        for entry, *_ in folded(report.attention):
            weights |= _weights(compiled, inputs, entry)
    except CaptureError as problem:
        print(f"attngraph: {problem.reason}: no times and no weights in the page", file=sys.stderr)
    report.to_html(page, title, weights, times=times)
    print(f"attngraph: the page is {page}", file=sys.stderr)


def _weights(compiled: CompiledModule, inputs: tuple[Any, ...], entry: AttentionEntry) -> dict[str, Tensor]:
    """The weights of an attention for the first row of the inputs; none if they are many."""
    if entry.call is None or entry.score_bytes is None:
        return {}
    if entry.score_bytes // max(entry.call.batch, 1) > _MOST_BYTES:
        return {}
    name = entry.name or "attention"
    for at in (name, f"{name}#0"):
        try:
            weights = compiled.weights(*inputs, at=[at], rows=slice(0, 1))
        except ValueError:
            continue  # a module with several attentions
        assert isinstance(weights, dict)
        return weights
    return {}
