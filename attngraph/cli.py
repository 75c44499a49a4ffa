"""The command line: `attngraph compile TARGET ...`, `show`, `demo`, `bench` and `fuzz`.

TARGET is `package.module:callable`; the callable returns a model and its example inputs, and may take
`batch` and `tokens`. Results go to standard output, progress to standard error. Exit codes: 0 all good,
1 the compiled model does not agree with the eager one (or, under --strict, something was not fused; or
fuzzing found a failure), 2 the command or its target cannot be used.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attngraph import cli_show
from attngraph.codegen.benchmark import attention_cpu, decoding, gpu, latent
from attngraph.codegen.benchmark.measure import Measurement, measure
from attngraph.compile import BACKENDS, CompiledModule, make_options
from attngraph.errors import AttnGraphError
from attngraph.fuzz import run as fuzzing
from attngraph.passes.absorb_mla import WAYS
from attngraph.runtime.verify import compare

DEMO = (
    ("attngraph.models.targets:decoder_lm", 1024),
    ("attngraph.models.targets:gpt2", 1024),
    ("attngraph.models.targets:causal_attention", 2048),
)


class TargetError(Exception):
    """A target that cannot be loaded."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = _parser().parse_args(argv)
    try:
        if options.command == "show":
            return cli_show.run(options)
        if options.command == "fuzz":
            return _fuzz(options)
        if options.command == "bench":
            return _bench(options)
        if options.command == "demo":
            return max(_compile(target, options, tokens) for target, tokens in DEMO)
        return max(_compile(target, options, options.tokens) for target in options.target)
    except TargetError as problem:
        print(f"attngraph: {problem}", file=sys.stderr)
        return 2
    except AttnGraphError as problem:
        print(f"attngraph: {problem}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("attngraph", description="A compiler for attention.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "compile",
        help="compile a model, show the report, check it against eager, time it",
        epilog="example: attngraph compile attngraph.models.targets:tiny_decoder_lm --tokens 64",
    )
    one.add_argument("target", nargs="+", help="package.module:callable returning (model, inputs)")
    one.add_argument("--tokens", type=int, help="tokens of the example, passed to the callable")
    one.add_argument("--batch", type=int, help="batch size of the example, passed to the callable")
    one.add_argument("--dump", metavar="DIR", help="write the graph after each pass here")
    one.add_argument("--strict", action="store_true", help="fail where something is not fused")
    demo = commands.add_parser(
        "demo",
        help="two language models at real size on real text, and attention alone at 2048 tokens",
    )
    demo.set_defaults(batch=None, dump=None, strict=False)
    for command in (one, demo):
        command.add_argument("--json", action="store_true", help="print one JSON object for each target")
        command.add_argument("--backend", default="auto", choices=BACKENDS, help="whose kernels to use")
        command.add_argument(
            "--absorb", default="auto", choices=WAYS, help="latent attention: the order of multiplication"
        )
        command.add_argument("--inductor", action="store_true", help="compile the rest with Inductor too")
        command.add_argument(
            "--no-torch-compile",
            action="store_true",
            help="do not measure torch.compile, nor inductor=True, beside it",
        )
        command.add_argument("--rounds", type=int, default=5, help="rounds of timing (default 5)")
    cli_show.add(commands)
    bench = commands.add_parser(
        "bench",
        help="measure attention beside what else there is, in one run",
        epilog="on a GPU: attention, decode and mla beside the card's limits; on the CPU each suite is a run "
        "of python -m attngraph.codegen.benchmark.attention_cpu (decoding, latent); models: `attngraph demo`",
    )
    here = "cuda" if torch.cuda.is_available() else "cpu"
    bench.add_argument("--device", default=here, choices=("cpu", "cuda"))
    bench.add_argument("--suite", nargs="+", default=["attention"], choices=(*gpu.SUITES, "models"))
    bench.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="draw them (needs matplotlib)")
    bench.add_argument("--small", action="store_true", help="tiny cells on any device, to see that it works")
    bench.set_defaults(
        batch=None, dump=None, strict=False, backend="auto", inductor=False, absorb="auto", rounds=5,
        no_torch_compile=False,
    )  # fmt: skip
    fuzz = commands.add_parser(
        "fuzz",
        help="compile random attention-like graphs and compare each with eager",
        epilog="a failure is made small and printed as a test; exit code 1 if there was one",
    )
    fuzz.add_argument("--minutes", type=float, help="how long to run (default 5, unless --graphs is given)")
    fuzz.add_argument("--graphs", type=int, help="how many graphs to run")
    fuzz.add_argument("--seed", type=int, default=0, help="which graphs: the same seed, the same graphs")
    fuzz.add_argument("--only", type=int, metavar="N", help="run graph N of the seed alone, and show it")
    fuzz.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    fuzz.add_argument("--out", type=Path, metavar="DIR", help="write the test of each failure here")
    fuzz.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def load_target(name: str, **sizes: int | None) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model and example inputs that `package.module:callable` returns.

    Raises:
        TargetError: it does not import, is missing, or returns something else.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise TargetError(f"a target is package.module:callable, found {name!r}.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except Exception as problem:
        raise TargetError(f"cannot import {module_name}: {type(problem).__name__}: {problem}") from problem
    make = getattr(module, attribute, None)
    if make is None:
        found = [n for n, v in vars(module).items() if inspect.isfunction(v) and n[0] != "_"]
        raise TargetError(f"{module_name} has no {attribute!r}; it has {', '.join(found) or 'no functions'}.")
    if not callable(make):
        raise TargetError(f"{name} is no function, it is a {type(make).__name__}.")
    accepted = inspect.signature(make).parameters
    given = {k: v for k, v in sizes.items() if v is not None}
    unknown = [k for k in given if k not in accepted]
    if unknown:
        raise TargetError(
            f"{name} takes no {' and no '.join(unknown)}; it takes {', '.join(accepted) or 'nothing'}."
        )
    try:
        made = make(**given)
    except Exception as problem:
        raise TargetError(f"{name} failed: {type(problem).__name__}: {problem}") from problem
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise TargetError(f"{name} must return (model, inputs), it returned {type(made).__name__}.")
    model, inputs = made
    return model, inputs if isinstance(inputs, tuple) else (inputs,)


def _compile(target: str, options: argparse.Namespace, tokens: int | None) -> int:
    tell = _Progress()
    tell(f"building {target}")
    model, inputs = load_target(target, batch=options.batch, tokens=tokens)
    made = make_options(
        options.backend, options.inductor, options.strict, options.dump, None, tell, options.absorb
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
    shapes = ", ".join(str(list(t.shape)) for t in inputs if isinstance(t, Tensor))
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


def _bench(options: argparse.Namespace) -> int:
    """Measure suites. What a GPU is asked and what a CPU is asked differ, so their benchmarks do."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise TargetError("--device cuda: PyTorch finds no GPU here; --device cpu measures this machine.")
    models = "models" in options.suite
    suites = [name for name in options.suite if name != "models"]
    if models:
        printed, options.json = options.json, False
        code = max(_compile(target, options, tokens) for target, tokens in DEMO)
        options.json = printed
        if code or not suites:
            return code
    if options.device == "cpu" and not options.small:
        modules = {"attention": attention_cpu, "decode": decoding, "mla": latent}
        for name in suites:
            file = options.json and options.json.with_name(f"{options.json.stem}-{name}{options.json.suffix}")
            modules[name].main(["--json", str(file)] if file else [])
        return 0
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    tell = _Progress()
    about, rows = gpu.run(suites, options.device, dtype, options.small, tell)
    tell.done()
    print(gpu.table(about, rows))
    if options.json:
        found = {**about, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if options.plot:
        try:
            gpu.plot(about, rows, options.plot)
        except ModuleNotFoundError as problem:
            raise TargetError('--plot needs matplotlib: pip install "attngraph[plot]"') from problem
    return 0


def _fuzz(options: argparse.Namespace) -> int:
    if options.jobs < 1:
        raise TargetError(f"--jobs must be at least 1, found {options.jobs}.")
    first, graphs, minutes, jobs = 0, options.graphs, options.minutes, options.jobs
    if options.only is not None:
        first, graphs, minutes, jobs = options.only, 1, None, 1
    elif graphs is None and minutes is None:
        minutes = 5.0
    tell = _Progress(every=10)
    found = fuzzing.run(fuzzing.Options(options.seed, minutes, graphs, jobs, options.out, first), tell)
    tell.done()
    if options.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        shown = "" if options.only is None else fuzzing.text_of(options.seed, options.only) + "\n"
        print(f"{shown}{found}")
    return 1 if found.failures else 0


def _candidates(
    model: nn.Module,
    compiled: CompiledModule,
    inputs: tuple[Any, ...],
    options: argparse.Namespace,
    tell: _Progress,
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


class _Progress:
    """One line on standard error that says what is going on; a line per stage where it is no terminal, at
    most one in `every` seconds."""

    def __init__(self, every: float = 0.0) -> None:
        self.start = self.last = time.perf_counter()
        self.live = sys.stderr.isatty()
        self.every = every

    def __call__(self, stage: str) -> None:
        if not self.live and time.perf_counter() - self.last < self.every:
            return
        self.last = time.perf_counter()
        text = f"[{time.perf_counter() - self.start:6.1f} s] {stage} ..."
        print(
            f"\r\x1b[K{text}" if self.live else text,
            end="" if self.live else "\n",
            file=sys.stderr,
            flush=True,
        )

    def done(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
