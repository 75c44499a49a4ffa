"""What a call of a compiled model costs before its graph runs: finding out that nothing has changed.

    python -m workshop.bench.call_checks --json call_checks.json

Stock models of transformers with twelve layers. "check" looks up the graph of a call, state and all; "walk"
takes a fingerprint of the state anew, as after a change. Beside them stands a loop of Python that looks at
each parameter once, so that figures of different machines can be compared.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import attngraph
from attngraph.capture.guards import call_key
from attngraph.capture.state.fingerprint import fingerprint
from attngraph.capture.structure import flatten
from attngraph.runtime.measure import measure
from workshop.bench.processes import machine

LAYERS = 12


def models() -> dict[str, nn.Module]:
    from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

    wide: dict[str, Any] = {"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 1}
    llama = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, **wide,
    )  # fmt: skip
    gpt = GPT2Config(n_layer=LAYERS, n_embd=64, n_head=4, **wide)
    return {"GPT-2": GPT2Model(gpt).eval(), "Llama": LlamaModel(llama).eval()}


def row(name: str, model: nn.Module) -> dict[str, Any]:
    """The medians of one model, in microseconds."""
    ids = torch.randint(0, 100, (1, 8))
    compiled: Any = attngraph.compile(model, min_scores=0)
    with torch.no_grad():
        for _ in range(3):
            compiled(ids, use_cache=False)
        leaves, spec = flatten(((ids,), {"use_cache": False}))
        key_of = functools.partial(call_key, leaves, spec, compiled._fingerprints)
        graph = compiled._graphs.find(key_of, [ids])
        assert graph is not None, "the call is not served"
        parameters = list(model.parameters())
        work = {
            "check": lambda: compiled._graphs.find(key_of, [ids]),
            "walk": lambda: fingerprint([model], graph.scope),
            "loop": lambda: [(p.dtype, p.device, p.shape) for p in parameters],
        }
        times = measure(work, rounds=200)
    return {"model": name, "layers": LAYERS, **{what: 1e6 * found.seconds for what, found in times.items()}}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(arguments)
    print(machine())
    rows = [row(name, model) for name, model in models().items()]
    for found in rows:
        ratios = f"{found['check'] / found['walk']:.2f} of a walk, {found['check'] / found['loop']:.1f} loops"
        print(f"{found['model']}, {LAYERS} layers: {found['check']:.0f} us a call ({ratios})")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
