"""`attngraph demo`: what `attngraph compile` shows, of models at real size."""

import argparse
import importlib.util
import sys

from attngraph.cli.compile import compile_target

DEMO = (
    ("attngraph.models.targets:distilgpt2", 512),
    ("attngraph.models.targets:causal_attention", 2048),
)
MORE = (("attngraph.models.targets:gpt2", 1024), ("attngraph.models.targets:decoder_lm", 1024))
"""What `--full` adds."""


def run(options: argparse.Namespace) -> int:
    """Compile, check and time each in turn; says first how many there are and how long they take. Without
    transformers the models of it are left out, which is said before anything is measured."""
    models = [*DEMO, *(MORE if options.full else ())]
    if importlib.util.find_spec("transformers") is None:
        _say('without GPT-2, which needs transformers: pip install "transformers>=5"')
        models = [model for model in models if not model[0].endswith("gpt2")]
    minutes = "a few minutes" if options.full else "about a minute and a half"
    _say(f"{len(models)} model(s), {minutes} on two cores")
    codes = []
    for number, (target, tokens) in enumerate(models, 1):
        _say(f"model {number} of {len(models)}, {target}")
        codes.append(compile_target(target, options, tokens)[0])
    return max(codes)


def _say(text: str) -> None:
    print(f"attngraph: {text}", file=sys.stderr)
