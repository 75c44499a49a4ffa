"""`attngraph compile` and `attngraph demo`: the report on a model, a check against eager, and timings."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from attngraph.api.compiled import CompiledModule
from attngraph.api.options import ABSORB, BACKENDS, make_options
from attngraph.benchmark.measure import Measurement, measure
from attngraph.cli.progress import Progress
from attngraph.cli.target import add_target, load_target, shapes_of
from attngraph.runtime.verify import compare

DEMO = (
    ("attngraph.models.targets:decoder_lm", 1024),
    ("attngraph.models.targets:gpt2", 1024),
    ("attngraph.models.targets:causal_attention", 2048),
)


def add(commands: Any) -> None:
    one = commands.add_parser(
        "compile",
        help="compile a model, show the report, check it against eager, time it",
        epilog="example: attngraph compile attngraph.models.targets:tiny_decoder_lm --tokens 64",
    )
    add_target(one, nargs="+")
    one.add_argument("--dump", metavar="DIR", help="write the graph after each pass here")
    one.add_argument("--strict", action="store_true", help="fail where something is not fused")
    one.set_defaults(run=run)
    demo = commands.add_parser(
        "demo",
        help="two language models at real size on real text, and attention alone at 2048 tokens",
    )
    demo.set_defaults(batch=None, dump=None, strict=False, run=run_demo)
    for command in (one, demo):
        command.add_argument("--json", action="store_true", help="print one JSON object for each target")
        command.add_argument("--backend", default="auto", choices=BACKENDS, help="whose kernels to use")
        command.add_argument(
            "--absorb", default="auto", choices=ABSORB, help="latent attention: the order of multiplication"
        )
        command.add_argument(
            "--disable", action="append", default=[], metavar="PASS", help="a pass that is not to run"
        )
        command.add_argument("--inductor", action="store_true", help="compile the rest with Inductor too")
        command.add_argument(
            "--no-torch-compile",
            action="store_true",
            help="do not measure torch.compile, nor inductor=True, beside it",
        )
        command.add_argument("--rounds", type=int, default=5, help="rounds of timing (default 5)")


def run(options: argparse.Namespace) -> int:
    return max(_compile(target, options, options.tokens) for target in options.target)


def run_demo(options: argparse.Namespace) -> int:
    return max(_compile(target, options, tokens) for target, tokens in DEMO)


def _compile(target: str, options: argparse.Namespace, tokens: int | None) -> int:
    tell = Progress()
    tell(f"building {target}")
    model, inputs = load_target(target, batch=options.batch, tokens=tokens)
    made = make_options(
        options.backend,
        options.inductor,
        options.strict,
        options.dump,
        None,
        tell,
        options.absorb,
        options.disable,
    )
    compiled = CompiledModule(model, made)
    with torch.no_grad():
        compiled(*inputs)
        report = compiled.report
        tell("checking against eager")
        agreement = compare(compiled, model, inputs)
        found = measure(
            _candidates(model, compiled, inputs, options, tell), rounds=options.rounds, progress=tell
        )
    tell.done()
    shapes = shapes_of(inputs)
    if options.json:
        result = {
            "target": target, "inputs": shapes, "report": json.loads(report.to_json()),
            "agreement": {**asdict(agreement), "holds": agreement.holds},
            "measured": {name: asdict(m) for name, m in found.items()},
        }  # fmt: skip
        print(json.dumps(result, indent=2))
    else:
        print(f"== {target}, inputs {shapes}\n\n{report}\n\n  {agreement}\n\n{_table(found)}\n")
    return 0 if agreement.holds else 1


def _candidates(
    model: nn.Module,
    compiled: CompiledModule,
    inputs: tuple[Any, ...],
    options: argparse.Namespace,
    tell: Progress,
) -> dict[str, Any]:
    candidates: dict[str, Any] = {
        "eager": lambda: model(*inputs),
        "attngraph": lambda: compiled(*inputs),
    }
    if options.no_torch_compile:
        return candidates
    tell("torch.compile")
    reference = torch.compile(model)
    candidates["torch.compile"] = lambda: reference(*inputs)
    if not options.inductor:
        both = CompiledModule(model, make_options(options.backend, inductor=True))
        candidates["with inductor"] = lambda: both(*inputs)
    return candidates


def _table(found: dict[str, Measurement]) -> str:
    base = found["eager"]
    lines = [f"  {'':<16}{'median':>10}{'least':>10}{'speed':>9}{'peak memory':>14}"]
    for name, m in found.items():
        speed = f"{base.seconds / m.seconds:.2f}x"
        lines.append(
            f"  {name:<16}{m.seconds * 1000:>7.0f} ms{m.least * 1000:>7.0f} ms{speed:>9}"
            f"{m.peak_bytes / 2**20:>10.0f} MiB"
        )
    return "\n".join(lines)
