"""`python -m workshop COMMAND ...`: one table of commands; `--help` of each tells its options."""

import importlib
import sys
from collections.abc import Sequence

from attngraph.cli import run_told

COMMANDS = {
    "attention": ("bench.attention", "one attention on the CPU, by five ways of computing it"),
    "decode": ("bench.decoding:DECODE", "decoders of GPT-2 and Llama beside transformers' own caches"),
    "states": ("bench.decoding:STATES", "models whose memory does not grow with the tokens"),
    "serving": ("bench.serving", "drafts, and prompts of an engine that begin alike"),
    "mla": ("bench.latent", "latent attention over a cache: absorbed, expanded, transformers' own"),
    "peers": ("bench.peers.suite", "whole models beside torch.compile, OpenVINO and onnxruntime"),
    "whole": ("bench.whole", "encoders, vision, prompts and training beside eager and torch.compile"),
    "training": ("bench.training", "training steps of two models at several sizes"),
    "quantised": ("bench.narrow:WEIGHTS", "decoders with weights of 16, 8 and 4 bits"),
    "narrow-caches": ("bench.narrow:CACHES", "decoders with caches of 8 bits, and how far logits move"),
    "call-checks": ("bench.call_checks", "what a call costs before its graph runs"),
    "models": ("bench.demo", "what `attngraph demo` shows, as one table and a file"),
    "recognition": ("bench.recognition", "which ways to write attention are seen, beside Inductor"),
    "packages": ("bench.packages.table", "models of other packages: docs/packages.md"),
    "folding": ("bench.packages.folding", "pair bias of models that fold proteins, with its gradient"),
    "transformers": ("bench.stock.decoders", "causal classes as decoders: docs/transformers.md"),
    "exports": ("bench.stock.exported", "stock models as files that run without attngraph: docs/export.md"),
    "weak-scaling": ("bench.weak_scaling", "what a rank of 1 to 1,024 holds and receives, counted"),
    "gpu": ("bench.gpu", "attention on a GPU beside the card's limits and other kernels"),
    "card": ("bench.card:main", "a borrowed GPU in half an hour: check, measure, tune"),
    "scorecard": ("bench.scorecard.suite", "what Triton kernels cost by their machine code; needs no GPU"),
    "simulate": ("simulator.command", "Gluon kernels in random orders, and with faults; needs no GPU"),
    "gallery": ("gallery.command:main", "attention by its names: docs/gallery.md"),
    "mechanisms": ("mechanisms:main", "what decoders keep, and their tokens: docs/mechanisms.md"),
    "tables": ("tables:main", "the tables of docs/gpu.md from the files in docs/measured"),
    "fuzz": ("fuzz.run:main", "random attention-like functions against eager; a failure is made small"),
    "mutants": ("mutants.command:main", "small faults in the compiler, and which the tests notice"),
    "faults": ("faults.command", "faults of ports in models, and which of them verify notices"),
    "alarms": ("faults.alarms", "equal forms of stock models, which verify must not call different"),
    "same-bits": ("same_bits:SEARCH", "what a token's logits depend on, by consistent=True and by default"),
    "cost-of-order": ("same_bits:COST", "prompts and tokens by consistent=True beside the default"),
    "search": ("fuzz.search:main", "random programs around state, masks, sizes and files, counted"),
}  # fmt: skip
"""Name: module (its MAIN, or another attribute), and what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; modules are imported when they are asked for."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        told = [f"  {command:<14} {about}" for command, (_, about) in COMMANDS.items()]
        print("usage: python -m workshop COMMAND ...\n", *told, sep="\n")
        return 0
    if name not in COMMANDS:
        print(f"workshop: there is no command {name}; there are {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    module, _, attribute = COMMANDS[name][0].partition(":")

    def run() -> int:
        code: int = getattr(importlib.import_module(f"workshop.{module}"), attribute or "MAIN")(rest)
        return code

    return run_told("workshop", run)


if __name__ == "__main__":
    sys.exit(main())
