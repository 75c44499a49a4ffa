"""`attngraph demo`: what `attngraph compile` shows, of models at real size."""

from __future__ import annotations

import argparse
import sys

from attngraph.cli.compile import compile_target

DEMO = (
    ("attngraph.models.targets:decoder_lm", 1024),
    ("attngraph.models.targets:gpt2", 1024),
    ("attngraph.models.targets:causal_attention", 2048),
)


def run(options: argparse.Namespace) -> int:
    """Compile each in turn."""
    print(
        f"attngraph: {len(DEMO)} models, a few minutes on two cores (less with --no-torch-compile)",
        file=sys.stderr,
    )
    codes = []
    for number, (target, tokens) in enumerate(DEMO, 1):
        print(f"attngraph: model {number} of {len(DEMO)}, {target}", file=sys.stderr)
        codes.append(compile_target(target, options, tokens)[0])
    return max(codes)
