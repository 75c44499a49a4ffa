"""`attngraph demo`: what `attngraph compile` shows, of models at real size."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from attngraph.cli.compile import compile_target

DEMO = (
    ("attngraph.models.targets:decoder_lm", 1024),
    ("attngraph.models.targets:gpt2", 1024),
    ("attngraph.models.targets:causal_attention", 2048),
)
SMALL = (
    ("attngraph.models.targets:tiny_decoder_lm", 64),
    ("attngraph.models.targets:causal_attention", 128),
)
"""The same in less than a minute on two idle cores, to see that it works."""
_OF_TRANSFORMERS = "attngraph.models.targets:gpt2"


def run(options: argparse.Namespace) -> int:
    """Compile each in turn."""
    return max(code for code, _ in compile_all(DEMO, options))


def compile_all(
    models: Sequence[tuple[str, int]], options: argparse.Namespace
) -> list[tuple[int, dict[str, Any]]]:
    """Compile, check and time each model with so many tokens; says first how many there are and how long they
    take. Without transformers its model is left out, which is said before anything is measured.

    Returns:
        The exit code and the results of each.
    """
    if importlib.util.find_spec("transformers") is None:
        if any(target == _OF_TRANSFORMERS for target, _ in models):
            _say('without GPT-2, which needs transformers: pip install "attngraph[transformers]"')
        models = [model for model in models if model[0] != _OF_TRANSFORMERS]
    length = "under a minute" if models == SMALL else "a few minutes"
    shorter = "" if options.no_torch_compile else " (less with --no-torch-compile)"
    _say(f"{len(models)} model(s), {length} on two cores{shorter}")
    found = []
    for number, (target, tokens) in enumerate(models, 1):
        _say(f"model {number} of {len(models)}, {target}")
        found.append(compile_target(target, options, tokens))
    return found


def _say(text: str) -> None:
    print(f"attngraph: {text}", file=sys.stderr)
